"""fp8 recipes equal those of TransformerEngine itself."""

from __future__ import annotations

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.raising import Facts, facts, raises

pytest.importorskip("flax.linen")

import shardwright as sw
import shardwright.interop.transformer_engine as te
from shardwright.interop.transformer_engine.recipe import current_recipe
from shardwright.layers import fp8
from tests.interop.transformer_engine import fp8_cases as cases
from tests.interop.transformer_engine.goldens import PLACE


@functools.cache
def golden() -> Any:
    return json.loads((PLACE / "fp8.json").read_text(encoding="utf-8"))


@functools.cache
def module_values() -> dict[str, dict[str, np.ndarray]]:
    flat, at, found = np.load(PLACE / "fp8.npz")["values"], 0, {}
    for name, shapes in golden()["modules"].items():
        found[name] = {}
        for key, shape in shapes:
            size = int(np.prod(shape))
            found[name][key] = flat[at : at + size].reshape(shape)
            at += size
    assert at == flat.size
    return found


@pytest.mark.parametrize(("algorithm", "margin", "form"), cases.STATES)
def test_state_machine_is_bit_equal(algorithm: str, margin: int, form: str) -> None:
    recipe = fp8.DelayedScaling(margin=margin, history=4, algorithm=algorithm)

    def step(scale: Any, history: Any, amax: Any) -> tuple[Any, Any]:
        state = fp8.TensorScaling(scale=scale[0], history=history)
        after = fp8.step(recipe, state, amax[0], form)
        return after.scale[None], after.history

    assert cases.histories(step) == golden()["states"][f"{algorithm}/{margin}/{form}"]


@pytest.mark.full
@pytest.mark.parametrize("form", ["float8_e4m3fn", "float8_e5m2"])
def test_casts_are_bit_equal(form: str) -> None:
    x = jnp.asarray(cases.drawn("cast", 4, 64, 96))
    current = fp8.scale_of(jnp.max(jnp.abs(x)), form)
    for name, scale in (("delayed", jnp.float32(7)), ("current", current)):
        cast = fp8.quantize_tensor(x, scale, form)
        assert cases.digest(cast.value, cast.scale[None]) == golden()["casts"][f"{name}/{form}"]
    for dim in (1, 2):
        cast = fp8.quantize_blocks(x, dim, form)
        assert cases.digest(cast.value, cast.scale) == golden()["casts"][f"blocks/{dim}/{form}"]


@pytest.mark.parametrize(
    ("module", "recipe"),
    [
        pytest.param(
            module,
            recipe,
            marks=() if (module, recipe) == ("norm-dense", "delayed") else pytest.mark.full,
        )
        for module in cases.MODULES
        for recipe in cases.RECIPES
    ],
)
def test_modules_are_within_one_unit(module: str, recipe: str) -> None:
    own = cases.run_module(te, module, recipe)
    wanted = module_values()[f"{module}/{recipe}"]
    assert list(own) == list(wanted)
    for name, value in own.items():
        error, largest = np.abs(value - wanted[name]), np.max(np.abs(wanted[name]))
        if "state" in name:
            assert np.max(error) <= 1e-5 * largest, name
            continue
        # One unit in the last place of the format, where rounding went the other way.
        assert np.max(error) <= 2**-3 * largest, name
        assert np.linalg.norm(error) <= 2e-3 * np.linalg.norm(wanted[name]), name


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["delayed", "delayed-most-recent"])
def test_state_after_six_steps_of_a_layer(recipe: str) -> None:
    own, wanted = cases.run_layer(te, recipe), golden()["layer"][recipe]
    assert list(own) == list(wanted)
    assert len(own) == 4 * 3 * 2  # four matmuls, three tensors each, a scale and a history
    for name, value in own.items():
        other = np.asarray(wanted[name], np.float32)
        assert np.max(np.abs(value - other)) <= 1e-5 * np.max(np.abs(other)), name
        assert np.all(other != 1), name


def test_a_jitted_function_is_traced_again_under_a_recipe() -> None:
    module = te.flax.DenseGeneral(features=32)
    x = jnp.asarray(cases.drawn("again", 1, 32, 32))
    variables = jax.jit(module.init)(jax.random.key(0), x)
    call = jax.jit(module.apply)
    exact = call(variables, x)
    with te.autocast(enabled=True, recipe=te.recipe.Float8CurrentScaling()):
        narrow = call(variables, x)
        with te.global_shard_guard(te.MeshResource()):  # the recipe stays
            np.testing.assert_array_equal(call(variables, x), narrow)
    with te.autocast(enabled=True, recipe=te.recipe.MXFP8BlockScaling()):
        blocks = call(variables, x)
    np.testing.assert_array_equal(call(variables, x), exact)
    for value in (narrow, blocks):
        error = np.linalg.norm(value - exact) / np.linalg.norm(exact)
        assert 1e-3 < error < 0.1
    assert np.any(narrow != blocks)


def test_history_of_another_recipe_is_refused() -> None:
    module = te.flax.DenseGeneral(features=32)
    x = jnp.ones((1, 32, 32))
    with te.autocast(enabled=True, recipe=te.recipe.DelayedScaling(amax_history_len=4)):
        variables = jax.jit(module.init)(jax.random.key(0), x)
    with (
        te.autocast(enabled=True),
        raises(sw.LayerError, "(4,)", "amax_history_len", 1024, path="x_amax_history"),
    ):
        jax.eval_shape(module.apply, variables, x)


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        (te.recipe.NVFP4BlockScaling(), facts("NVFP4BlockScaling", path="recipe", fix="mxfp8")),
        (
            te.recipe.DelayedScaling(reduce_amax=False),
            facts("DelayedScaling", "reduce_amax", "False", path="recipe"),
        ),
        (
            te.recipe.DelayedScaling(amax_compute_algo=max),
            facts("DelayedScaling", "amax_compute_algo", path="recipe", fix="max"),
        ),
        (
            te.recipe.Float8CurrentScaling(use_power_2_scales=True),
            facts("Float8CurrentScaling", "use_power_2_scales", "True", path="recipe"),
        ),
        (
            te.recipe.MXFP8BlockScaling(fp8_format=te.recipe.Format.E5M2),
            facts(
                "MXFP8BlockScaling",
                "fp8_format",
                "Format.E5M2",
                "e5m2",
                path="recipe",
                fix="Format.HYBRID",
            ),
        ),
        (
            te.recipe.MXFP8BlockScaling(enable_2d_quantization=True),
            facts("MXFP8BlockScaling", "enable_2d_quantization", "True", path="recipe"),
        ),
        ("delayed", facts("str", path="recipe", fix="recipe.DelayedScaling")),
    ],
)
def test_recipes_that_are_refused(recipe: Any, match: Facts) -> None:
    with raises(sw.LayerError, match):
        te.autocast(enabled=True, recipe=recipe).__enter__()
    with te.autocast(enabled=False, recipe=recipe):
        pass


def by_numpy(amax: np.ndarray, scale: np.ndarray, margin: int = 0) -> np.ndarray:
    """Return the scales of a state by the formula, row by row."""
    largest = np.array([448.0, 448.0, 57344.0] * (len(amax) // 3), np.float32)
    new = scale.copy()
    for row, values in enumerate(amax):
        if 0 < values.max() < np.inf:
            new[row, 0] = largest[row] / values.max() / 2**margin
    return new


def test_update_fp8_metas() -> None:
    amax = np.abs(cases.drawn("metas", 6, 4))
    amax[1], amax[3, 2] = 0, np.inf
    scale = np.full((6, 1), 3.0, np.float32)
    layer = {
        "fp8_meta_amax_0": jnp.asarray(amax),
        "fp8_meta_scale_0": jnp.asarray(scale),
        "fp8_meta_scale_inv_0": jnp.asarray(1 / scale),
        "fp8_max_0": jnp.ones((6, 1)),
    }
    state = {
        "fp8_metas": {
            "attention": layer,
            "mlp": {"amax": amax[:3], "scale": scale[:3], "scale_inv": scale[:3]},
        },
        "params": {"kernel": 1.0},
    }
    new = jax.jit(te.update_fp8_metas)(state)
    wanted = by_numpy(amax, scale)
    own = new["fp8_metas"]["attention"]
    np.testing.assert_allclose(own["fp8_meta_scale_0"], wanted, rtol=1e-6)
    np.testing.assert_allclose(own["fp8_meta_scale_inv_0"], 1 / wanted, rtol=1e-6)
    np.testing.assert_array_equal(own["fp8_meta_amax_0"], amax)
    np.testing.assert_allclose(new["fp8_metas"]["mlp"]["scale"], wanted[:3], rtol=1e-6)
    assert new["params"] == {"kernel": 1.0}
    assert layer["fp8_meta_scale_0"][0, 0] == 3.0
    with te.autocast(enabled=True, recipe=te.recipe.DelayedScaling(margin=2)):
        halved = jax.jit(te.update_fp8_metas)(state)["fp8_metas"]["mlp"]["scale"]
    np.testing.assert_allclose(halved, by_numpy(amax[:3], scale[:3], 2), rtol=1e-6)


def test_margin_of_blocks_is_a_warning() -> None:
    """It has no effect in TransformerEngine, which does not say so."""
    with (
        pytest.warns(UserWarning, match=r"MXFP8BlockScaling\(margin=3\): the margin has no effect"),
        te.autocast(enabled=True, recipe=te.recipe.MXFP8BlockScaling(margin=3)),
    ):
        assert current_recipe() == fp8.BlockScaling(backward="float8_e4m3fn")


def test_update_fp8_metas_refuses_other_layouts() -> None:
    today = {"fp8_metas": {"qkv": {"x_scale": jnp.ones(1), "x_amax_history": jnp.zeros(4)}}}
    what = facts(
        "TransformerEngine", 2, path="fp8_metas/qkv/x_amax_history", fix="update_fp8_metas"
    )
    with raises(sw.LayerError, what):
        te.update_fp8_metas(today)
    with raises(sw.LayerError, "amax", "scale", "scale_inv", path="state", fix="fp8"):
        te.update_fp8_metas({"params": {}})
    odd = {"amax": jnp.zeros((2, 4)), "scale": jnp.ones((2, 1)), "scale_inv": jnp.ones((2, 1))}
    with raises(sw.LayerError, "(2, 4)", "(2, 1)", path="amax"):
        te.update_fp8_metas(odd)
    with (
        te.autocast(enabled=True, recipe=te.recipe.MXFP8BlockScaling()),
        raises(sw.LayerError, "BlockScaling", path="state", fix="DelayedScaling"),
    ):
        te.update_fp8_metas(odd)
