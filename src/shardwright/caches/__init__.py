"""KV caches: frozen pytrees, sharded by the manager, that attention reads and appends to.

Classes that store keys and values between calls of attention belong here, and so do the functions
that create, write, reshard and save these caches. Attention to a cache is in `attention`. The
assignment of slots to requests is in `serving`.
"""

from shardwright.caches.base import KVCache as KVCache
from shardwright.caches.base import View as View
from shardwright.caches.change import Change as Change
from shardwright.caches.checkpoint import restore as restore
from shardwright.caches.checkpoint import save as save
from shardwright.caches.create import init as init
from shardwright.caches.dense import DenseCache as DenseCache
from shardwright.caches.paged.cache import PagedCache as PagedCache
from shardwright.caches.quantized import QuantizedCache as QuantizedCache
from shardwright.caches.quantized import QuantizedRows as QuantizedRows
from shardwright.caches.quantized import quantize as quantize
from shardwright.caches.refusals import Refusal as Refusal
from shardwright.caches.relayout import Relayout as Relayout
from shardwright.caches.relayout import plan_reshard as plan_reshard
from shardwright.caches.relayout import reshard as reshard
from shardwright.caches.spec import CacheSpec as CacheSpec
from shardwright.caches.spec import Overflow as Overflow
from shardwright.caches.spec import RowOrder as RowOrder
