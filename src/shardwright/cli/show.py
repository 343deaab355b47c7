"""Print output as wide as the terminal. Colors need a terminal with colors, and rich."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from shardwright.errors import visible
from shardwright.vocabulary.shown import WIDTH

LEAST_WIDTH = 40
SEVERITIES: Mapping[str, str] = {
    r"(?<![\w-])error(?= )": "bold red",
    r"(?<![\w-])warning(?= )": "yellow",
    r"(?<![\w-])note(?= )": "cyan",
}


def width_of(width: int | None) -> int:
    """Return the number of characters per line: as given, else the terminal's, else a default."""
    if width is not None:
        return width
    try:
        return max(LEAST_WIDTH, os.get_terminal_size(sys.stdout.fileno()).columns)
    except (OSError, ValueError):  # stdout is not a terminal, or not a file
        return WIDTH


def print_lines(lines: Iterable[str], *, marks: Mapping[str, str] | None = None) -> None:
    """Print lines, with escapes for characters that are not printable.

    `marks` maps patterns to the styles that terminals with colors show.
    """
    lines = map(visible, lines)
    console = _console()
    if console is None or not marks:
        print("\n".join(lines))
        return
    from rich.text import Text

    for line in lines:
        text = Text(line)
        for pattern, style in marks.items():
            if re.search(pattern, line):
                text.highlight_regex(pattern, style)
        # Lines already fit the width, so rich must not wrap them.
        console.print(text, soft_wrap=True, highlight=False, markup=False)


def _console() -> Any:
    """Return rich's console if stdout is a terminal with colors, else None."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:  # rich is optional (the extra `cli`)
        return None
    console = Console(file=sys.stdout)
    # rich decides by NO_COLOR and TERM whether a terminal shows colors.
    return None if console.no_color or console.color_system is None else console


def print_json(data: Any) -> None:
    """Print data as JSON."""
    print(json.dumps(data, indent=2))


class ProgressLine:
    """Progress on stderr. On a terminal, one line is overwritten.

    Elsewhere, such as in the log of CI, a new line is printed every ten seconds.
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._every = 0.1 if self._terminal else 10.0
        self._width = 0
        self._started = time.monotonic()
        # A terminal shows the first state at once. A log shows a state only after `_every` seconds.
        self._due = 0.0 if self._terminal else self._started + self._every

    def __call__(self, state: Any) -> None:
        """Show a state and the seconds since the start, unless the last line is too recent.

        Candidates differ too much in cost to estimate the time that is left.
        """
        now = time.monotonic()
        if now < self._due or sys.stderr is None:
            return
        self._due = now + self._every
        text = visible(f"{state}, {now - self._started:.0f} s")
        # A carriage return goes back to the first column, and the padding erases the rest of a
        # longer previous line.
        sys.stderr.write(f"\r{text:<{self._width}}" if self._terminal else f"{text}\n")
        sys.stderr.flush()
        self._width = len(text)

    def close(self) -> None:
        """Clear the line of a terminal."""
        if self._width and self._terminal:
            sys.stderr.write(f"\r{'':<{self._width}}\r")
            sys.stderr.flush()
            self._width = 0
