"""The ambient manager of a flow, and its key in JAX's caches.

A flow is the code that runs in one `contextvars` context: a thread, a task, or a copied context. A
context variable holds the manager of the flow, so a task inherits the manager that was entered
where the task was created.

JAX does not read this variable. It reads a user-context, which belongs to the thread. The value of
the user-context is a `Key`, and every cache of JAX has it in its keys. If the variable and the
user-context disagree, a trace is refused, because JAX would cache the traced program under the
wrong key. Outside of a trace, the manager of the flow applies.
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
from shardwright.resolution.recent import Recent


class Key(frozenset[Hashable]):
    """The part of JAX's cache keys that stands for a manager.

    Equal managers have equal keys. A key is small, because JAX never frees it.

    JAX runs a cached program without calling `__eq__` if the key is the identical object. So if a
    task entered a manager, its key is replaced at each request for the manager inside a trace, and
    the former key is never used again. All other keys are compared by `__eq__`: only a flow with an
    equal manager may run a program that asked for the manager.

    Attributes:
      values: Rules, mesh and mode of the manager; None for no manager.
      asked: Whether a program under this key may have asked for the manager.
      text: The manager's name in messages.
    """

    __slots__ = ("asked", "text", "values")
    values: Hashable
    text: str
    asked: bool

    def __new__(cls, values: Hashable, text: str = "") -> Self:
        """Return a key: a set of one value, whose hash Python caches.

        JAX hashes the key at every operation of a trace.
        """
        key = super().__new__(cls, (values,))
        key.values, key.text, key.asked = values, text, False
        return key

    def fresh(self) -> Key:
        """Return an equal but new key, under which JAX has cached nothing yet."""
        return Key(self.values, self.text)

    # A frozenset caches its hash, and returns it without a Python call.
    __hash__ = frozenset.__hash__

    def __eq__(self, other: object) -> bool:
        values = self.values
        if type(other) is not Key or (values is not other.values and values != other.values):
            return False
        if not (self.asked or other.asked):
            return True
        entry = _FLOW.get()
        if entry is None or entry.revoked:
            entry = _of_this_flow()
        flow_values = None if entry is None else entry.key.values
        return flow_values is values or flow_values == values

    def __repr__(self) -> str:
        return self.text or "no manager"


# The keys of the managers that were entered last.
_KEYS = Recent()


def key_of(values: Hashable, text: str) -> Key:
    """Return the key of a manager; the identical object for equal managers, so that JAX need not
    compare keys. Messages then use the last manager's name.
    """
    kept = _KEYS[values]
    key: Key = _KEYS.keep(values, Key(values)) if kept is None else kept
    key.text = text
    return key


@dataclasses.dataclass(slots=True, eq=False)
class _Entry:
    """One `with pm:` of a flow.

    Attributes:
      manager: The entered manager.
      key: The manager's key in JAX's caches. If a task entered the manager, the key is replaced at
        each request inside a trace.
      mesh: The entered context of the manager's mesh, or None.
      outer: The former entry of the flow, or None.
      task: The asyncio task that entered the manager, or None.
      number: Number of the entry. Later entries have larger numbers.
      hidden_from: The other tasks that ran when `task` ended without leaving. None until it ends.
      revoked: Whether another flow than the one that entered the manager has left it.
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
    """The entries of this thread, innermost last, and the user-context entered below them."""

    def __init__(self) -> None:
        self.stack: list[_Entry] = []
        self.below: Any = None
        self.main = threading.current_thread() is threading.main_thread()


_AMBIENT = jax.make_user_context(default_value=Key(None))
_APART = jax.make_user_context(default_value=None)
_INPUTS = jax.make_user_context(default_value=None)
_SETTINGS = jax.make_user_context(default_value=None)
_RULES = jax.make_user_context(default_value=None)
_TARGET = jax.make_user_context(default_value=None)
_FLOW: contextvars.ContextVar[_Entry | None] = contextvars.ContextVar(
    "shardwright_manager", default=None
)
_ENTERED = _Thread()
_NUMBERS = itertools.count()


# Entering and leaving.


def enter(manager: Any, mesh: Any, key: Key) -> None:
    """Make a manager ambient. Make its mesh ambient too, except in a trace."""
    thread, task, outer = _ENTERED, _current_task(), _FLOW.get()
    stack = thread.stack
    if outer is None or outer.revoked:
        outer = _of_this_flow() if stack else None
    if task is not None:
        key = key.fresh()
        task.add_done_callback(_ended)
    # An ExitStack alone would take longer than both contexts.
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
    """Undo `enter` of a manager, and every later `enter` that this flow did not undo.

    Raises:
      NoManagerError: The manager is not the one that this flow entered last. If the manager was
        entered before, it is left nevertheless.
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
    entry.outer = None  # else tasks that create tasks would keep all earlier entries alive


def _leave_another(manager: Any) -> None:
    """Leave a manager that another flow or task entered, or that is not the last one entered."""
    stack = _ENTERED.stack
    ended = [entry for entry in reversed(stack) if entry.task is None or entry.task.done()]
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
            f"{manager!r} is not the manager that this thread entered last, which is {last!r}; "
            "this manager and all that were entered after it are left now",
            fix="leave managers in the reverse order; do not yield inside `with pm:`, "
            "but call the methods of the manager",
        )


def take_back() -> Any:
    """Leave the manager that any flow of this thread entered last, and return it."""
    entry = _ENTERED.stack[-1]
    entry.revoked = True
    _undo_last(_ENTERED.stack)
    _FLOW.set(_live(_FLOW.get()))
    return entry.manager


def _chain(entry: _Entry | None) -> list[_Entry]:
    """Return the entries of a flow that are still in this thread's stack, innermost first."""
    chain = []
    while entry is not None:
        if any(entered is entry for entered in _ENTERED.stack):
            chain.append(entry)
        entry = entry.outer
    return chain


def _since(manager: Any, entries: list[_Entry]) -> list[_Entry]:
    """Return the entries up to the first entry of a manager, or an empty list if it has none."""
    position = next(
        (position for position, entry in enumerate(entries) if entry.manager is manager), None
    )
    return [] if position is None else entries[: position + 1]


def _undo(entry: _Entry) -> None:
    stack = _ENTERED.stack
    if stack[-1] is entry:
        _undo_last(stack)
        return
    position = stack.index(entry)
    # The mesh that was ambient before this entry is restored when the next entry with a mesh ends.
    later = next((other for other in stack[position + 1 :] if other.mesh is not None), None)
    if later is not None and entry.mesh is not None:
        later.mesh, entry.mesh = entry.mesh, None
    del stack[position]
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
    """Hide the managers that an ended task did not leave from the tasks that still run.

    Tasks that start later see these managers, because later cells of a notebook need them.
    """
    tasks = asyncio.all_tasks()
    for entry in _ENTERED.stack:
        if entry.task is task:
            entry.hidden_from = weakref.WeakSet(tasks)


def _watch_job() -> None:
    """If this is a job of a `ThreadPoolExecutor`, leave all its managers when the job ends.

    The next job runs in the same thread, and must not see them.
    """
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
        # A future runs its callbacks in the thread that ran the job, before the next job starts.
        while stack is _ENTERED.stack and stack:
            stack[-1].revoked = True
            _undo_last(stack)
        _FLOW.set(None)

    frame.f_locals["self"].future.add_done_callback(ended)


# The manager of a flow.


def _current_task() -> Any:
    return None if asyncio._get_running_loop() is None else asyncio.current_task()


def _may_see(entry: _Entry) -> bool:
    """Tell whether a flow without a manager of its own inherits an entry of another flow.

    Cells of a notebook inherit from earlier cells: each cell may run in a task and a context of its
    own. No other task inherits from a task that still runs, or from one that ran at the same time.
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
    """Return the entry of this flow, else the last entry that it inherits from other flows."""
    entry = _live(_FLOW.get())
    return _last_visible() if entry is None else entry


def _last_visible() -> _Entry | None:
    return next((entry for entry in reversed(_ENTERED.stack) if _may_see(entry)), None)


def current() -> Any:
    """Return the manager of this flow, or None.

    Raises:
      NoManagerError: Inside a trace, the key in JAX's caches is that of another manager. Or two
        flows of this thread entered different managers, and it is ambiguous which one applies.
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
    """Return the entry of this flow, after a comparison with the key in JAX's caches.

    Raises:
      NoManagerError: See `current`.
    """
    entry, last = _of_this_flow(), _last_visible()
    if (
        entry is not None
        and last is not None
        and last.number > entry.number
        and last.manager is not entry.manager
    ):
        raise NoManagerError(
            f"the ambient manager is {last.manager!r}, entered by another flow of this thread; "
            f"this flow entered {entry.manager!r}",
            fix="leave managers where they were entered, or enter the right one here: with pm: ...",
        )
    if (None if entry is None else entry.key.values) != key.values and _jax.in_trace():
        raise _unknown_to_jax(entry, key)
    return entry


def _unknown_to_jax(entry: _Entry | None, key: Key) -> NoManagerError:
    if entry is None:
        return NoManagerError(
            f"the ambient manager is {key}, entered by another task of this thread; "
            "this task has none, and JAX cannot distinguish the two tasks",
            fix="enter one around the call of the jitted function, with pm: ..., "
            "without an await inside",
        )
    other = f"; they know {key}, entered by another task" if key.values is not None else ""
    return NoManagerError(
        f"JAX's caches in this thread do not know the ambient manager, {entry.manager!r}{other}",
        fix="enter it again around the call of the jitted function, "
        "with sw.current_manager(): ..., without an await inside",
    )


def _replace_default(fresh: Key) -> None:
    """Give every thread without a manager a new key, under which nothing is cached.

    A flow with a manager must not run a program that was cached without one.
    """
    _AMBIENT.set_global(fresh)
    if _AMBIENT.value is not fresh:  # the user-context of this thread has its own value
        _AMBIENT(fresh).__enter__()


def depth() -> int:
    """Return the number of managers that this thread has entered and not left."""
    return len(_ENTERED.stack)


def require(what: str, *, method: bool = True) -> Any:
    """Return the manager of this flow.

    Raises:
      NoManagerError: The flow has no manager.
    """
    manager = current()
    if manager is None:
        raise NoManagerError(
            f"{what} needs a PartitionManager, and none is entered in this thread",
            fix="enter a manager, with pm: ... (each thread enters its own)"
            + (f", or call pm.{what}(...)" if method else ""),
        )
    return manager


def apart() -> AbstractContextManager[object]:
    """Return a context with a new cache key, so that JAX traces again."""
    entered: AbstractContextManager[object] = _APART(object())
    return entered


def mapped(inputs: Any) -> AbstractContextManager[object]:
    """Return a context in which `mapped_inputs` returns these inputs of a `pm.shard_map`."""
    entered: AbstractContextManager[object] = _INPUTS(inputs)
    return entered


def mapped_inputs() -> Any:
    """Return the inputs of the innermost `mapped`, or None."""
    return _INPUTS.value


def settings_entered(settings: Hashable) -> AbstractContextManager[object]:
    """Return a context in which `settings` returns these settings of a bridge.

    They are part of JAX's cache keys.
    """
    entered: AbstractContextManager[object] = _SETTINGS(settings)
    return entered


def settings() -> Any:
    """Return the settings of the innermost `settings_entered` of this thread, or None."""
    return _SETTINGS.value


def rules_entered(rules: Hashable) -> AbstractContextManager[object]:
    """Return a context in which JAX's cache keys contain the rules that a bridge enters elsewhere.

    flax and haliax keep their rules where JAX does not see them.
    """
    entered: AbstractContextManager[object] = _RULES(rules)
    return entered


def rules() -> Any:
    """Return the rules of the innermost `rules_entered` of this thread, or None."""
    return _RULES.value


def target_entered(platform: str | None) -> AbstractContextManager[object]:
    """Return a context in which programs are traced for a platform that may not be here.

    It is part of JAX's cache keys.

    Args:
      platform: "cpu", "gpu" or "tpu"; None for the platform of the mesh.
    """
    entered: AbstractContextManager[object] = _TARGET(platform)
    return entered


def target() -> str | None:
    """Return the platform of the innermost `target_entered` of this thread, or None."""
    platform: str | None = _TARGET.value
    return platform
