"""Check the programs of a model, as `shardwright plan` takes them, for `shardwright check`."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Collection, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardwright.cli.models import with_manager
from shardwright.cli.programs import read_programs
from shardwright.cli.python_files import raised_error, read_function
from shardwright.errors import ShardingError, StrategyError
from shardwright.inference.infer import infer_axes
from shardwright.lints.finding import Finding
from shardwright.lints.names import lint_names
from shardwright.plan.planner import Program
from shardwright.plan.state import Category, read_holds
from shardwright.trees.paths import is_array_spec
from shardwright.vocabulary.annotations import ArraySpec, is_annotation
from shardwright.vocabulary.layouts import is_layout
from shardwright.vocabulary.modes import mode_name


def has_no_arguments(text: str) -> bool:
    """Tell whether `file.py:function` can be called without arguments, as programs are.

    Raises:
      StrategyError: The file has no such function.
    """
    function = read_function(text, example="model.py:forward", fix="define it")
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True


def check_programs(
    text: str, arguments: argparse.Namespace, *, own_axes: Collection[str]
) -> dict[str, tuple[Finding, ...]]:
    """Return the findings about the axis names of each program, by mode.

    Of a training step, the forward pass is checked.

    Args:
      text: `file.py:function`, which returns programs.
      arguments: The command line.
      own_axes: Axes of their own that the strategies of the command line declare.

    Raises:
      StrategyError: The file cannot be read, or no program can be checked.
    """
    programs = read_programs(text, None, devices=1)
    return {
        mode_name(mode): _check(f"{text} for {mode_name(mode)}", mode, program, own_axes)
        for mode, program in programs.items()
    }


def _check(
    label: str, mode: str, program: Program, own_axes: Collection[str]
) -> tuple[Finding, ...]:
    shapes = program.shapes
    specs = program.specs if isinstance(program.specs, (tuple, list)) else (None,) * len(shapes)
    holds = program.holds if isinstance(program.holds, (tuple, list)) else (None,) * len(shapes)
    is_params = [
        held == Category.PARAMETERS or (held is None and _are_specs(spec))
        for held, spec in zip(holds, specs, strict=True)
    ]
    if True not in is_params:
        what = f"no argument of {label} holds parameters"
        raise StrategyError(what, fix='write holds=("parameters", "inputs"), or pass ArraySpecs')
    own = {str(at): shapes[at] for at, each in enumerate(is_params) if each}
    others = {str(at): shapes[at] for at, each in enumerate(is_params) if not each}
    annotations = {name: specs[int(name)] for name in own}
    seeds = [
        _seed(annotation, leaf)
        for name, tree in others.items()
        for annotation, leaf in _annotated(tree, specs[int(name)], holds[int(name)])
    ]

    updates = Category.OPTIMIZER in read_holds(shapes, program.holds)

    def forward(params: Any, inputs: Any) -> Any:
        every: Mapping[str, Any] = {**params, **inputs}
        results = program.function(*(every[str(at)] for at in range(len(shapes))))
        return () if updates else results  # updated weights are not results of a model

    try:
        with with_manager(own_axes, mode):
            inferred = infer_axes(forward, own, others, seeds=seeds, own_axes=own_axes)
    except ShardingError:
        raise
    except Exception as error:
        raise raised_error(label, error) from error
    return lint_names(annotations, inferred)


def _are_specs(specs: Any) -> bool:
    leaves = jax.tree.leaves(specs, is_leaf=is_array_spec)
    return bool(leaves) and all(map(is_array_spec, leaves))


def _annotated(tree: Any, specs: Any, held: Any) -> list[tuple[Any, Any]]:
    """Return the annotation of each array of an argument, None where there is none."""
    leaves = jax.tree.leaves(tree)
    if specs is None or held not in (None, Category.INPUTS):
        return [(None, leaf) for leaf in leaves]
    if is_annotation(specs):
        return [(specs, leaf) for leaf in leaves]
    structure: Any = jax.tree.structure(tree)
    return list(zip(structure.flatten_up_to(specs), leaves, strict=True))


def _seed(annotation: Any, leaf: Any) -> Any:
    """Return the seed of an input. A layout or a spec names no axes of a dim."""
    axes = annotation.axes if isinstance(annotation, ArraySpec) else annotation
    is_axes = isinstance(axes, (tuple, list)) and len(axes) == len(leaf.shape)
    if not is_axes or isinstance(axes, PartitionSpec) or is_layout(axes):
        return None
    return [None if isinstance(axis, (tuple, list)) else axis for axis in axes]
