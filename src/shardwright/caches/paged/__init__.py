"""The paged KV cache: one pool of pages, and a table of page numbers per sequence."""

from shardwright.caches.paged.cache import PagedCache as PagedCache
