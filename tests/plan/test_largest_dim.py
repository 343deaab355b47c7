"""A planned training step under `largest_dim`, beside the compiled one, and in a search."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax

import shardwright as sw
from shardwright.plan import Program
from shardwright.plan.collectives.read import read_collectives
from shardwright.plan.planner import PlanReport
from tests.plan.against_xla import FOLDED, planned_bytes

# No dim is a multiple of 128: a plan models how TPUs sum matrices of whole tiles.
SPECS = {
    "up": sw.ArraySpec((48, 96), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE)),
    "down": sw.ArraySpec((96, 48), jnp.float32, (sw.MLP_INTERMEDIATE, sw.EMBED)),
}
HIDDEN = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
X = jax.ShapeDtypeStruct((8, 16, 48), jnp.float32)
PARAMS = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in SPECS.items()}
ADAM = optax.adamw(1e-3)
STATE = jax.eval_shape(ADAM.init, PARAMS)
AXES = sw.annotate_state(STATE, SPECS)
HOLDS = ("parameters", "optimizer", "inputs")
BASE = sw.Strategy.preset("fsdp") | sw.Strategy(params={"embed": "-"})
ANY_DIM = BASE | sw.Strategy(policy={"largest_dim": "fsdp | -", "zero1": "dp | -"})


def loss(params: Any, x: Any) -> Any:
    w = sw.gather(params, SPECS)
    inner = sw.shard(jnp.tanh(x @ w["up"]), sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
    return sw.shard(inner @ w["down"], HIDDEN).sum()


def step(params: Any, state: Any, x: Any) -> Any:
    updates, state = ADAM.update(jax.grad(loss)(params, x), state, params)
    return optax.apply_updates(params, updates), state


def planned(pm: sw.PartitionManager) -> PlanReport:
    given: dict[str, Any] = {"specs": (SPECS, AXES, HIDDEN), "outputs": (SPECS, AXES)}
    return pm.plan(step, PARAMS, STATE, X, holds=HOLDS, donated=(0, 1), **given)


def test_plan_equals_the_compiled_step() -> None:
    pm = sw.PartitionManager(ANY_DIM, mesh=sw.create_mesh("dp:2,fsdp:4"), mode="train")
    report = planned(pm)
    state = (pm.abstract(SPECS), pm.abstract_state(ADAM, SPECS))
    jitted = pm.jit_step(lambda state, x: (step(*state, x), 0), state, HIDDEN)
    compiled = jitted.lower(state, X).compile()
    sent: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for each in read_collectives(compiled, pm.mesh):
        sent[FOLDED.get(str(each.kind), str(each.kind)), each.mesh_axes] += each.total_bytes or 0
    assert planned_bytes(report) == sent
    assert report.state.of().per_device == compiled.memory_analysis().argument_size_in_bytes
    weights = report.state.of("parameters")
    assert weights.per_device * 4 == weights.total


def test_a_plan_names_the_policy_that_stored_a_gathered_weight() -> None:
    pm = sw.PartitionManager(ANY_DIM, mesh=sw.abstract_mesh("fsdp:8"), mode="train")
    gathers = [event for event in planned(pm).events if str(event.kind) == "all_gather"]
    assert gathers
    assert {rule for event in gathers for rule in event.rules} == {'largest_dim = "fsdp | -"'}


def test_a_plan_says_why_a_weight_is_replicated() -> None:
    small = ANY_DIM | sw.Strategy(policy={"largest_dim_min_size": 10**9})
    pm = sw.PartitionManager(small, mesh=sw.abstract_mesh("fsdp:8"), mode="train")
    causes = {cause for leaf in planned(pm).state.leaves for cause in leaf.causes if cause.rule}
    assert {cause.rule for cause in causes} >= {'largest_dim = "fsdp | -"'}
    assert any("largest_dim_min_size = 1000000000" in cause.why for cause in causes)


def test_search_compares_it() -> None:
    program = Program(step, (PARAMS, STATE, X), (SPECS, AXES, HIDDEN), (SPECS, AXES), HOLDS, (0, 1))
    found = sw.search(
        program,
        {"base": BASE},
        topology="v5e:2x4",
        axes=("fsdp",),
        vary={"policy.largest_dim": (None, "fsdp | -")},
        pins=["policy.largest_dim_min_size = 8"],
    )
    held = {
        candidate.settings.get("policy.largest_dim"): candidate.report.state.of("parameters")
        for candidate in found.candidates
    }
    assert held["fsdp | -"].per_device * 8 == held[None].per_device
