"""Attention: one call, many implementations, each correct under every sharding that it accepts.

This package holds the call, the implementations, their masks, and attention to caches. `api` has
the public call, `inputs` reads its arguments, `choose` picks an implementation, `run` runs it;
`kernels` has one file per implementation, and `parts` has what the implementations share.
`implementation` says how to add an implementation. Caches themselves belong in `caches`, rotary
embeddings and modules in `layers`, and functions with the names of other libraries in `interop`.
"""

from shardwright.attention.api import dot_product_attention as dot_product_attention
from shardwright.attention.api import explain as explain
from shardwright.attention.cached import CachedAttention as CachedAttention
from shardwright.attention.cached import append_and_attend as append_and_attend
from shardwright.attention.cached import next_positions as next_positions
from shardwright.attention.call import AttentionCall as AttentionCall
from shardwright.attention.call import JointSpecs as JointSpecs
from shardwright.attention.call import KVHeads as KVHeads
from shardwright.attention.call import Operands as Operands
from shardwright.attention.call import Result as Result
from shardwright.attention.choose import Choice as Choice
from shardwright.attention.implementation import Implementation as Implementation
from shardwright.attention.implementation import register as register
from shardwright.attention.masks import Mask as Mask
from shardwright.attention.paged import paged_attention as paged_attention
