"""Optimizer state of every optax transformation follows its parameters."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.testing import cpu_mesh
from shardwright.trees import initialize, paths
from tests.small_model import KERNEL, manager, normal, ones, spec_tree
from tests.small_model import specs as params

optax = pytest.importorskip("optax")
contrib = pytest.importorskip("optax.contrib")

P = jax.P


def specs_by_path(shardings: Any) -> dict[str, Any]:
    return {
        paths.path_text(path): sharding.spec
        for path, sharding in jax.tree_util.tree_flatten_with_path(shardings)[0]
    }


def state_of(tx: Any, specs: Any) -> Any:
    return jax.eval_shape(tx.init, initialize.abstract(specs))


MASK = {"embed": True, "blocks": [{"up": True}, {"up": False}], "norm": False}
LABELS = {"embed": "adam", "blocks": [{"up": "adam"}, {"up": "sgd"}], "norm": "sgd"}


def chained() -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def multi() -> Any:
    return optax.multi_transform(
        {"adam": optax.adam(1e-3), "sgd": optax.sgd(1e-2, momentum=0.9)}, LABELS
    )


# State that is a copy of the parameters, or scalars.
COPIES: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(1e-2),
    "sgd momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(1e-3, weight_decay=0.1),
    "adan": lambda: optax.adan(1e-3),
    "lion": lambda: optax.lion(1e-4),
    "rmsprop": lambda: optax.rmsprop(1e-3, momentum=0.9, centered=True),
    "lamb": lambda: optax.lamb(1e-3),
    "adagrad": lambda: optax.adagrad(1e-2),
    "novograd": lambda: optax.novograd(1e-2),
    "ema": lambda: optax.ema(0.9),
    "trust ratio": lambda: optax.chain(optax.trace(0.9), optax.scale_by_trust_ratio()),
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(1e-3, 100)),
    "chain": chained,
    "masked": lambda: optax.masked(optax.adam(1e-3), MASK),
    "multi_transform": multi,
    "accumulated": lambda: optax.MultiSteps(
        optax.adam(1e-3), every_k_schedule=2
    ).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.constant_schedule(1e-3)
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
    "noise": lambda: optax.chain(
        optax.add_noise(0.1, 0.55, key=jax.random.key(0)), optax.sgd(1e-2)
    ),
    "linesearch": lambda: optax.chain(
        optax.sgd(1e-2), optax.scale_by_backtracking_linesearch(max_backtracking_steps=3)
    ),
    "schedule_free": lambda: contrib.schedule_free_adamw(1e-3),
    "prodigy": contrib.prodigy,
    "madgrad": lambda: contrib.madgrad(1e-3),
    "plateau": lambda: optax.chain(optax.adam(1e-3), contrib.reduce_on_plateau()),
    "sam": lambda: contrib.sam(optax.adam(1e-3), optax.sgd(1e-2)),
    "privacy": lambda: contrib.differentially_private_aggregate(1.0, 1.0, key=jax.random.key(0)),
}


@pytest.mark.parametrize("name", list(COPIES))
def test_state_follows_its_parameters(name: str) -> None:
    """Structure equal to tx.init's, and no moment of a sharded parameter replicated."""
    state = state_of(COPIES[name](), params())
    shardings = manager().state_shardings(state, params())
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    by_shape = {(64, 16): P("tp", "fsdp"), (16, 32): P("fsdp", "tp"), (16,): P(), (): P()}
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert sharding.spec == by_shape[leaf.shape]


@pytest.mark.parametrize("name", ["adamw", "chain", "masked", "multi_transform"])
@pytest.mark.full(but=["adamw"])
def test_state_is_created_sharded(name: str) -> None:
    pm = manager()
    tx = COPIES[name]()
    shardings = pm.state_shardings(state_of(tx, params()), params())
    values = pm.init(params(), jax.random.key(0))
    created = jax.jit(tx.init, out_shardings=shardings)(values)
    assert jax.tree.structure(created) == jax.tree.structure(tx.init(values))

    def step(state: Any, values: Any) -> Any:
        updates, state = tx.update(jax.tree.map(jnp.ones_like, values), state, values)
        return state, optax.apply_updates(values, updates)

    param_shardings = pm.shardings(params())
    after, moved = jax.jit(step, out_shardings=(shardings, param_shardings))(created, values)
    assert jax.tree.map(lambda leaf: leaf.sharding, moved) == param_shardings
    assert jax.tree.structure(after) == jax.tree.structure(created)


@pytest.mark.full
def test_slow_parameters_of_lookahead() -> None:
    """Lookahead trains a pair of parameter trees; its state follows the fast ones."""
    pm = manager()
    both = optax.LookaheadParams(params(), params())
    pairs = pm.shardings(both)
    assert spec_tree(pairs.fast) == spec_tree(pairs.slow) == spec_tree(pm.shardings(params()))
    tx = optax.lookahead(optax.adam(1e-3), sync_period=2, slow_step_size=0.5)
    shardings = pm.state_shardings(state_of(tx, both), params())
    assert shardings.fast_state[0].mu["embed"].spec == P("tp", "fsdp")
    arrays = optax.LookaheadParams.init_synced(pm.init(params(), jax.random.key(0)))
    for inner in (optax.adam(1e-3), optax.adafactor(1e-3, min_dim_size_to_factor=16)):
        state = pm.init_state(optax.lookahead(inner, 2, 0.5), arrays, both)
        alone = pm.init_state(inner, arrays.fast, params())
        created = [jax.tree.map(lambda x: x.sharding.spec, x) for x in (state.fast_state, alone)]
        assert created[0] == created[1]
        assert any(spec != P() for spec in jax.tree.leaves(created[0]))


def test_separate_annotations() -> None:
    shapes = initialize.abstract(params())
    state = jax.eval_shape(optax.adam(1e-3).init, shapes)
    annotations = {"embed": (sw.VOCAB, sw.EMBED), "blocks": KERNEL, "norm": (sw.NORM,)}
    pm = manager()
    assert spec_tree(pm.state_shardings(state, shapes, annotations)) == spec_tree(
        pm.state_shardings(state, params())
    )


def test_exceptions_use_the_parameter_path() -> None:
    """A pattern with ^ matches the parameter's path, and applies to its moments and sums."""
    exception = sw.Strategy(tensors=[{"match": "^w$", "embed": "tp", "mlp_intermediate": "fsdp"}])
    pm = sw.PartitionManager(
        sw.Strategy.preset("fsdp_tp") | exception, mesh=cpu_mesh("fsdp:4,tp:2")
    )
    specs = {
        "w": sw.ArraySpec((16, 32), jnp.float32, KERNEL, normal),
        "v": sw.ArraySpec((16, 32), jnp.float32, KERNEL, normal),
    }
    shardings = pm.state_shardings(state_of(optax.adam(1e-3), specs), specs)
    assert (
        spec_tree(shardings[0].mu)
        == spec_tree(pm.shardings(specs))
        == {"w": P("tp", "fsdp"), "v": P("fsdp", "tp")}
    )
    state = state_of(optax.adam(1e-3), specs)
    assert pm.shardings(state, sw.annotate_state(state, specs), role="state") == shardings
    shardings = pm.state_shardings(state_of(optax.sm3(1e-3), specs), specs)
    assert spec_tree(shardings[0].mu) == {"w": [P("tp"), P("fsdp")], "v": [P("fsdp"), P("tp")]}


# Factored moments.


def adafactor(**how: Any) -> Any:
    return optax.adafactor(1e-3, **{"min_dim_size_to_factor": 8} | how)


def factored_specs() -> dict[str, Any]:
    return {
        "wide": sw.ArraySpec((16, 32), jnp.float32, KERNEL, normal),
        "tall": sw.ArraySpec((32, 16), jnp.float32, KERNEL[::-1], normal),
        "square": sw.ArraySpec((16, 16), jnp.float32, KERNEL, normal),
        "layout": sw.ArraySpec((16, 16), jnp.float32, sw.RowWise, normal),
        "stack": sw.ArraySpec((3, 16, 32), jnp.float32, (sw.LAYERS, *KERNEL), normal),
        "heads": sw.ArraySpec((16, 8, 8), jnp.float32, (sw.EMBED, sw.HEAD, sw.HEAD_DIM), normal),
        "norm": sw.ArraySpec((16,), jnp.float32, (sw.NORM,), ones),
        "one": sw.ArraySpec((1,), jnp.float32, (sw.NORM,), ones),
    }


def test_factored_moments_lose_a_dim() -> None:
    """Optax sums over the largest dim first.

    The row sums of a wide kernel and of a tall kernel therefore keep the same dim, EMBED.
    """
    state = state_of(adafactor(momentum=0.9), factored_specs())
    shardings = manager().state_shardings(state, factored_specs())
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    factored = spec_tree(shardings[0])
    fsdp, tp, both, nothing = P("fsdp"), P("tp"), P("fsdp", "tp"), P()
    rows = {
        "wide": fsdp,
        "tall": fsdp,
        "square": fsdp,
        "layout": tp,
        "stack": P(None, "fsdp"),
        "heads": tp,
    }
    columns = {
        "wide": tp,
        "tall": tp,
        "square": tp,
        "layout": fsdp,
        "stack": P(None, "tp"),
        "heads": both,
    }
    assert factored.v_row == rows | {"norm": nothing, "one": nothing}
    assert factored.v_col == columns | {"norm": nothing, "one": nothing}
    assert set(jax.tree.leaves(factored.v, is_leaf=lambda leaf: isinstance(leaf, P))) == {nothing}
    unfactored = manager().state_shardings(
        state_of(adafactor(min_dim_size_to_factor=999), factored_specs()), factored_specs()
    )
    assert spec_tree(unfactored[0]).v == spec_tree(manager().shardings(factored_specs()))
    assert spec_tree(unfactored[0]).v["wide"] == both


@pytest.mark.parametrize(
    "shape", [(8, 8), (3, 8, 8), (8, 8, 8), (8, 3, 8), (8, 16, 8), (16, 8, 8), (8, 9), (9, 8)]
)
@pytest.mark.full(but=["shape0"])
def test_factored_moments_match_optax(shape: tuple[int, ...]) -> None:
    """A gradient that differs along one dim shows only in the moments that keep that dim."""
    axes = tuple(f"axis_{dim}" for dim in range(len(shape)))
    weight = {"w": jnp.ones(shape)}
    tx = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    kept = sw.annotate_state(tx.init(weight), weight, {"w": axes})
    for dim in range(len(shape)):
        along = jnp.arange(1.0, shape[dim] + 1).reshape(
            [-1 if at == dim else 1 for at in range(len(shape))]
        )
        _, state = tx.update({"w": jnp.broadcast_to(along, shape)}, tx.init(weight), weight)
        for field in ("v_row", "v_col"):
            moment = np.asarray(getattr(state, field)["w"])
            dims = getattr(kept, field)["w"].dims
            varies = [
                at
                for at in range(moment.ndim)
                if not np.allclose(moment, np.take(moment, [0], axis=at))
            ]
            assert varies == ([dims.index(dim)] if dim in dims else [])


def test_one_element_placeholders() -> None:
    """Moments of one element belong to a factored (1, 1) kernel or to an unfactored norm."""
    tiny = {
        "w": sw.ArraySpec((1, 1), jnp.float32, (sw.EMPTY, sw.EMPTY), ones),
        "b": sw.ArraySpec((1,), jnp.float32, (sw.NORM,), ones),
    }
    actual = sw.annotate_state(
        state_of(adafactor(min_dim_size_to_factor=1), tiny), tiny, by_path=False
    )[0]
    assert (actual.v_row["w"].dims, actual.v_col["w"].dims, actual.v["w"].dims) == (
        (0,),
        (1,),
        (None,),
    )
    assert (actual.v_row["b"].dims, actual.v_col["b"].dims, actual.v["b"]) == (
        (None,),
        (None,),
        (sw.NORM,),
    )


def test_factored_moments_of_some_parameters() -> None:
    """Masks and labels leave holes. The type of the rest is known."""
    labels = {"embed": "factored", "blocks": [{"up": "factored"}, {"up": "sgd"}], "norm": "sgd"}
    for tx, at in (
        (optax.masked(adafactor(), MASK), lambda actual: actual.inner_state[0]),
        (
            optax.partition({"factored": adafactor(), "sgd": optax.sgd(1e-2)}, labels),
            lambda actual: actual.inner_states["factored"].inner_state[0],
        ),
    ):
        state = state_of(tx, params())
        shardings = manager().state_shardings(state, params())
        assert jax.tree.structure(shardings) == jax.tree.structure(state)
        assert at(shardings).v_row["embed"].spec == P("fsdp")
        assert at(shardings).v_col["embed"].spec == P("tp")
        assert isinstance(at(shardings).v_row["norm"], optax.MaskedNode)


@pytest.mark.parametrize("tx", [adafactor(momentum=0.9), optax.sm3(0.1)], ids=["adafactor", "sm3"])
@pytest.mark.full
def test_twenty_steps_equal_one_device(tx: Any) -> None:
    """Sharded sums equal unsharded ones, and keep their sharding."""
    specs = {
        "up": sw.ArraySpec((16, 64), jnp.float32, KERNEL, normal),
        "down": sw.ArraySpec((64, 16), jnp.float32, KERNEL[::-1], normal),
    }
    x = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    losses = {}
    for preset, sizes in (("single", "dp:1"), ("fsdp_tp", "fsdp:4,tp:2")):
        pm = manager(preset, sizes)
        placed = pm.shardings(specs), pm.state_shardings(state_of(tx, specs), specs)

        def loss(values: Any, x: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ values["up"]) @ values["down"] - x[:, ::-1]) ** 2)

        def step(values: Any, state: Any, x: Any) -> Any:
            actual, gradients = jax.value_and_grad(loss)(values, x)
            updates, state = tx.update(gradients, state, values)
            return optax.apply_updates(values, updates), state, actual

        values = pm.init(specs, jax.random.key(0))
        state = jax.jit(tx.init, out_shardings=placed[1])(values)
        run = jax.jit(step, out_shardings=(*placed, None))
        losses[preset] = []
        for _ in range(20):
            values, state, actual = run(values, state, pm.shard(x, sw.BATCH, sw.EMPTY))
            losses[preset].append(float(actual))
        assert jax.tree.map(lambda leaf: leaf.sharding, (values, state)) == placed
    np.testing.assert_allclose(losses["fsdp_tp"], losses["single"], rtol=1e-5)
    assert losses["single"][-1] < losses["single"][0]


# Other kinds of state.


def test_one_accumulator_per_dim() -> None:
    shardings = manager().state_shardings(
        state_of(optax.sm3(1e-3), factored_specs()), factored_specs()
    )
    mu = spec_tree(shardings[0].mu)
    assert (mu["wide"], mu["tall"]) == ([P("fsdp"), P("tp")], [P("tp"), P("fsdp")])
    assert (mu["square"], mu["layout"]) == ([P("fsdp"), P("tp")], [P("tp"), P("fsdp")])
    assert (mu["stack"], mu["norm"]) == ([P(), P("fsdp"), P("tp")], [P()])


def test_history_has_a_leading_dim() -> None:
    state = state_of(optax.lbfgs(memory_size=5), params())
    shardings = manager().state_shardings(state, params())[0]
    assert spec_tree(shardings.diff_params_memory)["blocks"][0]["up"] == P(None, "fsdp", "tp")
    assert spec_tree(shardings.diff_updates_memory)["embed"] == P(None, "tp", "fsdp")
    assert (shardings.weights_memory.spec, shardings.params["embed"].spec) == (P(), P("tp", "fsdp"))


@pytest.mark.parametrize(
    ("tx", "pattern", "whole"),
    [
        (lambda: contrib.muon(1e-3), "ns_coeffs", 1),
        (lambda: contrib.mechanize(optax.adam(1e-3)), "^[rmvs]$", 4),
        (lambda: contrib.sophia(1e-3), "key", 1),
    ],
)
def test_global_statistics_are_replicated(tx: Callable[[], Any], pattern: str, whole: int) -> None:
    shardings = specs_by_path(manager().state_shardings(state_of(tx(), params()), params()))
    own = [spec for path, spec in shardings.items() if re.search(pattern, path)]
    assert own == [P()] * whole
    assert (
        sum(path.endswith("embed") and spec == P("tp", "fsdp") for path, spec in shardings.items())
        >= 1
    )


def test_nested_moments_are_found() -> None:
    """Mechanic adds its own statistics to any inner state."""
    shardings = manager().state_shardings(
        state_of(contrib.mechanize(adafactor()), params()), params()
    )
    assert shardings.base_optimizer_state[0].v_col["embed"].spec == P("tp")
    assert shardings.x0["embed"].spec == P("tp", "fsdp")


# What follows nothing.


class FactoredState(NamedTuple):
    """Another package's, which may keep other dims under these names."""

    count: Any
    v_row: Any
    v_col: Any
    v: Any
