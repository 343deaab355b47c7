"""The only file that knows JAX versions: each difference behind a name that says what is wanted."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh


def is_array(value: object) -> bool:
    """Tell whether a value is one array: a JAX or NumPy array, a tracer, or a number."""
    # A tracer is a jax.Array too, but asking that first takes ten times as long.
    return isinstance(
        value, (jax.core.Tracer, jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    )


# What JAX raises where symbolic sizes of `jax.export` do not say whether something holds.
Inconclusive = jax.errors.InconclusiveDimensionOperation


def is_symbolic(size: Any) -> bool:
    """Tell whether a size is a symbolic one of `jax.export`."""
    from jax import export

    return bool(export.is_symbolic_dim(size))


def in_trace() -> bool:
    """Tell whether some transformation is tracing. `get_mesh` refuses to answer exactly there."""
    try:
        jax.sharding.get_mesh()
    except ValueError:
        return True
    return False


def ambient_mesh() -> AbstractMesh | None:
    """Return the mesh set by `jax.set_mesh`, `use_abstract_mesh` or a surrounding `shard_map`, or
    None.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def concrete_mesh() -> Mesh | None:
    """Return the mesh of `jax.set_mesh` with its devices, inside a trace too, else that of a legacy
    `with mesh:`, or None.

    Both are private: `get_mesh` refuses to answer inside a trace, and nothing public reads a
    `with mesh:` without warning.
    """
    from jax._src import mesh as private

    read: Any = getattr(private, "get_concrete_mesh", lambda: None)
    legacy: Any = getattr(
        getattr(getattr(private, "thread_resources", None), "env", None), "physical_mesh", None
    )
    return next((mesh for mesh in (read(), legacy) if mesh is not None and not mesh.empty), None)


def mesh_at_hand() -> Mesh | AbstractMesh | None:
    """Return the mesh of `jax.set_mesh`, of a surrounding `shard_map` or of a legacy `with mesh:`,
    or None.

    With its devices where they can be known, which is nearly always.
    """
    ambient, concrete = ambient_mesh(), concrete_mesh()
    return (
        concrete
        if concrete is not None and (ambient is None or ambient.shape_tuple == concrete.shape_tuple)
        else ambient
    )


def legacy_meshes() -> tuple[Mesh, ...]:
    """Return the meshes of the legacy `with mesh:` that this thread is in, outermost first;
    private, as in `concrete_mesh`.
    """
    from jax._src import mesh as private

    stack: Any = getattr(getattr(private, "thread_resources", None), "stack", ())
    return tuple(env.physical_mesh for env in stack if not env.physical_mesh.empty)


def enter_mesh(mesh: Mesh | AbstractMesh) -> Any:
    """Make a mesh ambient and return what `__exit__` takes back, or None inside a trace, where a
    mesh cannot change.

    `jax.set_mesh` takes effect when it is called. It refuses inside a trace; to ask it first would
    take longer than the rest.
    """
    if isinstance(mesh, Mesh):
        try:
            return jax.set_mesh(mesh)
        except ValueError:
            if in_trace():
                return None
            raise
    if in_trace():
        return None
    entered = jax.sharding.use_abstract_mesh(mesh)
    entered.__enter__()
    return entered


def varying_axes(value: Any) -> frozenset[str]:
    """Return the Manual mesh axes that a value varies over; all of them where `shard_map` does not
    track it.
    """
    if not tracks_varying():
        mesh = ambient_mesh()
        return frozenset(mesh.manual_axes) if mesh is not None else frozenset()
    return frozenset(jax.typeof(value).manual_axis_type.varying)


def tracks_varying() -> bool:
    """Tell whether `shard_map` tracks which Manual mesh axes a value varies over."""
    # shard_map(check_vma=False) leaves every type without varying axes, and nothing public tells
    # that it does.
    from jax._src import config

    check: Any = getattr(config, "_check_vma", None)
    return True if check is None else bool(check.value)


def vary_together(values: Any) -> Any:
    """Return a tree of arrays that all vary over whichever Manual mesh axes any of them varies
    over.

    A scan's carry, the branches of a `cond` and the cotangents of a `custom_vjp` must have one
    type; and the transpose of this cast is the sum over shards that a replicated operand's gradient
    needs.
    """
    leaves, structure = jax.tree.flatten(values)
    axes = [frozenset(jax.typeof(leaf).manual_axis_type.varying) for leaf in leaves]
    union = frozenset().union(*axes)
    cast = [
        leaf if own == union else jax.lax.pcast(leaf, tuple(sorted(union - own)), to="varying")
        for leaf, own in zip(leaves, axes, strict=True)
    ]
    return jax.tree.unflatten(structure, cast)


def call_shard_map(
    f: Callable[..., Any],
    *,
    mesh: Mesh | AbstractMesh | None,
    in_specs: Any,
    out_specs: Any,
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Return `jax.shard_map` of a function; without a mesh it uses the ambient one, as nested use
    must.
    """
    if mesh is None:
        return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "traced",
    "/jax/core/compile/backend_compile_duration": "compiled",
}


@dataclasses.dataclass(slots=True, kw_only=True)
class Compilations:
    """What JAX traced and compiled in this thread while it was watched, and why, in its own words.

    Attributes:
      traced: names of functions, JAX's own included.
      compiled: names of programs.
      reasons: what JAX says of each function that it traced, but for its own.
      explained: whether it says so at all: who turns JAX's log off turns reasons off.
    """

    traced: list[str] = dataclasses.field(default_factory=list)
    compiled: list[str] = dataclasses.field(default_factory=list)
    reasons: list[str] = dataclasses.field(default_factory=list)
    explained: bool = False


@contextlib.contextmanager
def watch_compilations() -> Iterator[Compilations]:
    """Record every trace and compilation of this thread, and the reasons that JAX gives for them.

    Raises:
      RuntimeError: this JAX does not report what it compiles.
    """
    found, thread, log = Compilations(), threading.get_ident(), logging.getLogger("jax")

    def note(event: str, duration_secs: float, **about: Any) -> None:
        # The names of events are not promised, so entering checks that they come.
        if threading.get_ident() == thread and event in _EVENTS:
            getattr(found, _EVENTS[event]).append(str(about.get("fun_name", "?")))

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "CACHE MISS" in record.getMessage():
                found.reasons.append(record.getMessage())

    handler = Handler()
    jax.monitoring.register_event_duration_secs_listener(note)
    log.addHandler(handler)
    try:
        with jax.explain_cache_misses(True):
            jax.jit(lambda: 0)()
            if not (found.traced and found.compiled):
                raise RuntimeError(
                    "this version of JAX does not report what it traces and compiles"
                )
            found.explained = bool(found.reasons)
            for said in (found.traced, found.compiled, found.reasons):
                said.clear()
            yield found
    finally:
        log.removeHandler(handler)
        jax.monitoring.unregister_event_duration_listener(note)
