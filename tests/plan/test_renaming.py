"""A trace is planned under meshes whose axes have other names, and equals a trace of their own."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.interop.hf import programs, read_config
from shardwright.plan import PlanReport, Program
from shardwright.plan.planner import price, trace_program
from shardwright.plan.renaming import find_renaming

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}
MESHES = ("fsdp:8,tp:2", "dp:2,fsdp:4,tp:2", "fsdp:4,sp:2,tp:2", "dp:2,fsdp:2,sp:2,tp:2", "dp:16")


@pytest.mark.parametrize(
    ("before", "after", "old", "new", "expected"),
    [
        # one axis becomes two
        (P("fsdp"), P(("dp", "fsdp")), {"fsdp": 8}, {"dp": 2, "fsdp": 4}, {"fsdp": ("dp", "fsdp")}),
        (P(("dp", "fsdp")), P("fsdp"), {"dp": 2, "fsdp": 4}, {"fsdp": 8}, None),
        # another number of shards
        (P("fsdp"), P("fsdp"), {"fsdp": 8}, {"fsdp": 4, "tp": 2}, None),
        (P("tp"), P(), {"tp": 2}, {"dp": 2}, None),
        # an axis that no spec has takes the place of another such axis
        (P("dp"), P("dp"), {"dp": 2, "tp": 4}, {"dp": 2, "sp": 4}, {"dp": ("dp",), "tp": ("sp",)}),
        # axes of one device
        (P("dp"), P("fsdp"), {"dp": 2, "tp": 1}, {"fsdp": 2}, {"dp": ("fsdp",), "tp": ()}),
    ],
)
def test_renaming_of_one_spec(
    before: P, after: P, old: dict[str, int], new: dict[str, int], expected: Any
) -> None:
    assert find_renaming([(before, after)], old, new) == expected


def test_one_axis_cannot_become_two_different_ones() -> None:
    pairs = [(P("dp"), P("dp")), (P("dp"), P("tp"))]
    assert find_renaming(pairs, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2}) is None
    pairs = [(P("dp"), P("dp")), (P("tp"), P("dp"))]
    assert find_renaming(pairs, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2}) is None


@functools.cache
def decoder() -> dict[str, Program]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(CONFIG), encoding="utf-8")
        sizes = read_config(str(file), param=None, capacity=1.0)
    return programs(sizes, batch=16, length=128)


def managed(mesh: str, preset: str, mode: str) -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset(preset), mesh=sw.abstract_mesh(mesh), mode=mode)


@pytest.mark.full
@pytest.mark.parametrize("preset", ["fsdp_tp", "serve_tp", "sequence"])
@pytest.mark.parametrize("mode", ["train", "prefill", "decode"])
def test_plan_by_a_shared_trace_equals_its_own(mode: str, preset: str) -> None:
    program, shared = decoder()[mode], 0
    traces = []
    for mesh in MESHES:
        pm = managed(mesh, preset, mode)
        own = trace_program(pm, program)
        right = price(pm, own, program)
        for trace in traces:
            renaming = trace.renaming(pm)
            if renaming is not None:
                shared += 1
                assert plain(price(pm, trace, program, renaming=renaming)) == plain(right)
        traces.append(own)
    assert shared >= 1


def plain(report: PlanReport) -> Any:
    return dataclasses.replace(report.walked, memory=report.memory), report.memory.live, report.mesh


@pytest.mark.full
def test_search_with_shared_traces_equals_search_without() -> None:
    program = decoder()["decode"]
    alone = dataclasses.replace(program, any_mesh=False)
    options: Any = {"topology": "v5e:2x4", "mode": "decode", "vary": {"head": ("tp", "-")}}
    found, right = sw.search(program, **options), sw.search(alone, **options)
    # They find the failures in another order, so each may show another one.
    assert found.examples.keys() == right.examples.keys()
    found = dataclasses.replace(found, examples=right.examples)
    assert found == right
    assert found.to_json() == right.to_json()


def test_equal_weights_have_their_own_paths() -> None:
    """Under another strategy, `[[tensors]]` may tell two weights of one shape apart."""
    spec = sw.ArraySpec((8, 16), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))
    specs, hidden = {"a": spec, "b": spec}, (sw.BATCH, sw.EMBED)

    def f(params: Any, x: Any) -> Any:
        w = sw.gather(params, specs, path="")
        x = sw.shard(x, hidden)
        return x @ w["a"], x @ w["b"]

    weight = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    shapes = ({"a": weight, "b": weight}, jax.ShapeDtypeStruct((4, 8), jnp.float32))
    program = Program(f, shapes, (specs, hidden))
    mesh, preset = sw.abstract_mesh("fsdp:2,tp:2"), sw.Strategy.preset("fsdp_tp")
    plain_pm = sw.PartitionManager(preset, mesh=mesh)
    traced = trace_program(plain_pm, program)
    assert {event.path for event in price(plain_pm, traced, program).events} == {"a", "b"}
    exception = sw.Strategy.loads(
        '[[tensors]]\nmatch = "^b$"\nembed = "-"\nmlp_intermediate = "-"\n'
    )
    other = sw.PartitionManager(preset | exception, mesh=mesh)
    assert traced.fits(other)
    report = price(other, traced, program)
    assert [event.path for event in report.events] == ["a"]
    assert plain(report) == plain(price(other, trace_program(other, program), program))
