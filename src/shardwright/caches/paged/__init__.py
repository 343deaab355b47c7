"""The paged KV cache: one pool of pages, and a table per sequence that says which are its own."""

from shardwright.caches.paged.cache import PagedCache as PagedCache
