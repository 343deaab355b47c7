"""Show a value without knowing how: as text, as HTML for a notebook, or as data for JSON.

The room `show` is above all rooms that have values. It registers a function per class here, and
`functools.singledispatch` picks it. `shardwright/__init__` names the file of each class, which is
imported when the first value is shown: tables and pages would slow down `import shardwright`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any, Final

WIDTH: Final = 90  # characters per line that a page of the documentation shows without scrolling

_FILES: dict[str, str] = {}


def shown_by(files: Mapping[str, str]) -> None:
    """Add names of classes, each with the module that registers their functions."""
    _FILES.update(files)


@functools.singledispatch
def text_of(value: Any, **options: Any) -> str:
    """Return a value as text for people. Options depend on its class."""
    text: str = _required(text_of, value)(value, **options)
    return text


@functools.singledispatch
def html_of(value: Any) -> str:
    """Return a value as HTML for a notebook."""
    html: str = _required(html_of, value)(value)
    return html


@functools.singledispatch
def data_of(value: Any) -> dict[str, Any]:
    """Return a value as plain data: what JSON has."""
    data: dict[str, Any] = _required(data_of, value)(value)
    return data


def function_for(form: Any, value: Any) -> Any:
    """Return the function of a form for the class of a value, or for a base of it; None if none."""
    # A base too, because a class of another room may derive from one that is shown.
    for base in type(value).__mro__:
        if base.__name__ in _FILES:
            # The import registers the functions of the class with `form`.
            importlib.import_module(_FILES[base.__name__])
    function = form.dispatch(type(value))
    return None if function is form.dispatch(object) else function


def _required(form: Any, value: Any) -> Any:
    function = function_for(form, value)
    if function is None:  # calling the form again would call this function again, without end
        raise AssertionError(f"shardwright/show has no function for {type(value).__name__}")
    return function
