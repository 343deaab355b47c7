"""Create an empty cache of a kind, already sharded."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any, Final

import jax
from jax.sharding import AbstractMesh

from shardwright import _jax
from shardwright.caches.base import KVCache
from shardwright.caches.kinds import KINDS, CacheKind
from shardwright.caches.rows import ROW_AXES
from shardwright.caches.sharding import ambient_sharding, read_mode
from shardwright.caches.spec import CacheSpec, Overflow, RowOrder
from shardwright.errors import CacheError, did_you_mean
from shardwright.manager import constraint, context
from shardwright.vocabulary.read import floating, instance, integer, one_of, read_all, read_value

_SIZE: Final = integer()
_KIND: Final = one_of(KINDS)
_ORDER: Final = instance(
    RowOrder, fix="pass caches.RowOrder(block=..., shards=...), or leave {name} out"
)
_FLOATS: Final = floating(
    fix='pass the dtype of the keys and values, such as "bfloat16"; '
    'use init("quantized", ...) to store fewer bits'
)
_OVERFLOW: Final = one_of([str(policy) for policy in Overflow])


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
    """Create an empty cache, already sharded.

    Under an ambient manager the arrays are created with the sharding that (BATCH, KV_LENGTH,
    KV_HEAD, KV_HEAD_DIM) resolves to in the mode, so no device ever holds the whole cache. Every
    operation keeps that sharding. Without a manager the cache is not sharded.

    Args:
      kind: "dense", "sliding", "quantized" or "paged".
      batch: Number of slots.
      capacity: Rows per slot. Defaults to the window, if there is one.
      kv_heads: Number of heads of keys and values.
      head_dim: Size of a key.
      v_dim: Size of a value. Defaults to `head_dim`.
      dtype: Dtype of keys and values.
      overflow: "report", "ring" or "error"; see `Overflow`. Defaults to "ring" for a sliding cache,
        and to "report" for the other kinds.
      window: Number of positions that attention sees, including the query's own. Defaults to all
        positions; for a ring, to the capacity.
      order: Which row holds which position. Defaults to contiguous.
      mode: Runtime mode whose sharding the arrays get. Defaults to the manager's.
      **options: Options of the kind. A quantized cache has `stored`, the dtype of its rows ("int8"
        by default). A paged cache has `page_size`, the number of rows of a page, and `pages`, the
        number of pages in the pool.

    Raises:
      CacheError: Sizes or options are invalid.
      ShardingError: The rules do not fit the sizes.
    """
    cache_kind = KINDS[read_value("kind", kind, _KIND, error=CacheError)]
    _check_options(kind, cache_kind, options)
    manager = context.current()
    if capacity is None and window is None:
        raise CacheError(
            "neither capacity nor window is given",
            path="capacity",
            fix="pass capacity=2048: the tokens of the longest text, with its prompt",
        )
    if overflow is not None:
        read_value("overflow", overflow, _OVERFLOW, error=CacheError)
    spec = CacheSpec(
        batch=batch,
        capacity=window if capacity is None else capacity,  # type: ignore[arg-type]  # never None
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_dim=head_dim if v_dim is None else v_dim,
        dtype=str(read_value("dtype", dtype, _FLOATS, error=CacheError)),
        overflow=cache_kind.overflow if overflow is None else Overflow(overflow),
        order=RowOrder() if order is None else order,
        window=window,
        mode=read_mode(mode, manager),
    )
    read_value("order", spec.order, _ORDER, error=CacheError)
    spec = _checked_spec(spec)
    if manager is not None:
        rows = (spec.batch, spec.capacity, spec.kv_heads, spec.head_dim)
        ambient_sharding(spec.mode).check_order(spec.order, ROW_AXES, rows)
        if isinstance(manager.mesh, AbstractMesh) and not _jax.in_trace():
            raise constraint.no_devices()
    create = _create if _jax.in_trace() else _create_jitted
    # The options are part of the key of `jit`, so pass them as a sorted tuple, which is hashable.
    cache: KVCache = create(cache_kind.make, spec, tuple(sorted(options.items())))
    return cache


def _create(
    make: Callable[..., KVCache], spec: CacheSpec, options: tuple[tuple[str, Any], ...]
) -> KVCache:
    cache = make(spec, **dict(options))
    sharding = ambient_sharding(spec.mode)
    fields: dict[str, Any] = {}
    for name, axes in cache.array_axes.items():
        array = getattr(cache, name)
        fields[name] = sharding.place_as(array, sharding.spec(axes, array.shape, name=name))
    return dataclasses.replace(cache, **fields)


# Create inside `jit`, so that every device writes only its own shards.
_create_jitted = functools.partial(jax.jit, static_argnums=(0, 1, 2))(_create)


_COMMON = ("capacity", "v_dim", "dtype", "overflow", "window", "order", "mode")
# Names that other libraries give to arguments of `init`, and the fix for each.
_OTHER_NAMES = MappingProxyType(
    dict.fromkeys(
        ("max_length", "max_len", "max_seq_len", "length", "size"),
        "pass the rows per slot as capacity",
    )
)


def _check_options(name: str, kind: CacheKind, options: Mapping[str, Any]) -> None:
    # Leave out the first parameter of `make`, which is the spec.
    known = list(inspect.signature(kind.make).parameters)[1:]
    for option, value in options.items():
        if option not in known:
            fix = (
                _OTHER_NAMES.get(option, "")
                or did_you_mean(option, [*known, *_COMMON])
                or (f"options of this kind are {', '.join(known)}" if known else "leave it out")
            )
            raise CacheError(f"a {name} cache has no option {option!r}", path="init", fix=fix)
        if not isinstance(value, Hashable):
            raise CacheError(
                f"{option}={value!r} is not hashable",
                path=option,
                fix="pass a hashable value, such as a number or a name",
            )


def _checked_spec(spec: CacheSpec) -> CacheSpec:
    """Return the spec with its sizes as Python ints, after checking that they fit each other."""
    names = ["batch", "capacity", "kv_heads", "head_dim", "v_dim"]
    names += [] if spec.window is None else ["window"]
    sizes = read_all([(name, getattr(spec, name), _SIZE) for name in names], error=CacheError)
    spec = dataclasses.replace(spec, **dict(zip(names, sizes, strict=True)))
    if spec.is_ring and spec.window is not None and spec.window > spec.capacity:
        raise CacheError(
            f"a window of {spec.window} positions needs as many rows, and capacity is "
            f"{spec.capacity}",
            path="window",
            fix="pass a capacity of at least the window; more allows longer chunks and rewinds",
        )
    spec.order.check(spec.capacity)
    return spec
