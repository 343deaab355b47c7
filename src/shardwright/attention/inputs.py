"""From what a caller says to what a kernel gets: every ambiguity decided once, every mistake named before anything is traced."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardwright import _jax
from shardwright.attention import masks
from shardwright.attention.call import (
    AttentionCall,
    JointSpecs,
    Layout,
    Operands,
    Recipe,
    default_positions,
)
from shardwright.attention.masks import Mask, MaskRules
from shardwright.attention.sharding import resolve_joint
from shardwright.errors import AttentionError, did_you_mean
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.vocabulary.modes import MODE_DECODE, MODE_INSERT, MODE_TRAIN, mode_name, parse_mode

_DTYPES = ("float32", "bfloat16", "float16")
_QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")
_MOST = 2**30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """The keywords of `dot_product_attention`; see there."""

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


def make_options(options: dict[str, Any]) -> Options:
    """Return options from keywords.

    Raises:
      AttentionError: an unknown keyword.
    """
    known = {field.name for field in dataclasses.fields(Options)}
    for name in options:
        if name not in known:
            raise AttentionError(
                f"unknown option {name!r}",
                fix=did_you_mean(name, known) or f"options are {', '.join(sorted(known))}",
            )
    return Options(**options)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int


def describe(
    q: Any, k: Any, v: Any, *, options: Options, specs: JointSpecs | None = None
) -> tuple[AttentionCall, Mask]:
    """Return a call as data, and its mask with all arrays in it. Reads shapes and dtypes; arrays may be `ShapeDtypeStruct`s.

    Args:
      q: like that of `dot_product_attention`; so are k and v.
      k: see q.
      v: see q.
      options: its keywords.
      specs: where the arrays lie; absent: as the manager's rules say.

    Raises:
      AttentionError: the arguments do not go together; see `dot_product_attention`.
      ShardingError: the arrays do not lie on the manager's mesh as its rules say.
    """
    layout = _layout(options.layout)
    sizes = _sizes(q, k, v, layout, cast=options.dtype is not None)
    _check_scales(k, v, options, sizes, layout)
    manager = options.manager if options.manager is not None else context.current()
    mode = _mode(options.mode, manager)
    mask = _mask(options, sizes)
    _check_arrays(options, mask, sizes)
    platform = options.platform or _platform(manager)
    recipe = _recipe(options, mask.rules, sizes, platform)
    if platform == "tpu" and (mode == MODE_DECODE or _is_quantised(k)):
        recipe = dataclasses.replace(recipe, cached=layout)
    given = (options.positions, options.kv_positions, mask.lengths)
    recipe = dataclasses.replace(recipe, partly_filled=any(one is not None for one in given))
    _check_dropout(recipe, q)
    if specs is None and manager is not None:
        rows = (sizes.batch, sizes.kv_length, sizes.kv_heads)
        q_dims = (sizes.batch, sizes.q_length, sizes.heads, sizes.head_dim)
        specs = resolve_joint(
            manager, q=q_dims, k=(*rows, sizes.head_dim), v=(*rows, sizes.v_dim), mode=mode
        )
    specs = JointSpecs() if specs is None else specs
    _check_sequence_axis(options.sequence_axis, specs)
    call = AttentionCall(
        **dataclasses.asdict(sizes),
        dtype=_dtype(q, options),
        kv_dtype=str(k.dtype) if _is_quantised(k) else None,
        mode=mode,
        recipe=recipe,
        layout=layout,
        q_offset=_offset(options, mask, mode, sizes),
        segments=mask.q_segment_ids is not None,
        lengths=mask.lengths is not None,
        sinks=options.sinks is not None,
        mask_shape=None if mask.dense is None else tuple(mask.dense.shape),
        bias_shape=None if options.bias is None else tuple(options.bias.shape),
        return_lse=options.return_lse,
        return_weights=options.return_weights,
        specs=specs,
        mesh=None if manager is None else manager.mesh,
        platform=platform,
        loop=options.loop is not False,
    )
    return call, mask


def _dtype(q: Any, options: Options) -> str:
    """Return the dtype that the call computes in: that of q, or the metadata's."""
    found = str(jnp.dtype(q.dtype if options.dtype is None else options.dtype))
    if found not in _DTYPES:
        fix = f"attention computes in {', '.join(_DTYPES)}: pass one of them"
        raise AttentionError(f"runtime_dtype is {found}", path="runtime_dtype", fix=fix)
    return found


def _check_sequence_axis(name: str | None, specs: JointSpecs) -> None:
    """Refuse a sequence that the rules shard over other mesh axes than the one that the caller names."""
    for what, axes in (("queries", specs.q_length), ("keys", specs.kv_length)):
        if name is not None and axes and axes != (name,):
            raise AttentionError(
                f"the length of the {what} lies over {'+'.join(axes)}, not over sequence_axis_name={name!r}",
                path="sequence_axis_name",
                fix=f"name {'+'.join(axes)}, or change the rules of query_length and kv_length",
            )


def make_operands(
    q: Any, k: Any, v: Any, *, options: Options, call: AttentionCall, mask: Mask
) -> Operands:
    """Return the arrays of a described call, BTHD, with positions."""
    kv_dtype = call.kv_dtype or call.dtype
    arrays = [
        jnp.asarray(x).astype(dtype) for x, dtype in ((q, call.dtype), (k, kv_dtype), (v, kv_dtype))
    ]
    arrays += [jnp.asarray(x) for x in (options.k_scale, options.v_scale) if x is not None]
    q, k, v, *scales = (
        arrays if call.layout is Layout.BTHD else [jnp.swapaxes(x, 1, 2) for x in arrays]
    )
    k_scale, v_scale = scales or (None, None)
    q_positions, kv_positions = _positions(options, mask, call)
    dropout = bool(call.recipe.dropout)
    return Operands(
        q=q,
        k=k,
        v=v,
        k_scale=k_scale,
        v_scale=v_scale,
        q_positions=q_positions,
        kv_positions=kv_positions,
        q_segment_ids=_integers(mask.q_segment_ids),
        kv_segment_ids=_integers(mask.kv_segment_ids),
        lengths=_integers(mask.lengths),
        mask=None if mask.dense is None else jnp.asarray(mask.dense),
        bias=None if options.bias is None else jnp.asarray(options.bias),
        sinks=None if options.sinks is None else jnp.asarray(options.sinks),
        seed=_seed(options.dropout_key) if dropout else None,
        batch_index=jnp.arange(call.batch, dtype=jnp.int32) if dropout else None,
        head_index=jnp.arange(call.heads, dtype=jnp.int32) if dropout else None,
    )


def _integers(array: Any) -> Any:
    return None if array is None else jnp.asarray(array).astype(jnp.int32)


def _seed(key: Any) -> jax.Array:
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.bits(key, (), jnp.uint32)
    return jnp.asarray(key).astype(jnp.uint32)


# Sizes.


def _layout(layout: str) -> Layout:
    if layout not in tuple(Layout):
        fix = "BTHD is [batch, length, heads, head_dim], BHTD is [batch, heads, length, head_dim]"
        raise AttentionError(f"unknown layout {layout!r}", fix=fix)
    return Layout(layout)


def _sizes(q: Any, k: Any, v: Any, layout: Layout, *, cast: bool) -> _Sizes:
    named = {"q": q, "k": k, "v": v}
    order = (
        "[batch, length, heads, head_dim]"
        if layout is Layout.BTHD
        else "[batch, heads, length, head_dim]"
    )
    for name, x in named.items():
        shape = getattr(x, "shape", None)
        if shape is None or len(shape) != 4:
            raise AttentionError(
                f"{name} has shape {shape}, not 4 dims",
                path=name,
                fix=f"layout {layout} is {order}",
            )
        if 0 in shape:
            raise AttentionError(
                f"{name} has shape {shape}: a dim is empty",
                path=name,
                fix="call it with at least one row",
            )
        if name != "q" and _is_quantised(x):
            continue
        if str(x.dtype) not in _DTYPES:
            raise AttentionError(
                f"{name} is {x.dtype}",
                path=name,
                fix=f"attention computes in {', '.join(_DTYPES)}: cast it",
            )
        if x.dtype != q.dtype and not cast:
            raise AttentionError(
                f"{name} is {x.dtype}, and q is {q.dtype}",
                path=name,
                fix="cast q, k and v to one dtype",
            )
    at = (0, 1, 2, 3) if layout is Layout.BTHD else (0, 2, 1, 3)
    (batch, q_length, heads, head_dim), ks, vs = (
        [x.shape[dim] for dim in at] for x in named.values()
    )
    for name, dim, found, wanted, of in (
        ("k", "batch", ks[0], batch, "q"),
        ("k", "head_dim", ks[3], head_dim, "q"),
        ("v", "batch", vs[0], batch, "q"),
        ("v", "length", vs[1], ks[1], "k"),
        ("v", "heads", vs[2], ks[2], "k"),
    ):
        if found != wanted:
            raise AttentionError(
                f"{dim} {found} of {name} is not {wanted}, that of {of}",
                path=name,
                fix=f"layout {layout} is {order}",
            )
    if heads % ks[2]:
        fix = "query head h reads kv head h * kv_heads // heads, so kv_heads divides heads; check the layout too"
        raise AttentionError(
            f"{heads} query heads do not divide over {ks[2]} kv heads", path="k", fix=fix
        )
    return _Sizes(
        batch=batch,
        q_length=q_length,
        kv_length=ks[1],
        heads=heads,
        kv_heads=ks[2],
        head_dim=head_dim,
        v_dim=vs[3],
    )


def _is_quantised(x: Any) -> bool:
    return str(x.dtype) in _QUANTISED


def _check_scales(k: Any, v: Any, options: Options, sizes: _Sizes, layout: Layout) -> None:
    """Raise unless quantised keys and values, and none but those, have scales."""
    if k.dtype != v.dtype and (_is_quantised(k) or _is_quantised(v)):
        raise AttentionError(
            f"v is {v.dtype}, and k is {k.dtype}",
            path="v",
            fix="quantise both to one dtype, or neither",
        )
    dims = (sizes.batch, sizes.kv_length, sizes.kv_heads)
    dims = dims if layout is Layout.BTHD else (dims[0], dims[2], dims[1])
    check_scale("k_scale", options.k_scale, dims, of="k", dtype=k.dtype)
    check_scale("v_scale", options.v_scale, dims, of="v", dtype=v.dtype)


def check_scale(name: str, scale: Any, dims: tuple[int, ...], *, of: str, dtype: Any) -> None:
    """Raise AttentionError unless there is a scale, float32 of these dims, for a quantised array, and none for another."""
    quantised = str(dtype) in _QUANTISED
    if scale is None and quantised:
        raise AttentionError(
            f"{of} is {dtype} and has no scale",
            path=name,
            fix=f"pass {name}=, float32 of shape {dims}",
        )
    if scale is not None and not quantised:
        fix = f"scales go with keys and values in {', '.join(_QUANTISED)}"
        raise AttentionError(f"{name} is given, and {of} is {dtype}", path=name, fix=fix)
    kind, shape = str(getattr(scale, "dtype", type(scale).__name__)), getattr(scale, "shape", None)
    if scale is not None and (kind != "float32" or shape != dims):
        what = f"{name} is {kind} of shape {shape}"
        raise AttentionError(
            what, path=name, fix=f"pass float32 of shape {dims}, one scale for each row and head"
        )


def _mode(mode: str | None, manager: PartitionManager | None) -> str:
    said = mode if mode is not None else manager.mode if manager is not None else None
    if said is None:
        fix = 'pass mode="train", "prefill" or "decode", or use a manager that has one, pm.for_mode("decode")'
        raise AttentionError(
            "attention needs a mode, and neither the call nor a manager says one", fix=fix
        )
    parsed = parse_mode(said)
    if parsed == MODE_INSERT:
        raise AttentionError(
            "insert moves rows of a cache and attends to nothing",
            fix='pass mode="decode" or "prefill"',
        )
    return parsed


def _platform(manager: PartitionManager | None) -> str:
    mesh = None if manager is None else manager.mesh
    name = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else str(name)


# Masks and positions.


def _mask(options: Options, sizes: _Sizes) -> Mask:
    """Return everything that masks, as one value."""
    found = Mask(rules=MaskRules(causal=options.causal, window=options.window, chunk=options.chunk))
    if options.segment_ids is not None:
        if options.kv_segment_ids is None and sizes.q_length != sizes.kv_length:
            what = (
                f"segment_ids are of {sizes.q_length} queries, and there are {sizes.kv_length} keys"
            )
            raise AttentionError(what, path="segment_ids", fix="pass kv_segment_ids too")
        found = found & masks.segments(options.segment_ids, options.kv_segment_ids)
    elif options.kv_segment_ids is not None:
        raise AttentionError(
            "kv_segment_ids without segment_ids", path="kv_segment_ids", fix="pass both"
        )
    if options.lengths is not None:
        found = found & masks.lengths(options.lengths)
    if options.mask is None:
        return found
    return found & (options.mask if isinstance(options.mask, Mask) else masks.dense(options.mask))


def _check_arrays(options: Options, mask: Mask, sizes: _Sizes) -> None:
    b, t, s, h = sizes.batch, sizes.q_length, sizes.kv_length, sizes.heads
    _check_integers("segment_ids", mask.q_segment_ids, (b, t))
    _check_integers("kv_segment_ids", mask.kv_segment_ids, (b, s))
    _check_integers(
        "lengths", mask.lengths, (b,), low=0, high=s if options.kv_positions is None else _MOST
    )
    _check_integers("positions", options.positions, (b, t), low=0, high=_MOST)
    _check_integers("kv_positions", options.kv_positions, (b, s), low=-_MOST, high=_MOST)
    for name, array, kind in (
        ("mask", mask.dense, jnp.bool_),
        ("bias", options.bias, jnp.floating),
    ):
        if array is None:
            continue
        if not jnp.issubdtype(array.dtype, kind):
            fix = (
                "True means attend"
                if name == "mask"
                else "a mask goes into mask=, a bias is added to the logits"
            )
            raise AttentionError(
                f"{name} is {array.dtype}, not {np.dtype(bool) if name == 'mask' else 'floating point'}",
                path=name,
                fix=fix,
            )
        full = (b, h, t, s)
        if len(array.shape) != 4 or any(
            have not in (1, want) for have, want in zip(array.shape, full, strict=True)
        ):
            what = f"{name} has shape {tuple(array.shape)}, and the logits are [batch, heads, q_length, kv_length] = {full}"
            dims = {
                2: f"; of one of [q_length, kv_length], {name}[None, None]",
                3: f"; of one of [batch, q_length, kv_length], {name}[:, None]",
            }
            raise AttentionError(
                what,
                path=name,
                fix=f"give it 4 dims, each full or 1{dims.get(len(array.shape), '')}",
            )
    if options.sinks is not None and tuple(options.sinks.shape) != (h,):
        raise AttentionError(
            f"sinks have shape {tuple(options.sinks.shape)}, not ({h},)",
            path="sinks",
            fix="give one logit per query head",
        )


def _check_integers(
    name: str,
    array: Any,
    shape: tuple[int, ...],
    *,
    low: int | None = None,
    high: int | None = None,
) -> None:
    if array is None:
        return
    if not hasattr(array, "shape") or not jnp.issubdtype(array.dtype, jnp.integer):
        kind = getattr(array, "dtype", type(array).__name__)
        raise AttentionError(
            f"{name} is {kind}, not integers", path=name, fix="pass an int32 array"
        )
    fits = (shape, (1, *shape[1:]), shape[1:]) if "positions" in name else (shape,)
    if tuple(array.shape) not in fits:
        what = f"{name} has shape {tuple(array.shape)}, not {' or '.join(str(fit) for fit in dict.fromkeys(fits))}"
        raise AttentionError(what, path=name, fix="give one integer per row")
    if (
        isinstance(array, np.ndarray)
        and low is not None
        and high is not None
        and (array.min() < low or array.max() > high)
    ):
        worst = array.min() if array.min() < low else array.max()
        raise AttentionError(
            f"{name} has {worst}, outside {low} to {high}",
            path=name,
            fix="count from 0; a negative key position hides its row",
        )


def _offset(options: Options, mask: Mask, mode: str, sizes: _Sizes) -> int | None:
    """Return where the first query stands if positions are the row numbers, else None: they are arrays."""
    given = options.positions is not None
    if (
        given
        and options.kv_positions is None
        and mode != MODE_DECODE
        and (mode != MODE_TRAIN or sizes.q_length != sizes.kv_length)
    ):
        what = f"in {mode_name(mode)}, positions of {sizes.q_length} queries say nothing of {sizes.kv_length} keys"
        raise AttentionError(
            what,
            path="positions",
            fix="pass kv_positions too; jnp.arange(kv_length) for a cache or a whole sequence",
        )
    if not given and options.kv_positions is not None and mask.rules.positional:
        raise AttentionError(
            "kv_positions without positions",
            path="kv_positions",
            fix="pass the positions of the queries too",
        )
    if given or options.kv_positions is not None:
        return None
    if mask.lengths is None or not mask.rules.positional:
        return sizes.kv_length - sizes.q_length
    if mode == MODE_DECODE:
        return None
    if sizes.q_length != sizes.kv_length:
        what = f"with lengths, where the {sizes.q_length} queries of {sizes.kv_length} keys stand is not clear in {mode_name(mode)}"
        raise AttentionError(what, path="lengths", fix="pass positions and kv_positions")
    return 0


def _positions(options: Options, mask: Mask, call: AttentionCall) -> tuple[jax.Array, jax.Array]:
    rows = default_positions(call.kv_length)
    kv = rows if options.kv_positions is None else _row(options.kv_positions)
    if options.positions is not None:
        q = _row(options.positions)
        return q, q if options.kv_positions is None and call.mode != MODE_DECODE else kv
    if call.q_offset is None and mask.lengths is not None and call.recipe.mask.positional:
        last = jnp.asarray(mask.lengths).astype(jnp.int32)[:, None]
        return last + default_positions(call.q_length, offset=-call.q_length), kv
    return default_positions(call.q_length, offset=call.kv_length - call.q_length), kv


def _row(positions: Any) -> jax.Array:
    array = jnp.asarray(positions).astype(jnp.int32)
    return array[None] if array.ndim == 1 else array


# Arithmetic.


def _recipe(options: Options, rules: MaskRules, sizes: _Sizes, platform: str) -> Recipe:
    scale = (
        1.0 / math.sqrt(sizes.head_dim)
        if options.scale is None
        else _number("scale", options.scale)
    )
    softcap = None if options.softcap is None else _number("softcap", options.softcap)
    if softcap is not None and softcap <= 0:
        raise AttentionError(
            f"softcap={softcap}", path="softcap", fix="pass a positive number, or None for no cap"
        )
    rate = 0.0 if options.dropout is None else _number("dropout", options.dropout)
    if not 0.0 <= rate < 1.0:
        raise AttentionError(
            f"dropout={rate}",
            path="dropout",
            fix="pass the probability of dropping a weight, from 0 to below 1",
        )
    if rate and options.dropout_key is None:
        raise AttentionError(
            f"dropout={rate} without a key",
            path="dropout_key",
            fix="pass dropout_key=, a JAX key or an integer seed",
        )
    return Recipe(
        mask=rules, scale=scale, softcap=softcap, dropout=rate, **_blocks(options, platform)
    )


def _blocks(options: Options, platform: str) -> dict[str, Any]:
    # On a CPU a block that stays in its caches, and leaves out more of a causal mask, takes half the time of a larger one
    # (benchmarks/attention.py).
    found = (
        {"q_block": 256, "kv_block": 512}
        if platform == "cpu"
        else {"q_block": 512, "kv_block": 1024}
    )
    said = {name: rows for name in found if (rows := getattr(options, name)) is not None}
    for name, rows in said.items():
        if rows < 1:
            raise AttentionError(f"{name}={rows}", path=name, fix="pass a number of rows")
    return found | said


def _check_dropout(recipe: Recipe, q: Any) -> None:
    """Refuse dropout where rows and heads have local numbers: every shard would drop the same weights."""
    manual = sorted(_jax.varying_axes(q)) if recipe.dropout and _jax.is_array(q) else []
    if manual:
        raise AttentionError(
            f"dropout inside a shard_map over {'+'.join(manual)}: which weights are dropped goes by global rows and heads",
            path="dropout",
            fix="call attention outside of that shard_map",
        )


def _number(name: str, value: Any) -> float:
    if (
        isinstance(value, (jax.Array, jax.core.Tracer))
        or not isinstance(value, (int, float, np.number))
        or not math.isfinite(value)
    ):
        raise AttentionError(
            f"{name}={value!r} is not a number",
            path=name,
            fix="pass a Python float: it is part of the program",
        )
    return float(value)
