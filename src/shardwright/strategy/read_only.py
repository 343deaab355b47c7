"""Tables and lists that cannot be changed: a strategy is one value with one hash, down to its rules."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from shardwright.errors import StrategyError

K = TypeVar("K")
V = TypeVar("V")


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise StrategyError(
        "a Strategy is frozen",
        fix="lay the change over it, strategy | Strategy.loads(...), or change to_data() and pass it to Strategy(**data)",
    )


class ReadOnlyDict(dict[K, V]):
    """A dict that cannot be changed; `dict(table)` is one that can."""

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> Any:
        return type(self), (dict(self),)


class ReadOnlyList(list[V]):
    """A list that cannot be changed; `list(entries)` is one that can."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse

    def __reduce__(self) -> Any:
        return type(self), (list(self),)
