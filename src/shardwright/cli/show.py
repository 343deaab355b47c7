"""How commands print: at the width of the terminal, in colour where it shows colours and rich is installed, else plain text."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from shardwright.resolution.tables import WIDTH

LEAST_WIDTH = 40
SEVERITIES: Mapping[str, str] = {
    r"(?<![\w-])error(?= )": "bold red",
    r"(?<![\w-])warning(?= )": "yellow",
    r"(?<![\w-])note(?= )": "cyan",
}


def width_of(asked: int | None) -> int:
    """Return the characters per line: what was asked for, else the terminal's, else the same everywhere, for files and pipes."""
    if asked is not None:
        return asked
    try:
        return max(LEAST_WIDTH, os.get_terminal_size(sys.stdout.fileno()).columns)
    except (OSError, ValueError):  # no terminal; no file
        return WIDTH


def print_lines(lines: Iterable[str], *, marks: Mapping[str, str] | None = None) -> None:
    """Print lines; what a pattern of `marks` matches is in its style where the terminal shows styles."""
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
        # Lines are laid out already: rich must not wrap them again.
        console.print(text, soft_wrap=True, highlight=False, markup=False)


def _console() -> Any:
    """Return rich's console where stdout is a terminal that shows colours (rich honours NO_COLOR and TERM), or None."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:  # the extra `cli`: without it, the same text without colour
        return None
    console = Console(file=sys.stdout)
    return None if console.no_color or console.color_system is None else console


def print_json(data: Any) -> None:
    """Print data as JSON."""
    print(json.dumps(data, indent=2))
