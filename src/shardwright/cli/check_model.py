"""Check a model for `shardwright check`: compare its axes with those that its program uses."""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax

from shardwright.cli.check_programs import check_programs, has_no_arguments
from shardwright.cli.models import NamedModel, infer_model, read_model
from shardwright.errors import StrategyError
from shardwright.lints.finding import Finding, Severity
from shardwright.lints.names import lint_names
from shardwright.strategy.foreign_files import read_text
from shardwright.strategy.limits import LONGEST_FILE
from shardwright.trees.paths import is_array_spec, match_paths


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
    text: str, arguments: argparse.Namespace, *, own_axes: Collection[str]
) -> list[Checked]:
    """Return the findings about the axis names of a model; for programs, one entry per mode.

    Args:
      text: `file.py:function`. Without `--params`, the function returns programs.
      arguments: The command line.
      own_axes: Axes of their own that the other strategies of the command line declare.

    Raises:
      ShardingError: The model or its annotations cannot be read.
    """
    if arguments.params is None and has_no_arguments(text):
        found = check_programs(text, arguments, own_axes=own_axes)
        return [
            Checked(strategy=f"{text} for {mode}", findings=each) for mode, each in found.items()
        ]
    if arguments.params is None:
        raise StrategyError(
            f"the model {text} needs --params",
            fix="add --params NAME, a function of its file that returns the parameters\n"
            "or name a function without arguments that returns programs, as for shardwright plan",
        )
    model = read_model(text, arguments.params, arguments.input)
    annotations = _annotations(model, arguments)
    findings = lint_names(annotations, infer_model(model, sizes={}, own_axes=own_axes))
    return [Checked(strategy=text, findings=findings)]


def _annotations(model: NamedModel, arguments: argparse.Namespace) -> Any:
    if arguments.axes is not None:
        return match_paths(model.params, read_path_rules(arguments.axes).items()).annotations
    leaves = jax.tree.leaves(model.params, is_leaf=is_array_spec)
    if not all(map(is_array_spec, leaves)):
        raise StrategyError(
            f"{arguments.params} returns arrays without annotations",
            fix="return ArraySpecs, or pass a file of path rules in --axes",
        )
    return model.params


def read_path_rules(name: str) -> dict[str, Any]:
    """Return the path rules of a .toml file, as `match_paths` takes them.

    Raises:
      StrategyError: The file cannot be read.
    """
    text = read_text(Path(name), most=LONGEST_FILE)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise StrategyError(
            f"{name} is not TOML: {error}", fix="write pattern = [axes], one line per pattern"
        ) from error
