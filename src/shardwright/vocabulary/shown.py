"""Show a value as text, as HTML for a notebook, or as data for JSON.

Each file of the package `show` imports the classes that it shows, and registers a function for each
of them here. `shardwright/__init__` names, for each class, its file of `show`. That file is
imported when the first value of the class is shown, because tables and pages would slow down
`import shardwright`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

Shown = TypeVar("Shown")
Function = TypeVar("Function", bound=Callable[..., Any])

WIDTH: Final = 90  # characters per line that a page of the documentation shows without scrolling

_FILES: dict[str, str] = {}


def shown_by(files: Mapping[str, str]) -> None:
    """Add names of classes, each with the module that registers their functions."""
    _FILES.update(files)


class ShownForm(Generic[Shown]):
    """A way to show values: functions by class, which the files of `shardwright/show` register.

    This is not `functools.singledispatch`: if one thread shows a value while another thread imports
    the file that registers its class, `singledispatch` would cache that the class has no function.
    """

    def __init__(self) -> None:
        self.registry: dict[type, Callable[..., Shown]] = {}

    def register(self, cls: type) -> Callable[[Function], Function]:
        """Return a decorator that registers a function for a class."""

        def add(function: Function) -> Function:
            self.registry[cls] = function
            return function

        return add

    def __call__(self, value: Any, **options: Any) -> Shown:
        """Show a value. The options depend on the class of the value."""
        function = function_for(self, value)
        if function is None:
            raise AssertionError(f"shardwright/show has no function for {type(value).__name__}")
        return function(value, **options)


# The three forms: text for people, HTML for a notebook, and the data that JSON can hold.
text_of: Final = ShownForm[str]()
html_of: Final = ShownForm[str]()
data_of: Final = ShownForm[dict[str, Any]]()


def function_for(form: ShownForm[Shown], value: Any) -> Callable[..., Shown] | None:
    """Return the function of a form for the class of a value or for one of its bases, or None."""
    # Also look at bases, because a class of another package may derive from a class that is shown.
    for base in type(value).__mro__:
        # Import in every call: if another thread is in the middle of the import, this waits for it.
        if base.__name__ in _FILES:
            # The import registers the functions of the class with `form`.
            importlib.import_module(_FILES[base.__name__])
        if base in form.registry:
            return form.registry[base]
    return None
