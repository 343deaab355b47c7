"""`gather` inside `shard_map`: an all-gather of the shard, a reduce-scatter of its cotangent."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.testing import assert_collectives, cpu_mesh
from tests.manager.programs import AXIS_TYPES, RULES, assert_like, make_manager, sharded_over
from tests.raising import facts, raises

P = jax.P
KERNEL = (sw.EMBED, sw.MLP_INTERMEDIATE)
ROWS = (sw.BATCH, sw.EMPTY)
VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])


def waves(*shape: int) -> np.ndarray:
    """Return distinct values without symmetry."""
    return np.cos(np.arange(np.prod(shape), dtype=np.float32) * 0.7).reshape(shape)


def fsdp() -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=cpu_mesh("fsdp:8"))


def same(w: Any, *_: Any) -> Any:
    return w


def run_gather(
    pm: sw.PartitionManager, w: Any, spec: Any, out: Any, *axes: Any, **options: Any
) -> Any:
    """Gather one weight inside a map over `axis_names`, or over all mesh axes except `keep`."""
    shape = options.pop("shape", None)
    names = options.pop("axis_names", set(pm.mesh.axis_names))
    path = options.pop("path", None)

    def f(w: Any) -> Any:
        return pm.gather(w, *axes, shape=shape, path=path) * 1

    return jax.jit(
        jax.shard_map(f, mesh=pm.mesh, in_specs=spec, out_specs=out, axis_names=names, **options)
    )(w)


@VMA
@pytest.mark.full(but=["vma"])
def test_loss_over_sharded_weights(check_vma: bool) -> None:
    pm, h, w = fsdp(), waves(8, 32), waves(32, 16)
    axes = (sw.MLP_INTERMEDIATE, sw.EMBED)
    stored = pm.shard(w, *axes, role="param")

    def f(h: Any, w: Any) -> Any:
        assert w.shape == (32, 2)
        return jax.lax.psum(jnp.tanh(h @ sw.gather(w, *axes)).sum(), "fsdp")

    mapped = pm.shard_map(
        f, in_axes=[(sw.BATCH, sw.MLP_INTERMEDIATE), sw.RowWise], out_axes=(), check_vma=check_vma
    )
    with pm:
        np.testing.assert_allclose(mapped(h, stored), jnp.tanh(h @ w).sum(), rtol=1e-5)
        gradient = jax.jit(jax.grad(mapped, argnums=1))(h, stored)
    assert_like(gradient, jax.grad(lambda w: jnp.tanh(h @ w).sum())(w))
    assert sharded_over(gradient, pm.mesh, None, "fsdp")


def local_loss(pm: Any, x: Any, w: Any, shape: Any, gather: Any) -> Any:
    return (jnp.tanh(x @ gather(w, *KERNEL, shape=shape)) ** 2).sum()


@VMA
@pytest.mark.parametrize("names", [{"dp"}, {"dp", "tp"}], ids=["partly", "fully"])
@pytest.mark.parametrize("kind", list(AXIS_TYPES))
@pytest.mark.full(but=["auto-partly-vma"])
@pytest.mark.pairwise
def test_values_gradients_and_collectives(kind: str, names: set[str], check_vma: bool) -> None:
    pm = make_manager(kind)
    x, w = waves(4, 8), waves(8, 12)
    spec = P("dp", "tp") if "tp" in names else P("dp")
    over = tuple(sorted(names))

    def gather(w: Any, *axes: Any, shape: Any) -> Any:
        return pm.gather(w, *axes, shape=None if check_vma else shape)

    def loss(x: Any, w: Any) -> Any:
        return jax.lax.psum(local_loss(pm, x, w, (8, 12), gather), over)

    def inside(x: Any, w: Any) -> Any:
        return jax.grad(lambda w: local_loss(pm, x, w, (8, 12), gather))(w)

    options: dict[str, Any] = {"mesh": pm.mesh, "axis_names": names, "check_vma": check_vma}
    outer = jax.jit(jax.shard_map(loss, in_specs=(P("dp"), spec), out_specs=P(), **options))
    inner = jax.jit(jax.shard_map(inside, in_specs=(P("dp"), spec), out_specs=spec, **options))
    placed = pm.shard(x, *ROWS), pm.shard(w, *KERNEL, role="param")
    plain = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)
    with pm:
        np.testing.assert_allclose(outer(*placed), (jnp.tanh(x @ w) ** 2).sum(), rtol=1e-5)
        step = jax.jit(jax.grad(outer, argnums=1)).lower(*placed).compile()
        assert_like(step(*placed), plain)
        assert_like(inner(*placed), plain)
        compiled = inner.lower(*placed).compile()
    counts = {"all_gather": 1, "reduce_scatter": 1}
    assert_collectives(compiled, axis="dp", only=True, mesh=pm.mesh, **counts)


@VMA
def test_psum_in_the_differentiated_function(check_vma: bool) -> None:
    """Without tracking, JAX transposes psum to psum, which scales gradients inside."""
    pm, x, w = make_manager(), waves(4, 8), waves(8, 12)

    def inside(x: Any, w: Any) -> Any:
        def loss(w: Any) -> Any:
            return jax.lax.psum(local_loss(pm, x, w, (8, 12), pm.gather), ("dp", "tp"))

        return jax.grad(loss)(w)

    specs = (P("dp"), P("dp", "tp"))
    mapped = jax.shard_map(
        inside, mesh=pm.mesh, in_specs=specs, out_specs=specs[1], check_vma=check_vma
    )
    wanted = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)
    assert_like(jax.jit(mapped)(x, w), wanted if check_vma else wanted * 8)


def test_forward_mode_inside() -> None:
    for kind, names in (("auto", {"dp", "tp"}), ("auto", {"dp"}), ("tp explicit", {"dp"})):
        pm = make_manager(kind)
        spec = P("dp", "tp") if "tp" in names else P("dp")

        def f(w: Any, v: Any, pm: Any = pm) -> Any:
            g = jax.grad(lambda w: (jnp.sin(pm.gather(w, *KERNEL)) ** 2).sum())
            return (
                *jax.jvp(lambda w: pm.gather(w, *KERNEL), (w,), (v,)),
                jax.jvp(g, (w,), (v,))[1],
            )

        whole = P(None, "tp") if "tp" in names else P()
        w, v = waves(8, 12), waves(8, 12) * 2
        with pm:
            mapped = jax.shard_map(
                f,
                in_specs=(spec, spec),
                out_specs=(whole, whole, spec),
                axis_names=names,
                check_vma=False,
            )
            with raises(sw.ShapeRequiredError, "unknown", "shard", fix="check_vma"):
                jax.jit(mapped)(w, v)
            mapped = jax.shard_map(
                lambda w, v, f=f: (*(item[None] for item in f(w, v)[:2]), f(w, v)[2]),
                in_specs=(spec, spec),
                out_specs=(P("dp", *whole), P("dp", *whole), spec),
                axis_names=names,
            )
            placed = [pm.shard(item, *KERNEL, role="param") for item in (w, v)]
            y, tangent, product = jax.jit(mapped)(*placed)
        assert_like((y[0], tangent[1]), (jnp.asarray(w), jnp.asarray(v)))
        # Each of the two devices along dp has the loss of the whole weight.
        wanted = jax.jvp(jax.grad(lambda w: 2 * (jnp.sin(w) ** 2).sum()), (w,), (v,))[1]
        assert_like(product, wanted)


@VMA
@pytest.mark.parametrize("names", [{"dp"}, {"dp", "tp"}], ids=["partly", "fully"])
def test_whole_weight_comes_back_unchanged(names: set[str], check_vma: bool) -> None:
    pm, w = make_manager(), waves(8, 12)
    axes, shape = (sw.EMBED, sw.EMPTY), None if check_vma else (8, 12)
    actual = run_gather(pm, w, P(), P(), *axes, axis_names=names, check_vma=check_vma, shape=shape)
    assert_like(actual, jnp.asarray(w))


def test_varying_whole_weight_with_its_shape() -> None:
    """A whole weight that is cast to varying looks like a shard, until its shape is given."""
    pm, w = make_manager(), waves(8, 12)

    def f(w: Any) -> Any:
        varying = jax.lax.pcast(w, "dp", to="varying")
        return jax.lax.pmax(pm.gather(varying, sw.EMBED, sw.EMPTY, shape=(8, 12)), "dp")

    assert_like(
        jax.jit(jax.shard_map(f, mesh=pm.mesh, in_specs=P(), out_specs=P()))(w), jnp.asarray(w)
    )


def test_weight_used_in_shards_must_be_split() -> None:
    pm, w = make_manager(), waves(8, 12)
    says = facts("tp", "but", dim=1, axis="MLP_INTERMEDIATE", fix="shard_map")
    for options in ({}, {"check_vma": False, "shape": (8, 12)}):
        with raises(sw.ManualAxisError, says):
            run_gather(pm, w, P("dp"), P(), *KERNEL, **options)


CHAINS = RULES.replace(
    '[params]\nembed = "dp"', '[params]\nembed = "dp | -"\nmlp_intermediate = "tp | -"'
)


@pytest.mark.full(but=["shape1-spec1", "shape3-spec3"])
@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((6, 12), P("dp", "tp")),
        ((6, 10), P("dp")),
        ((5, 12), P(None, "tp")),
        ((5, 10), P()),
        ((8, 4), P("dp", "tp")),
    ],
)
def test_chains_are_decided_on_the_global_size(shape: tuple[int, int], spec: Any) -> None:
    """A local size of 3 does not divide over dp=2, but the weight of size 6 does."""
    pm, w = make_manager(text=CHAINS), waves(*shape)
    assert pm.resolve(*KERNEL, role="param", shape=shape) == spec
    use = pm.resolve(*KERNEL, role="use", shape=shape)
    gathered = P("dp", *use)  # every device along dp shows what it has

    def f(w: Any, shape: Any) -> Any:
        actual = pm.gather(w, *KERNEL, shape=shape)[None]
        return (
            actual
            if "dp" in jax.typeof(actual).manual_axis_type.varying
            else jax.lax.pcast(actual, "dp", to="varying")
        )

    actual = jax.jit(
        jax.shard_map(lambda w: f(w, None), mesh=pm.mesh, in_specs=spec, out_specs=gathered)
    )(w)
    assert_like(actual, jnp.stack([w, w]))

    def untracked(w: Any) -> Any:
        return pm.gather(w, *KERNEL, shape=shape)[None]

    actual = jax.jit(
        jax.shard_map(untracked, mesh=pm.mesh, in_specs=spec, out_specs=gathered, check_vma=False)
    )(w)
    assert_like(actual, jnp.stack([w, w]))


def test_ambiguous_global_shape_is_refused() -> None:
    text = RULES.replace('[params]\nembed = "dp"', '[params]\nembed = "dp | -"\nvocab = "dp | -"')
    pm = make_manager(text=text)
    axes = (sw.EMBED, sw.VOCAB)

    def gather(shape: Any, spec: Any) -> Any:
        def f(w: Any) -> Any:
            return pm.gather(w, *axes, shape=shape)[None]

        return jax.jit(
            jax.shard_map(f, mesh=pm.mesh, in_specs=spec, out_specs=P("dp"), axis_names={"dp"})
        )

    with raises(sw.ShapeRequiredError, "(3, 4)", fix="check_vma") as caught:
        gather(None, P("dp"))(waves(6, 4))
    assert "shape=" in str(caught.value)
    assert_like(gather((6, 4), P("dp"))(waves(6, 4))[0], jnp.asarray(waves(6, 4)))
    assert_like(gather((3, 8), P(None, "dp"))(waves(3, 8))[1], jnp.asarray(waves(3, 8)))


@VMA
@pytest.mark.parametrize(
    ("stored", "gather", "moves"),
    [
        ("tp+dp", "dp", 0),
        ("dp+tp", "dp", 1),
        ("dp+tp", "tp", 0),
        ("dp+tp", "dp+tp", 0),
        ("dp+tp", "-", 0),
    ],
)
@pytest.mark.full(but=["dp+tp-dp+tp-0-no vma", "tp+dp-dp-0-vma"])
def test_two_mesh_axes_in_one_dim(stored: str, gather: str, moves: int, check_vma: bool) -> None:
    """If a gathered mesh axis comes before one that stays, shards change places first."""
    text = RULES.replace("[params]", f'[params]\nvocab = "{stored}"').replace(
        'gather = "dp"', f'gather = "{gather}"'
    )
    text = text.replace('vocab = "tp"\nopen', 'vocab = "-"\nopen')
    pm, w = make_manager(text=text), waves(16, 3)
    axes = (sw.VOCAB, sw.EMPTY)
    spec, use = pm.resolve(*axes, role="param"), pm.resolve(*axes, role="use")
    kept = [axis for axis in ("dp", "tp") if axis not in gather]
    lost = tuple(axis for axis in ("dp", "tp") if axis in gather)

    def f(w: Any) -> Any:
        def gathered(w: Any) -> Any:
            return pm.gather(w, *axes, shape=None if check_vma else (16, 3))

        weights = jnp.arange(1.0, 1 + gathered(w).shape[0])[:, None]
        gradient = jax.grad(lambda w: (jnp.sin(gathered(w)) * weights).sum())(w)
        return gathered(w)[None], gradient

    run = jax.jit(
        jax.shard_map(
            f,
            mesh=pm.mesh,
            in_specs=spec,
            out_specs=(P(lost or None, *use), spec),
            check_vma=check_vma,
        )
    )
    actual, gradient = run(w)
    copies = actual.shape[0]
    assert_like(actual, jnp.stack([w] * copies))
    local = 16 // int(np.prod([pm.mesh.shape[axis] for axis in kept]))
    weights = np.tile(np.arange(1.0, 1 + local, dtype=np.float32), 16 // local)[:, None]
    assert_like(gradient, jnp.asarray(np.cos(w) * weights * copies))
    if lost:
        assert_collectives(
            run, w, all_gather=range(1, 3), permute=range(moves, 3 * moves + 1), mesh=pm.mesh
        )


def test_several_dims_are_gathered() -> None:
    text = RULES.replace(
        '[params]\nembed = "dp"', '[params]\nembed = "dp"\nmlp_intermediate = "tp"'
    ).replace('gather = "dp"', 'gather = "dp+tp"')
    pm = make_manager(
        text=text.replace('mlp_intermediate = "tp"\nhead', 'mlp_intermediate = "-"\nhead')
    )
    w = waves(8, 12)
    assert pm.resolve(*KERNEL, role="use") == P()
    actual = run_gather(pm, w, P("dp", "tp"), P("dp", "tp"), *KERNEL)
    assert_like(actual, jnp.tile(w, (2, 4)))
    actual = run_gather(pm, w, P("dp"), P("dp"), *KERNEL)
    assert_like(actual, jnp.tile(w, (2, 1)))  # whole over tp, a shard over dp


@VMA
@pytest.mark.parametrize("remat", [False, True], ids=["kept", "remat"])
@pytest.mark.full(but=["kept-vma"])
def test_stacked_layers_in_a_scan(remat: bool, check_vma: bool) -> None:
    pm = fsdp()
    shapes = {"up": (3, 16, 8), "down": (3, 8, 16)}
    stack = {name: waves(*shape) for name, shape in shapes.items()}
    axes = {"up": sw.stacked(sw.ColumnWise), "down": sw.stacked(sw.RowWise)}
    x = waves(8, 16)

    def layer(x: Any, w: Any, gather: Any) -> Any:
        return jnp.tanh(x @ gather(w["up"], *KERNEL)) @ gather(w["down"], *reversed(KERNEL)), None

    def apply(x: Any, stack: Any, gather: Any) -> Any:
        step = lambda x, w: layer(x, w, gather)  # noqa: E731
        return (jax.lax.scan(jax.checkpoint(step) if remat else step, x, stack)[0] ** 2).sum()

    def f(x: Any, stack: Any) -> Any:
        return jax.lax.psum(apply(x, stack, sw.gather), "fsdp")

    mapped = pm.shard_map(f, in_axes=[ROWS, axes], out_axes=(), check_vma=check_vma)
    with pm:
        placed = pm.shard(stack, axes, role="param")
        value, gradient = jax.jit(jax.value_and_grad(mapped, argnums=1))(x, placed)
    np.testing.assert_allclose(value, apply(x, stack, same), rtol=1e-5)
    wanted = jax.grad(lambda stack: apply(x, stack, same))(stack)
    jax.tree.map(
        lambda weight, other: np.testing.assert_allclose(weight, other, rtol=2e-4, atol=1e-3),
        gradient,
        wanted,
    )
    assert sharded_over(gradient["up"], pm.mesh, None, "fsdp")


def test_vmap_and_jit_inside() -> None:
    pm, ws = fsdp(), waves(3, 16, 8)

    def f(ws: Any) -> Any:
        gather_jitted = jax.jit(lambda w: sw.gather(w, *KERNEL))
        return jax.lax.pmax(jax.vmap(gather_jitted)(ws), "fsdp")

    mapped = jax.shard_map(f, mesh=pm.mesh, in_specs=P(None, "fsdp"), out_specs=P())
    with pm:
        assert_like(jax.jit(mapped)(ws), jnp.asarray(ws))


@VMA
def test_trees_paths_and_shapes(check_vma: bool) -> None:
    pm = make_manager(text=RULES + '[[tensors]]\nmatch = "lm_head/.*"\nembed = "-"\n')
    tree = {"mlp": {"kernel": waves(8, 8)}, "lm_head": {"kernel": waves(8, 8)}}
    specs = {"mlp": {"kernel": P("dp", "tp")}, "lm_head": {"kernel": P(None, "tp")}}
    wholes = {"mlp": {"kernel": P("dp", "tp")}, "lm_head": {"kernel": P(None, "tp")}}
    shapes = None if check_vma else jax.eval_shape(lambda: tree)

    def f(tree: Any) -> Any:
        return pm.gather(tree, KERNEL, path="", shape=shapes)

    actual = jax.jit(
        jax.shard_map(f, mesh=pm.mesh, in_specs=(specs,), out_specs=wholes, check_vma=check_vma)
    )(tree)
    assert actual["mlp"]["kernel"].shape == (16, 8), "once per device along dp"
    assert actual["lm_head"]["kernel"].shape == (8, 8), "stored whole along dp"
    with raises(sw.StrategyError, "lm_head/.*", fix="layers/mlp/up"):
        run_gather(pm, waves(8, 8), P("dp", "tp"), P("dp", "tp"), *KERNEL, check_vma=check_vma)
    with raises(sw.StrategyError, "tree", fix="jax.eval_shape"):
        pm.gather(tree, KERNEL, path="", shape={"mlp": (8, 8)})


@pytest.mark.full(but=["vma"])
@VMA
def test_merged_dims_array_specs_and_bfloat16(check_vma: bool) -> None:
    pm, w = make_manager(), jnp.asarray(waves(8, 16), jnp.bfloat16)
    flat = (sw.EMBED, sw.merged((sw.KV_HEAD, 4), (sw.KV_HEAD_DIM, 4)))
    shape = None if check_vma else (8, 16)
    local = run_gather(pm, w, P("dp", "tp"), P("dp", "tp"), *flat, shape=shape, check_vma=check_vma)
    assert local.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(local, np.float32), np.tile(np.asarray(w, np.float32), (2, 1))
    )
    spec = sw.ArraySpec((8, 16), jnp.bfloat16, KERNEL)
    local = run_gather(pm, w, P("dp", "tp"), P("dp", "tp"), spec, check_vma=check_vma)
    np.testing.assert_array_equal(
        np.asarray(local, np.float32), np.tile(np.asarray(w, np.float32), (2, 1))
    )
    with raises(sw.RankMismatchError, "(8, 8)", "ArraySpec", "(8, 16)"):
        run_gather(pm, w, P("dp", "tp"), P("dp", "tp"), spec, check_vma=check_vma, shape=(8, 8))


@pytest.mark.parametrize(
    "axes",
    [sw.ColumnWise, sw.ArraySpec((16, 8), jnp.float32, KERNEL), P("fsdp"), P()],
    ids=["layout", "ArraySpec", "literal", "whole"],
)
def test_inputs_give_the_shape_without_tracking(axes: Any) -> None:
    pm, w = fsdp(), waves(16, 8)

    def f(w: Any) -> Any:
        return jax.jit(lambda w: sw.gather(w * 1, *KERNEL))(w)

    with pm:
        actual = pm.shard_map(f, in_axes=[axes], out_axes=P(), check_vma=False)(w)
        assert_like(actual, jnp.asarray(w))


def test_unknown_shape_is_refused() -> None:
    pm, w = fsdp(), waves(16, 8)
    says = facts("(2, 8)", fix="check_vma")
    with raises(sw.ShapeRequiredError, says) as caught:
        run_gather(pm, w, P("fsdp"), P(), *KERNEL, check_vma=False)
    assert "shape=" in str(caught.value)

    def derived(w: Any, other: Any) -> Any:
        return sw.gather(jnp.concatenate([w, other]), *KERNEL)

    mapped = pm.shard_map(
        derived, in_axes=[sw.ColumnWise, sw.ColumnWise], out_axes=P(), check_vma=False
    )
    with pm, raises(sw.ShapeRequiredError, "(4, 8)", fix="check_vma"):
        mapped(w, w)
    both = pm.shard_map(
        lambda w, v: sw.gather(w, *KERNEL), in_axes=[P("fsdp"), P()], out_axes=P(), check_vma=False
    )
    with pm, raises(sw.ShapeRequiredError, "(2, 8)", "(16, 8)", fix="check_vma"):
        both(waves(16, 8), waves(2, 8))
    plain = run_gather(pm, w, P("fsdp"), P("fsdp"), sw.EMPTY, sw.MLP_INTERMEDIATE, check_vma=False)
    assert_like(plain, jnp.asarray(w))  # what is gathered nowhere needs no shape


def test_inner_jit_is_traced_per_map() -> None:
    """One jitted function in two maps: the local shapes are equal, the weights are not."""
    pm = fsdp()
    inner = jax.jit(lambda w: sw.gather(w, *KERNEL))
    with pm:
        whole = pm.shard_map(inner, in_axes=[P()], out_axes=P(), check_vma=False)(waves(16, 8))
        shard = pm.shard_map(inner, in_axes=[sw.ColumnWise], out_axes=P(), check_vma=False)(
            waves(128, 8)
        )
    assert (whole.shape, shard.shape) == ((16, 8), (128, 8))
    assert_like(shard, jnp.asarray(waves(128, 8)))


@pytest.mark.full(but=["vma"])
@VMA
def test_gathering_twice_is_gathering_once(check_vma: bool) -> None:
    """Inside pm.shard_map, and anywhere with the shape."""
    text = RULES.replace("[params]", '[params]\nvocab = "dp"')
    for axes, spec, use in (
        (KERNEL, P("dp", "tp"), P(None, "tp")),
        ((sw.VOCAB, sw.EMPTY), P("dp"), P()),
    ):
        pm, w = make_manager(text=text), waves(8, 12)
        annotation = sw.ArraySpec((8, 12), jnp.float32, axes)
        assert pm.resolve(annotation) == spec

        def twice(w: Any, shape: Any = None, pm: Any = pm, axes: Any = axes) -> Any:
            return pm.gather(pm.gather(w, *axes, shape=shape), *axes, shape=shape)[None]

        actual = pm.shard_map(
            twice, in_axes=[annotation], out_axes=P("dp", *use), check_vma=check_vma
        )(w)
        assert_like(actual, jnp.stack([w, w]))
        mapped = jax.shard_map(
            lambda w, f=twice: f(w, (8, 12)),
            mesh=pm.mesh,
            in_specs=spec,
            out_specs=P("dp", *use),
            check_vma=check_vma,
        )
        assert_like(jax.jit(mapped)(w), jnp.stack([w, w]))


def test_input_split_elsewhere_is_refused() -> None:
    pm = fsdp()
    mapped = pm.shard_map(
        lambda w: sw.gather(w, *KERNEL), in_axes=[P(None, "fsdp")], out_axes=P(), check_vma=False
    )
    with (
        pm,
        raises(sw.ManualAxisError, "fsdp", axis="MLP_INTERMEDIATE", fix="shard_map"),
    ):
        mapped(waves(16, 8))


def test_nested_in_another_map_needs_the_shape() -> None:
    """The inner map sees shards of the outer one, whose shapes are not global."""
    text = RULES.replace(
        '[params]\nembed = "dp"', '[params]\nembed = "dp"\nmlp_intermediate = "tp"'
    )
    pm = make_manager(
        text=text.replace('gather = "dp"', 'gather = "dp+tp"').replace(
            'mlp_intermediate = "tp"\nhead', 'mlp_intermediate = "-"\nhead'
        )
    )

    def nested(shape: Any, check_vma: bool) -> Any:
        def f(w: Any) -> Any:
            return pm.gather(w, *KERNEL, shape=shape)

        inner = pm.shard_map(
            f, in_axes=[P(None, "tp")], out_axes=P(None, "tp"), check_vma=check_vma
        )
        outer = jax.shard_map(
            inner,
            mesh=pm.mesh,
            in_specs=P("dp"),
            out_specs=P("dp"),
            axis_names={"dp"},
            check_vma=check_vma,
        )
        return jax.jit(outer)(waves(8, 12))

    with raises(sw.ShapeRequiredError, "(4, 3)", fix="check_vma"):
        nested(None, False)
    for shape, check_vma in (((8, 12), False), ((8, 12), True), (None, True)):
        assert_like(nested(shape, check_vma), jnp.tile(waves(8, 12), (2, 4)))


def test_wrong_shapes() -> None:
    pm, w = make_manager(), waves(8, 12)
    message = facts("(8, 12)", "(16, 12)", fix="shard_map")
    with raises(sw.RankMismatchError, message):
        pm.gather(w, *KERNEL, shape=(16, 12))
    message = facts(16, "dp", dim=0, axis="EMBED", size=4, fix="shard_map")
    with raises(sw.RankMismatchError, message):
        run_gather(pm, w, P("dp", "tp"), P("dp", "tp"), *KERNEL, shape=(16, 12))
    with raises(sw.RankMismatchError, "EMBED", "MLP_INTERMEDIATE", 2, 1, fix="EMPTY"):
        run_gather(pm, waves(8), P("dp"), P("dp"), *KERNEL)
    with raises(
        sw.IndivisibleError, "tp=4", dim=1, axis="MLP_INTERMEDIATE", size=6, fix="mlp_intermediate"
    ):
        run_gather(pm, waves(8, 6), P("dp"), P("dp"), *KERNEL, axis_names={"dp"})
    text = RULES.replace("[params]", '[params]\nvocab = "dp+tp"').replace(
        'gather = "dp"', 'gather = "dp+tp"'
    )
    square = sw.PartitionManager(sw.Strategy.loads(text, format="toml"), mesh=cpu_mesh("dp:2,tp:2"))
    with raises(sw.RankMismatchError, 8, "dp", dim=0, axis="VOCAB", size=4, fix="shard_map"):
        run_gather(square, waves(8), P("dp"), P("dp"), sw.VOCAB, shape=(8,), check_vma=False)


def test_explain_agrees_with_what_is_applied() -> None:
    pm, w = make_manager(), waves(8, 12)

    def f(w: Any) -> Any:
        resolution = pm.explain(*KERNEL, role="use", shape=(8, 12))
        assert resolution.decisions[0].gathered == ("dp",)
        sizes = [
            size // int(np.prod([pm.mesh.shape[axis] for axis in decision.mesh_axes]))
            for size, decision in zip((8, 12), resolution.decisions, strict=True)
        ]
        gathered = pm.gather(w, *KERNEL)
        assert list(gathered.shape) == sizes
        return gathered

    jax.jit(jax.shard_map(f, mesh=pm.mesh, in_specs=P("dp", "tp"), out_specs=P("dp", "tp")))(w)
