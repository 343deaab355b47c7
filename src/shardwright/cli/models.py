"""Read a model from a Python file: its forward function, its parameters, and its inputs."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from shardwright import _jax
from shardwright.cli.python_files import check_call, read_function, user_code
from shardwright.errors import ShardingError, StrategyError
from shardwright.inference.infer import infer_axes
from shardwright.inference.inferred import Inferred
from shardwright.manager.manager import PartitionManager
from shardwright.mesh.build import AxisTypes, abstract_mesh
from shardwright.resolution.unknown_axes import check_axes
from shardwright.trees.paths import is_array_spec
from shardwright.trees.tensors import is_dtype
from shardwright.vocabulary.axes import EMPTY, canonical_axis, file_name
from shardwright.vocabulary.modes import MODE_TRAIN

_INPUT = re.compile(r"\s*([a-z0-9_]+)\[([0-9, ]*)\](.*)")
_AXIS = re.compile(r"\?|[A-Za-z_][A-Za-z0-9_]*")
_OWN = "declare an axis of your own in [axes] of a strategy, and pass --strategy FILE"
_INPUT_EXAMPLE = '--input "int32[8,32] BATCH LENGTH"'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """The model that the command line names.

    Attributes:
      name: `file.py:function`.
      forward: The function.
      params: Shapes of the parameters, or a tree of `ArraySpec`s.
      inputs: Shapes of the inputs.
      seeds: Axes of the inputs.
    """

    name: str
    forward: Callable[..., Any]
    params: Any
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    seeds: tuple[tuple[str | None, ...], ...]

    @property
    def shapes(self) -> Any:
        """The parameters as shapes alone, without annotations."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
            self.params,
            is_leaf=is_array_spec,
        )


def add_model(command: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the options of a model."""
    command.add_argument(
        "--params",
        required=required,
        metavar="NAME",
        help="the function of the model's file that returns the parameters",
    )
    command.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="ARRAY",
        help='an input, such as "int32[8,32] BATCH LENGTH"; repeat the option for more',
    )


def read_model(name: str, params: str, inputs: Sequence[str]) -> NamedModel:
    """Return a model.

    Args:
      name: `file.py:function`.
      params: Name of the function that returns the parameters, or their `ArraySpec`s.
      inputs: Dtype, shape and axes of each input.

    Raises:
      StrategyError: The file has no such functions, one of them raises an error, or an input cannot
        be read.
    """
    forward = read_function(
        name, example="model.py:forward", fix="define the function, or check its name"
    )
    file, _, _ = name.rpartition(":")
    init = read_function(
        f"{file}:{params}", example="init", fix="name a function of the file in --params"
    )
    pairs = [read_input(text) for text in inputs]
    result: list[_Params] = []
    with user_code(f"{file}:{params}"):
        required = [
            argument
            # Give no key to an optional argument, which may be a dtype, for example.
            for argument in inspect.signature(init).parameters.values()
            if argument.default is argument.empty
            and argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
        ]
        key = [jax.random.key(0)] if required else []
        # `jax.eval_shape` returns arrays only, so `_arrays` appends a `_Params` with all other
        # leaves to `result`.
        shapes = jax.eval_shape(lambda *keys: _arrays(init(*keys), result), *key)
    # `eval_shape` calls its function once, so `result` has one `_Params`.
    (found,) = result
    fix = f"add one --input for each array after the parameters, in order: {_INPUT_EXAMPLE}"
    check_call(name, forward, None, *pairs, fix=fix)  # None is for the parameters
    return NamedModel(
        name=name,
        forward=found.forward(forward),
        params=found.with_arrays(shapes),
        inputs=tuple(shape for shape, _ in pairs),
        seeds=tuple(axes for _, axes in pairs),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Params:
    """Parameters without their arrays.

    Attributes:
      tree: The structure.
      leaves: Functions, numbers and `ArraySpec`s as they are, and `_ARRAY` for an array.
    """

    tree: Any
    leaves: Sequence[Any]

    def with_arrays(self, arrays: Sequence[Any], *, others: bool = False) -> Any:
        """Return the parameters with these arrays.

        Args:
          arrays: One per array of the parameters.
          others: Whether to return the functions and numbers too. By default, None takes their
            place.
        """
        remaining = iter(arrays)
        leaves = []
        for leaf in self.leaves:
            if leaf is _ARRAY:
                leaves.append(next(remaining))
            else:
                leaves.append(leaf if others or is_array_spec(leaf) else None)
        return jax.tree.unflatten(self.tree, leaves)

    def forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that takes the arrays and calls `function` with all parameters."""
        if all(leaf is _ARRAY or is_array_spec(leaf) for leaf in self.leaves):
            return function

        def forward(params: Any, *inputs: Any) -> Any:
            return function(self.with_arrays(jax.tree.leaves(params), others=True), *inputs)

        return forward


_ARRAY = object()


def _arrays(params: Any, result: list[_Params]) -> list[Any]:
    """Return the arrays of a tree of parameters. Append a `_Params` to `result`."""
    leaves, tree = jax.tree.flatten(params, is_leaf=is_array_spec)
    # A number, such as a probability, is not an array: it would be traced, and no model could
    # branch on it.
    fixed = (bool, int, float, complex, str)
    is_array = [
        not (is_array_spec(leaf) or callable(leaf) or isinstance(leaf, fixed)) for leaf in leaves
    ]
    kept = [_ARRAY if each else leaf for leaf, each in zip(leaves, is_array, strict=True)]
    result.append(_Params(tree, kept))
    return list(itertools.compress(leaves, is_array))


def infer_model(
    model: NamedModel, *, sizes: Mapping[int | str, str], own_axes: Collection[str] = ()
) -> Inferred:
    """Return the axes of a model's parameters.

    Args:
      model: The model.
      sizes: Axes of dims. A key is the size of dims, or the place of one dim.
      own_axes: Axes that strategies declare in addition to the vocabulary.

    Raises:
      UnknownAxisError: An input or a size names an axis that does not exist.
      StrategyError: The model raises an error.
    """
    places = [
        (f"--input {at}", axis)
        for at, axes in enumerate(model.seeds)
        for axis in axes
        if axis is not None
    ]
    places += [(f"--size {size}", axis) for size, axis in sizes.items()]
    check_axes(places, own_axes, declare=_OWN)

    def infer() -> Inferred:
        return infer_axes(
            model.forward,
            # `check` compares the annotations with the inferred axes, so inference must not read
            # the annotations.
            model.shapes,
            *model.inputs,
            seeds=model.seeds,
            sizes=sizes,
            own_axes=own_axes,
        )

    with user_code(model.name):
        return infer_on_one_device(infer, own_axes)


def infer_on_one_device(
    infer: Callable[[], Inferred], own_axes: Collection[str], mode: str = MODE_TRAIN
) -> Inferred:
    """Infer under a manager on one device, because models may call `shard` and `gather`.

    The mesh axes are Auto. If JAX refuses the model on Auto axes, because of `out_sharding=` for
    instance, the mesh axes are Explicit.

    Args:
      infer: The inference, which traces the model.
      own_axes: Axes that strategies declare in addition to the vocabulary.
      mode: Mode in which the model is traced; attention needs one.
    """
    try:
        with _manager(own_axes, mode, "auto"):
            return infer()
    except ShardingError:
        raise
    except _jax.refusals() as error:
        refused = error
    try:
        with _jax.types_without_size_one(), _manager(own_axes, mode, "explicit"):
            return infer()
    except _jax.refusals():
        raise refused from None


def _manager(own_axes: Collection[str], mode: str, axis_types: AxisTypes) -> PartitionManager:
    from shardwright.strategy.model import Strategy

    names = [file_name(axis) for axis in own_axes]
    own = {"axes": dict.fromkeys(names, "own"), "rules": dict.fromkeys(names, "-")}
    strategy = Strategy.preset("fsdp_tp") | Strategy.model_validate(own)
    # Every mesh axis has size 1, so that no rule fails on an indivisible dim during the trace.
    mesh = abstract_mesh(dict.fromkeys(strategy.mesh, 1), axis_types=axis_types)
    return PartitionManager(strategy, mesh=mesh, mode=mode)


def read_input(text: str) -> tuple[jax.ShapeDtypeStruct, tuple[str | None, ...]]:
    """Return the shape and the axes of an input, such as `int32[8,32] BATCH LENGTH`.

    Raises:
      StrategyError: The text has another form, or does not have one axis per dim.
    """
    match = _INPUT.fullmatch(text)
    if match is None or not is_dtype(match[1]):
        what = f"--input {text!r} is not dtype[shape] and axes"
        raise StrategyError(what, fix=f"write {_INPUT_EXAMPLE}")
    shape = tuple(int(size) for size in match[2].replace(",", " ").split())
    words = match[3].replace(",", " ").split()
    # Without axes, inference starts from the operations of the model alone.
    if len(words) not in (0, len(shape)) or not all(map(_AXIS.fullmatch, words)):
        what = f"--input {text!r} does not have one axis for each of {len(shape)} dims"
        raise StrategyError(what, fix=f"write {_INPUT_EXAMPLE}, with ? for a dim of unknown axis")
    # None means that the axis of a dim is unknown.
    known = {"?": None, "EMPTY": EMPTY}
    axes = tuple(known[word] if word in known else canonical_axis(word) for word in words)
    axes = axes or (None,) * len(shape)
    return jax.ShapeDtypeStruct(shape, match[1]), axes
