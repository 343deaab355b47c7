"""Stacks: the experts of a layer as one tensor, and the layers of a model as one tensor."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from shardwright.errors import Problem, raise_problems
from shardwright.interop.hf.config import MOST_PROBLEMS, fault, required_size, size_of
from shardwright.interop.hf.source import Source, StackedSource
from shardwright.interop.hf.tensors import Tensors
from shardwright.vocabulary.annotations import ArraySpec, PartOf, stacked
from shardwright.vocabulary.lowering import describe

_EXPERT: Final = re.compile(r"(.*\bexperts\.)(\d+)\.(.*)", re.DOTALL)
_APART: Final = "download the checkpoint again, or keep experts apart with stack_experts=False"
# The number of a name that has none.
_NO_NUMBER: Final = -1


def stack_experts(sources: Mapping[str, Source]) -> dict[str, Source]:
    """Return the tensors, with the experts of each layer stacked into one.

    The name of a stack has no expert number.

    Raises:
      CheckpointError: Experts are absent, or differ in shape or dtype.
    """
    problems: list[Problem] = []
    result: dict[str, Source] = {}
    for whole, names in _groups(sources, _EXPERT, problems).items():
        if _NO_NUMBER in names:
            result[whole] = sources[whole]
            continue
        # Name ten at most, because a damaged name may have a huge number.
        numbers = (number for number in range(max(names) + 1) if number not in names)
        if absent := ", ".join(map(str, itertools.islice(numbers, 10))):
            problems.append(fault(f"the experts {absent} are absent", whole, _APART))
        # By number: as text, expert 10 would come before expert 2.
        parts = [sources[names[number]] for number in sorted(names)]
        kinds = sorted({(part.dtype.name, part.shape) for part in parts})
        if len(kinds) > 1:
            texts = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in kinds)
            problems.append(fault(f"the experts differ: {texts}", whole, _APART))
        result[whole] = StackedSource(name=whole, parts=tuple(parts), dtype=parts[0].dtype)
    raise_problems(problems[:MOST_PROBLEMS])
    return result


def check_experts(names: Iterable[str], config: Mapping[str, Any]) -> None:
    """Check that each layer with experts has all of them.

    Raises:
      CheckpointError: Experts are absent.
    """
    problems: list[Problem] = []
    groups = _groups(names, _EXPERT, problems)
    count = size_of(config, "num_local_experts", "num_experts", "n_routed_experts") or 0
    for whole, group in groups.items():
        numbers = (number for number in range(count) if number not in group)
        absent = ", ".join(map(str, itertools.islice(numbers, 10)))
        if absent and _NO_NUMBER not in group:
            again = "download the checkpoint again"
            problems.append(fault(f"the experts {absent} are absent", whole, again))
    raise_problems(problems[:MOST_PROBLEMS])


def stack_layers(
    specs: Mapping[str, ArraySpec],
    sources: Mapping[str, Source],
    *,
    family: Tensors,
    config: Mapping[str, Any],
) -> tuple[dict[str, ArraySpec], dict[str, Source]]:
    """Return specs and tensors, with each tensor of all layers stacked into one.

    The name of a stack has no layer number.

    Raises:
      CheckpointError: A tensor is not in every layer, or layers differ.
    """
    # A model without a head has the same names without the prefix.
    start, prefix = re.escape(family.layers.removesuffix("#.")), re.escape(family.prefix)
    pattern = re.compile(rf"((?:{prefix})?{start})(\d+)\.(.*)", re.DOTALL)
    count = required_size(config, "num_hidden_layers")
    fix = "leave out stack_layers=True: this model has no single stack of equal layers"
    problems: list[Problem] = []
    stacks: dict[str, ArraySpec] = {}
    tensors: dict[str, Source] = {}
    for whole, names in _groups(specs, pattern, problems).items():
        if _NO_NUMBER in names:
            stacks[whole], tensors[whole] = specs[whole], sources[whole]
            continue
        if len(names) != count:
            what = f"{len(names)} of the {count} layers have this tensor"
            problems.append(fault(what, whole, fix))
        # By number, like the experts above.
        parts = [specs[names[number]] for number in sorted(names)]
        kinds = {f"{part.dtype}{list(part.shape)} {describe(part.axes)}" for part in parts}
        if len(kinds) > 1:
            what = f"the layers differ: {', '.join(sorted(kinds)[:4])}"
            problems.append(fault(what, whole, fix))
        stack = stacked(parts[0], len(parts))
        if isinstance(stack.axes, PartOf):
            # A part of another tensor, such as its scale, becomes a part of the stack of it.
            path = _without_number(stack.axes.path, pattern)
            stack = dataclasses.replace(stack, axes=dataclasses.replace(stack.axes, path=path))
        stacks[whole] = stack
        tensors[whole] = StackedSource(
            name=whole,
            parts=tuple(sources[names[number]] for number in sorted(names)),
            dtype=np.dtype(parts[0].dtype),
        )
    raise_problems(problems[:MOST_PROBLEMS])
    return stacks, tensors


def _groups(
    names: Iterable[str], pattern: re.Pattern[str], problems: list[Problem]
) -> dict[str, dict[int, str]]:
    """Return number -> name for each stack. A name without a number is a group of its own."""
    groups: dict[str, dict[int, str]] = {}
    for name in names:
        match = pattern.fullmatch(name)
        # The first name gives the stack its place in the order.
        group = groups.setdefault(_without_number(name, pattern), {})
        number = int(match[2]) if match else _NO_NUMBER
        is_whole = number == _NO_NUMBER
        if number in group or (group and is_whole != (_NO_NUMBER in group)):
            what = f"this tensor and {next(iter(group.values()))} have the same place in a stack"
            problems.append(fault(what, name, "download the checkpoint again"))
        group[number] = name
    return groups


def _without_number(name: str, pattern: re.Pattern[str]) -> str:
    match = pattern.fullmatch(name)
    return match[1] + match[3] if match else name
