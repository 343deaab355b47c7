"""State that follows no parameter, and state that does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.trees import initialize
from tests.raising import facts, raises
from tests.small_model import KERNEL, manager, normal, ones, spec_tree
from tests.small_model import specs as params
from tests.trees.test_optimizer_state import (
    FactoredState,
    P,
    adafactor,
    contrib,
    optax,
    specs_by_path,
    state_of,
)


def test_type_of_another_package_is_ignored() -> None:
    weight = {"w": sw.ArraySpec((16, 16), jnp.float32, KERNEL, normal)}
    state = FactoredState(
        np.zeros(()), {"w": np.zeros(16)}, {"w": np.zeros(16)}, {"w": np.zeros(1)}
    )
    with raises(
        sw.RankMismatchError,
        "(16,)",
        "EMBED",
        "MLP_INTERMEDIATE",
        "(16, 16)",
        path="v_row/w",
        count=3,
    ) as caught:
        manager().state_shardings(state, weight)
    assert "overrides={'v_row/w': (...)}" in caught.value.fix
    overrides = {"v_row": (sw.EMBED,), "v_col": (sw.MLP_INTERMEDIATE,), "v/w": (sw.EMPTY,)}
    shardings = manager().state_shardings(state, weight, overrides=overrides)
    assert (shardings.v_row["w"].spec, shardings.v_col["w"].spec, shardings.v["w"].spec) == (
        P("fsdp"),
        P("tp"),
        P(),
    )


def test_state_of_another_model_is_refused() -> None:
    """A moment that cannot belong to this parameter is named, even in a known type."""
    other = {"w": sw.ArraySpec((16, 48), jnp.float32, KERNEL, normal)}
    weight = {"w": sw.ArraySpec((16, 32), jnp.float32, KERNEL, normal)}
    for tx, field in (
        (adafactor(), "0/v_col/w"),
        (optax.sm3(1e-3), "0/mu/w/1"),
        (optax.scale_by_lbfgs(3), "diff_params_memory/w"),
    ):
        with raises(
            sw.RankMismatchError, "EMBED", "MLP_INTERMEDIATE", "(16, 32)", path=...
        ) as caught:
            manager().state_shardings(state_of(tx, other), weight)
        assert field in [problem.path for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("tx", "path"),
    [
        (lambda: optax.flatten(optax.adam(1e-3)), "0/mu"),
        (lambda: contrib.galore(1e-3, rank=4), "0/projector/embed"),
    ],
)
def test_mixed_dims_need_an_annotation(tx: Callable[[], Any], path: str) -> None:
    state = state_of(tx(), params())
    with raises(sw.StrategyError, "state", "parameters", path=..., fix="overrides=") as caught:
        manager().state_shardings(state, params())
    assert path in [problem.path for problem in caught.value.problems]
    shardings = manager().state_shardings(
        state,
        params(),
        overrides={problem.path: sw.Replicated for problem in caught.value.problems},
    )
    assert specs_by_path(shardings)[path] == P()


def test_joined_state_names_optax_flatten() -> None:
    flat = optax.flatten(optax.sgd(1e-2, momentum=0.9))
    sizes = sum(
        math.prod(leaf.shape)
        for leaf in jax.tree.leaves(params(), is_leaf=lambda value: isinstance(value, sw.ArraySpec))
    )
    with raises(
        sw.StrategyError, f"({sizes},)", path="0/trace", fix=("optax.flatten", "overrides")
    ):
        manager().state_shardings(state_of(flat, params()), params())
    alone = {"w": sw.ArraySpec((16, 32), jnp.float32, KERNEL, normal)}
    with raises(sw.StrategyError, "(512,)", path="0/trace", fix=("optax.flatten", "overrides")):
        manager().state_shardings(state_of(flat, alone), alone)


def test_scalars_of_every_kind_are_replicated() -> None:
    """Counts and rates are JAX arrays, NumPy scalars or Python numbers without a dtype."""
    scalars = {
        "count": np.int64(3),
        "rate": 1e-3,
        "steps": 7,
        "skip": True,
        "loss": np.float64(0.5),
        "at": jnp.int32(1),
        "zero_d": np.zeros(()),
    }
    shardings = manager().state_shardings(scalars, params())
    assert specs_by_path(shardings) == dict.fromkeys(scalars, P())
    placed = manager().shard(scalars, dict.fromkeys(scalars, ()), role="state")
    assert {name: (leaf.shape, leaf.dtype.name) for name, leaf in placed.items()} == {
        "count": ((), "int32"),
        "rate": ((), "float32"),
        "steps": ((), "int32"),
        "skip": ((), "bool"),
        "loss": ((), "float32"),
        "at": ((), "int32"),
        "zero_d": ((), "float32"),
    }


def test_moments_in_64_bits() -> None:
    """Without x64, JAX narrows to 32 bits. Rounding is accepted, infinity is not."""
    pm, weight = manager(), {"w": sw.ArraySpec((16, 32), jnp.float32, KERNEL, normal)}
    moments = {"nu": {"w": np.full((16, 32), 0.1)}}
    assert specs_by_path(pm.state_shardings(moments, weight)) == {"nu/w": P("fsdp", "tp")}
    placed = pm.shard(moments, {"nu": {"w": KERNEL}}, role="state")["nu"]["w"]
    assert (placed.dtype, placed.sharding.spec) == (jnp.float32, P("fsdp", "tp"))
    with raises(
        sw.StrategyError,
        "float64",
        "float32",
        "JAX",
        "jax_enable_x64",
        path="nu/w",
        fix="jax.config.update",
    ):
        pm.shard({"nu": {"w": np.full((16, 32), 1e300)}}, {"nu": {"w": KERNEL}}, role="state")
    with jax.enable_x64(True):
        whole = pm.shard(
            {"nu": {"w": np.full((16, 32), 1e-300)}}, {"nu": {"w": KERNEL}}, role="state"
        )["nu"]["w"]
        assert (whole.dtype, whole.sharding.spec, float(whole[0, 0])) == (
            jnp.float64,
            P("fsdp", "tp"),
            1e-300,
        )


def test_projected_state_is_not_a_copy() -> None:
    """GaLore's projection of a square weight mixes its dims, and so does Adam's state of it."""
    square = {
        "w": sw.ArraySpec((16, 16), jnp.float32, KERNEL, normal),
        "norm": sw.ArraySpec((16,), jnp.float32, (sw.EMBED,), ones),
    }
    state = state_of(contrib.galore(1e-3, rank=16), square)
    assert state[0].projector["w"].shape == state[0].base_optimizer_state.mu["w"].shape == (16, 16)
    says = (
        facts("(16, 16)", "GaLoreState", path="0/base_optimizer_state/mu/w"),
        facts("(16, 16)", "GaLoreState", path="0/base_optimizer_state/nu/w"),
        facts("(16, 16)", "GaLoreState", path="0/projector/w"),
    )
    with raises(sw.StrategyError, says) as caught:
        manager().state_shardings(state, square)
    assert [problem.path for problem in caught.value.problems] == [
        "0/base_optimizer_state/mu/w",
        "0/base_optimizer_state/nu/w",
        "0/projector/w",
    ]
    shardings = manager().state_shardings(state, square, overrides={"/w$": sw.Replicated})
    specs = specs_by_path(shardings)
    assert (specs["0/base_optimizer_state/mu/norm"], specs["0/projector/norm"]) == (P("fsdp"), P())


def test_unused_override_is_named() -> None:
    says = facts("trase", "state", fix=("trace", "re.search"))
    trace = {"trace": np.zeros((8,))}
    with raises(sw.StrategyError, says):
        manager().state_shardings(
            trace, params(), overrides={"trace": (sw.EMBED,), "trase": (sw.EMBED,)}
        )
    state = state_of(optax.adam(1e-3), params())
    with raises(sw.StrategyError, "2/nu", "state", fix=("0", "mu/blocks")):
        manager().state_shardings(state, params(), overrides={"2/nu": sw.Replicated})


def nested_params() -> dict[str, Any]:
    weight, bias = (
        sw.ArraySpec((16, 32), jnp.float32, KERNEL, normal),
        sw.ArraySpec((32,), jnp.float32, (sw.MLP_INTERMEDIATE,), ones),
    )
    return {"enc": {"a": weight, "b": bias}, "dec": {"a": weight}}


def test_masks_cover_subtrees() -> None:
    specs = nested_params()
    mu = (
        manager()
        .state_shardings(
            state_of(optax.masked(optax.adam(1e-3), {"enc": True, "dec": False}), specs), specs
        )
        .inner_state[0]
        .mu
    )
    assert spec_tree(mu["enc"]) == {"a": P("fsdp", "tp"), "b": P("tp")}
    assert jax.tree.leaves(mu["dec"]) == []


def test_labels_cover_subtrees() -> None:
    specs = nested_params()
    tx = optax.multi_transform(
        {"x": optax.adam(1e-3), "y": optax.sgd(1e-2, momentum=0.9)}, {"enc": "x", "dec": "y"}
    )
    shardings = specs_by_path(manager().state_shardings(state_of(tx, specs), specs))
    assert {path: spec for path, spec in shardings.items() if spec != P()} == {
        "inner_states/x/inner_state/0/mu/enc/a": P("fsdp", "tp"),
        "inner_states/x/inner_state/0/mu/enc/b": P("tp"),
        "inner_states/x/inner_state/0/nu/enc/a": P("fsdp", "tp"),
        "inner_states/x/inner_state/0/nu/enc/b": P("tp"),
        "inner_states/y/inner_state/0/trace/dec/a": P("fsdp", "tp"),
    }


def test_mask_elsewhere_is_not_a_copy() -> None:
    """A leaf with a parameter's name follows nothing if the other parameters are missing there."""
    with raises(sw.StrategyError, "state", "(16, 32)", path="extra/a"):
        manager().state_shardings({"extra": {"a": np.zeros((16, 32))}}, nested_params()["enc"])


@pytest.mark.parametrize(
    "tx",
    [optax.adam(1e-3), optax.masked(optax.adam(1e-3), [True, (), False])],
    ids=["adam", "masked by prefix"],
)
def test_parameters_with_empty_tuples(tx: Any) -> None:
    weight, bias = (
        sw.ArraySpec((16, 32), jnp.float32, KERNEL, normal),
        sw.ArraySpec((32,), jnp.float32, (sw.MLP_INTERMEDIATE,), ones),
    )
    specs = [(weight, bias), (), (weight, bias)]
    shardings = manager().state_shardings(state_of(tx, specs), specs)
    assert jax.tree.structure(shardings) == jax.tree.structure(state_of(tx, specs))
    adam = (shardings.inner_state if hasattr(shardings, "inner_state") else shardings)[0]
    assert [sharding.spec for sharding in adam.mu[0]] == [P("fsdp", "tp"), P("tp")]
    beside = manager().state_shardings(
        state_of(tx, specs),
        initialize.abstract(specs),
        [(KERNEL, (sw.MLP_INTERMEDIATE,)), (), (KERNEL, (sw.MLP_INTERMEDIATE,))],
    )
    assert specs_by_path(beside) == specs_by_path(shardings)


def test_suggested_override_is_accepted() -> None:
    pm = manager()
    state = {"extra.[0]": np.zeros((8, 8))}
    with raises(
        sw.StrategyError, "(8, 8)", path="extra.[0]", fix="extra\\\\.\\\\[0\\\\]"
    ) as caught:
        pm.state_shardings(state, params())
    pattern = caught.value.fix.split("{", 1)[1].split(":", 1)[0]
    assert spec_tree(pm.state_shardings(state, params(), overrides={eval(pattern): KERNEL})) == {
        "extra.[0]": P("fsdp", "tp")
    }


def test_longest_path_wins() -> None:
    pm = manager()
    nested = {
        "w": sw.ArraySpec((16, 32), jnp.float32, KERNEL, normal),
        "block": {"w": sw.ArraySpec((16, 32), jnp.float32, sw.Replicated, normal)},
    }
    mu = pm.state_shardings(state_of(optax.adam(1e-3), nested), nested)[0].mu
    assert spec_tree(mu) == {"w": P("fsdp", "tp"), "block": {"w": P()}}


@pytest.mark.parametrize(
    "tx", [optax.adam(1e-3), optax.sm3(1e-3), adafactor(), optax.lbfgs(3), contrib.muon(1e-3)]
)
def test_single_array_as_parameters(tx: Any) -> None:
    spec = sw.ArraySpec((16, 32), jnp.float32, KERNEL, normal)
    shardings = specs_by_path(manager().state_shardings(state_of(tx, spec), spec))
    assert {P("fsdp", "tp"), P("fsdp"), P(None, "fsdp", "tp")} & set(shardings.values())


def test_parameters_in_a_plain_tuple() -> None:
    """A tuple of tuples of axes must not be read as one annotation of composites."""
    pm = manager()
    pair = (
        sw.ArraySpec((16, 32), jnp.float32, KERNEL, normal),
        sw.ArraySpec((32, 16), jnp.float32, KERNEL[::-1], normal),
    )
    shardings = pm.state_shardings(state_of(optax.sgd(1e-2, momentum=0.9), pair), pair)
    assert jax.tree.leaves(spec_tree(shardings), is_leaf=lambda leaf: isinstance(leaf, P)) == [
        P("fsdp", "tp"),
        P("tp", "fsdp"),
    ]
