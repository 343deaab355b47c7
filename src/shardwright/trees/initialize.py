"""Create the arrays of a tree of `ArraySpec`s."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from shardwright.errors import (
    IndivisibleError,
    Problem,
    RankMismatchError,
    StrategyError,
    raise_problems,
)
from shardwright.trees.paths import is_array_spec, path_text
from shardwright.vocabulary.annotations import ArraySpec, Initializer, stacked
from shardwright.vocabulary.axes import EMPTY, LAYERS


def abstract(specs: Any) -> Any:
    """Return a tree of `ArraySpec`s as `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs, is_leaf=is_array_spec
    )


def initializer(specs: Any) -> Callable[[Any], Any]:
    """Return a function from a PRNG key to the arrays of a tree of `ArraySpec`s.

    The key of each array depends only on the given key and on the path of the array. So a new
    parameter does not change the values of others.

    Raises:
      StrategyError: Leaves have no `init`. The error names all of them.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_array_spec)
    problems = [
        Problem(
            error=StrategyError,
            what="the ArraySpec has no init",
            path=path_text(path),
            fix="pass an initializer: ArraySpec(..., init=jax.nn.initializers.…)",
        )
        for path, spec in pairs
        if not isinstance(spec, ArraySpec) or spec.init is None
    ]
    raise_problems(problems)

    def init(key: Any) -> Any:
        return jax.tree.unflatten(structure, [_initialize(key, path, spec) for path, spec in pairs])

    return init


def _initialize(key: Any, path: Sequence[Any], spec: ArraySpec) -> Any:
    assert spec.init is not None
    # Use 64 bits of a digest: a collision among a million leaves is very unlikely. Unlike a path
    # joined by "/", keystr distinguishes the key "a/b" from the keys "a", "b".
    digest = hashlib.sha256(jax.tree_util.keystr(tuple(path)).encode()).digest()
    for at in (0, 4):
        key = jax.random.fold_in(key, int.from_bytes(digest[at : at + 4], "big"))
    array = spec.init(key, spec.shape, spec.dtype)
    dtype = jax.numpy.dtype(spec.dtype)
    if np.shape(array) != spec.shape or array.dtype != dtype:
        what = f"init returned {array.dtype} of shape {np.shape(array)}, the ArraySpec has "
        what += f"{dtype} of shape {spec.shape}"
        if np.shape(array) == spec.shape and array.dtype == jax.dtypes.canonicalize_dtype(dtype):
            what += ", which JAX narrows while jax_enable_x64 is off"
            fix = f"write {array.dtype}, or "
            fix += 'jax.config.update("jax_enable_x64", True) before creating arrays'
            raise StrategyError(what, path=path_text(path), fix=fix)
        fix = "return an array of the shape and dtype that init receives"
        raise RankMismatchError(what, path=path_text(path), fix=fix)
    return array


def stack_specs(specs: Any, layers: int, *, axis: str = LAYERS, repeats: int = 1) -> Any:
    """Add a leading `LAYERS` dim to every `ArraySpec` of a tree, for `jax.lax.scan`.

    With `repeats` above 1, the leading dims are `[repeats, layers / repeats]`, and LAYERS is the
    second of them: a stage of a circular pipeline holds a chunk of each repeat. The layers are in
    order, and have the same initial values as without `repeats`.

    Args:
      specs: Tree of `ArraySpec`s of one layer.
      layers: Number of layers.
      axis: Axis of the new dim. With `EMPTY`, the dim is not sharded, and stacks of layers can be
        stacked again, such as the adapters of several users.
      repeats: As in `[pipeline]` of the strategy.

    Raises:
      IndivisibleError: `repeats` does not divide the layers.
      StrategyError: A leaf is not an `ArraySpec`, or `layers` is not a positive integer.
      AxisConflictError: A leaf is a stack of layers already, and `axis` is `LAYERS`.

    >>> import jax.numpy as jnp
    >>> from shardwright.vocabulary.axes import EMBED
    >>> stack_specs({"scale": ArraySpec((64,), jnp.float32, (EMBED,))}, 12)["scale"].shape
    (12, 64)
    """
    if repeats != 1 and layers % repeats:
        raise IndivisibleError(
            f"repeats={repeats} does not divide {layers} layers",
            path="repeats",
            fix="write repeats under [pipeline] that divide the layers",
        )

    def stack(spec: Any) -> Any:
        whole = stacked(spec, layers, axis=axis)
        if repeats == 1:
            return whole
        cut = stacked(stacked(spec, layers // repeats, axis=axis), repeats, axis=EMPTY)
        init = None if whole.init is None else _InitInRepeats(init=whole.init)
        return ArraySpec(cut.shape, cut.dtype, cut.axes, init)

    return jax.tree.map(stack, specs, is_leaf=is_array_spec)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _InitInRepeats:
    """Initialize a stack of all layers, and reshape it to `[repeats, layers / repeats, ...]`."""

    init: Initializer

    def __call__(self, key: Any, shape: Sequence[int], dtype: Any) -> Any:
        repeats, layers, *rest = shape
        return self.init(key, (repeats * layers, *rest), dtype).reshape(shape)
