"""The kinds of caches. A new kind is declared here and nowhere else.

`init` creates a cache by the name of its kind, and `restore` finds the class of a saved cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

from shardwright.caches import dense, quantized
from shardwright.caches.base import KVCache
from shardwright.caches.dense import DenseCache
from shardwright.caches.paged import cache as paged
from shardwright.caches.paged.cache import PagedCache
from shardwright.caches.quantized import QuantizedCache
from shardwright.caches.spec import Overflow


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheKind:
    """A kind of cache.

    Attributes:
      cache: Its class.
      make: Function that returns an empty cache. Its arguments are the spec of the cache and, as
        keywords, the options of the kind.
      overflow: What happens by default to tokens that do not fit.
    """

    cache: type[KVCache]
    make: Callable[..., KVCache]
    overflow: Overflow = Overflow.REPORT


KINDS: Mapping[str, CacheKind] = MappingProxyType(
    {
        "dense": CacheKind(cache=DenseCache, make=dense.make),
        "sliding": CacheKind(cache=DenseCache, make=dense.make_sliding, overflow=Overflow.RING),
        "quantized": CacheKind(cache=QuantizedCache, make=quantized.make),
        "paged": CacheKind(cache=PagedCache, make=paged.make),
    }
)
