"""The public call: infer the axes of parameters from one trace."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from shardwright.errors import Problem, StrategyError, raise_problems
from shardwright.inference.atoms import Atom, AtomDims, finest, new_dims
from shardwright.inference.attention import name_attention
from shardwright.inference.constraints import choose, operations
from shardwright.inference.facts import AtomConflict, Facts
from shardwright.inference.given import GivenSizes, read_seeds, read_sizes
from shardwright.inference.inferred import Inferred, InferredDim, NameConflict
from shardwright.inference.kernels import Kernels
from shardwright.inference.names import (
    Names,
    guess_links,
    name_hidden,
    name_residual,
    name_rows,
    name_windows,
)
from shardwright.inference.slices import name_slices
from shardwright.inference.spelling import routers, spell
from shardwright.inference.stacks import (
    guess_chosen,
    guess_scanned,
    matmuls_of_selected,
    name_experts,
    name_layers,
)
from shardwright.inference.step import ArrayFacts
from shardwright.inference.tables import (
    guess_tables,
    name_logits,
    name_other_tables,
    name_tables,
)
from shardwright.inference.walk import FactWalker
from shardwright.resolution.unknown_axes import check_axes
from shardwright.trees.paths import path_text
from shardwright.vocabulary.axes import canonical_axis

_OWN: Final = "pass an axis of your own in own_axes=, such as own_axes=strategy.axes"


def infer_axes(
    forward: Callable[..., Any],
    params: Any,
    *inputs: Any,
    seeds: Sequence[Any],
    sizes: Mapping[int | str, str] | None = None,
    own_axes: Iterable[str] = (),
    kernels: Mapping[str, Callable[..., Any]] | None = None,
    strict: bool = False,
) -> Inferred:
    """Infer the axes of each parameter of `forward(params, *inputs)` from one trace.

    Nothing is computed. Save the text of `toml()` in a file, review the file and commit it.

    Args:
      forward: The model.
      params: Tree of arrays, or of their shapes (`jax.eval_shape`).
      *inputs: The other arguments: trees of arrays or of their shapes.
      seeds: The axes of each array of the inputs, such as `[(BATCH, LENGTH), None]`. None stands
        for an array, or for a dim, about which nothing is known. A dim that flattens several axes
        is `merged((BATCH, 8), (LENGTH, 32))`.
      sizes: Size of a dim -> axis, from the model's config. It names the dims of parameters for
        which inference has no name or only a guess. The key may also be a path as the result prints
        it, with the number of a dim: `{"layers/*/gate dim 0": "HEAD"}`.
      own_axes: Axes of your own that `seeds` and `sizes` name, such as `strategy.axes`.
      kernels: Name of a kernel of Pallas or of the FFI -> a function of plain JAX with the same
        operands and results, which inference reads in place of the kernel. Without a function,
        nothing is known about the dims of the kernel's results, and `unknown` names the kernel.
      strict: Raise an error for conflicts, for guesses, and for open dims, which have no name.

    Raises:
      StrategyError: There are not as many seeds as arrays, a leaf is not an array, or an entry of
        `sizes` fits no dim of a parameter. With `strict`, a dim has no name, a guessed name or two
        names. A function of `kernels` does not fit, or the model does not call its kernel.
      RankMismatchError: A seed does not have one axis per dim.
      UnknownAxisError: A seed or a size names an axis that is neither in the vocabulary nor in
        `own_axes`.

    >>> import shardwright as sw
    >>> def forward(params, tokens):
    ...     return params["table"][tokens] @ params["table"].T
    >>> params = {"table": jax.ShapeDtypeStruct((512, 64), "float32")}
    >>> tokens = jax.ShapeDtypeStruct((2, 16), "int32")
    >>> infer_axes(forward, params, tokens, seeds=[(sw.BATCH, sw.LENGTH)]).annotations
    {'table': ('__VOCAB__', '__EMBED__')}
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    closed = _trace(forward, params, inputs, leaves)
    shapes, paths = [np.shape(leaf) for _, leaf in leaves], [path_text(path) for path, _ in leaves]
    values = []
    for number, shape in enumerate(shapes):
        dims = new_dims(shape)
        for position, (atom,) in enumerate(dims):
            atom.learned, atom.params = True, frozenset({(number, position)})
        values.append(ArrayFacts(dims=dims, learned=True, leaf=number))
    input_values = read_seeds(inputs, seeds)
    walker = FactWalker(Kernels(kernels or {}))
    given = read_sizes({} if sizes is None else sizes, paths, shapes)
    _check_axes(input_values, {} if sizes is None else sizes, own_axes)
    with _uncollected():
        results = walker.walk(closed.jaxpr, [*values, *input_values], place=())
        raise_problems(walker.kernels.unused())
        _name_all(walker.facts, [value.dims for value in values], results, given)
    gates = routers(walker.facts)
    rows = [
        given.spell(at, spell(value.dims, is_router=at in gates), shapes[at])
        for at, value in enumerate(values)
    ]
    # Classes are numbered as they appear, so two runs over one program print equal numbers.
    numbers: dict[Atom, int] = {}
    evidence = tuple(
        InferredDim(
            path=path,
            dim=at,
            size=int(size),
            axis=entry.axis,
            evidence=entry.evidence,
            guess=entry.guess,
            is_open=entry.is_open,
            classes=tuple(numbers.setdefault(atom, len(numbers)) for atom in finest(dim)),
        )
        for path, shape, row, value in zip(paths, shapes, rows, values, strict=True)
        for at, (size, entry, dim) in enumerate(zip(shape, row, value.dims, strict=True))
    )
    annotations = [tuple(entry.axis for entry in row) for row in rows]
    constraints, unconstrained = choose(walker.facts.outputs, walker.facts.slices)
    inferred = Inferred(
        annotations=jax.tree.unflatten(tree, annotations),
        evidence=evidence,
        conflicts=_conflicts(walker.facts.conflicts, leaves),
        unknown=tuple(
            f"{name} ({why.source})" if why.source else name
            for name, why in walker.facts.unknown.items()
        ),
        constraints=constraints,
        unconstrained=unconstrained,
        program=tuple(operations(closed.jaxpr)),
    )
    if strict:
        raise_problems(inferred.problems())
    return inferred


def _trace(
    forward: Callable[..., Any], params: Any, inputs: Sequence[Any], leaves: Sequence[Any]
) -> Any:
    """Trace the model.

    Raises:
      StrategyError: Leaves of the parameters or of the inputs are not arrays.
    """
    try:
        return jax.make_jaxpr(forward)(params, *inputs)
    except TypeError as error:
        every = [*leaves, *jax.tree_util.tree_flatten_with_path(tuple(inputs))[0]]
        wrong = [(path, leaf) for path, leaf in every if not _is_array(leaf)]
        # Every leaf is an array, so the model itself raised the error.
        if not wrong:
            raise
        problems = [
            Problem(
                error=StrategyError,
                what=f"the leaf is {type(leaf).__name__}, not an array",
                path=path_text(path),
                fix="leave this leaf out of the tree, and pass it by a closure or "
                "functools.partial: infer_axes takes trees of arrays",
            )
            for path, leaf in wrong
        ]
        raise StrategyError(problems=problems) from error


def _is_array(leaf: Any) -> bool:
    try:
        jax.eval_shape(lambda leaf: leaf, leaf)
    except TypeError:
        return False
    return True


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the garbage collector.

    The walk allocates many small objects and frees none. Without the pause, the collector visits
    these objects and those of JAX again and again, which takes longer than the walk itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_axes(
    inputs: Sequence[ArrayFacts], sizes: Mapping[Any, str], own_axes: Iterable[str]
) -> None:
    """Check that every name of a seed or a size is an axis.

    Raises:
      UnknownAxisError: Some names are not axes. The error lists all of them.
    """
    places = [
        (f"seed {at}", atom.name)
        for at, value in enumerate(inputs)
        for dim in value.dims
        for atom in dim
        if atom.name
    ]
    places += [(f"sizes {key}", canonical_axis(axis)) for key, axis in sizes.items()]
    check_axes(places, own_axes, declare=_OWN)


def _name_all(
    facts: Facts, params: Sequence[AtomDims], results: Sequence[ArrayFacts], sizes: GivenSizes
) -> None:
    # The first rule that names a dim decides. So rules with unambiguous evidence come first. Rules
    # that read other names follow, then the sizes of the caller, then guesses.
    selected = list(matmuls_of_selected(facts))
    names = Names(facts)
    name_tables(names, results)
    name_layers(names)
    name_other_tables(names)
    name_windows(names)
    name_attention(names)
    name_experts(names)
    # `selected` has the matmuls with weights that a router selects. `name_experts` finds these
    # matmuls itself, so add them only now. The rules below treat them like any other projection.
    facts.projections += selected
    name_slices(names)
    name_residual(names)
    name_logits(names, results)
    name_hidden(names)
    name_slices(names)  # again, because parts of fused weights have names now
    every = [dim for dims in params for dim in dims]
    sizes.name(names, params)
    guess_tables(names, results)
    guess_chosen(names)
    guess_scanned(names)
    guess_links(names)
    name_rows(names, every)
    name_slices(names)


def _conflicts(found: Iterable[AtomConflict], leaves: Sequence[Any]) -> tuple[NameConflict, ...]:
    """Return each conflict once, with the first dim of a parameter that it affects."""
    conflicts: dict[Any, NameConflict] = {}
    for each in found:
        # `params` is a frozenset. Sort it, so that every run reports the same dim.
        places = sorted(each.params)
        conflict = NameConflict(
            path=path_text(leaves[places[0][0]][0]) if places else "",
            dim=places[0][1] if places else None,
            first=each.first,
            second=each.second,
            meeting=each.meeting,
        )
        conflicts.setdefault(conflict.text, conflict)
    return tuple(conflicts.values())
