"""Golden files: text that a person reads once, and that a test compares from then on.

`pytest --update-golden` writes them. A golden file that is missing, outdated or unused fails the
test run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.mesh.build import mesh_sizes
from shardwright.resolution.partition_specs import (
    UNCONSTRAINED,
    canonical_spec,
    entry_names,
    entry_of,
    spec_text,
)
from shardwright.show.tables import table
from shardwright.strategy import files
from shardwright.trees.paths import path_text

_NAME = re.compile(r"[\w.,=+-]+")
_BLANKS = re.compile(r"\s+")
_CONTEXT = 2  # number of lines shown around a difference
_LONGEST = 255 - len(".txt")  # bytes of the longest name on usual file systems


class GoldenError(AssertionError):
    """A golden file is missing, or its contents differ."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Golden:
    """The golden files of one test: `golden(text)`, or `golden(tree)` for the shardings of a tree.

    Attributes:
      folder: the folder of the golden files of the test's module.
      test: the name of the file if a call gives no name.
      update: write instead of comparing.
      command: the command that writes the test's files.
      case: text of the mesh, such as `dp2-tp4`. It is appended to the names that calls give, so
        that each mesh has its own files.
      parameters: the parameters in the test's id. They are not added to the names that calls give,
        so tests that differ only in parameters share these files.
      rivals: all tests that would use the same file by default, this one included. Empty if there
        is no other test.
      used: name → text of each file that the test has used.
      written: the names of the files that were written.
    """

    folder: Path
    test: str
    update: bool = False
    command: str = "pytest --update-golden"
    case: str = ""
    parameters: str = ""
    rivals: tuple[str, ...] = ()
    used: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)
    written: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, value: Any, name: str = "") -> None:
        """Compare a value with a file of the test's module.

        Args:
          value: text; or a tree of arrays, `ShapeDtypeStruct`s, shardings or specs, which is
            compared as the text of its `spec_table`.
          name: the file's name without `.txt`, to which a test on meshes adds its mesh.
            Defaults to the test's own name. Tests may share a file.

        Raises:
          GoldenError: the file is missing or differs, or the name is used twice or is not valid.
        """
        __tracebackhide__ = True
        if not isinstance(name, str):
            raise _error(f"the name of a golden file is {name!r}, not text", "golden(value, name)")
        is_named = bool(name)
        shared = (
            self.parameters
            if name and self.parameters != self.case and self.parameters not in name
            else ""
        )
        name = "-".join(part for part in (name, self.case) if part) if name else self.test
        if not _NAME.fullmatch(name) or len(name.encode()) > _LONGEST:
            fix = f"use at most {_LONGEST} letters, digits and any of . , = + - _"
            raise _error(f"{name!r} cannot name a golden file", fix)
        if not is_named and self.rivals:
            what = f"{' and '.join(self.rivals)} would share golden {name!r}"
            raise _error(what, "give each a name: golden(value, name)")
        if name in self.used:
            what = f"the test uses golden {name!r} twice"
            raise _error(what, "give each a name: golden(value, name)")
        text = value if isinstance(value, str) else spec_table(value)
        self.used[name] = text
        if self._compare(self.folder / f"{name}.txt", text, shared=shared):
            self.written.append(name)

    def file(self, path: Path, text: str) -> None:
        """Compare text with a file at another place, such as a page of documentation.

        Raises:
          GoldenError: the file is missing, or its contents differ.
        """
        __tracebackhide__ = True
        self._compare(path, text)

    def _compare(self, path: Path, text: str, *, shared: str = "") -> bool:
        """Compare text with a file. In an update, write the file, and tell whether it changed.

        If several cases of a test share the file, `shared` has the parameters of this case, which
        the file's name leaves out.
        """
        __tracebackhide__ = True
        if not text.endswith("\n"):
            text += "\n"
        now = _encoded(text)
        kept = path.read_bytes() if path.exists() else None
        if kept == now:
            return False
        if self.update:
            write(path, text)
            return True
        if kept is None:
            fix = f"write it, read it, commit it: {self.command}"
            raise _error(f"no golden file {_shown(path)}", fix)
        # A file that was edited by hand may not be UTF-8.
        changed = difference(kept.decode(errors="backslashreplace"), text)
        what = f"{_shown(path)} differs (- golden, + now)\n{changed}"
        if shared:
            what += "\n  fix   the cases of this test share the file: if their texts differ, put "
            what += f"[{shared}] into the name"
        fix = f"if the new text is right, write it, read it, commit it: {self.command}"
        raise _error(what, fix)


def _error(what: str, fix: str) -> GoldenError:
    return GoldenError(f"{what}\n  fix   {fix}")


def _shown(path: Path) -> str:
    """Return a path relative to the current folder, or the whole path if it is elsewhere."""
    with contextlib.suppress(ValueError):
        return path.relative_to(Path.cwd()).as_posix()
    return str(path)


def _encoded(text: str) -> bytes:
    __tracebackhide__ = True
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        what = (
            f"the text has {text[error.start]!r} in line {text.count(chr(10), 0, error.start) + 1}"
        )
        fix = "escape it: text.encode(errors='backslashreplace').decode()"
        raise _error(f"{what}, which UTF-8 cannot encode", fix) from None


def write(path: Path, text: str) -> None:
    """Write a file in one step, so that another process reads either the old or the new text.

    Raises:
      GoldenError: UTF-8 cannot encode the text.
    """
    _encoded(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, text)


def difference(golden: str, now: str) -> str:
    """Return the lines that differ, with a few lines around them.

    Differences in blanks are left out if other characters differ too, because one longer cell moves
    the columns of a whole table.
    """
    before, after = golden.splitlines(), now.splitlines()
    old, new = ([_BLANKS.sub(" ", line).strip() for line in lines] for lines in (before, after))
    if old == new:
        old, new = before, after
    if golden.rstrip("\n") == now.rstrip("\n"):
        return "  only the end of the last line differs"
    if old == new:
        # All lines are equal, so their ends differ, which `repr` shows.
        before, after = (
            [repr(line) for line in text.splitlines(keepends=True)] for text in (golden, now)
        )
        old, new = before, after
    shown = []
    # With autojunk, difflib ignores lines that are frequent in a text of 200 lines or more.
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        shown.append(f"  line {group[0][1] + 1}")
        for tag, first, last, start, stop in group:
            if tag == "equal":
                shown += [f"    {line}" for line in after[start:stop]]
            else:
                shown += [f"  - {line}" for line in before[first:last]] + [
                    f"  + {line}" for line in after[start:stop]
                ]
    return "\n".join(line.rstrip() for line in shown)


def spec_table(tree: Any) -> str:
    """Return the shardings of a tree as a table.

    The columns are path, shape, dtype, spec, and the shape on one device.

    Leaves are arrays, `ShapeDtypeStruct`s, `NamedSharding`s or `PartitionSpec`s. Specs are shown
    without mesh axes of size 1 and without None at the end, so equivalent specs look the same.

    Raises:
      GoldenError: the tree is empty, or a leaf is none of these.
    """
    __tracebackhide__ = True
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
    if not leaves:
        raise GoldenError("the tree has no leaves: there is nothing to compare")
    meshes = list(dict.fromkeys(mesh for _, leaf in leaves if (mesh := _mesh_text(leaf))))
    rows: list[tuple[str, ...]] = [("path", "shape", "dtype", "spec", "per device", "mesh")]
    rows += [_row(path_text(path), leaf) for path, leaf in leaves]
    if len(meshes) < 2:
        rows = [row[:-1] for row in rows]
    # A column that is empty for every leaf is left out.
    kept = [at for at in range(len(rows[0])) if any(row[at] for row in rows[1:])]
    # The width is enough for every table, because golden text must not depend on line breaks.
    lines = table([tuple(row[at] for at in kept) for row in rows], width=10_000)
    head = [f"mesh {meshes[0]}", ""] if len(meshes) == 1 else []
    return "\n".join([*head, *lines]) + "\n"


def _row(path: str, leaf: Any) -> tuple[str, ...]:
    __tracebackhide__ = True
    if isinstance(leaf, PartitionSpec):
        return (path, "", "", spec_text(_canonical(leaf, {})), "", "")
    sharding = leaf if isinstance(leaf, jax.sharding.Sharding) else getattr(leaf, "sharding", None)
    shape = getattr(leaf, "shape", None)
    if sharding is None and shape is None:
        what = f"{path}: a {type(leaf).__name__} is neither text nor an array with a sharding"
        fix = "give arrays, ShapeDtypeStructs, shardings or specs; decode bytes to text"
        raise _error(what.removeprefix(": "), fix)
    held = "" if shape is None or sharding is None else _shape_text(sharding.shard_shape(shape))
    return (
        path,
        "" if shape is None else _shape_text(shape),
        str(getattr(leaf, "dtype", "")),
        _spec(sharding),
        held,
        _mesh_text(leaf),
    )


def _shape_text(shape: tuple[int, ...]) -> str:
    return " ".join(map(str, shape)) or "()"


def _spec(sharding: Any) -> str:
    if isinstance(sharding, NamedSharding):
        kind = sharding.memory_kind
        suffix = "" if kind in (None, "device") else f" in {kind}"
        return spec_text(_canonical(sharding.spec, mesh_sizes(sharding.mesh))) + suffix
    return "no sharding" if sharding is None else type(sharding).__name__


def _canonical(spec: PartitionSpec, sizes: dict[str, int]) -> PartitionSpec:
    """Return the shortest spec of the same meaning."""
    entries: list[Any] = []
    for entry in spec.partitions:
        # A spec without a mesh has no sizes, and keeps all of its axes.
        kept = tuple(axis for axis in entry_names(entry) if sizes.get(axis, 0) != 1)
        entries.append(entry if entry is UNCONSTRAINED else entry_of(kept))
    return PartitionSpec(
        *canonical_spec(entries).partitions,
        unreduced={axis for axis in spec.unreduced if sizes.get(axis, 0) != 1},
    )


def _mesh_text(leaf: Any) -> str:
    sharding = leaf if isinstance(leaf, jax.sharding.Sharding) else getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return ""
    return " ".join(f"{name}={size}" for name, size in mesh_sizes(sharding.mesh).items())
