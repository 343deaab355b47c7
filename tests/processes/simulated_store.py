"""A coordination store in memory, which counts the messages and bytes of its clients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import jax

from shardwright import _jax

# Seconds of the machine, after which a thread counts as one that never ends.
_HANGS_S: Final = 300.0


class SimulatedStore:
    """What `jax.distributed` does with keys and values, for the clients of one process.

    Its time is simulated: it passes only while all threads of `together` wait, and then at once to
    the end of the shortest wait. So a thread that the machine delays is never late.

    Attributes:
      messages: Number of messages of each rank.
      bytes: Bytes of keys and values that went through the process that has the store.
      values: The values by key.
      now: Seconds of the simulated time.
    """

    def __init__(self) -> None:
        self.messages: dict[int, int] = {}
        self.bytes = 0
        self.values: dict[str, bytes] = {}
        self.now = 0.0
        self.lock = threading.Lock()
        self._running = 0
        # Events of the threads that wait for a key, and the times at which they give up.
        self._waits: dict[str, dict[threading.Event, float]] = {}

    def of(self, rank: int) -> _jax.CoordinationStore:
        """Return the store as one process sees it."""
        return _jax.CoordinationStore(_Client(self, rank), rank)

    def reset(self) -> None:
        """Count from 0."""
        self.messages, self.bytes = {}, 0

    def together(self, count: int, work: Callable[[int], None]) -> None:
        """Run a function for every rank, each in a thread of its own."""

        def run(rank: int) -> None:
            try:
                work(rank)
            finally:
                with self.lock:
                    self._stop()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
        self._running = count
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_HANGS_S)
            assert not thread.is_alive(), "a process waits forever"

    def wait(self, key: str, seconds: float) -> bool:
        """Wait for a key. Return whether it is set."""
        event = threading.Event()
        with self.lock:
            if key in self.values:
                return True
            self._waits.setdefault(key, {})[event] = self.now + seconds
            self._stop()
        assert event.wait(_HANGS_S), "a process waits forever"
        with self.lock:
            return key in self.values

    def sleep(self, seconds: float) -> None:
        """Let a thread of `together` do nothing for a while."""
        assert not self.wait("a key that nobody sets", seconds)

    def wake(self, key: str) -> None:
        """Let all threads go on that wait for a key."""
        for event in self._waits.pop(key, {}):
            self._running += 1
            event.set()

    def _stop(self) -> None:
        """Count a thread that stops. If it was the last one, let the time pass."""
        self._running -= 1
        if self._running > 0 or not self._waits:
            return
        self.now = min(end for waits in self._waits.values() for end in waits.values())
        for key, waits in [*self._waits.items()]:
            for event in [event for event, end in waits.items() if end <= self.now]:
                del waits[event]
                self._running += 1
                event.set()
            if not waits:
                del self._waits[key]


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
            self.store.wake(key)

    def blocking_key_value_get_bytes(self, key: str, milliseconds: int) -> bytes:
        with self.store.lock:
            self._count(len(key))
        if not self.store.wait(key, milliseconds / 1e3):
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
