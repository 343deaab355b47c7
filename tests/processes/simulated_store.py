"""A coordination store in memory, which counts the messages and bytes of its clients."""

from __future__ import annotations

import threading

import jax

from shardwright import _jax


class SimulatedStore:
    """What `jax.distributed` does with keys and values, for the clients of one process.

    Attributes:
      messages: Number of messages of each rank.
      bytes: Bytes of keys and values that went through the process that has the store.
      values: The values by key.
    """

    def __init__(self) -> None:
        self.messages: dict[int, int] = {}
        self.bytes = 0
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.events: dict[str, threading.Event] = {}

    def of(self, rank: int) -> _jax.CoordinationStore:
        """Return the store as one process sees it."""
        return _jax.CoordinationStore(_Client(self, rank), rank)

    def reset(self) -> None:
        """Count from 0."""
        self.messages, self.bytes = {}, 0

    def event(self, key: str) -> threading.Event:
        """Return the event of a key that is set. One event per key: setting wakes few threads."""
        return self.events.setdefault(key, threading.Event())


class _Client:
    def __init__(self, store: SimulatedStore, rank: int) -> None:
        self.store, self.rank = store, rank

    def _count(self, size: int) -> None:
        self.store.messages[self.rank] = self.store.messages.get(self.rank, 0) + 1
        self.store.bytes += size

    def key_value_set_bytes(self, key: str, value: bytes, *, allow_overwrite: bool) -> None:
        assert allow_overwrite
        with self.store.lock:
            self._count(len(key) + len(value))
            self.store.values[key] = value
            self.store.event(key).set()

    def blocking_key_value_get_bytes(self, key: str, milliseconds: int) -> bytes:
        with self.store.lock:
            self._count(len(key))
            event = self.store.event(key)
        if not event.wait(milliseconds / 1e3):
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        with self.store.lock:
            value = self.store.values[key]
            self.store.bytes += len(value)
            return value

    def key_value_dir_get_bytes(self, folder: str) -> list[tuple[str, bytes]]:
        with self.store.lock:
            found = [pair for pair in self.store.values.items() if pair[0].startswith(folder)]
            self._count(len(folder) + sum(len(key) + len(value) for key, value in found))
            return found

    def key_value_increment(self, key: str, by: int) -> int:
        with self.store.lock:
            self._count(len(key) + 8)
            assert abs(int(self.store.values.get(key, b"0"))) < 2**31, "as JAX reads it"
            value = int(self.store.values.get(key, b"0")) + by
            self.store.values[key] = str(value).encode()
            return value

    def key_value_delete(self, key: str) -> None:
        with self.store.lock:
            self._count(len(key))
            for name in [*self.store.values]:
                if name == key or name.startswith(f"{key}/"):
                    del self.store.values[name]
                    self.store.events.pop(name, None)
