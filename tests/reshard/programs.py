"""Watch what moves compile, run and send."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from shardwright.plan.collectives.read import read_collectives
from shardwright.reshard import leaf

PROGRAMS = ("zeros_program", "move_program", "split_program", "join_program")
# Such as `u16[2,8]{1,0} collective-permute(...), source_target_pairs={{0,1},{1,0}}`.
PERMUTE = re.compile(
    r"= \(?(\w+)\[([\d,]*)\].* collective-permute(?:-start)?\(.*source_target_pairs=\{(.*?)\}\}"
)
WIDTH = {"pred": 1, "c64": 8, "c128": 16}


@dataclasses.dataclass(slots=True)
class Watched:
    """What moves did.

    Attributes:
      compiled: Names of the programs, one per compilation.
      sent: Bytes that all programs and transfers sent, by their HLO.
      temporary: The most temporaries of a program, over all its devices.
    """

    compiled: list[str] = dataclasses.field(default_factory=list)
    sent: int = 0
    temporary: int = 0


def permuted_bytes(text: str) -> int:
    """Bytes that all permutes of a program send to other devices."""
    total = 0
    for dtype, shape, pairs in PERMUTE.findall(text):
        width = WIDTH.get(dtype) or int(re.findall(r"\d+", dtype)[0]) // 8
        size = math.prod(int(part) for part in shape.split(",") if part) * width
        found = re.findall(r"(\d+),(\d+)", pairs)
        total += size * sum(sender != receiver for sender, receiver in found)
    return total


def sent_bytes(compiled: Any, mesh: Mesh) -> int:
    """Bytes that all devices send in one run of a program."""
    text = compiled.as_text()
    found = read_collectives(compiled, mesh=mesh)
    grouped = sum(each.total_wire_bytes for each in found if each.kind != "permute")
    return grouped * mesh.size + permuted_bytes(text)


@contextlib.contextmanager
def watch(patch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Count what the moves inside compile, run and send."""
    watched = Watched()
    kept: dict[int, int] = {}

    def watching(name: str) -> Callable[..., Any]:
        original = getattr(leaf, name)

        def program(mesh: Mesh, *about: Any) -> Callable[..., Any]:
            own = original(mesh, *about)

            def run(*arguments: Any) -> Any:
                new = own.compiled is None
                result = own(*arguments)
                if new and own.compiled is not None:
                    watched.compiled.append(name)
                if own.compiled is not None and id(own) not in kept:
                    kept[id(own)] = sent_bytes(own.compiled, mesh)
                    temporary = own.compiled.memory_analysis().temp_size_in_bytes * mesh.size
                    watched.temporary = max(watched.temporary, temporary)
                watched.sent += kept.get(id(own), 0)
                return result

            return run

        return program

    def send(blocks: Any, devices: Any) -> Any:
        watched.sent += sum(
            np.prod(block.shape, dtype=int) * block.dtype.itemsize for block in blocks
        )
        for block, device in zip(blocks, devices, strict=True):
            assert not isinstance(block, jax.Array) or block.devices() != {device}
        return original_send(blocks, devices)

    original_send = leaf.send_blocks
    with patch.context() as inner:
        for name in PROGRAMS:
            inner.setattr(leaf, name, watching(name))
        inner.setattr(leaf, "send_blocks", send)
        yield watched
