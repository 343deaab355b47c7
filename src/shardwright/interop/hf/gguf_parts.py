"""The files of one GGUF checkpoint: a file, or several that llama.cpp has split."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from shardwright.errors import CheckpointError, Problem, raise_problems
from shardwright.interop.hf.gguf_header import Header, read_header

_NAME: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_AGAIN: Final = "download all files of the checkpoint again"


def first_part(files: Sequence[Path]) -> Path | None:
    """Return the first file if all files are parts of one checkpoint, or None."""
    matches = [_NAME.fullmatch(file.name) for file in files]
    stems = {match and (match[1], match[3]) for match in matches}
    return files[0] if len(stems) == 1 and None not in stems else None


def read_parts(path: Path) -> dict[Path, Header]:
    """Return the headers of all files of a checkpoint, the first one first.

    Args:
      path: The file, or one of several.

    Raises:
      CheckpointError: A file is absent or truncated, or is not a part of this checkpoint; all such
        files are reported at once.
    """
    header = read_header(path)
    count = header.keys.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return {path: header}
    match = _NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        what = f"{path.name} is one of {count} files of a checkpoint, and its name does not say so"
        fix = f"give the files their names again: model-00001-of-{count:05}.gguf and so on"
        raise CheckpointError(what, fix=fix)
    names = [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, count + 1)]
    parts: dict[Path, Header] = {}
    problems: list[Problem] = []
    for number, name in enumerate(names):
        file = path.with_name(name)
        if not file.is_file():
            problems.append(_problem(f"{file} does not exist"))
            continue
        try:
            parts[file] = read_header(file)
        except CheckpointError as error:
            problems += error.problems
            continue
        found = tuple(parts[file].keys.get(key) for key in ("split.no", "split.count"))
        if found != (number, count):
            what = f"{name} says that it is part {found[0]} (from 0) of {found[1]}"
            problems.append(_problem(what))
    raise_problems(problems or _uncounted(path, parts))
    return parts


def _uncounted(path: Path, parts: Mapping[Path, Header]) -> list[Problem]:
    """Return a problem if the number of tensors is not the one that the first header states."""
    said = next(iter(parts.values())).keys.get("split.tensors.count")
    total = sum(len(header.tensors) for header in parts.values())
    if said in (None, total):
        return []
    what = f"the {len(parts)} files of {path.name} have {total} tensors, and the first says {said}"
    return [_problem(what)]


def _problem(what: str) -> Problem:
    return Problem(error=CheckpointError, what=what, fix=_AGAIN)
