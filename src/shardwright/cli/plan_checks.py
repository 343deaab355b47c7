"""Checks of a plan: forbidden collectives, and limits of replicated bytes and of memory."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping

from shardwright.errors import ShardingError, StrategyError, did_you_mean
from shardwright.plan.collectives.collective import Collective, Kind
from shardwright.plan.hardware import Topology, smallest_slice
from shardwright.plan.state import StateBytes
from shardwright.plan.walk.events import Event
from shardwright.vocabulary.modes import mode_name, parse_mode
from shardwright.vocabulary.units import BYTES, bytes_text

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(B|KiB|MiB|GiB|TiB|%)")
# `*` stands for every kind.
_FORBID = re.compile(r"([a-z_*]+)(?:@([a-z]+))?(?:>([0-9]+(?:\.[0-9]+)?)\s*(B|KiB|MiB|GiB|TiB))?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forbidden:
    """A collective that must not occur.

    Attributes:
      text: The text on the command line.
      kind: Kind of collective, or None for every kind.
      mode: Mode, or None for every mode.
      more_than: Number of bytes that a device may send in all runs of one collective. If a device
        sends more, the collective is forbidden.
    """

    text: str
    kind: Kind | None
    mode: str | None
    more_than: int

    def matches(self, event: Event | Collective, mode: str) -> bool:
        """Tell whether a planned or a compiled collective is forbidden."""
        sent = event.total_wire_bytes
        # If a loop runs an unknown number of times, its bytes are unknown, and count as too many.
        too_much = sent is None or sent > self.more_than
        return too_much and self.kind in (None, event.kind) and self.mode in (None, mode)


def read_forbidden(text: str) -> Forbidden:
    """Return the collective that text such as `all_gather@decode>1MiB` forbids. An argparse type.

    Raises:
      argparse.ArgumentTypeError: The text is not a kind, a mode and a number of bytes.
    """
    match = _FORBID.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is not KIND, KIND@MODE or KIND@MODE>BYTES; "
            'write "all_gather@decode>1MiB"'
        )
    kind, mode, number, unit = match.groups()
    if kind != "*" and kind not in set(Kind):
        hint = did_you_mean(kind, [str(known) for known in Kind])
        raise argparse.ArgumentTypeError(f"no collective {kind!r}; {hint}".rstrip("; "))
    try:
        parsed = None if mode is None else parse_mode(mode)
    except ShardingError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Forbidden(
        text=text,
        kind=None if kind == "*" else Kind(kind),
        mode=parsed,
        # Without a number of bytes, every collective of the kind is forbidden.
        more_than=0 if number is None else int(float(number) * BYTES[unit]),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit on bytes: a share of a total, or a number of bytes.

    Attributes:
      text: The text on the command line.
      share: The share, or None.
      bytes: The number of bytes, or None.
    """

    text: str
    share: float | None = None
    bytes: int | None = None


def read_limit(text: str) -> Limit:
    """Return the limit that text such as `2%` or `1GiB` sets. An argparse type.

    Raises:
      argparse.ArgumentTypeError: The text is neither a share nor a number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a size; write 2% or 1GiB")
    number, unit = float(match[1]), match[2]
    if unit == "%":
        return Limit(text=text, share=number / 100)
    return Limit(text=text, bytes=int(number * BYTES[unit]))


def copies_breach(limit: Limit, state: StateBytes) -> str:
    """Return how the copies in a state exceed a limit, or "" if they do not.

    A share is relative to the bytes on all devices.
    """
    held = state.stored
    if limit.share is not None and held.replicated_share > limit.share:
        return f"{held.replicated_share:.1%} of the state are copies"
    if limit.bytes is not None and held.replicated > limit.bytes:
        return f"{bytes_text(held.replicated)} of the state are copies"
    return ""


def memory_breach(limit: Limit, most: int, usable: int | None) -> str:
    """Return how a peak exceeds a limit, or "" if it does not.

    A share is relative to the usable bytes of the chip.

    Args:
      limit: The limit.
      most: Upper end of the peak.
      usable: Usable bytes of the chip, or None if it is not known.

    Raises:
      StrategyError: The limit is a share, and the chip is not known.
    """
    if limit.share is not None and usable is None:
        raise StrategyError(
            f"--max-hbm {limit.text} is a share of a chip, but no --topology is given",
            fix="add --topology v5p:4x4x4, or give bytes such as 16GiB",
        )
    allowed = limit.bytes if limit.share is None else int(limit.share * (usable or 0))
    if allowed is not None and most > allowed:
        return f"up to {bytes_text(most)} per device"
    return ""


def limit_failures(
    arguments: argparse.Namespace,
    states: Mapping[str, StateBytes],
    peaks: Mapping[str, int],
    topology: Topology | None,
) -> list[str]:
    """Return how the state and the memory of each mode exceed `--max-replicated` and `--max-hbm`.

    Args:
      arguments: The command's arguments.
      states: State by mode.
      peaks: Upper end of the bytes on one device, by mode.
      topology: The slice, or None.

    Raises:
      StrategyError: A limit is a share of a chip, and the chip is not known.
    """
    copies: Limit | None = arguments.max_replicated
    memory: Limit | None = arguments.max_hbm
    usable = None if topology is None else topology.chip.hbm_bytes
    failures: list[str] = []
    for mode, state in states.items():
        breach = "" if copies is None else copies_breach(copies, state)
        if copies is not None and breach:
            failures.append(f"--max-replicated {copies.text}: mode {mode_name(mode)}: {breach}")
        breach = "" if memory is None else memory_breach(memory, peaks[mode], usable)
        if memory is not None and breach:
            failures.append(f"--max-hbm {memory.text}: mode {mode_name(mode)}: {breach}")
    return failures


def what_holds(state: StateBytes, topology: Topology | None) -> str:
    """Return a text that names the smallest slice that holds one copy of the state."""
    if topology is None:
        return ""
    # However the rules shard the state, the devices of a mesh hold at least one copy.
    needed = state.of().total
    slice_, group = smallest_slice(topology.chip, needed), "slice"
    if topology.chip.domain:
        group = "cluster"
    smallest = f"no {group} of {topology.chip.name} can hold it"
    if slice_:
        smallest = f"the smallest {group} that can hold it is {slice_}"
    return f": one copy of the state is {bytes_text(needed)}, and {smallest}"
