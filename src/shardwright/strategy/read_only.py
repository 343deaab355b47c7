"""Tables and lists that cannot be changed: a strategy is one value with one hash, down to its rules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

from shardwright.errors import StrategyError

K = TypeVar("K")
V = TypeVar("V")


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise StrategyError(
        "a Strategy is frozen",
        fix="lay the change over it, strategy | Strategy.loads(...), or change to_data() and pass it to Strategy(**data)",
    )


def _once(made: Any) -> None:
    """Refuse a second call of `__init__`, which fills a dict or a list anew."""
    if getattr(made, "_filled", False):
        _refuse()
    object.__setattr__(made, "_filled", True)


class ReadOnlyDict(dict[K, V]):
    """A dict that cannot be changed; `dict(table)` is one that can."""

    __slots__ = ("_filled",)

    def __init__(self, table: Any = (), /, **more: V) -> None:
        _once(self)
        super().__init__(table, **more)

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> Any:
        return type(self), (dict(self),)


class ReadOnlyList(list[V]):
    """A list that cannot be changed; `list(entries)` is one that can."""

    __slots__ = ("_filled",)

    def __init__(self, entries: Iterable[V] = (), /) -> None:
        _once(self)
        super().__init__(entries)

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse

    def __reduce__(self) -> Any:
        return type(self), (list(self),)
