"""A bound on the Python functions of this library that one traced attention call runs."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.attention import dot_product_attention, run
from shardwright.testing import cpu_mesh

PACKAGE = str(Path(sw.__file__).parent)
MAX_FRAMES, MAX_CALLS = 15, 300


@dataclasses.dataclass
class Count:
    """Calls of functions that the package defines, and the deepest stack of them."""

    calls: int = 0
    stack: list[str] = dataclasses.field(default_factory=list)
    deepest: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if event == "return":
            self.stack.pop()
            return
        self.calls += 1
        self.stack.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
        if len(self.stack) > len(self.deepest):
            self.deepest = list(self.stack)


def count(trace: Callable[[], object]) -> Count:
    counter = Count()
    sys.setprofile(counter)
    try:
        trace()
    finally:
        sys.setprofile(None)
    return counter


@functools.cache
def manager() -> sw.PartitionManager:
    """A manager without an equal: JAX would compare the two in Python at every look-up."""
    auto = sw.Strategy.loads('[attention]\ntrain = "auto"\n', source="call_budget.toml")
    strategy = sw.Strategy.preset("fsdp_tp") | auto
    return sw.PartitionManager(strategy, mesh=cpu_mesh("fsdp:2,tp:4")).for_mode("train")


@pytest.mark.parametrize("kernel", ["kernel traced again", "kernel known"])
@pytest.mark.parametrize("length", [64, 1024])
def test_causal_call_within_budget(length: int, kernel: str) -> None:
    """The third trace; with short lengths of one block, and with loops over blocks."""
    pm = manager()
    q, k = jnp.ones((4, length, 8, 16)), jnp.ones((4, length, 8, 16))

    def trace() -> Any:
        return jax.jit(lambda q, k, v: dot_product_attention(q, k, v, causal=True)).trace(q, k, k)

    with pm:
        trace()
        trace()
        if kernel == "kernel traced again":
            run.run.clear_cache()
        counted = count(trace)
    assert len(counted.deepest) <= MAX_FRAMES, "\n".join(counted.deepest)
    assert counted.calls <= MAX_CALLS
    assert ("blockwise.py:run" in "\n".join(counted.deepest)) == (kernel == "kernel traced again")
