"""Checks of a plan: what must not be sent, and what must not be replicated."""

from __future__ import annotations

import argparse
import dataclasses
import re

from shardwright.errors import ShardingError, StrategyError, did_you_mean
from shardwright.plan.collectives.collective import Kind
from shardwright.plan.report.text import bytes_text
from shardwright.plan.state import StateBytes
from shardwright.plan.walk.events import Event
from shardwright.vocabulary.modes import parse_mode

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(B|KiB|MiB|GiB|TiB|%)")
_FORBID = re.compile(r"([a-z_*]+)(?:@([a-z]+))?(?:>([0-9]+(?:\.[0-9]+)?)\s*(B|KiB|MiB|GiB|TiB))?")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forbidden:
    """A collective that must not occur.

    Attributes:
      text: As written.
      kind: Kind of collective, or None for all.
      mode: Mode, or None for all.
      more_than: Bytes that one device may send in all runs of one event.
    """

    text: str
    kind: Kind | None
    mode: str | None
    more_than: int

    def matches(self, event: Event, mode: str) -> bool:
        """Tell whether an event is forbidden."""
        return (
            self.kind in (None, event.kind)
            and self.mode in (None, mode)
            and event.total_wire_bytes > self.more_than
        )


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
        more_than=0 if number is None else int(float(number) * _UNITS[unit]),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MostReplicated:
    """A limit on copies of parameters, gradients, optimizer state and caches.

    Attributes:
      text: As written.
      share: Share of all bytes held, or None.
      bytes: Bytes on all devices, or None.
    """

    text: str
    share: float | None = None
    bytes: int | None = None

    def breach(self, state: StateBytes) -> str:
        """Return how a state exceeds the limit, or ""."""
        held = state.stored
        if self.share is not None and held.replicated_share > self.share:
            return f"{held.replicated_share:.1%} of the state are copies"
        if self.bytes is not None and held.replicated > self.bytes:
            return f"{bytes_text(held.replicated)} of the state are copies"
        return ""


def read_most_replicated(text: str) -> MostReplicated:
    """Return the limit that text such as `2%` or `1GiB` sets. An argparse type.

    Raises:
      argparse.ArgumentTypeError: The text is neither a share nor a number of bytes.
    """
    number, unit = _read_size(text, "2% or 1GiB")
    if unit == "%":
        return MostReplicated(text=text, share=number / 100)
    return MostReplicated(text=text, bytes=int(number * _UNITS[unit]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MostMemory:
    """A limit on the bytes of one device.

    Attributes:
      text: As written.
      share: Share of the usable bytes of the chip, or None.
      bytes: Bytes, or None.
    """

    text: str
    share: float | None = None
    bytes: int | None = None

    def breach(self, most: int, usable: int | None) -> str:
        """Return how a peak exceeds the limit, or "".

        Args:
          most: Upper end of the peak.
          usable: Usable bytes of the chip, or None if it is not known.

        Raises:
          StrategyError: The limit is a share, and the chip is not known.
        """
        if self.share is not None and usable is None:
            raise StrategyError(
                f"--max-hbm {self.text} is a share of a chip, and no --topology is given",
                fix="add --topology v5p:4x4x4, or give bytes such as 16GiB",
            )
        limit = self.bytes if self.share is None else int(self.share * (usable or 0))
        if limit is not None and most > limit:
            return f"up to {bytes_text(most)} per device"
        return ""


def read_most_memory(text: str) -> MostMemory:
    """Return the limit that text such as `90%` or `16GiB` sets. An argparse type.

    Raises:
      argparse.ArgumentTypeError: The text is neither a share nor a number of bytes.
    """
    number, unit = _read_size(text, "90% or 16GiB")
    if unit == "%":
        return MostMemory(text=text, share=number / 100)
    return MostMemory(text=text, bytes=int(number * _UNITS[unit]))


def _read_size(text: str, example: str) -> tuple[float, str]:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a size; write {example}")
    return float(match[1]), match[2]
