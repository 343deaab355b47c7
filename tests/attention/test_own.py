"""Implementations that users write: what is wrong with one is said by its name, before it costs anything."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright import attention
from shardwright.attention import AttentionImpl, AttentionRegistry, Result, extend
from shardwright.attention.kernels.blockwise import BlockwiseAttention

Q = jnp.ones((2, 16, 4, 8))
K = jnp.ones((2, 16, 2, 8))


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionRegistry, "_known", dict(AttentionRegistry._known))


def own(**methods: Any) -> None:
    """Register blockwise attention under the name "mine", with some methods replaced."""
    named = {"get_impl_name": lambda cls: "mine", **methods}
    AttentionRegistry.register(
        type(
            "Mine",
            (BlockwiseAttention,),
            {name: classmethod(method) for name, method in named.items()},
        )
    )


def attend(**options: Any) -> Any:
    return attention.dot_product_attention(Q, K, K, mode="train", implementation="mine", **options)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda o, lse: o, "Mine returned a JitTracer\n  fix   return attention.Result(o=o)"),
        (
            lambda o, lse: Result(o=jnp.swapaxes(o, 1, 2)),
            "Mine returned float32 (2, 4, 16, 8) as o\n  fix   the call asks for float32 (2, 16, 4, 8)",
        ),
        (
            lambda o, lse: Result(o=o.astype("bfloat16")),
            "Mine returned bfloat16 (2, 16, 4, 8) as o",
        ),
        (
            lambda o, lse: Result(o=o),
            "Mine returned no lse\n  fix   the call asks for float32 (2, 4, 16)",
        ),
    ],
)
def test_what_it_returns_is_looked_at(returned: Any, says: str) -> None:
    def forward(cls: Any, operands: Any, call: Any) -> Any:
        o, lse = extend.finish(
            extend.forward(operands, call.recipe, state=extend.start(operands.q, operands.v))
        )
        return returned(o, lse)

    own(forward_native=forward)
    pattern = re.escape(says).replace("JitTracer", r"\w*Tracer")
    with pytest.raises(sw.AttentionError, match=pattern):
        attend(return_lse=True)


@pytest.mark.parametrize("reasons", [None, True, "it rests", ("it rests", 3)])
def test_what_supports_returns_is_looked_at(reasons: Any) -> None:
    own(supports=lambda cls, call: reasons)
    for implementation in ("mine", "auto"):
        with pytest.raises(
            sw.AttentionError,
            match=re.escape(
                f"Mine.supports returned {reasons!r}\n  fix   return a tuple of reasons"
            ),
        ):
            attention.explain(Q, K, K, mode="train", implementation=implementation)


def test_one_that_lacks_a_method_is_not_registered() -> None:
    class Half(AttentionImpl):
        @classmethod
        def get_impl_name(cls) -> str:
            return "half"

    with pytest.raises(
        sw.AttentionError,
        match=r"Half lacks forward_native, supports\n  fix   write them as classmethods",
    ):
        AttentionRegistry.register(Half)
    with pytest.raises(sw.AttentionError, match="is no AttentionImpl"):
        AttentionRegistry.register(lambda q, k, v: q)  # type: ignore[type-var]
    assert "half" not in AttentionRegistry.list_implementations()


def test_a_mesh_of_no_devices_explains_too() -> None:
    with sw.PartitionManager(
        sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("dp:2,tp:256")
    ).for_mode("train"):
        q, k = (jax.ShapeDtypeStruct((4, 64, heads, 128), "bfloat16") for heads in (256, 256))
        assert attention.explain(q, k, k, causal=True).name == "blockwise"


@pytest.mark.parametrize(
    ("shape", "fix"), [((16, 16), "mask[None, None]"), ((2, 16, 16), "mask[:, None]")]
)
def test_a_mask_of_too_few_dims_is_told_how_it_gets_four(shape: tuple[int, ...], fix: str) -> None:
    mask = jnp.ones(shape, bool)
    with pytest.raises(sw.AttentionError, match=re.escape(fix)):
        attention.dot_product_attention(Q, K, K, mode="train", mask=mask)
    right = mask[None, None] if len(shape) == 2 else mask[:, None]
    assert np.isfinite(attention.dot_product_attention(Q, K, K, mode="train", mask=right)).all()


def test_remains_are_zeros_where_it_asks_for_it() -> None:
    def forward(cls: Any, operands: Any, call: Any) -> Any:
        shard = extend.without_remains(operands, call.recipe)
        logits = jnp.einsum("bqhd,bkhd->bhqk", shard.q, jnp.repeat(shard.k, 2, axis=2))
        seen = jnp.arange(16) < shard.lengths[:, None, None, None]
        weights = jax.nn.softmax(jnp.where(seen, logits, -1e30), axis=-1)
        return Result(o=jnp.einsum("bhqk,bkhd->bqhd", weights, jnp.repeat(shard.v, 2, axis=2)))

    own(forward_native=forward)
    left = K.at[:, 9:].set(jnp.nan)
    lengths = jnp.array([9, 3])
    found = attention.dot_product_attention(
        Q[:, :1], left, left, mode="decode", implementation="mine", lengths=lengths
    )
    np.testing.assert_allclose(found, 1.0, rtol=1e-6)
