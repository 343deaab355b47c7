"""Dicts of bounded size, which keep the most recently used values."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

KEPT: Final = 10_000


class Recent(dict[Any, Any]):
    """A dict that keeps at least the `KEPT` most recently used values, and at most twice as many.

    `recent[key]` returns a value, or None if there is none. `keep` adds a value. If several threads
    compute the value of one key at the same time, all of them get the object that was added first.
    """

    __slots__ = ("_lock", "_older")

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._older: dict[Any, Any] = {}

    def __missing__(self, key: Any) -> Any:
        """Return a value that was used longer ago, or None.

        The value then counts as used again.
        """
        # Values are not ordered by their last use. They are in this dict, or in an older one if
        # they were used longer ago. So finding a value in this dict takes no lock and calls no
        # Python code.
        value = self._older.get(key) if self._older else None
        return None if value is None else self.keep(key, value)

    def replace(self, key: Any, value: Any) -> None:
        """Replace the value of a key."""
        with self._lock:
            self[key] = value

    def keep(self, key: Any, value: Any) -> Any:
        """Add a value if the key has none. In any case, return the value that the key has now."""
        with self._lock:
            if not self._older and len(self) < KEPT:
                return self.setdefault(key, value)
            # Another thread may have added the key since the caller missed it.
            current = self.get(key, self._older.get(key))
            if current is None:
                current = value
            if len(self) >= KEPT:
                # Drop the former `_older`. Entries of it that were used since it became `_older`
                # are in this dict too.
                self._older = dict(self)
                self.clear()
            self[key] = current
            return current


class Shardings(dict[Any, Any]):
    """Shardings by annotation and shape. Each is computed at its first lookup.

    `make` returns the identical object for equal specs, even after this dict is cleared.
    """

    __slots__ = ("make",)

    def __init__(self, make: Callable[[Any, tuple[int, ...]], Any]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, key: tuple[Any, tuple[int, ...]]) -> Any:
        sharding = self.make(*key)
        if len(self) >= KEPT:
            self.clear()
        self[key] = sharding
        return sharding
