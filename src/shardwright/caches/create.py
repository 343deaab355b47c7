"""Make an empty cache of a kind, its arrays born in their shards."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from shardwright import _jax
from shardwright.caches import dense, quantized
from shardwright.caches.base import CacheSpec, KVCache, Overflow
from shardwright.caches.paged import cache
from shardwright.caches.row_order import RowOrder
from shardwright.caches.sharding import ambient_shards
from shardwright.errors import CacheError, did_you_mean
from shardwright.manager import constraint, context
from shardwright.vocabulary.integers import read_integer
from shardwright.vocabulary.modes import parse_mode

# Kind -> function of a spec and the kind's own options, which returns a cache without tokens.
KINDS: Mapping[str, Callable[..., KVCache]] = MappingProxyType(
    {
        "dense": dense.make,
        "sliding": dense.make_sliding,
        "quantized": quantized.make,
        "paged": cache.make,
    }
)


def init(
    kind: str,
    *,
    batch: int,
    capacity: int | None = None,
    kv_heads: int,
    head_dim: int,
    v_dim: int | None = None,
    dtype: Any = "bfloat16",
    overflow: str | None = None,
    window: int | None = None,
    order: RowOrder | None = None,
    mode: str | None = None,
    **options: Any,
) -> Any:
    """Make an empty cache.

    Under an ambient manager its arrays are born in their shards, as (BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM) resolves in the mode,
    and every operation leaves them there; without one they are not sharded.

    Args:
      kind: "dense", "sliding", "quantized" or "paged".
      batch: number of slots.
      capacity: rows per slot; absent: of a sliding cache, its window.
      kv_heads: heads of keys and values.
      head_dim: size of a key.
      v_dim: size of a value; absent: `head_dim`.
      dtype: of keys and values.
      overflow: "report", "ring" or "error", see `Overflow`; absent: "report", and of a sliding cache "ring".
      window: positions that attention sees, the query's own included; absent: all.
      order: which row holds which position; absent: one after the other.
      mode: runtime mode in whose layout the arrays lie; absent: the manager's.
      **options: of the kind: `stored`, the dtype of a quantized cache's rows, "int8" if absent; of a paged one `page_size`, rows of a page,
        and `pages`, of all slots together.

    Raises:
      CacheError: sizes or options that make no sense.
      ShardingError: what the rules say does not fit the sizes.
    """
    make = _kind(kind, options)
    manager = context.current()
    said = mode if mode is not None else None if manager is None else manager.mode
    if manager is not None and said is None:
        fix = 'use a manager that has one, with pm.for_mode("decode"): ..., or pass mode="decode"'
        raise CacheError(
            "a cache lies as a mode says, and neither the call nor the manager names one",
            path="mode",
            fix=fix,
        )
    spec = CacheSpec(
        batch=batch,
        capacity=window if capacity is None and window is not None else capacity,  # type: ignore[arg-type]  # checked below
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_dim=head_dim if v_dim is None else v_dim,
        dtype=_dtype(dtype),
        overflow=_overflow(overflow, kind),
        order=RowOrder() if order is None else order,
        window=window,
        mode=None if said is None else parse_mode(said),
    )
    spec = _checked(spec)
    if manager is None:
        spec = dataclasses.replace(spec, mode=None)
    else:
        rows = (spec.batch, spec.capacity, spec.kv_heads, spec.head_dim)
        ambient_shards(spec.mode).check_order(spec.order, dense.ROW_AXES, rows)
    known = tuple(sorted(options.items()))
    if manager is not None and isinstance(manager.mesh, AbstractMesh) and not _jax.in_trace():
        raise constraint.no_devices()
    made: KVCache = (_born if _jax.in_trace() else _jitted)(make, spec, known)
    return made


_COMMON = ("capacity", "v_dim", "dtype", "overflow", "window", "order", "mode")
# What others call it.
_CALLED = MappingProxyType(
    dict.fromkeys(
        ("max_length", "max_len", "max_seq_len", "length", "size"),
        "rows per slot are called capacity",
    )
)


def _kind(kind: str, options: Mapping[str, Any]) -> Callable[..., KVCache]:
    if not isinstance(kind, str) or kind not in KINDS:
        fix = did_you_mean(str(kind), KINDS) or f"kinds are {', '.join(KINDS)}"
        raise CacheError(f"{kind!r} is no kind of cache", path="kind", fix=fix)
    make = KINDS[kind]
    known = list(inspect.signature(make).parameters)[1:]
    for name in options:
        if name not in known:
            fix = (
                _CALLED.get(name, "")
                or did_you_mean(name, [*known, *_COMMON])
                or (f"its own options are {', '.join(known)}" if known else "leave it out")
            )
            raise CacheError(f"a {kind} cache has no option {name!r}", path="init", fix=fix)
        if not isinstance(options[name], Hashable):
            raise CacheError(
                f"{name}={options[name]!r}",
                path=name,
                fix="pass one value, not a collection of them",
            )
    return make


def _dtype(dtype: Any) -> str:
    try:
        known = jnp.dtype(dtype)
    except TypeError as err:
        raise CacheError(
            f"{dtype!r} is no dtype", path="dtype", fix='pass "bfloat16", "float16" or "float32"'
        ) from err
    if not jnp.issubdtype(known, jnp.floating):
        fix = 'pass that in which keys and values come, such as "bfloat16"; init("quantized", ...) stores fewer bits'
        raise CacheError(f"{known} holds no keys and values", path="dtype", fix=fix)
    if jax.dtypes.canonicalize_dtype(known) != known:
        fix = 'pass "float32", or jax.config.update("jax_enable_x64", True) before anything else'
        raise CacheError(
            f"without x64 JAX would keep {jax.dtypes.canonicalize_dtype(known)} of {known}",
            path="dtype",
            fix=fix,
        )
    return str(known)


def _overflow(overflow: str | None, kind: str) -> Overflow:
    if overflow is None:
        return Overflow.RING if kind == "sliding" else Overflow.REPORT
    if overflow not in tuple(Overflow):
        fix = (
            did_you_mean(str(overflow), [str(policy) for policy in Overflow])
            or f"say one of {', '.join(Overflow)}"
        )
        raise CacheError(f"{overflow!r} is not what overflow can do", path="overflow", fix=fix)
    return Overflow(overflow)


def _checked(spec: CacheSpec) -> CacheSpec:
    """Return the spec with its sizes as Python ints, after checking that they fit each other."""
    names = ["batch", "capacity", "kv_heads", "head_dim", "v_dim"]
    names += [] if spec.window is None else ["window"]
    sizes: dict[str, Any] = {
        name: read_integer(name, getattr(spec, name), error=CacheError) for name in names
    }
    spec = dataclasses.replace(spec, **sizes)
    if spec.overflow is Overflow.RING and spec.window is not None and spec.window > spec.capacity:
        what = (
            f"a window of {spec.window} positions needs as many rows, and there are {spec.capacity}"
        )
        raise CacheError(
            what,
            path="window",
            fix="let capacity be the window or more; what is more allows longer chunks and rewinds",
        )
    if not isinstance(spec.order, RowOrder):
        raise CacheError(
            f"order={spec.order!r}",
            path="order",
            fix="pass caches.RowOrder(block=..., shards=...), or leave it out",
        )
    spec.order.check(spec.capacity)
    return spec


def _born(
    make: Callable[..., KVCache], spec: CacheSpec, options: tuple[tuple[str, Any], ...]
) -> KVCache:
    cache = make(spec, **dict(options))
    shards = ambient_shards(spec.mode)

    def lay(path: Any, x: jax.Array, axes: Any) -> jax.Array:
        return shards.lay(
            x, shards.spec(axes, x.shape, name=jax.tree_util.keystr(path, simple=True))
        )

    laid: KVCache = jax.tree_util.tree_map_with_path(lay, cache, cache.axes())
    return laid


_jitted = functools.partial(jax.jit, static_argnums=(0, 1, 2))(_born)
