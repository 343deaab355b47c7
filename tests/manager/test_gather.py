"""`gather`: used weights forward, stored cotangents backward, in every program that trains."""

from __future__ import annotations

import re
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from tests.manager.programs import (
    AXIS_TYPES,
    RULES,
    assert_like,
    make_manager,
    numbers,
    sharded_over,
)
from tests.raising import facts, raises

KERNEL = (sw.EMBED, sw.MLP_INTERMEDIATE)
OTHER = RULES.replace('embed = "dp"', 'embed = "-"')


def test_specs_of_use_and_storage() -> None:
    pm = make_manager()
    assert pm.resolve(*KERNEL, role="param") == jax.P("dp", "tp")
    use = pm.explain(*KERNEL, role="use")
    assert use.spec == jax.P(None, "tp")
    assert use.decisions[0].gathered == ("dp",)
    assert use.decisions[1].gathered == (), "tp is not in policy.gather"


def constraints(text: str) -> list[str]:
    return re.findall(r"sdy.sharding_constraint \S+ <@mesh, (\[.*?\])>", text)


def test_the_lowered_program_constrains_both_ways() -> None:
    pm = make_manager()
    w = jnp.zeros((8, 8))
    forward = jax.jit(lambda w: pm.gather(w, *KERNEL)).lower(w).as_text()
    assert constraints(forward) == ['[{}, {"tp"}]']
    both = jax.jit(jax.grad(lambda w: (pm.gather(w, *KERNEL) ** 2).sum())).lower(w).as_text()
    assert constraints(both) == ['[{}, {"tp"}]', '[{"dp"}, {"tp"}]']


def test_collectives_forward_and_backward() -> None:
    """With the batch over dp, the step gathers the weight and scatters its gradient, once each."""
    pm = make_manager("auto", sizes="dp:8,tp:1")
    x, w = numbers(16, 32), numbers(32, 64)

    def loss(w: Any, x: Any) -> Any:
        return (pm.shard(x @ pm.gather(w, *KERNEL), sw.BATCH, sw.EMPTY) ** 2).sum()

    placed = pm.shard(w, *KERNEL, role="param"), pm.shard(x, sw.BATCH, sw.EMPTY)
    forward = jax.jit(loss).lower(*placed).compile().as_text()
    assert len(re.findall(r" all-gather(?:-start)?\(", forward)) == 1
    step = jax.jit(jax.grad(loss)).lower(*placed).compile()
    assert sharded_over(step(*placed), pm.mesh, "dp")
    assert len(re.findall(r" (?:all-reduce|reduce-scatter)(?:-start)?\(", step.as_text())) >= 1
    assert_like(step(*placed), jax.grad(lambda w: ((x @ w) ** 2).sum())(w))


def layers(pm: Any, x: Any, stack: Any, *, remat: bool, gather: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ gather(w["up"], *KERNEL)) @ gather(w["down"], *reversed(KERNEL)), None

    return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, stack)[0]


@pytest.mark.parametrize("remat", [False, True], ids=["kept", "remat"])
@pytest.mark.parametrize("kind", ["auto"])
@pytest.mark.full
def test_inside_scan_over_stacked_layers(kind: str, remat: bool) -> None:
    pm = make_manager(kind)
    specs = {"up": (3, 8, 16), "down": (3, 16, 8)}
    stack = {name: numbers(*shape) for name, shape in specs.items()}
    axes = {"up": (sw.LAYERS, *KERNEL), "down": (sw.LAYERS, *reversed(KERNEL))}
    x = numbers(4, 8)

    def loss(stack: Any, x: Any, gather: Any) -> Any:
        return (layers(pm, x, stack, remat=remat, gather=gather) ** 2).sum()

    placed = pm.shard(stack, axes, role="param")
    assert placed["up"].sharding.spec == jax.P(None, "dp", "tp")
    with pm:
        actual = jax.jit(jax.grad(lambda stack, x: loss(stack, x, sw.gather)))(
            placed, pm.shard(x, sw.BATCH, sw.EMPTY)
        )
    assert_like(actual, jax.grad(lambda stack: loss(stack, x, lambda w, *_: w))(stack))
    assert sharded_over(actual["up"], pm.mesh, None, "dp", "tp")
    assert sharded_over(actual["down"], pm.mesh, None, "tp", "dp")


@pytest.mark.parametrize("kind", list(AXIS_TYPES))
@pytest.mark.parametrize("later", ["outside", "another manager", "another thread"])
@pytest.mark.full(but=["another thread-tp explicit", "outside-auto", "another manager-explicit"])
def test_backward_reads_no_ambient_manager(kind: str, later: str) -> None:
    pm, other = make_manager(kind), make_manager(kind, text=OTHER)
    w = pm.shard(numbers(8, 12), *KERNEL, role="param")
    with pm:
        y, vjp = jax.vjp(lambda w: jnp.sin(sw.gather(w, *KERNEL)), w)
    assert sharded_over(y, pm.mesh, None, "tp")
    if later == "outside":
        (actual,) = vjp(y)
    elif later == "another manager":
        with other:
            (actual,) = vjp(y)
    else:
        box: list[Any] = []
        thread = threading.Thread(target=lambda: box.append(vjp(y)[0]))
        thread.start()
        thread.join()
        (actual,) = box
    assert sharded_over(actual, pm.mesh, "dp", "tp"), (
        "as stored under the manager that was ambient in the forward pass"
    )
    np.testing.assert_allclose(
        actual, np.cos(numbers(8, 12)) * np.sin(numbers(8, 12)), rtol=2e-5, atol=1e-6
    )


def test_trees_and_paths() -> None:
    text = RULES + '[[tensors]]\nmatch = "lm_head/.*"\nembed = "-"\n'
    pm = make_manager(text=text)
    tree = {"mlp": {"kernel": numbers(8, 8)}, "lm_head": {"kernel": numbers(8, 8)}}
    actual = jax.jit(
        jax.grad(
            lambda tree: sum(
                (leaf**2).sum() for leaf in jax.tree.leaves(pm.gather(tree, KERNEL, path=""))
            )
        )
    )(tree)
    assert sharded_over(actual["mlp"]["kernel"], pm.mesh, "dp", "tp")
    assert sharded_over(actual["lm_head"]["kernel"], pm.mesh, None, "tp")
    gradient = jax.jit(
        jax.grad(lambda w: (pm.gather(w, *KERNEL, path="lm_head/kernel") ** 2).sum())
    )
    assert sharded_over(gradient(numbers(8, 8)), pm.mesh, None, "tp")
    under = jax.jit(
        jax.grad(lambda tree: (pm.gather(tree, KERNEL, path="lm_head")["kernel"] ** 2).sum())
    )
    assert sharded_over(under({"kernel": numbers(8, 8)})["kernel"], pm.mesh, None, "tp")


def test_path_required_by_tensor_entries() -> None:
    """Without the path, the weight and its gradient would not be sharded as `shardings` says."""
    pm = make_manager(text=RULES + '[[tensors]]\nmatch = "lm_head"\nembed = "-"\n')
    says = facts("lm_head", path=..., fix="layers/mlp/up")
    for place in (
        lambda: pm.gather(numbers(8, 8), *KERNEL),
        lambda: pm.gather({"kernel": numbers(8, 8)}, KERNEL),
        lambda: pm.gather(numbers(8, 8), sw.ColumnWise),
        lambda: pm.shard(numbers(8, 8), *KERNEL, role="param"),
    ):
        with raises(sw.StrategyError, says) as caught:
            place()
        assert 'embed = "-"' in caught.value.rule
    assert pm.shard(numbers(8, 8), sw.BATCH, sw.EMBED).sharding.spec == jax.P("dp", "tp"), (
        "an activation is covered by no entry"
    )
    assert pm.gather(numbers(8, 8), sw.VOCAB, sw.EMPTY).sharding.spec == jax.P("tp"), (
        "the entry names no axis of it"
    )
    assert pm.hint(numbers(8, 8), *KERNEL, role="param").sharding.spec == jax.P("dp", "tp"), (
        "a hint does its best"
    )


def test_path_required_of_fitted_ranks() -> None:
    pm = make_manager(text=RULES + 'rank = "fit"\n[[tensors]]\nmatch = "lm_head"\nvocab = "-"\n')
    assert pm.gather(numbers(8), *KERNEL).sharding.spec == jax.P()
    with raises(sw.StrategyError, "lm_head", fix="layers/mlp/up"):
        pm.gather(numbers(8), sw.VOCAB, sw.EMPTY)


def test_weight_used_as_stored() -> None:
    """`gather = "-"` is still a constraint both ways, with one spec."""
    pm = make_manager(text=RULES.replace('gather = "dp"', 'gather = "-"'))
    text = (
        jax.jit(jax.grad(lambda w: (pm.gather(w, *KERNEL) ** 2).sum()))
        .lower(numbers(8, 8))
        .as_text()
    )
    assert constraints(text) == ['[{"dp"}, {"tp"}]'] * 2


def test_layouts_gather_like_their_axes() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    w = numbers(8, 12)
    for layout, spec in ((sw.ColumnWise, jax.P(None, "tp")), (sw.RowWise, jax.P("tp"))):
        assert pm.gather(w, layout).sharding.spec == spec
    assert pm.gather(numbers(12), sw.ColumnWise.bias).sharding.spec == jax.P("tp")
    stacked = pm.gather(numbers(3, 8, 12), sw.stacked(sw.ColumnWise))
    assert stacked.sharding.spec == jax.P(None, None, "tp")


def test_errors_name_the_path() -> None:
    pm = make_manager()
    with raises(
        sw.IndivisibleError,
        "tp=4",
        path="mlp/kernel",
        dim=1,
        axis="MLP_INTERMEDIATE",
        size=6,
        fix="mlp_intermediate",
    ):
        pm.gather(numbers(8, 6), *KERNEL, path="mlp/kernel")
    with raises(sw.NoManagerError, "gather", "PartitionManager", fix="pm.gather"):
        sw.gather(numbers(8, 8), *KERNEL)
