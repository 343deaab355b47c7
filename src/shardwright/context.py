"""The ambient manager. A jax user-context, so that it is part of every jit's cache key, in each thread by itself.

Tasks and generators of one thread share it: who awaits or yields inside `with pm:` hands it to whoever runs meanwhile. What
each of them entered itself is noted beside it, so that a task that finds another's manager is told.
"""

from __future__ import annotations

import contextvars
import threading
from contextlib import AbstractContextManager
from typing import Any

import jax

from shardwright import _jax
from shardwright.errors import NoManagerError

_AMBIENT = jax.make_user_context(default_value=None)
_APART = jax.make_user_context(default_value=None)
_INPUTS = jax.make_user_context(default_value=None)
_OWN: contextvars.ContextVar[Any] = contextvars.ContextVar("shardwright_manager", default=None)


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
    _OWN.set(manager)


def leave(manager: Any) -> None:
    """Undo the manager's `enter`, and whatever was entered after it and not left.

    Raises:
      NoManagerError: the manager is not the one entered last in this thread; it is left, if it was entered at all.
    """
    stack = _ENTERED.stack
    last = stack[-1][0] if stack else None
    if last is not manager and all(entry[0] is not manager for entry in stack):
        raise NoManagerError(
            f"{manager!r} is not entered in this thread", fix="leave managers in the reverse order, in the thread that entered them"
        )
    while _undo(stack.pop()) is not manager:
        pass
    _OWN.set(stack[-1][0] if stack else None)
    if last is not manager:
        raise NoManagerError(
            f"{manager!r} is not the one entered last in this thread: that was {last!r}; all since it are left now",
            fix="leave managers in the reverse order; do not await or yield inside `with pm:`, use the manager's methods there",
        )


def _undo(entry: tuple[Any, Any, Any]) -> Any:
    manager, ambient, within = entry
    try:
        if within is not None:
            within.__exit__(None, None, None)
    finally:
        ambient.__exit__(None, None, None)
    return manager


def current() -> Any:
    """Return the ambient manager, or None.

    Raises:
      NoManagerError: another task of this thread entered it, after this one had entered a manager of its own.
    """
    manager = _AMBIENT.value
    own = _OWN.get()
    if own is not None and own is not manager and manager is not None:
        raise NoManagerError(
            f"the ambient manager is {manager!r}, entered by another task of this thread; this one entered {own!r}",
            fix="do not await or yield inside `with pm:`: tasks of a thread share what is ambient; use pm.shard(...) and the like",
        )
    return manager


def entered_last() -> Any:
    """Return the manager that this thread entered last and has not left, or None."""
    return _ENTERED.stack[-1][0] if _ENTERED.stack else None


def depth() -> int:
    """Return how many managers this thread has entered and not left."""
    return len(_ENTERED.stack)


def require(what: str, *, method: bool = True) -> Any:
    """Return the ambient manager.

    Raises:
      NoManagerError: there is none in this thread.
    """
    manager = current()
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


def mapped(inputs: Any) -> AbstractContextManager[object]:
    """Return a context in which the function of a `pm.shard_map` is traced; what is jitted inside is traced for these inputs."""
    entered: AbstractContextManager[object] = _INPUTS(inputs)
    return entered


def mapped_inputs() -> Any:
    """Return the inputs of the innermost `mapped`, or None."""
    return _INPUTS.value
