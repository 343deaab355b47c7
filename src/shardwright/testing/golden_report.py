"""Golden files over a whole run: which files the tests of a module used, and which no test uses.

With pytest-xdist, tests run in several processes. Each test's report carries the files that it
used, and the process that started the run evaluates the reports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardwright.testing.golden import Golden

FOLDER = "golden"
UPDATE = "--update-golden"

_REPORTS = "shardwright_golden_reports"
_PHASES = {"setup", "call", "teardown"}
_GOLDEN = pytest.StashKey[Golden]()
_NAMES = pytest.StashKey[dict[str, dict[str, list[str]]]]()
_UNFIT = re.compile(r"[^\w.,=+-]+")


def golden_of(item: pytest.Item) -> Golden:
    """Return a `Golden` for one run of a test: `golden/<module>/<test>.txt` beside the module."""
    call = getattr(item, "callspec", None)
    item.stash[_GOLDEN] = Golden(
        folder=_folder(item),
        test=_name(item),
        update=bool(item.config.getoption("update_golden")),
        command=f"pytest '{item.nodeid}' {UPDATE}",
        case="" if call is None else str(getattr(call.params.get("_mesh_case"), "id", "")),
        parameters="" if call is None else call.id,
        rivals=_rivals(item),
    )
    return item.stash[_GOLDEN]


def _folder(item: pytest.Item) -> Path:
    return item.path.parent / FOLDER / item.path.stem


def _name(item: pytest.Item) -> str:
    classes = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    return _UNFIT.sub("-", "-".join([*classes, item.name.removeprefix("test_")])).strip("-")


def _rivals(item: pytest.Item) -> tuple[str, ...]:
    """Return all tests with the default file of this test; empty if only this test has it."""
    modules = item.config.stash.setdefault(_NAMES, {})
    # Compute this once per module: a search through all tests for each test takes quadratic time.
    if str(item.path) not in modules:
        names = modules[str(item.path)] = {}
        for user in _reports(item).users.get(str(item.path), []):
            names.setdefault(_name(user), []).append(user.nodeid)
    rivals = tuple(dict.fromkeys(modules[str(item.path)].get(_name(item), [])))
    return rivals if len(rivals) > 1 else ()


def _reports(item: pytest.Item) -> Any:
    return item.config.pluginmanager.get_plugin(_REPORTS)


def _names_part_of(path: Path, argument: str, config: pytest.Config) -> bool:
    """Tell whether an argument such as `module.py::test` names a part of a module.

    An argument of `--pyargs`, such as `package.module::test`, may name a part of any module.
    """
    file, part, _ = argument.partition("::")
    named = (config.invocation_params.dir / file).resolve()
    return bool(part) and (named == path.resolve() or not named.exists())


def attach(item: pytest.Item, report: pytest.TestReport) -> None:
    """Add to a test's report the files that it used, as plain data to send between processes."""
    if report.when == "setup" or _GOLDEN not in item.stash:
        return
    config, reports, module, golden = (
        item.config,
        _reports(item),
        str(item.path),
        item.stash[_GOLDEN],
    )
    users = reports.users.get(module, [])
    partial = module in reports.partial or config.getoption("lf", False) or item not in users
    partial = partial or any(
        _names_part_of(item.path, argument, config) for argument in config.args
    )
    # pytest-xdist sends the attributes of a report to the main process, if they are plain data.
    report.golden_use = {  # type: ignore[attr-defined]
        "test": item.nodeid,
        "module": module,
        "folder": str(_folder(item)),
        "used": dict(golden.used),
        "written": list(golden.written),
        "tests": 0 if partial else len(users),
    }


def judge(
    uses: Sequence[dict[str, Any]],
    phases: Mapping[str, Mapping[str, set[str]]],
    session: pytest.Session,
) -> list[str]:
    """Return the lines of the final report about golden files.

    A file that no test uses fails the run; `--update-golden` removes it instead. A module is
    checked only if all of its tests that may use golden files ran and passed, because otherwise
    an unused file may belong to a test that did not run.

    Args:
      uses: the golden files that tests used, as `attach` records them.
      phases: module → test → the phases that passed when it last ran, and `failed` if one failed.
      session: the run.
    """
    root, update = session.config.rootpath, bool(session.config.getoption("update_golden"))
    lines = list(
        dict.fromkeys(
            f"written: {_shown(Path(use['folder']) / f'{name}.txt', root)}"
            for use in uses
            for name in use["written"]
        )
    )
    problems = _clashes(uses, root)
    for folder in dict.fromkeys(Path(use["folder"]) for use in uses):
        of_folder = [use for use in uses if use["folder"] == str(folder)]
        for path in _unused(folder, of_folder, phases):
            if update:
                path.unlink()
                lines.append(f"removed, since no test uses it: {_shown(path, root)}")
            else:
                problems.append(
                    f"no test uses {_shown(path, root)}; remove it, or run the module with {UPDATE}"
                )
        beside = folder.parent
        modules = {path.stem for path in beside.parent.iterdir() if path.is_file()}
        problems += [
            f"no module {path.name}.py beside {_shown(path, root)}; remove the folder"
            for path in sorted(beside.glob("test_*"))
            if path.is_dir() and path.name not in modules
        ]
    # A session that failed, or that was interrupted, keeps its own exit code.
    if problems and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return [*lines, *dict.fromkeys(problems)]


def _clashes(uses: Sequence[dict[str, Any]], root: Path) -> list[str]:
    """Return a line for each pair of tests that expect different contents of one file."""
    seen: dict[tuple[str, str], dict[str, Any]] = {}
    lines = []
    for use in uses:
        for name, text in use["used"].items():
            first = seen.setdefault((use["folder"], name), use)
            if first["used"][name] != text and first["test"] != use["test"]:
                path = _shown(Path(use["folder"]) / f"{name}.txt", root)
                lines.append(
                    f"{first['test']} and {use['test']} share {path} and expect different "
                    f"contents; give each a name of its own"
                )
    return lines


def _unused(
    folder: Path, uses: Sequence[dict[str, Any]], phases: Mapping[str, Mapping[str, set[str]]]
) -> list[Path]:
    # A page with doctests may have the name of a module. Then page and module use one folder, so do
    # not judge its files.
    module, *others = [
        path
        for path in folder.parent.parent.iterdir()
        if path.is_file() and path.stem == folder.name
    ]
    passed = sum(done == _PHASES for done in phases.get(str(module), {}).values())
    if others or {use["tests"] for use in uses} != {passed}:
        return []
    used = {f"{name}.txt" for use in uses for name in use["used"]}
    return [path for path in sorted(folder.glob("*.txt")) if path.name not in used]


def _shown(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
