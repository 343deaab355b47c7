"""One attention call as data: `Operands`, the arrays as one pytree, and `AttentionCall`, everything else, frozen and hashable.

Whatever the caller's layout, operands are BTHD: `[batch, length, heads, head_dim]`; masks and biases are
`[batch, heads, q_length, kv_length]`, each dim full or 1.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardwright.attention.masks import MaskRules
from shardwright.resolution.partition_specs import spec_of

# What a remat policy saves them by: `jax.checkpoint_policies.save_only_these_names(OUTPUT_NAME, LSE_NAME)`.
OUTPUT_NAME, LSE_NAME = "attention_output", "attention_lse"


class Layout(enum.StrEnum):
    """The order of the dims of q, k, v and the output: batch, length (T), heads, head_dim."""

    BTHD = "BTHD"
    BHTD = "BHTD"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operands:
    """The arrays of a call. Inside `shard_map` the same value holds the shards, so that a kernel sees one interface.

    Attributes:
      q: `[batch, q_length, heads, head_dim]`.
      k: `[batch, kv_length, kv_heads, head_dim]`; query head h reads kv head `h * kv_heads // heads`.
      v: `[batch, kv_length, kv_heads, v_dim]`.
      k_scale: `[batch, kv_length, kv_heads]` float32, a key is `k * k_scale`; None but for quantised keys.
      v_scale: likewise of the values.
      q_positions: `[batch or 1, q_length]` int32, global.
      kv_positions: `[batch or 1, kv_length]` int32, global; negative for a row that does not exist.
      q_segment_ids: `[batch, q_length]` int32, or None.
      kv_segment_ids: `[batch, kv_length]` int32, or None.
      lengths: `[batch]` int32, keys at this position and after are not seen; or None.
      mask: bool, True = attend; or None.
      bias: added to the scaled logits; or None.
      sinks: `[heads]`, a logit per head that takes weight and gives nothing; or None.
      seed: uint32 scalar of the dropout, or None.
      batch_index: `[batch]` int32, global numbers of the rows of the batch; only with dropout.
      head_index: `[heads]` int32, global numbers of the query heads; only with dropout.
    """

    q: Any
    k: Any
    v: Any
    q_positions: Any
    kv_positions: Any
    k_scale: Any = None
    v_scale: Any = None
    q_segment_ids: Any = None
    kv_segment_ids: Any = None
    lengths: Any = None
    mask: Any = None
    bias: Any = None
    sinks: Any = None
    seed: Any = None
    batch_index: Any = None
    head_index: Any = None

    def replace(self, **changes: Any) -> Operands:
        """Return the operands with some of them changed."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The static part of the arithmetic. Logits are `softcap(scale * q.k + bias)`, then masked; softmax, then dropout.

    Quantised products are multiplied by k's scale first, weights by v's last.

    Attributes:
      mask: what attends by position.
      scale: factor of the products of queries and keys.
      softcap: c in `c * tanh(logits / c)`, or None.
      dropout: probability with which a weight is dropped; the others are divided by `1 - dropout`.
      q_block: rows of queries that a blockwise kernel holds at a time.
      kv_block: rows of keys likewise.
      cached: the caller's layout of k and v if they are a cache on TPUs, of which no copy in another order is made; else None.
      partly_filled: whether rows of k and v may hold no key, as positions or lengths say: what they hold may be anything.
    """

    mask: MaskRules = dataclasses.field(default_factory=MaskRules)
    scale: float
    softcap: float | None = None
    dropout: float = 0.0
    q_block: int = 512
    kv_block: int = 1024
    cached: Layout | None = None
    partly_filled: bool = False


class KVHeads(enum.StrEnum):
    """How the heads of k and v lie, given those of q.

    SAME: over the same mesh axes. PREFIX: over the leading ones, and over the rest each shard picks the heads that its
    queries read. INDEX: replicated, and each shard picks. FACTOR: over the leading ones, if any, and the rest of them shard
    the keys' length: a shard holds part of what its queries read.
    """

    SAME = "same"
    PREFIX = "prefix"
    INDEX = "index"
    FACTOR = "factor"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JointSpecs:
    """Where a call's arrays lie, resolved jointly: mesh axes by dim, major first. Empty tuples for an unsharded call.

    Attributes:
      batch: mesh axes of the batch, of q, k and v alike.
      q_length: of the queries.
      kv_length: of the keys.
      heads: of the query heads.
      kv_heads: of the kv heads; a prefix of `heads`.
      grouping: how the kv heads follow the query heads.
      why: the grouping in one line.
    """

    batch: tuple[str, ...] = ()
    q_length: tuple[str, ...] = ()
    kv_length: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    kv_heads: tuple[str, ...] = ()
    grouping: KVHeads = KVHeads.SAME
    why: str = ""

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Every mesh axis that any dim lies over, once."""
        return tuple(
            dict.fromkeys(
                (*self.batch, *self.q_length, *self.kv_length, *self.heads, *self.kv_heads)
            )
        )

    def operands(self, operands: Operands) -> Operands:
        """Return the spec of each operand, in a value of the same structure."""
        by_name = {
            "q": (self.batch, self.q_length, self.heads),
            "k": (self.batch, self.kv_length, self.kv_heads),
            "v": (self.batch, self.kv_length, self.kv_heads),
            "k_scale": (self.batch, self.kv_length, self.kv_heads),
            "v_scale": (self.batch, self.kv_length, self.kv_heads),
            "q_positions": (self.batch, self.q_length),
            "kv_positions": (self.batch, self.kv_length),
            "q_segment_ids": (self.batch, self.q_length),
            "kv_segment_ids": (self.batch, self.kv_length),
            "lengths": (self.batch,),
            "mask": (self.batch, self.heads, self.q_length, self.kv_length),
            "bias": (self.batch, self.heads, self.q_length, self.kv_length),
            "sinks": (self.heads,),
            "seed": (),
            "batch_index": (self.batch,),
            "head_index": (self.heads,),
        }
        specs = {}
        for name, dims in by_name.items():
            array = getattr(operands, name)
            specs[name] = (
                None if array is None else _spec(dims, array.shape, broadcasts=name in _BROADCAST)
            )
        return Operands(**specs)

    @property
    def output(self) -> PartitionSpec:
        """The spec of the output, `[batch, q_length, heads, v_dim]`."""
        return spec_of(self.batch, self.q_length, self.heads)

    @property
    def lse(self) -> PartitionSpec:
        """The spec of the logsumexp, `[batch, heads, q_length]`."""
        return spec_of(self.batch, self.heads, self.q_length)


_BROADCAST = frozenset({"q_positions", "kv_positions", "mask", "bias"})


def _spec(
    dims: tuple[tuple[str, ...], ...], shape: tuple[int, ...], *, broadcasts: bool
) -> PartitionSpec:
    # A dim of size 1 that stands for all of them is the same everywhere. The mesh axes of k's length may be those of q's:
    # a mask has both dims, and the first keeps them.
    taken: set[str] = set()
    entries = []
    for names, size in zip(dims, shape, strict=False):
        free = (
            () if broadcasts and size == 1 else tuple(name for name in names if name not in taken)
        )
        taken.update(free)
        entries.append(free)
    return spec_of(*entries)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What a call is, without its arrays: what `supports` judges and what a choice is cached by. Sizes are global.

    Attributes:
      batch: number of sequences.
      q_length: rows of queries.
      kv_length: rows of keys.
      heads: query heads.
      kv_heads: heads of k and v.
      head_dim: size of queries and keys.
      v_dim: size of values.
      dtype: of q, k and v; the output's too.
      kv_dtype: of k and v if they are quantised, and then there are scales; else None.
      mode: runtime mode.
      recipe: the static part of the arithmetic.
      layout: of the caller's q, k, v and output; operands are BTHD in any case.
      q_offset: where row i of the queries stands at position `q_offset + i` and row j of the keys at j, the offset;
        None where positions are arrays.
      segments: whether there are segment ids.
      lengths: whether there are lengths.
      sinks: whether there are sinks.
      mask_shape: shape of the dense mask, or None.
      bias_shape: shape of the bias, or None.
      return_lse: whether the logsumexp is asked for.
      return_weights: whether the weights are asked for.
      specs: where the arrays lie.
      mesh: the mesh that specs speak of, or None.
      platform: "cpu", "gpu" or "tpu".
      loop: whether ring attention is a `lax.scan` (else unrolled).
    """

    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    dtype: str
    mode: str
    recipe: Recipe
    layout: Layout = Layout.BTHD
    kv_dtype: str | None = None
    q_offset: int | None = None
    segments: bool = False
    lengths: bool = False
    sinks: bool = False
    mask_shape: tuple[int, ...] | None = None
    bias_shape: tuple[int, ...] | None = None
    return_lse: bool = False
    return_weights: bool = False
    specs: JointSpecs = JointSpecs()
    mesh: Mesh | AbstractMesh | None = None
    platform: str = "cpu"
    loop: bool = True

    def shards(self, mesh_axes: tuple[str, ...]) -> int:
        """Return the number of shards over some mesh axes."""
        count = 1
        for axis in mesh_axes:
            count *= 1 if self.mesh is None else self.mesh.shape[axis]
        return count


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """What an implementation returns, of global arrays.

    Attributes:
      o: `[batch, q_length, heads, v_dim]`, in the call's dtype.
      lse: `[batch, heads, q_length]` float32, -inf for a row without keys; required if `call.return_lse`.
      weights: `[batch, heads, q_length, kv_length]`; required if `call.return_weights`.
    """

    o: Any
    lse: Any = None
    weights: Any = None


def default_positions(length: int, *, offset: int = 0) -> jax.Array:
    """Return `[1, length]` positions that count from an offset."""
    return jnp.arange(offset, offset + length, dtype=jnp.int32)[None]
