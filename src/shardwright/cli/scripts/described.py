"""What a shell needs to know of a command to complete its arguments."""

from __future__ import annotations

import dataclasses
import enum


class Kind(enum.StrEnum):
    """What an argument takes."""

    NONE = "none"
    TEXT = "text"
    WORDS = "words"
    FILE = "file"
    STRATEGY = "strategy"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An option, or a positional argument if it has no flags.

    Attributes:
      flags: `--mesh`, or none.
      kind: what it takes.
      words: what it completes to; presets, where it is a strategy.
      repeated: whether it may be given again.
      name: what the help calls its value.
      what: what it is, in a few words.
    """

    flags: tuple[str, ...]
    kind: Kind
    words: tuple[str, ...]
    repeated: bool
    name: str
    what: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command, what it does, and its arguments."""

    name: str
    what: str
    arguments: tuple[Argument, ...]

    @property
    def options(self) -> tuple[Argument, ...]:
        """The arguments with flags."""
        return tuple(argument for argument in self.arguments if argument.flags)

    @property
    def positionals(self) -> tuple[Argument, ...]:
        """The arguments without, in order."""
        return tuple(argument for argument in self.arguments if not argument.flags)
