"""Splash: sparse flash attention for TPUs, by Pallas kernels on every shard of batch and heads.

Memory is linear in length, blocks in which no query sees a key are skipped, and scores are scaled
in float32. Each device must hold whole sequences. On a CPU the kernels are interpreted: correct but
slow, for tests. The kernels take multiples of 128 rows, and operands ordered by head. Operands of
other lengths are padded, which copies them.
"""

from __future__ import annotations

from shardwright.attention.call import AttentionCall, Operands, Result
from shardwright.attention.kernels.splash_tiles import block_rows, whole_lanes
from shardwright.attention.parts.shards import (
    inside_shard_map,
    lengths_are_whole,
    no_weights,
    run_opaque,
)

# The largest number of entries in the table of blocks. An entry takes 4 bytes of the scalar memory,
# which has 1 MiB.
_MOST_BLOCKS = 2**17


def supports(call: AttentionCall) -> tuple[str, ...]:
    """Return why a call cannot be served: a GPU, split sequences, or unsupported arguments."""
    return (*lengths_are_whole(call), *no_weights(call), *not_in_splash(call))


def run(operands: Operands, call: AttentionCall) -> Result:
    """Attend on every shard of batch and heads. Outside of TPUs the kernels are interpreted."""
    from shardwright.attention.kernels import splash_blocks

    first_rows = None if call.q_offset is None else (call.q_offset,)
    splash = splash_blocks.SplashBlocks(interpret=call.platform != "tpu", first_rows=first_rows)

    def kernel(shard: Operands) -> Result:
        o, lse, _ = splash.attend(shard, call.recipe)
        return Result(o=o, lse=lse)

    return run_opaque(kernel, operands, call)


def not_in_splash(call: AttentionCall, *, q_shards: int = 1, kv_shards: int = 1) -> tuple[str, ...]:
    """Return why the kernels cannot serve a call.

    Args:
      call: The call.
      q_shards: Number of shards of the queries' length. The kernels see one shard.
      kv_shards: As `q_shards`, for the keys.
    """
    recipe, blocks = call.recipe, _blocks(call, q_shards, kv_shards)
    too_many = f"{blocks} entries, more than {_MOST_BLOCKS}"
    reasons = {
        "its kernel is for TPUs, and the platform is gpu": call.platform == "gpu",
        "it takes no dense mask": call.mask_shape is not None,
        "it takes no bias": call.bias_shape is not None,
        f"it has no dropout, and dropout is {recipe.dropout}": bool(recipe.dropout),
        "TPUs do not compute in float16": call.dtype == "float16",
        f"its table of blocks would have {too_many}": blocks > _MOST_BLOCKS,
    }
    return (*(reason for reason, holds in reasons.items() if holds), *inside_shard_map(call))


def _blocks(call: AttentionCall, q_shards: int, kv_shards: int) -> int:
    """Return an upper bound of the entries of one device's table: pairs of query and key blocks.

    The table has entries for each sequence if positions or segments may differ by sequence.
    """
    specs, recipe = call.specs, call.recipe
    sequences = call.batch // call.shards(specs.batch)
    count = sequences if call.segments or call.lengths or call.q_offset is None else 1
    lengths = call.q_length // q_shards, call.kv_length // kv_shards
    for length, block in zip(lengths, (recipe.q_block, recipe.kv_block), strict=True):
        rows = whole_lanes(length)
        count *= rows // block_rows(block, rows)
    return count
