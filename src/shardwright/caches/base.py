"""The interface of every KV cache: its public operations, and what attention reads.

A slot is a row of the batch: room for one sequence. Position p of a sequence is its p-th token,
from 0. A slot holds the positions below its `length`. In a ring, where new tokens overwrite the
oldest ones, a slot holds only the positions from its `start` on. No other value says which rows are
valid.

Scatters write the rows. They drop a token whose row is out of range, and never write it to another
row. An operation that is impossible for a slot is refused for that slot only. The refusal is a
value in the `Change` that every operation returns. Operations run inside `jit` and outside.

Each public method checks its arguments and calls `operate` with the private method of the same
name. Subclasses implement the private methods, which are traced.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, Self, TypeVar

import jax
import jax.numpy as jnp

from shardwright.caches import arguments
from shardwright.caches.change import Change
from shardwright.caches.operate import check_arrays, operate
from shardwright.caches.sharding import CacheSharding, PlacedArrays, ambient_sharding
from shardwright.caches.spec import CacheSpec
from shardwright.errors import CacheError
from shardwright.vocabulary.axes import BATCH, AxisNames
from shardwright.vocabulary.read import instance, read_value

C = TypeVar("C")
STATIC: Mapping[str, Any] = {"static": True}


def array(*axes: str) -> Mapping[str, Any]:
    """Return the metadata of a field that holds an array, annotated with axes."""
    return {"axes": axes}


def buffer(*axes: str) -> Mapping[str, Any]:
    """Return the metadata of a field that holds rows of keys or values, annotated with axes."""
    return {"axes": axes, "buffer": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """What attention reads: the arrays of the cache themselves, not copies.

    Attributes:
      k: `[batch, rows, kv_heads, head_dim]`; of a paged cache `[pages, page_size, kv_heads,
        head_dim]`.
      v: Likewise, with v_dim.
      positions: `[batch, rows]` int32, -1 for an empty row. `[1, rows]` if all slots share the same
        positions and only `lengths` says which rows are valid. None for a paged cache.
      lengths: `[batch]` int32, number of tokens in each slot.
      k_scale: `[batch, rows, kv_heads]` float32; a key is `k * k_scale`. None unless quantized.
      v_scale: Likewise for values.
      tables: `[batch, pages_per_slot]` int32 page numbers. None unless paged.
    """

    k: jax.Array
    v: jax.Array
    positions: jax.Array | None
    lengths: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    tables: jax.Array | None = None

    def dequantized(self, dtype: str) -> tuple[jax.Array, jax.Array]:
        """Return keys and values as they were appended: in `dtype`, multiplied by their scales."""
        return _dequantize(self.k, self.k_scale, dtype), _dequantize(self.v, self.v_scale, dtype)


def _dequantize(x: jax.Array, scale: jax.Array | None, dtype: str) -> jax.Array:
    # Multiply in float32, the dtype of the scales, and round once.
    return x if scale is None else (x.astype(jnp.float32) * scale[..., None]).astype(dtype)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KVCache(abc.ABC):
    """A cache of keys and values: arrays, and the length of each slot.

    Subclasses are frozen, registered dataclasses. They declare every array with its axes, as
    `dataclasses.field(metadata=buffer(...))`.

    Attributes:
      spec: The static part of the cache.
      length: `[batch]` int32, number of tokens in each slot; 0 for a free slot.
    """

    spec: CacheSpec = dataclasses.field(metadata=STATIC)
    length: jax.Array = dataclasses.field(metadata=array(BATCH))

    @property
    def batch(self) -> int:
        """The number of slots."""
        return self.spec.batch

    @property
    def array_axes(self) -> dict[str, AxisNames]:
        """The annotation of every array, by field."""
        return {
            field.name: field.metadata["axes"]
            for field in dataclasses.fields(self)
            if "axes" in field.metadata and getattr(self, field.name) is not None
        }

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays by field: `jax.Array`s, or `jax.ShapeDtypeStruct`s."""
        return {name: getattr(self, name) for name in self.array_axes}

    @property
    def buffer_axes(self) -> dict[str, AxisNames]:
        """The annotations of `buffers`, by field."""
        return {
            field.name: field.metadata["axes"]
            for field in dataclasses.fields(self)
            if "buffer" in field.metadata
        }

    @property
    def buffers(self) -> dict[str, jax.Array]:
        """The arrays that hold keys and values, by field."""
        return {name: getattr(self, name) for name in self.buffer_axes}

    @property
    def _sharding(self) -> CacheSharding:
        """How the arrays are sharded under the ambient manager."""
        return ambient_sharding(self.spec.mode)

    @property
    def _placed_buffers(self) -> PlacedArrays:
        """The buffers and their specs, for functions that run on shards."""
        return self._sharding.with_specs(self.buffers, self.buffer_axes)

    def axes(self) -> Self:
        """Return a copy with annotations in place of its arrays.

        Resolve these annotations with the role `activation`.
        """
        annotations: dict[str, Any] = self.array_axes
        return dataclasses.replace(self, **annotations)

    def append(self, k: Any, v: Any, *, valid: Any = None) -> Change[Self]:
        """Write the next tokens of every slot.

        Args:
          k: `[batch, q_length, kv_heads, head_dim]`.
          v: `[batch, q_length, kv_heads, v_dim]`.
          valid: `[batch, q_length]` bool, True for rows that are tokens. Other rows are skipped,
            wherever they are. By default, all rows are tokens.

        Returns:
          The change. If the tokens of a slot do not all fit, none of them is written to it.

        Raises:
          CacheError: Shapes or dtypes do not fit the cache.
        """
        arguments.check_append(self.spec, k, v, valid)
        return self._operate(type(self)._append, k, v, valid)

    def insert(self, source: KVCache, slots: Any) -> Change[Self]:
        """Copy sequences into free slots, several at once.

        Args:
          source: A cache of n sequences, for instance filled by prefill.
          slots: `[n]` int, the destination of each sequence. A number outside `[0, batch)` is
            refused; it does not wrap around.

        Returns:
          The change, with one code per sequence of the source.

        Raises:
          CacheError: The sizes or the dtype of the source differ from those of this cache.
        """
        read_value("source", source, CACHE, error=CacheError)
        arguments.check_source(self.spec, source.spec)
        per = f"sequence of the source; to skip a sequence, pass {self.batch}, which is no slot"
        destinations = arguments.integers("slots", slots, size=source.batch, per=per)
        check_arrays("source", source)
        return self._operate(type(self)._insert, source, destinations)

    def free(self, slots: Any) -> Change[Self]:
        """Empty slots. A slot that is empty, is named twice or does not exist is refused.

        Args:
          slots: `[n]` int.
        """
        return self._operate(type(self)._free, arguments.integers("slots", slots))

    def rewind(self, lengths: Any) -> Change[Self]:
        """Cut slot b to `lengths[b]` tokens. The next append continues there.

        To take back two drafted tokens: `cache.rewind(jnp.maximum(cache.length - 2, 0))`.

        Args:
          lengths: `[batch]` int, each from 0 to the slot's length.
        """
        lengths = arguments.integers("lengths", lengths, size=self.batch)
        return self._operate(type(self)._rewind, lengths)

    def reorder(self, parents: Any, *, group: int | None = None) -> Change[Self]:
        """Let slot b continue the sequence of slot `parents[b]`, as in beam search.

        Args:
          parents: `[batch]` int, slots.
          group: Number of slots in a group, such as the number of beams. The first `group` slots
            are a group, the next ones are another, and so on. A slot whose parent is not in the
            same group is refused. If every group is on one shard of the batch, nothing is sent.
            Defaults to the whole batch.
        """
        group = arguments.read_group(self.spec, group)
        parents = arguments.integers("parents", parents, size=self.batch)
        return self._operate(type(self)._reorder, parents, group=group)

    @abc.abstractmethod
    def view(self) -> View:
        """Return what attention reads."""

    @abc.abstractmethod
    def row_view(self) -> View:
        """Return a view in which the rows of a sequence are adjacent. Pages are copied for it."""

    @abc.abstractmethod
    def _append(self, k: jax.Array, v: jax.Array, valid: jax.Array | None) -> Change[Self]: ...

    @abc.abstractmethod
    def _insert(self, source: KVCache, slots: jax.Array) -> Change[Self]: ...

    @abc.abstractmethod
    def _free(self, slots: jax.Array) -> Change[Self]: ...

    @abc.abstractmethod
    def _rewind(self, lengths: jax.Array) -> Change[Self]: ...

    @abc.abstractmethod
    def _reorder(self, parents: jax.Array, *, group: int) -> Change[Self]: ...

    def _operate(
        self, operation: Callable[..., Change[C]], *arrays: Any, **static: Any
    ) -> Change[C]:
        check_arrays("cache", self)
        # Pass a function of the class and not a bound method: caches of one type then share the
        # programs of `jit`.
        return operate(operation, self, *arrays, overflow=self.spec.overflow, **static)


CACHE: Final = instance(KVCache, fix="create one with caches.init")
