"""Relative position biases of T5: a learned bias per head and bucket of distances."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.errors import LayerError, RankMismatchError
from shardwright.layers.dtypes import FLOAT32, Dtypes
from shardwright.layers.inputs import SIZE
from shardwright.layers.placement import is_shard, place
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.axes import BIAS_HEAD_SEQ, BIAS_KV_SEQ, EMPTY, HEAD, QUERY_LENGTH, Role
from shardwright.vocabulary.read import read_fields


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RelativeBiasConfig:
    """Buckets of distances (Raffel et al., arXiv:1910.10683).

    Attributes:
      heads: Heads of queries.
      buckets: Number of buckets. In one half of the buckets of a direction, each bucket has one
        distance. In the other half, each bucket has a range of distances, whose bounds are spaced
        logarithmically.
      max_distance: From this distance on, all keys are in the last bucket.
      bidirectional: Whether the second half of the buckets is for keys after the query. Otherwise
        all these keys are in bucket 0.

    Raises:
      LayerError: A value is not valid, or there are too few buckets.
    """

    heads: Annotated[int, SIZE]
    buckets: Annotated[int, SIZE] = 32
    max_distance: Annotated[int, SIZE] = 128
    bidirectional: bool = False

    def __post_init__(self) -> None:
        read_fields(self, error=LayerError)
        exact = self.buckets // (4 if self.bidirectional else 2)
        if not exact or self.max_distance <= exact:
            raise LayerError(
                f"buckets={self.buckets} does not fit max_distance={self.max_distance}: "
                f"{exact} buckets of a direction hold one distance each",
                fix=f"pass at least 4 buckets, and a max_distance above {exact}",
            )


def specs(config: RelativeBiasConfig, *, init: Any = None, dtypes: Dtypes = FLOAT32) -> ArraySpec:
    """Return the table, `[heads, buckets]`.

    Args:
      config: Sizes.
      init: Initializer. Defaults to a uniform distribution with the variance of 2 / (heads +
        buckets).
      dtypes: `param` is the dtype of the table.
    """
    if init is None:
        init = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
    return ArraySpec((config.heads, config.buckets), dtypes.param, (HEAD, EMPTY), init)


def apply(
    config: RelativeBiasConfig,
    table: Any,
    *,
    q_length: int,
    kv_length: int,
    q_start: int = 0,
    dtype: Any = None,
) -> jax.Array:
    """Return the bias `[1, heads, q_length, kv_length]` that attention adds to its logits.

    Args:
      config: Sizes.
      table: `[heads, buckets]`, already gathered. Inside a `shard_map`, a shard of the heads.
      q_length: Number of queries.
      kv_length: Number of keys, at the positions from 0 on.
      q_start: Position of the first query. For a decoded token, this is the number of tokens
        already in the cache.
      dtype: Dtype of the bias. Defaults to that of the table.

    Raises:
      RankMismatchError: The table has another shape.
    """
    heads, buckets = (*np.shape(table), 0, 0)[:2] if np.ndim(table) == 2 else (0, 0)
    fits = heads == config.heads or (
        # A shard of the heads fits too: the bias of a head does not need other heads.
        heads
        and not config.heads % heads
        and is_shard((heads, buckets), (HEAD, EMPTY), role=Role.USE)
    )
    if not fits or buckets != config.buckets:
        raise RankMismatchError(
            f"the table has shape {np.shape(table)}",
            path="table",
            fix=f"pass shape {(config.heads, config.buckets)}, [heads, buckets]",
        )
    # Lengths are Python integers, so the buckets are constants of the program.
    queries, positions = np.arange(q_length) + q_start, np.arange(kv_length)
    chosen = bucket(config, positions[None] - queries[:, None])
    bias = jnp.asarray(table)[:, chosen][None]
    axes = (EMPTY, BIAS_HEAD_SEQ, QUERY_LENGTH, BIAS_KV_SEQ)
    placed: jax.Array = place(bias if dtype is None else bias.astype(dtype), axes)
    return placed


def bucket(config: RelativeBiasConfig, distance: Any) -> np.ndarray:
    """Return the bucket of each distance, computed by NumPy while tracing.

    With n buckets for a direction, a distance d < n/2 is in bucket d, and a larger distance in
    `n/2 + floor(log(d / (n/2)) / log(max_distance / (n/2)) * n/2)`, at most n - 1.

    Args:
      config: Sizes.
      distance: Integers, position of the key minus that of the query.
    """
    count, before = config.buckets, -np.asarray(distance)
    start = np.zeros_like(before)
    if config.bidirectional:
        count //= 2
        # The second half of the buckets is for keys after the query.
        start = np.where(before < 0, count, 0)
        before = np.abs(before)
    before = np.maximum(before, 0)
    exact = count // 2
    # Use float32, as T5 does: a distance on the border of two buckets then gets the bucket of T5.
    # Epsilon keeps the logarithm of distance 0 finite. Below, `before < exact` selects another
    # bucket for distance 0.
    share = np.log(before.astype(np.float32) / exact + np.finfo(np.float32).eps)
    steps = share / np.log(config.max_distance / exact) * (count - exact)
    far = np.minimum(exact + steps.astype(np.int32), count - 1)
    buckets: np.ndarray = start + np.where(before < exact, before, far)
    return buckets
