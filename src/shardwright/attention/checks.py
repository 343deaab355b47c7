"""Check the arrays and numbers of a call: shapes, dtypes, scales, ranges."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardwright import _jax
from shardwright.attention.call import Arithmetic, DimOrder, Options
from shardwright.attention.masks import Mask
from shardwright.errors import AttentionError

DTYPES: Final = ("float32", "bfloat16", "float16")
QUANTIZED: Final = ("int8", "float8_e4m3fn", "float8_e5m2")
_ORDER: Final = {
    "BTHD": "[batch, length, heads, head_dim]",
    "BHTD": "[batch, heads, length, head_dim]",
}
# Positions beyond this could overflow int32 where kernels add to them.
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
      cast: Whether the call casts the arrays to one dtype. Their dtypes may then differ.

    Raises:
      AttentionError: The layout is unknown, or the shapes or dtypes do not go together.
    """
    if layout not in _ORDER:
        fix = "; ".join(f"{name} is {order}" for name, order in _ORDER.items())
        raise AttentionError(f"unknown layout {layout!r}", fix=fix)
    order = f"layout {layout} is {_ORDER[layout]}"
    for name, array in (("q", q), ("k", k), ("v", v)):
        _check_array(name, array, order)
        if name != "q" and str(array.dtype) in QUANTIZED:
            continue
        if str(array.dtype) not in DTYPES:
            fix = f"attention computes in {', '.join(DTYPES)}: cast it"
            raise AttentionError(f"{name} is {array.dtype}", path=name, fix=fix)
        if array.dtype != q.dtype and not cast:
            fix = "cast q, k and v to one dtype"
            raise AttentionError(f"{name} is {array.dtype}, and q is {q.dtype}", path=name, fix=fix)
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
            fix="query head h reads kv head h * kv_heads // heads, so kv_heads divides heads; "
            "check the layout too",
        )
    return sizes


def _check_array(name: str, array: Any, order: str) -> None:
    shape = getattr(array, "shape", None)
    if shape is None or len(shape) != 4:
        raise AttentionError(f"{name} has shape {shape}, not 4 dims", path=name, fix=order)
    if 0 in shape:
        fix = "pass arrays without an empty dim"
        raise AttentionError(f"{name} has shape {shape}: a dim is empty", path=name, fix=fix)


def read_dtype(value: Any) -> str:
    """Return the dtype that a call computes in, from an array or a dtype."""
    dtype = str(jnp.dtype(getattr(value, "dtype", value)))
    if dtype not in DTYPES:
        fix = f"attention computes in {', '.join(DTYPES)}: pass one of them"
        raise AttentionError(f"runtime_dtype is {dtype}", path="runtime_dtype", fix=fix)
    return dtype


def read_number(name: str, value: Any) -> float:
    """Return a finite Python float.

    Raises:
      AttentionError: The value is an array, infinite, NaN, or not a number.
    """
    array = isinstance(value, (jax.Array, jax.core.Tracer))
    if array or not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
        raise AttentionError(
            f"{name}={value!r} is not a finite Python number",
            path=name,
            fix="pass a Python float: the value is compiled into the program",
        )
    return float(value)


# Scales of quantized keys.


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
      dims: The shape that it must have.
      of: Name of the array that it scales.
      dtype: Dtype of that array.

    Raises:
      AttentionError: The scale is missing, superfluous, or has a wrong dtype or shape.
    """
    quantized = str(dtype) in QUANTIZED
    if scale is None:
        if quantized:
            fix = f"pass {name}=, float32 of shape {dims}"
            raise AttentionError(f"{of} is {dtype} and has no scale", path=name, fix=fix)
        return
    if not quantized:
        fix = f"pass scales only with keys and values in {', '.join(QUANTIZED)}"
        raise AttentionError(f"{name} is given, and {of} is {dtype}", path=name, fix=fix)
    shape, kind = getattr(scale, "shape", None), getattr(scale, "dtype", type(scale).__name__)
    if str(kind) != "float32" or shape != dims:
        fix = f"pass float32 of shape {dims}, one scale for each row and head"
        raise AttentionError(f"{name} is {kind} of shape {shape}", path=name, fix=fix)


# Arrays beside q, k and v.


def check_arrays(options: Options, mask: Mask, sizes: CallSizes) -> None:
    """Raise AttentionError unless masks, biases, positions and sinks have the right shapes."""
    batch, q_length, kv_length = sizes.batch, sizes.q_length, sizes.kv_length
    longest = kv_length if options.kv_positions is None else _MAX_POSITION
    for name, array, shape, low, high in (
        ("segment_ids", mask.q_segment_ids, (batch, q_length), None, None),
        ("kv_segment_ids", mask.kv_segment_ids, (batch, kv_length), None, None),
        ("lengths", mask.lengths, (batch,), 0, longest),
        ("positions", options.positions, (batch, q_length), 0, _MAX_POSITION),
        ("kv_positions", options.kv_positions, (batch, kv_length), -_MAX_POSITION, _MAX_POSITION),
    ):
        if array is not None:
            _check_integers(name, array, shape, low, high)
    full = (batch, sizes.heads, q_length, kv_length)
    if mask.dense is not None:
        if not jnp.issubdtype(mask.dense.dtype, jnp.bool_):
            what = f"mask is {mask.dense.dtype}, not bool"
            raise AttentionError(what, path="mask", fix="True means attend")
        _check_pairs("mask", mask.dense.shape, full)
    if options.bias is not None:
        if not jnp.issubdtype(options.bias.dtype, jnp.floating):
            fix = "pass a mask as mask=; a bias is added to the logits"
            what = f"bias is {options.bias.dtype}, not floating point"
            raise AttentionError(what, path="bias", fix=fix)
        _check_pairs("bias", options.bias.shape, full)
    if options.sinks is not None and tuple(options.sinks.shape) != (sizes.heads,):
        raise AttentionError(
            f"sinks have shape {tuple(options.sinks.shape)}, not ({sizes.heads},)",
            path="sinks",
            fix="give one logit per query head",
        )


def _check_pairs(name: str, shape: tuple[int, ...], full: tuple[int, ...]) -> None:
    """Check the shape of an array with an entry per query and key."""
    fits = [size in (1, whole) for size, whole in zip(shape, full, strict=False)]
    if len(shape) == 4 and all(fits):
        return
    more = {
        2: f"; for [q_length, kv_length] pass {name}[None, None]",
        3: f"; for [batch, q_length, kv_length] pass {name}[:, None]",
    }
    raise AttentionError(
        f"{name} has shape {tuple(shape)}, "
        f"and the logits are [batch, heads, q_length, kv_length] = {full}",
        path=name,
        fix=f"give it 4 dims, each full or 1{more.get(len(shape), '')}",
    )


def _check_integers(
    name: str, array: Any, shape: tuple[int, ...], low: int | None, high: int | None
) -> None:
    if not hasattr(array, "shape") or not jnp.issubdtype(array.dtype, jnp.integer):
        kind = getattr(array, "dtype", type(array).__name__)
        fix = "pass an int32 array"
        raise AttentionError(f"{name} is {kind}, not integers", path=name, fix=fix)
    fits = [shape]
    if "positions" in name:
        fits += [(1, *shape[1:]), shape[1:]]
    if tuple(array.shape) not in fits:
        allowed = " or ".join(str(fit) for fit in dict.fromkeys(fits))
        what = f"{name} has shape {tuple(array.shape)}, not {allowed}"
        raise AttentionError(what, path=name, fix="give one integer per row")
    # The values of a JAX array may not be known yet, and reading them would wait for the device.
    if isinstance(array, np.ndarray) and low is not None and high is not None:
        check_range(name, array, low, high, "count from 0; a negative key position hides its row")


def check_range(name: str, array: Any, low: int, high: int, fix: str) -> None:
    """Raise AttentionError if a NumPy array has values outside of a range."""
    if isinstance(array, np.ndarray) and (array.min() < low or array.max() > high):
        worst = array.min() if array.min() < low else array.max()
        raise AttentionError(f"{name} has {worst}, outside {low} to {high}", path=name, fix=fix)


def check_dropout(recipe: Arithmetic, q: Any, key: Any) -> None:
    """Refuse dropout inside a `shard_map` of the caller, unless each shard has its own key.

    Rows and heads have local numbers there, so with one key every shard would drop the same
    weights.
    """
    if not recipe.dropout or not _jax.is_array(q):
        return
    own = _jax.varying_axes(key) if _jax.is_array(key) and _jax.tracks_varying() else frozenset()
    manual = sorted(_jax.varying_axes(q) - own)
    if manual:
        raise AttentionError(
            f"dropout inside a shard_map over {'+'.join(manual)}: "
            "which weights are dropped depends on global rows and heads",
            path="dropout",
            fix="call attention outside of that shard_map, or give each shard a key of its own: "
            f"jax.random.fold_in(key, jax.lax.axis_index({tuple(manual)!r}))",
        )
