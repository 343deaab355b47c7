"""What a GPU takes: its own kernels, else blocks for many logits, and XLA for few."""

from __future__ import annotations

import dataclasses

import jax
import pytest

import shardwright as sw
from shardwright.attention import explain
from shardwright.attention.choose import Choice, choose
from shardwright.manager import context
from shardwright.testing import cpu_mesh
from tests.raising import raises

RULES = '[rules]\nbatch = "dp"\nhead = "tp"\nkv_head = "tp"\n'


def chosen(length: int, *, batch: int = 1, heads: int = 16, mesh: str = "dp:1") -> Choice:
    """Choose for packed sequences, which cuDNN refuses."""
    shapes = ((batch, length, heads, 64), *[(batch, length, heads, 64)] * 2)
    ids = jax.ShapeDtypeStruct((batch, length), "int32")
    with sw.PartitionManager(sw.Strategy.loads(RULES), mesh=cpu_mesh(mesh)):
        arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
        call = explain(*arrays, mode="train", causal=True, segment_ids=ids).call
    return choose(dataclasses.replace(call, platform="gpu"))


def test_many_logits_take_blocks() -> None:
    choice = chosen(16384)
    assert (choice.name, choice.alternatives[0]) == ("blockwise", "sdpa")
    assert choice.why == (
        "memory linear in length: all logits at once would take 16384.0 MiB per device, more "
        "than 64"
    )


def test_few_logits_take_sdpa() -> None:
    choice = chosen(1024)  # 16 heads of 4 MiB
    assert (choice.name, choice.alternatives[0]) == ("sdpa", "blockwise")
    assert choice.why == "JAX's attention by XLA: all 64.0 MiB of logits per device at once"


@pytest.mark.parametrize(
    ("mesh", "name"),
    [("dp:1", "blockwise"), ("dp:2", "blockwise"), ("tp:4", "sdpa"), ("dp:2,tp:2", "sdpa")],
)
def test_limit_counts_per_device(mesh: str, name: str) -> None:
    assert chosen(1024, batch=4, mesh=mesh).name == name  # 256 MiB in all


@pytest.mark.parametrize(("name", "mode"), [("triton_decode", "decode"), ("cudnn", "train")])
def test_a_plan_counts_another_kernel_than_the_named_one(name: str, mode: str) -> None:
    arrays = [jax.ShapeDtypeStruct((2, 16, 4, 64), "bfloat16")] * 3
    call = explain(*arrays, mode=mode, causal=True, platform="gpu").call
    with context.TARGET("gpu"):
        choice = choose(call, implementation=name)
    assert (choice.name, choice.why) == ("sdpa", f"a plan counts it in place of {name}")
    # What the kernel cannot compute is refused in a plan too.
    with context.TARGET("gpu"):
        refused = choose(dataclasses.replace(call, dtype="float32"), implementation=name)
    assert not refused.name


def test_unknown_platform() -> None:
    arrays = [jax.ShapeDtypeStruct((2, 16, 4, 64), "bfloat16")] * 3
    with raises(sw.AttentionError, "cuda", path="platform", fix="gpu"):
        explain(*arrays, mode="train", platform="cuda")


def test_decode_takes_the_kernel_that_reads_a_cache_once() -> None:
    shapes = ((4, 1, 16, 64), *[(4, 4096, 4, 64)] * 2)
    rows = {"positions": (4, 1), "kv_positions": (4, 4096)}
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    positions = {name: jax.ShapeDtypeStruct(shape, "int32") for name, shape in rows.items()}
    call = explain(*arrays, mode="decode", causal=True, **positions).call
    choice = choose(dataclasses.replace(call, platform="gpu"))
    assert choice.name == "triton_decode"
    assert choice.why == "it reads each key once, in the order in which a cache stores it"
    # Without it, the next one reads the cache in blocks.
    wide = choose(dataclasses.replace(call, platform="gpu", dtype="float32"))
    refused = {refusal.name: refusal.reasons for refusal in wide.refusals}
    assert wide.name == "sdpa"
    assert refused["triton_decode"] == (
        "it computes in bfloat16 and float16, and the call is in float32",
    )
