"""Token embeddings: an indexed lookup in a table whose vocabulary may be sharded."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from shardwright import _jax
from shardwright.errors import LayerError
from shardwright.layers.dtypes import DTYPES, FLOAT32, Dtypes
from shardwright.layers.inputs import read_array
from shardwright.layers.placement import RESIDUAL, check_vocabulary, place, use
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.resolution.request import ShardingRequest
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.axes import BATCH, EMBED, EMPTY, QUERY_LENGTH, VOCAB, axis_label
from shardwright.vocabulary.read import read_value

TOKENS = (BATCH, QUERY_LENGTH)


def specs(vocab: int, embed: int, *, init: Any = None, dtypes: Dtypes = FLOAT32) -> ArraySpec:
    """Return the table, `[vocab, embed]`.

    Args:
      vocab: Number of tokens in the vocabulary.
      embed: Size of the residual.
      init: Initializer. Defaults to a normal distribution with the variance 1 / embed.
      dtypes: `param` is the dtype of the table.
    """
    if init is None:
        init = jax.nn.initializers.variance_scaling(1.0, "fan_out", "normal", in_axis=0, out_axis=1)
    return ArraySpec((vocab, embed), dtypes.param, (VOCAB, EMBED), init)


def apply(
    table: Any, tokens: Any, *, dtypes: Dtypes = FLOAT32, path: str | None = None
) -> jax.Array:
    """Return the embeddings of tokens, sharded as (BATCH, LENGTH, EMBED).

    Each shard of the vocabulary looks up its own tokens, and the results are summed over the
    shards. A matmul with one-hot rows is not used, because it would cost as much as the output
    projection. A token outside of `[0, vocab)`, such as padding of -1, gets zeros and has no
    gradient.

    Args:
      table: `[vocab, embed]`, as stored. A tied output projection uses the same leaf.
      tokens: `[batch, length]` integers.
      dtypes: The rows are looked up in the dtype `compute`, and returned in the dtype `output`.
      path: Path of the table in the model, required if the strategy has `[[tensors]]` entries.

    Raises:
      LayerError: The tokens are not integers, or one mesh axis shards both VOCAB and the tokens. Or
        a `shard_map` around the call has split VOCAB.
      RankMismatchError: The tokens are not `[batch, length]`, or the table is not `[vocab, embed]`.
      ShardingError: The rules of the ambient manager do not fit the arrays.
    """
    table = read_array("table", table, "[vocab, embed]")
    tokens = read_array("tokens", tokens, "[batch, length]", integers=True)
    read_value("dtypes", dtypes, DTYPES, error=LayerError)
    if tokens.dtype.itemsize < 4:
        tokens = tokens.astype(jnp.int32)  # as uint8, a table size of 256 would become 0
    vocab = table.shape[0]
    table = use(table, (VOCAB, EMBED), path=path).astype(dtypes.compute)
    check_vocabulary(table, (VOCAB, EMBED), tokens, name="table", path=path)
    manager: PartitionManager | None = context.current()
    if manager is None:
        rows = _lookup(table, tokens, ())
    else:
        rows = _on_shards(manager, vocab, tokens)(table, tokens)
    residual: jax.Array = place(rows.astype(dtypes.output), RESIDUAL)
    return residual


def _on_shards(manager: PartitionManager, vocab: int, tokens: Any) -> Any:
    """Return the lookup as a function that runs on shards."""
    names = manager.mesh_axes(VOCAB, vocab)
    manual = manager.manual_axes(_jax.ambient_mesh())
    request = ShardingRequest(TOKENS, tokens.shape, None, None, "tokens", manual)
    resolution = manager.answer(request)
    resolution.require()
    both = [axis for dim in resolution.decisions for axis in dim.mesh_axes if axis in names]
    if both:
        raise LayerError(
            f"{both[0]} shards both VOCAB and the tokens, so a device with a part of the table has "
            "only a part of the tokens",
            path="tokens",
            fix=f"give VOCAB or {' and '.join(map(axis_label, TOKENS))} a rule without {both[0]}",
        )
    # Use a `shard_map`: JAX refuses an index into a dim that Explicit axes shard.
    return manager.remember(
        ("embedding", names),
        lambda: manager.shard_map(
            functools.partial(_lookup, names=names),
            in_axes=((VOCAB, EMPTY), TOKENS),
            out_axes=(*TOKENS, EMPTY),
        ),
    )


def _lookup(table: Any, tokens: Any, names: tuple[str, ...]) -> Any:
    """Look up tokens in one shard of the table. `names` are the mesh axes that shard VOCAB."""
    rows = table.shape[0]
    # The shards of the vocabulary follow each other in the order of `names`. The first name is the
    # major axis.
    local = tokens - jax.lax.axis_index(names) * rows if names else tokens
    is_here = (local >= 0) & (local < rows)
    # Tokens of other shards read row 0, so all indices are in bounds. The select below sets their
    # results to 0, so their gradients are 0 too.
    found = table.at[jnp.where(is_here, local, 0)].get(mode="promise_in_bounds")
    found = jnp.where(is_here[..., None], found, jnp.zeros((), found.dtype))
    # One shard has the row of a token and the other shards add 0, so the sum is exact in every
    # dtype.
    return jax.lax.psum(found, names) if names else found
