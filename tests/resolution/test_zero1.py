"""ZeRO-1: moments use free mesh axes, and the compiled update keeps them there."""

from __future__ import annotations

import collections
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.plan import bytes_by_path
from shardwright.testing import cpu_mesh
from tests.raising import raises

optax = pytest.importorskip("optax")

P = jax.P
normal, ones = jax.nn.initializers.normal(0.1), jax.nn.initializers.ones
SPECS = {
    "up": sw.ArraySpec((16, 64), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE), normal),
    "down": sw.ArraySpec((64, 16), jnp.float32, (sw.MLP_INTERMEDIATE, sw.EMBED), normal),
    "norm": sw.ArraySpec((16,), jnp.float32, (sw.NORM,), ones),
}


def manager(preset: str, sizes: str, zero1: str = "-") -> sw.PartitionManager:
    return sw.PartitionManager(
        sw.Strategy.preset(preset) | sw.Strategy(policy={"zero1": zero1}), mesh=cpu_mesh(sizes)
    )


def updated(pm: sw.PartitionManager, tx: Any, *, steps: int = 3) -> tuple[Any, Any, Any]:
    """Parameters and state after a few updates with the same gradients everywhere, and the compiled
    update.
    """
    shardings = pm.shardings(SPECS)
    values = pm.init(SPECS, jax.random.key(0))
    state_shardings = pm.state_shardings(jax.eval_shape(tx.init, pm.abstract(SPECS)), SPECS)
    state = jax.jit(tx.init, out_shardings=state_shardings)(values)

    def update(gradients: Any, state: Any, values: Any) -> Any:
        updates, state = tx.update(gradients, state, values)
        return optax.apply_updates(values, updates), state

    jitted = jax.jit(
        update,
        in_shardings=(shardings, state_shardings, shardings),
        out_shardings=(shardings, state_shardings),
    )
    draw = np.random.default_rng(0)
    for _ in range(steps):
        gradients = jax.device_put(
            {name: draw.normal(size=spec.shape).astype(np.float32) for name, spec in SPECS.items()},
            shardings,
        )
        values, state = jitted(gradients, state, values)
    return values, state, jitted.lower(gradients, state, values).compile()


def collectives(compiled: Any) -> collections.Counter[str]:
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return collections.Counter(re.findall(rf"= .+? ({kinds})(?:-start)?\(", compiled.as_text()))


@pytest.mark.parametrize(
    ("preset", "sizes", "zero1", "specs"),
    [
        ("ddp", "dp:8", "dp", {"up": P("dp"), "down": P("dp"), "norm": P("dp")}),
        (
            "tensor",
            "dp:2,tp:4",
            "dp",
            {"up": P("dp", "tp"), "down": P(("tp", "dp")), "norm": P("dp")},
        ),
        (
            "fsdp_tp",
            "dp:2,fsdp:2,tp:2",
            "dp",
            {"up": P(("fsdp", "dp"), "tp"), "down": P(("tp", "dp"), "fsdp"), "norm": P("dp")},
        ),
        (
            "fsdp_tp",
            "dp:2,fsdp:2,tp:2",
            "dp+fsdp+tp",
            {
                "up": P(("fsdp", "dp"), "tp"),
                "down": P(("tp", "dp"), "fsdp"),
                "norm": P(("dp", "fsdp", "tp")),
            },
        ),
    ],
)
@pytest.mark.parametrize(
    "tx", [optax.adamw(1e-2), optax.sgd(1e-2, momentum=0.9)], ids=["adamw", "momentum"]
)
@pytest.mark.full(but=["adamw-ddp-dp:8-dp-specs0"])
def test_moments_stay_sharded_and_nothing_else_changes(
    preset: str, sizes: str, zero1: str, specs: Any, tx: Any
) -> None:
    pm, plain = manager(preset, sizes, zero1), manager(preset, sizes)
    values, state, compiled = updated(pm, tx)
    wanted, wanted_state, plain_compiled = updated(plain, tx)
    for part in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, dict)):
        if isinstance(part, dict):
            assert {name: leaf.sharding.spec for name, leaf in part.items()} == specs
    # The parameters have the values and shardings that they have without zero1.
    assert jax.tree.map(lambda leaf: leaf.sharding, values) == pm.shardings(SPECS)
    jax.tree.map(
        lambda value, other: np.testing.assert_allclose(value, other, rtol=1e-6, atol=1e-8),
        (values, state),
        (wanted, wanted_state),
    )
    # The program takes and returns shards of moments, holds no whole one, and gathers each
    # parameter's update once.
    held = bytes_by_path({"gradients": values, "state": state, "values": values})
    memory, plain_memory = compiled.memory_analysis(), plain_compiled.memory_analysis()
    assert memory.argument_size_in_bytes == held.per_device
    assert memory.argument_size_in_bytes < plain_memory.argument_size_in_bytes
    assert compiled.output_shardings[1] == jax.tree.map(lambda leaf: leaf.sharding, state)
    assert collectives(compiled) == {"all-gather": len(SPECS)}
    assert collectives(plain_compiled) == {}
    assert (
        bytes_by_path(state).select("mu|nu|trace").replicated
        < bytes_by_path(wanted_state).select("mu|nu|trace").replicated
    )


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.full
def test_gradients_may_be_sharded_like_the_state(axis_types: str) -> None:
    """Arrays of a role of their own: an update on shards alone, on both kinds of mesh."""
    ddp = sw.Strategy.preset("ddp") | sw.Strategy(policy={"zero1": "dp"})
    pm = sw.PartitionManager(ddp, mesh=cpu_mesh("dp:8", axis_types=axis_types))
    tx = optax.adamw(1e-2)

    def update(gradients: Any, state: Any, values: Any) -> Any:
        gradients, shards = pm.shard((gradients, values), (SPECS, SPECS), role="state")
        updates, state = tx.update(gradients, state, shards)
        return optax.apply_updates(values, pm.shard(updates, SPECS, role="param")), state

    with pm:
        values = pm.init(SPECS, jax.random.key(0))
        placed = pm.state_shardings(jax.eval_shape(tx.init, pm.abstract(SPECS)), SPECS)
        state = jax.jit(tx.init, out_shardings=placed)(values)
        gradients = jax.tree.map(jnp.ones_like, values)
        values, state = jax.jit(update, out_shardings=(pm.shardings(SPECS), placed))(
            gradients, state, values
        )
    assert {leaf.sharding.spec for leaf in state[0].mu.values()} == {P("dp")}
    assert {leaf.sharding.spec for leaf in values.values()} == {P()}
    alone = jax.tree.map(
        np.asarray, sw.PartitionManager(ddp, mesh=cpu_mesh("dp:1")).init(SPECS, jax.random.key(0))
    )
    updates, _ = tx.update(jax.tree.map(np.ones_like, alone), tx.init(alone), alone)
    jax.tree.map(
        lambda value, other: np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-8),
        values,
        optax.apply_updates(alone, updates),
    )


def test_moments_are_not_replicated() -> None:
    """State that cannot be sharded further is an error. With a fallback it is sharded like its
    parameter.
    """
    odd = SPECS | {"odd": sw.ArraySpec((6,), jnp.float32, (sw.NORM,), ones)}
    state = jax.eval_shape(
        optax.adamw(1e-2).init,
        jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), odd),
    )
    with raises(sw.IndivisibleError, "dp", 6, "dp=8", path="0/mu/odd", fix="zero1") as caught:
        manager("ddp", "dp:8", "dp").state_shardings(state, odd)
    assert [problem.path for problem in caught.value.problems] == ["0/mu/odd", "0/nu/odd"]
    shardings = bytes_by_path(state, manager("ddp", "dp:8", "dp | -").state_shardings(state, odd))
    assert {leaf.path for leaf in shardings.most_replicated().leaves} == {
        "0/count",
        "0/mu/odd",
        "0/nu/odd",
    }
    assert shardings.replicated == 7 * (4 + 2 * 6 * 4)
    plain = bytes_by_path(state, manager("ddp", "dp:8").state_shardings(state, odd))
    assert plain.replicated == 7 * plain.total


def test_factored_moments() -> None:
    """The kernel is sharded over (fsdp, tp), Adafactor's rows of it over fsdp only."""
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    state = jax.eval_shape(tx.init, manager("fsdp_tp", "fsdp:4,tp:2").abstract(SPECS))
    rows = {}
    for zero1 in ("-", "tp+fsdp | -"):
        shardings = manager("fsdp_tp", "fsdp:4,tp:2", zero1).state_shardings(state, SPECS)[0]
        rows[zero1] = shardings.v_row["up"].spec, shardings.v_col["up"].spec
    assert rows == {
        "-": (P("fsdp"), P("tp")),
        "tp+fsdp | -": (P(("fsdp", "tp")), P(("tp", "fsdp"))),
    }


def test_the_explanation_names_the_rule_and_the_dim() -> None:
    resolution = manager("ddp", "dp:8", "dp | -").explain(
        sw.EMBED, sw.MLP_INTERMEDIATE, role="state", shape=(16, 64)
    )
    assert (
        str(resolution).splitlines()[-1]
        == '  note: zero1 = "dp | -"   ([policy]): dp on dim 0 EMBED'
    )
    assert manager("ddp", "dp:8", "dp | -").sharding(sw.NORM, role="state", shape=(16,)).spec == P(
        "dp"
    )
