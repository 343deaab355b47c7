"""What an implementation of your own is built of; the package's docstring says how.

- refusals: `lengths_are_whole`, `no_weights`, each a tuple of reasons for `supports`;
- `run_on_shards(kernel, operands, call)`: the one `shard_map`; `run_opaque`, for a kernel that JAX cannot look into;
- a running softmax, float32: `start`, `forward` (adds a set of keys), `merge` (joins two), `add_sinks`, `finish`;
- `without_remains(shard, call.recipe)`: values as zeros where there is no key. What an earlier sequence left in a cache may be
  NaN, and 0 times NaN is not 0; `forward` does it by itself;
- `visible(shard, call.recipe.mask)`: which pairs attend, and the bias to add. A bias of at most -2e38 hides its pair;
- its gradients: `delta` once, `backward` per set of keys, `sinks_gradient` once.
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
from shardwright.attention.parts.pallas_shards import run_opaque
from shardwright.attention.parts.shards import lengths_are_whole, no_weights, run_on_shards

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
