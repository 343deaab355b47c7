"""A planned training step under `zero1`, beside the step that `jit_step` compiles."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import optax
import pytest

import shardwright as sw
from shardwright.cli.programs import plan_program, read_programs
from shardwright.plan import Program
from shardwright.plan.collectives.read import read_collectives
from shardwright.plan.planner import PlanReport
from shardwright.plan.verify.run import verify_plan
from shardwright.vocabulary.modes import MODE_TRAIN
from tests.plan.against_xla import FOLDED, planned_bytes
from tests.plan.test_walk import HIDDEN, SPECS, X, gradient, shapes
from tests.plan.tpu_programs import train_program
from tests.raising import raises
from tests.tpu_compile import MARKS

ADAM = optax.adamw(1e-3)
PARAMS = shapes(SPECS)
STATE = jax.eval_shape(ADAM.init, PARAMS)
AXES = sw.annotate_state(STATE, SPECS)
HOLDS = ("parameters", "optimizer", "inputs")
MESHES = {
    "single": "dp:1",
    "ddp": "dp:8",
    "fsdp": "dp:2,fsdp:4",
    "fsdp_pp": "pp:2,dp:2,fsdp:2",
    "fsdp_tp": "dp:2,fsdp:2,tp:2",
    "fsdp_tp_sp": "dp:2,fsdp:2,tp:2",
    "tensor": "dp:2,tp:4",
    "vision": "dp:2,fsdp:2,sp:2",
    "sequence": "dp:2,fsdp:2,sp:2",
    "moe_ep": "dp:2,fsdp:2,ep:2",
    "serve_tp": "dp:2,tp:4",
    "serve_long_context": "dp:2,tp:2,sp:2",
}


def step(params: Any, state: Any, x: Any) -> Any:
    updates, state = ADAM.update(gradient(params, x), state, params)
    return optax.apply_updates(params, updates), state


def momentum(params: Any, moments: Any, x: Any) -> Any:
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradient(params, x))
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments


def update(params: Any, x: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient(params, x))


def with_zero1(preset: str) -> sw.Strategy:
    return sw.Strategy.preset(preset) | sw.Strategy(policy={"zero1": "dp | -"})


def planned(pm: sw.PartitionManager, function: Any = step, **options: Any) -> PlanReport:
    given: dict[str, Any] = {"specs": (SPECS, AXES, HIDDEN), "outputs": (SPECS, AXES), **options}
    state = STATE if function is step else PARAMS
    return pm.plan(function, PARAMS, state, X, holds=HOLDS, donated=(0, 1), **given)


def test_all_presets_are_here() -> None:
    assert set(MESHES) == set(sw.Strategy.presets())


@pytest.mark.full(but=["sequence-False", "serve_long_context-True"])
@pytest.mark.parametrize("zero1", [True, False])
@pytest.mark.parametrize("preset", MESHES)
def test_plan_equals_the_compiled_step(preset: str, zero1: bool) -> None:
    strategy = with_zero1(preset) if zero1 else sw.Strategy.preset(preset)
    pm = sw.PartitionManager(strategy, mesh=sw.create_mesh(MESHES[preset]), mode="train")
    report = planned(pm)
    state = (pm.abstract(SPECS), pm.abstract_state(ADAM, SPECS))
    jitted = pm.jit_step(lambda state, x: (step(*state, x), 0), state, HIDDEN)
    compiled = jitted.lower(state, X).compile()
    sent: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for each in read_collectives(compiled, pm.mesh):
        sent[FOLDED.get(str(each.kind), str(each.kind)), each.mesh_axes] += each.total_bytes or 0
    # Along the largest dim, a device has parts of tiles of one gradient. The plan says that XLA may
    # then sum it in two ways.
    doubts = [choice.fix for choice in report.walked.choices]
    assert bool(doubts) == (preset == "vision"), doubts
    assert planned_bytes(report) == sent or "whole tiles" in doubts[0]
    assert report.state.of().per_device == compiled.memory_analysis().argument_size_in_bytes


def test_moments_of_equal_annotations_are_refused() -> None:
    """The outputs of a step with plain momentum: weights and moments have the same `ArraySpec`s."""
    pm = sw.PartitionManager(with_zero1("ddp"), mesh=sw.abstract_mesh("dp:8"), mode="train")
    same = {"specs": (SPECS, SPECS, HIDDEN), "outputs": (SPECS, SPECS)}
    with raises(
        sw.StrategyError, "role", "dp", path="outputs/0/down", fix="sw.annotate_state"
    ) as caught:
        planned(pm, momentum, **same)
    (problem, *_) = caught.value.problems
    assert problem.path == "outputs/0/down"
    assert "sw.annotate_state(state, specs)" in problem.fix
    moments = sw.annotate_state(PARAMS, SPECS)
    told = planned(pm, momentum, specs=(SPECS, moments, HIDDEN), outputs=(SPECS, moments))
    assert sum(str(event.kind) == "all_gather" for event in told.events) == len(SPECS)
    # Without zero1, weights and moments have one sharding, so nothing is unclear.
    without = sw.PartitionManager(sw.Strategy.preset("ddp"), mesh=pm.mesh, mode="train")
    assert {str(event.kind) for event in planned(without, momentum, **same).events} == {
        "all_reduce"
    }


def test_weights_annotated_by_axes_stay_sharded() -> None:
    axes = {name: spec.axes for name, spec in SPECS.items()}
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.abstract_mesh("fsdp:8"))
    given = {"specs": (axes, HIDDEN), "holds": ("parameters", "inputs")}
    report = pm.plan(update, PARAMS, X, outputs=axes, **given)
    expected = pm.plan(update, PARAMS, X, specs=(SPECS, HIDDEN), outputs=SPECS)
    assert planned_bytes(report) == planned_bytes(expected)
    assert report.memory == expected.memory


def test_search_compares_zero1_by_its_collectives() -> None:
    program = Program(step, (PARAMS, STATE, X), (SPECS, AXES, HIDDEN), (SPECS, AXES), HOLDS, (0, 1))
    found = sw.search(
        program,
        {"ddp": sw.Strategy.preset("ddp")},
        topology="v5e:2x4",
        axes=("dp",),
        vary={"policy.zero1": (None, "dp | -")},
    )
    rows = {
        each.settings.get("policy.zero1"): planned_bytes(each.reports[MODE_TRAIN])
        for each in found.candidates
    }
    alone = {None: sw.Strategy.preset("ddp"), "dp | -": with_zero1("ddp")}
    assert rows == {
        name: planned_bytes(planned(sw.PartitionManager(each, mesh=sw.abstract_mesh("dp:8"))))
        for name, each in alone.items()
    }


@pytest.mark.full
def test_reference_decoder_updates_its_shards(tmp_path: Path) -> None:
    """Two moments per weight, `(moment, moment)`, with the annotations of the weights."""
    sizes = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(sizes), encoding="utf-8")
    program = read_programs(str(file), "train", devices=8)[MODE_TRAIN]
    pm = sw.PartitionManager(with_zero1("ddp"), mesh=sw.abstract_mesh("dp:8"), mode="train")
    report = plan_program(program, pm, "train")
    gathers = [event for event in report.events if str(event.kind) == "all_gather"]
    weights = report.state.of("parameters")
    assert sum(each.logical_bytes for each in gathers) == weights.total


class TestOnTpu:
    """Compiled for TPUs that are not there, in bfloat16."""

    pytestmark = MARKS

    @pytest.mark.parametrize("zero1", [True, False])
    # Under serve_long_context, which is not for training, the compiler adds over dp and sp at once,
    # with or without zero1; the plan, and the compiler for CPUs, over one after the other.
    @pytest.mark.parametrize("preset", sorted({*MESHES} - {"single", "serve_long_context"}))
    def test_plan_equals_the_compiled_step(self, preset: str, zero1: bool) -> None:
        strategy = with_zero1(preset) if zero1 else sw.Strategy.preset(preset)
        mesh = sw.abstract_mesh(MESHES[preset])
        pm = sw.PartitionManager(strategy, mesh=mesh, mode="train")
        found = verify_plan(pm, train_program(), topology="v5e:2x4")
        # A reduce-scatter of rows that do not fill tiles is padded.
        assert all(row.equal for row in found.traffic), found.traffic
        assert found.compiled.peak is not None
        assert found.report.memory.low <= found.compiled.peak <= 1.05 * found.report.memory.high
