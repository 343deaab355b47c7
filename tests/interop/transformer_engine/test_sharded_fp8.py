"""A layer in fp8 on a mesh gives what it gives without one, and `pm.plan` reads it."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.raising import facts, raises

pytest.importorskip("flax.linen")

import flax.linen as nn

import shardwright as sw
import shardwright.interop.transformer_engine as te
from shardwright.interop import flax as bridge
from shardwright.plan.collectives import Kind
from shardwright.testing import cpu_mesh
from tests.interop.transformer_engine.test_sharded_layers import KINDS, OWN, RULES

RECIPES = {
    "delayed": te.recipe.DelayedScaling(amax_history_len=4),
    "current": te.recipe.Float8CurrentScaling(),
    "mxfp8": te.recipe.MXFP8BlockScaling(),
}
# The part of every contracted dim on a device is a multiple of 32.
LAYER = te.flax.TransformerLayer(
    hidden_size=128,
    mlp_hidden_size=128,
    num_attention_heads=4,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    use_bias=True,
    mlp_activations=("silu", "linear"),
)
SMALL = te.flax.LayerNormMLP(
    intermediate_dim=64,
    kernel_axes_1=(te.sharding.W_FSDP_AXES, te.sharding.W_JOINED_AXES, te.sharding.W_TP_AXES),
    kernel_axes_2=(te.sharding.W_TP_AXES, te.sharding.W_FSDP_AXES),
    scale_axes=(None,),
    ln_bias_axes=(None,),
)
KEY = jax.random.key(0)
MESHES = {"fsdp": "fsdp:4", "fsdp_tp": "fsdp:4,tp:2"}
# A mesh with one axis is not mixed.
PLACES = [
    (preset, kind) for preset in MESHES for kind in KINDS if (preset, kind) != ("fsdp", "mixed")
]


def inputs() -> Any:
    return jnp.asarray(np.random.default_rng(0).standard_normal((8, 32, 128)), jnp.float32)


def loss(module: Any, variables: Any, x: Any) -> Any:
    y = module.apply(variables, x, deterministic=True)
    y = y[0] if isinstance(y, tuple) else y
    return jnp.sum(jnp.sin(y)), y


@functools.cache
def unsharded(module: Any, recipe: str) -> Any:
    """Return the boxed variables, and output and gradients without a mesh."""
    x = inputs()
    with te.autocast(enabled=True, recipe=RECIPES[recipe]):
        init = functools.partial(module.init, deterministic=True)
        boxed = jax.jit(init)(KEY, x)
        run = jax.jit(jax.grad(functools.partial(loss, module), (0, 1), has_aux=True))
        return boxed, run(nn.unbox(boxed), x)


def on_mesh(module: Any, recipe: str, preset: str, kind: str, context: str) -> Any:
    """Return output and gradients on a mesh, and the parameters as they were stored."""
    mesh = cpu_mesh(MESHES[preset], axis_types=KINDS[kind])
    tensor = "tp" if preset == "fsdp_tp" else None
    own = te.MeshResource(fsdp_resource="fsdp", tp_resource=tensor)
    boxed, _ = unsharded(module, recipe)
    options = {"enabled": True, "recipe": RECIPES[recipe]}
    with jax.set_mesh(mesh), te.autocast(**options, mesh_resource=own):
        rules = te.extend_logical_axis_rules(tuple((name, tensor and axis) for name, axis in RULES))
        specs = nn.logical_to_mesh(nn.get_partition_spec(boxed), rules)
        place = lambda leaf, spec: jax.device_put(leaf, jax.NamedSharding(mesh, spec))  # noqa: E731
        variables = jax.tree.map(place, nn.unbox(boxed), specs)
        run = jax.jit(jax.grad(functools.partial(loss, module), (0, 1), has_aux=True))
        if context == "resource":
            return variables, run(variables, inputs())
    pm = sw.PartitionManager(sw.Strategy.preset(preset), mesh=mesh, mode="train")
    with pm, te.autocast(**options, mesh_resource=own):
        return variables, run(variables, inputs())


def check(module: Any, recipe: str, preset: str, kind: str, context: str) -> None:
    variables, got = on_mesh(module, recipe, preset, kind, context)
    _, wanted = unsharded(module, recipe)
    assert "fsdp" in str(got[1].sharding)
    pairs = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, leaf), own in zip(pairs, jax.tree.leaves(got), strict=True):
        name = jax.tree_util.keystr(path)
        error, largest = np.abs(np.asarray(own) - np.asarray(leaf)), np.max(np.abs(leaf))
        if "fp8_metas" in name:
            assert np.max(error) <= 1e-5 * largest, name
        elif largest > 1e-2:
            # One unit of the format, where a sum in another order was rounded the other way.
            assert np.max(error) <= 2**-3 * largest, name
            assert np.linalg.norm(error) <= 1e-2 * np.linalg.norm(leaf), name
    for gradient, value in zip(
        jax.tree.leaves(got[0][0]["params"]), jax.tree.leaves(variables["params"]), strict=True
    ):
        if kind == "explicit":
            assert gradient.sharding.is_equivalent_to(value.sharding, value.ndim)


@pytest.mark.full
@pytest.mark.parametrize("context", ["resource", "manager"])
@pytest.mark.parametrize(("preset", "kind"), PLACES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.pairwise
def test_mlp_on_a_mesh(recipe: str, preset: str, kind: str, context: str) -> None:
    check(SMALL, recipe, preset, kind, context)


@pytest.mark.full
@pytest.mark.parametrize(("preset", "kind"), PLACES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.pairwise
def test_layer_on_a_mesh(recipe: str, preset: str, kind: str) -> None:
    check(LAYER, recipe, preset, kind, "manager")


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.ci
def test_plan_of_a_recipe(recipe: str) -> None:
    """The plan is complete. With a scale per tensor, kernels are gathered in fp8."""
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=cpu_mesh("fsdp:4,tp:2"))
    x = jax.ShapeDtypeStruct((8, 32, 128), jnp.float32)
    with te.autocast(enabled=True, recipe=RECIPES[recipe]), pm:
        boxed = jax.eval_shape(functools.partial(LAYER.init, deterministic=True), KEY, x)
        values, axes = bridge.arrays(boxed), bridge.annotate(boxed, {**te.NAMES, **OWN})
        specs = {
            name: jax.tree.map(lambda v, a: sw.ArraySpec(v.shape, v.dtype, a), value, axes[name])
            for name, value in values.items()
        }
        gradient = jax.grad(functools.partial(loss, LAYER), has_aux=True)
        report = pm.plan(gradient, values, x, specs=(specs, (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)))
    assert report.walked.complete, report.walked.unknown
    gathers = {event.logical_bytes for event in report.events if event.kind == Kind.ALL_GATHER}
    # `out` is [128, 128]; each device has one half of its first dim.
    width = 4 if recipe == "mxfp8" else 1
    assert 64 * 128 * width in gathers


def test_each_stage_of_pp_resource_has_its_scales() -> None:
    """Over other Manual mesh axes, an amax is that of all devices."""
    layer = te.flax.DenseGeneral(32)
    x = jnp.ones((4, 8, 32)) * jnp.array([1, 3, 10, 30])[:, None, None]
    with te.autocast(enabled=True, recipe=RECIPES["delayed"]):
        variables = nn.unbox(layer.init(KEY, x))
    metas = variables.pop("fp8_metas")

    def amaxes(resource: Any) -> Any:
        def local(metas: Any, x: Any) -> Any:
            def total(metas: Any) -> Any:
                return jnp.sum(layer.apply({**variables, "fp8_metas": metas}, x))

            after = jax.grad(total)(jax.tree.map(lambda leaf: leaf[0], metas))
            return after["x_amax_history"].max()[None]

        mesh = cpu_mesh("stage:2,dp:2")
        spec = jax.P("stage")
        stages = jax.shard_map(
            local, mesh=mesh, in_specs=(spec, jax.P(("stage", "dp"))), out_specs=spec
        )
        two = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), metas)
        with te.autocast(enabled=True, recipe=RECIPES["delayed"], mesh_resource=resource):
            return jax.jit(stages)(two, x)

    np.testing.assert_array_equal(amaxes(te.MeshResource("dp", pp_resource="stage")), [3, 30])


AXES = te.sharding
ON_TP = te.MeshResource(fsdp_resource="fsdp", tp_resource="tp")
SEQUENCE = te.MeshResource(fsdp_resource="fsdp", tpsp_resource="tp")
# A module, its resource, and what the error says; the mesh has Auto axes.
PARTS: dict[str, tuple[Any, Any, str]] = {
    "outputs": (
        te.flax.DenseGeneral(64, kernel_axes=(AXES.W_FSDP_AXES, AXES.W_TP_AXES)),
        ON_TP,
        facts("(64, 64)", 32, "tp=4", 16, dim=1, fix="current"),
    ),
    "inputs": (
        te.flax.DenseGeneral(32, kernel_axes=(AXES.W_TP_AXES, None)),
        ON_TP,
        facts("(64, 32)", 32, "tp=4", 16, dim=0, fix="current"),
    ),
    "tokens": (
        te.flax.DenseGeneral(
            32, input_axes=(AXES.BATCH_AXES, AXES.SEQLEN_TP_AXES, AXES.HIDDEN_AXES)
        ),
        SEQUENCE,
        facts("(8, 64, 64)", 32, "tp=4", 16, path="kernel", dim=1, fix="current"),
    ),
    "other-dims": (
        te.flax.DenseGeneral(
            32, axis=1, input_axes=(AXES.BATCH_AXES, AXES.HIDDEN_TP_AXES, AXES.HIDDEN_AXES)
        ),
        ON_TP,
        facts("(8, 64, 64)", 32, "tp=4", 16, path="kernel", dim=2, fix="current"),
    ),
    "norm": (
        te.flax.LayerNormDenseGeneral(
            32, dot_input_axes=(AXES.BATCH_AXES, AXES.HIDDEN_TP_AXES, None)
        ),
        ON_TP,
        facts("(8, 64, 64)", 32, "tp=4", 16, path="kernel", dim=1, fix="current"),
    ),
    "mlp": (
        te.flax.LayerNormMLP(
            128,
            kernel_axes_1=(None, None, AXES.W_TP_AXES),
            kernel_axes_2=(AXES.W_TP_AXES, AXES.W_FSDP_AXES),
            dot_2_input_axes=(AXES.BATCH_AXES, AXES.HIDDEN_TP_AXES, None),
        ),
        ON_TP,
        facts("(8, 64, 128)", 32, "tp=4", 16, path="wo_kernel", dim=1, fix="current"),
    ),
    "layer": (
        te.flax.TransformerLayer(
            hidden_size=64,
            mlp_hidden_size=64,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        ON_TP,
        facts("(8, 64, 64)", 32, "tp=4", 16, path="attention/out/kernel", dim=2, fix="current"),
    ),
}


@pytest.mark.parametrize("by", ["resource", "manager", "rules"])
@pytest.mark.parametrize("case", PARTS)
@pytest.mark.full(but=["outputs-resource", "norm-manager"])
@pytest.mark.ci
def test_blocks_of_shards_over_auto_axes(case: str, by: str) -> None:
    """The logical names say how a dim is sharded, and a part is a multiple of 32."""
    module, resource, message = PARTS[case]
    # Under `fsdp_tp_sp` a manager shards the sequence too, and the batch and weights over fsdp.
    mesh, x = cpu_mesh("fsdp:2,tp:4"), jnp.ones((8, 64, 64))
    pm = sw.PartitionManager(
        sw.Strategy.preset("fsdp_tp_sp" if resource is SEQUENCE else "fsdp_tp"),
        mesh=mesh,
        mode="train",
    )

    def train() -> Any:
        variables = nn.unbox(module.init(KEY, x))
        return jax.grad(lambda v: jnp.sum(jax.tree.leaves(module.apply(v, x))[0]))(variables)

    with contextlib.ExitStack() as stack:
        stack.enter_context(pm if by == "manager" else jax.set_mesh(mesh))
        stack.enter_context(te.autocast(True, RECIPES["mxfp8"], resource))
        if by == "rules":
            stack.enter_context(nn.logical_axis_rules(te.extend_logical_axis_rules(())))
        caught = stack.enter_context(raises(sw.LayerError, message))
        jax.eval_shape(train)
    assert caught.value.mesh_axes == ("tp",)


def test_blocks_of_shards() -> None:
    """Over an Explicit mesh axis, the part of a device is a multiple of 32 too."""
    module = te.flax.DenseGeneral(32, use_bias=False)
    x, kernel = jnp.ones((4, 32, 64)), jnp.ones((64, 32))
    mesh = cpu_mesh("fsdp:4", axis_types="explicit")
    with jax.set_mesh(mesh), te.autocast(True, RECIPES["mxfp8"], te.MeshResource()):
        kernel = jax.device_put(kernel, jax.NamedSharding(mesh, jax.P("fsdp")))
        message = facts("(64, 32)", 32, "fsdp=4", 16, dim=0, fix="current")
        with raises(sw.LayerError, message):
            jax.eval_shape(module.apply, {"params": {"kernel": kernel}}, x)
