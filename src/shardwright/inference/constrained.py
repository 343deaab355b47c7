"""`constrained`: a forward function with `shard` applied to the intermediates that have names."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import AxisType

from shardwright import _jax
from shardwright.errors import ShardingError, StrategyError, raise_problems
from shardwright.inference.constraints import RESHARD, Constraint, numbered, operations
from shardwright.inference.control import CALLS, REMATS, rebuilds
from shardwright.inference.inferred import Inferred
from shardwright.manager.ambient import current_manager, shard
from shardwright.manager.manager import PartitionManager
from shardwright.vocabulary.shown import WIDTH, text_of

_EquationPath = tuple[int, ...]
_ConstraintsByEquation = Mapping[_EquationPath, Constraint]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Constrained:
    """A forward function with constraints, which `print` lists. A call needs an ambient manager.

    Attributes:
      forward: The function without constraints.
      inferred: The result of inference, which has the constraints.
    """

    forward: Callable[..., Any]
    inferred: Inferred

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Return `forward(params, *inputs)`, with its intermediates sharded by the ambient manager.

        Inputs may be passed by name too, if `forward` can also take them by position.

        Leaves of `params` that inference left out, such as the functions in a model of equinox,
        stay as they are.

        Raises:
          StrategyError: The program is not the one that inference traced, `forward` takes an
            argument by name only, or axes of the mesh are Explicit.
          ShardingError: An intermediate does not fit the rules or the mesh.
        """
        # Explicit shardings are part of types, so a constraint would change the type of a value.
        # But a traced program keeps the types of its trace in its constants, and in custom
        # derivatives such as that of `jax.nn.relu`.
        if AxisType.Explicit in current_manager().mesh.axis_types:
            raise StrategyError(
                "constrained needs Auto mesh axes, and the mesh has Explicit ones",
                fix='create the mesh with axis_types="auto", or call sw.shard in the model',
            )
        params, *others = _positional(self.forward, arguments, named)
        inputs = tuple(others)
        leaves, tree = jax.tree.flatten((params, inputs))
        is_array = _are_arrays(params, len(leaves), self.inferred)
        arrays = list(itertools.compress(leaves, is_array))

        def run(*arrays: Any) -> Any:
            remaining = iter(arrays)
            whole = [
                next(remaining) if each else leaf
                for leaf, each in zip(leaves, is_array, strict=True)
            ]
            params, inputs = jax.tree.unflatten(tree, whole)
            return self.forward(params, *inputs)

        # Trace in each call, because the place of a constraint is an index into this trace.
        closed, result = jax.make_jaxpr(run, return_shape=True)(*arrays)
        _compare(tuple(operations(closed.jaxpr)), self.inferred.program)
        constraints = {each.place: each for each in self.inferred.constraints}
        outputs = _evaluate(closed.jaxpr, closed.consts, arrays, constraints)
        return jax.tree.unflatten(jax.tree.structure(result), outputs)

    def __str__(self) -> str:
        return text_of(self)

    def explain(self, pm: PartitionManager, *, width: int = WIDTH) -> str:
        """Return one line per constraint, with the spec that the manager resolves for it.

        Raises:
          ShardingError: An intermediate does not fit the rules or the mesh.
        """
        rows = []
        for each in self.inferred.constraints:
            with _explained(each):
                rows.append((each, pm.resolve(*each.axes, shape=each.shape)))
        return text_of(self, specs=rows, width=width)


def constrained(forward: Callable[..., Any], inferred: Inferred) -> Constrained:
    """Return a forward function that shards the intermediates named by inference.

    The source of the model stays as it is. Each call traces `forward`, and passes these
    intermediates to `shard`: residual streams, heads, hidden dims of an MLP, and logits.
    An intermediate gets no constraint if a dim has no name or a guessed name. Fused projections get
    none, and neither do values inside `while`, `cond`, `shard_map` and functions with custom
    derivatives.

    Args:
      forward: The function that was passed to `infer_axes`.
      inferred: What `infer_axes` returns for `forward`. The arrays of a call must have the ranks of
        the arrays that were passed to `infer_axes`.

    Raises:
      StrategyError: Two operations name one dim differently, or no intermediate gets a constraint.

    >>> import shardwright as sw
    >>> def forward(params, tokens):
    ...     return params["table"][tokens] @ params["table"].T
    >>> params = {"table": jax.ShapeDtypeStruct((512, 64), "float32")}
    >>> tokens = jax.ShapeDtypeStruct((2, 16), "int32")
    >>> inferred = sw.infer_axes(forward, params, tokens, seeds=[(sw.BATCH, sw.LENGTH)])
    >>> [each.kind for each in sw.constrained(forward, inferred).inferred.constraints]
    ['residual stream', 'logits']
    """
    if not isinstance(inferred, Inferred):
        raise StrategyError(
            f"inferred is {type(inferred).__name__}, not the result of infer_axes",
            fix="write constrained(forward, infer_axes(forward, params, *inputs, seeds=...))",
        )
    raise_problems([conflict.problem() for conflict in inferred.conflicts])
    if not inferred.constraints:
        reasons = [f"{count} with {why}" for why, count in inferred.unconstrained.items()]
        raise StrategyError(
            f"no intermediate gets a constraint: {', '.join(reasons) or 'there are none'}",
            fix="name the batch in the seed of every input, and name open dims and guesses with "
            "sizes=",
        )
    return Constrained(forward=forward, inferred=inferred)


def _compare(program: Sequence[str], inferred: Sequence[str]) -> None:
    """Refuse a program that has other operations than the program that inference traced.

    The place of a constraint is the index of an equation. In another program, the equation with
    this index makes another intermediate.
    """
    pairs = enumerate(itertools.zip_longest(program, inferred, fillvalue="nothing"))
    for at, (here, there) in pairs:
        if here != there:
            raise StrategyError(
                "the program differs from the one that was inferred: its operation "
                f"{at} is {here}, and was {there}",
                fix="call infer_axes with this function, and with arrays of the shapes and dtypes "
                "of this call",
            )


def _positional(
    forward: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]
) -> Sequence[Any]:
    """Return all arguments of a call by position."""
    if not named:
        return arguments
    bound = inspect.signature(forward).bind(*arguments, **named)
    if bound.kwargs:
        raise StrategyError(
            f"the function takes {', '.join(bound.kwargs)} by name only",
            fix="pass a function of positional arguments to infer_axes and constrained",
        )
    return bound.args


def _are_arrays(params: Any, leaves: int, inferred: Inferred) -> list[bool]:
    """Tell for each leaf of parameters and inputs whether it is an array. Only arrays are traced.

    The annotation of a leaf that is not an array is None, as `interop.equinox.infer` returns it.
    """
    tree: Any = jax.tree.structure(params)
    try:
        own = [entry is not None for entry in tree.flatten_up_to(inferred.annotations)]
    # `params` has the same arrays in a tree of another structure, such as one without functions.
    except ValueError:
        own = [True] * tree.num_leaves
    return [*own, *[True] * (leaves - len(own))]


@contextlib.contextmanager
def _explained(constraint: Constraint) -> Iterator[None]:
    """Add a note that names the constraint to an error of `shard`."""
    try:
        yield
    except ShardingError as error:
        error.add_note(f"constrained: {constraint}")
        raise


def _evaluate(
    jaxpr: Any,
    constants: Sequence[Any],
    arguments: Sequence[Any],
    constraints: _ConstraintsByEquation,
) -> list[Any]:
    """Evaluate a jaxpr, and shard the results that have a constraint."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    known |= zip(jaxpr.invars, arguments, strict=True)

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, core.Literal) else known[variable]

    inside: dict[int, dict[_EquationPath, Constraint]] = {}
    for place, constraint in constraints.items():
        inside.setdefault(place[0], {})[place[1:]] = constraint
    for at, equation in numbered(jaxpr):
        values = [read(variable) for variable in equation.invars]
        # A `reshard` has the same index as the equation after it (see `numbered`). The constraint
        # of this index is not for the `reshard`.
        own = {} if equation.primitive.name == RESHARD else inside.get(at, {})
        # The key () is the result of the equation itself. Longer keys are places in its jaxpr.
        if own and () not in own:
            results = _rebuilt(equation, values, own)
        else:
            results = _jax.evaluate(equation, values)
        if () in own:
            with _explained(own[()]):
                results = [shard(results[0], *own[()].axes)]
        known.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _rebuilt(
    equation: Any, values: Sequence[Any], constraints: _ConstraintsByEquation
) -> list[Any]:
    """Evaluate a loop or a call with constraints inside."""
    parameters, name = equation.params, equation.primitive.name
    if name == "scan":
        return _scan(parameters, values, constraints)
    assert rebuilds(equation), name
    # The parameter of `closed_call` is named call_jaxpr; that of jit and of remat is named jaxpr.
    inner = next(parameters[key] for key in ("jaxpr", "call_jaxpr") if key in parameters)
    body, constants = _opened(inner)

    def run(*arguments: Any) -> list[Any]:
        return _evaluate(body, constants, arguments, constraints)

    if name in REMATS:
        kept = {"prevent_cse": parameters["prevent_cse"], "policy": parameters["policy"]}
        remat: Callable[..., list[Any]] = jax.checkpoint(run, **kept)
        return remat(*values)
    assert name in CALLS
    return run(*values)


def _opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Return an open jaxpr and its constants."""
    is_closed = isinstance(jaxpr, core.ClosedJaxpr)
    return (jaxpr.jaxpr, jaxpr.consts) if is_closed else (jaxpr, ())


def _scan(parameters: Any, values: Sequence[Any], constraints: _ConstraintsByEquation) -> list[Any]:
    fixed, carries, _ = _jax.scan_parts(parameters)
    body, constants = _opened(parameters["jaxpr"])
    shared, starts, rows = (
        tuple(values[start:end])
        for start, end in itertools.pairwise((0, fixed, fixed + carries, len(values)))
    )

    def step(carry: Sequence[Any], row: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
        ends = _evaluate(body, constants, [*shared, *carry, *row], constraints)
        return tuple(ends[:carries]), ends[carries:]

    # Pass the length too: a scan without scanned arrays cannot read the length from an array.
    options = {key: parameters[key] for key in ("length", "reverse", "unroll")}
    ends, stacked = jax.lax.scan(step, starts, rows, **options)
    return [*ends, *stacked]
