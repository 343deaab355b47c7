"""The pages of the documentation as blocks, and what running a page's blocks in order prints."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shardwright as sw
from shardwright.cli.main import main
from shardwright.cli.tensors import read_tensors
from shardwright.plan.hardware import read_hardware

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

_FENCE = re.compile(r"^```(\w*)[ \t]*(.*)$")
_TITLE = re.compile(r'title="([^"]+)"')
# What the site shows of a line without scrolling.
COLUMNS = 90
# What a reader types that needs a network, a clone or minutes: checked for its target or its name,
# not run.
_NOT_RUN = ("git clone ", "cd ", "python -m pip install ", "pip install ")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: language, rest of its first line, text, and the first line of the text."""

    lang: str
    info: str
    text: str
    line: int

    @property
    def title(self) -> str:
        match = _TITLE.search(self.info)
        return match[1] if match else ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An output that a page shows, and the one that running gave."""

    block: Block
    actual: str


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    actual: list[Block] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        at += 1
        if fence:
            start = at
            while lines[at] != "```":
                at += 1
            actual.append(
                Block(lang=fence[1], info=fence[2], text="\n".join(lines[start:at]), line=start + 1)
            )
            at += 1
    return actual


def run_page(page: Path) -> Iterator[Shown]:
    """Run the blocks of a page in the current folder, and yield each output that it shows.

    Raises:
      AssertionError: The page does not show an output.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    name = page.relative_to(ROOT).as_posix()
    sequence = blocks(page.read_text(encoding="utf-8"))
    for block, after in zip(sequence, [*sequence[1:], None], strict=False):
        place = f"{name}:{block.line}"
        if block.lang == "python" and block.title:
            Path(block.title).write_text(block.text + "\n", encoding="utf-8")
            continue
        if block.lang == "python":
            actual = _run_python(block, place, namespace)
        elif block.lang == "console":
            actual = _run_console(block, place)
        else:
            _check_file(block, place)
            continue
        if after is not None and after.lang == "text" and not after.title:
            yield Shown(block=after, actual=folded(actual))
        else:
            assert not actual, f"{place} prints, and the page does not show it:\n{actual}"


def folded(text: str) -> str:
    """Return text with long lines folded between words, as a page shows messages."""
    return "\n".join(part for line in text.splitlines() for part in _fold(line))


def _fold(line: str) -> list[str]:
    if len(line) <= COLUMNS:
        return [line]
    indent = len(line) - len(line.lstrip())
    label = re.match(r"\s*(\d+\. |fix +|rule +|- )", line)
    hanging = " " * (len(label[0]) if label else indent + 2)
    return textwrap.wrap(
        line,
        COLUMNS,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def _run_python(block: Block, place: str, namespace: dict[str, object]) -> str:
    out = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.text, place.partition(":")[0], "exec")
    with contextlib.redirect_stdout(out):
        exec(code, namespace)
    return out.getvalue().rstrip("\n")


def _run_console(block: Block, place: str) -> str:
    out = io.StringIO()
    for line in block.text.replace("\\\n", " ").splitlines():
        assert line.startswith("$ "), (
            f"{place}: {line!r} is not a command; outputs go into a text block"
        )
        command = line.removeprefix("$ ").partition("  #")[0].strip()
        if command.startswith("make "):
            targets = re.findall(
                r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
            )
            assert command.split()[1] in targets, f"{place}: no such target"
        elif command.startswith("pytest "):
            out.write(_run_pytest(shlex.split(command)[1:]))
        elif not command.startswith(_NOT_RUN):
            words = shlex.split(command)
            assert words[0] == "shardwright", f"{place}: {command!r} cannot be run here"
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                main(words[1:])
    # A machine that is slow prints the progress of a search, which no page shows.
    return re.sub(r"(?m)^(judged|planned) \d+ of \d+ .*\n", "", out.getvalue()).rstrip("\n")


def _run_pytest(words: list[str]) -> str:
    """Run pytest in the current folder, as a reader does, and return its output."""
    # Under CI, pytest prints whole messages in its summary; a page shows what a reader sees at a
    # terminal.
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTEST_", "XLA_", "JAX_"))
    }
    env = {
        key: value
        for key, value in env.items()
        if key not in ("CI", "BUILD_NUMBER", "NO_COLOR", "FORCE_COLOR", "PY_COLORS")
    }
    env |= {
        "PYTHONPATH": str(ROOT / "src"),
        "JAX_PLATFORMS": "cpu",
        "COLUMNS": "90",
        "PYTEST_ADDOPTS": "-p shardwright_pytest",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert not done.stderr, done.stderr
    # What differs from run to run, and the lines of other libraries' files.
    text = re.sub(r" in \d+\.\d+s( \(\d:\d\d:\d\d\))?", "", done.stdout).replace(
        f"{Path.cwd()}/", ""
    )
    return re.sub(
        r"\b(\w+\.py):\d+$",
        lambda place: place[0] if Path(place[1]).exists() else place[1],
        text,
        flags=re.MULTILINE,
    )


def needs(page: Path) -> set[str]:
    """Return the packages of a page that only `make docs` and `make check` install."""
    sequence = blocks(page.read_text(encoding="utf-8"))
    code = "".join(block.text for block in sequence if block.lang == "python")
    names = {
        name
        for name in ("flax", "equinox", "haliax")
        if re.search(rf"^(from|import) {name}\b", code, re.MULTILINE)
    }
    # `--fix` edits files with tomlkit.
    edits = any(" --fix" in block.text for block in sequence if block.lang == "console")
    return {*names, "tomlkit"} if edits else names


def _check_file(block: Block, place: str) -> None:
    """Load a strategy, or a file of tensors or chips, and leave it in the folder under its title.

    Files of other kinds are read by the snippets after them.
    """
    if block.lang in ("yaml", "text") and block.title:
        Path(block.title).write_text(block.text + "\n", encoding="utf-8")
        return
    if block.lang not in ("toml", "json"):
        assert block.lang == "text", (
            f"{place}: a block of {block.lang!r} is not checked by anything"
        )
        return
    if block.title:
        Path(block.title).write_text(block.text + "\n", encoding="utf-8")
    if "tensors" in block.info:
        assert read_tensors(block.title)
    elif "hardware" in block.info:
        assert read_hardware(block.title)
    elif "wrong" in block.info or block.title == "config.json":
        (tomllib if block.lang == "toml" else json).loads(block.text)
    else:
        format_: Any = block.lang
        sw.Strategy.loads(block.text, format=format_, source=block.title or place)


def rewritten(page: Path) -> str:
    """Return a page with every shown output replaced by what running gives."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for shown in reversed(list(run_page(page))):
        start = shown.block.line - 1
        lines[start : start + len(shown.block.text.splitlines())] = shown.actual.splitlines()
    return "\n".join(lines) + "\n"


def script(page: Path) -> str:
    """Return a page's Python as one script, as a reader would paste it."""
    return "\n".join(
        block.text for block in blocks(page.read_text(encoding="utf-8")) if block.lang == "python"
    )


def links(text: str) -> list[str]:
    """Return the targets of a page's links, outside fenced blocks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, spelled as on GitHub."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
