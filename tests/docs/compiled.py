"""The tables of the page on compiled plans, from the file that `benchmarks.compiled` wrote."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

from benchmarks.compiled import TARGETS, Row, judge
from shardwright.vocabulary.units import bytes_text

_PLACE = re.compile(r"(<!-- compiled: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(
    text: str,
    rows: Sequence[Row],
    refused: Sequence[Mapping[str, str]],
    context: Mapping[str, str],
    *,
    gpus: tuple[Sequence[Row], Sequence[Mapping[str, str]], Mapping[str, str]] | None = None,
) -> str:
    """Return a page with the text between its markers written from the results.

    Markers are `<!-- compiled: NAME -->`, each up to `<!-- end -->`. The names are `verdicts`,
    `misses` and `refused`; with results for GPUs, also `gpu-verdicts`, `gpu-misses` and
    `gpu-programs`.

    Raises:
      AssertionError: A marker is missing, or unknown.
    """
    parts = {
        "verdicts": _verdicts(rows, context),
        "misses": _misses(rows),
        "refused": _refused(refused),
    }
    if gpus is not None:
        verdicts = _verdicts(gpus[0], gpus[2]).splitlines()
        verdicts.insert(-1, _memory(gpus[0]))
        wrapped = [textwrap.fill(line, 100, subsequent_indent="  ") for line in verdicts]
        parts |= {
            "gpu-verdicts": "\n".join(wrapped),
            "gpu-misses": _misses(gpus[0]),
            "gpu-programs": programs_table(gpus[0]),
        }
    marked = [actual[2] for actual in _PLACE.finditer(text)]
    assert sorted(marked) == sorted(parts), f"the page has {marked}, the results {list(parts)}"
    return _PLACE.sub(lambda actual: f"{actual[1]}\n{parts[actual[2]]}\n\n{actual[3]}", text)


def _verdicts(rows: Sequence[Row], context: Mapping[str, str]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in context.items() if name != "target")
    return "\n".join(
        [
            *(
                f"- {'met' if met else '**missed**'}: {words}."
                for words, met in judge(rows).items()
            ),
            f"- Compiled for {context['target']} ({versions}).",
        ]
    )


def _memory(rows: Sequence[Row]) -> str:
    """Return how many peaks are in the planned range, and how far its ends are from them."""
    counted = [row.memory for row in rows if row.memory]
    inside = sum(low <= peak <= high for low, high, peak in counted)
    ends = [
        f"{name} end is {min(shares):.2f} to {max(shares):.2f} of the peak"
        for name, shares in (
            ("lower", [low / peak for low, _, peak in counted]),
            ("upper", [high / peak for _, high, peak in counted]),
        )
    ]
    return (
        f"- {inside} of {len(counted)} peaks are in the planned range; the {', the '.join(ends)}."
    )


def programs_table(rows: Sequence[Row]) -> str:
    """Return a table of what each program sends, by mesh axes and kind, and of its memory."""
    lines = ["| program | sent | planned memory | compiled |", "| --- | --- | --- | --- |"]
    for row in rows:
        sent = [f"{'+'.join(each['mesh_axes'])}: {_kinds(each)}" for each in row.traffic]
        low, high, peak = row.memory
        lines.append(
            f"| {row.model}, {row.preset}, {row.mode} | {'; '.join(sent) or 'nothing'} "
            f"| {low / 2**20:.0f} to {high / 2**20:.0f} | {_marked(peak, low, high)} |"
        )
    return "\n".join(lines)


def _kinds(sent: Mapping[str, Mapping[str, int]]) -> str:
    """Return the bytes of each kind of collective, as planned and as compiled if they differ."""
    planned, compiled = sent["planned"], sent["compiled"]
    cells = []
    for kind in dict.fromkeys((*planned, *compiled)):
        sizes = (planned.get(kind, 0), compiled.get(kind, 0))
        texts = dict.fromkeys(map(bytes_text, sizes))
        cells.append(f"{kind} {' / '.join(texts)}")
    return ", ".join(cells)


def _marked(peak: int, low: int, high: int) -> str:
    text = f"{peak / 2**20:.0f}"
    return text if low <= peak <= high else f"**{text}**"


def _difference(row: Row) -> str:
    if row.error == 0:
        return "exact"
    text = f"{(row.compiled - row.planned) / max(row.compiled, 1):+.2%}"
    return text if row.error <= min(TARGETS) else f"**{text}**"


def _misses(rows: Sequence[Row]) -> str:
    """Return each total that differs by more than the smallest limit, with its reasons."""
    lines = []
    for row in rows:
        if row.error <= min(TARGETS):
            continue
        lines.append(f"- {row.model}, {row.preset}, {row.mode}: {_difference(row)}")
        for sent in row.traffic:
            difference = sent["difference"]
            if abs(difference) <= min(TARGETS) * row.compiled:
                continue
            axes = "+".join(sent["mesh_axes"])
            parts = [f"{reason['what']} ({_signed(reason['adds'])})" for reason in sent["reasons"]]
            parts = parts or ["not explained"]
            lines.append(f"    - over {axes} {_signed(difference)}: {'; '.join(parts)}")
    return "\n".join(lines) or "No misses."


def _signed(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{bytes_text(abs(size))}"


def _refused(refused: Sequence[Mapping[str, str]]) -> str:
    lines = [
        textwrap.fill(
            f"- {each['model']}, {each['preset']}, {each['mode']}: {each['why']}",
            width=100,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for each in refused
    ]
    return "\n".join(lines) or "None."
