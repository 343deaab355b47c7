"""`policy.largest_dim`: a weight is stored over mesh axes that its rules leave free."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.resolution.free_axes import policy_notes
from shardwright.resolution.partition_specs import canonical_spec
from shardwright.resolution.problems import decision_rule
from shardwright.testing import cpu_mesh
from shardwright.trees.factored_weights import scale_axes
from tests.raising import Facts, facts, raises

P = jax.P
MESH = {"dp": 2, "fsdp": 4, "tp": 2}
RULES = {"embed": "-", "mlp_intermediate": "tp", "head": "-", "norm": "-", "layers": "-"}
KERNEL = (sw.EMBED, sw.MLP_INTERMEDIATE)


def strategy(largest_dim: str = "fsdp | -", gather: str = "fsdp", **policy: Any) -> sw.Strategy:
    given = {"largest_dim": largest_dim, "gather": gather, **policy}
    return sw.Strategy(rules=RULES | {"batch": "fsdp"}, policy=given)


def explain(axes: Any, shape: Any, *, role: str = "param", **how: Any) -> sw.Resolution:
    given = {key: how.pop(key) for key in ("manual", "path") if key in how}
    return sw.explain(axes, strategy(**how).compile(), MESH, role=role, shape=shape, **given)


@pytest.mark.parametrize(
    ("axes", "shape", "spec"),
    [
        ((sw.EMBED, sw.NORM), (16, 32), P(None, "fsdp")),
        ((sw.EMBED, sw.NORM), (16, 30), P("fsdp")),
        ((sw.EMBED, sw.NORM), (16, 16), P("fsdp")),
        ((sw.EMBED, sw.NORM), (6, 30), P()),
        (KERNEL, (16, 32), P("fsdp", "tp")),
        ((sw.MLP_INTERMEDIATE,), (32,), P("tp")),
        ((sw.EMPTY, sw.EMBED), (64, 16), P(None, "fsdp")),
        ((sw.LAYERS, sw.EMBED), (64, 16), P(None, "fsdp")),
        ((sw.EMBED, sw.VOCAB), (16, 64), P(None, "fsdp")),  # VOCAB has no rule
        ((), (), P()),
        # A merged dim of 6 heads is the largest, but heads are not split.
        ((sw.merged((sw.HEAD, 6), (sw.HEAD_DIM, 16)), sw.EMBED), (96, 16), P(None, "fsdp")),
        ((sw.merged((sw.HEAD, 8), (sw.HEAD_DIM, 16)), sw.EMBED), (128, 16), P("fsdp")),
        # A literal spec says itself what is sharded.
        (P(None, "tp"), (64, 16), P(None, "tp")),
    ],
)
def test_the_largest_free_dim_is_sharded(axes: Any, shape: Any, spec: Any) -> None:
    for role in ("param", "state"):
        assert explain(axes, shape, role=role).spec == spec
    # What is gathered for use is what was added; an activation is left alone.
    used = [None if entry == "fsdp" else entry for entry in spec]
    assert explain(axes, shape, role="use").spec == canonical_spec(used)
    assert "fsdp" not in explain(axes, shape, role="activation").spec


@pytest.mark.parametrize(
    ("largest_dim", "spec"),
    [
        ("fsdp", P("fsdp", "tp")),
        ("fsdp+dp", P(("fsdp", "dp"), "tp")),
        ("tp | fsdp", P("fsdp", "tp")),  # the weight has tp already
        ("tp+fsdp", P("fsdp", "tp")),
        ("sp | fsdp", P("fsdp", "tp")),  # the mesh has no sp
        ("-", P(None, "tp")),
    ],
)
def test_candidates_without_what_is_taken(largest_dim: str, spec: Any) -> None:
    assert explain(KERNEL, (16, 32), largest_dim=largest_dim).spec == spec


def test_bytes_are_those_of_the_best_dim() -> None:
    """No other choice of one free dim stores fewer elements on a device."""
    sizes = np.random.default_rng(0).integers(1, 40, size=(200, 3))
    axes = (sw.EMBED, sw.NORM, sw.VOCAB)
    for rank in (1, 2, 3):
        for row in sizes:
            shape = tuple(map(int, row[:rank]))
            (spec,) = {explain(axes[:rank], shape, role=role).spec for role in ("param", "state")}
            held = math.prod(
                size // 4 if entry else size for size, entry in itertools.zip_longest(shape, spec)
            )
            best = min([math.prod(shape) // 4 for size in shape if size % 4 == 0] or [math.inf])
            assert held == min(best, math.prod(shape)), (shape, spec)


def test_each_weight_is_explained() -> None:
    place = 'largest_dim = "fsdp | -"   ([policy]): '
    for shape, min_size, says in [
        ((96, 200), 0, "fsdp on dim 0 EMBED, the largest free dim that divides (96)"),
        ((10, 200), 0, "no free dim divides over fsdp"),
        ((10, 20), 300, "200 elements are fewer than largest_dim_min_size = 300"),
    ]:
        found = explain(KERNEL, shape, largest_dim_min_size=min_size)
        assert found.notes == (place + says,)
        rule = strategy().compile().policy.largest_dim
        assert rule is not None
        assert policy_notes(found, rule) == [says]
    used = explain(KERNEL, (96, 200), role="use")
    assert used.decisions[0].why == "fsdp by largest_dim; gathered over fsdp"
    # Errors and reports name the line that shards the dim, and not the rule of its axis.
    assert decision_rule(used, used.decisions[0]).startswith('largest_dim = "fsdp | -"')
    assert decision_rule(used, used.decisions[1]).startswith('mlp_intermediate = "tp"')
    assert used.to_json()["dims"][0]["largest_dim"] == ["fsdp"]
    (note,) = explain(KERNEL, (96, 200), largest_dim="tp | -").notes
    assert note.endswith("the parameter is already sharded over tp")
    # The minimum is the first size that is sharded.
    assert explain(KERNEL, (16, 32), largest_dim_min_size=512).spec == P("fsdp", "tp")
    assert explain(KERNEL, (16, 32), largest_dim_min_size=513).spec == P(None, "tp")


def test_the_minimum_is_that_of_one_layer() -> None:
    """In a scan over the layers, `gather` asks about one layer of what is stored."""
    layer, stack = (sw.EMBED, sw.NORM), (sw.LAYERS, sw.EMBED, sw.NORM)
    for size, one, whole in ((512, P(None, "fsdp"), P(None, None, "fsdp")), (513, P(), P())):
        assert explain(layer, (16, 32), largest_dim_min_size=size).spec == one
        assert explain(stack, (8, 16, 32), largest_dim_min_size=size).spec == whole


def test_a_weight_that_cannot_be_sharded_is_an_error() -> None:
    strict = {"largest_dim": "fsdp", "path": "up/kernel"}
    says = facts("fsdp", 6, "fsdp=4", path="up/kernel", fix='"fsdp | -"', rule="largest_dim")
    with raises(sw.IndivisibleError, says):
        explain((sw.EMBED, sw.NORM), (6, 9), **strict).require()
    with raises(sw.IndivisibleError, "MLP_INTERMEDIATE", "tp", path="up/kernel", fix="largest_dim"):
        explain((sw.MLP_INTERMEDIATE,), (32,), **strict).require()
    # What the annotation keeps whole, and what is too small, is no error.
    assert explain((sw.EMPTY,), (6,), **strict).spec == P()
    assert explain((sw.NORM,), (6,), largest_dim_min_size=7, **strict).spec == P()


def test_the_dim_depends_on_global_sizes() -> None:
    with raises(sw.ShapeRequiredError, "largest_dim", fix="shape=", rule="largest_dim"):
        explain(KERNEL, None).require()
    (half,) = jax.export.symbolic_shape("n")
    with raises(sw.ShapeRequiredError, "largest_dim", fix="8*b"):
        explain((sw.EMBED, sw.NORM), (half, 32)).require()
    with raises(sw.ShapeRequiredError, "shard_map", "fsdp", fix="gather"):
        explain((sw.EMBED, sw.NORM), (8, 16), manual=frozenset({"fsdp"})).require()
    assert explain(KERNEL, (16, 16), manual=frozenset({"tp"})).spec == P("fsdp")
    # Without free mesh axes, no size matters.
    assert explain(KERNEL, None, largest_dim="tp | -").spec == P(None, "tp")


def test_zero1_comes_after_it() -> None:
    state = explain(KERNEL, (16, 32), role="state", zero1="dp")
    assert state.spec == P(("fsdp", "dp"), "tp")
    assert (state.decisions[0].largest_dim, state.decisions[0].zero1) == (("fsdp",), ("dp",))
    assert explain(KERNEL, (16, 32), zero1="dp").spec == P("fsdp", "tp")


def test_parts_follow_the_whole_weight() -> None:
    scales = scale_axes((sw.EMBED, sw.NORM), (16, 32), scale_shape=(16, 8))
    assert explain(scales, (16, 8)).spec == P(None, "fsdp")
    few = scale_axes((sw.EMBED, sw.NORM), (16, 32), scale_shape=(16, 2))
    with raises(sw.IndivisibleError, 2, "fsdp", rule="largest_dim"):
        explain(few, (16, 2)).require()


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ('largest_dim = "fsdp | ?"', sw.StrategyError, facts("?", path=..., fix="-")),
        ('largest_dim = "fdsp"', sw.MissingMeshAxisError, facts("fdsp", path=..., fix="fsdp")),
        ('largest_dim = ["fsdp"]', sw.StrategyError, facts("fsdp", path=..., fix="fsdp")),
        ("largest_dim_min_size = -1", sw.StrategyError, facts(-1, path=...)),
        ('largest_dim_min_size = "4 MiB"', sw.StrategyError, facts("4 MiB", path=...)),
    ],
)
def test_bad_values_are_named_by_their_line(text: str, error: Any, says: Facts) -> None:
    with raises(error, says) as caught:
        sw.Strategy.loads(f"[mesh]\nfsdp = 4\n[policy]\n{text}\n", source="s.toml")
    assert "s.toml:4" in str(caught.value)


def test_a_list_of_rules_cannot_express_it() -> None:
    from shardwright.interop.logical_rules import to_logical_axis_rules

    pm = sw.PartitionManager(strategy(), mesh=sw.abstract_mesh("fsdp:4"))
    with raises(sw.StrategyError, "largest_dim", fix="[params]", rule="largest_dim"):
        to_logical_axis_rules(pm, {"embed": (sw.EMBED, "param")})


@pytest.mark.full(but=["explicit"])
@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_a_step_equals_the_unsharded_one(axis_types: str) -> None:
    """Values, gradients and the shardings of both; one gather for each weight that is sharded."""
    specs = {
        "up": sw.ArraySpec((16, 24), jnp.float32, KERNEL),
        "down": sw.ArraySpec((24, 16), jnp.float32, KERNEL[::-1]),
        "scale": sw.ArraySpec((16,), jnp.float32, (sw.NORM,)),
    }
    random = np.random.default_rng(0)
    given = {name: random.normal(size=spec.shape).astype("f") / 8 for name, spec in specs.items()}
    x = random.normal(size=(8, 16)).astype("f")

    def loss(params: Any, x: Any) -> Any:
        used = {name: sw.gather(params[name], specs[name]) for name in params}
        h = sw.shard(x, sw.BATCH, sw.EMBED) * used["scale"]
        h = sw.einsum("be,em->bm", h, used["up"], out=(sw.BATCH, sw.MLP_INTERMEDIATE))
        out = sw.einsum("bm,me->be", jnp.tanh(h), used["down"], out=(sw.BATCH, sw.EMBED))
        return (out**2).mean()

    found = {}
    for name, policy in (("alone", "-"), ("sharded", "fsdp")):
        mesh = cpu_mesh("fsdp:1" if name == "alone" else "fsdp:4,tp:2", axis_types=axis_types)
        pm = sw.PartitionManager(strategy(policy), mesh=mesh)
        with pm:
            params = pm.shard(given, specs, role="param")
            value, gradients = jax.jit(jax.value_and_grad(loss))(params, x)
            found[name] = jax.tree.map(np.asarray, (value, gradients))
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-7),
        found["alone"],
        found["sharded"],
    )
    specs_of = {name: value.sharding.spec for name, value in params.items()}
    assert specs_of == {"up": P("fsdp", "tp"), "down": P("tp", "fsdp"), "scale": P("fsdp")}
    assert {name: value.sharding.spec for name, value in gradients.items()} == specs_of
