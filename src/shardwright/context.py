"""The ambient manager. A jax user-context, so that it is part of every jit's cache key, in each thread by itself."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import jax

from shardwright import _jax
from shardwright.errors import NoManagerError

_AMBIENT = jax.make_user_context(default_value=None)
_APART = jax.make_user_context(default_value=None)


class _Entered(threading.local):
    """What this thread has entered, innermost last."""

    def __init__(self) -> None:
        self.stack: list[tuple[Any, Any, Any]] = []


_ENTERED = _Entered()


def enter(manager: Any, mesh: Any) -> None:
    """Make a manager ambient, and its mesh, if it has one, unless something is tracing (a mesh cannot change inside a trace)."""
    # Not an ExitStack: that alone takes longer than both contexts.
    ambient = _AMBIENT(manager)
    ambient.__enter__()
    try:
        within = None if mesh is None or _jax.in_trace() else _jax.enter_mesh(mesh)
        if within is not None:
            within.__enter__()
    except BaseException:
        ambient.__exit__(None, None, None)
        raise
    _ENTERED.stack.append((manager, ambient, within))


def leave(manager: Any) -> None:
    """Undo the innermost `enter`.

    Raises:
      NoManagerError: the manager is not the one entered last in this thread.
    """
    if not _ENTERED.stack or _ENTERED.stack[-1][0] is not manager:
        last = f"that is {_ENTERED.stack[-1][0]!r}" if _ENTERED.stack else "none is entered"
        raise NoManagerError(
            f"{manager!r} is not the one entered last in this thread: {last}",
            fix="leave managers in the reverse order, in the thread that entered them",
        )
    _, ambient, within = _ENTERED.stack.pop()
    try:
        if within is not None:
            within.__exit__(None, None, None)
    finally:
        ambient.__exit__(None, None, None)


def current() -> Any:
    """Return the ambient manager, or None."""
    return _AMBIENT.value


def depth() -> int:
    """Return how many managers this thread has entered and not left."""
    return len(_ENTERED.stack)


def require(what: str, *, method: bool = True) -> Any:
    """Return the ambient manager.

    Raises:
      NoManagerError: there is none in this thread.
    """
    manager = _AMBIENT.value
    if manager is None:
        raise NoManagerError(
            f"{what} needs a PartitionManager, and none is entered in this thread",
            fix="with pm: ... around the call (each thread enters its own)" + (f", or pm.{what}(...)" if method else ""),
        )
    return manager


def apart() -> AbstractContextManager[object]:
    """Return a context in which JAX has compiled nothing yet: what is jitted there is traced anew, once."""
    found: AbstractContextManager[object] = _APART(object())
    return found
