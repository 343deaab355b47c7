"""Golden files over a whole run: which files the tests of a module used, and which no test uses.

Tests run in any process (pytest-xdist), so a test's report carries what it used, and the process that started judges.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardwright.testing.golden import Golden

FOLDER = "golden"
UPDATE = "--update-golden"

_GOLDEN = pytest.StashKey[Golden]()
_COUNTS = pytest.StashKey[dict[Path, int]]()
_PARTIAL = pytest.StashKey[set[Path]]()
_UNFIT = re.compile(r"[^\w.,=+-]+")


def golden_of(item: pytest.Item) -> Golden:
    """Return a test's golden files: `golden/<module>/<test>.txt` beside the module."""
    if _GOLDEN not in item.stash:
        name = _UNFIT.sub("-", item.name.removeprefix("test_")).strip("-")
        call = getattr(item, "callspec", None)
        item.stash[_GOLDEN] = Golden(
            folder=_folder(item),
            test=name,
            update=bool(item.config.getoption("update_golden")),
            command=f"pytest '{item.nodeid}' {UPDATE}",
            case="" if call is None else str(getattr(call.params.get("_mesh_case"), "id", "")),
            parameters="" if call is None else call.id,
        )
    return item.stash[_GOLDEN]


def _folder(item: pytest.Item) -> Path:
    return item.path.parent / FOLDER / item.path.stem


def _users(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    return [item for item in items if "golden" in getattr(item, "fixturenames", ())]


def count(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Count the tests of each module that use golden files."""
    counts = config.stash.setdefault(_COUNTS, {})
    partial = config.stash.setdefault(_PARTIAL, set())
    for item in _users(items):
        counts[_folder(item)] = counts.get(_folder(item), 0) + 1
        # `pytest module.py::test` and --lf collect a part of the module.
        if config.getoption("lf", False) or any(_names_part_of(item.path, arg, config) for arg in config.args):
            partial.add(_folder(item))


def _names_part_of(path: Path, argument: str, config: pytest.Config) -> bool:
    file, part, _ = argument.partition("::")
    return bool(part) and (config.invocation_params.dir / file).resolve() == path.resolve()


def deselect(items: Sequence[pytest.Item]) -> None:
    """Remember the modules of which only a part runs."""
    for item in _users(items):
        item.config.stash.setdefault(_PARTIAL, set()).add(_folder(item))


def attach(item: pytest.Item, report: pytest.TestReport) -> None:
    """Put what a test used into the report of its call, as plain data that crosses processes."""
    if report.when != "call" or _GOLDEN not in item.stash:
        return
    folder, golden = _folder(item), item.stash[_GOLDEN]
    whole = folder not in item.config.stash.get(_PARTIAL, set())
    report.golden_use = {  # type: ignore[attr-defined]
        "test": item.nodeid,
        "folder": str(folder),
        "used": dict(golden.used),
        "written": list(golden.written),
        "tests": item.config.stash[_COUNTS].get(folder, 0) if whole else 0,
        "passed": report.passed,
    }


def judge(uses: Sequence[dict[str, Any]], session: pytest.Session) -> list[str]:
    """Return what to say at the end; fail the run for files that no test uses, or remove them with `--update-golden`.

    A module is judged only if all of its tests that use golden files ran and passed: another run knows no more.
    """
    root, update = session.config.rootpath, bool(session.config.getoption("update_golden"))
    lines = [f"written: {_shown(Path(use['folder']) / f'{name}.txt', root)}" for use in uses for name in use["written"]]
    problems = _clashes(uses, root)
    for folder in dict.fromkeys(Path(use["folder"]) for use in uses):
        of_folder = [use for use in uses if use["folder"] == str(folder)]
        for path in _unused(folder, of_folder):
            if update:
                path.unlink()
                lines.append(f"removed, since no test uses it: {_shown(path, root)}")
            else:
                problems.append(f"no test uses {_shown(path, root)}; remove it, or run the module with {UPDATE}")
        problems += [f"no module {path.name}.py beside {_shown(path, root)}; remove the folder" for path in _orphans(folder.parent)]
    if problems and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return [*lines, *dict.fromkeys(problems)]


def _clashes(uses: Sequence[dict[str, Any]], root: Path) -> list[str]:
    """Say which tests want different contents of one file: whichever is written, the others fail."""
    seen: dict[tuple[str, str], dict[str, Any]] = {}
    found = []
    for use in uses:
        for name, text in use["used"].items():
            first = seen.setdefault((use["folder"], name), use)
            if first["used"][name] != text:
                path = _shown(Path(use["folder"]) / f"{name}.txt", root)
                found.append(f"{first['test']} and {use['test']} share {path} and want different contents; give each a name of its own")
    return found


def _unused(folder: Path, uses: Sequence[dict[str, Any]]) -> list[Path]:
    passed = {use["test"] for use in uses if use["passed"]}
    if not uses or len(passed) != uses[0]["tests"]:
        return []
    used = {f"{name}.txt" for use in uses for name in use["used"]}
    return [path for path in sorted(folder.glob("*.txt")) if path.name not in used]


def _orphans(folder: Path) -> list[Path]:
    """Return the folders of test modules that are gone."""
    if not folder.is_dir():
        return []
    return [path for path in sorted(folder.glob("test_*")) if path.is_dir() and not (folder.parent / f"{path.name}.py").exists()]


def _shown(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
