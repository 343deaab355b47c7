"""What the modules refuse, and what they do where TransformerEngine itself fails."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.raising import Facts, facts, raises

pytest.importorskip("flax.linen")

import flax.linen as nn

import shardwright as sw
from shardwright.interop.transformer_engine import flax as te
from shardwright.interop.transformer_engine.flax.module import Dropout
from tests.docs import snippets
from tests.interop.transformer_engine import cases

PAGE = Path(__file__).resolve().parents[3] / "docs" / "transformer-engine.md"
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 8)), jnp.float32)


def init(module: Any) -> Any:
    """Return the shapes of the variables; nothing is compiled."""
    return jax.eval_shape(lambda: module.init(jax.random.key(0), X))


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (
            te.LayerNorm(layernorm_type="batch"),
            facts("batch", path="layernorm_type", fix="layernorm"),
        ),
        (
            te.LayerNorm(layernorm_type="rmsnorm", zero_centered_gamma=True),
            facts(
                "True",
                "layernorm_type",
                "rmsnorm",
                path="zero_centered_gamma",
                fix="layernorm_type",
            ),
        ),
        (te.LayerNorm(scale_axes=("a", "b")), facts("(8,)", "a", "b", path="scale")),
        (te.DenseGeneral(5, kernel_axes=("a",)), facts("(8, 5)", "a", path="kernel")),
        (te.LayerNormDenseGeneral(5, axis=-2), facts(-2, -1, path="axis")),
        (te.DenseGeneral(5, input_axes=("a",)), facts("(2, 7, 8)", "a", path="x")),
    ],
)
def test_errors(module: Any, says: Facts) -> None:
    with raises(sw.ShardingError, says):
        init(module)


def test_dims_that_are_not_neighbors() -> None:
    """TransformerEngine cannot compute the gradient of such a matmul."""
    x = X.reshape(2, 7, 4, 2)
    module = te.DenseGeneral((2, 3), axis=(1, 3))
    params = jax.jit(lambda x: nn.unbox(module.init(jax.random.key(0), x)))(x)["params"]

    def loss(params: Any) -> Any:
        return jnp.sum(jnp.sin(module.apply({"params": params}, x)))

    def expected(params: Any) -> Any:
        y = jnp.einsum("blhd,ldoq->bhoq", x, params["kernel"]) + params["bias"]
        return jnp.sum(jnp.sin(y))

    grads, others = jax.jit(lambda p: (jax.grad(loss)(p), jax.grad(expected)(p)))(params)
    for name, value in others.items():
        np.testing.assert_allclose(grads[name], value, rtol=1e-5, atol=1e-5)


def test_imports_of_the_page() -> None:
    """The program of TransformerEngine runs after its import is changed."""
    before, after = (block.text for block in snippets.blocks(PAGE.read_text(encoding="utf-8"))[:2])
    ported = before.replace("transformer_engine.jax", "shardwright.interop.transformer_engine")
    assert ported in after
    exec(ported, {})


def test_cpp_extensions_can_be_imported() -> None:
    """Programs of NVIDIA import it or its names, and do not use them."""
    tex = importlib.import_module("shardwright.interop.transformer_engine.cpp_extensions")
    names: dict[str, Any] = {}
    exec(f"from {tex.__name__} import gemm", names)
    gemm = names["gemm"]
    assert gemm is tex.gemm
    with raises(
        sw.LayerError,
        "TransformerEngine",
        "CUDA",
        fix="shardwright.interop.transformer_engine.flax",
    ) as caught:
        gemm(1, x=2)
    assert "transformer_engine.flax" in caught.value.fix
    with raises(
        sw.LayerError,
        "TransformerEngine",
        "CUDA",
        fix="shardwright.interop.transformer_engine.flax",
    ):
        type("Own", (gemm,), {})
    with pytest.raises(AttributeError, match="has no attribute '_gemm'"):
        _ = tex._gemm


@pytest.mark.full
@pytest.mark.ci
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


def test_window_without_a_mask() -> None:
    """TransformerEngine ignores the window of a causal call without a mask."""
    q = jnp.asarray(np.random.default_rng(1).standard_normal((1, 5, 2, 4)), jnp.float32)
    module = te.DotProductAttention(4, 2, window_size=(1, 0), transpose_batch_sequence=False)
    options = {"causal": True, "window": (1, 0), "mode": sw.MODE_TRAIN}
    attend = functools.partial(sw.attention.dot_product_attention, **options)
    ours, own = jax.jit(lambda q: (attend(q, q, q), module.apply({}, q, q, q)))(q)
    np.testing.assert_allclose(own, ours, atol=1e-6)


def test_dropout_masks_take_the_keys_of_flax() -> None:
    """The bits are those of flax's own dropout under the same path."""

    class Outer(nn.Module):
        kind: Any

        @nn.compact
        def __call__(self, x: Any) -> Any:
            return self.kind(0.3, name="Dropout_0")(x, deterministic=False)

    ones, rngs = jnp.ones((3, 5)), {"dropout": jax.random.key(2)}
    ours, theirs = (Outer(kind).apply({}, ones, rngs=rngs) for kind in (Dropout, nn.Dropout))
    assert (np.asarray(ours) == np.asarray(theirs)).all()


@pytest.mark.full
def test_activation_functions_and_low_rank_mlp() -> None:
    """TransformerEngine returns False for the first, and raises a TypeError for the second."""
    options = {"intermediate_dim": 12, "enable_layernorm": False}
    named = te.LayerNormMLP(activations=("tanh", "linear"), **options)
    given = te.LayerNormMLP(activations=(jnp.tanh, "linear"), **options)
    variables = nn.unbox(named.init(jax.random.key(0), X))
    np.testing.assert_allclose(
        named.apply(variables, X)[0], given.apply(variables, X)[0], atol=1e-6
    )
    lora = te.LayerNormMLP(
        activations=("silu", "linear"), enable_low_rank_adaptation=True, **options
    )
    params = nn.unbox(lora.init(jax.random.key(0), X))["params"]
    assert params["wi_lora_a_kernel"].shape == (8, 2, 32)
    assert params["wi_lora_b_kernel"].shape == (2, 32, 12)
    params["wi_lora_b_kernel"] += 0.1
    adapted = params["wi_kernel"] + jnp.einsum(
        "enr,nrf->enf", params["wi_lora_a_kernel"], params["wi_lora_b_kernel"]
    )
    plain = te.LayerNormMLP(activations=("silu", "linear"), **options)
    merged = {"params": {"wi_kernel": adapted, "wo_kernel": params["wo_kernel"]}}
    np.testing.assert_allclose(
        lora.apply({"params": params}, X)[0], plain.apply(merged, X)[0], atol=1e-4
    )


@pytest.mark.full
@pytest.mark.ci
def test_fused_checkpoint_of_a_learned_softmax() -> None:
    q = jnp.ones((1, 3, 2, 4))
    module = te.DotProductAttention(4, 2, softmax_type="learnable", transpose_batch_sequence=False)
    offset = {"softmax_offset": jnp.ones((1, 2, 1, 1))}
    results = [
        module.apply({"params": {f"_{kind}DotProductAttention_0": offset}}, q, q, q)
        for kind in ("Fused", "Unfused")
    ]
    np.testing.assert_array_equal(*results)


Q = jnp.ones((2, 3, 4, 6))
SEPARATE = {"transpose_batch_sequence": False}


@pytest.mark.parametrize(
    ("fields", "arrays", "says"),
    [
        ({"attn_mask_type": "paddin"}, (Q, Q, Q), facts("paddin", path=...)),
        ({"attn_mask_type": "padding"}, (Q, Q, Q), facts("mask", path=...)),
        ({"attn_bias_type": "post_scale_bias"}, (Q, Q, Q), facts("bias", path=...)),
        ({"softmax_type": "other"}, (Q, Q, Q), facts("other", path=...)),
        ({"qkv_layout": "t3hd"}, (Q, Q, Q), facts("t3hd", path=...)),
        ({"score_mod": max}, (Q, Q, Q), facts("score_mod", path=...)),
        ({"context_parallel_axis": "cp"}, (Q, Q, Q), facts("context_parallel_axis", path=...)),
        ({}, (Q, Q[:, :, :3], Q[:, :, :3]), facts(3, 4, path=...)),
        ({}, (Q, Q[:, :2], Q), facts(path=..., fix="batch")),
        ({}, (Q, Q.astype(jnp.bfloat16), Q), facts("bfloat16", path=..., fix="dtype")),
        ({}, (Q, Q, Q, jnp.ones((2, 3, 3))), facts("mask", "(2, 3, 3)", path=...)),
        ({}, (Q, Q, Q, [[1]]), facts("sequence_descriptor", "list", path=...)),
    ],
)
def test_errors_of_attention(fields: Any, arrays: Any, says: Facts) -> None:
    module = te.DotProductAttention(6, 4, **SEPARATE, **fields)
    with raises(sw.ShardingError, says):
        module.apply({}, *arrays)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (te.LayerNormMLP(activations=("gelo",)), facts("gelo", path="activations", fix="gelu")),
        (
            te.LayerNormMLP(activation_params={"beta": 1.0}),
            facts("beta", path="activation_params", fix="glu_linear_offset"),
        ),
        (te.LayerNormMLP(intermediate_dropout_rate=1.5), facts("1.5", "[0, 1)", path="rate")),
        (
            te.TransformerLayer(hidden_size=9),
            facts("num_attention_heads", 8, 9, path="hidden_size"),
        ),
        (
            te.TransformerLayer(layer_type="encoder"),
            facts("encoder", path="layer_type", fix="TransformerLayerType.ENCODER"),
        ),
        (
            te.TransformerLayer(layer_type=te.TransformerLayerType.DECODER),
            facts("output", path="encoded", fix="TransformerLayerType.ENCODER"),
        ),
        (
            te.TransformerLayer(low_rank_adaptation_scope="qkv"),
            facts("qkv", path="low_rank_adaptation_scope", fix="qkv_proj"),
        ),
    ],
)
def test_errors_of_layers(module: Any, says: Facts) -> None:
    with raises(sw.LayerError, says):
        init(module)


@pytest.mark.parametrize("name", cases.MODULES)
def test_shells_are_thin(name: str) -> None:
    """Besides fields and docstrings a class has at most 60 lines."""
    module = getattr(te, name)
    lines = inspect.getsource(module).splitlines()
    (tree,) = ast.parse("\n".join(lines)).body
    assert isinstance(tree, ast.ClassDef)
    left = {number for number, line in enumerate(lines, 1) if line.strip()}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or (node in tree.body and isinstance(node, ast.AnnAssign)):
            left -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    assert len(left) <= 60


def test_deprecated_fields_warn() -> None:
    with pytest.warns(DeprecationWarning, match="num_heads of MultiHeadAttention"):
        module = te.MultiHeadAttention(4, 1, num_heads=2, transpose_batch_sequence=False)
    assert module.num_attention_heads == 2
    with pytest.warns(UserWarning, match="transpose_batch_sequence of DotProductAttention"):
        te.DotProductAttention(4, 2)
    with raises(sw.LayerError, "longer", "exists", path="output_layernorm", fix="input_layernorm"):
        te.MultiHeadAttention(4, 2, output_layernorm=True, transpose_batch_sequence=False)
