"""Blocks equal the oracle with tails, skipped blocks and rows without keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.attention.call import Arithmetic, Operands
from shardwright.attention.kernels import blockwise, vanilla
from shardwright.attention.masks import MaskRules
from shardwright.attention.parts import online_softmax
from tests.attention.conformance import QUICK
from tests.attention.operands import floats, make_operands, without

# Minutes of compiling: the conformance table has a few cells of every implementation by default.
pytestmark = pytest.mark.full

RECIPES = {
    "full": Arithmetic(scale=0.3, q_block=4, kv_block=8),
    "causal window capped": Arithmetic(
        scale=0.3, softcap=2.0, mask=MaskRules(causal=True, window=(5, None)), q_block=4, kv_block=8
    ),
    "causal dropped": Arithmetic(
        scale=0.3, dropout=0.3, mask=MaskRules(causal=True), q_block=4, kv_block=8
    ),
    "chunks in one block": Arithmetic(scale=0.3, mask=MaskRules(chunk=5)),
}
LEFT_OUT = {
    "everything": (),
    "bare": ("bias", "sinks", "lengths", "mask", "q_segment_ids", "kv_segment_ids"),
    "no lengths": ("lengths",),
    "no segments": ("q_segment_ids", "kv_segment_ids", "mask"),
    "no sinks": ("bias", "sinks"),
}


def value_and_grads(attend: Callable[[Operands], Any], operands: Operands) -> Any:
    """Output, logsumexp, and the gradients of a loss that weighs both."""
    shape = (*operands.q.shape[:3], operands.v.shape[3])
    weigh = jax.random.normal(jax.random.key(9), shape)

    def loss(arrays: dict[str, Any]) -> Any:
        o, lse, *_ = attend(operands.replace(**arrays))
        finite = jnp.where(jnp.isneginf(lse), 0.0, lse)
        return jnp.sum(o.astype(jnp.float32) * weigh) + jnp.sum(jnp.sin(finite)), (o, lse)

    (_, (o, lse)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)(
        floats(operands)
    )
    return {"o": o, "lse": lse}, grads


def oracle(operands: Operands, recipe: Arithmetic) -> tuple[jax.Array, jax.Array]:
    output = vanilla.attend(operands, recipe)
    return output.o, output.lse


def assert_close(actual: Any, wanted: Any) -> None:
    for name in wanted[0]:
        np.testing.assert_allclose(
            actual[0][name], wanted[0][name], rtol=2e-6, atol=2e-6, err_msg=name
        )
    for name in wanted[1]:
        np.testing.assert_allclose(
            actual[1][name], wanted[1][name], rtol=1e-5, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("left_out", LEFT_OUT)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.alternate
def test_blocks_equal_the_oracle(name: str, left_out: str) -> None:
    recipe, operands = RECIPES[name], without(make_operands(), *LEFT_OUT[left_out])
    actual = value_and_grads(lambda x: blockwise.attend(x, recipe), operands)
    assert_close(actual, value_and_grads(lambda x: oracle(x, recipe), operands))
    assert all(np.isfinite(grad).all() for grad in actual[1].values())


@pytest.mark.parametrize("shape", [(1, 1, 13, 21), (2, 4, 1, 21), (2, 1, 13, 1), (1, 1, 1, 1)])
def test_broadcast_bias_gradient_is_summed(shape: tuple[int, ...]) -> None:
    operands = make_operands().replace(bias=jax.random.normal(jax.random.key(3), shape))
    actual = value_and_grads(lambda x: blockwise.attend(x, RECIPES["full"]), operands)
    assert_close(actual, value_and_grads(lambda x: oracle(x, RECIPES["full"]), operands))


def test_row_without_keys_is_exactly_zero() -> None:
    operands = without(make_operands(), "bias", "sinks", "mask", "q_segment_ids", "kv_segment_ids")
    (out, grads) = value_and_grads(lambda x: blockwise.attend(x, RECIPES["full"]), operands)
    assert int(operands.lengths[0]) == 0
    assert not np.any(out["o"][0])
    assert np.isneginf(out["lse"][0]).all()
    assert not any(np.any(grads[name][0]) for name in "qkv")
    assert np.any(out["o"][1])


@pytest.mark.full
def test_keys_in_pieces() -> None:
    operands, recipe = make_operands(), RECIPES["causal dropped"]
    want = value_and_grads(lambda x: oracle(x, recipe), operands)

    def piece(x: Operands, at: slice) -> Operands:
        return x.replace(
            k=x.k[:, at],
            v=x.v[:, at],
            kv_positions=x.kv_positions[:, at],
            kv_segment_ids=x.kv_segment_ids[:, at],
            mask=x.mask[..., at],
            bias=x.bias[..., at],
        )

    # In no order, of any size: one after the other, then two states merged.
    slices = [slice(9, 21), slice(0, 2), slice(2, 9)]
    state = blockwise.forward(piece(operands, slices[0]), recipe)
    state = blockwise.forward(piece(operands, slices[1]), recipe, state=state)
    state = online_softmax.merge(state, blockwise.forward(piece(operands, slices[2]), recipe))
    o, lse = online_softmax.finish(online_softmax.add_sinks(state, operands.sinks))
    np.testing.assert_allclose(o, want[0]["o"], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, want[0]["lse"], rtol=2e-6, atol=2e-6)

    weigh = jax.random.normal(jax.random.key(9), o.shape)
    delta = blockwise.delta(o, weigh, jnp.where(jnp.isneginf(lse), 0.0, jnp.cos(lse)))
    parts = [
        blockwise.backward(piece(operands, at), recipe, lse=lse, do=weigh, delta=delta)
        for at in slices
    ]
    actual = {
        "q": sum(part.q for part in parts),
        "sinks": blockwise.sinks_gradient(operands.sinks, lse=lse, delta=delta),
    }
    order = np.argsort(np.concatenate([np.arange(21)[at] for at in slices]))
    actual |= {
        name: np.concatenate([getattr(part, name) for part in parts], axis=1)[:, order]
        for name in "kv"
    }
    actual["bias"] = np.concatenate([part.bias for part in parts], axis=3)[..., order]
    for name, grad in actual.items():
        np.testing.assert_allclose(grad, want[1][name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_delta_reads_the_rounded_cotangent() -> None:
    """XLA for GPUs drops a rounding that only converts, and `dp` has the rounded cotangent."""

    def wide(do: Any) -> Any:
        return blockwise.delta(do, do.astype(jnp.bfloat16))

    do = jnp.ones((1, 2, 1, 4), jnp.float32)
    assert "reduce_precision[exponent_bits=8 mantissa_bits=7]" in str(jax.make_jaxpr(wide)(do))
    assert "reduce_precision" not in str(jax.make_jaxpr(lambda do: blockwise.delta(do, do))(do))


@pytest.mark.parametrize(
    "mask",
    [
        MaskRules(causal=True),
        MaskRules(window=(3, 3)),
        MaskRules(causal=True, window=(5, 0)),
        MaskRules(chunk=8),
    ],
    ids=str,
)
def test_empty_blocks_are_not_read(mask: MaskRules) -> None:
    operands, recipe = (
        make_operands(q_length=32, kv_length=32),
        Arithmetic(scale=0.3, mask=mask, q_block=8, kv_block=8),
    )
    operands = without(operands, *LEFT_OUT["bare"])
    first = operands.replace(q=operands.q[:, :8], q_positions=operands.q_positions[:, :8])
    # 0 times NaN is NaN: were a block of these keys computed and masked, it would show.
    poison = jnp.where(jnp.arange(32) < 16, 0.0, jnp.nan)[None, :, None, None]
    out, grads = value_and_grads(
        lambda x: blockwise.attend(x, recipe), first.replace(k=first.k + poison, v=first.v + poison)
    )
    want, _ = value_and_grads(lambda x: blockwise.attend(x, recipe), first)
    np.testing.assert_array_equal(out["o"], want["o"])
    assert all(np.isfinite(grad).all() for grad in grads.values())


def temporaries(attend: Callable[[Operands], Any], length: int) -> int:
    operands = without(make_operands(batch=1, q_length=length, kv_length=length), *LEFT_OUT["bare"])
    grad = jax.grad(lambda arrays: jnp.sum(attend(operands.replace(**arrays))[0]))
    return jax.jit(grad).lower(floats(operands)).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.full
def test_memory_is_linear_in_length() -> None:
    recipe = Arithmetic(scale=0.3, q_block=64, kv_block=64, mask=MaskRules(causal=True))
    blocks = functools.partial(blockwise.attend, recipe=recipe)
    assert temporaries(blocks, 2048) < 2.5 * temporaries(blocks, 1024)
    assert temporaries(lambda x: oracle(x, recipe), 2048) > 3.5 * temporaries(
        lambda x: oracle(x, recipe), 1024
    )
