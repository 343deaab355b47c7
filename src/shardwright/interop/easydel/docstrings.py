"""A decorator that adds shared text to docstrings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Documented = TypeVar("Documented", bound=Callable[..., Any])


def add_start_docstrings(*docstr: str) -> Callable[[Documented], Documented]:
    """Return a decorator that puts texts before the docstring of a function or class.

    The texts are joined without separators.

    >>> @add_start_docstrings("Shared part. ", "More. ")
    ... def f():
    ...     '''Own part.'''
    >>> f.__doc__
    'Shared part. More. Own part.'
    """

    def decorate(documented: Documented) -> Documented:
        documented.__doc__ = "".join(docstr) + (documented.__doc__ or "")
        return documented

    return decorate
