"""Optimizer state: which parameter each leaf of it follows, and with which dims.

A leaf that has its parameter's place and shape is a copy. Where a transformation keeps something else (sums over a dim, a
history, one statistic for all), the state's own type says what; a table here knows those types. Nothing is guessed from sizes.
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
    StrategyError,
    did_you_mean,
    raise_problems,
)
from shardwright.trees.annotated import Leaf, annotated_leaves, compile_rule, path_text
from shardwright.vocabulary.annotations import ArraySpec, PartOf
from shardwright.vocabulary.axes import EMPTY
from shardwright.vocabulary.lowering import describe

Path = tuple[Any, ...]
Dims = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """One leaf of a state below a node of a known type.

    Attributes:
      shape: the leaf's shape.
      rest: its path below the node's field.
      param: the parameter whose path begins `rest`, or None.
      below: what of `rest` lies below the parameter.
      sibling: returns the shape at the same place of another field, or None.
    """

    shape: tuple[int, ...]
    rest: Path
    param: Leaf | None
    below: Path
    sibling: Callable[[str], tuple[int, ...] | None]

    @property
    def whole(self) -> tuple[int, ...]:
        """The parameter's shape."""
        assert self.param is not None
        return tuple(np.shape(self.param.value))


def _copy(place: _Place) -> Dims | None:
    return (
        tuple(range(len(place.shape))) if not place.below and place.shape == place.whole else None
    )


def _history(place: _Place) -> Dims | None:
    """Dims of a stack of the parameter's past values, the newest being anywhere."""
    return (
        (None, *range(len(place.whole)))
        if not place.below and place.shape[1:] == place.whole
        else None
    )


def _one_dim(place: _Place) -> Dims | None:
    """Dims of the i-th of a list with one accumulator per dim of the parameter."""
    at = (
        place.below[0].idx
        if len(place.below) == 1 and isinstance(place.below[0], jax.tree_util.SequenceKey)
        else -1
    )
    return (at,) if 0 <= at < len(place.whole) and place.shape == (place.whole[at],) else None


def _factored(field: str, place: _Place) -> Dims | None:
    """Dims of Adafactor's moments: a factored parameter has sums over its largest dim in `v_row`, over the next in `v_col`.

    Whether it is factored shows in `v`, which then holds one element; which dims, in the order that optax sorts them
    (`optax.scale_by_factored_rms`), also where both have one size.
    """
    if place.below:
        return None
    unfactored = place.sibling("v") == place.whole
    if unfactored == (field != "v"):
        return (None,) if place.shape == (1,) else None
    if unfactored:
        return _copy(place)
    if len(place.whole) < 2:
        return None
    second, largest = (int(dim) for dim in np.argsort(place.whole)[-2:])
    gone = largest if field == "v_row" else second
    kept = tuple(dim for dim in range(len(place.whole)) if dim != gone)
    return kept if place.shape == tuple(place.whole[dim] for dim in kept) else None


# The state types of optax whose fields are not copies of the parameters. A field that is not listed is looked at as any other.
_KINDS: Final[Mapping[str, Mapping[str, Callable[[_Place], Dims | None]]]] = {
    "FactoredState": {
        field: functools.partial(_factored, field) for field in ("v_row", "v_col", "v")
    },
    "ScaleBySM3State": {"mu": _one_dim},
    "ScaleByLBFGSState": {"diff_params_memory": _history, "diff_updates_memory": _history},
}
# Fields that belong to no parameter: coefficients, one statistic for all, keys as raw words. They are not sharded.
_OWN: Final[Mapping[str, tuple[str, ...]]] = {
    "ScaleByLBFGSState": ("weights_memory",),
    "MuonState": ("ns_coeffs",),
    "MechanicState": ("r", "m", "v", "s"),
    "AddNoiseState": ("rng_key",),
    "DifferentiallyPrivateAggregateState": ("rng_key",),
    "HutchinsonState": ("key",),
}
# Types that keep state of a projected parameter: the field that holds the projection, a (0, 0) where there is none. What is
# projected may by chance have the parameter's shape, and mixes its dims nevertheless.
_PROJECTED: Final[Mapping[str, str]] = {"GaLoreState": "projector"}


def _kind(node: Any) -> str:
    """Return the name of a node's type if the tables know it, else an empty string."""
    cls = type(node)
    # By name, so that optax is never imported; only of optax, because other packages sort and stack in other ways.
    return (
        cls.__name__
        if _of_optax(cls) and any(cls.__name__ in table for table in (_KINDS, _OWN, _PROJECTED))
        else ""
    )


def _of_optax(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "optax"


def _known_nodes(state: Any, prefix: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield the path and the name of every node of a known type, outer ones first."""
    if _kind(state):
        yield prefix, _kind(state)
    found, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda node: node is not state and bool(_kind(node))
    )
    for path, node in found:
        if path and _kind(node):
            yield from _known_nodes(node, (*prefix, *path))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """One leaf of a state and what it lies like.

    Attributes:
      path: the leaf's path.
      param: the parameter that it follows; None where it has an annotation of its own.
      dims: for each dim of the leaf, the dim of the parameter that it follows, or None.
      override: the annotation of its own.
    """

    path: str
    param: Leaf | None = None
    dims: Dims = ()
    override: Any = None

    def annotation(self, *, by_path: bool) -> Any:
        """Return its annotation; with `by_path` one that carries the parameter's path too, for exceptions by path."""
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
        # Without a path the parts of equal layers are equal, and resolved once.
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
    """Return a tree like an optimizer's state, with what annotates each leaf: the parameter that it follows.

    A leaf follows a parameter if it lies at that parameter's place in a part of the state with the parameters' structure
    (places and whole subtrees left out by a mask included), and if their shapes agree. Of the states that optax factors,
    stacks or lists, the state's type says which dims are meant. Scalars need nothing.

    Args:
      state: the state, or `jax.eval_shape(tx.init, params)`.
      params: arrays, `ShapeDtypeStruct`s or `ArraySpec`s.
      annotations: of the parameters; absent where they are `ArraySpec`s.
      overrides: pattern -> annotation for state leaves that follow no parameter (`re.search` in the state's path).
      by_path: let each annotation carry its parameter's path, so that `[[tensors]]` rules mean the parameter's; quicker without.

    Raises:
      StrategyError, RankMismatchError: leaves that follow nothing, each with its path, and overrides that match none; all at
        once.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(state)
    if overrides is not None and not isinstance(overrides, Mapping):
        raise StrategyError(
            f"overrides={overrides!r} is not a mapping", fix='write {"pattern": annotation}'
        )
    patterns = [
        compile_rule(at, pattern, one)
        for at, (pattern, one) in enumerate((overrides or {}).items())
    ]
    search = _Search.of(state, params, annotations)
    found: list[Any] = []
    problems = _unused([pattern for pattern, _ in patterns], [path_text(path) for path, _ in pairs])
    for path, leaf in pairs:
        text = path_text(path)
        override = next((one for pattern, one in patterns if pattern.search(text)), None)
        if override is not None or np.shape(leaf) == ():
            found.append(Follower(path=text, override=() if override is None else override))
            continue
        one = search.follow(tuple(path), np.shape(leaf))
        if isinstance(one, Problem):
            problems.append(one)
        else:
            found.append(one)
    raise_problems(problems)
    return jax.tree.unflatten(structure, [one.annotation(by_path=by_path) for one in found])


def _unused(patterns: Sequence[re.Pattern[str]], paths: Sequence[str]) -> list[Problem]:
    """Return the overrides that match no leaf: one that is mistyped would leave its leaf where it lies by default."""
    unused = [
        pattern.pattern for pattern in patterns if not any(pattern.search(path) for path in paths)
    ]
    some = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    return [
        Problem(
            error=StrategyError,
            what=f"the override {text!r} matches no leaf of the state",
            fix=f"{did_you_mean(text, paths)} the leaves are {some or 'none'}; a pattern is searched (re.search) in their paths".strip(),
        )
        for text in unused
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """What is known of a state while its leaves are looked up.

    Attributes:
      params: parameters by path.
      kinds: names of the nodes of known types by path.
      shapes: shapes of the state's leaves by path.
      copies: whether the part of the state below a path has the parameters' structure.
    """

    params: dict[Path, Leaf]
    kinds: dict[Path, str]
    shapes: dict[Path, tuple[int, ...]]
    copies: Callable[[Path], bool]

    @classmethod
    def of(cls, state: Any, params: Any, annotations: Any) -> _Search:
        known = _by_path(params, annotations)
        leaves, _ = jax.tree_util.tree_flatten_with_path(state)
        shapes = {tuple(path): tuple(np.shape(leaf)) for path, leaf in leaves}
        return cls(
            params=known,
            kinds=dict(_known_nodes(state)),
            shapes=shapes,
            copies=_copies_of(set(known), params, state),
        )

    def follow(self, path: Path, shape: tuple[int, ...]) -> Follower | Problem:
        text = path_text(path)
        owner = self._owner(path)
        projected = self._projected(path, shape, owner)
        if projected is not None:
            return projected
        for at in range(len(path) - 1, -1, -1):
            kind = self.kinds.get(path[:at])
            if kind is None:
                continue
            if path[at].name in _OWN.get(kind, ()) and at + 1 == len(path):
                return Follower(path=text, override=(EMPTY,) * len(shape))
            rule = _KINDS.get(kind, {}).get(path[at].name)
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
        """Return the parameter at whose place in a copy of the parameters a leaf lies, or None."""
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
        """Return what is known of a leaf below a type of `_PROJECTED`; None where it is a leaf like others."""
        at = next((at for at in range(len(path)) if self.kinds.get(path[:at]) in _PROJECTED), None)
        if at is None:
            return None
        kind = self.kinds[path[:at]]
        field = jax.tree_util.GetAttrKey(_PROJECTED[kind])
        place = next((key for key, leaf in self.params.items() if leaf is owner), ())
        if owner is None or self.shapes.get((*path[:at], field, *place)) != (0, 0):
            what = f"state of shape {shape} in a {kind}, which projects parameters: its dims are not theirs, even where sizes agree"
            return Problem(
                error=StrategyError, what=what, path=path_text(path), fix=_own(path_text(path))
            )
        return (
            Follower(path=path_text(path), override=(EMPTY,) * len(shape))
            if path[at] == field
            else None
        )

    def _follows_nothing(self, path: str, shape: tuple[int, ...], owner: Leaf | None) -> Problem:
        if owner is not None:
            follows = f"{owner.path} {describe(owner.annotation)} of shape {np.shape(owner.value)}"
            what = f"state of shape {shape} differs from its parameter {follows}"
            return Problem(error=RankMismatchError, what=what, path=path, fix=_own(path))
        what, fix = f"state of shape {shape} follows no parameter", _own(path)
        if len(self.params) > 1 and shape == (
            sum(math.prod(np.shape(leaf.value)) for leaf in self.params.values()),
        ):
            what += ": it is as long as all of them end to end, as optax.flatten keeps it, which has no dims of theirs"
            fix = f"leave optax.flatten out, and it lies like the parameters; or {fix}"
        return Problem(error=StrategyError, what=what, path=path, fix=fix)

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
    """Return whether the part of a state below a path has the parameters' structure.

    Masks leave empty tuples where a parameter, or a whole subtree of them, has no state: those count as the places left out.
    """
    places = {
        path for path, _ in _entries(params)
    }  # with the empty tuples that the parameters have themselves
    inner = {place[:end] for place in known for end in range(len(place))}
    entries = [(path, _masks(node)) for path, node in _entries(state)]

    @functools.cache
    def copies(prefix: Path) -> bool:
        found = {
            path[len(prefix) :]: masks for path, masks in entries if path[: len(prefix)] == prefix
        }
        if not all(path in places or (masks and path in inner) for path, masks in found.items()):
            return False
        return all(any(place[:end] in found for end in range(len(place) + 1)) for place in known)

    return copies


def _entries(tree: Any) -> list[tuple[Path, Any]]:
    """Return leaves and empty tuples by path."""
    found, _ = jax.tree_util.tree_flatten_with_path(
        tree,
        is_leaf=lambda node: isinstance(node, ArraySpec) or (isinstance(node, tuple) and not node),
    )
    return [(tuple(path), node) for path, node in found]


def _masks(node: Any) -> bool:
    return type(node).__name__ == "MaskedNode" and _of_optax(type(node))


def _by_path(params: Any, annotations: Any) -> dict[Path, Leaf]:
    leaves = annotated_leaves(params, annotations)
    paths = [
        path
        for path, _ in jax.tree_util.tree_flatten_with_path(
            params, is_leaf=lambda one: isinstance(one, ArraySpec)
        )[0]
    ]
    return {tuple(path): leaf for path, leaf in zip(paths, leaves, strict=True)}


def _own(path: str) -> str:
    return f"overrides={{{re.escape(path)!r}: (...)}} gives it an annotation of its own"
