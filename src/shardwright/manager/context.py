"""The ambient manager, and its key in JAX's caches.

A thread has a stack of the managers that it entered. An asyncio task has a context, and in it a
context variable. This variable holds the manager that the task entered last or, if the task entered
none, the manager that applied where the task was created.

JAX reads neither the stack nor the context variable. It reads a user-context, which belongs to the
thread. The value of the user-context is a `Key`, which is part of the keys of every cache of JAX.
If the key does not belong to the manager that applies, a trace is refused, because JAX would cache
the program under the wrong key.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import threading
from collections.abc import Hashable
from typing import Any, Final, Self

import jax
from jax.sharding import AbstractMesh, Mesh

from shardwright import _jax
from shardwright.errors import NoManagerError
from shardwright.resolution.recent import Recent

# Values of a thread that are part of JAX's cache keys. `with RULES(value):` sets one, and
# `RULES.value` reads it; it is None outside. All are created at import: each new user-context adds
# an entry to JAX's cache keys, so JAX would trace cached programs again.
APART: Final = jax.make_user_context(default_value=None)  # a new object makes JAX trace again
INPUTS: Final = jax.make_user_context(default_value=None)  # the inputs of a `pm.shard_map`
SETTINGS: Final = jax.make_user_context(default_value=None)  # settings of a bridge for its modules
RULES: Final = jax.make_user_context(default_value=None)  # state of flax and haliax
# the platform for which a plan is made; this machine may have no devices of it
TARGET: Final = jax.make_user_context(default_value=None)


class Key(frozenset[Hashable]):
    """The part of JAX's cache keys that stands for a manager.

    Equal managers have equal keys. A key must be small, because JAX never frees it.

    JAX runs a cached program without calling `__eq__` if the key is the identical object. So if a
    task entered a manager, the manager's key is replaced at each request for the manager inside a
    trace, and the former key is never used again. JAX compares all other keys by `__eq__`, so a
    program that asked for the manager runs only where an equal manager applies.

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
        found = _applying() if entry is None or entry.is_left else entry
        if isinstance(found, NoManagerError):
            return False  # JAX traces again, and the request in the new trace raises the error
        applies = None if found is None else found.key.values
        return applies is values or applies == values

    def __repr__(self) -> str:
        return self.text or "no manager"


# The keys of the managers that were entered last.
# A key that this dict forgets is created again, which costs JAX one comparison by `__eq__`.
_KEYS = Recent()


def key_of(values: Hashable, text: str) -> Key:
    """Return the key of a manager. Equal managers get the identical object, so that JAX need not
    compare keys. Messages then use the name of the manager that requested the key last.
    """
    kept = _KEYS[values]
    key: Key = _KEYS.keep(values, Key(values)) if kept is None else kept
    key.text = text
    return key


@dataclasses.dataclass(slots=True, eq=False)
class _EnteredManager:
    """One `with pm:`.

    Attributes:
      manager: The entered manager.
      key: The manager's key in JAX's caches.
      mesh: The entered context of the manager's mesh, or None.
      task: The asyncio task that entered the manager, or None.
      outer: The former value of the context variable. None after this `with pm:` has ended;
        otherwise tasks that create tasks would keep all earlier entries alive.
      is_left: Whether this `with pm:` has ended.
    """

    manager: Any
    key: Key
    mesh: Any
    task: Any
    outer: _EnteredManager | None
    is_left: bool = False


class _Thread(threading.local):
    """The entries of this thread, innermost last.

    `below` is the user-context of the first entry. Its exit restores the value before this entry.
    """

    def __init__(self) -> None:
        self.stack: list[_EnteredManager] = []
        self.below: Any = None


_AMBIENT = jax.make_user_context(default_value=Key(None))
_FLOW: contextvars.ContextVar[_EnteredManager | None] = contextvars.ContextVar(
    "shardwright_manager", default=None
)
_ENTERED = _Thread()


def enter(manager: Any, mesh: Any, key: Key) -> None:
    """Make a manager ambient. Make its mesh ambient too, except in a trace."""
    thread, task = _ENTERED, _current_task()
    if task is not None:
        # Another task may run in this thread before the manager is left. With a new key object, JAX
        # has to call `__eq__`, which checks the manager that applies.
        key = key.fresh()
    # Enter both contexts by hand, because an ExitStack takes longer than the two together.
    ambient = _AMBIENT(key)
    ambient.__enter__()
    try:
        within = None if mesh is None else _jax.enter_mesh(mesh)
    except BaseException:
        ambient.__exit__(None, None, None)
        raise
    # Tasks leave in any order, so contexts are not unwound one by one: `_undo` enters the key of
    # the last entry that remains, and exits only this first context.
    if not thread.stack:
        thread.below = ambient
    entry = _EnteredManager(manager, key, within, task, _FLOW.get())
    thread.stack.append(entry)
    _FLOW.set(entry)


def leave(manager: Any) -> None:
    """Undo `enter` of a manager, and every later `enter` that was not undone.

    The managers of other running tasks stay entered.

    Raises:
      NoManagerError: Another manager was entered after this one, or this one was never entered. If
        this one was entered, it is left anyway.
    """
    stack, entry = _ENTERED.stack, _FLOW.get()
    if stack and stack[-1] is entry and entry.manager is manager:
        _undo(entry)
        return
    # The context variable may hold an entry of another thread, because `asyncio.to_thread` copies
    # the context. Then the last entry of this manager in this thread is the one to leave.
    if entry is None or entry.manager is not manager or entry not in stack:
        own = (each for each in reversed(stack) if not _is_of_another_task(each))
        entry = next((each for each in own if each.manager is manager), None)
    if entry is None:
        fix = "leave managers in the reverse order, in the thread that entered them"
        raise NoManagerError(f"{manager!r} is not entered in this thread", fix=fix)
    later = [each for each in stack[stack.index(entry) + 1 :] if not _is_of_another_task(each)]
    for each in (*reversed(later), entry):
        _undo(each)
    if later:
        what = f"{manager!r} is not the manager that this thread entered last, which is "
        what += f"{later[-1].manager!r}; this manager and all that were entered after it are left "
        fix = "leave managers in the reverse order; do not yield inside `with pm:`, "
        raise NoManagerError(f"{what}now", fix=f"{fix}but call the methods of the manager")


def _undo(entry: _EnteredManager) -> None:
    stack = _ENTERED.stack
    if _FLOW.get() is entry:
        _FLOW.set(entry.outer)
    entry.is_left, entry.outer = True, None
    if stack[-1] is not entry:
        # The innermost entry still applies, so the ambient mesh and the key stay as they are. Of
        # the entries above this one, the first with a mesh takes over the mesh context of this
        # entry. So when that entry ends, it restores the mesh that was ambient before this entry.
        position = stack.index(entry)
        above = next((other for other in stack[position + 1 :] if other.mesh is not None), None)
        if above is not None and entry.mesh is not None:
            above.mesh, entry.mesh = entry.mesh, None
        del stack[position]
        return
    stack.pop()
    try:
        if entry.mesh is not None:
            entry.mesh.__exit__(None, None, None)
    finally:
        if stack:
            _AMBIENT(stack[-1].key).__enter__()
        else:
            _ENTERED.below.__exit__(None, None, None)


def take_back() -> Any:
    """Leave the manager that was entered last in this thread, and return it."""
    entry = _ENTERED.stack[-1]
    _undo(entry)
    return entry.manager


def depth() -> int:
    """Return the number of managers that this thread has entered and not left."""
    return len(_ENTERED.stack)


def _current_task() -> Any:
    # `asyncio.current_task` raises an error if no loop runs in this thread.
    return None if asyncio._get_running_loop() is None else asyncio.current_task()


def _is_of_another_task(entry: _EnteredManager) -> bool:
    """Tell whether the task that made an entry is another task, and still runs.

    If a task ends and has not left its manager, the manager stays in force for the thread. This
    rule is for notebooks, whose cells are tasks.
    """
    task = entry.task
    return task is not None and task is not _current_task() and not task.done()


def _applying() -> _EnteredManager | NoManagerError | None:
    """Return the entry that applies here, None if there is none, or why it is refused."""
    stack, flow = _ENTERED.stack, _FLOW.get()
    if flow is not None and flow.is_left:
        return NoManagerError(
            f"this code was started inside the with block of {flow.manager!r}, and runs after the "
            "block has ended",
            fix="enter the manager here, with pm: ..., or wait for this code inside the with block",
        )
    others = (entry for entry in reversed(stack) if entry is flow or not _is_of_another_task(entry))
    last = next(others, None)
    if flow is None:
        # The manager was entered outside of this context, for instance in an earlier cell of a
        # notebook. It applies, unless a task that still runs has entered another one after it.
        if not stack or last is stack[-1]:
            return last
        return NoManagerError(
            f"the ambient manager is {stack[-1].manager!r}, entered by another task of this "
            "thread, which has not left it",
            fix="enter the manager around the call, with pm: ..., without an await inside",
        )
    if last is None or last.manager is flow.manager:
        return flow  # without `last`, the manager was entered in the thread that started this one
    return NoManagerError(
        f"the ambient manager is {last.manager!r}, entered elsewhere in this thread; "
        f"{flow.manager!r} was entered here",
        fix="leave managers where they were entered, or enter the right one here: with pm: ...",
    )


def current() -> Any:
    """Return the manager that applies here, or None.

    Raises:
      NoManagerError: Another running task has entered a manager, or this code was started inside a
        `with pm:` that has ended. Or, inside a trace, the key in JAX's caches is that of another
        manager.
    """
    entry, key = _FLOW.get(), _AMBIENT.value
    # Search only if JAX does not have the key of this context's entry, which is rare.
    if entry is None or entry.key is not key or entry.is_left:
        found = _applying()
        if isinstance(found, NoManagerError):
            raise found
        # Outside of a trace, JAX caches no program that reads the manager, so a wrong key is
        # harmless.
        if found is not None and found.key.values != key.values and _jax.in_trace():
            other = f"; they know {key}, entered by another task" if key.values is not None else ""
            what = "JAX's caches in this thread do not know the ambient manager, "
            fix = "enter it again around the call of the jitted function, "
            fix += "with sw.current_manager(): ..., without an await inside"
            raise NoManagerError(f"{what}{found.manager!r}{other}", fix=fix)
        entry = found
    if entry is None:
        if not key.asked and _jax.in_trace():
            key.asked = True
            # The program that is being traced depends on the absence of a manager. It must not run
            # where a manager applies, so every thread without one gets a fresh key, under which
            # nothing is cached. JAX then compares the keys before it runs this program again.
            fresh = key.fresh()
            _AMBIENT.set_global(fresh)
            if _AMBIENT.value is not fresh:  # the user-context of this thread has its own value
                _AMBIENT(fresh).__enter__()
        return None
    if (entry.task is not None or not key.asked) and _jax.in_trace():
        key.asked = True
        # The program that is being traced is cached under the old key. The next lookup uses the
        # fresh key, so it must call `__eq__`, which checks the manager that applies.
        last = _ENTERED.stack[-1]
        if last.task is not None:
            last.key = key.fresh()
            _AMBIENT(last.key).__enter__()
    return entry.manager


def require(what: str, *, method: bool = True) -> Any:
    """Return the manager that applies here.

    Raises:
      NoManagerError: No manager applies here, or it is refused; see `current`.
    """
    manager = current()
    if manager is None:
        fix = "enter a manager, with pm: ... (each thread enters its own)"
        fix += f", or call pm.{what}(...)" if method else ""
        what += " needs a PartitionManager, and none is entered in this thread"
        raise NoManagerError(what, fix=fix)
    return manager


def platform_of(mesh: Mesh | AbstractMesh | None) -> str:
    """Return "cpu", "gpu" or "tpu": the target of a plan, else the platform of a mesh's devices, or
    of JAX's default backend if there are none.
    """
    target: str | None = TARGET.value
    if target is not None:
        return target
    name = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else str(name)
