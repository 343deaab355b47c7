"""Show a plan beside its compiled program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwright.plan.verify.compiler import Compiled
from shardwright.plan.verify.differences import DifferenceCause, Sent
from shardwright.plan.verify.run import Verification
from shardwright.show.plain import named
from shardwright.show.tables import table, wrap
from shardwright.vocabulary.shown import WIDTH, data_of
from shardwright.vocabulary.units import bytes_text

MEMORY_HEAD = ("on each device", "planned", "compiled", "")
SENT_HEAD = ("over", "collective", "planned", "compiled", "")
_VISIBLE = 0.0005  # smallest share that rounds to 0.1%
_SHOWN = 3  # number of source lines shown with a reason


def verification_text(verification: Verification, *, width: int = WIDTH) -> str:
    """Return the planned and the compiled numbers, and why they differ.

    Args:
      verification: The plan and the compiled program.
      width: Characters per line.
    """
    compiled = verification.compiled
    lines = [f"compiled by {compiled.target.compiler}, {compiled.target.effort} effort"]
    if compiled.refused:
        lines.append(f"does not fit: {refusal_text(compiled)}")
        return "\n".join(lines)
    lines += table([MEMORY_HEAD, *memory_rows(verification)], width=width)
    layout, peak = verification.report.layout, compiled.peak
    if layout is not None and peak is not None:
        chip = layout.topology.chip
        share = f"{peak / chip.hbm_bytes:.0%} of the {bytes_text(chip.hbm_bytes)}"
        lines.append(f"{verification.verdict}: {share} usable on {chip.name}")
    if verification.traffic:
        rows = [row for sent in verification.traffic for row in sent_rows(sent)]
        lines += ["", *table([SENT_HEAD, *rows], width=width)]
    if layout is not None and layout.crossing:
        planned, actual = verification.report.slice_bytes, verification.slice_bytes
        words = "unknown" if actual is None else bytes_text(actual)
        group = layout.topology.group
        lines.append(f"to other {group}s: planned {bytes_text(planned)}, compiled {words}")
    for sent in verification.traffic:
        for text in reason_texts(sent):
            line = f"{'+'.join(sent.mesh_axes)}: {text}"
            lines += wrap(line, width, rest="  ")
    # A loop whose end depends on data has no count, so its bytes are in no sum above.
    unknown = sum(each.count is None for each in compiled.collectives)
    if unknown:
        lines.append(f"{unknown} collectives are not counted: their number of runs is unknown")
    return "\n".join(lines)


def refusal_text(compiled: Compiled) -> str:
    """Return the line of the compiler's message that says how much memory the program needs."""
    lines = [line.strip() for line in compiled.refused.splitlines()]
    # XLA for TPU writes `Used 17.2G of 15.75G hbm`. Match without the first letter, so that `used`
    # matches too.
    return next((line for line in lines if "sed " in line and " of " in line), lines[0])


def memory_rows(verification: Verification) -> Iterator[tuple[str, ...]]:
    """Yield planned and compiled bytes of arguments and memory, in the order of `MEMORY_HEAD`."""
    report, compiled = verification.report, verification.compiled
    held, actual = report.state.of().per_device, compiled.memory["argument_size"]
    remark = "equal" if actual == held else f"{_signed(actual - held)}, from tiles and alignment"
    yield "arguments", bytes_text(held), bytes_text(actual), remark
    if compiled.memory.get("host_temp_size"):
        yield "memory", "", "", "unknown, because the program has temporary arrays on the host"
    if compiled.peak is None:
        return
    low, high = report.memory.low, report.memory.high
    # Dividing by `high` is safe: a program holds its arguments, so `high` is not 0. `low` may be 0.
    above, below = compiled.peak / high - 1, 1 - compiled.peak / max(low, 1)
    if above >= _VISIBLE:
        remark = f"{above:.1%} above the range"
    elif below >= _VISIBLE:
        remark = f"{below:.1%} below the range"
    else:
        # If the range has one value, the prediction is exact, and the compiled program agrees with
        # it.
        equal = high - low < _VISIBLE * high
        remark = "equal" if equal else "inside the range"
    yield "memory", f"{bytes_text(low)} to {bytes_text(high)}", bytes_text(compiled.peak), remark


def sent_rows(sent: Sent) -> Iterator[tuple[str, ...]]:
    """Yield planned and compiled bytes by kind, then their sums, in the order of `SENT_HEAD`."""
    axes = "+".join(sent.mesh_axes)
    kinds = sorted({*sent.planned, *sent.compiled})
    for kind in kinds:
        sides = [bytes_text(side.get(kind, 0)) for side in (sent.planned, sent.compiled)]
        yield axes, str(kind), *sides, ""
    totals = [bytes_text(sum(side.values())) for side in (sent.planned, sent.compiled)]
    yield axes, "all", *totals, "equal" if sent.equal else _signed(sent.difference)


def reason_texts(sent: Sent) -> Iterator[str]:
    """Yield the reasons why the compiled program sends other bytes than planned."""
    for reason in sent.reasons:
        share = f" ({_signed(reason.adds)})" if reason.adds else ""
        yield f"{reason.what}{share}{_places(reason)}"
    # A remainder of up to 5% of the difference needs no reason.
    if not sent.equal and abs(sent.unexplained) > abs(sent.difference) // 20:
        yield f"not explained ({_signed(sent.unexplained)})"


def _places(reason: DifferenceCause) -> str:
    if not reason.sources:
        return ""
    more = len(reason.sources) - _SHOWN
    shown = ", ".join(reason.sources[:_SHOWN])
    return f" at {shown} and {more} more" if more > 0 else f" at {shown}"


def _signed(count: int) -> str:
    return f"{'-' if count < 0 else '+'}{bytes_text(abs(count))}"


@data_of.register(Verification)
def _verification(verification: Verification) -> dict[str, Any]:
    """Return the compiled numbers and the differences, without the plan."""
    return named(verification, "compiled", "verdict", "slice_bytes", "traffic")


@data_of.register(Compiled)
def _compiled(compiled: Compiled) -> dict[str, Any]:
    target = {**compiled.target.to_json(), "compiler": compiled.target.compiler}
    return {**target, **named(compiled, "collectives", "memory", "peak", "refused")}


@data_of.register(Sent)
def _sent(sent: Sent) -> dict[str, Any]:
    names = ("mesh_axes", "planned", "compiled", "difference", "reasons", "unexplained")
    return named(sent, *names)
