"""Check the arrays and numbers of a call: shapes, dtypes, scales, ranges."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardwright import _jax
from shardwright.attention.call import DimOrder, Options
from shardwright.attention.masks import Mask
from shardwright.errors import AttentionError
from shardwright.vocabulary.read import array, read_value

DTYPES: Final = ("float32", "bfloat16", "float16")
QUANTIZED: Final = ("int8", "float8_e4m3fn", "float8_e5m2")
_ORDER: Final = {
    "BTHD": "[batch, length, heads, head_dim]",
    "BHTD": "[batch, heads, length, head_dim]",
}
# The largest position. Kernels add to positions, and larger positions could overflow int32.
_MAX_POSITION: Final = 2**30


class CallSizes(NamedTuple):
    """The global sizes of a call."""

    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int

    @property
    def q(self) -> tuple[int, int, int, int]:
        """The shape of q, BTHD."""
        return self.batch, self.q_length, self.heads, self.head_dim

    @property
    def k(self) -> tuple[int, int, int, int]:
        """The shape of k, BTHD."""
        return self.batch, self.kv_length, self.kv_heads, self.head_dim

    @property
    def v(self) -> tuple[int, int, int, int]:
        """The shape of v, BTHD."""
        return self.batch, self.kv_length, self.kv_heads, self.v_dim


def read_sizes(q: Any, k: Any, v: Any, layout: str, *, cast: bool) -> CallSizes:
    """Return the sizes of q, k and v.

    Args:
      q: An array or a `jax.ShapeDtypeStruct`.
      k: Likewise.
      v: Likewise.
      layout: "BTHD" or "BHTD".
      cast: Whether the call casts the arrays to one dtype. If it does, the dtypes of q, k and v may
        differ.

    Raises:
      AttentionError: The layout is unknown, or the shapes or dtypes do not fit each other.
    """
    if layout not in _ORDER:
        fix = "; ".join(f"{name} is {order}" for name, order in _ORDER.items())
        raise AttentionError(f"unknown layout {layout!r}", fix=fix)
    order = f"layout {layout} is {_ORDER[layout]}"
    for name, given in (("q", q), ("k", k), ("v", v)):
        check_dims(name, given, order)
        dtype = str(given.dtype)
        if name != "q" and dtype in QUANTIZED:
            continue
        if dtype not in DTYPES:
            fix = f"attention computes in {', '.join(DTYPES)}: cast it"
            raise AttentionError(f"{name} is {dtype}", path=name, fix=fix)
        if given.dtype != q.dtype and not cast:
            fix = f"cast q, k and v to one dtype of {', '.join(DTYPES)}"
            raise AttentionError(f"{name} is {dtype}, and q is {q.dtype}", path=name, fix=fix)
    length, head = (1, 2) if layout == "BTHD" else (2, 1)
    sizes = CallSizes(
        batch=q.shape[0],
        q_length=q.shape[length],
        kv_length=k.shape[length],
        heads=q.shape[head],
        kv_heads=k.shape[head],
        head_dim=q.shape[3],
        v_dim=v.shape[3],
    )
    for name, dim, size, required, of in (
        ("k", "batch", k.shape[0], sizes.batch, "q"),
        ("k", "head_dim", k.shape[3], sizes.head_dim, "q"),
        ("v", "batch", v.shape[0], sizes.batch, "q"),
        ("v", "length", v.shape[length], sizes.kv_length, "k"),
        ("v", "heads", v.shape[head], sizes.kv_heads, "k"),
    ):
        if size != required:
            what = f"{dim} is {size} in {name}, and {required} in {of}"
            raise AttentionError(what, path=name, fix=order)
    if sizes.heads % sizes.kv_heads:
        raise AttentionError(
            f"{sizes.heads} query heads do not divide over {sizes.kv_heads} kv heads",
            path="k",
            fix="let the number of query heads be a multiple of the kv heads; check the layout too",
        )
    return sizes


def check_dims(name: str, given: Any, order: str) -> None:
    """Raise AttentionError unless an array has four dims and at least one element."""
    shape = getattr(given, "shape", None)
    if shape is None or len(shape) != 4 or 0 in shape:
        what = f"{name} has shape {shape}, not 4 dims of at least 1"
        raise AttentionError(what, path=name, fix=order)


def read_dtype(value: Any) -> str:
    """Return the dtype that a call computes in, from an array or a dtype."""
    dtype = str(jnp.dtype(getattr(value, "dtype", value)))
    if dtype not in DTYPES:
        fix = f"attention computes in {', '.join(DTYPES)}: pass one of them"
        raise AttentionError(f"runtime_dtype is {dtype}", path="runtime_dtype", fix=fix)
    return dtype


def check_scales(k: Any, v: Any, options: Options, sizes: CallSizes) -> None:
    """Raise AttentionError unless quantized keys and values, and only those, have scales."""
    if k.dtype != v.dtype and (str(k.dtype) in QUANTIZED or str(v.dtype) in QUANTIZED):
        fix = "quantize both to one dtype, or neither"
        raise AttentionError(f"v is {v.dtype}, and k is {k.dtype}", path="v", fix=fix)
    dims: tuple[int, ...] = (sizes.batch, sizes.kv_length, sizes.kv_heads)
    if options.layout == DimOrder.BHTD:
        dims = (sizes.batch, sizes.kv_heads, sizes.kv_length)
    check_scale("k_scale", options.k_scale, dims, of="k", dtype=k.dtype)
    check_scale("v_scale", options.v_scale, dims, of="v", dtype=v.dtype)


def check_scale(name: str, scale: Any, dims: tuple[int, ...], *, of: str, dtype: Any) -> None:
    """Check that a quantized array has a scale, and that no other array has one.

    Args:
      name: Name of the scale.
      scale: The scale, or None.
      dims: The shape that the scale must have.
      of: Name of the array that the scale belongs to.
      dtype: Dtype of that array.

    Raises:
      AttentionError: The scale is missing, superfluous, or has a wrong dtype or shape.
    """
    if scale is None and str(dtype) in QUANTIZED:
        fix = f"pass {name}, float32 of shape {dims}"
        raise AttentionError(f"{of} is {dtype}, and {name} is missing", path=name, fix=fix)
    if scale is not None:
        if str(dtype) not in QUANTIZED:
            fix = f"leave {name} out, or quantize {of} to {' or '.join(QUANTIZED)}"
            what = f"{of} is {dtype}, and only quantized arrays have a scale"
            raise AttentionError(what, path=name, fix=fix)
        read_value(name, scale, array(dims, dtype="float32"), error=AttentionError)


def check_arrays(options: Options, mask: Mask, sizes: CallSizes) -> None:
    """Raise AttentionError unless masks, biases, positions and sinks have the right shapes."""
    batch, q_length, kv_length = sizes.batch, sizes.q_length, sizes.kv_length
    longest = kv_length if options.kv_positions is None else _MAX_POSITION
    for name, given, shape, low, high in (
        ("segment_ids", mask.q_segment_ids, (batch, q_length), None, None),
        ("kv_segment_ids", mask.kv_segment_ids, (batch, kv_length), None, None),
        ("lengths", mask.lengths, (batch,), 0, longest),
        ("positions", options.positions, (batch, q_length), 0, _MAX_POSITION),
        ("kv_positions", options.kv_positions, (batch, kv_length), -_MAX_POSITION, _MAX_POSITION),
    ):
        if given is None:
            continue
        shapes = [shape, (1, *shape[1:]), shape[1:]] if "positions" in name else [shape]
        check_integers(name, given, *shapes)
        if low is not None and high is not None:
            fix = "count from 0; a negative key position hides its row"
            check_range(name, given, low, high, fix)
    full = (batch, sizes.heads, q_length, kv_length)
    for name, pairs, dtype, word in (
        ("mask", mask.dense, jnp.bool_, "bool, True where a query attends"),
        ("bias", options.bias, jnp.floating, "floats, which are added to the logits"),
    ):
        if pairs is not None:
            _check_pairs(name, pairs, full, dtype, word)
    if options.sinks is not None:
        sinks = array((sizes.heads,), dtype=jnp.floating, layout="give one logit per query head")
        read_value("sinks", options.sinks, sinks, error=AttentionError)


def _check_pairs(name: str, pairs: Any, full: tuple[int, ...], dtype: Any, word: str) -> None:
    """Check a mask or a bias: an array with an element for each pair of query and key."""
    fits = [size in (1, whole) for size, whole in zip(pairs.shape, full, strict=False)]
    if len(pairs.shape) != 4 or not all(fits) or not jnp.issubdtype(pairs.dtype, dtype):
        raise AttentionError(
            f"{name} is {pairs.dtype} of shape {tuple(pairs.shape)}, "
            f"and the logits are [batch, heads, q_length, kv_length] = {full}",
            path=name,
            fix=f"pass {word}, with 4 dims of these sizes or of size 1: {name}[None, None] for "
            f"[q_length, kv_length], {name}[:, None] for [batch, q_length, kv_length]",
        )


def check_integers(name: str, given: Any, *shapes: tuple[int, ...]) -> None:
    """Raise AttentionError unless an argument is an array of integers of one of the shapes."""
    kind = array(*dict.fromkeys(shapes), dtype=jnp.integer)
    read_value(name, given, kind, error=AttentionError)


def check_range(name: str, given: Any, low: int, high: int, fix: str) -> None:
    """Raise AttentionError if a NumPy array has values outside of a range."""
    # Check only NumPy arrays: a JAX array may be traced, and reading it would wait for the device.
    if isinstance(given, np.ndarray) and (given.min() < low or given.max() > high):
        worst = given.min() if given.min() < low else given.max()
        raise AttentionError(f"{name} has {worst}, outside {low} to {high}", path=name, fix=fix)


def check_dropout(q: Any, key: Any, split: frozenset[str]) -> None:
    """Refuse dropout inside a `shard_map` that splits q, unless each shard has its own key.

    Inside the `shard_map`, each shard numbers its rows and heads from 0. So with one key, every
    shard would drop the same weights.

    Args:
      q: The queries.
      key: The key.
      split: Mesh axes over which `shard_map` may have split q.
    """
    if not _jax.is_array(q):
        return
    own = _jax.varying_axes(key) if _jax.is_array(key) and _jax.tracks_varying() else frozenset()
    manual = sorted((_jax.varying_axes(q) & split) - own)
    if manual:
        raise AttentionError(
            f"dropout inside a shard_map over {'+'.join(manual)}: "
            "which weights are dropped depends on global rows and heads",
            path="dropout",
            fix="call attention outside of that shard_map, or give each shard a key of its own: "
            f"jax.random.fold_in(key, jax.lax.axis_index({tuple(manual)!r}))",
        )
