"""Compare the specs of imported lists of logical axis rules with those that the libraries give.

    python tools/rule_sets.py CHECKOUTS [--write] [--random COUNT]

CHECKOUTS holds a git directory OWNER/NAME for each repository. Each list is read at the commit that
tests/interop/golden/rule_sets.json names. Each tuple of names in the repository's Python files,
each name and each pair of names is resolved by the imported list and by its library:

- "flax" lists by flax.linen, and a second time, under the semantics "nnx", by flax.core.spmd and
  jax.sharding.NamedSharding;
- "strict" lists by the function `logical_to_physical` of the published file itself.

The file keeps no rules, only the place of each list, and digests of its rules and of the specs that
the libraries give. --write writes it anew. --random also compares random lists under each
semantics. At the end, counts are printed.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import contextlib
import functools
import hashlib
import itertools
import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PATH = ROOT / "tests" / "interop" / "golden" / "rule_sets.json"

Pairs = list[tuple[str, Any]]
Array = tuple[str | None, ...]
Oracle = Callable[[Array, Pairs], Any]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("checkouts", type=Path)
    arguments.add_argument("--write", action="store_true")
    arguments.add_argument("--random", type=int, default=0, metavar="COUNT")
    options = arguments.parse_args()
    data = json.loads(PATH.read_text(encoding="utf-8"))
    rows, failures = [], []
    for listed in data["sets"]:
        row, problems = compared(listed, options.checkouts / listed["repository"])
        failures += problems
        rows.append(row)
        if not options.write and row != listed:
            failures.append(f"{listed['file']} {listed['part']}: other digests or counts")
    print("\n".join(summary(rows)))
    for semantics in ("flax", "nnx", "strict") if options.random else ():
        count, problems = compare_random(semantics, options.random)
        print(f"{options.random} random lists, {semantics}: {count} tuples")
        failures += problems
    print("\n".join(failures) or "all equal")
    if options.write and not failures:
        import flax

        text = ",\n".join(json.dumps(row) for row in rows)
        PATH.write_text(f'{{"flax": "{flax.__version__}", "sets": [\n{text}\n]}}\n')
    return bool(failures)


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line of counts per repository and semantics, and one of totals."""
    counts: dict[str, list[int]] = {}
    for row in rows:
        for semantics, part in ((row["semantics"], row), ("nnx", row.get("nnx"))):
            if part is not None:
                numbers = (1, row["published"], row["tuples"], part["errors"])
                for key in (f"{row['repository']}, {semantics}", f"all, {semantics}"):
                    old = counts.setdefault(key, [0] * len(numbers))
                    counts[key] = [one + other for one, other in zip(old, numbers, strict=True)]
    for key in [key for key in counts if key.startswith("all")]:
        counts[key] = counts.pop(key)
    text = "{}: {} lists, {} published tuples, {} tuples in all, {} of them errors"
    return [text.format(key, *numbers) for key, numbers in counts.items()]


def compare_random(semantics: Any, count: int) -> tuple[int, list[str]]:
    """Return how many tuples of random lists were compared, and those that differ."""
    from tests.interop.rule_lists import compare_lists

    compared, different = compare_lists(semantics, seed=1, count=count)
    return compared, [f"random list, {semantics}: {each}" for each in different]


def compared(listed: dict[str, Any], git: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the row of a list, and the tuples whose spec differs from that of its library."""
    commit, semantics = listed["commit"], listed["semantics"]
    text = shown(git, commit, listed["file"])
    pairs = read(listed, text)
    names = {name for name, _ in pairs}
    published = [array for array in tuples(git, commit) if names.issuperset(filter(None, array))]
    arrays = published + [(name,) for name in sorted(names)]
    arrays += itertools.permutations(sorted(names), 2)
    oracle = published_function(text) if semantics == "strict" else by_flax
    result, problems = results(semantics, arrays, pairs, oracle)
    found = {"rules": len(pairs), "published": len(published), "tuples": len(arrays), **result}
    found["rules_digest"] = digest(pairs)
    if semantics == "flax":
        found["nnx"], others = results("nnx", arrays, pairs, by_nnx)
        problems += others
    kept = ("repository", "commit", "file", "kind", "part", "semantics")
    row = {**{key: listed[key] for key in kept if key in listed}, **found}
    return row, [f"{listed['file']} {listed['part']} {each}" for each in problems]


def results(
    semantics: str, arrays: list[Array], pairs: Pairs, oracle: Oracle
) -> tuple[dict[str, Any], list[str]]:
    """Return counts and a digest of what a library gives, and the tuples that differ."""
    expected = [outcome(oracle, array, pairs) for array in arrays]
    problems = [
        f"{semantics} {array}: {one}, and its library {other}"
        for array, one, other in zip(
            arrays, resolve(semantics, arrays, pairs), expected, strict=True
        )
        if one != other
    ]
    found = {"errors": expected.count("error"), "specs_digest": digest([arrays, expected])}
    return found, problems


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

        # Other tags, such as `!include`, are not part of the rules.
        yaml.SafeLoader.add_constructor(None, lambda loader, node: None)
        value = yaml.safe_load(text)
        for key in listed["part"].split("."):
            value = value[key]
        pairs = list(value.items()) if isinstance(value, dict) else value
    elif listed["kind"] == "literals":
        pairs = literal_pairs(ast.parse(text), listed["part"])
    elif listed["kind"] == "resource":
        pairs = resource_pairs(ast.parse(text), listed["part"])
    else:
        pairs = class_pairs(ast.parse(text), listed["part"])
    return [(name, list(axes) if isinstance(axes, list | tuple) else axes) for name, axes in pairs]


def literal_pairs(module: ast.Module, part: str) -> Pairs:
    """Return the literal lists of pairs in a function, joined. `f:0,4` is the first and fifth."""
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


def resource_pairs(module: ast.Module, part: str) -> Pairs:
    """Return the rules of TransformerEngine's own function for mesh axes of two devices each.

    Args:
      module: TransformerEngine's `jax/sharding.py`.
      part: The mesh axis of each kind of parallelism, such as `dp=data,tp=model`.
    """
    given = dict(item.split("=") for item in part.split(","))
    kinds = ("dp", "tp", "tpsp", "fsdp", "pp", "cp", "ep")
    resource = types.SimpleNamespace(**{f"{kind}_resource": given.get(kind) for kind in kinds})
    mesh = types.SimpleNamespace(empty=False, axis_names=tuple(given.values()), manual_axes=())
    scope: dict[str, Any] = {
        "_get_mesh": lambda: mesh,
        "get_abstract_mesh": lambda: mesh,
        "global_mesh_resource": lambda: resource,
        "get_mesh_axis_size": lambda axis: 2,
    }
    function = "get_sharding_map_logic_axis_to_mesh_axis"
    run_parts(module, (function,), scope, constants=True)
    return list(scope[function]().items())


def run_parts(
    module: ast.Module, functions: tuple[str, ...], scope: dict[str, Any], *, constants: bool
) -> None:
    """Define some functions of a published file in a scope, and on request its constants."""
    body: list[ast.stmt] = []
    for node in module.body:
        is_constant = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        is_wanted = isinstance(node, ast.FunctionDef) and node.name in functions
        if is_wanted or (constants and is_constant):
            body.append(node)
    code = compile(
        ast.Module(body=body, type_ignores=[]),
        "published",
        "exec",
        __future__.annotations.compiler_flag,
    )
    exec(code, scope)


# Tuples of names.


@functools.cache
def tuples(git: Path, commit: str) -> list[Array]:
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


def named(module: ast.Module, constants: dict[str, Any]) -> Iterator[Array]:
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


def outcome(oracle: Oracle, array: Array, pairs: Pairs) -> Any:
    """Return the spec that a library gives, or "error"."""
    try:
        return entries(oracle(array, pairs))
    except Exception as error:
        # JAX does not export the class that it raises for a mesh axis that occurs twice.
        if type(error).__name__ not in ("DuplicateSpecError", "ValueError", "AttributeError"):
            raise
        return "error"


def as_rules(pairs: Pairs) -> Pairs:
    return [(name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in pairs]


def by_flax(array: Array, pairs: Pairs) -> Any:
    from flax.linen.spmd import logical_to_mesh_axes

    return logical_to_mesh_axes(array, as_rules(pairs))


def by_nnx(array: Array, pairs: Pairs) -> Any:
    """Return the spec of an nnx variable. JAX refuses a mesh axis that occurs twice."""
    from flax.core.spmd import get_pspec
    from jax.sharding import AbstractMesh, NamedSharding

    axes = mesh_of(pairs)
    return NamedSharding(AbstractMesh((2,) * len(axes), tuple(axes)), get_pspec(array, pairs)).spec


def published_function(text: str) -> Oracle:
    """Return the function of jax-llm-examples that turns names into a spec."""
    import jax

    scope: dict[str, Any] = {"jax": jax, "P": jax.sharding.PartitionSpec}
    run_parts(ast.parse(text), ("logical_to_physical",), scope, constants=False)

    def oracle(array: Array, pairs: Pairs) -> Any:
        rules = types.SimpleNamespace(**dict(as_rules(pairs)))
        return scope["logical_to_physical"](array, rules)

    return oracle


def mesh_of(pairs: Pairs) -> dict[str, int]:
    """Return a mesh with all mesh axes of a list."""
    axes = [axis for _, each in pairs for axis in ([each] if isinstance(each, str) else each or ())]
    return dict.fromkeys(axes, 2)


def resolve(semantics: str, arrays: Iterable[Array], pairs: Pairs) -> list[Any]:
    """Return the specs of the imported list."""
    import shardwright as sw
    from shardwright.interop.logical_rules import to_strategy

    mesh = mesh_of(pairs)
    options: Any = {"mesh": mesh, "semantics": semantics}
    imported = to_strategy(pairs, **options)
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
