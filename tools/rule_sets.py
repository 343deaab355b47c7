"""Compare published lists of logical axis rules, imported, with flax.

    python tools/rule_sets.py CHECKOUTS [--write]

CHECKOUTS holds a git directory OWNER/NAME for each repository. Each list is read at the commit that
tests/interop/golden/rule_sets.json names. Each tuple of names in the repository's Python files, and
each pair of names, is resolved by flax and by the imported list. The file keeps no rules, only the
place of each list, and digests of its rules and of the specs that flax gives. --write writes it
anew.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PATH = ROOT / "tests" / "interop" / "golden" / "rule_sets.json"

Pairs = list[tuple[str, Any]]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("checkouts", type=Path)
    arguments.add_argument("--write", action="store_true")
    options = arguments.parse_args()
    data = json.loads(PATH.read_text(encoding="utf-8"))
    rows, failures = [], []
    for listed in data["sets"]:
        row, problems = compared(listed, options.checkouts / listed["repository"])
        failures += problems
        rows.append(row)
        if not options.write and row != listed:
            failures.append(f"{listed['file']} {listed['part']}: other digests or counts")
    print(f"{len(rows)} lists, {sum(row['tuples'] for row in rows)} tuples")
    print("\n".join(failures) or "all equal")
    if options.write and not failures:
        import flax

        text = ",\n".join(json.dumps(row) for row in rows)
        PATH.write_text(f'{{"flax": "{flax.__version__}", "sets": [\n{text}\n]}}\n')
    return bool(failures)


def compared(listed: dict[str, Any], git: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the row of a list, and the tuples whose spec differs from that of flax."""
    commit = listed["commit"]
    pairs = read(listed, shown(git, commit, listed["file"]))
    names = {name for name, _ in pairs}
    published = [array for array in tuples(git, commit) if names.issuperset(filter(None, array))]
    arrays = published + list(itertools.permutations(sorted(names), 2))
    expected = [resolve_by_flax(listed["semantics"], array, pairs) for array in arrays]
    actual = resolve(listed["semantics"], arrays, pairs)
    problems = [
        f"{listed['file']} {array}: {one}, and flax {other}"
        for array, one, other in zip(arrays, actual, expected, strict=True)
        if one != other
    ]
    found = {"rules": len(pairs), "published": len(published), "tuples": len(arrays)}
    found["errors"] = expected.count("error")
    digests = {"rules_digest": digest(pairs), "specs_digest": digest([arrays, expected])}
    kept = ("repository", "commit", "file", "kind", "part", "semantics")
    return {**{key: listed[key] for key in kept if key in listed}, **found, **digests}, problems


def shown(git: Path, commit: str, file: str) -> str:
    command = ["git", "-C", str(git), "show", f"{commit}:{file}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def digest(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Lists of rules.


def read(listed: dict[str, Any], text: str) -> Pairs:
    """Return the rules of a published file."""
    if listed["kind"] == "yaml":
        import yaml

        value = yaml.safe_load(text)
        for key in listed["part"].split("."):
            value = value[key]
        pairs = list(value.items()) if isinstance(value, dict) else value
    elif listed["kind"] == "literals":
        pairs = literal_pairs(ast.parse(text), listed["part"])
    else:
        pairs = class_pairs(ast.parse(text), listed["part"])
    return [(name, list(axes) if isinstance(axes, list | tuple) else axes) for name, axes in pairs]


def literal_pairs(module: ast.Module, part: str) -> Pairs:
    """Return literal lists of pairs of a function, joined: `function:0,4` is first and fifth."""
    name, _, places = part.partition(":")
    functions = (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef))
    function = next(node for node in functions if node.name == name)
    literals = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            with contextlib.suppress(ValueError):
                value = ast.literal_eval(node.value)
                literals.append((node.lineno, value))
    lists = [value for _, value in sorted(literals, key=lambda entry: entry[0])]
    lists = [value for value in lists if all(map(is_pair, value))]
    return [(each[0], each[1]) for place in places.split(",") for each in lists[int(place)]]


def is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], str)


def class_pairs(module: ast.Module, name: str) -> Pairs:
    """Return the defaults of the fields of a class, which may name constants of the module."""
    constants: dict[str, ast.expr] = {}
    fields: list[tuple[str, ast.expr]] = []
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = node.value
        if isinstance(node, ast.ClassDef) and node.name == name:
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and field.value is not None:
                    assert isinstance(field.target, ast.Name)
                    fields.append((field.target.id, field.value))
    return [(field, evaluated(value, constants)) for field, value in fields]


def evaluated(node: ast.expr, constants: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return evaluated(constants[node.id], constants)
    if isinstance(node, ast.Tuple | ast.List):
        return [evaluated(each, constants) for each in node.elts]
    return ast.literal_eval(node)


# Tuples of names.


@functools.cache
def tuples(git: Path, commit: str) -> list[tuple[str | None, ...]]:
    """Return the tuples and lists of names, or of constants that are names, in Python files."""
    command = ["git", "-C", str(git), "ls-tree", "-r", "--name-only", commit]
    files = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    modules = []
    for file in files:
        if file.endswith(".py"):
            try:
                modules.append(ast.parse(shown(git, commit, file)))
            except (SyntaxError, subprocess.CalledProcessError):
                continue  # a large file that the checkout lacks
    constants = {}
    for module in modules:
        for node in module.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names = [each.id for each in node.targets if isinstance(each, ast.Name)]
                constants.update(dict.fromkeys(names, node.value.value))
    unique = {each for module in modules for each in named(module, constants)}
    return sorted(unique, key=str)


def named(module: ast.Module, constants: dict[str, Any]) -> Iterator[tuple[str | None, ...]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Tuple | ast.List) and 0 < len(node.elts) < 8:
            values = [constant(each, constants) for each in node.elts]
            if any(values) and all(value is None or isinstance(value, str) for value in values):
                yield tuple(values)


def constant(node: ast.expr, constants: dict[str, Any]) -> Any:
    """Return the value of a constant, or False."""
    if isinstance(node, ast.Name):
        return constants.get(node.id, False)
    return node.value if isinstance(node, ast.Constant) else False


# Specs.


def resolve_by_flax(semantics: str, array: tuple[str | None, ...], pairs: Pairs) -> Any:
    """Return the spec that flax gives, or "error".

    A strict list is a table: a name or a mesh axis that occurs twice is an error.
    """
    from flax.linen.spmd import logical_to_mesh_axes

    rules = [(name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in pairs]
    if semantics == "flax":
        try:
            return entries(logical_to_mesh_axes(array, rules))
        except ValueError:
            return "error"
    table = dict(rules)
    spec = entries(table[name] if name else None for name in array)
    names = [name for name in array if name]
    used = [axis for entry in spec for axis in entry]
    is_valid = len({*names}) == len(names) and len({*used}) == len(used)
    return spec if is_valid else "error"


def resolve(semantics: str, arrays: Iterable[tuple[str | None, ...]], pairs: Pairs) -> list[Any]:
    """Return the specs of the imported list."""
    import shardwright as sw
    from shardwright.interop.logical_rules import from_logical_axis_rules

    axes = [axis for _, each in pairs for axis in ([each] if isinstance(each, str) else each or ())]
    mesh = dict.fromkeys(axes, 2)
    options: Any = {"mesh": mesh, "semantics": semantics}
    imported = from_logical_axis_rules(pairs, **options)
    rules = imported.strategy.compile()
    specs: list[Any] = []
    for array in arrays:
        try:
            specs.append(entries(sw.resolve(imported.annotation(array), rules, mesh).spec))
        except sw.ShardingError:
            specs.append("error")
    return specs


def entries(spec: Iterable[Any]) -> list[list[str]]:
    listed = [[each] if isinstance(each, str) else [*(each or ())] for each in spec]
    while listed and not listed[-1]:
        listed.pop()
    return listed


if __name__ == "__main__":
    sys.exit(main())
