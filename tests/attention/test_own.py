"""Implementations that users register: mistakes in them are errors that name them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright import attention
from shardwright.attention import Implementation, Result, extend, implementation
from tests.raising import Facts, facts, raises

Q = jnp.ones((2, 16, 4, 8))
K = jnp.ones((2, 16, 2, 8))


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_own", implementation._own)


def own(**changes: Any) -> None:
    """Register blockwise attention under the name "mine", with some functions replaced."""
    blockwise = implementation.find("blockwise")
    attention.register(dataclasses.replace(blockwise, name="mine", **changes))


def attend(**options: Any) -> Any:
    return attention.dot_product_attention(Q, K, K, mode="train", implementation="mine", **options)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda o, lse: o, facts("mine", fix="attention.Result(o=o)")),
        (
            lambda o, lse: Result(o=jnp.swapaxes(o, 1, 2)),
            facts("mine", "float32", "(2, 4, 16, 8)", "o", fix=("float32", "(2, 16, 4, 8)")),
        ),
        (
            lambda o, lse: Result(o=o.astype("bfloat16")),
            facts("mine", "bfloat16", "(2, 16, 4, 8)", "o", fix="float32"),
        ),
        (
            lambda o, lse: Result(o=o),
            facts("mine", "lse", fix=("float32", "(2, 4, 16)")),
        ),
    ],
)
def test_result_is_checked(returned: Any, says: Facts) -> None:
    def run(operands: Any, call: Any) -> Any:
        o, lse = extend.finish(
            extend.forward(operands, call.recipe, state=extend.start(operands.q, operands.v))
        )
        return returned(o, lse)

    own(run=run)
    with raises(sw.AttentionError, says):
        attend(return_lse=True)


@pytest.mark.parametrize("reasons", [None, True, "it rests", ("it rests", 3)])
def test_reasons_are_checked(reasons: Any) -> None:
    own(supports=lambda call: reasons)
    for name in ("mine", "auto"):
        with raises(sw.AttentionError, reasons, "supports", "mine", fix="tuple"):
            attention.explain(Q, K, K, mode="train", implementation=name)


def test_only_implementations_are_registered() -> None:
    with raises(
        sw.AttentionError,
        "test_only_implementations_are_registered",
        "attention.Implementation",
        fix="mine",
    ):
        attention.register(lambda q, k, v: q)  # type: ignore[arg-type]


def test_a_name_belongs_to_one_implementation() -> None:
    def run(operands: Any, call: Any) -> Result:
        raise NotImplementedError

    taken = Implementation(name="ring", supports=lambda call: (), run=run)
    with raises(sw.AttentionError, "ring", "shardwright.attention.kernels.ring"):
        attention.register(taken)
    own(run=run)
    own(run=run, takes_scales=False)  # as when a cell of a notebook runs twice
    assert not implementation.find("mine").takes_scales
    assert implementation.names().count("mine") == 1


def test_explain_on_an_abstract_mesh() -> None:
    with sw.PartitionManager(
        sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("dp:2,tp:256")
    ).for_mode("train"):
        q, k = (jax.ShapeDtypeStruct((4, 64, heads, 128), "bfloat16") for heads in (256, 256))
        assert attention.explain(q, k, k, causal=True).name == "blockwise"


@pytest.mark.parametrize(
    ("shape", "fix"),
    [
        (
            (16, 16),
            facts(
                "(16, 16)",
                "q_length",
                "kv_length",
                "(2, 4, 16, 16)",
                path="mask",
                fix="mask[None, None]",
            ),
        ),
        (
            (2, 16, 16),
            facts(
                "(2, 16, 16)",
                "q_length",
                "kv_length",
                "(2, 4, 16, 16)",
                path="mask",
                fix="mask[:, None]",
            ),
        ),
    ],
)
def test_mask_of_too_few_dims_gets_a_fix(shape: tuple[int, ...], fix: Facts) -> None:
    mask = jnp.ones(shape, bool)
    with raises(sw.AttentionError, fix):
        attention.dot_product_attention(Q, K, K, mode="train", mask=mask)
    right = mask[None, None] if len(shape) == 2 else mask[:, None]
    assert np.isfinite(attention.dot_product_attention(Q, K, K, mode="train", mask=right)).all()


def test_without_remains_sets_zeros() -> None:
    def run(operands: Any, call: Any) -> Any:
        shard = extend.without_remains(operands, call.recipe)
        logits = jnp.einsum("bqhd,bkhd->bhqk", shard.q, jnp.repeat(shard.k, 2, axis=2))
        seen = jnp.arange(16) < shard.lengths[:, None, None, None]
        weights = jax.nn.softmax(jnp.where(seen, logits, -1e30), axis=-1)
        return Result(o=jnp.einsum("bhqk,bkhd->bqhd", weights, jnp.repeat(shard.v, 2, axis=2)))

    own(run=run)
    left = K.at[:, 9:].set(jnp.nan)
    lengths = jnp.array([9, 3])
    output = attention.dot_product_attention(
        Q[:, :1], left, left, mode="decode", implementation="mine", lengths=lengths
    )
    np.testing.assert_allclose(output, 1.0, rtol=1e-6)
