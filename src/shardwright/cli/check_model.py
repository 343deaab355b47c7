"""Check a model for `shardwright check`: compare its annotations with inferred axes.

A model is a forward function, or a function that returns programs as for `shardwright plan`.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardwright.cli.inputs import Setting
from shardwright.cli.models import infer_model, infer_on_one_device, read_model
from shardwright.cli.programs import read_programs
from shardwright.cli.python_files import read_function, user_code
from shardwright.errors import Problem, ShardingError, StrategyError, located
from shardwright.inference.infer import infer_axes
from shardwright.lints.finding import Code, Finding, Severity
from shardwright.lints.names import lint_names
from shardwright.lints.trees import unresolved_finding
from shardwright.manager.core import Manager
from shardwright.plan.planner import Program, price, trace_program
from shardwright.plan.search.rank import read_annotations
from shardwright.plan.state import Category, read_holds
from shardwright.plan.trace import Trace
from shardwright.plan.walk.equations import holds_primitive
from shardwright.resolution.resolver import left_open
from shardwright.strategy.foreign_files import read_text
from shardwright.strategy.limits import LONGEST_FILE
from shardwright.trees.paths import is_array_spec, match_paths
from shardwright.vocabulary.annotations import ArraySpec, is_annotation
from shardwright.vocabulary.layouts import is_layout
from shardwright.vocabulary.modes import MODE_TRAIN, mode_name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A strategy or a model, and its findings."""

    strategy: str
    findings: tuple[Finding, ...]

    def fails(self, *, strict: bool) -> bool:
        """Whether the findings make the command fail."""
        failing = (Severity.ERROR, Severity.WARNING) if strict else (Severity.ERROR,)
        return any(finding.severity in failing for finding in self.findings)


def is_model(text: str) -> bool:
    """Tell whether a text is `file.py:function`."""
    return text.rpartition(":")[0].endswith(".py")


def check_model(
    text: str,
    arguments: argparse.Namespace,
    *,
    own_axes: Collection[str],
    settings: Collection[Setting],
) -> list[Checked]:
    """Return the findings about a model.

    The first `Checked` is about the names of axes. Each later one is about one of `settings`, and
    has the arrays that do not resolve under it. If the model returns programs, the list has these
    `Checked`s for each mode.

    Args:
      text: `file.py:function`. Without `--params`, the function returns programs.
      arguments: The command line.
      own_axes: Axes that the strategies of the command line declare.
      settings: The strategies of the command line, on their meshes.

    Raises:
      ShardingError: The model or its annotations cannot be read.
    """
    if programs := programs_of(text, arguments):
        checked = []
        for mode, program in programs.items():
            label = f"{text} for {mode_name(mode)}"
            findings = _check_program(label, mode, program, own_axes)
            checked.append(Checked(strategy=label, findings=findings))
            checked += [_resolve(label, mode, program, setting) for setting in settings]
        return checked
    if arguments.params is None:
        fix = "add --params NAME, a function of its file that returns the parameters\n"
        fix += "or name a function without arguments that returns programs, as for shardwright plan"
        raise StrategyError(f"the model {text} needs --params", fix=fix)
    model = read_model(text, arguments.params, arguments.input)
    annotations = model.params
    if arguments.axes is not None:
        rules = read_path_rules(arguments.axes)
        annotations = match_paths(model.params, rules.items()).annotations
    elif not all(map(is_array_spec, jax.tree.leaves(model.params, is_leaf=is_array_spec))):
        fix = "return ArraySpecs, or pass a file of path rules in --axes"
        raise StrategyError(f"{arguments.params} returns arrays without annotations", fix=fix)
    findings = lint_names(annotations, infer_model(model, sizes={}, own_axes=own_axes))
    program = Program(
        model.forward,
        (model.shapes, *model.inputs),
        # An input cannot be annotated if the axis of one of its dims is unknown.
        (annotations, *(None if None in axes else axes for axes in model.seeds)),
        holds=("parameters", *("inputs" for _ in model.inputs)),
    )
    checked = [_resolve(text, MODE_TRAIN, program, setting) for setting in settings]
    return [Checked(strategy=text, findings=findings), *checked]


def _resolve(label: str, mode: str, program: Program, setting: Setting) -> Checked:
    """Return the findings about one setting: one for each array that has no spec."""
    manager = setting.manager.for_mode(mode)
    problems: list[Problem] = []
    try:
        with user_code(label):
            traced = trace_program(manager, program)
    except StrategyError:  # the program cannot be read
        raise
    except ShardingError as refused:  # such as an error of attention
        problems += refused.problems
    else:
        for each in read_annotations(traced):
            found = manager.answer(each.request)
            found = found if each.strict else left_open(found)
            if found.problems:
                error = located(ShardingError(problems=found.problems), each.source)
                problems += error.problems
    if problems:
        findings = tuple(
            dict.fromkeys(unresolved_finding(each, file=setting.file) for each in problems)
        )
    else:
        findings = tuple(_wrong_convolutions(manager, traced, program))
    return Checked(strategy=f"{label} under {setting.strategy}", findings=findings)


def _wrong_convolutions(manager: Manager, traced: Trace, program: Program) -> Iterator[Finding]:
    """Yield a finding for each convolution that XLA may compute wrongly, according to a plan."""
    # A plan takes seconds, so make one only if the program has a convolution.
    if not holds_primitive(traced.jaxpr, "conv_general_dilated"):
        return
    for choice in price(manager, traced, program).walked.choices:
        if f"({Code.SPATIAL_AND_CHANNEL})" in choice.fix:
            fix, _, what = choice.fix.partition(": ")
            yield Finding(
                code=Code.SPATIAL_AND_CHANNEL,
                severity=Severity.WARNING,
                source=choice.source,
                key=f"mesh axis {choice.mesh_axis}",
                message=what.removesuffix(f" ({Code.SPATIAL_AND_CHANNEL})"),
                fix=fix,
            )


def programs_of(text: str, arguments: argparse.Namespace) -> dict[str, Program]:
    """Return the programs of a model by mode. A model whose function takes arguments has none.

    Raises:
      StrategyError: The file cannot be read, or the function does not return programs.
    """
    if arguments.params is not None:
        return {}
    function = read_function(text, example="model.py:forward", fix="define it")
    try:
        inspect.signature(function).bind()
    except TypeError:
        return {}
    return read_programs(text, None, devices=1)


def read_path_rules(name: str) -> dict[str, Any]:
    """Return the path rules of a .toml file, as `match_paths` takes them.

    Raises:
      StrategyError: The file cannot be read.
    """
    text = read_text(Path(name), most=LONGEST_FILE)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        fix = "write pattern = [axes], one line per pattern"
        raise StrategyError(f"{name} is not TOML: {error}", fix=fix) from error


def _check_program(
    label: str, mode: str, program: Program, own_axes: Collection[str]
) -> tuple[Finding, ...]:
    shapes = program.shapes
    # Only a tuple or a list has one entry per argument. For any other value, it is unknown which
    # argument an entry is for.
    specs = program.specs if isinstance(program.specs, (tuple, list)) else (None,) * len(shapes)
    holds = program.holds if isinstance(program.holds, (tuple, list)) else (None,) * len(shapes)
    is_params = [
        held == Category.PARAMETERS or (held is None and _are_specs(spec))
        for held, spec in zip(holds, specs, strict=True)
    ]
    if True not in is_params:
        what = f"no argument of {label} holds parameters"
        raise StrategyError(what, fix='write holds=("parameters", "inputs"), or pass ArraySpecs')
    # Inference takes one tree of parameters, so join the arguments that hold parameters in a dict.
    # Its keys are the positions of these arguments.
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
        return () if updates else results  # a training step returns weights, not outputs

    with user_code(label):
        inferred = infer_on_one_device(
            lambda: infer_axes(forward, own, others, seeds=seeds, own_axes=own_axes),
            own_axes,
            mode,
        )
    return lint_names(annotations, inferred)


def _are_specs(specs: Any) -> bool:
    leaves = jax.tree.leaves(specs, is_leaf=is_array_spec)
    return bool(leaves) and all(map(is_array_spec, leaves))


def _annotated(tree: Any, specs: Any, held: Any) -> list[tuple[Any, Any]]:
    """For each array of an argument, return its annotation (or None) and the array itself."""
    leaves = jax.tree.leaves(tree)
    if specs is None or held not in (None, Category.INPUTS):
        return [(None, leaf) for leaf in leaves]
    if is_annotation(specs):
        return [(specs, leaf) for leaf in leaves]
    structure: Any = jax.tree.structure(tree)
    return list(zip(structure.flatten_up_to(specs), leaves, strict=True))


def _seed(annotation: Any, leaf: Any) -> Any:
    """Return the seed of an input: the known axis of each dim, from which inference starts.

    A layout or a spec gives no seed, because it does not name an axis for each dim.
    """
    axes = annotation.axes if isinstance(annotation, ArraySpec) else annotation
    is_axes = isinstance(axes, (tuple, list)) and len(axes) == len(leaf.shape)
    if not is_axes or isinstance(axes, PartitionSpec) or is_layout(axes):
        return None
    # A seed names one axis, so a dim of several axes has no seed.
    return [None if isinstance(axis, (tuple, list)) else axis for axis in axes]
