"""Find the line of each key in TOML and JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from shardwright.strategy.limits import DEEPEST

# Each pattern takes linear time on any line, because no two adjacent parts of it can match the same
# characters.
_HEADER = re.compile(r"^\s*(\[\[?)([^\[\]]+)\]\]?\s*(?:#.*)?$")


_KEY = re.compile(
    r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
    r"""(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)


_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")


def toml_lines(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield each key path of TOML text and its line.

    An inline table or a multi-line value is one key.
    """
    table: tuple[str, ...] = ()
    counts: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        header, key = _HEADER.match(line), _KEY.match(line)
        if header:
            table = _parts(header[2])
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = (*table, str(counts[table]))
            yield table, number
        elif key:
            yield (*table, *_parts(key[1])), number


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))


_JSON_TOKEN = re.compile(r'(?P<key>"(?:[^"\\]|\\.)*")\s*:|"(?:[^"\\]|\\.)*"|[{}\[\],]')


def json_lines(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield each key path of valid JSON text and its line."""
    owners: list[str] = []
    counts: list[int] = []
    key, line, counted = "", 1, 0
    for match in _JSON_TOKEN.finditer(text):
        token = match[0]
        if token in ("{", "["):
            owners.append(key)
            # -1 stands for an object, whose commas count no entries.
            counts.append(0 if token == "[" else -1)
            key = "0" if token == "[" else ""
        elif token in ("}", "]"):
            key, _ = owners.pop(), counts.pop()
        elif token == "," and counts and counts[-1] >= 0:
            counts[-1] += 1
            key = str(counts[-1])
        elif match["key"]:
            key = json.loads(match["key"])
            # Counting goes on from the last key, so the whole text is counted once.
            line += text.count("\n", counted, match.start())
            counted = match.start()
            # Deeper data is refused later. Its paths alone would take quadratic memory.
            if len(owners) <= DEEPEST:
                yield (*filter(None, owners), key), line
