"""Pages and errors name extras that exist, and install them from a clone."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(
        path
        for folder in ("src", "examples", "benchmarks", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ),
]
BY_NAME = re.compile(r"""pip install\s+(?:-\S+\s+)*["']?shardwright\b""")
EXTRAS = re.compile(r"""pip install -e ["']?\.\[([\w,]+)\]""")


def test_nothing_installs_the_package_by_name() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in FILES}
    assert [name for name, text in texts.items() if BY_NAME.search(text)] == []


def test_extras_that_are_named_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    named = {
        extra
        for path in FILES
        for extra_name in EXTRAS.findall(path.read_text(encoding="utf-8"))
        for extra in extra_name.split(",")
    }
    assert named >= {"checkpoint", "demo", "optax", "pytest"}
    assert named <= set(extras)


@pytest.mark.parametrize(
    "text",
    [
        'pip install "shardwright[checkpoint]"',
        'pip install\n  "shardwright[checkpoint]"',
        "pip install shardwright",
        "pip install -U shardwright",
    ],
)
def test_install_by_name_is_detected(text: str) -> None:
    assert BY_NAME.search(text)
