"""Symbolic sizes of `jax.export`: a size is unknown if JAX cannot tell whether it divides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import shardwright as sw
from shardwright.resolution.decisions import Outcome
from shardwright.testing import cpu_mesh
from tests.raising import raises

RULES = """
version = 1
[rules]
batch = "dp"
embed = "tp"
head = "tp | -"
kv_head = "tp"
vocab = "dp+tp"
[params]
embed = "dp"
"""


def manager(policy: dict[str, str] | None = None) -> sw.PartitionManager:
    strategy = sw.Strategy.loads(RULES) | sw.Strategy(policy=policy or {})
    return sw.PartitionManager(strategy, mesh=cpu_mesh("dp:2,tp:4"))


def sizes(text: str) -> tuple[Any, ...]:
    return tuple(export.symbolic_shape(text))


@pytest.mark.full(but=["b, 16-hint", "8*b, 4*d-shard", "2*b, 16-hint"])
@pytest.mark.parametrize("name", ["shard", "hint"])
@pytest.mark.parametrize("text", ["b, 16", "2*b, 16", "8*b, 4*d"])
def test_a_program_of_symbolic_sizes_is_exported(name: str, text: str) -> None:
    pm = manager()

    def f(x: Any) -> Any:
        return getattr(sw, name)(x * 2, sw.BATCH, sw.EMBED)

    with pm:
        exported = export.export(jax.jit(f))(jax.ShapeDtypeStruct(sizes(text), jnp.float32))
    assert '[{"dp"}, {"tp"}]' in exported.mlir_module()
    x = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    with jax.set_mesh(pm.mesh):
        on_mesh = jax.device_put(x, jax.NamedSharding(pm.mesh, jax.P()))
        np.testing.assert_array_equal(exported.call(on_mesh), x * 2)


def test_only_known_divisibility_is_checked() -> None:
    resolution = manager().explain(sw.BATCH, sw.EMBED, shape=sizes("2*b, d"))
    assert resolution.spec == jax.P("dp", "tp")
    assert [decision.unchecked for decision in resolution.decisions] == [False, True]
    assert resolution.to_json()["dims"][0]["size"] == "2*b"
    assert "2*b" in str(resolution)


def test_indivisible_symbolic_size() -> None:
    with raises(sw.IndivisibleError, 2, 1, "dp=2", fix="dp | -"):
        manager().resolve(sw.BATCH, sw.EMBED, shape=sizes("2*b + 1, 16"))


def test_chain_needs_known_divisibility() -> None:
    pm = manager()
    assert pm.resolve(sw.BATCH, sw.HEAD, shape=sizes("b, 4*h")) == jax.P("dp", "tp")
    with raises(sw.ShapeRequiredError, "candidate", "applies", dim=1, axis="HEAD") as caught:
        pm.resolve(sw.BATCH, sw.HEAD, shape=sizes("b, h"))
    assert "write h as a multiple" in str(caught.value)


@pytest.mark.parametrize("policy", ["prefix", "replicate", "drop"])
def test_policies(policy: str) -> None:
    pm = manager({"indivisible": policy})
    assert pm.resolve(sw.VOCAB, shape=sizes("8*b")) == jax.P(("dp", "tp"))
    wanted = {"prefix": jax.P("dp"), "replicate": jax.P(), "drop": jax.P()}[policy]
    assert pm.resolve(sw.VOCAB, shape=sizes("8*b + 4")) == wanted
    with raises(sw.ShapeRequiredError, "depends", dim=0, axis="VOCAB"):
        pm.resolve(sw.VOCAB, shape=sizes("b"))


def test_zero1() -> None:
    pm = manager({"zero1": "tp"})
    assert pm.resolve(sw.EMBED, role="state", shape=sizes("8*b")) == jax.P(("dp", "tp"))
    with raises(sw.ShapeRequiredError, "zero1", 2):
        pm.resolve(sw.EMBED, role="state", shape=sizes("2*b"))


def test_gather() -> None:
    pm = manager({"gather": "dp"})

    def f(w: Any) -> Any:
        return sw.gather(w, sw.EMBED, sw.EMPTY) * 2

    with pm:
        exported = export.export(jax.jit(jax.grad(lambda w: f(w).sum())))(
            jax.ShapeDtypeStruct(sizes("b, 4"), jnp.float32)
        )
    assert '[{"dp"}, {}]' in exported.mlir_module(), "the gradient has the stored sharding"


@pytest.mark.parametrize(
    "make", [lambda pm, x, an: pm.shardings(x, an), lambda pm, x, an: pm.abstract(x, an)]
)
def test_trees(make: Callable[..., Any]) -> None:
    pm = manager()
    x = jax.ShapeDtypeStruct(sizes("2*b, 16"), jnp.float32)
    actual = make(pm, {"w": x}, {"w": (sw.EMBED, sw.EMPTY)})["w"]
    assert getattr(actual, "sharding", actual).spec == jax.P("dp")


def test_abstract_refuses_what_jax_refuses() -> None:
    pm = manager()
    x = jax.ShapeDtypeStruct(sizes("b, 16"), jnp.float32)
    sharding = pm.shardings(x, (sw.EMBED, sw.EMPTY))
    with pytest.raises(
        ValueError, match="array axis 0 is partitioned 2 times, but the dimension size is b"
    ):
        export.export(jax.jit(lambda x: x, in_shardings=sharding))(x)
    with raises(sw.IndivisibleError, "JAX", "dp", 16, "NamedSharding", path="w") as caught:
        pm.abstract({"w": x}, {"w": (sw.EMBED, sw.EMPTY)})
    assert caught.value.problems[0].path == "w"


def test_symbolic_scopes_are_distinct() -> None:
    """Equal names of two scopes are two sizes, for every cache."""
    pm = manager()
    for _ in range(3):
        assert pm.resolve(sw.BATCH, sw.EMBED, shape=sizes("b, 16")) == jax.P("dp", "tp")
        with pm:
            export.export(jax.jit(lambda x: sw.shard(x, sw.BATCH, sw.EMBED)))(
                jax.ShapeDtypeStruct(sizes("b, 16"), jnp.float32)
            )
        x = jax.ShapeDtypeStruct(sizes("b, 16"), jnp.float32)
        assert pm.shardings(x, (sw.EMBED, sw.EMPTY)).spec == jax.P("dp")


def test_merged_and_parts() -> None:
    pm = manager()
    assert pm.resolve(
        sw.EMBED,
        sw.merged((sw.KV_HEAD, 4), (sw.KV_HEAD_DIM, 8)),
        shape=(*sizes("b"), 32),
        role="param",
    ) == jax.P("dp", "tp")
    with raises(sw.RankMismatchError, "KV_HEAD", 4, "KV_HEAD_DIM", 8):
        pm.resolve(
            sw.EMBED,
            sw.merged((sw.KV_HEAD, 4), (sw.KV_HEAD_DIM, 8)),
            shape=sizes("b, c"),
            role="param",
        )


def test_the_mode_of_a_layout() -> None:
    pm = manager()
    layout = sw.DynamicShardingAxes((sw.BATCH, sw.EMPTY), 1)
    assert pm.explain(layout, shape=sizes("b, q + 1")).mode == sw.MODE_TRAIN
    resolution = pm.explain(layout, shape=sizes("b, q"))
    assert [problem.error for problem in resolution.problems] == [sw.ShapeRequiredError]
    assert resolution.decisions == () or resolution.decisions[0].outcome is Outcome.FAILED
