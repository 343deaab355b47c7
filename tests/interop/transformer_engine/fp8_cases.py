"""fp8 recipes that are compared with TransformerEngine.

`tools/te_fp8.py` runs the cases on TransformerEngine's own code, the tests on ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.interop.transformer_engine import cases

# Largest values of the steps of a state: growing, falling, and three that say nothing.
AMAXES = [1.5, 3.04, 303.7, 0.0, 1e-30, np.inf, 2.5, np.nan, 0.7, 0.1, 1e30, 3.0]
STATES = [
    (algorithm, margin, form)
    for algorithm in ("max", "most_recent")
    for margin in (0, 2)
    for form in ("float8_e4m3fn", "float8_e5m2")
]
RECIPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "delayed": ("DelayedScaling", {"amax_history_len": 4}),
    "delayed-most-recent": (
        "DelayedScaling",
        {"amax_history_len": 4, "amax_compute_algo": "most_recent", "margin": 1, "format": "E4M3"},
    ),
    "current": ("Float8CurrentScaling", {}),
    "mxfp8": ("MXFP8BlockScaling", {}),
}
MODULES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dense": ("DenseGeneral", {"features": 32, "use_bias": True}),
    "norm-dense": ("LayerNormDenseGeneral", {"features": (2, 32)}),
    "mlp": ("LayerNormMLP", {"intermediate_dim": 32, "activations": ("silu", "linear")}),
}
LAYER = {
    "hidden_size": 32,
    "mlp_hidden_size": 64,
    "num_attention_heads": 1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "intermediate_dropout": 0.0,
}
STEPS = 6


def drawn(name: str, *shape: int) -> np.ndarray:
    """Return values of a wide range that depend on the name alone."""
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big"))
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, size=shape))
    return values.astype(np.float32)


def digest(*arrays: Any) -> str:
    """Return a hash of the bits of arrays."""
    whole = b"".join(np.ascontiguousarray(np.asarray(array)).tobytes() for array in arrays)
    return hashlib.sha256(whole).hexdigest()[:16]


def recipe_of(namespace: Any, name: str) -> Any:
    """Return a recipe of a namespace with `recipe`, ours or TransformerEngine's."""
    title, fields = RECIPES[name]
    fields = dict(fields)
    if "format" in fields:
        fields["fp8_format"] = getattr(namespace.recipe.Format, fields.pop("format"))
    return getattr(namespace.recipe, title)(**fields)


def run_module(namespace: Any, name: str, recipe: str) -> dict[str, np.ndarray]:
    """Return output, gradients and new state of one call of a module."""
    title, fields = MODULES[name]
    module = getattr(namespace.flax, title)(**fields)
    x = jnp.asarray(drawn(f"{name}/x", 1, 32, 32))
    with namespace.autocast(enabled=True, recipe=recipe_of(namespace, recipe)):
        variables = nn.unbox(module.init(jax.random.key(0), x))
        params = jax.tree_util.tree_map_with_path(_parameter, variables["params"])
        state = {
            key: jnp.asarray([40.0]) if key.endswith("scale") else value
            for key, value in variables.get("fp8_metas", {}).items()
        }

        def loss(params: Any, state: Any, x: Any) -> Any:
            out = module.apply({"params": params, "fp8_metas": state}, x)
            y = out[0] if isinstance(out, tuple) else out
            return jnp.sum(y * jnp.asarray(drawn(f"{name}/y", *y.shape))), y

        grads, y = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(params, state, x)
    return {
        "out": np.asarray(y),
        **cases.flat({"grad": grads[0], "state": grads[1], "x": grads[2]}),
    }


def run_layer(namespace: Any, recipe: str) -> dict[str, np.ndarray]:
    """Train a whole layer for six steps, and return its state."""
    layer = namespace.flax.TransformerLayer(**LAYER)
    with namespace.autocast(enabled=True, recipe=recipe_of(namespace, recipe)):
        x = jnp.asarray(drawn("layer/0", 2, 32, 32))
        variables = nn.unbox(layer.init(jax.random.key(0), x, deterministic=True))
        params = jax.tree_util.tree_map_with_path(_parameter, variables["params"])
        state = variables["fp8_metas"]

        def loss(params: Any, state: Any, x: Any) -> Any:
            y = layer.apply({"params": params, "fp8_metas": state}, x, deterministic=True)
            return jnp.mean(y * jnp.asarray(drawn("layer/y", *y.shape)))

        @jax.jit
        def step(params: Any, state: Any, x: Any) -> Any:
            grads, state = jax.grad(loss, (0, 1))(params, state, x)
            return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), state

        for number in range(STEPS):
            inputs = jnp.asarray(drawn(f"layer/{number}", 2, 32, 32)) * 2.0**number
            params, state = step(params, state, inputs)
    found: dict[str, np.ndarray] = cases.flat({"state": state})
    return found


def _parameter(path: Any, leaf: Any) -> Any:
    values = drawn(cases.path_of(path), *leaf.shape)
    return jnp.asarray(values / np.sqrt(leaf.shape[0]) / 4, leaf.dtype)


def histories(step: Callable[[Any, Any, Any], tuple[Any, Any]]) -> str:
    """Return a digest of all scales and histories of a state machine.

    Args:
      step: (scale `[1]`, history `[4]`, amax `[1]`) -> (scale, history).
    """
    scale, history, found = jnp.ones(1), jnp.zeros(4), []
    for amax in AMAXES:
        scale, history = step(scale, history, jnp.asarray([amax], jnp.float32))
        found += [scale, history]
    return digest(*found)
