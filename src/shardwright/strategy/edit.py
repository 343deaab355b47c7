"""Edit the text of a strategy file. Comments and the order of its keys stay."""

from __future__ import annotations

import re
from typing import Any

from shardwright.errors import StrategyError
from shardwright.strategy.origin import KeyPath
from shardwright.vocabulary.axes import canonical_axis

# What stands before a comment: a "#" inside of quotes begins none.
_CODE = re.compile(r"""(?:[^#"']|"(?:[^"\\]|\\.)*"|'[^']*')*""")


def rename(text: str, line: int, old: str, new: str) -> str:
    """Replace a word on one line, but not in its comment. Lines are counted from 1."""
    lines = text.split("\n")
    code = _CODE.match(lines[line - 1])[0]  # type: ignore[index]  # it may be empty
    comment = lines[line - 1].removeprefix(code)
    lines[line - 1] = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", new, code) + comment
    return "\n".join(lines)


def set_value(text: str, table: KeyPath, key: str, value: str | int) -> str:
    """Return TOML text with another value of a key. A missing table or key is added at its end.

    The text is returned unchanged if the table is an array of tables, whose chains interleave.

    Raises:
      StrategyError: tomlkit is not installed.
    """
    try:
        import tomlkit
    except ImportError as error:
        fix = "run python -m pip install tomlkit"
        raise StrategyError("editing a strategy needs tomlkit", fix=fix) from error
    document: Any = tomlkit.parse(text)
    place = document
    for at, name in enumerate(table):
        if isinstance(place, list):
            place = place[int(name)]
            continue
        if name not in place:
            # The header of an outer table, such as [modes] of [modes.decode], is left out.
            place[name] = tomlkit.table(is_super_table=at + 1 < len(table))
        place = place[name]
    if isinstance(place, list):
        return text
    axis = canonical_axis(key)
    # A file may spell an axis in several ways: `head`, `HEAD` or `__HEAD__`.
    place[next((own for own in place if canonical_axis(own) == axis), key)] = value
    result: str = tomlkit.dumps(document)
    return result
