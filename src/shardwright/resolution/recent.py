"""A dict that forgets: answers by shape are kept for the shapes that were asked for last, so that
no run grows without end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

KEPT: Final = 10_000


class Recent(dict[Any, Any]):
    """Keep at least the last `KEPT` values that were asked for, and at most twice as many.

    `get` finds most of them, at the speed of a dict. Where it finds nothing, `recall` looks among
    the older ones, and `keep` takes a new value: threads that make one at once get the one object
    that came first.
    """

    __slots__ = ("_lock", "_older")

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._older: dict[Any, Any] = {}

    def recall(self, key: Any) -> Any:
        """Return a value, which counts as asked for now if it is an older one, or None."""
        found = self.get(key)
        if found is None:
            found = self._older.get(key)
            if found is not None:
                found = self.keep(key, found)
        return found

    def replace(self, key: Any, value: Any) -> None:
        """Keep a value in place of the one that there is."""
        with self._lock:
            self[key] = value

    def keep(self, key: Any, value: Any) -> Any:
        """Keep a value, if there is none yet, and return the one that is kept."""
        with self._lock:
            found = self.get(key, self._older.get(key))
            if found is None:
                found = value
            if len(self) >= KEPT:
                self._older = dict(self)
                self.clear()
            self[key] = found
            return found


class Shardings(dict[Any, Any]):
    """Shardings by annotation and shape, each made when it is first asked for: one look-up per
    leaf, known or not.

    Whoever makes them keeps the objects, so that forgetting all of them at once loses none of those
    kept there.
    """

    __slots__ = ("make",)

    def __init__(self, make: Callable[[Any, tuple[int, ...]], Any]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, key: tuple[Any, tuple[int, ...]]) -> Any:
        made = self.make(*key)
        if len(self) >= KEPT:
            self.clear()
        self[key] = made
        return made
