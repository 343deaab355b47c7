"""`--fix` of `check` and `plan`: make the edits that the findings on a strategy file propose.

Comments and the order of the keys stay. The edited strategy is then checked or planned again. Every
tensor or program that had no problem before must still have the same specs or the same plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardwright.errors import MeshSpecError, NewValue, Rename, ShardingError, StrategyError
from shardwright.lints.finding import Finding, from_problem
from shardwright.mesh.build import INFER
from shardwright.resolution.rules import Conflict, Indivisible, Missing, Order
from shardwright.strategy import files
from shardwright.strategy.foreign_files import read_text
from shardwright.strategy.limits import LONGEST_FILE
from shardwright.strategy.origin import KeyPath
from shardwright.vocabulary.axes import canonical_axis

if TYPE_CHECKING:
    from shardwright.strategy.model import Strategy

# Matches the text before a comment. A "#" inside of quotes does not start a comment.
_CODE = re.compile(r"""(?:[^#"']|"(?:[^"\\]|\\.)*"|'[^']*')*""")


def rename(text: str, line: int, old: str, new: str) -> str:
    """Replace a word on one line, but not in its comment. Lines are counted from 1."""
    lines = text.split("\n")
    code = _CODE.match(lines[line - 1])[0]  # type: ignore[index]  # never None: matches "" too
    comment = lines[line - 1].removeprefix(code)
    lines[line - 1] = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", new, code) + comment
    return "\n".join(lines)


def set_value(text: str, table: KeyPath, key: str, value: str | int) -> str:
    """Return TOML text with another value of a key. A missing table or key is added.

    If `table` names a whole array of tables, and not one of its entries, the text is returned
    unchanged.

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


# A misspelled name hides other mistakes, so a file is checked again after each round of edits.
_ROUNDS: Final = 8
# What a diff adds is green, and what it removes is red.
MARKS: Final = {r"^\+.*": "green", r"^-.*": "red"}

Edit = Callable[[str], str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The result of checking or planning with a strategy.

    Attributes:
      findings: What is wrong.
      results: The spec of each tensor, or the plan of each program, that has no problem.
    """

    findings: tuple[Finding, ...]
    results: Mapping[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A strategy file before and after its edits.

    Attributes:
      path: The file.
      before: Text of the file before the edits.
      after: Text of the file after the edits.
      strategy: The whole strategy after the edits, or None if it still cannot be read.
      tried: Result of checking or planning with this strategy.
      refused: Whether edits were left out because they would change a result.
    """

    path: Path
    before: str
    after: str
    strategy: Strategy | None
    tried: Tried
    refused: bool

    def report(self, *, dry: bool) -> list[str]:
        """Return the diff of the file, and a line that says what was done."""
        name = str(self.path)
        lines = list(
            difflib.unified_diff(
                self.before.split("\n"), self.after.split("\n"), name, name, n=1, lineterm=""
            )
        )
        if self.refused:
            lines.append("not edited further: more edits would change arrays that resolve now")
        if self.before == self.after:
            return [*lines, f"{name}: nothing to fix"]
        return [*lines, f"{name} {'is not written (--dry-run)' if dry else 'is fixed'}"]


def add_fix_options(command: argparse.ArgumentParser) -> None:
    """Add `--fix` and `--dry-run`."""
    command.add_argument(
        "--fix",
        action="store_true",
        help="first make the proposed edits in the last .toml file of a strategy (needs tomlkit)",
    )
    command.add_argument(
        "--dry-run", action="store_true", help="with --fix: show the edits, and write nothing"
    )


def check_fix_options(arguments: argparse.Namespace) -> None:
    """Refuse options that do not fit `--fix`.

    Raises:
      StrategyError: Options do not fit.
    """
    if arguments.dry_run and not arguments.fix:
        raise StrategyError("--dry-run is used with --fix, which is not given", fix="add --fix")
    if arguments.fix and arguments.json:
        fix = "run --fix first, then --json without it"
        raise StrategyError("--fix prints a difference, which is not JSON", fix=fix)


def fix_file(
    text: str, try_with: Callable[[Strategy], Tried], *, devices: int | None, dry: bool
) -> Fixed:
    """Edit the last TOML file of a strategy until no finding proposes another edit.

    Args:
      text: The strategy, such as `fsdp_tp | mine.toml`.
      try_with: Checks or plans with a strategy. It may raise an error, such as for a mesh that does
        not fit.
      devices: Number of devices. If the mesh does not fit this number, one size of the mesh may be
        edited.
      dry: Whether to leave the file on disk as it is.

    Raises:
      StrategyError: No file is named, the file cannot be read or written, or tomlkit is missing.
    """
    from shardwright.strategy.model import Strategy

    names = files.strategy_names(text)
    at = next((at for at in reversed(range(len(names))) if names[at].endswith(".toml")), None)
    if at is None:
        fix = f"copy it first: shardwright presets copy {names[-1]} mine.toml"
        raise StrategyError(f"--fix edits a .toml file, and {text!r} has none", fix=fix)
    path = Path(names[at])
    read_text(path, most=LONGEST_FILE)  # raises an error if the file is too large or not text
    # Decode bytes, so that line ends do not change.
    before = after = tried_text = path.read_bytes().decode("utf-8-sig")
    kept: dict[Any, Any] = {}
    best: tuple[Strategy | None, Tried] | None = None
    refused = False
    for _ in range(_ROUNDS):
        strategy = None
        mesh_edits: list[Edit] = []
        try:
            parts = [
                Strategy.loads(tried_text, source=path.name, root=path.parent)
                if number == at
                else Strategy.read(name)
                for number, name in enumerate(names)
            ]
            strategy = functools.reduce(operator.or_, parts)
            tried = try_with(strategy)
        except ShardingError as error:
            tried = Tried(findings=tuple(map(from_problem, error.problems)), results={})
            if strategy is not None and isinstance(error, MeshSpecError):
                mesh_edits = list(_mesh_edits(strategy, devices))
        refused = any(tried.results.get(key) != result for key, result in kept.items())
        if refused:
            break
        after, best, kept = tried_text, (strategy, tried), {**kept, **tried.results}
        edits = [*mesh_edits, *_edits(tried.findings, strategy, path.name)]
        tried_text = functools.reduce(lambda text, edit: edit(text), edits, after)
        if tried_text == after:
            break
    assert best is not None  # the first round has set `best`
    if after != before and not dry:
        files.write_text(path, after)
    return Fixed(
        path=path, before=before, after=after, strategy=best[0], tried=best[1], refused=refused
    )


def _edits(findings: Sequence[Finding], strategy: Strategy | None, file: str) -> Iterator[Edit]:
    """Yield the edits that findings propose. Edits that depend on line numbers come first."""
    for finding in findings:
        source, _, line = finding.source.rpartition(":")
        if isinstance(finding.edit, Rename) and source == file:
            old, new = finding.edit.old, finding.edit.new
            yield functools.partial(rename, line=int(line), old=old, new=new)
    # If the policy already resolves conflicts or sizes, add no fallback to a rule, because the
    # fallback would override the policy.
    if strategy is None or not _is_strict(strategy):
        return
    edits: dict[tuple[Any, ...], Edit] = {}
    for edit in (finding.edit for finding in findings):
        # This file cannot override an entry of [[tensors]] in another file.
        if isinstance(edit, NewValue) and (
            edit.table[0] != "tensors" or edit.source.rpartition(":")[0] == file
        ):
            # Two tensors may ask for different fallbacks of one rule. Take the first, because each
            # fallback ends in "-" and fits both tensors.
            edits.setdefault((edit.table, edit.key), _setter(edit.table, edit.key, edit.value))
    yield from edits.values()


def _setter(table: tuple[str, ...], key: str, value: str | int) -> Edit:
    return lambda text: set_value(text, table, key, value)


def _is_strict(strategy: Strategy) -> bool:
    try:
        policy = strategy.compile().policy
    except ShardingError:  # an unknown name: reading finds it only if the file has [mesh]
        return False
    return (
        policy.conflict is Conflict.ERROR
        and policy.indivisible is Indivisible.ERROR
        and policy.missing is Missing.SKIP
        and policy.order is Order.DIMS
    )


def _mesh_edits(strategy: Strategy, devices: int | None) -> Iterator[Edit]:
    """Yield an edit of the size of one mesh axis, after which the mesh fits the devices."""
    sizes = {axis: size for axis, size in strategy.mesh.items() if size != INFER}
    if devices is None or strategy.dcn or not sizes:
        return
    # The largest axis changes, because the others are often 1 on purpose.
    axis = max(sizes, key=lambda name: sizes[name])
    others = math.prod(size for name, size in sizes.items() if name != axis)
    if devices % others:
        return
    left = devices // others
    has_rest = len(sizes) < len(strategy.mesh)
    yield _setter(("mesh",), axis, math.gcd(sizes[axis], left) if has_rest else left)
