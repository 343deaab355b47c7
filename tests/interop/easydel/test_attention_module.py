"""The cache of the flax module equals a list of tokens, sharded or not."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright import caches
from shardwright.errors import CacheError, LayerError
from shardwright.interop import easydel
from shardwright.testing import assert_no_collectives, assert_spec, cpu_mesh
from tests.raising import facts, raises

pytest.importorskip("flax")

from shardwright.interop.easydel.attention_module import BaseJAXAttentionModule

# Programs of several seconds; the parts are tested by themselves.
pytestmark = pytest.mark.full

BATCH, CAPACITY, HEADS, DIM = 4, 8, 2, 4
RULES = 'name = "a"\n[rules]\nbatch = "dp"\nkv_length = "sp"\nkv_head = "tp"\n'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    quantize_kv_cache: bool = False
    use_sharded_kv_caching: bool = False
    mesh: Any = None

    def jax_mesh(self) -> Any:
        return self.mesh


class Cached(BaseJAXAttentionModule):  # type: ignore[misc]
    def __call__(self, key: Any, value: Any, query_states: Any, mask: Any = None) -> Any:
        return self._concatenate_to_cache(key, value, query_states, mask)


def rows(count: int, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed), (BATCH, count, HEADS, DIM))


def started(config: Config) -> tuple[Any, Any]:
    module = Cached(config)
    empty = rows(CAPACITY)
    return module, jax.jit(module.init)(jax.random.key(0), empty, empty, empty)


def step(
    module: Any, state: Any, count: int, seed: int, mask: Any = None, *, jit: bool = True
) -> Any:
    k = rows(count, seed)

    def run(state: Any, k: Any) -> Any:
        return module.apply(state, k, -k, k, mask, mutable=["cache"])

    return (jax.jit(run) if jit else run)(state, k)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("place", ["one device", "manager", "mesh of the configuration"])
def test_cache_has_all_tokens(quantized: bool, place: str) -> None:
    mesh = cpu_mesh("dp:2,fsdp:1,sp:2,tp:2")
    config = Config(
        quantize_kv_cache=quantized, use_sharded_kv_caching=place != "one device", mesh=mesh
    )
    pm = (
        sw.PartitionManager(sw.Strategy.loads(RULES), mesh=mesh).for_mode("decode")
        if place == "manager"
        else sw.PartitionManager(sw.PartitionAxis(), mesh=mesh, mode="decode")
    )

    def run() -> None:
        module, state = started(config)
        held = np.zeros((BATCH, 0, HEADS, DIM), np.float32)
        for count, seed in ((3, 1), (1, 2), (4, 3)):
            (k, v, mask), state = step(module, state, count, seed)
            held = np.concatenate([held, rows(count, seed)], axis=1)
            atol = np.abs(held).max() / 250 if quantized else 0
            np.testing.assert_allclose(k[:, : held.shape[1]], held, rtol=0, atol=atol)
            np.testing.assert_allclose(v[:, : held.shape[1]], -held, rtol=0, atol=atol)
            assert mask.shape == (BATCH, 1, count, CAPACITY)
            assert mask.dtype == bool
            assert (np.asarray(mask) == (np.arange(CAPACITY) < held.shape[1])).all()
            variables = state["cache"]
            assert int(variables["cache_index"]) == held.shape[1]
            assert variables["cached_key"].dtype == (jnp.int8 if quantized else jnp.float32)
            if place != "one device":
                assert_spec(
                    variables["cached_key"],
                    sw.BATCH,
                    sw.KV_LENGTH,
                    sw.KV_HEAD,
                    sw.KV_HEAD_DIM,
                    manager=pm,
                )
        if quantized:
            wanted = caches.quantize(jnp.asarray(held))
            np.testing.assert_array_equal(variables["cached_key"], wanted.values)
            np.testing.assert_allclose(variables["cached_key_scale"], wanted.scale, rtol=1e-6)

    if place == "manager":
        with pm:
            run()
    else:
        run()


@pytest.mark.parametrize("count", [1, 3])
def test_appending_sends_nothing(count: int) -> None:
    mesh = cpu_mesh("dp:1,sp:4,tp:1")
    with sw.PartitionManager(sw.Strategy.loads(RULES), mesh=mesh).for_mode("decode"):
        module, state = started(Config(use_sharded_kv_caching=True))
        k = rows(count)
        assert_no_collectives(
            jax.jit(lambda state, k: module.apply(state, k, k, k, None, mutable=["cache"])[1]),
            state,
            k,
        )


def test_mask_is_merged() -> None:
    module, state = started(Config())
    pad = np.ones((BATCH, CAPACITY), np.int32)
    pad[1, 0] = 0
    (_, _, mask), state = step(module, state, 3, 1, pad)
    wanted = np.broadcast_to((np.arange(CAPACITY) < 3) & (pad[:, None, None] == 1), mask.shape)
    np.testing.assert_array_equal(mask, wanted)
    causal = np.tril(np.ones((1, 1, CAPACITY, CAPACITY), bool))[:, :, 3:5]
    (_, _, mask), state = step(module, state, 2, 2, causal)
    np.testing.assert_array_equal(mask, np.broadcast_to(causal, (BATCH, 1, 2, CAPACITY)))
    for wrong in (np.ones((BATCH, 3), bool), np.ones((BATCH, 1, 1, CAPACITY), np.float32)):
        with raises(LayerError, path="attention_mask", fix="q_length"):
            step(module, state, 1, 3, wrong)


@pytest.mark.parametrize("quantized", [False, True])
def test_tokens_beyond_the_capacity(
    quantized: bool,
) -> None:
    module, state = started(Config(quantize_kv_cache=quantized))
    _, state = step(module, state, 6, 1)
    with raises(CacheError, 0, 1, 4, fix="reasons()"):
        step(module, state, 3, 2, jit=False)
    (_, _, mask), after = step(module, state, 3, 2)
    assert not mask.any()
    assert after["cache"]["cache_refused"].tolist() == [caches.Refusal.OVERFLOW] * BATCH
    for name in state["cache"]:
        if name != "cache_refused":
            np.testing.assert_array_equal(after["cache"][name], state["cache"][name])
    (_, _, mask), after = step(module, after, 2, 3)
    assert mask.all()
    assert after["cache"]["cache_refused"].tolist() == [0] * BATCH


def test_invalid_shapes() -> None:
    module, state = started(Config())
    k = rows(2)
    with raises(LayerError, 1, 2, path="query_states"):
        module.apply(state, k, k, k[:, :1], mutable=["cache"])
    message = facts("(4, 2, 2, 4)", "(4, 1, 2, 4)", path="key", fix="q_length")
    with raises(LayerError, message):
        module.apply(state, k, k[:, :1], k, mutable=["cache"])


def test_error_without_flax(monkeypatch: pytest.MonkeyPatch) -> None:
    assert easydel.BaseJAXAttentionModule is BaseJAXAttentionModule
    monkeypatch.delitem(sys.modules, "shardwright.interop.easydel.attention_module")
    monkeypatch.setitem(sys.modules, "flax", None)
    with raises(LayerError, "BaseJAXAttentionModule", fix="install"):
        _ = easydel.BaseJAXAttentionModule
