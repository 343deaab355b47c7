"""Parts for an implementation of your own; see `attention.implementation` for the steps.

- `lengths_are_whole` and `no_weights` return reasons for `supports`.
- `run_on_shards(kernel, operands, call)` calls `shard_map`. `run_opaque` does so for a kernel that
  JAX cannot look into, such as a Pallas kernel.
- A running softmax, float32: `start`, `forward` (adds a set of keys), `merge` (joins two states),
  `add_sinks`, `finish`.
- The gradients: call `delta` once, `backward` for each set of keys, and `sinks_gradient` once.
- `without_remains(shard, call.recipe)` sets `v` to zero in rows that hold no key. Rows left in a
  cache by an earlier sequence may be NaN, and 0 times NaN is not 0. `forward` itself calls
  `without_remains`.
- `visible(shard, call.recipe.mask)` returns which pairs of query and key attend, and the bias to
  add. A bias of at most -2e38 hides the key from the query.
"""

from __future__ import annotations

from shardwright.attention.kernels.blockwise import backward, delta, forward, sinks_gradient
from shardwright.attention.parts.online_softmax import (
    Running,
    add_sinks,
    finish,
    merge,
    start,
    visible,
    without_remains,
)
from shardwright.attention.parts.shards import (
    lengths_are_whole,
    no_weights,
    run_on_shards,
    run_opaque,
)

__all__ = [
    "Running",
    "add_sinks",
    "backward",
    "delta",
    "finish",
    "forward",
    "lengths_are_whole",
    "merge",
    "no_weights",
    "run_on_shards",
    "run_opaque",
    "sinks_gradient",
    "start",
    "visible",
    "without_remains",
]
