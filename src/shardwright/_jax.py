"""Differences between JAX versions. No other module may depend on a version, or use `jax._src`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

T = TypeVar("T")


def is_array(value: object) -> bool:
    """Tell whether a value is one array: a JAX or NumPy array, a tracer, or a number."""
    # A tracer is a jax.Array too. But isinstance(value, jax.Array) takes ten times as long, so
    # jax.core.Tracer comes first.
    return isinstance(
        value, (jax.core.Tracer, jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    )


def is_deleted(tree: Any) -> bool:
    """Tell whether any array of a tree was deleted. A donated array is deleted."""
    # A leaf without `is_deleted`, such as a NumPy array, cannot be deleted. Do not test with
    # isinstance(leaf, jax.Array), which is slow.
    tests = (getattr(leaf, "is_deleted", None) for leaf in jax.tree.leaves(tree))
    return any(test is not None and test() for test in tests)


# JAX raises this if a comparison depends on the value of a symbolic size of `jax.export`.
Inconclusive = jax.errors.InconclusiveDimensionOperation


def is_symbolic(size: Any) -> bool:
    """Tell whether a size is a symbolic dimension of `jax.export`."""
    from jax import export

    return bool(export.is_symbolic_dim(size))


def in_trace() -> bool:
    """Tell whether JAX is tracing a function.

    Inside a trace, and only there, `jax.sharding.get_mesh` raises an error.
    """
    try:
        jax.sharding.get_mesh()
    except ValueError:
        return True
    return False


def ambient_mesh() -> AbstractMesh | None:
    """Return the mesh of `jax.set_mesh`, `use_abstract_mesh` or an enclosing `shard_map`.

    Return None if there is no mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def concrete_mesh() -> Mesh | None:
    """Return the ambient mesh with its devices, or None.

    A mesh of `jax.set_mesh` takes precedence over one of a legacy `with mesh:`. This function works
    inside a trace too. It reads private names of JAX for two reasons: `get_mesh` raises an error
    inside a trace, and every public function that reads a legacy `with mesh:` prints a warning.
    """
    from jax._src import mesh as private

    read: Any = getattr(private, "get_concrete_mesh", lambda: None)
    legacy: Any = getattr(
        getattr(getattr(private, "thread_resources", None), "env", None), "physical_mesh", None
    )
    return next((mesh for mesh in (read(), legacy) if mesh is not None and not mesh.empty), None)


def mesh_at_hand() -> Mesh | AbstractMesh | None:
    """Return the mesh of `jax.set_mesh`, of an enclosing `shard_map` or of a legacy `with mesh:`.

    Return a `Mesh` if JAX knows the devices, else an `AbstractMesh`. Return None if there is no
    mesh.
    """
    ambient, concrete = ambient_mesh(), concrete_mesh()
    return (
        concrete
        if concrete is not None and (ambient is None or ambient.shape_tuple == concrete.shape_tuple)
        else ambient
    )


def legacy_meshes() -> tuple[Mesh, ...]:
    """Return the mesh of every legacy `with mesh:` that this thread has entered, outermost first.

    This function reads private names of JAX, as `concrete_mesh` does.
    """
    from jax._src import mesh as private

    stack: Any = getattr(getattr(private, "thread_resources", None), "stack", ())
    return tuple(env.physical_mesh for env in stack if not env.physical_mesh.empty)


def enter_mesh(mesh: Mesh | AbstractMesh) -> Any:
    """Make a mesh ambient. Return the context manager whose `__exit__` restores the former mesh.

    Return None inside a trace, where the ambient mesh cannot change. For a `Mesh`, the trace is
    detected by the error that `jax.set_mesh` raises, because a call of `in_trace` beforehand would
    take most of the time of this function.
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
    # Enter the mesh only outside of a trace. JAX would also enter it inside a trace, where the mesh
    # of the enclosing jit must stay.
    entered = jax.sharding.use_abstract_mesh(mesh)
    entered.__enter__()
    return entered


def varying_axes(value: Any) -> frozenset[str]:
    """Return the Manual mesh axes that a value varies over.

    If `shard_map` does not track varying mesh axes, return all Manual mesh axes.
    """
    if not tracks_varying():
        mesh = ambient_mesh()
        return frozenset(mesh.manual_axes) if mesh is not None else frozenset()
    return frozenset(jax.typeof(value).manual_axis_type.varying)


def tracks_varying() -> bool:
    """Tell whether `shard_map` tracks which Manual mesh axes a value varies over."""
    # Under shard_map(check_vma=False) no type has varying axes, and no public function returns the
    # value of check_vma.
    from jax._src import config

    check: Any = getattr(config, "_check_vma", None)
    return True if check is None else bool(check.value)


def vary_together(values: Any, *, over: tuple[str, ...] = ()) -> Any:
    """Cast the arrays of a tree so that each varies over the union of their varying mesh axes.

    The carries of a scan, the branches of a `cond` and the cotangents of a `custom_vjp` must have
    equal types. The transpose of this cast is a sum over shards, which the gradient of a replicated
    operand needs.

    Args:
      values: A tree of arrays.
      over: Mesh axes to add to the union.
    """
    union = _varying_of(values).union(over)
    return jax.tree.map(lambda leaf: _vary(leaf, union), values)


def vary_as(values: Any, others: Any) -> Any:
    """Cast the arrays of a tree so that each also varies over the varying mesh axes of `others`."""
    union = _varying_of(others)
    return jax.tree.map(lambda leaf: _vary(leaf, union), values)


def untracked(values: Any) -> Any:
    """Return the arrays of a tree without the varying mesh axes in their types.

    Use this function only inside `shard_map(check_vma=False)`. There, the results of operations
    have no varying mesh axes in their types.
    """

    def drop(leaf: Any) -> Any:
        if not jax.typeof(leaf).manual_axis_type.varying:
            return leaf
        # Under check_vma=False, the result of any operation has no varying axes, so add a dim and
        # remove it. XLA drops both operations.
        return jax.lax.squeeze(jax.lax.expand_dims(leaf, (0,)), (0,))

    return jax.tree.map(drop, values)


def _varying_of(values: Any) -> frozenset[str]:
    types = map(jax.typeof, jax.tree.leaves(values))
    return frozenset().union(*(each.manual_axis_type.varying for each in types))


def _vary(leaf: Any, axes: frozenset[str]) -> Any:
    missing = axes - jax.typeof(leaf).manual_axis_type.varying
    # Sort the axes: the order of a set of strings differs between processes, which must build equal
    # programs.
    return jax.lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf


def call_shard_map(
    f: Callable[..., Any],
    *,
    mesh: Mesh | AbstractMesh | None,
    in_specs: Any,
    out_specs: Any,
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Return `jax.shard_map` of a function.

    If `mesh` is None, use the ambient mesh: a nested `shard_map` accepts no other mesh. If all axes
    of the ambient mesh are Manual already, return the function itself.
    """
    if mesh is None:
        ambient = ambient_mesh()
        if ambient is not None and set(ambient.axis_types) == {AxisType.Manual}:
            return f  # JAX 0.12 refuses a `shard_map` over no mesh axis
        return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "traced",
    "/jax/core/compile/backend_compile_duration": "compiled",
}


@dataclasses.dataclass(slots=True, kw_only=True)
class Compilations:
    """What JAX traced and compiled in this thread inside `watch_compilations`, and why.

    Attributes:
      traced: Names of functions, JAX's own included.
      compiled: Names of programs.
      reasons: The reason that JAX logs for each trace of a function that is not JAX's own.
      explained: Whether JAX logs reasons at all. It logs none if its logger is disabled.
    """

    traced: list[str] = dataclasses.field(default_factory=list)
    compiled: list[str] = dataclasses.field(default_factory=list)
    reasons: list[str] = dataclasses.field(default_factory=list)
    explained: bool = False


@contextlib.contextmanager
def watch_compilations() -> Iterator[Compilations]:
    """Record every trace and compilation of this thread, and the reasons that JAX gives for them.

    Raises:
      RuntimeError: This version of JAX does not report what it traces and compiles.
    """
    watched, thread, log = Compilations(), threading.get_ident(), logging.getLogger("jax")

    def record_event(event: str, duration_secs: float, **details: Any) -> None:
        # JAX does not document the names of events, so the code below checks that they occur.
        if threading.get_ident() == thread and event in _EVENTS:
            getattr(watched, _EVENTS[event]).append(str(details.get("fun_name", "?")))

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            # Leave out misses of the persistent compilation cache: they do not say why JAX traces.
            if "CACHE MISS" in message and not message.startswith("PERSISTENT"):
                watched.reasons.append(message)

    handler = Handler()
    jax.monitoring.register_event_duration_secs_listener(record_event)
    log.addHandler(handler)
    try:
        with jax.explain_cache_misses(True):
            # A new function is always traced and compiled, so each event must occur.
            jax.jit(lambda: 0)()
            if not (watched.traced and watched.compiled):
                raise RuntimeError(
                    "this version of JAX does not report what it traces and compiles"
                )
            watched.explained = bool(watched.reasons)
            for names in (watched.traced, watched.compiled, watched.reasons):
                names.clear()
            yield watched
    finally:
        log.removeHandler(handler)
        jax.monitoring.unregister_event_duration_listener(record_event)


# The folders of JAX and of shardwright. Their lines are not lines of the model.
_NOT_THE_MODEL: tuple[str, ...] = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(jax.__file__ or "").resolve().parent, Path(__file__).resolve().parent)
)
# The folder `interop/hf/model` of shardwright is itself a model, so its lines count.
_REFERENCE_MODEL: str = os.path.join(*_NOT_THE_MODEL[-1:], "interop", "hf", "model", "")
# Files of installed packages and of Python itself.
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3[^/]*/|^<frozen ")


def source_line(equation: Any, *, skip_libraries: bool = False) -> str:
    """Return the line of the model that an equation comes from, as `model.py:12`, or "".

    Args:
      equation: An equation of a jaxpr.
      skip_libraries: Whether to prefer a line outside of installed packages, such as flax.
    """
    return _line_of(equation.source_info.traceback, skip_libraries)


@functools.lru_cache(maxsize=4096)  # a search asks for the lines of one program hundreds of times
def _line_of(stack: Any, skip_libraries: bool) -> str:
    frames = [
        frame for frame in (() if stack is None else stack.frames) if _in_model(frame.file_name)
    ]
    outside = [frame for frame in frames if skip_libraries and not _LIBRARY.search(frame.file_name)]
    for frame in (*outside, *frames):
        return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
    return ""


def is_recomputed(equation: Any) -> bool:
    """Tell whether `jax.checkpoint` added an equation to repeat one of the forward pass."""
    stack = equation.source_info.name_stack.stack
    return any(scope.name == "rematted_computation" for scope in stack)


def raising_line(error: BaseException) -> str:
    """Return the line of the model that an error comes from, as `model.py:12`, or "".

    Only frames between the `except` that caught the error and the `raise` are read.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        # Methods that dataclasses generate are in "<string>".
        if _in_model(frame.filename) and frame.filename != "<string>"
    ]
    outside = [frame for frame in frames if not _LIBRARY.search(frame.filename)]
    for frame in reversed(outside or frames):
        return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return ""


def _in_model(name: str) -> bool:
    return not name.startswith(_NOT_THE_MODEL) or name.startswith(_REFERENCE_MODEL)


def program_lines(frame: Any, *, most: int = 8) -> str:
    """Return the lines of the program that a thread is in, as `step.py:12 < train.py:50`.

    Lines of libraries are left out. If a thread is only in libraries, return their lines.
    """
    files: list[tuple[str, int]] = []
    while frame is not None:
        files.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    own = [
        file
        for file in files
        if not file[0].startswith(_NOT_THE_MODEL) and not _LIBRARY.search(file[0])
    ]
    shown = (own or files)[:most]
    return " < ".join(f"{os.path.basename(name)}:{line}" for name, line in shown)


def is_in(frame: Any, code: Any) -> bool:
    """Tell whether a thread is in a function, given its innermost frame and the function's code."""
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def duplicate_spec_errors() -> tuple[type[Exception], ...]:
    """Return the classes of the errors that JAX raises for a spec that names a mesh axis twice.

    JAX exports no name for them.
    """
    from jax._src import named_sharding

    error: Any = getattr(named_sharding, "DuplicateSpecError", None)
    return () if error is None else (error,)


def is_sharding_type_error(error: BaseException) -> bool:
    """Tell whether JAX refused an operation because of the shardings in its operands' types.

    Types have shardings over Explicit mesh axes only.

    No public module of JAX exports the class of the error, neither in 0.10.2 nor in 0.12.
    """
    return type(error).__name__ == "ShardingTypeError"


def mixes_memories(error: BaseException) -> bool:
    """Tell whether JAX refused to mix operands in host memory with operands in device memory."""
    # JAX raises a plain ValueError, so compare its text. A type such as float32<host>[8] is in the
    # message if the memory of a gradient is wrong.
    text = str(error)
    return isinstance(error, ValueError) and (
        "memory_space of all inputs" in text or "<host>" in text
    )


# An error about shardings that is not a `ShardingTypeError` has this pattern in its message. An
# error that names any other difference between the types of carries or branches does not have it.
_ABOUT_SHARDINGS = re.compile(
    r"shardings?\b|shard_map|\bunreduced\b|\bmesh\b|\bspecs?\b|\[[^]]*@(?!.*so the )", re.DOTALL
)


def refuses_shardings(error: Exception) -> bool:
    """Tell whether JAX refused shardings on a mesh with Explicit axes.

    All other errors are faults that the program has on any mesh.

    Args:
      error: An error that was caught inside a trace, so that its traceback has JAX's own frames.
    """
    if is_sharding_type_error(error):
        return True
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    in_jax = innermost.f_code.co_filename.startswith(_NOT_THE_MODEL[0])
    return in_jax and isinstance(error, refusals()) and bool(_ABOUT_SHARDINGS.search(str(error)))


def refusals() -> tuple[type[Exception], ...]:
    """Return the errors by which JAX refuses a program on a mesh with Explicit axes."""
    from jax._src import core

    types: Any = getattr(core, "ShardingTypeError", ValueError)
    # JAX also raises TypeError for an unequal type of a carry, NotImplementedError for an unknown
    # sharding rule, and AssertionError for a constraint that differs from the type.
    return (types, ValueError, TypeError, NotImplementedError, AssertionError)


@contextlib.contextmanager
def types_without_size_one() -> Iterator[None]:
    """Leave mesh axes of size 1 out of the types of values.

    On a mesh of one device, the types of a program for Explicit axes then do not depend on its
    specs.
    """
    name = "jax_remove_size_one_mesh_axis_from_type"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def shuts_down(frame: Any) -> bool:
    """Tell whether a thread is in `jax.distributed.shutdown`, where it waits for all processes."""
    from jax._src import distributed

    return is_in(frame, distributed.State.shutdown.__code__)


def compiles(frame: Any) -> bool:
    """Tell whether a thread traces, lowers or compiles a program, given its innermost frame.

    No public function tells this of another thread.
    """
    from jax._src import compiler
    from jax._src.interpreters import mlir, partial_eval

    files = {module.__file__ for module in (compiler, mlir, partial_eval)}
    while frame is not None:
        if frame.f_code.co_filename in files:
            return True
        frame = frame.f_back
    return False


def newly_manual_axes(parameters: dict[str, Any]) -> frozenset[str]:
    """Return the mesh axes that a `shard_map` equation makes Manual."""
    return frozenset(parameters.get("newly_manual_axes", parameters.get("manual_axes", ())))


def scan_parts(parameters: dict[str, Any]) -> tuple[int, int, Any]:
    """Return the number of constants, the number of carries and the body of a `scan` equation."""
    body = getattr(parameters["jaxpr"], "jaxpr", parameters["jaxpr"])
    if "num_consts" in parameters:
        return parameters["num_consts"], parameters["num_carry"], body
    # JAX 0.12 has flat trees of the inputs instead of the counts
    constants, carries, _ = parameters["ft_in"].unpack()
    return len(list(constants.vals)), len(list(carries.vals)), body


def without_refs(closed: Any) -> Any:
    """Return a traced program without Refs: its equations take and return the values of the Refs.

    JAX does the same when it lowers a program with Refs. A read becomes a slice or a look-up, a
    write becomes an update, and a loop carries the written values.
    """
    from jax._src import core
    from jax._src.state.discharge import discharge_state

    # A jaxpr has the effects of the jaxprs inside it too, so the outermost one shows all Refs.
    if not any(isinstance(effect, core.InternalMutableArrayEffect) for effect in closed.effects):
        return closed
    return discharge_state(closed)


@dataclasses.dataclass(frozen=True, slots=True)
class CoordinationStore:
    """The keys and values that the processes of `jax.distributed` share.

    The process of rank 0 stores them. No method is a collective. Each method raises a
    `JaxRuntimeError` if the process of rank 0 does not respond.

    Attributes:
      client: JAX's client of the store.
      rank: Index of this process.
    """

    client: Any
    rank: int

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key, and overwrite an older value."""
        self.client.key_value_set_bytes(key, value, allow_overwrite=True)

    def wait(self, key: str, seconds: float) -> bytes | None:
        """Wait until a key is set, and return its value.

        Return None if it is not set after `seconds`.
        """
        try:
            value: bytes = self.client.blocking_key_value_get_bytes(key, max(1, int(seconds * 1e3)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        return value

    def entries(self, folder: str) -> dict[str, bytes]:
        """Return the values below a folder.

        The keys of the result are relative to the folder.
        """
        pairs = self.client.key_value_dir_get_bytes(f"{folder}/")
        return {key.removeprefix(f"{folder}/"): value for key, value in pairs}

    def count(self, key: str, by: int = 1) -> int:
        """Add to a counter, and return its new value."""
        return int(self.client.key_value_increment(key, by))

    def delete(self, key: str) -> None:
        """Delete a key and all keys below it, if there are any."""
        self.client.key_value_delete(key)


def coordination_store() -> CoordinationStore | None:
    """Return the store of `jax.distributed`, or None if `jax.distributed` is not initialized.

    No public function of JAX returns the client. The functions of `multihost_utils` are not
    suitable, because they are collectives, which hang if the processes differ.
    """
    from jax._src import distributed

    client: Any = distributed.global_state.client
    if client is None:
        return None
    return CoordinationStore(client, distributed.global_state.process_id)


def evaluate(equation: Any, values: Any) -> list[Any]:
    """Return the results of an equation of a jaxpr.

    The results keep the source line and the name of the equation. The public
    `jax.extend.core.jaxpr_as_fun` evaluates whole jaxprs only.
    """
    from jax._src import source_info_util

    primitive, info = equation.primitive, equation.source_info
    names = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=names), equation.ctx.manager:
        results = primitive.bind(*values, **primitive.get_bind_params(equation.params))
    return list(results) if primitive.multiple_results else [results]


def kernel_name(equation: Any) -> str:
    """Return the name of the kernel that an equation calls, or "" if it calls none."""
    parameters = equation.params
    if equation.primitive.name == "ffi_call":
        return str(parameters["target_name"])
    if equation.primitive.name != "pallas_call":
        return ""
    return str(parameters.get("name") or parameters["jaxpr"].debug_info.func_name)


def moves_rows_alone() -> bool:
    """Return whether XLA shards the rows that a lookup returns independently of the indices.

    XLA of JAX 0.10 does so. In later versions, XLA shards these rows like the indices, even where
    this needs a full gather.
    """
    return bool(jax.__version_info__ < (0, 11))


def scope(equation: Any) -> str:
    """Return the scopes (`jax.named_scope`) and transformations around an equation as text."""
    return str(equation.source_info.name_stack)


def read_profile(file: Path, read: Callable[[Any], T]) -> T:
    """Return the result of `read`, called with the `jax.profiler.ProfileData` of a file."""
    with warnings.catch_warnings():
        # The first use of `event.stats` warns in JAX 0.12. If warnings are errors, this warning
        # aborts Python.
        warnings.simplefilter("ignore", DeprecationWarning)
        return read(jax.profiler.ProfileData.from_file(str(file)))


def hlo_text(module: bytes) -> str:
    """Return a serialized `HloModuleProto` as the text that `compiled.as_text()` prints.

    No public function of JAX reads such a module.
    """
    from jax._src import lib

    hlo: Any = getattr(lib, "hlo")  # noqa: B009  JAX exports no types for it
    return str(hlo.HloModule.from_serialized_hlo_module_proto(module).to_string())


def whole_hlo_text(compiled: Any) -> str:
    """Return the text of a compiled program with the values of all constants.

    `compiled.as_text()` leaves out the values of constants with more than ten elements.
    """
    from jax._src import lib

    hlo: Any = getattr(lib, "hlo")  # noqa: B009  JAX exports no types for it
    options = hlo.HloPrintOptions()
    options.print_large_constants = True
    (module,) = compiled.runtime_executable().hlo_modules()
    return str(module.to_string(options))
