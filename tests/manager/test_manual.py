"""Inside `jax.shard_map`: Manual axes are already applied; other axes are still constrained."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from tests.manager.programs import RULES, assert_like, make_manager, numbers, sharded_over
from tests.raising import raises

P = jax.P


def mapped(
    pm: sw.PartitionManager, f: Any, *, in_specs: Any, out_specs: Any, **options: Any
) -> Any:
    return jax.jit(
        jax.shard_map(f, mesh=pm.mesh, in_specs=in_specs, out_specs=out_specs, **options)
    )


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("operation", ["shard", "hint"])
def test_fully_manual_is_already_applied(kind: str, operation: str) -> None:
    pm = make_manager(kind)

    def inside(x):
        return getattr(pm, operation)(x, sw.BATCH, sw.EMBED) * 2

    f = mapped(pm, inside, in_specs=P("dp", "tp"), out_specs=P("dp", "tp"))
    x = pm.shard(numbers(8, 8), sw.BATCH, sw.EMBED)
    assert_like(f(x), jnp.asarray(numbers(8, 8) * 2))
    assert sharded_over(f(x), pm.mesh, "dp", "tp")


def test_manual_axes_skip_no_candidate() -> None:
    pm = make_manager()
    resolution = sw.resolve(
        (sw.BATCH, sw.KV_HEAD), pm.rules, pm.mesh, shape=(4, 3), manual=frozenset({"tp"})
    )
    assert resolution.spec == P("dp")
    decision = resolution.decisions[1]
    assert (decision.mesh_axes, decision.manual, decision.skipped) == (("tp",), ("tp",), ())
    assert "tp already applied by shard_map" in decision.why


def test_sizes_are_local_along_manual_axes() -> None:
    """A local batch of 1 is valid under a Manual dp of 2, but 6 is invalid over an Auto tp of 4."""
    pm = make_manager()
    f = mapped(pm, lambda x: pm.shard(x, sw.BATCH, sw.EMPTY), in_specs=P("dp"), out_specs=P("dp"))
    assert_like(f(numbers(2, 8)), jnp.asarray(numbers(2, 8)))
    half = mapped(
        pm,
        lambda x: pm.shard(x, sw.BATCH, sw.EMBED),
        in_specs=P("dp"),
        out_specs=P("dp"),
        axis_names={"dp"},
    )
    with raises(sw.IndivisibleError, "tp=4", dim=1, axis="EMBED", size=6, fix="tp | -"):
        half(numbers(2, 6))


@pytest.mark.parametrize("kind", ["auto", "explicit", "tp explicit"])
def test_partly_manual_constrains_the_rest(kind: str) -> None:
    pm = make_manager(kind)

    def inside(x: Any) -> Any:
        assert jax.sharding.get_abstract_mesh().manual_axes == ("dp",)
        y = pm.shard(x * 2, sw.BATCH, sw.EMBED)
        assert jax.typeof(y).sharding.spec == (P(None, None) if kind == "auto" else P(None, "tp"))
        return y

    f = mapped(pm, inside, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
    x = pm.shard(numbers(8, 8), sw.BATCH, sw.EMPTY)
    assert_like(f(x), jnp.asarray(numbers(8, 8) * 2))
    if (
        kind != "tp explicit"
    ):  # there JAX forgets the Explicit axis on the way out, whoever resharded
        assert sharded_over(f(x), pm.mesh, "dp", "tp")
    loss = mapped(
        pm,
        lambda x: jax.lax.psum((inside(x) ** 2).sum(), "dp"),
        in_specs=P("dp"),
        out_specs=P(),
        axis_names={"dp"},
    )
    with pm:
        assert_like(jax.jit(jax.grad(loss))(x), jnp.asarray(numbers(8, 8) * 8))


@pytest.mark.parametrize("axis_names", [{"dp"}, {"dp", "tp"}], ids=["partly", "fully"])
def test_value_that_does_not_vary(axis_names: set[str]) -> None:
    pm = make_manager()

    def run(f):
        return mapped(pm, f, in_specs=P(), out_specs=P(), axis_names=axis_names)(numbers(8, 8))

    with raises(sw.ManualAxisError, "dp", dim=0, axis="BATCH", fix="dp"):
        run(lambda x: pm.shard(x, sw.BATCH, sw.EMPTY))
    assert_like(run(lambda x: pm.hint(x, sw.BATCH, sw.EMPTY) * 1), jnp.asarray(numbers(8, 8)))
    assert_like(run(lambda x: pm.shard(x, sw.EMPTY, sw.EMPTY) * 1), jnp.asarray(numbers(8, 8)))


@pytest.mark.parametrize("axis_names", [{"dp"}, {"dp", "tp"}], ids=["partly", "fully"])
def test_untracked_manual_axes_are_trusted(axis_names: set[str]) -> None:
    """Under `check_vma=False` JAX does not track what varies, so `shard` cannot refuse."""
    pm = make_manager()
    spec = P("dp", "tp") if "tp" in axis_names else P("dp")
    f = mapped(
        pm,
        lambda x: pm.shard(x * 3, sw.BATCH, sw.EMBED),
        in_specs=spec,
        out_specs=spec,
        axis_names=axis_names,
        check_vma=False,
    )
    x = pm.shard(numbers(8, 8), sw.BATCH, sw.EMPTY)
    np.testing.assert_allclose(f(x), numbers(8, 8) * 3, rtol=1e-6)


def test_entered_inside_shard_map() -> None:
    pm = make_manager()

    def inside(x: Any) -> Any:
        with pm:
            return sw.shard(x * 2, sw.BATCH, sw.EMBED)

    f = mapped(pm, inside, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
    assert_like(f(pm.shard(numbers(8, 8), sw.BATCH, sw.EMPTY)), jnp.asarray(numbers(8, 8) * 2))


def test_another_mesh_inside_is_refused() -> None:
    pm, other = make_manager(), make_manager(sizes="dp:4,tp:2")
    with raises(sw.MeshMismatchError, "dp", 2, "tp", 4):
        mapped(
            pm, lambda x: other.shard(x, sw.BATCH, sw.EMBED), in_specs=P("dp"), out_specs=P("dp")
        )(numbers(8, 8))


def test_each_leaf_of_a_tree_is_named() -> None:
    pm = make_manager()
    with raises(sw.ManualAxisError, "dp", path="a", fix="dp", count=2) as caught:
        mapped(
            pm,
            lambda x: pm.shard({"a": x, "b": x}, (sw.BATCH, sw.EMPTY)),
            in_specs=P(),
            out_specs=P(),
        )(numbers(8, 8))
    assert [problem.path for problem in caught.value.problems] == ["a", "b"]


@pytest.mark.parametrize(("manual", "spec"), [("dp", jax.P(("dp", "tp"))), ("tp", None)])
def test_a_manual_axis_cannot_come_after_another(manual: str, spec: Any) -> None:
    """`shard_map` has split over it first, so it is the major axis, whatever the rule says."""
    pm = make_manager(text=RULES.replace('embed = "tp"', 'embed = "dp+tp"'))

    def run(place: Any) -> Any:
        return mapped(
            pm,
            lambda x: place(x * 1, sw.EMBED),
            in_specs=P(manual),
            out_specs=P(manual),
            axis_names={manual},
        )(numbers(16))

    if spec is not None:
        assert run(pm.shard).sharding.spec == spec
        return
    with raises(sw.ManualAxisError, "tp", "dp", dim=0, axis="EMBED", fix="shard_map"):
        run(pm.shard)
    np.testing.assert_array_equal(run(pm.hint), numbers(16))


def test_error_has_the_leaf_resolution() -> None:
    pm = make_manager()
    for name in ("first", "second"):
        with raises(sw.ManualAxisError, "dp", path=name, dim=0, axis="BATCH", fix="dp") as caught:
            mapped(
                pm,
                lambda x, name=name: pm.shard({name: x}, (sw.BATCH, sw.EMPTY)),
                in_specs=P(),
                out_specs=P(),
            )(numbers(8, 8))
        assert (caught.value.path, caught.value.resolution.path) == (name, name)


STATE = RULES.replace("[policy]", '[policy]\nzero1 = "dp"').replace(
    '[params]\nembed = "dp"', '[params]\nembed = "tp"'
)


@pytest.mark.parametrize("role", ["activation", "param", "use", "state"])
@pytest.mark.parametrize("manual", [set(), {"dp"}, {"tp"}, {"dp", "tp"}])
@pytest.mark.parametrize("indivisible", ["error", "prefix", "replicate", "drop"])
def test_manual_axes_are_marked_in_every_role(
    role: str, manual: set[str], indivisible: str
) -> None:
    """The spec of a decision never names a Manual mesh axis, but its mesh axes do."""
    text = STATE.replace("[policy]", f'[policy]\nindivisible = "{indivisible}"').replace(
        'gather = "dp"', 'gather = "tp"'
    )
    rules = sw.Strategy.loads(
        text.replace('vocab = "tp"', 'vocab = "dp+tp"'), format="toml"
    ).compile()
    mesh = {"dp": 2, "tp": 4}
    wholes = {
        (sw.EMBED, sw.EMPTY): (16, 3),
        (sw.VOCAB, sw.EMBED): (8, 3),
        (sw.MLP_INTERMEDIATE, sw.NORM): (8, 4),
    }
    parts = [
        sw.PartOf(annotation=axes, shape=shape, dims=dims)
        for axes, shape in wholes.items()
        for dims in ((0, 1), (0, None))
    ]
    seen = set()
    for annotation, shape in [*wholes.items(), *((part, (2, 3)) for part in parts)]:
        resolution = sw.explain(
            annotation, rules, mesh, role=role, shape=shape, manual=frozenset(manual)
        )
        for decision in resolution.decisions:
            assert decision.manual == tuple(
                axis for axis in decision.mesh_axes if axis in manual
            ), resolution
            seen |= set(decision.manual)
        if resolution.spec is not None:
            assert not manual & {
                name for entry in resolution.spec.partitions for name in np.ravel([entry]) if name
            }, resolution
    assert seen == manual or role == "use"


@pytest.mark.parametrize("axis_names", [{"dp"}, {"dp", "tp"}], ids=["partly", "fully"])
def test_zero1_over_a_manual_axis(axis_names: set[str]) -> None:
    """State that only zero1 shards over dp: recorded, applied and refused like the dp of a rule."""
    pm = make_manager(text=STATE.replace('embed = "tp"', 'embed = "-"'))
    axes = (sw.EMBED, sw.EMPTY)
    assert pm.resolve(*axes, role="state", shape=(8, 12)) == P("dp")
    resolution = sw.explain(
        axes, pm.rules, pm.mesh, role="state", shape=(4, 12), manual=frozenset(axis_names)
    )
    assert resolution.spec == P()
    assert resolution.decisions[0].manual == ("dp",)
    assert "dp by zero1; dp already applied by shard_map" in resolution.decisions[0].why

    def place(x: Any) -> Any:
        return pm.shard(x, *axes, role="state") * 2

    split = mapped(pm, place, in_specs=P("dp"), out_specs=P("dp"), axis_names=axis_names)
    assert_like(split(numbers(8, 12)), jnp.asarray(numbers(8, 12) * 2))
    whole = mapped(pm, place, in_specs=P(), out_specs=P(), axis_names=axis_names)
    with raises(sw.ManualAxisError, "dp", dim=0, axis="EMBED", fix="dp"):
        whole(numbers(8, 12))
    hint = mapped(
        pm,
        lambda x: pm.hint(x, *axes, role="state") * 2,
        in_specs=P(),
        out_specs=P(),
        axis_names=axis_names,
    )
    assert_like(hint(numbers(8, 12)), jnp.asarray(numbers(8, 12) * 2))


def test_zero1_after_a_non_manual_axis() -> None:
    pm = make_manager(text=STATE)
    assert pm.resolve(sw.EMBED, sw.EMPTY, role="state", shape=(16, 12)) == P(("tp", "dp"))
    f = mapped(
        pm,
        lambda x: pm.shard(x, sw.EMBED, sw.EMPTY, role="state"),
        in_specs=P("dp"),
        out_specs=P("dp"),
        axis_names={"dp"},
    )
    with raises(sw.ManualAxisError, "dp", "tp", fix="shard_map"):
        f(numbers(16, 12))


def test_explain_of_the_manager_ignores_manual_axes() -> None:
    """The pages say so: `pm.explain` takes global shapes, `sw.explain` takes `manual=`."""
    strategy = sw.Strategy.preset("fsdp") | sw.Strategy(policy={"zero1": "dp | -"})
    pm = sw.PartitionManager(strategy, mesh=sw.create_mesh("dp:2,fsdp:4"))
    axes = (sw.EMBED, sw.MLP_INTERMEDIATE)
    outside = pm.explain(*axes, role="state", shape=(16, 8))

    def f(x: Any) -> Any:
        assert pm.explain(*axes, role="state", shape=(16, 8)) == outside
        inside = sw.explain(axes, pm.rules, pm.mesh, role="state", shape=x.shape, manual={"fsdp"})
        assert "fsdp already applied by shard_map" in str(inside)
        assert inside.spec == jax.P("dp")
        return pm.shard(x, *axes, role="state")

    options: dict[str, Any] = {"in_specs": jax.P("fsdp"), "out_specs": jax.P("fsdp")}
    with pm:
        mapped = jax.shard_map(f, mesh=pm.mesh, axis_names={"fsdp"}, **options)
        traced = jax.make_jaxpr(mapped)(jnp.ones((16, 8)))
    assert "already applied" not in str(outside)
    assert "sharding_constraint" in str(traced)
