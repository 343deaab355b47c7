"""Classes of EasyDeL's attention operators: what registers, and what the library makes of it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright import attention
from shardwright.attention import implementation
from shardwright.interop.easydel import AttentionImpl, AttentionMetadata, AttentionRegistry
from shardwright.testing import cpu_mesh
from tests.raising import raises

Q = jnp.ones((2, 16, 4, 8))
K = jnp.ones((2, 16, 2, 8))


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionRegistry, "_known", dict(AttentionRegistry._known))
    monkeypatch.setattr(implementation, "_own", implementation._own)


class Named(AttentionImpl):
    """Vanilla attention under two names, with a forward of its own on CPUs."""

    takes_scales = True
    ran: list[str] = []  # noqa: RUF012  a test reads it

    @classmethod
    def get_impl_name(cls) -> tuple[str, ...]:
        return "named", "called"

    @classmethod
    def supports(cls, call: Any) -> tuple[str, ...]:
        return ("it has no softcap",) if call.recipe.softcap else ()

    @classmethod
    def forward_native(cls, operands: Any, call: Any) -> Any:
        return implementation.find("vanilla").run(operands, call)

    @classmethod
    def forward_cpu(cls, operands: Any, call: Any) -> Any:
        cls.ran.append("cpu")
        return cls.forward_native(operands, call)


def test_incomplete_class_is_not_registered() -> None:
    class Half(AttentionImpl):
        @classmethod
        def get_impl_name(cls) -> str:
            return "half"

    with raises(
        sw.AttentionError,
        "test_incomplete_class_is_not_registered",
        "forward_native",
        fix="classmethods",
    ):
        AttentionRegistry.register(Half)
    with raises(
        sw.AttentionError,
        "test_incomplete_class_is_not_registered",
        "AttentionImpl",
        fix="AttentionImpl",
    ):
        AttentionRegistry.register(lambda q, k, v: q)  # type: ignore[type-var]
    assert "half" not in AttentionRegistry.list_implementations()


def test_class_serves_all_its_names() -> None:
    AttentionRegistry.register(Named)
    assert {"named", "called", "ring"} <= set(AttentionRegistry.list_implementations())
    Named.ran.clear()
    o = attention.dot_product_attention(Q, K, K, mode="train", implementation="called")
    np.testing.assert_allclose(o, 1.0, rtol=1e-6)
    assert Named.ran == ["cpu"]
    refused = attention.explain(Q, K, K, mode="train", implementation="named", softcap=1.0)
    assert refused.refusals[0].reasons == ("it has no softcap",)


def test_a_name_belongs_to_one_class() -> None:
    class Other(Named):
        pass

    AttentionRegistry.register(Named)
    AttentionRegistry.register(Named)
    with raises(sw.AttentionError, "named"):
        AttentionRegistry.register(Other)


def test_an_unknown_backend_is_refused() -> None:
    held = AttentionMetadata(jnp.float32, mesh=cpu_mesh("dp:2"), backend="abacus")
    AttentionRegistry.register(Named)
    with raises(sw.AttentionError, "abacus", path="platform", fix="gpu"):
        AttentionRegistry.create("named", held)(Q, K, K, mode="train")
