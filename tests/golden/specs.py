"""The specs of a whole layer under one preset, as text that an expert can check by eye."""

from __future__ import annotations

from collections.abc import Sequence

import shardwright as sw
from shardwright.resolution.partition_specs import spec_text
from shardwright.vocabulary.lowering import describe
from tests.golden import layer

MESHES = ("dp:1,fsdp:2,tp:4", "dp:2,tp:4", "fsdp:2,tp:2,ep:2", "sp:2")
MODES = ("train", "prefill", "decode", "insert")

NOTES = (
    (
        "A weight is stored as one spec and used as another; P() is replicated. Modes with the "
        "same answer share a row, whose shape is"
    ),
    (
        "that of its first mode: decode has a length of 1 and a capacity of 16. If there is no "
        "spec, the row has the error."
    ),
)

Row = tuple[str, ...]


def render(preset: str) -> str:
    """Return the specs of every tensor on every mesh, one section per mesh."""
    strategy = sw.Strategy.preset(preset)
    lines = [
        f"Specs of a transformer layer and of an MoE layer under the preset {preset}.",
        *NOTES,
    ]
    for text in MESHES:
        pm = sw.PartitionManager(strategy, mesh=sw.abstract_mesh(text))
        lines += ["", f"mesh {text.replace(':', '=').replace(',', ' ')}", ""]
        lines += columns([("weight", "shape", "axes", "modes", "stored", "used"), *weight_rows(pm)])
        lines += [
            "",
            *columns([("activation", "shape", "axes", "modes", "spec"), *activation_rows(pm)]),
        ]
    return "\n".join(lines) + "\n"


def weight_rows(pm: sw.PartitionManager) -> list[Row]:
    """Return one row per weight, and more where modes differ."""
    rows: list[Row] = []
    for tensor in layer.WEIGHTS:
        answers = {
            mode: tuple(answer(pm, tensor, mode, role) for role in ("param", "use"))
            for mode in MODES
        }
        rows += collapsed(tensor, answers)
    return rows


def activation_rows(pm: sw.PartitionManager) -> list[Row]:
    """Return one row per activation and shape, and more where modes differ."""
    rows: list[Row] = []
    for tensor in layer.ACTIVATIONS:
        answers = {mode: (answer(pm, tensor, mode, "activation"),) for mode in MODES}
        rows += collapsed(tensor, answers)
    return rows


def answer(pm: sw.PartitionManager, tensor: layer.Tensor, mode: str, role: str) -> str:
    """Return the spec of a tensor, or the class and the first line of its error."""
    resolution = pm.explain(tensor.axes, mode=mode, role=role, shape=tensor.shape(mode))
    if resolution.spec is not None:
        return spec_text(resolution.spec)
    return f"{resolution.problems[0].error.__name__}: {str(resolution.problems[0]).splitlines()[0]}"


def collapsed(tensor: layer.Tensor, answers: dict[str, Row]) -> list[Row]:
    """Return one row for all modes of the same answer; a repeated name is left out."""
    groups: dict[Row, list[str]] = {}
    for mode, text in answers.items():
        groups.setdefault(text, []).append(mode)
    rows = []
    for at, (text, modes) in enumerate(groups.items()):
        names = "all" if len(modes) == len(MODES) else " ".join(modes)
        size = " ".join(map(str, tensor.shape(modes[0])))
        rows.append(
            (tensor.name, size, describe(tensor.axes), names, *text)
            if not at
            else ("", size, "", names, *text)
        )
    return rows


def columns(rows: Sequence[Row]) -> list[str]:
    """Return rows as aligned columns; the length of the last column is not limited."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
