"""Attention: one public call, many implementations, each correct under every sharding that it claims.

How to add an implementation, in a module of its own here and one line in the tuple of modules in `choose.py`:

1. Subclass `registry.AttentionImpl` under `@AttentionRegistry.register`: `get_impl_name`, `supports(call)`, and
   `forward_native(operands, call)` (or `forward_tpu`, `forward_gpu`), all classmethods.
2. `supports` gets an `AttentionCall`: sizes, mode, mask rules, specs, mesh, platform, no arrays. It returns reasons, one line
   each, and traces nothing. What it does not refuse must equal attention in float64, values and gradients:
   `shardwright.testing.AttentionConformance`. Calls with quantised keys are refused for it, unless it says
   `takes_scales = True` and multiplies by `k_scale` and `v_scale`.
3. A forward gets `Operands`: global BTHD arrays in one pytree, with positions always there. It returns a `Result`.
4. Build on `extend`. Its `run_on_shards(kernel, operands, call)` is the one `shard_map`: `kernel` gets local `Operands`,
   whose k and v already hold the heads that the local query heads read. `call.specs` says over which mesh axes each dim lies.
   A kernel that JAX cannot look into, as of Pallas, goes to `run_opaque`.
5. A kernel is made of pure local functions: `forward` adds a set of keys to a running state (`Running`: float32 o, m, l),
   `merge`, `finish` with the sinks, or `add_sinks` on exactly one shard; backward: `delta` once, `backward` per set of keys,
   `sinks_gradient` once. Masks, windows, segments and dropout go by global positions, so a shard of keys is
   `operands.replace(k=…, v=…, kv_positions=…, kv_segment_ids=…)` and nothing else (dense masks and biases are sliced by
   the kernel).
6. A `custom_vjp` inside `shard_map` takes operands that all vary alike: `_jax.vary_together(operands)` before it, whose
   transpose is the sum over shards that replicated operands need. No `psum` in a backward pass for that, with `check_vma`
   or without. A scan's carry comes from `start` or `zeros_like`.
"""

from __future__ import annotations

from shardwright.attention.api import dot_product_attention as dot_product_attention
from shardwright.attention.api import explain as explain
from shardwright.attention.cached import CachedAttention as CachedAttention
from shardwright.attention.cached import append_and_attend as append_and_attend
from shardwright.attention.cached import next_positions as next_positions
from shardwright.attention.call import AttentionCall as AttentionCall
from shardwright.attention.call import JointSpecs as JointSpecs
from shardwright.attention.call import KVHeads as KVHeads
from shardwright.attention.call import Operands as Operands
from shardwright.attention.choose import Choice as Choice
from shardwright.attention.masks import Mask as Mask
from shardwright.attention.metadata import AttentionMetadata as AttentionMetadata
from shardwright.attention.metadata import AttentionOutput as AttentionOutput
from shardwright.attention.metadata import AttentionSpecs as AttentionSpecs
from shardwright.attention.paged import paged_attention as paged_attention
from shardwright.attention.registry import AttentionImpl as AttentionImpl
from shardwright.attention.registry import AttentionRegistry as AttentionRegistry
from shardwright.attention.registry import Result as Result
