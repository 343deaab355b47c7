"""Annotate optimizer state: find the dims of a parameter that each array follows.

An array with the path and the shape of a parameter is sharded like that parameter. Some
transformations keep other arrays: sums over a dim, a history, or one statistic for all parameters.
For these, tables of state types define the dims. Equal sizes alone never decide which parameter an
array follows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from shardwright.errors import (
    Problem,
    RankMismatchError,
    ShardingError,
    StrategyError,
    did_you_mean,
    raise_problems,
)
from shardwright.trees.annotated import Leaf, annotated_leaves
from shardwright.trees.paths import compile_rule, is_array_spec, path_text
from shardwright.vocabulary.annotations import ArraySpec, PartOf
from shardwright.vocabulary.axes import EMPTY
from shardwright.vocabulary.lowering import describe

Path = tuple[Any, ...]
DimsOfParam = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """One array of a state, in a field of a node of a known type.

    Attributes:
      shape: Shape of the array.
      rest: Path of the array below the field.
      param: Parameter whose path is the beginning of `rest`, or None.
      below: Part of `rest` after the path of the parameter.
      sibling: Function from the name of another field of the node to the shape of the array at path
        `rest` in that field, or None.
    """

    shape: tuple[int, ...]
    rest: Path
    param: Leaf | None
    below: Path
    sibling: Callable[[str], tuple[int, ...] | None]

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        assert self.param is not None
        return tuple(np.shape(self.param.value))


def _copy(place: _Place) -> DimsOfParam | None:
    if place.below or place.shape != place.whole:
        return None
    return tuple(range(len(place.shape)))


def _history(place: _Place) -> DimsOfParam | None:
    """Return the dims of an array that stacks past values of the parameter."""
    if place.below or place.shape[1:] != place.whole:
        return None
    return (None, *range(len(place.whole)))


def _one_dim(place: _Place) -> DimsOfParam | None:
    """Return the dim of an accumulator, if a state has one accumulator per dim of a parameter."""
    if len(place.below) != 1 or not isinstance(place.below[0], jax.tree_util.SequenceKey):
        return None
    dim = place.below[0].idx
    return (dim,) if dim < len(place.whole) and place.shape == (place.whole[dim],) else None


def _factored(field: str, place: _Place) -> DimsOfParam | None:
    """Return the dims of a moment of Adafactor (`optax.scale_by_factored_rms`).

    For a factored parameter, `v_row` lacks the largest dim and `v_col` the second largest, and `v`
    has one element. If dims have equal sizes, the one that optax sorts last counts as the largest.
    """
    if place.below:
        return None
    unfactored = place.sibling("v") == place.whole
    # optax keeps a placeholder of one element in the fields that a parameter does not use: `v_row`
    # and `v_col` of an unfactored parameter, `v` of a factored one.
    if unfactored == (field != "v"):
        return (None,) if place.shape == (1,) else None
    if unfactored:
        return _copy(place)
    if len(place.whole) < 2:
        return None
    # optax sorts by `np.argsort` too, so that dims of equal size have the same order here.
    second, largest = (int(dim) for dim in np.argsort(place.whole)[-2:])
    summed = largest if field == "v_row" else second
    dims = tuple(dim for dim in range(len(place.whole)) if dim != summed)
    return dims if place.shape == tuple(place.whole[dim] for dim in dims) else None


# Fields of optax states that are not copies of the parameters. Other fields are treated as copies.
_DIMS_BY_FIELD: Final[Mapping[str, Mapping[str, Callable[[_Place], DimsOfParam | None]]]] = {
    "FactoredState": {
        field: functools.partial(_factored, field) for field in ("v_row", "v_col", "v")
    },
    "ScaleBySM3State": {"mu": _one_dim},
    "ScaleByLBFGSState": {"diff_params_memory": _history, "diff_updates_memory": _history},
}
# Fields that belong to no parameter: coefficients, global statistics, raw PRNG keys. They are
# replicated.
_UNOWNED_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "ScaleByLBFGSState": ("weights_memory",),
    "MuonState": ("ns_coeffs",),
    "MechanicState": ("r", "m", "v", "s"),
    "AddNoiseState": ("rng_key",),
    "DifferentiallyPrivateAggregateState": ("rng_key",),
    "HutchinsonState": ("key",),
}
# States of projected parameters, and the field that has the projection. The projection has the
# shape (0, 0) if a parameter is not projected. Projected state mixes the dims of the parameter, so
# it cannot be sharded like the parameter, even if the shapes are equal.
_PROJECTED: Final[Mapping[str, str]] = {"GaLoreState": "projector"}


def _kind(node: Any) -> str:
    """Return the name of a node's type if a table has it, else an empty string."""
    cls = type(node)
    # Compare types by name, so that optax is not imported. Types with these names in other packages
    # may sort and stack differently, so only types of optax count.
    tables = (_DIMS_BY_FIELD, _UNOWNED_FIELDS, _PROJECTED)
    return cls.__name__ if _is_optax(cls) and any(cls.__name__ in table for table in tables) else ""


def _is_optax(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "optax"


def _known_nodes(state: Any, prefix: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield the path and type name of every node of a known type, outer nodes first."""
    if _kind(state):
        yield prefix, _kind(state)
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda node: node is not state and bool(_kind(node))
    )
    for path, node in nodes:
        if path and _kind(node):
            yield from _known_nodes(node, (*prefix, *path))


def changes_dims(state: Any) -> bool:
    """Tell whether a state has arrays with other dims than their parameters, such as moments."""
    return any(kind in _DIMS_BY_FIELD for _, kind in _known_nodes(state))


def annotations_by_path(state: Any, params: Any, annotations: Any) -> dict[str, Any]:
    """Return what `annotate_state` returns, by the path of each array in the state."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(state)
    structure: Any = jax.tree.structure(state)
    annotated = structure.flatten_up_to(annotate_state(state, params, annotations))
    return {path_text(path): entry for (path, _), entry in zip(pairs, annotated, strict=True)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """One array of a state, and the parameter whose sharding it follows.

    Attributes:
      path: Path of the array.
      param: Parameter that the array follows; None if `override` annotates the array.
      dims: For each dim of the array, the dim of the parameter that it follows, or None.
      override: Annotation of an array that follows no parameter.
    """

    path: str
    param: Leaf | None = None
    dims: DimsOfParam = ()
    override: Any = None

    def annotation(self, *, by_path: bool) -> Any:
        """Return the annotation of the array.

        With `by_path`, it has the path of the parameter, so that the entries of `[[tensors]]` and
        `[[memory.tensors]]` can match.
        """
        if self.param is None:
            return self.override
        whole = tuple(np.shape(self.param.value))
        axes = (
            self.param.annotation.axes
            if isinstance(self.param.annotation, ArraySpec)
            else self.param.annotation
        )
        if self.dims == tuple(range(len(whole))) and not by_path:
            return axes
        # Without paths, equal layers have equal `PartOf`s, and equal `PartOf`s are resolved only
        # once.
        return PartOf(
            annotation=axes, shape=whole, dims=self.dims, path=self.param.path if by_path else ""
        )


def annotate_state(
    state: Any,
    params: Any,
    annotations: Any = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    by_path: bool = True,
) -> Any:
    """Annotate an optimizer's state: each array like the parameter that it follows.

    An array follows a parameter if a part of the state has the structure of the parameters, and in
    this part the array has the path and the shape of the parameter. Masks may leave out parameters
    and whole subtrees. Some optax states have factored moments, stacks of past values, or a list of
    arrays per parameter. There, the type of the state decides which dims of the parameter an array
    has. Scalars need no annotation.

    Args:
      state: The state, or `jax.eval_shape(tx.init, params)`.
      params: Arrays, `ShapeDtypeStruct`s or `ArraySpec`s.
      annotations: Annotations of the parameters. Not needed for `ArraySpec`s.
      overrides: Pattern -> annotation, for arrays that follow no parameter. Patterns are searched
        (`re.search`) in the path in the state.
      by_path: Whether each annotation has the path of its parameter, so that `[[tensors]]` entries
        apply to the state as to the parameter. Without paths, resolution is faster.

    Returns:
      A tree with the state's structure and an annotation for each array.

    Raises:
      ShardingError: Arrays follow no parameter, or overrides match no array. The error names all of
        them.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(state)
    if overrides is not None and not isinstance(overrides, Mapping):
        what = f"overrides={overrides!r} is not a mapping"
        raise StrategyError(what, fix='write {"pattern": annotation}')
    patterns = [
        compile_rule(at, pattern, annotation)
        for at, (pattern, annotation) in enumerate((overrides or {}).items())
    ]
    searches = _StateIndex.of(state, params, annotations)
    followers: list[Follower] = []
    problems = _unused_overrides(
        [pattern for pattern, _ in patterns], [path_text(path) for path, _ in pairs]
    )
    for path, leaf in pairs:
        text = path_text(path)
        override = next(
            (annotation for pattern, annotation in patterns if pattern.search(text)), None
        )
        # Overrides come first, so they can also annotate an array that would follow a parameter.
        if override is not None:
            followers.append(Follower(path=text, override=override))
            continue
        found = [search.follow(tuple(path), np.shape(leaf)) for search in searches]
        followed = [each for each in found if isinstance(each, Follower)]
        if not followed and np.shape(leaf) == ():
            followed = [Follower(path=text, override=())]
        followers += followed[:1]
        if not followed and isinstance(found[0], Problem):
            problems.append(found[0])
    raise_problems(problems)
    annotations = [follower.annotation(by_path=by_path) for follower in followers]
    return jax.tree.unflatten(structure, annotations)


def _unused_overrides(patterns: Sequence[re.Pattern[str]], paths: Sequence[str]) -> list[Problem]:
    """Return a problem for each override that matches no array.

    Its pattern is probably misspelled.
    """
    unused = [
        pattern.pattern for pattern in patterns if not any(pattern.search(path) for path in paths)
    ]
    shown = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    return [
        Problem(
            error=StrategyError,
            what=f"the override {text!r} matches no leaf of the state",
            fix=f"{did_you_mean(text, paths)} the leaves are {shown or 'none'}; "
            "patterns are searched (re.search) in their paths".strip(),
        )
        for text in unused
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _StateIndex:
    """Tables for looking up the arrays of a state.

    Attributes:
      params: Parameter by path.
      kinds: Type name of each node of a known type, by path.
      shapes: Shape of each array of the state, by path.
      copies: Function that tells whether the state below a path has the parameters' structure.
    """

    params: dict[Path, Leaf]
    kinds: dict[Path, str]
    shapes: dict[Path, tuple[int, ...]]
    copies: Callable[[Path], bool]

    @classmethod
    def of(cls, state: Any, params: Any, annotations: Any) -> list[_StateIndex]:
        """Return the tables of the parameters, and of the fast parameters of `optax.lookahead`."""
        named = annotated_leaves(params, annotations)
        pairs, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_array_spec)
        by_path = {tuple(path): leaf for (path, _), leaf in zip(pairs, named, strict=True)}
        leaves, _ = jax.tree_util.tree_flatten_with_path(state)
        shapes = {tuple(path): tuple(np.shape(leaf)) for path, leaf in leaves}
        trees = [(params, by_path)]
        if type(params).__name__ == "LookaheadParams" and _is_optax(type(params)):
            # The inner optimizer sees only the fast parameters, so its state has their paths.
            fast = {path[1:]: leaf for path, leaf in by_path.items() if path[0].name == "fast"}
            trees.append((params.fast, fast))
        return [
            cls(
                params=known,
                kinds=dict(_known_nodes(state)),
                shapes=shapes,
                copies=_copies_of(set(known), tree, state),
            )
            for tree, known in trees
        ]

    def follow(self, path: Path, shape: tuple[int, ...]) -> Follower | Problem:
        text = path_text(path)
        owner = self._owner(path)
        projected = self._projected(path, shape, owner)
        if projected is not None:
            return projected
        # The innermost node of a known type decides, because a wrapper contains the state that it
        # wraps.
        for at in range(len(path) - 1, -1, -1):
            kind = self.kinds.get(path[:at])
            if kind is None:
                continue
            if path[at].name in _UNOWNED_FIELDS.get(kind, ()) and at + 1 == len(path):
                return Follower(path=text, override=(EMPTY,) * len(shape))
            rule = _DIMS_BY_FIELD.get(kind, {}).get(path[at].name)
            if rule is not None:
                place = self._place(path, at, shape)
                dims = None if place.param is None else rule(place)
                if dims is None:
                    return self._follows_nothing(text, shape, place.param)
                return Follower(path=text, param=place.param, dims=dims)
        if owner is None or np.shape(owner.value) != shape:
            return self._follows_nothing(text, shape, owner)
        return Follower(path=text, param=owner, dims=tuple(range(len(shape))))

    def _owner(self, path: Path) -> Leaf | None:
        """Return the parameter whose path is the end of an array's path, or None.

        The rest of the array's path must lead to a part of the state that has the structure of the
        parameters.
        """
        # Try the longest end of the path first: the path of parameter `w` is also an end of the
        # path `a/w`.
        return next(
            (
                self.params[path[at:]]
                for at in range(len(path) + 1)
                if path[at:] in self.params and self.copies(path[:at])
            ),
            None,
        )

    def _projected(
        self, path: Path, shape: tuple[int, ...], owner: Leaf | None
    ) -> Follower | Problem | None:
        """Return how an array below a type of `_PROJECTED` follows its parameter, or why it cannot.

        Return None if the array is not below such a type, or its parameter is not projected.
        """
        at = next((at for at in range(len(path)) if self.kinds.get(path[:at]) in _PROJECTED), None)
        if at is None:
            return None
        kind = self.kinds[path[:at]]
        field = jax.tree_util.GetAttrKey(_PROJECTED[kind])
        place = next((key for key, leaf in self.params.items() if leaf is owner), ())
        if owner is None or self.shapes.get((*path[:at], field, *place)) != (0, 0):
            what = f"state of shape {shape} in a {kind}, which projects parameters: "
            what += "it mixes their dims, even if the sizes are equal"
            return _unfollowed(path_text(path), what)
        if path[at] == field:
            return Follower(path=path_text(path), override=(EMPTY,) * len(shape))
        return None

    def _follows_nothing(self, path: str, shape: tuple[int, ...], owner: Leaf | None) -> Problem:
        if owner is not None:
            follows = f"{owner.path} {describe(owner.annotation)} of shape {np.shape(owner.value)}"
            what = f"state of shape {shape} differs from its parameter {follows}"
            return _unfollowed(path, what, error=RankMismatchError)
        what, fix = f"state of shape {shape} follows no parameter", ""
        elements = sum(math.prod(np.shape(leaf.value)) for leaf in self.params.values())
        if shape == (elements,):
            what += ": it has as many elements as all parameters, so optax.flatten may have "
            what += "joined them"
            fix = "remove optax.flatten, so that the state follows the parameters; or "
        return _unfollowed(path, what, fix)

    def _place(self, path: Path, at: int, shape: tuple[int, ...]) -> _Place:
        node, rest = path[:at], path[at + 1 :]
        end = next((end for end in range(len(rest), -1, -1) if rest[:end] in self.params), None)

        def sibling(field: str) -> tuple[int, ...] | None:
            return self.shapes.get((*node, jax.tree_util.GetAttrKey(field), *rest))

        param = None if end is None else self.params[rest[:end]]
        return _Place(
            shape=shape,
            rest=rest,
            param=param,
            below=() if end is None else rest[end:],
            sibling=sibling,
        )


def _copies_of(known: set[Path], params: Any, state: Any) -> Callable[[Path], bool]:
    """Return a function that tells whether the state below a path has the parameters' structure.

    A mask has an empty tuple in place of each parameter, or whole subtree, that has no state.
    """
    # The parameters themselves may contain empty tuples, so empty tuples count as entries too.
    places = {path for path, _ in _entries(params)}
    inner = {place[:end] for place in known for end in range(len(place))}
    entries = [
        (path, type(node).__name__ == "MaskedNode" and _is_optax(type(node)))
        for path, node in _entries(state)
    ]

    @functools.cache
    def copies(prefix: Path) -> bool:
        below = {
            path[len(prefix) :]: masked for path, masked in entries if path[: len(prefix)] == prefix
        }
        if not all(path in places or (masked and path in inner) for path, masked in below.items()):
            return False
        # Each parameter needs an entry: its own, or that of a masked subtree around it.
        return all(any(place[:end] in below for end in range(len(place) + 1)) for place in known)

    return copies


def _entries(tree: Any) -> list[tuple[Path, Any]]:
    """Return the leaves and empty tuples of a tree, with their paths."""
    entries, _ = jax.tree_util.tree_flatten_with_path(
        tree,
        is_leaf=lambda node: is_array_spec(node) or (isinstance(node, tuple) and not node),
    )
    return [(tuple(path), node) for path, node in entries]


def _unfollowed(
    path: str, what: str, fix: str = "", *, error: type[ShardingError] = StrategyError
) -> Problem:
    """Return the problem of an array that no parameter's annotation covers."""
    fix += f"overrides={{{re.escape(path)!r}: (...)}} annotates it"
    return Problem(error=error, what=what, path=path, fix=fix)
