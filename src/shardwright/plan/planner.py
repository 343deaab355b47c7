"""Plan what a function sends and computes under a manager, without running the function."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final

import jax
from jax.sharding import NamedSharding

from shardwright.errors import Problem, StrategyError, raise_problems
from shardwright.manager.core import Manager
from shardwright.mesh.build import mesh_sizes
from shardwright.plan.attention_calls import AttentionCalls
from shardwright.plan.fit import Verdict, judge
from shardwright.plan.hardware import Topology, parse_topology, read_hardware
from shardwright.plan.layout import Layout, lay_out
from shardwright.plan.renaming import Renaming
from shardwright.plan.state import (
    ROLES,
    Category,
    CountedArray,
    StateBytes,
    count_state,
    read_holds,
)
from shardwright.plan.time import TimeRange, estimate_time
from shardwright.plan.trace import Trace, check_outputs, read_inputs, trace, walk
from shardwright.plan.walk.entries import Peak
from shardwright.plan.walk.events import CompilerChoice, Event, Walked
from shardwright.plan.walk.ledger import LAYOUT_FIXES
from shardwright.plan.weights import arguments_as_weights
from shardwright.resolution.partition_specs import entry_names
from shardwright.resolution.request import ShardingRequest
from shardwright.trees.paths import path_text
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.shown import WIDTH, data_of, text_of

_NAMED: Final = 3  # largest number of arrays that an error names
# How to annotate an argument, by its category.
_ANNOTATE: Final = {
    Category.OPTIMIZER: "annotate it in specs= with sw.annotate_state(state, specs)",
    Category.CACHE: "annotate it in specs= with cache.axes(), where cache is "
    "jax.eval_shape(lambda: caches.init(...))",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A function to plan, and its arguments as shapes.

    The function that a user names to the command `shardwright plan` returns such values.

    Attributes:
      function: The function that you would pass to `jax.jit`.
      shapes: Per argument, a tree of arrays or ShapeDtypeStructs.
      specs: Per argument, a tree of annotations, or None. Defaults to None for all.
      outputs: Annotations of the outputs. Defaults to the shardings that the program gives them.
        An output has the role of the arguments with the same annotation and shape.
      holds: Per argument, `parameters`, `optimizer`, `cache`, `inputs`, or a tree of these; a name
        covers a subtree. By default, arrays annotated as weights are parameters, and all others are
        inputs.
      donated: Positions of the arguments whose memory the program may overwrite.
      any_mesh: Whether the function itself reads no names or sizes of mesh axes. If so, only this
        library reads them, and a search shares traces between meshes.
    """

    function: Callable[..., Any]
    shapes: tuple[Any, ...]
    specs: Any = None
    outputs: Any = None
    holds: Any = None
    donated: tuple[int, ...] = ()
    any_mesh: bool = False

    def __post_init__(self) -> None:
        """Check the shapes, and make negative positions of donated arguments positive."""
        if not isinstance(self.shapes, tuple):
            raise StrategyError(
                f"shapes is a {type(self.shapes).__name__}, not a tuple with an entry per argument",
                fix="write (x,) for a single argument x",
            )
        object.__setattr__(self, "donated", _positions(self.donated, len(self.shapes)))


def _positions(donated: Any, arguments: int) -> tuple[int, ...]:
    """Return the positions of donated arguments.

    As in `jax.jit`, `donated` may be one int, and a position may be negative.

    Raises:
      StrategyError: A position is not an integer, or there is no such argument.
    """
    positions = donated if isinstance(donated, (tuple, list)) else (donated,)
    for at in positions:
        # `isinstance` would take True for the position 1.
        if type(at) is not int or not -arguments <= at < arguments:
            raise StrategyError(
                f"donated has {at!r}, but the positions of the arguments are 0 to {arguments - 1}"
                if arguments
                else f"donated has {at!r}, but there are no arguments",
                fix="donate positions of arguments, as in donated=(0,)",
            )
    return tuple(at % arguments for at in positions)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The plan of a program: its collectives, operations and memory, and where it is unsure.

    Attributes:
      walked: Collectives, operations and memory of the traced program.
      strategy: Name of the strategy.
      mesh: The mesh as text, `fsdp:2,tp:4`.
      state: Bytes of the arguments. If an argument is optimizer state, also those of the gradients.
      layout: Assignment of the mesh axes to a slice, or None if no slice was given.
      attention: The calls of attention, and the implementation that each takes.
      time: The time of one run on the slice, as a range; None if no slice was given.
    """

    walked: Walked
    strategy: str
    mesh: str
    state: StateBytes
    layout: Layout | None = None
    attention: tuple[AttentionCalls, ...] = ()
    time: TimeRange | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # Estimate the time once: a search reads it dozens of times per candidate, to compare plans.
        time = None
        if self.layout is not None:
            held = self.state.of().per_device
            time = estimate_time(self.walked, self.layout, state_bytes=held)
        object.__setattr__(self, "time", time)

    @property
    def events(self) -> tuple[Event, ...]:
        """Collectives, in program order."""
        return self.walked.events

    @property
    def memory(self) -> Peak:
        """The most bytes in memory at one time on one device, as a range."""
        peak = self.walked.memory
        workspace = 0 if self.layout is None else self.layout.topology.chip.workspace
        if not workspace or not self.walked.flops:
            return peak
        # If the program calls cuBLAS, XLA allocates a workspace for it in the program's memory
        # pool.
        kinds = {**peak.kinds, "workspace of cuBLAS": workspace}
        return dataclasses.replace(peak, high=peak.high + workspace, kinds=kinds)

    @property
    def verdict(self) -> Verdict | None:
        """Whether the program fits into the memory of its chips; None if no slice was given."""
        if self.layout is None:
            return None
        usable = self.layout.topology.chip.hbm_bytes
        host = self.layout.topology.chip.host_bytes
        return judge(self.memory, usable, complete=self.walked.complete, host=host)

    @property
    def sent_bytes(self) -> int:
        """Bytes that one device sends in all runs of all collectives, if each runs on a ring."""
        return sum(event.total_wire_bytes for event in self.events)

    @property
    def slice_bytes(self) -> int:
        """Bytes that one device sends to other slices in all runs; 0 if there is one slice."""
        if self.layout is None:
            return 0
        between = self.layout.bytes_between_slices
        return sum(
            each.runs * between(each.kind, each.mesh_axes, each.logical_bytes)
            for each in self.events
        )

    @property
    def host_bytes(self) -> int:
        """Bytes that move between one device and the memory of its host in all runs."""
        return self.walked.work.host_bytes

    def by_axis(self) -> dict[str, int]:
        """Return the bytes that one device sends because of each semantic axis.

        If several axes cause a collective, its bytes count for each of these axes. The key "" is
        for collectives that only specs written by hand cause.
        """
        sent: Counter[str] = Counter()
        for event in self.events:
            for axis in event.axes or ("",):
                sent[axis] += event.total_wire_bytes
        return dict(sent)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return data_of(self)

    def text(self, *, rows: int | None = None, width: int = WIDTH) -> str:
        """Return the plan as text: state, memory, collectives, time, and where it is unsure.

        Args:
          rows: Largest number of collectives that are shown, and of rules that replicate state.
            Defaults to all collectives and five rules.
          width: Characters per line.
        """
        return text_of(self, rows=rows, width=width)

    def __str__(self) -> str:
        return text_of(self)


def host_too_small(report: PlanReport) -> bool:
    """Tell whether the memory of the host is known, and smaller than the program needs."""
    host = 0 if report.layout is None else report.layout.topology.chip.host_bytes
    return bool(host) and report.memory.host > host


def plan(
    manager: Manager,
    function: Callable[..., Any],
    *shapes: Any,
    specs: Any = None,
    outputs: Any = None,
    holds: Any = None,
    donated: Any = (),
    topology: str | Topology | None = None,
) -> PlanReport:
    """Return what a function sends and computes. See `PartitionManager.plan`."""
    if isinstance(topology, str):
        topology = parse_topology(topology, read_hardware())
    elif topology is not None and not isinstance(topology, Topology):
        raise StrategyError(
            f"topology has the type {type(topology).__name__}",
            fix='write the topology as text, "v5e:2x4"',
        )
    layout = None if topology is None else lay_out(topology, mesh_sizes(manager.mesh))
    program = Program(function, shapes, specs, outputs, holds, donated)
    traced = trace_program(manager, program, topology)
    return price(manager, traced, program, layout=layout)


def trace_program(
    manager: Manager,
    program: Program,
    topology: Topology | None = None,
    *,
    platform: str | None = None,
) -> Trace:
    """Trace a program. `Trace.fits` tells which managers the trace can be planned under.

    Args:
      manager: Strategy, mesh and mode.
      program: The program to trace.
      topology: The slice that it runs on, or None.
      platform: The platform whose kernels it calls. Defaults to the platform of the slice, else of
        the mesh.

    Raises:
      ShardingError: An annotation does not resolve.
    """
    return trace(
        manager,
        program.function,
        program.shapes,
        specs=program.specs,
        outputs=program.outputs,
        roles=_roles(program),
        platform=platform or (None if topology is None else topology.platform),
    )


def read_arguments(
    manager: Manager, program: Program
) -> tuple[ShardingRequest | NamedSharding | None, ...]:
    """Return, for each array of the arguments, its annotation, its sharding or None.

    No trace is needed.
    """
    return read_inputs(manager, program.shapes, program.specs, _roles(program))


def _roles(program: Program) -> list[Role | None]:
    """Return the role of each array of the arguments, or None where its annotation decides."""
    # A moment of an optimizer has the annotation of its parameter. Only the category of the moment
    # shows that `zero1` applies.
    categories = read_holds(program.shapes, program.holds)
    return [None if category is None else ROLES[category] for category in categories]


def price(
    manager: Manager,
    traced: Trace,
    program: Program,
    *,
    layout: Layout | None = None,
    renaming: Renaming = MappingProxyType({}),
) -> PlanReport:
    """Return the plan of a traced program under a manager.

    Args:
      manager: Strategy, mesh and mode.
      traced: Trace of the program. It must fit the manager (`traced.fits(manager)`).
      program: The program that was traced.
      layout: Assignment of the mesh axes to a slice. Without it, the report has no times.
      renaming: Mesh axis in the trace -> the mesh axes that replace it, from
        `traced.renaming(manager)`.

    Raises:
      ShardingError: An annotation does not resolve.
    """
    shapes = program.shapes
    # Check outputs before the walk: if an output may have several roles, the walk uses the first.
    check_outputs(traced, manager)
    _check_weights(manager, traced, program)
    state = program_state(manager, traced, program)
    walked = walk(
        traced,
        manager,
        # `state.leaves` has the arguments, then gradients, which are no inputs of the trace.
        kinds=[str(leaf.category) for leaf in state.leaves[: len(traced.inputs)]],
        donated=[
            at in program.donated for at, tree in enumerate(shapes) for _ in jax.tree.leaves(tree)
        ],
        renaming=renaming,
    )
    walked = dataclasses.replace(walked, choices=_with_gather(walked.choices, manager, state))
    mesh = ",".join(f"{axis}:{size}" for axis, size in manager.mesh.shape.items())
    return PlanReport(
        walked=walked,
        strategy=manager.name,
        mesh=mesh,
        state=state,
        layout=layout,
        attention=traced.attention_calls,
    )


def _check_weights(manager: Manager, traced: Trace, program: Program) -> None:
    """Refuse arguments that are annotated like inputs but used as weights inside the program.

    The plan would shard such an argument by the rules of activations. The program uses it as a
    weight, stored by the rules of weights. So the plan would have other collectives.

    Raises:
      StrategyError: There are such arguments, and `holds` does not say what they are.
    """
    categories = read_holds(program.shapes, program.holds)
    leaves, _ = jax.tree_util.tree_flatten_with_path(program.shapes)
    differing: dict[int, list[str]] = {}
    for weight in arguments_as_weights(traced.jaxpr):
        given = traced.inputs[weight.argument]
        if not isinstance(given, ShardingRequest) or categories[weight.argument] is not None:
            continue
        own, stored = manager.answer(given), manager.answer(weight.request)
        if own.role is not Role.ACTIVATION or not (own.ok and stored.ok):
            continue
        if [each.mesh_axes for each in own.decisions[weight.cut :]] != [
            each.mesh_axes for each in stored.decisions
        ]:
            path = leaves[weight.argument][0]
            named = path_text(path[1:]) or "the argument itself"
            differing.setdefault(path[0].idx, []).append(f"{named} at {weight.source}")
    held = [
        Category.PARAMETERS if at in differing else Category.INPUTS
        for at in range(len(program.shapes))
    ]
    fix = f"write holds={tuple(map(str, held))}, or pass ArraySpecs in specs=".replace("'", '"')
    problems = []
    for argument, arrays in differing.items():
        more = f" and {len(arrays) - _NAMED} more" if len(arrays) > _NAMED else ""
        what = f"argument {argument} is annotated like an input, but the program uses it as a "
        what += f"weight, which has another sharding: {', '.join(arrays[:_NAMED])}{more}"
        problems.append(Problem(error=StrategyError, what=what, fix=fix))
    raise_problems(problems)


def _with_gather(
    choices: Sequence[CompilerChoice], manager: Manager, state: StateBytes
) -> tuple[CompilerChoice, ...]:
    """Return choices, with a fix that names `gather` where a weight may compete for a mesh axis.

    If a program does not gather a weight that the policy would gather, the weight is still sharded
    over the mesh axes of `policy.gather` in its matmul.
    """
    stored = {
        axis
        for leaf in state.leaves
        if leaf.category is Category.PARAMETERS and leaf.bytes.spec is not None
        for entry in leaf.bytes.spec
        for axis in entry_names(entry)
    }
    # Take only the axes of `policy.gather`. Weights keep other axes, such as tp, in matmuls on
    # purpose.
    gathered = stored.intersection(manager.rules.policy.gather)
    return tuple(
        dataclasses.replace(
            choice,
            fix=f"gather the weight before use, sw.gather(params, specs): weights are stored over "
            f"{choice.mesh_axis}; if no operand is a weight, {choice.fix}",
        )
        if choice.mesh_axis in gathered and choice.fix not in LAYOUT_FIXES
        else choice
        for choice in choices
    )


def program_state(manager: Manager, traced: Trace, program: Program) -> StateBytes:
    """Return the bytes of the arguments of a traced program under a manager, without a walk.

    Raises:
      ShardingError: An annotation does not resolve.
    """
    categories = read_holds(program.shapes, program.holds)
    return count_state(manager, _counted_arrays(program.shapes, traced, categories))


def _counted_arrays(
    shapes: tuple[Any, ...], traced: Trace, categories: Sequence[Category | None]
) -> list[CountedArray]:
    """Return the arrays of the arguments in the form that `count_state` needs."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(shapes)
    arrays: list[CountedArray] = []
    bare: dict[tuple[int, Category], list[str]] = {}
    for (path, leaf), source, category in zip(leaves, traced.inputs, categories, strict=True):
        value = leaf if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else jax.typeof(leaf)
        # The first key is the position of the argument, so leave it out of the path.
        array = CountedArray(
            path=path_text(path[1:]), value=value, source=source, category=category
        )
        arrays.append(array)
        # A scalar, such as the step of an optimizer, is replicated without an annotation.
        if source is None and category not in (None, Category.INPUTS) and value.shape:
            bare.setdefault((path[0].idx, category), []).append(array.path)
    problems = []
    for (argument, held), paths in bare.items():
        count = "an array has" if len(paths) == 1 else f"{len(paths)} arrays have"
        shown = ", ".join(path or "the argument itself" for path in paths[:_NAMED])
        more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
        what = f"argument {argument} holds {held}, but {count} neither an annotation nor a sharding"
        fix = f'{_ANNOTATE.get(held, "annotate it in specs=")}, or write "inputs" for it in holds='
        problems.append(Problem(error=StrategyError, what=f"{what}: {shown}{more}", fix=fix))
    raise_problems(problems)
    return arrays
