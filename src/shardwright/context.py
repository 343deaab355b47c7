"""The ambient manager. A jax user-context, so that it is part of every jit's cache key, in each thread by itself."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import jax

from shardwright import _jax
from shardwright.errors import NoManagerError

_AMBIENT = jax.make_user_context(default_value=None)


class _Entered(threading.local):
    """What this thread has entered, innermost last."""

    def __init__(self) -> None:
        self.stack: list[tuple[Any, contextlib.ExitStack]] = []


_ENTERED = _Entered()


def enter(manager: Any, mesh: Any) -> None:
    """Make a manager ambient, and its mesh too unless something is tracing (a mesh cannot change inside a trace)."""
    with contextlib.ExitStack() as building:
        building.enter_context(_AMBIENT(manager))
        if not _jax.in_trace():
            building.enter_context(_jax.enter_mesh(mesh))
        _ENTERED.stack.append((manager, building.pop_all()))


def leave(manager: Any) -> None:
    """Undo the innermost `enter`.

    Raises:
      NoManagerError: the manager is not the one entered last in this thread.
    """
    if not _ENTERED.stack or _ENTERED.stack[-1][0] is not manager:
        raise NoManagerError(
            "this manager is not the one entered last in this thread",
            fix="leave managers in the reverse order, in the thread that entered them",
        )
    _, contexts = _ENTERED.stack.pop()
    contexts.close()


def current() -> Any:
    """Return the ambient manager, or None."""
    return _AMBIENT.value


def require(what: str) -> Any:
    """Return the ambient manager.

    Raises:
      NoManagerError: there is none in this thread.
    """
    manager = _AMBIENT.value
    if manager is None:
        raise NoManagerError(
            f"{what} needs a PartitionManager, and none is entered in this thread",
            fix=f"with pm: ... around the call (each thread enters its own), or pm.{what}(...)",
        )
    return manager
