"""Pages that are a share of the memory of a device."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright import serving
from shardwright.errors import ServingError
from shardwright.serving import create
from shardwright.testing import cpu_mesh
from tests.raising import Facts, facts, raises

WEIGHTS = 1024  # float32: 4,096 bytes on every device
# A page: 2 layers of 4 rows, for keys and values of 4 heads of 8 elements in float32.
PAGE = 2 * 4 * 2 * 4 * 8 * 4


def pages_of(share: Any, *, pm: Any = None, **options: Any) -> int:
    params = jnp.zeros(WEIGHTS)
    if pm is not None:
        params = pm.shard(params, (sw.EMPTY,), role="param")
    shape = serving.CacheShape(layers=2, kv_heads=4, head_dim=8, dtype="float32")
    engine = serving.Engine(
        stub_of_zeros,
        params,
        shape=shape,
        manager=pm,
        slots=2,
        capacity=16,
        cache="paged",
        cache_options={"page_size": 4, "pages": share, **options},
    )
    count = engine._scheduler.limits.pages
    assert count is not None
    return count


def stub_of_zeros(params: Any, tokens: Any, held: Any, valid: Any) -> Any:
    rows = jnp.zeros((*tokens.shape, 4, 8)) + params[0]
    new = [cache.append(rows, rows, valid=valid).cache for cache in held]
    return jnp.zeros((*tokens.shape, 8)) + params[0], new


def test_declared_memory_holds_weights_and_pages() -> None:
    free = 200_000 * 90 // 100 - 4 * WEIGHTS
    assert pages_of("90%", memory=200_000) == free // PAGE


@pytest.mark.full
def test_every_shard_of_the_pool_fits() -> None:
    mesh = cpu_mesh("sp:4,tp:2")
    pm = sw.PartitionManager(sw.Strategy.preset("serve_long_context"), mesh=mesh)
    free = 50_000 - 4 * WEIGHTS
    # Half of the heads, and a quarter of the pages.
    assert pages_of("100%", pm=pm, memory=50_000) == free // (PAGE // 2) * 4


def test_reported_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def __init__(self, used: int) -> None:
            self.used = used

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 100_000, "bytes_in_use": self.used}

    devices = [Device(10_000), Device(30_000)]
    monkeypatch.setattr(create, "_devices", lambda setup: devices)
    assert pages_of("80%") == 50_000 // PAGE  # the fuller device decides


@pytest.mark.parametrize(
    ("share", "options", "says"),
    [
        ("90%", {}, facts(0, 90, path="cache_options", fix="pages")),
        ("0%", {}, facts("pages", "0%", path="cache_options", fix="90%")),
        ("half", {"memory": "1GiB"}, facts("pages", "half", path="cache_options", fix="90%")),
        ("90%", {"memory": "much"}, facts("memory", "much", path="cache_options", fix="bytes")),
        ("90%", {"memory": "4KiB"}, facts("90%", 0, "bytes", "2,048", path="cache_options")),
        (8, {"memory": "1GiB"}, facts("1GiB", path="cache_options", fix="90%")),
    ],
)
def test_pages_that_cannot_be_counted(share: Any, options: dict[str, Any], says: Facts) -> None:
    with raises(ServingError, says):
        pages_of(share, **options)
