"""One attention call in two values: `Operands` holds its arrays, `AttentionCall` everything else.

`Options` holds the keywords as the caller wrote them.

`AttentionCall` is frozen and hashable. Operands are always BTHD,
`[batch, length, heads, head_dim]`, whatever layout the caller uses. Masks and biases are
`[batch, heads, q_length, kv_length]`, and each of their dims has its full size or 1.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardwright.attention.masks import MaskRules
from shardwright.manager.manager import PartitionManager
from shardwright.resolution.partition_specs import spec_of

# A remat policy saves the results by these names:
# `jax.checkpoint_policies.save_only_these_names(OUTPUT_NAME, LSE_NAME)`.
OUTPUT_NAME: Final = "attention_output"
LSE_NAME: Final = "attention_lse"


class DimOrder(enum.StrEnum):
    """The order of the dims of q, k, v and the output: batch, length (T), heads, head_dim."""

    BTHD = "BTHD"
    BHTD = "BHTD"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """The keywords of `dot_product_attention`, and the options below.

    A call sets the options below through `metadata`.

    Attributes:
      q_block: Number of queries in a block.
      kv_block: Number of keys in a block.
      loop: Whether ring attention is a `lax.scan`. Defaults to True.
      platform: "cpu", "gpu" or "tpu". Defaults to the platform of the manager's devices.
      manager: Defaults to the ambient manager.
      dtype: Dtype that q, k and v are cast to. Defaults to q's.
      sequence_axis: The only mesh axis that may shard the lengths, or None for any.
    """

    mode: str | None = None
    causal: bool = False
    window: Any = None
    chunk: int | None = None
    segment_ids: Any = None
    kv_segment_ids: Any = None
    positions: Any = None
    kv_positions: Any = None
    lengths: Any = None
    mask: Any = None
    bias: Any = None
    sinks: Any = None
    k_scale: Any = None
    v_scale: Any = None
    softcap: float | None = None
    scale: float | None = None
    dropout: float | None = None
    dropout_key: Any = None
    layout: str = "BTHD"
    return_lse: bool = False
    return_weights: bool = False
    q_block: int | None = None
    kv_block: int | None = None
    loop: bool | None = None
    platform: str | None = None
    manager: PartitionManager | None = None
    dtype: Any = None
    sequence_axis: str | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operands:
    """The arrays of a call. Inside `shard_map` the same class holds the local shards.

    Attributes:
      q: `[batch, q_length, heads, head_dim]`.
      k: `[batch, kv_length, kv_heads, head_dim]`. Query head h reads kv head
        `h * kv_heads // heads`.
      v: `[batch, kv_length, kv_heads, v_dim]`.
      k_scale: `[batch, kv_length, kv_heads]` float32 for quantized keys, else None. A key is
        `k * k_scale`.
      v_scale: As `k_scale`, for the values.
      q_positions: `[batch or 1, q_length]` int32, global.
      kv_positions: `[batch or 1, kv_length]` int32, global. A negative position marks a row that
        holds no key.
      q_segment_ids: `[batch, q_length]` int32, or None.
      kv_segment_ids: `[batch, kv_length]` int32, or None.
      lengths: `[batch]` int32, or None. Keys at positions from this length on are hidden.
      mask: Bool array, True = attend; or None.
      bias: Array that is added to the scaled logits; or None.
      sinks: `[heads]`, or None. Each is a logit that takes part in the softmax but has no value.
      seed: uint32 scalar for dropout, or None.
      batch_index: `[batch]` int32, global indices of the batch rows. Present only with dropout.
      head_index: `[heads]` int32, global indices of the query heads. Present only with dropout.
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
        """Return the operands with some arrays changed."""
        return dataclasses.replace(self, **changes)


# Operand -> its dims. A dim has the name of the field of `JointSpecs` that holds its mesh axes.
# Trailing dims that no mesh axis may shard, such as head_dim, are omitted. A new operand declares
# its dims here, and nowhere else.
OPERAND_DIMS: Final[dict[str, tuple[str, ...]]] = {
    "q": ("batch", "q_length", "heads"),
    "k": ("batch", "kv_length", "kv_heads"),
    "v": ("batch", "kv_length", "kv_heads"),
    "q_positions": ("batch", "q_length"),
    "kv_positions": ("batch", "kv_length"),
    "k_scale": ("batch", "kv_length", "kv_heads"),
    "v_scale": ("batch", "kv_length", "kv_heads"),
    "q_segment_ids": ("batch", "q_length"),
    "kv_segment_ids": ("batch", "kv_length"),
    "lengths": ("batch",),
    "mask": ("batch", "heads", "q_length", "kv_length"),
    "bias": ("batch", "heads", "q_length", "kv_length"),
    "sinks": ("heads",),
    "seed": (),
    "batch_index": ("batch",),
    "head_index": ("heads",),
}
# These operands may have dims of size 1, which are broadcast. No mesh axis shards such a dim.
_BROADCAST = frozenset({"q_positions", "kv_positions", "mask", "bias"})


def dims_along(length: str) -> dict[str, int]:
    """Return operand -> index of the dim `length`, for the operands that have this dim.

    Args:
      length: "q_length" or "kv_length".
    """
    return {name: dims.index(length) for name, dims in OPERAND_DIMS.items() if length in dims}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The static settings of the computation.

    Logits are `softcap(scale * q.k + bias)`. They are masked, then softmax and dropout follow. With
    quantized keys and values, k's scale multiplies the scores before the bias is added, and v's
    scale multiplies the weights after dropout.

    Attributes:
      mask: The rules that decide by position which keys a query sees.
      scale: Factor of the scores, q · k.
      softcap: c in `c * tanh(logits / c)`, or None.
      dropout: Probability of dropping a weight. The other weights are divided by `1 - dropout`.
      q_block: Number of queries of a sequence that a blockwise kernel holds at a time.
      kv_block: Number of keys of a sequence that a blockwise kernel holds at a time.
      cached: The caller's layout of k and v if they are a cache on TPUs, else None. Kernels read
        the cache in this layout, so they need no copy.
      partly_filled: Whether positions or lengths may hide rows of k and v. Those rows may hold NaN.
    """

    mask: MaskRules = dataclasses.field(default_factory=MaskRules)
    scale: float
    softcap: float | None = None
    dropout: float = 0.0
    q_block: int = 512
    kv_block: int = 1024
    cached: DimOrder | None = None
    partly_filled: bool = False


class KVHeads(enum.StrEnum):
    """How the heads of k and v are sharded, relative to the query heads.

    SAME: over the same mesh axes.
    PREFIX: over the leading mesh axes of the query heads, and replicated over the other ones. Each
      shard picks the kv heads that its queries read.
    INDEX: replicated. Each shard picks the kv heads that its queries read.
    FACTOR: over some leading mesh axes of the query heads, or over none. Some of the other mesh
      axes of the query heads shard the keys' length, so a shard holds only a part of the keys that
      its queries read.
    """

    SAME = "same"
    PREFIX = "prefix"
    INDEX = "index"
    FACTOR = "factor"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JointSpecs:
    """The sharding of a call's arrays, resolved jointly.

    Each tuple holds the mesh axes of one dim, major first. An unsharded call has empty tuples.

    Attributes:
      batch: Mesh axes of the batch of q, k and v.
      q_length: Mesh axes of the queries' length.
      kv_length: Mesh axes of the keys' length.
      heads: Mesh axes of the query heads.
      kv_heads: Mesh axes of the kv heads; a prefix of `heads`.
      grouping: How the kv heads are sharded, relative to the query heads.
      why: The reason for the grouping, in one line.
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
        """The mesh axes that shard any dim, each listed once."""
        every = (*self.batch, *self.q_length, *self.kv_length, *self.heads, *self.kv_heads)
        return tuple(dict.fromkeys(every))

    def spec(self, *dims: str) -> PartitionSpec:
        """Return the spec of an array. Each of `dims` names a field, such as "batch"."""
        return _spec_of(self, dims, ())

    def operands(self, operands: Operands) -> Operands:
        """Return the spec of each operand, in a value of the same structure."""
        specs = {}
        for name, dims in OPERAND_DIMS.items():
            array = getattr(operands, name)
            shape = array.shape if name in _BROADCAST and array is not None else ()
            specs[name] = None if array is None else _spec_of(self, dims, shape)
        return Operands(**specs)

    @property
    def output(self) -> PartitionSpec:
        """The spec of the output, `[batch, q_length, heads, v_dim]`."""
        return _spec_of(self, ("batch", "q_length", "heads"), ())

    @property
    def lse(self) -> PartitionSpec:
        """The spec of the logsumexp, `[batch, heads, q_length]`."""
        return _spec_of(self, ("batch", "heads", "q_length"), ())

    @property
    def weights(self) -> PartitionSpec:
        """The spec of the attention weights, `[batch, heads, q_length, kv_length]`."""
        return _spec_of(self, OPERAND_DIMS["mask"], ())


# Every call asks for about ten specs, and all layers of a model ask for equal specs.
@functools.lru_cache(maxsize=4096)
def _spec_of(specs: JointSpecs, dims: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """Return the spec of an array. If a shape is given, a dim of size 1 is not sharded.

    The keys' length may share mesh axes with the queries' length. A mask has both dims: there, the
    shared mesh axes shard only the dim that comes first.
    """
    used: set[str] = set()
    entries = []
    for at, dim in enumerate(dims):
        axes = () if shape and shape[at] == 1 else getattr(specs, dim)
        free = tuple(axis for axis in axes if axis not in used)
        used.update(free)
        entries.append(free)
    return spec_of(*entries)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """A call without its arrays: what `supports` reads, and the key under which a choice is cached.

    Sizes are global.

    Attributes:
      batch: Number of sequences.
      q_length: Number of queries of a sequence.
      kv_length: Number of keys of a sequence.
      heads: Number of query heads.
      kv_heads: Number of heads of k and v.
      head_dim: Size of a query and of a key.
      v_dim: Size of a value.
      dtype: Dtype of q, k, v and the output.
      kv_dtype: Dtype of k and v if they are quantized and have scales, else None.
      mode: Runtime mode.
      recipe: Static settings of the computation.
      layout: Layout of the caller's q, k, v and output. Operands are BTHD in any case.
      q_offset: None if positions are arrays. Otherwise row i of the queries is at position
        `q_offset + i`, and row j of the keys is at position j.
      segments: Whether there are segment ids.
      lengths: Whether there are lengths.
      sinks: Whether there are sinks.
      mask_shape: Shape of the dense mask, or None.
      bias_shape: Shape of the bias, or None.
      return_lse: Whether the caller asks for the logsumexp.
      return_weights: Whether the caller asks for the weights.
      specs: The sharding of the arrays.
      mesh: The mesh that `specs` refers to, or None.
      platform: "cpu", "gpu" or "tpu".
      loop: Whether ring attention is a `lax.scan`; otherwise it is unrolled.
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
    recipe: Arithmetic
    layout: DimOrder = DimOrder.BTHD
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

    @property
    def on_cpus(self) -> bool:
        """Whether the devices of the mesh are CPUs, on which kernels are interpreted.

        Tests run calls for TPUs and GPUs on CPUs.
        """
        return isinstance(self.mesh, Mesh) and self.mesh.devices.flat[0].platform == "cpu"

    def shards(self, mesh_axes: tuple[str, ...]) -> int:
        """Return the number of shards over some mesh axes."""
        if self.mesh is None:
            return 1
        count = 1
        for axis in mesh_axes:
            count *= self.mesh.shape[axis]
        return count


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """The global arrays that an implementation returns.

    Attributes:
      o: `[batch, q_length, heads, v_dim]`, in the call's dtype.
      lse: `[batch, heads, q_length]` float32, -inf for a row that has neither keys nor sinks.
        Required if `call.return_lse`.
      weights: `[batch, heads, q_length, kv_length]`. Required if `call.return_weights`.
      kept: The local arrays that the backward pass of a kernel reads in addition to operands,
        output and logsumexp. A remat policy that saves the logsumexp also saves these arrays.
    """

    o: Any
    lse: Any = None
    weights: Any = None
    kept: tuple[Any, ...] = ()

    def only(self, call: AttentionCall) -> Result:
        """Return the result without the arrays that the call does not ask for."""
        lse = self.lse if call.return_lse else None
        return Result(o=self.o, lse=lse, weights=self.weights if call.return_weights else None)


def default_positions(length: int, *, offset: int = 0) -> jax.Array:
    """Return `[1, length]` positions: `offset`, `offset + 1` and so on."""
    return jnp.arange(offset, offset + length, dtype=jnp.int32)[None]
