"""Read a public call: what the caller passes becomes an `AttentionCall` and its `Operands`.

Every ambiguity is decided here once, and every mistake is an error before anything is traced. The
checks of shapes and dtypes are in `checks`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.attention import checks, masks
from shardwright.attention.call import (
    Arithmetic,
    AttentionCall,
    DimOrder,
    JointSpecs,
    Operands,
    Options,
    default_positions,
)
from shardwright.attention.checks import CallSizes
from shardwright.attention.masks import Mask, MaskRules
from shardwright.attention.sharding import resolve_joint, split_axes
from shardwright.errors import AttentionError, NoManagerError, did_you_mean
from shardwright.manager import context
from shardwright.manager.context import platform_of
from shardwright.manager.manager import PartitionManager
from shardwright.vocabulary.integers import as_integer
from shardwright.vocabulary.keys import as_key
from shardwright.vocabulary.modes import MODE_DECODE, MODE_INSERT, MODE_TRAIN, mode_name, parse_mode
from shardwright.vocabulary.read import RATE, integer, number, read_value

# Numbers of queries and keys in a block. On a CPU, small blocks take half the time of larger ones:
# they fit the CPU's caches, and more blocks of a causal mask are skipped (benchmarks/attention.py).
# Blocks of 512 keys make a decode step take 1.2 times as long on JAX 0.12 (benchmarks/serving.py).
_CPU_BLOCKS = {"q_block": 256, "kv_block": 256}
_BLOCKS = {"q_block": 512, "kv_block": 1024}
_COMPILED = "pass a Python number: the value is compiled into the program"
_NUMBERS = {
    "scale": number(fix=_COMPILED),
    "softcap": number("positive", fix=f"{_COMPILED}; pass None for no cap"),
    "dropout": RATE,
    "q_block": integer(fix="pass the number of rows per block"),
    "kv_block": integer(fix="pass the number of rows per block"),
}


class Defaults(Protocol):
    """Values for keywords that a call leaves out, passed as `metadata`."""

    def options(self, given: Mapping[str, Any]) -> Options:
        """Return the options of a call: the given keywords, and defaults for the other options."""


def read_options(keywords: Mapping[str, Any], defaults: Defaults | None = None) -> Options:
    """Return options from keywords.

    Raises:
      AttentionError: A keyword is unknown.
    """
    if defaults is not None:
        return defaults.options(keywords)
    known = Options.__dataclass_fields__
    for name in keywords:
        if name not in known:
            raise AttentionError(
                f"unknown option {name!r}",
                fix=did_you_mean(name, known) or f"options are {', '.join(sorted(known))}",
            )
    return Options(**keywords)


def read(q: Any, k: Any, v: Any, options: Options) -> tuple[Operands, AttentionCall]:
    """Return the operands and the call that describes them.

    Args:
      q: As for `dot_product_attention`.
      k: As for `dot_product_attention`.
      v: As for `dot_product_attention`.
      options: The keywords.

    Raises:
      AttentionError: The arguments do not fit each other; see `dot_product_attention`.
      NoManagerError: No manager is entered or passed, and the call has no mode.
      ShardingError: The rules of the manager do not fit the arrays.
    """
    call, mask = _read_call(q, k, v, options, None)
    return _operands(q, k, v, options, call, mask), call


def describe(
    q: Any, k: Any, v: Any, options: Options, *, specs: JointSpecs | None = None
) -> AttentionCall:
    """Return the call without its operands. The arrays may be `jax.ShapeDtypeStruct`s.

    Args:
      q: As for `dot_product_attention`.
      k: As for `dot_product_attention`.
      v: As for `dot_product_attention`.
      options: The keywords.
      specs: The sharding of the arrays. Defaults to what the manager's rules resolve to.

    Raises:
      AttentionError: The arguments do not fit each other; see `dot_product_attention`.
      NoManagerError: No manager is entered or passed, and the call has no mode.
      ShardingError: The rules of the manager do not fit the arrays.
    """
    return _read_call(q, k, v, options, specs)[0]


def manager_of(options: Options) -> PartitionManager | None:
    """Return the manager of a call, or None."""
    manager: PartitionManager | None = options.manager or context.current()
    return manager


def _read_call(
    q: Any, k: Any, v: Any, options: Options, specs: JointSpecs | None
) -> tuple[AttentionCall, Mask]:
    sizes = checks.read_sizes(q, k, v, options.layout, cast=options.dtype is not None)
    checks.check_scales(k, v, options, sizes)
    manager = manager_of(options)
    mode = _read_mode(options.mode, manager)
    mask = _read_mask(options, sizes)
    checks.check_arrays(options, mask, sizes)
    quantized = str(k.dtype) in checks.QUANTIZED
    platform = options.platform or platform_of(None if manager is None else manager.mesh)
    if platform not in ("cpu", "gpu", "tpu"):
        fix = 'pass "cpu", "gpu" or "tpu"'
        raise AttentionError(f"unknown platform {platform!r}", path="platform", fix=fix)
    cached = platform == "tpu" and (mode == MODE_DECODE or quantized)
    recipe = _read_recipe(options, mask, sizes, platform, cached)
    if recipe.dropout:
        split = split_axes(manager, sizes.q, mode)
        checks.check_dropout(q, options.dropout_key, split)
    if specs is None and manager is not None:
        specs = resolve_joint(manager, q=sizes.q, k=sizes.k, v=sizes.v, mode=mode)
    specs = specs or JointSpecs()
    for axes in (specs.q_length, specs.kv_length) if options.sequence_axis is not None else ():
        if axes not in ((), (options.sequence_axis,)):
            over = "+".join(axes)
            raise AttentionError(
                f"a length is sharded over {over}, not over {options.sequence_axis}",
                path="sequence_axis_name",
                fix=f"pass {over}, or change the rules of query_length and kv_length",
            )
    call = AttentionCall(
        batch=sizes.batch,
        q_length=sizes.q_length,
        kv_length=sizes.kv_length,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        v_dim=sizes.v_dim,
        dtype=checks.read_dtype(q if options.dtype is None else options.dtype),
        kv_dtype=str(k.dtype) if quantized else None,
        mode=mode,
        recipe=recipe,
        layout=DimOrder(options.layout),
        q_offset=_read_offset(options, mask, mode, sizes),
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


def _operands(
    q: Any, k: Any, v: Any, options: Options, call: AttentionCall, mask: Mask
) -> Operands:
    kv_dtype = call.kv_dtype or call.dtype
    arrays = {
        "q": jnp.asarray(q, call.dtype),
        "k": jnp.asarray(k, kv_dtype),
        "v": jnp.asarray(v, kv_dtype),
        "k_scale": options.k_scale,
        "v_scale": options.v_scale,
    }
    if call.layout is DimOrder.BHTD:
        for name, array in arrays.items():
            arrays[name] = None if array is None else jnp.swapaxes(jnp.asarray(array), 1, 2)
    q_positions, kv_positions = _positions(options, mask, call)
    others = {
        "k_scale": arrays["k_scale"],
        "v_scale": arrays["v_scale"],
        "mask": mask.dense,
        "bias": options.bias,
        "sinks": options.sinks,
    }
    integers = {
        "q_segment_ids": mask.q_segment_ids,
        "kv_segment_ids": mask.kv_segment_ids,
        "lengths": mask.lengths,
    }
    if call.recipe.dropout:
        others["seed"] = _seed(options.dropout_key)
        # Use global indices of batch rows and heads, so that the devices of a mesh drop the same
        # weights as one device.
        integers["batch_index"] = jnp.arange(call.batch)
        integers["head_index"] = jnp.arange(call.heads)
    return Operands(
        q=arrays["q"],
        k=arrays["k"],
        v=arrays["v"],
        q_positions=q_positions,
        kv_positions=kv_positions,
        **{name: jnp.asarray(x) for name, x in others.items() if x is not None},
        **{name: jnp.asarray(x, jnp.int32) for name, x in integers.items() if x is not None},
    )


def _seed(value: Any) -> jax.Array:
    """Return a uint32 seed from a JAX key or from an integer.

    Raises:
      AttentionError: The value is neither one key nor one integer.
    """
    if (key := as_key(value)) is not None:
        return jax.random.bits(key, (), jnp.uint32)
    integer = as_integer(value)
    seed = value if integer is None else np.uint32(integer % 2**32)
    dtype, shape = getattr(seed, "dtype", None), getattr(seed, "shape", None)
    if shape != () or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        what = type(value).__name__ if dtype is None else f"an array of {dtype}, shape {shape}"
        raise AttentionError(
            f"dropout_key is {what}, not one key or one integer",
            path="dropout_key",
            fix="pass jax.random.key(0), or an integer; under vmap, one key per example",
        )
    return jnp.asarray(seed).astype(jnp.uint32)


def _read_mode(mode: str | None, manager: PartitionManager | None) -> str:
    if mode is None and manager is not None:
        mode = manager.mode
    if mode is None:
        # A call with a mode needs no manager: without a manager, nothing is sharded.
        error = NoManagerError if manager is None else AttentionError
        raise error(
            "attention needs the mode of a PartitionManager, or mode=",
            fix='enter a manager that has one, with pm.for_mode("train"): ..., or pass '
            'mode="train"; without a manager, nothing is sharded',
        )
    parsed = parse_mode(mode)
    if parsed == MODE_INSERT:
        raise AttentionError(
            "mode insert moves rows of a cache and does not attend",
            fix='pass mode="decode" or "prefill"',
        )
    return parsed


# Masks and positions.


def _read_mask(options: Options, sizes: CallSizes) -> Mask:
    """Return the mask of a call: rules, segment ids, lengths and the dense mask."""
    rules = MaskRules(causal=options.causal, window=options.window, chunk=options.chunk)
    mask = Mask(rules=rules)
    if options.segment_ids is not None:
        if options.kv_segment_ids is None and sizes.q_length != sizes.kv_length:
            raise AttentionError(
                f"segment_ids cover {sizes.q_length} queries, and there are {sizes.kv_length} keys",
                path="segment_ids",
                fix="pass kv_segment_ids too",
            )
        mask = mask & masks.segments(options.segment_ids, options.kv_segment_ids)
    elif options.kv_segment_ids is not None:
        raise AttentionError(
            "kv_segment_ids without segment_ids", path="kv_segment_ids", fix="pass both"
        )
    if options.lengths is not None:
        mask = mask & masks.lengths(options.lengths)
    if options.mask is None:
        return mask
    return mask & (options.mask if isinstance(options.mask, Mask) else masks.dense(options.mask))


def _read_offset(options: Options, mask: Mask, mode: str, sizes: CallSizes) -> int | None:
    """Return `AttentionCall.q_offset`: the position of the first query, or None."""
    if options.positions is not None:
        same = mode == MODE_TRAIN and sizes.q_length == sizes.kv_length
        if options.kv_positions is None and mode != MODE_DECODE and not same:
            raise AttentionError(
                f"in {mode_name(mode)}, positions of {sizes.q_length} queries "
                f"do not determine those of {sizes.kv_length} keys",
                path="positions",
                fix="pass kv_positions too: jnp.arange(kv_length) for a cache or a whole sequence",
            )
        return None
    if options.kv_positions is not None:
        if mask.rules.positional:
            raise AttentionError(
                "kv_positions without positions",
                path="kv_positions",
                fix="pass the positions of the queries too",
            )
        return None
    # Without positions, the last query is at the position of the last key, as in decode.
    if mask.lengths is None or not mask.rules.positional:
        return sizes.kv_length - sizes.q_length
    # In decode with lengths, the last query is at the last key of its own sequence: `_positions`
    # counts back from the lengths.
    if mode == MODE_DECODE:
        return None
    if sizes.q_length != sizes.kv_length:
        raise AttentionError(
            f"with lengths, the positions of {sizes.q_length} queries among "
            f"{sizes.kv_length} keys are ambiguous in {mode_name(mode)}",
            path="lengths",
            fix="pass positions and kv_positions",
        )
    return 0


def _positions(options: Options, mask: Mask, call: AttentionCall) -> tuple[jax.Array, jax.Array]:
    """Return the positions of queries and keys, `[batch or 1, length]` each."""
    if options.kv_positions is None:
        kv = default_positions(call.kv_length)
    else:
        kv = _rows(options.kv_positions)
    if options.positions is not None:
        q = _rows(options.positions)
        return q, q if options.kv_positions is None and call.mode != MODE_DECODE else kv
    if call.q_offset is None and mask.lengths is not None and call.recipe.mask.positional:
        ends = jnp.asarray(mask.lengths).astype(jnp.int32)[:, None]
        return ends + default_positions(call.q_length, offset=-call.q_length), kv
    return default_positions(call.q_length, offset=call.kv_length - call.q_length), kv


def _rows(positions: Any) -> jax.Array:
    array = jnp.asarray(positions, jnp.int32)
    return array[None] if array.ndim == 1 else array


# Arithmetic.


def _read_recipe(
    options: Options, mask: Mask, sizes: CallSizes, platform: str, cached: bool
) -> Arithmetic:
    read: dict[str, Any] = {}
    for name, kind in _NUMBERS.items():
        if (value := getattr(options, name)) is not None:
            read[name] = read_value(name, value, kind, error=AttentionError)
    dropout = float(read.get("dropout", 0.0))
    if dropout and options.dropout_key is None:
        raise AttentionError(
            f"dropout={dropout} without a key",
            path="dropout_key",
            fix="pass dropout_key=, a JAX key or an integer seed",
        )
    softcap = read.get("softcap")
    blocks = _CPU_BLOCKS if platform == "cpu" else _BLOCKS
    # If the call has positions or lengths, k and v may be a cache. The unused rows of a cache hold
    # data of an earlier sequence.
    explicit = options.positions is not None or options.kv_positions is not None
    return Arithmetic(
        mask=mask.rules,
        scale=float(read.get("scale", 1.0 / math.sqrt(sizes.head_dim))),
        softcap=None if softcap is None else float(softcap),
        dropout=dropout,
        cached=DimOrder(options.layout) if cached else None,
        partly_filled=explicit or mask.lengths is not None,
        q_block=read.get("q_block", blocks["q_block"]),
        kv_block=read.get("kv_block", blocks["kv_block"]),
    )
