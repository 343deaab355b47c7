"""The dot product of a layer by its bits: a callable in training, a flax module to serve."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.interop import fjformer
from shardwright.interop.easydel import get_dot_general_by_bits, quantize, quantized_dot_general
from shardwright.testing import cpu_mesh
from tests.raising import Facts, facts, raises

MATMUL = (((1,), (0,)), ((), ()))


def test_without_bits() -> None:
    assert get_dot_general_by_bits() == {}
    assert get_dot_general_by_bits(None, "serve") == {}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.full(but=["4"])
def test_train_without_flax(bits: int) -> None:
    (name, value) = next(iter(get_dot_general_by_bits(bits).items()))
    assert name == "dot_general_cls"
    x, y = (
        jax.random.normal(jax.random.key(0), (3, 8)),
        jax.random.normal(jax.random.key(1), (8, 5)),
    )
    np.testing.assert_array_equal(
        value()(x, y, MATMUL, precision=None), quantized_dot_general(x, y, MATMUL, bits=bits)
    )
    assert value()(x, y, MATMUL, preferred_element_type=jnp.bfloat16).dtype == jnp.bfloat16


def test_equal_arguments_do_not_retrace() -> None:
    """A layer is often a static argument, so an equal object must not trace again."""
    first, two = (get_dot_general_by_bits(8)["dot_general_cls"] for _ in range(2))
    assert first == two
    assert hash(first) == hash(two)
    assert first() == two()
    assert first != get_dot_general_by_bits(7)["dot_general_cls"]
    assert (
        get_dot_general_by_bits(8, "eval")
        == get_dot_general_by_bits(8, "serve")
        != get_dot_general_by_bits(8, "convert")
    )


def test_dot_general_of_an_einsum() -> None:
    x, y = (
        jax.random.normal(jax.random.key(0), (2, 3, 8)),
        jax.random.normal(jax.random.key(1), (8, 4, 5)),
    )
    actual = jnp.einsum(
        "bsd,dhk->bshk", x, y, _dot_general=get_dot_general_by_bits(8)["dot_general_cls"]()
    )
    np.testing.assert_allclose(actual, jnp.einsum("bsd,dhk->bshk", x, y), atol=0.15)


@pytest.mark.parametrize(
    ("bits", "mode", "says"),
    [
        (8, "sevre", facts("mode", "sevre", fix="train")),
        (
            None,
            "decode",
            facts("mode", "decode"),
        ),
        (16, "train", facts(4, 8, 16)),
        (2, "serve", facts(4, 8, 2)),
    ],
)
def test_invalid_bits_and_modes(bits: Any, mode: Any, says: Facts) -> None:
    with raises(ValueError, says) as caught:
        get_dot_general_by_bits(bits, mode)
    assert isinstance(caught.value, sw.LayerError)


def test_serve_without_flax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flax.linen", None)
    monkeypatch.delitem(sys.modules, "shardwright.interop.easydel.quantized_module", raising=False)
    with raises(sw.LayerError, "serve", fix="quantized_dot_general"):
        get_dot_general_by_bits(8, "serve")["dot_general_cls"]()


# In flax.


def model(bits: int | None, mode: str = "train") -> Any:
    nn = pytest.importorskip("flax.linen")
    dot = get_dot_general_by_bits(bits, mode)
    return nn.Sequential(
        [
            nn.Dense(32, **dot),
            nn.relu,
            nn.DenseGeneral((2, 8), **dot),
            nn.DenseGeneral(4, axis=(-2, -1), **dot),
        ]
    )


X = np.asarray(np.random.default_rng(0).normal(size=(16, 8)), np.float32)


def relative(actual: Any, expected: Any) -> float:
    return float(
        np.linalg.norm(np.asarray(actual) - np.asarray(expected))
        / np.linalg.norm(np.asarray(expected))
    )


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.03), (6, 0.12)])
@pytest.mark.full
def test_flax_layer_trains(bits: int, bound: float) -> None:
    variables = model(None).init(jax.random.key(0), X)
    assert jax.tree.structure(model(bits).init(jax.random.key(0), X)) == jax.tree.structure(
        variables
    )

    def loss(layers: Any, variables: Any) -> Any:
        return jnp.sum(layers.apply(variables, X) ** 2)

    actual = jax.jit(jax.value_and_grad(lambda variables: loss(model(bits), variables)))(variables)
    exact = jax.jit(jax.value_and_grad(lambda variables: loss(model(None), variables)))(variables)
    assert 0 < relative(actual[0], exact[0]) < bound
    for ours, theirs in zip(jax.tree.leaves(actual[1]), jax.tree.leaves(exact[1]), strict=True):
        assert np.isfinite(ours).all()
        assert relative(ours, theirs) < 2 * bound


def test_equal_flax_layers_do_not_retrace() -> None:
    nn = pytest.importorskip("flax.linen")
    traces = []

    def apply(layer: Any, variables: Any, x: Any) -> Any:
        traces.append(layer)
        return layer.apply(variables, x)

    run = jax.jit(apply, static_argnums=0)
    variables = nn.Dense(4).init(jax.random.key(0), X)
    first, second = (run(nn.Dense(4, **get_dot_general_by_bits(8)), variables, X) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert len(traces) == 1


@pytest.mark.full
def test_nnx_layer() -> None:
    nnx = pytest.importorskip("flax.nnx")
    dot = get_dot_general_by_bits(8)["dot_general_cls"]()
    layer = nnx.Linear(8, 4, dot_general=dot, rngs=nnx.Rngs(0))
    assert 0 < relative(layer(X), X @ layer.kernel[...]) < 0.03


def converted(bits: int = 8) -> tuple[Any, Any, Any]:
    variables = model(None).init(jax.random.key(0), X)
    y, stored = model(bits, "convert").apply(variables, X, mutable=["quantized"])
    return variables, stored, y


@pytest.mark.full
def test_convert_then_serve() -> None:
    variables, stored, y = converted()
    leaves = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(stored)[0]
    }
    assert sorted(name.rsplit("[")[-1] for name in leaves) == ["'scale']"] * 3 + ["'value']"] * 3
    first = stored["quantized"]["layers_0"]["QuantizedDotGeneral_0"]
    expected = quantize(variables["params"]["layers_0"]["kernel"], shared=(0,))
    np.testing.assert_array_equal(first["value"], expected.value)
    np.testing.assert_array_equal(first["scale"], expected.scale)
    assert first["value"].dtype == jnp.int8
    served = model(8, "serve").apply({**variables, **stored}, X)
    np.testing.assert_allclose(served, y, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(served, model(8).apply(variables, X), rtol=1e-6, atol=1e-6)


@pytest.mark.full
def test_serve_does_not_read_the_float_kernels() -> None:
    variables, stored, y = converted()
    garbage = fjformer.named_tree_map(
        lambda name, leaf: leaf + 7 if name.endswith("kernel") else leaf, variables, sep="/"
    )
    np.testing.assert_allclose(
        model(8, "eval").apply({**garbage, **stored}, X), y, rtol=1e-6, atol=1e-6
    )
    text = jax.jit(model(8, "serve").apply).lower({**variables, **stored}, X).compile().as_text()
    parameters = text[text.index("ENTRY") :].split("ROOT")[0]
    assert "s8[8,32]" in parameters
    assert "f32[8,32]" not in parameters
    assert "f32[32,2,8]" not in parameters


@pytest.mark.full
def test_serve_sharded_equals_unsharded() -> None:
    variables, stored, y = converted()
    mesh = cpu_mesh("dp:2,tp:4")

    def place(leaf: Any) -> Any:
        spec = jax.P("tp") if leaf.ndim and leaf.shape[0] % 4 == 0 else jax.P()
        return jax.device_put(leaf, jax.NamedSharding(mesh, spec))

    placed = jax.tree.map(place, {**variables, **stored})
    assert placed["quantized"]["layers_0"]["QuantizedDotGeneral_0"]["value"].sharding.spec == jax.P(
        "tp"
    )
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("dp")))
    np.testing.assert_allclose(jax.jit(model(8, "serve").apply)(placed, x), y, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_init_in_serve_mode() -> None:
    variables = model(8, "serve").init(jax.random.key(0), X)
    np.testing.assert_allclose(
        model(8, "serve").apply(variables, X),
        model(8).apply({"params": variables["params"]}, X),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.full
def test_serve_without_stored_kernels() -> None:
    variables, stored, _ = converted()
    with raises(sw.LayerError, "quantized", path="layers_0/QuantizedDotGeneral_0", fix="convert"):
        model(8, "serve").apply(variables, X)
    with raises(
        sw.LayerError,
        "quantized",
        "mutable",
        path="layers_0/QuantizedDotGeneral_0",
        fix=("model.apply", "quantized"),
    ):
        model(8, "convert").apply(variables, X)
    small = model(None).init(jax.random.key(0), X[:, :4])
    with raises(
        sw.LayerError, "(8, 32)", "(4, 32)", path="layers_0/QuantizedDotGeneral_0", fix="model"
    ):
        model(8, "serve").apply({**small, **stored}, X[:, :4])
