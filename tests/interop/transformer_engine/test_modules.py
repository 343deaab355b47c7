"""What the modules refuse, and what they do where TransformerEngine itself fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax.linen")

import flax.linen as nn

import shardwright as sw
from shardwright.interop.transformer_engine import flax as te
from tests.docs import snippets

PAGE = Path(__file__).resolve().parents[3] / "docs" / "transformer-engine.md"
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 8)), jnp.float32)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (te.LayerNorm(layernorm_type="batch"), "layernorm_type='batch' is unknown"),
        (te.LayerNorm(layernorm_type="rmsnorm", zero_centered_gamma=True), "zero_centered_gamma"),
        (te.LayerNorm(scale_axes=("a", "b")), "scale: the parameter has shape"),
        (te.DenseGeneral(5, kernel_axes=("a",)), "kernel: the parameter has shape"),
        (te.LayerNormDenseGeneral(5, axis=-2), "axis=-2 is not -1"),
        (te.DenseGeneral(5, input_axes=("a",)), "x has shape"),
    ],
)
def test_errors(module: Any, says: str) -> None:
    with pytest.raises(sw.ShardingError, match=says):
        module.init(jax.random.key(0), X)


def test_dims_that_are_not_neighbors() -> None:
    """TransformerEngine cannot compute the gradient of such a product."""
    x = X.reshape(2, 7, 4, 2)
    module = te.DenseGeneral((2, 3), axis=(1, 3))
    params = nn.unbox(module.init(jax.random.key(0), x))["params"]

    def loss(params: Any) -> Any:
        return jnp.sum(jnp.sin(module.apply({"params": params}, x)))

    def expected(params: Any) -> Any:
        y = jnp.einsum("blhd,ldoq->bhoq", x, params["kernel"]) + params["bias"]
        return jnp.sum(jnp.sin(y))

    grads, others = jax.grad(loss)(params), jax.grad(expected)(params)
    for name, value in others.items():
        np.testing.assert_allclose(grads[name], value, rtol=1e-5, atol=1e-5)


def test_imports_of_the_page() -> None:
    """The program of TransformerEngine runs after its import is changed."""
    before, after = (block.text for block in snippets.blocks(PAGE.read_text(encoding="utf-8"))[:2])
    ported = before.replace("transformer_engine.jax", "shardwright.interop.transformer_engine")
    assert ported in after
    exec(ported, {})


def test_flax_is_imported_on_first_use() -> None:
    code = (
        "import sys; sys.modules['flax'] = None; sys.modules['flax.linen'] = None\n"
        "import shardwright.interop.transformer_engine as te\n"
        "te.MeshResource('dp')\n"
        "te.flax"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "LayerError" in done.stderr
    assert "pip install flax" in done.stderr
