"""Rules that say "?": they constrain nothing, and are refused where a sharding is needed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from tests.manager.programs import AXIS_TYPES, make_manager, numbers, sharded_over
from tests.raising import raises

OPEN, OPEN_LAST = "open", "open_last"


def test_open_dims_are_not_constrained() -> None:
    pm = make_manager()
    text = jax.jit(lambda x: pm.shard(x, sw.BATCH, OPEN)).lower(jnp.zeros((8, 8))).as_text()
    assert '[{"dp"}, {?}]' in text
    text = jax.jit(lambda x: pm.shard(x, OPEN, sw.EMBED)).lower(jnp.zeros((8, 8))).as_text()
    assert '[{?}, {"tp"}]' in text


@pytest.mark.full(but=["eager-tp explicit", "jit-auto", "eager-dp explicit", "jit-explicit"])
@pytest.mark.parametrize("kind", list(AXIS_TYPES))
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_open_dims_keep_their_sharding(kind: str, jit: bool) -> None:
    pm = make_manager(kind)
    with pm:
        x = pm.shard(numbers(8, 8), sw.EMPTY, sw.EMBED)

        def f(x):
            return sw.shard(x, sw.BATCH, OPEN) * 1

        actual = (jax.jit(f) if jit else f)(x)
    np.testing.assert_array_equal(actual, numbers(8, 8))
    if jit and kind == "dp explicit":  # over an Auto tp the compiler chooses another sharding here
        assert actual.sharding.spec[0] == "dp"
    else:
        assert sharded_over(actual, pm.mesh, "dp", "tp")


@pytest.mark.parametrize("kind", list(AXIS_TYPES))
def test_rule_replaces_the_open_sharding(kind: str) -> None:
    """The open dim is sharded over dp, and loses it to the rule of the other dim."""
    pm = make_manager(kind)
    x = pm.shard(numbers(8, 8), sw.EMPTY, sw.BATCH)
    actual = pm.shard(x, sw.BATCH, OPEN)
    assert sharded_over(actual, pm.mesh, "dp")
    np.testing.assert_array_equal(actual, numbers(8, 8))


def test_open_only_where_nothing_divides() -> None:
    pm = make_manager()
    assert pm.explain(OPEN_LAST, shape=(8,)).spec == jax.P("tp")
    assert pm.explain(OPEN_LAST, shape=(6,)).spec == jax.P(jax.P.UNCONSTRAINED)
    assert pm.sharding(OPEN_LAST, shape=(8,)).spec == jax.P("tp")


REFUSALS: dict[str, Any] = {
    "sharding": lambda pm: pm.sharding(sw.BATCH, OPEN),
    "sharding with a size": lambda pm: pm.sharding(sw.BATCH, OPEN_LAST, shape=(8, 6)),
    "shardings": lambda pm: pm.shardings({"x": numbers(8, 6)}, (sw.BATCH, OPEN), role="activation"),
    "abstract": lambda pm: pm.abstract({"x": numbers(8, 6)}, (sw.BATCH, OPEN), role="activation"),
    "global_array": lambda pm: pm.global_array(numbers(8, 6), sw.BATCH, OPEN),
    "global_array with a shape": lambda pm: pm.global_array(
        numbers(8, 6), sw.BATCH, OPEN_LAST, global_shape=(8, 6)
    ),
    "literal spec": lambda pm: pm.sharding(jax.P("dp", jax.P.UNCONSTRAINED)),
}


@pytest.mark.parametrize("case", list(REFUSALS))
def test_open_dims_refused_by_shardings(case: str) -> None:
    with raises(sw.StrategyError, "?", "dim", "sharding", path=..., fix="?"):
        REFUSALS[case](make_manager())


@pytest.mark.parametrize("where", ["in", "out", "out and in", "sizes"])
def test_refused_in_shard_map(where: str) -> None:
    pm = make_manager()
    axes = {
        "in": {"in_axes": [(sw.BATCH, OPEN)], "out_axes": (sw.BATCH, sw.EMPTY)},
        "out": {"in_axes": [(sw.BATCH, sw.EMPTY)], "out_axes": (sw.BATCH, OPEN)},
        "out and in": {"in_axes": [(sw.BATCH, OPEN)], "out_axes": (sw.BATCH, OPEN)},
        "sizes": {
            "in_axes": [(sw.BATCH, sw.EMPTY)],
            "out_axes": (sw.BATCH, OPEN_LAST),
            "sizes": {OPEN_LAST: 6},
        },
    }[where]
    with raises(sw.StrategyError, "?", "shard_map", path=..., fix="?"):
        pm.shard_map(lambda x: x, **axes)(numbers(8, 8))


def test_refused_for_parameters() -> None:
    with raises(sw.StrategyError, "?", "sharding", path="<toml>:3 params.embed", fix="-"):
        sw.Strategy.loads('version = 1\n[params]\nembed = "?"\n')
    pm = make_manager(text='version = 1\n[rules]\nbatch = "dp"\nembed = "?"\n')
    with raises(sw.StrategyError, "?", fix="-"):
        pm.gather(numbers(8, 8), sw.EMBED, sw.EMPTY)
    with raises(sw.StrategyError, "?", path="w", fix="-"):
        pm.shardings({"w": numbers(8, 8)}, (sw.EMBED, sw.EMPTY))
    assert (
        '[{?}, {"dp"}]'
        in jax.jit(lambda x: pm.shard(x, sw.EMBED, sw.BATCH)).lower(numbers(8, 8)).as_text()
    )
