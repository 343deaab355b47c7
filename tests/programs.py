"""Compare compiled programs by their text."""

from __future__ import annotations

import re
from typing import Any, Final

import jax

# Without this emitter, which other tests do not need, the order of two copies depends on their
# names, so equal programs may have unequal texts. JAX 0.11 has another emitter.
OPTIONS: Final = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}


def text_of(compiled: Any) -> str:
    """Return a compiled program's text without the locations of its source.

    Instructions and computations are numbered in the order of the text: their own names have
    numbers that depend on what was traced before.
    """
    text = re.sub(r",? ?metadata=\{[^{}]*\}", "", compiled.as_text())
    assert "metadata=" not in text
    kept, table = [], False
    for line in text.splitlines():
        # FileNames, FunctionNames, FileLocations and StackFrames are tables: a heading, numbered
        # lines, an empty line.
        table = bool(
            re.fullmatch(r"(FileNames|FunctionNames|FileLocations|StackFrames)\s*", line)
        ) or (table and bool(line.strip()))
        if not table:
            kept.append(line)
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return numbers.setdefault(match.group(1), f"%{len(numbers)}")

    # A computation lists its parameters as "name: shape"; elsewhere a name follows "%".
    named = re.sub(r"(?<=[(\s])([\w.-]+)(?=: )", r"%\1", "\n".join(kept))
    return "\n".join(line for line in re.sub(r"%([\w.-]+)", number, named).splitlines() if line)


def differing_lines(ours: str, theirs: str) -> list[tuple[str, str]]:
    return [
        pair
        for pair in zip(ours.splitlines(), theirs.splitlines(), strict=False)
        if pair[0] != pair[1]
    ][:5]


def assert_same(ours: Any, theirs: Any) -> None:
    """Check that two compiled programs have the same text, and communicate."""
    a, b = text_of(ours), text_of(theirs)
    assert "\nENTRY " in a
    assert "all-reduce" in a
    assert a == b, differing_lines(a, b)
