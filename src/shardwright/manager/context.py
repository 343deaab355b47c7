"""The ambient manager: which one a flow of the program has, and what JAX's caches know of it.

A flow is what runs in one `contextvars` context: a thread, a task, a copied context. A context variable holds the flow's manager, so
a task inherits what was entered where it was created. JAX reads a user-context instead, which belongs to the thread: its value is a
`Key`, part of the key of every cache of JAX. Where the two say different things, a trace is refused, since JAX would keep what
it traces under the wrong key; outside of a trace the flow's own manager counts.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import itertools
import sys
import threading
import weakref
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, Self

import jax

from shardwright import _jax
from shardwright.errors import NoManagerError


class Key(frozenset[Hashable]):
    """What JAX's caches know of a manager: values that are equal for equal managers, and small, because JAX keeps them for ever.

    JAX takes a cached program without asking anybody if it has the identical key. So the key of a manager that a task entered is
    replaced whenever the manager is asked for, and is never met again; and an unequal object is compared here, in
    Python, where a program that asked for the manager is for flows that have this manager only.

    Attributes:
      values: of the manager; None for no manager.
      asked: whether some program under this key may have asked for the manager.
      text: what messages call the manager.
    """

    __slots__ = ("asked", "text", "values")
    values: Hashable
    text: str
    asked: bool

    def __new__(cls, values: Hashable, text: str = "") -> Self:
        """Return a key; a set of one value, because JAX hashes it at every operation of a trace."""
        key = super().__new__(cls, (values,))
        key.values, key.text, key.asked = values, text, False
        return key

    def fresh(self) -> Key:
        """Return an equal key under which nothing is cached yet."""
        return Key(self.values, self.text)

    # A set keeps its hash, and returns it without a Python call.
    __hash__ = frozenset.__hash__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Key) or (
            self.values is not other.values and self.values != other.values
        ):
            return False
        if not (self.asked or other.asked):
            return True
        entry = _of_this_flow()
        own = None if entry is None else entry.key.values
        return own is self.values or own == self.values

    def __repr__(self) -> str:
        return self.text or "no manager"


@dataclasses.dataclass(slots=True, eq=False)
class _Entry:
    """One `with pm:`.

    Attributes:
      manager: what was entered.
      key: what JAX knows of it; another one each time it is asked for in a trace, where a task entered it.
      mesh: the entered context of its mesh, or None.
      outer: what the flow had before.
      task: the asyncio task that entered it, or None.
      number: counts entries, later ones are larger.
      hidden_from: tasks that ran beside that task when it ended without leaving; until it ends None.
      revoked: whether it was left by another flow than the one that entered it.
    """

    manager: Any
    key: Key
    mesh: Any
    outer: _Entry | None
    task: Any
    number: int
    hidden_from: Any = None
    revoked: bool = False


class _Thread(threading.local):
    """What this thread has entered, innermost last, and what JAX's user-context had before."""

    def __init__(self) -> None:
        self.stack: list[_Entry] = []
        self.below: Any = None
        self.main = threading.current_thread() is threading.main_thread()


_AMBIENT = jax.make_user_context(default_value=Key(None))
_APART = jax.make_user_context(default_value=None)
_INPUTS = jax.make_user_context(default_value=None)
_FLOW: contextvars.ContextVar[_Entry | None] = contextvars.ContextVar(
    "shardwright_manager", default=None
)
_ENTERED = _Thread()
_NUMBERS = itertools.count()


# Entering and leaving.


def enter(manager: Any, mesh: Any, key: Key) -> None:
    """Make a manager ambient, and its mesh, if it has one, unless something is tracing (a mesh cannot change inside a trace)."""
    thread, task, outer = _ENTERED, _current_task(), _FLOW.get()
    stack = thread.stack
    if outer is None or outer.revoked:
        outer = _of_this_flow() if stack else None
    if task is not None:
        key = key.fresh()
        task.add_done_callback(_ended)
    # Not an ExitStack: that alone takes longer than both contexts.
    ambient = _AMBIENT(key)
    ambient.__enter__()
    try:
        within = None if mesh is None else _jax.enter_mesh(mesh)
    except BaseException:
        ambient.__exit__(None, None, None)
        raise
    if not stack:
        thread.below = ambient
        if not thread.main:
            _watch_job()
    entry = _Entry(manager, key, within, outer, task, next(_NUMBERS))
    stack.append(entry)
    _FLOW.set(entry)


def leave(manager: Any) -> None:
    """Undo the manager's `enter`, and whatever this flow entered after it and did not leave.

    Raises:
      NoManagerError: the manager is not the one that this flow entered last; it is left, if it was entered at all.
    """
    thread, entry = _ENTERED, _FLOW.get()
    stack = thread.stack
    if (
        not stack
        or entry is None
        or stack[-1] is not entry
        or entry.manager is not manager
        or entry.task is not _current_task()
    ):
        _leave_another(manager)
        return
    _undo_last(stack)
    _FLOW.set(entry.outer)
    entry.outer = None  # else tasks that make tasks would chain every entry there ever was


def _leave_another(manager: Any) -> None:
    """Leave a manager that is not the last of this thread: another task entered one since, or another flow entered it."""
    stack = _ENTERED.stack
    ended = [one for one in reversed(stack) if one.task is None or one.task.done()]
    entries = _since(manager, _chain(_FLOW.get())) or _since(manager, ended)
    if not entries:
        raise NoManagerError(
            f"{manager!r} is not entered in this thread",
            fix="leave managers in the reverse order, in the thread that entered them",
        )
    last, task = entries[0].manager, _current_task()
    for entry in entries:
        entry.revoked = entry.task is not task
        _undo(entry)
    _FLOW.set(_live(entries[-1].outer))
    if len(entries) > 1:
        raise NoManagerError(
            f"{manager!r} is not the one entered last in this thread: that was {last!r}; all since it are left now",
            fix="leave managers in the reverse order; do not yield inside `with pm:`, use the manager's methods there",
        )


def take_back() -> Any:
    """Leave what this thread entered last, whichever flow did, and return the manager."""
    entry = _ENTERED.stack[-1]
    entry.revoked = True
    _undo_last(_ENTERED.stack)
    _FLOW.set(_live(_FLOW.get()))
    return entry.manager


def _chain(entry: _Entry | None) -> list[_Entry]:
    """Return what a flow has entered in this thread and not left, innermost first."""
    found = []
    while entry is not None:
        if any(one is entry for one in _ENTERED.stack):
            found.append(entry)
        entry = entry.outer
    return found


def _since(manager: Any, entries: list[_Entry]) -> list[_Entry]:
    """Return the entries up to that of a manager, or none."""
    at = next((at for at, entry in enumerate(entries) if entry.manager is manager), None)
    return [] if at is None else entries[: at + 1]


def _undo(entry: _Entry) -> None:
    stack = _ENTERED.stack
    if stack[-1] is entry:
        _undo_last(stack)
        return
    at = stack.index(entry)
    # Whoever entered a mesh after this one gives back what was there before this one.
    heir = next((one for one in stack[at + 1 :] if one.mesh is not None), None)
    if heir is not None and entry.mesh is not None:
        heir.mesh, entry.mesh = entry.mesh, None
    del stack[at]
    _unwatch(entry.task, stack)


def _undo_last(stack: list[_Entry]) -> None:
    entry = stack.pop()
    if entry.task is not None:
        _unwatch(entry.task, stack)
    try:
        if entry.mesh is not None:
            entry.mesh.__exit__(None, None, None)
    finally:
        if stack:
            _AMBIENT(stack[-1].key).__enter__()
        else:
            _ENTERED.below.__exit__(None, None, None)


def _unwatch(task: Any, stack: list[_Entry]) -> None:
    if task is not None and all(entry.task is not task for entry in stack):
        task.remove_done_callback(_ended)


def _ended(task: Any) -> None:
    """Note of what a task entered and did not leave which tasks ran beside it: they never get it; later ones do, as cells do."""
    tasks = asyncio.all_tasks()
    for entry in _ENTERED.stack:
        if entry.task is task:
            entry.hidden_from = weakref.WeakSet(tasks)


def _watch_job() -> None:
    """Have all that a job of a `ThreadPoolExecutor` enters left when the job ends: the next one runs in the same thread."""
    pool: Any = sys.modules.get("concurrent.futures.thread")
    if pool is None:
        return
    run, stack = pool._WorkItem.run.__code__, _ENTERED.stack
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not run:
        frame = frame.f_back
    if frame is None:
        return

    def ended(_: object) -> None:
        # A future calls back in the thread that ran the job, between that job and the next.
        while stack is _ENTERED.stack and stack:
            stack[-1].revoked = True
            _undo_last(stack)
        _FLOW.set(None)

    frame.f_locals["self"].future.add_done_callback(ended)


# What a flow has.


def _current_task() -> Any:
    return None if asyncio._get_running_loop() is None else asyncio.current_task()


def _may_see(entry: _Entry) -> bool:
    """Tell whether a flow without a manager of its own has what another flow of the thread entered and did not leave.

    So it is between the cells of a notebook, which may run in a task and a context each; a task that is still running, or that
    ran beside this one, keeps its manager to itself.
    """
    if entry.task is None:
        return True
    task = _current_task()
    return entry.task is task or (entry.hidden_from is not None and task not in entry.hidden_from)


def _live(entry: _Entry | None) -> _Entry | None:
    while entry is not None and entry.revoked:
        entry = entry.outer
    return entry


def _of_this_flow() -> _Entry | None:
    """Return what this flow entered or inherited, else what the thread has from a flow before it."""
    own = _live(_FLOW.get())
    return (
        own
        if own is not None
        else next((entry for entry in reversed(_ENTERED.stack) if _may_see(entry)), None)
    )


def current() -> Any:
    """Return the manager of this flow, or None.

    Raises:
      NoManagerError: inside a trace, JAX's caches know of another one here; or two flows of this thread entered one each, and
        which of them counts here cannot be told.
    """
    entry, key = _FLOW.get(), _AMBIENT.value
    if entry is None or entry.key is not key or entry.revoked:
        entry = _reconciled(key)
    if entry is None:
        if not key.asked and _jax.in_trace():
            key.asked = True
            _replace_default(key.fresh())
        return None
    if (entry.task is not None or not key.asked) and _jax.in_trace():
        key.asked = True
        last = _ENTERED.stack[-1]
        if last.task is not None:
            last.key = key.fresh()
            _AMBIENT(last.key).__enter__()
    return entry.manager


def _reconciled(key: Key) -> _Entry | None:
    """Return the entry of this flow, where JAX may know of another one.

    Raises:
      NoManagerError: as `current` does.
    """
    entry = _of_this_flow()
    last = next((one for one in reversed(_ENTERED.stack) if _may_see(one)), None)
    if (
        entry is not None
        and last is not None
        and last.number > entry.number
        and last.manager is not entry.manager
    ):
        raise NoManagerError(
            f"the ambient manager is {last.manager!r}, entered by another flow of this thread; this one entered {entry.manager!r}",
            fix="leave managers where they were entered, or enter the one that is meant here: with pm: ...",
        )
    if (None if entry is None else entry.key.values) != key.values and _jax.in_trace():
        raise _unknown_to_jax(entry, key)
    return entry


def _unknown_to_jax(entry: _Entry | None, key: Key) -> NoManagerError:
    if entry is None:
        return NoManagerError(
            f"the ambient manager is {key}, entered by another task of this thread; this one has none, and JAX cannot tell them apart",
            fix="enter one around the call of the jitted function, with pm: ..., without an await inside",
        )
    known = f"; it knows of {key}, entered by another task" if key.values is not None else ""
    return NoManagerError(
        f"the manager here was entered elsewhere: it is {entry.manager!r}, which JAX does not know of here{known}",
        fix="with sw.current_manager(): ... around the call of the jitted function, without an await inside",
    )


def _replace_default(fresh: Key) -> None:
    """Give every thread without a manager a key under which nothing is cached: a flow with one must not take what is."""
    _AMBIENT.set_global(fresh)
    if _AMBIENT.value is not fresh:  # this thread has a value of its own
        _AMBIENT(fresh).__enter__()


def depth() -> int:
    """Return how many managers this thread has entered and not left."""
    return len(_ENTERED.stack)


def require(what: str, *, method: bool = True) -> Any:
    """Return the manager of this flow.

    Raises:
      NoManagerError: it has none.
    """
    manager = current()
    if manager is None:
        raise NoManagerError(
            f"{what} needs a PartitionManager, and none is entered in this thread",
            fix="with pm: ... around the call (each thread enters its own)"
            + (f", or pm.{what}(...)" if method else ""),
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
