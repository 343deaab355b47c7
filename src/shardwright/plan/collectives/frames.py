"""Read the source line of each instruction from the stack frames in the text of HLO."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

# Our own package: `shardwright/`, two folders above this one.
_OWN = str(Path(__file__).parents[2]) + "/"
# The reference decoder is in this package, but its lines count as lines of a model.
_REFERENCE_MODEL = f"{_OWN}interop/hf/model/"


# Python's own files and installed packages. Their lines say little to the author of the program.
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3[^/]*/|^<frozen ")


_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="((?:[^"\\]|\\.)*)"(?: source_line=(\d+))?')
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


def source_lines(lines: list[str]) -> dict[str, str]:
    """Return the source line (`file.py:12`) of each stack frame in the text's tables."""
    tables: dict[str, dict[str, str]] = {name: {} for name in _TABLES}
    current = None
    for line in lines[1:]:
        if line in tables:
            current = tables[line]
        # In the text, the tables come before the first computation.
        elif line.startswith(("%", "ENTRY")):
            break
        elif current is not None and line:
            key, _, value = line.partition(" ")
            current[key] = value
    places = {key: _place(tables, value) for key, value in tables["StackFrames"].items()}
    # Ids start at 1. `parent_frame_id` is the id of the parent plus one; 1 means no parent.
    parents = {
        key: str(int(_field(value, "parent_frame_id") or 1) - 1)
        for key, value in tables["StackFrames"].items()
    }
    frames = {}
    for key, place in places.items():
        frame, callers = key, [place]
        # XLA writes a caller before its callees, so the id of a parent is smaller. Stop at any
        # other id, because the chain could be a cycle.
        while int(parents[frame]) in range(1, int(frame)):
            frame = parents[frame]
            callers.append(places[frame])
        if shown := _shown_place(callers):
            frames[key] = shown
    return frames


def source_of(metadata: str, frames: Mapping[str, str]) -> str:
    """Return the source line that the metadata of an instruction names, or "".

    Args:
      metadata: The attribute as text.
      frames: Source line by stack frame, from `source_lines`.
    """
    if match := _FRAME.search(metadata):
        return frames.get(match[1], "")
    match = _SOURCE.search(metadata)
    if match is None:
        return ""
    return f"{match[1]}:{match[2]}" if match[2] else match[1]


def _shown_place(places: Sequence[str]) -> str:
    """Return the innermost place outside of libraries and shardwright.

    If there is none, return the innermost place outside of shardwright, else the outermost place.
    """
    foreign = [
        place
        for place in places
        if place and (not place.startswith(_OWN) or place.startswith(_REFERENCE_MODEL))
    ]
    return next(
        (place for place in foreign if not _LIBRARY.search(place)),
        foreign[0] if foreign else places[-1],
    )


def _place(tables: Mapping[str, Mapping[str, str]], frame: str) -> str:
    location = tables["FileLocations"].get(_field(frame, "file_location_id"), "")
    file = tables["FileNames"].get(_field(location, "file_name_id"), "").strip('"')
    return f"{file}:{_field(location, 'line')}" if file else ""


def _field(text: str, key: str) -> str:
    match = re.search(rf"\b{key}=(\d+)", text)
    return match[1] if match else ""
