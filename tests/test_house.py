"""The house rules that a reader relies on: import order, lengths, and the cost of an import.

Everything is derived from the files that exist. A new module is one line in `ORDER`. Tests that
read every file are full: `make check` runs them.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import graphlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "shardwright"
HERE = "tests/test_house.py"

# The rooms, lowest first. A module imports only from rooms before its own, and from siblings, but
# not in a cycle. `shardwright` is the public package: only rooms after it may import from it.
ROOMS = (
    *("vocabulary", "mesh", "resolution", "trees", "strategy", "processes"),
    *("dims", "manager", "inference", "lints"),
    *("plan", "reshard", "checkpoint", "caches", "attention", "layers", "serving", "interop"),
    *("show", "testing", "cli"),
)
ORDER = (
    "errors",
    "_jax",
    *ROOMS[: ROOMS.index("testing")],
    PACKAGE,
    "testing",
    "cli",
    "__main__",
)
TOP = {*ROOMS, "__init__.py", "__main__.py", "_jax.py", "errors.py", "py.typed"}
# What methods of the manager import in their bodies, and for the types of their results.
MANAGER = "shardwright.manager.manager"
UPWARD = {
    "shardwright.plan.planner",
    "shardwright.plan.profile.measure",
    "shardwright.reshard.move",
    "shardwright.reshard.tree",
}
UPWARD_TYPES = {"shardwright.plan.hardware", "shardwright.plan.profile.result"}
# A bridge is complete by itself, but for these.
BRIDGES_MAY_IMPORT = {("eformer", "fjformer")}
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 80
CODE = ("src", "tests", "examples", "benchmarks", "tools")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported module, as `module.name` where that may be a module too."""

    line: int
    module: str
    name: str = ""
    level: int = 0


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    }


def imports(node: ast.AST, *, types: bool = False) -> Iterator[Import]:
    """Every import below a node, inside functions too.

    With `types`, imports that only a type checker sees are included.
    """
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (Import(line=node.lineno, module=alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from (
                Import(line=node.lineno, module=module, name=alias.name, level=node.level)
                for alias in node.names
            )
        elif isinstance(node, ast.If) and is_type_checking(node) and not types:
            waiting += reversed(node.orelse)
        elif not isinstance(node, ast.expr):  # no expression contains an import
            waiting += reversed([*ast.iter_child_nodes(node)])


def module_files(src: Path) -> dict[str, Path]:
    """The package's files by dotted module name; a package's name is that of its `__init__`."""
    actual = {}
    for path in sorted((src / PACKAGE).rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        actual[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return actual


def unit(module: str) -> str:
    """The entry of `ORDER` that contains a module: `strategy` for `shardwright.strategy.model`."""
    return module.split(".")[1] if "." in module else module


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file. Most tests here read the same files."""
    return _parsed(path, path.stat().st_mtime_ns)


@functools.cache
def _parsed(path: Path, _modified: int) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    return [*ast.walk(tree)]


def teardown_module() -> None:
    """Forget 200 MB of syntax trees."""
    _parsed.cache_clear()
    nodes.cache_clear()


def import_problems(src: Path) -> list[str]:
    """Imports against `ORDER`, import cycles, and modules that `ORDER` does not contain.

    Imports for a type checker count too: files in a circle can only be read together.
    """
    files = module_files(src)
    problems = []
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        where = path.relative_to(src.parent).as_posix()
        if unit(module) not in ORDER:
            problems.append(unknown(where, unit(module)))
            continue
        targets = list(own_imports(parsed(path), files, types=True))
        if path.name == "__init__.py":
            # A room's face lists what its modules define.
            targets = [(line, target) for line, target in targets if unit(target) != unit(module)]
        else:
            graph[module] = {target for _, target in targets}
        problems += [
            f"{where}:{line}: {why}"
            for line, target in targets
            if (why := complaint(module, target))
        ]
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as err:
        problems.append(f"import cycle: {' <- '.join(err.args[1])}")
    return problems


def own_imports(
    tree: ast.AST, files: Iterable[str], *, types: bool = False
) -> Iterator[tuple[int, str]]:
    """(line, module) of each import from this package; an empty module for a relative one."""
    for imported in imports(tree, types=types):
        if imported.level:
            yield imported.line, ""
        elif imported.module.split(".")[0] == PACKAGE:
            inner = f"{imported.module}.{imported.name}"
            # In `from shardwright import axes` the target is the module; in
            # `from shardwright import shard` it is the public package.
            yield imported.line, inner if inner in files else imported.module


def complaint(module: str, target: str) -> str:
    """Say why `module` may not import `target`, or nothing if it may."""
    if not target:
        return f"relative import; write `from {PACKAGE}.… import …`"
    importer, imported = unit(module), unit(target)
    if imported not in ORDER:
        return unknown(target, imported)
    if importer == imported == "interop":
        return bridge_complaint(module, target)
    if importer == imported:
        return (
            f"{module} imports its own package; import the sibling module"
            if module.startswith(f"{target}.")
            else ""
        )
    if module == MANAGER and target in UPWARD | UPWARD_TYPES:
        return ""
    if ORDER.index(imported) > ORDER.index(importer):
        return (
            f"{importer} imports {imported}, which comes after it in the import order (ORDER in "
            f"{HERE}); move the code that needs it"
        )
    return ""


def bridge_complaint(module: str, target: str) -> str:
    """Say why one package of `interop` may not import another, or nothing if it may."""
    importer, imported = (f"{name}..".split(".")[2] for name in (module, target))
    if (
        importer == imported
        or (importer, imported) in BRIDGES_MAY_IMPORT
        or imported == "logical_rules"
    ):
        return ""
    return (
        f"interop/{importer} imports interop/{imported}; each package there is complete by itself"
    )


def unknown(where: str, name: str) -> str:
    return (
        f"{where}: {name!r} has no place in the import order; add it to ORDER in {HERE}, after "
        f"what it imports, before what imports it"
    )


def foreign_problems(src: Path) -> list[str]:
    """Private JAX outside `_jax.py`, and pydantic outside `strategy/`."""
    problems = []
    for module, path in module_files(src).items():
        tree = parsed(path)
        where = path.relative_to(src.parent).as_posix()
        if module != f"{PACKAGE}._jax":
            problems += [
                f"{where}:{line}: jax._src is private; only {PACKAGE}/_jax.py may use it"
                for line in private_jax(tree)
            ]
        if unit(module) != "strategy":
            lines = [
                imported.line
                for imported in imports(tree, types=True)
                if imported.module.split(".")[0] == "pydantic"
            ]
            problems += [
                f"{where}:{line}: pydantic is imported; it stays inside {PACKAGE}/strategy/"
                for line in lines
            ]
    return problems


def private_jax(tree: ast.AST) -> list[int]:
    """Lines that import `jax._src`, read it as an attribute, or name it in a string."""
    lines = [
        imported.line
        for imported in imports(tree, types=True)
        if f"{imported.module}.{imported.name}.".startswith("jax._src.")
    ]
    for node in nodes(tree):
        if isinstance(node, ast.Attribute):
            is_private = node.attr == "_src" and ast.unparse(node) == "jax._src"
            lines += [node.lineno] * is_private
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            lines += [node.lineno] * node.value.startswith("jax._src")
    return sorted(set(lines))


def code_files() -> list[Path]:
    """Every Python file of the repository's own code, this one included."""
    files = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    assert Path(__file__).resolve() in files
    return files


def size_problems(files: Iterable[Path], root: Path) -> list[str]:
    """Files and functions that are too long to read in one go."""
    problems = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        where = path.relative_to(root).as_posix()
        if (count := len(text.splitlines())) > MAX_FILE_LINES:
            problems.append(f"{where}: {count} lines, at most {MAX_FILE_LINES}; split it by reader")
        functions = [
            node
            for node in nodes(parsed(path))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        problems += [
            f"{where}:{node.lineno}: {node.name} has {count} lines, at most {MAX_FUNCTION_LINES}"
            for node in functions
            if (count := code_lines(node)) > MAX_FUNCTION_LINES
        ]
    return problems


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its decorators and its docstring."""
    count = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node, clean=False) is None:
        return count
    docstring = node.body[0]
    return count - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


def nested_conditionals(files: Iterable[Path], root: Path) -> list[str]:
    """Conditional expressions that directly contain another one."""
    return [
        f"{path.relative_to(root).as_posix()}:{node.lineno}: nested conditional expression; "
        "write an if statement"
        for path in files
        for node in nodes(parsed(path))
        if isinstance(node, ast.IfExp)
        and any(isinstance(part, ast.IfExp) for part in (node.body, node.test, node.orelse))
    ]


def repeated_types(src: Path) -> dict[str, list[str]]:
    """Files of each class or type alias that several files define. An underscore is no difference.

    `interop/` is left out: its classes have the names of other libraries.
    """
    files: dict[str, list[str]] = {}
    for module, path in module_files(src).items():
        if unit(module) == "interop":
            continue
        for node in parsed(path).body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            for name in (name.lstrip("_") for name in names):
                # A constant has no lowercase letter, a variable no capital.
                if name[:1].isupper() and not name.isupper():
                    files.setdefault(name, []).append(path.relative_to(src).as_posix())
    return {name: where for name, where in files.items() if len(where) > 1}


@pytest.mark.full
def test_imports_follow_the_order() -> None:
    problems = import_problems(ROOT / "src")
    assert not problems, "\n" + "\n".join(problems)


def test_the_manager_imports_upwards_as_listed() -> None:
    """Only in the bodies of four methods, and for the types of their results."""
    files = module_files(ROOT / "src")
    path = files[MANAGER]
    above = ROOMS[ROOMS.index("manager") + 1 :]
    for types, wanted in ((False, UPWARD), (True, UPWARD | UPWARD_TYPES)):
        actual = {
            target
            for _, target in own_imports(parsed(path), files, types=types)
            if unit(target) in above
        }
        assert actual == wanted
    of_module = [node for node in parsed(path).body if not is_type_checking(node)]
    at_import = (
        found
        for node in of_module
        for part in (node.body if isinstance(node, ast.ClassDef) else [node])
        if not (part is not node and isinstance(part, ast.FunctionDef))
        for found in imports(part)
    )
    assert not [found for found in at_import if unit(found.module) in above]


def test_the_top_level_holds_rooms_only() -> None:
    top = {path.name for path in (ROOT / "src" / PACKAGE).iterdir() if path.name != "__pycache__"}
    assert top == TOP


def test_every_room_says_what_belongs_there() -> None:
    silent = [
        path.parent.name
        for path in sorted((ROOT / "src" / PACKAGE).glob("*/__init__.py"))
        if not ast.get_docstring(parsed(path))
    ]
    assert silent == []


@pytest.mark.full
def test_the_name_of_a_type_is_defined_once() -> None:
    assert repeated_types(ROOT / "src") == {}


@pytest.mark.full
def test_private_jax_and_pydantic_imports() -> None:
    problems = foreign_problems(ROOT / "src")
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.full
def test_files_and_functions_are_short() -> None:
    problems = size_problems(code_files(), ROOT)
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.full
def test_no_line_is_over_100_columns() -> None:
    """Tables and links of pages cannot be wrapped. ruff excuses comments for tools."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    lines = [
        (path.relative_to(ROOT).as_posix(), number, line)
        for path in (*code_files(), *pages)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 100
    ]
    long = [
        f"{path}:{number}"
        for path, number, line in lines
        if path.endswith(".py") or not (line.lstrip().startswith("|") or "](" in line)
    ]
    assert not long, "\n".join(long)


@pytest.mark.full
def test_no_file_compiles_with_a_warning() -> None:
    """A missing operator between two strings compiles, and fails when it runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SyntaxWarning)
        for path in code_files():
            compile(path.read_text(encoding="utf-8"), str(path), "exec")


@pytest.mark.full
def test_no_nested_conditional_expression() -> None:
    problems = nested_conditionals(code_files(), ROOT)
    assert not problems, "\n" + "\n".join(problems)


# jax_num_cpu_devices can be set only before a backend starts. So setting it shows, without private
# names, whether a backend was started.
PROBE = """
import sys
{first}
import shardwright
extra = sorted(
    name
    for name in sys.modules
    if name in ("pydantic", "rich") or name.startswith(("shardwright.interop", "shardwright.show"))
)
if extra:
    sys.exit("imported: " + ", ".join(extra))
import jax
try:
    jax.config.update("jax_num_cpu_devices", 3)
except RuntimeError as err:
    sys.exit("a backend was started: " + str(err))
assert len(jax.devices()) == 3
"""


def run_probe(first: str) -> subprocess.CompletedProcess[str]:
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in {"XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    }
    env |= {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [env.get("PYTHONPATH")])]),
    }
    command = [sys.executable, "-c", PROBE.format(first=first)]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=600, check=False
    )


def test_import_is_light_and_starts_no_backend() -> None:
    done = run_probe("")
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "says"),
    [
        ("import jax; jax.devices()", "a backend was started"),
        ("import pydantic", "imported: pydantic"),
    ],
)
def test_import_probe_detects_a_backend(first: str, says: str) -> None:
    done = run_probe(first)
    assert done.returncode != 0
    assert says in done.stderr


def write_tree(root: Path, **files: str) -> Path:
    """A source tree with one file per keyword; `__` in a keyword is a folder."""
    for name, text in files.items():
        path = root / "src" / PACKAGE / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root / "src"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            {"vocabulary__axes": "from shardwright.manager import x"},
            "vocabulary/axes.py:1: vocabulary imports manager, which comes after",
        ),
        (
            {"mesh__text": "def f():\n    import shardwright.cli.main"},
            "src/shardwright/mesh/text.py:2: mesh imports cli",
        ),
        ({"mesh__text": "from shardwright import manager", "manager": ""}, "mesh imports manager"),
        (
            {"mesh__text": "from shardwright import manager, errors", "manager": "", "errors": ""},
            "mesh imports manager",
        ),
        (
            {"mesh__text": "from shardwright import shard"},
            "mesh imports shardwright, which comes after it",
        ),
        (
            {"mesh__text": "from .errors import x"},
            "relative import; write `from shardwright.… import …`",
        ),
        (
            {"mesh__text": "if TYPE_CHECKING:\n    from shardwright.plan import x"},
            "text.py:2: mesh imports plan",
        ),
        (
            {"banana": ""},
            (
                "src/shardwright/banana.py: 'banana' has no place in the import order; add it to "
                "ORDER in tests/test_house.py"
            ),
        ),
        (
            {"manager": "import shardwright.banana"},
            "shardwright.banana: 'banana' has no place in the import order",
        ),
        (
            {
                "caches__a": "from shardwright.caches.b import x",
                "caches__b": "from shardwright.caches import a",
            },
            "import cycle: shardwright.caches.",
        ),
        (
            {
                "caches__a": "if TYPE_CHECKING:\n    from shardwright.caches.b import x",
                "caches__b": "from shardwright.caches.a import x",
            },
            "import cycle: shardwright.caches.",
        ),
        (
            {"caches__a": "from shardwright.caches import Dense"},
            "shardwright.caches.a imports its own package",
        ),
        (
            {"layers__a": "from shardwright.interop.easydel.b import x"},
            "layers imports interop, which comes after it",
        ),
        (
            {
                "interop__easydel__a": "from shardwright.interop.fjformer.b import x",
                "interop__fjformer__b": "",
            },
            "interop/easydel imports interop/fjformer; each package there is complete by itself",
        ),
    ],
)
def test_a_wrong_import_is_reported(tmp_path: Path, files: dict[str, str], says: str) -> None:
    problems = import_problems(write_tree(tmp_path, **files))
    assert len(problems) == 1
    assert says in problems[0]


def test_right_imports_are_not_reported(tmp_path: Path) -> None:
    src = write_tree(
        tmp_path,
        errors="import jax",
        manager="from shardwright import errors\nfrom shardwright.strategy.model import x",
        strategy__model="from shardwright.strategy.files import x",
        strategy__files="from shardwright.errors import x",
        cli__main="from shardwright import shard",
    )
    (src / PACKAGE / "__init__.py").write_text(
        "from shardwright.manager import x", encoding="utf-8"
    )
    assert import_problems(src) == []


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"axes": "import jax._src.mesh"}, "axes.py:1: jax._src is private"),
        ({"axes": "from jax import _src"}, "axes.py:1: jax._src is private"),
        ({"axes": "import jax\nx = jax._src.mesh.y"}, "axes.py:2: jax._src is private"),
        (
            {"axes": "import importlib\nimportlib.import_module('jax._src.mesh')"},
            "axes.py:2: jax._src is private",
        ),
        (
            {"manager": "def f():\n    from pydantic import BaseModel"},
            "manager.py:2: pydantic is imported",
        ),
    ],
)
def test_a_foreign_import_is_reported(tmp_path: Path, files: dict[str, str], says: str) -> None:
    problems = foreign_problems(write_tree(tmp_path, **files))
    assert len(problems) == 1
    assert says in problems[0]


def test_a_repeated_type_is_reported(tmp_path: Path) -> None:
    src = write_tree(
        tmp_path,
        plan__walk="class Step: ...\nclass Value: ...\nDims = tuple[int, ...]\nMOST = 1",
        inference__step="class _Step: ...\nDims: TypeAlias = tuple[str, ...]\nMOST = 2",
        interop__nnx="class Value: ...",
    )
    files = ["shardwright/inference/step.py", "shardwright/plan/walk.py"]
    assert repeated_types(src) == {"Step": files, "Dims": files}


def test_allowed_foreign_imports(tmp_path: Path) -> None:
    source = '"""No jax._src here."""\nimport jax'
    src = write_tree(
        tmp_path, _jax="from jax._src import mesh", strategy__model="import pydantic", axes=source
    )
    assert foreign_problems(src) == []


def test_long_files_and_functions_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text(
        "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES + "\n" * MAX_FILE_LINES, encoding="utf-8"
    )
    assert size_problems([path], tmp_path) == [
        (
            f"long.py: {1 + MAX_FUNCTION_LINES + MAX_FILE_LINES} lines, at most "
            f"{MAX_FILE_LINES}; split it by reader"
        ),
        f"long.py:1: f has {MAX_FUNCTION_LINES + 1} lines, at most {MAX_FUNCTION_LINES}",
    ]


def test_a_docstring_does_not_make_a_function_long(tmp_path: Path) -> None:
    path = tmp_path / "documented.py"
    path.write_text(
        'def f():\n    """One.\n' + "\n" * MAX_FUNCTION_LINES + '    """\n    return 1\n',
        encoding="utf-8",
    )
    assert size_problems([path], tmp_path) == []


@pytest.mark.parametrize("text", ["a if (b if c else d) else e", "(a if b else c) if d else e"])
def test_nested_conditional_is_reported(tmp_path: Path, text: str) -> None:
    path = tmp_path / "nested.py"
    path.write_text(f"x = a if b else c\ny = {text}\nz = a if b else c if d else e\n")
    assert nested_conditionals([path], tmp_path) == [
        f"nested.py:{line}: nested conditional expression; write an if statement" for line in (2, 3)
    ]
