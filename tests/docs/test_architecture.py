"""ARCHITECTURE.md names files and functions that exist, and the paths that it shows are walked."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright import attention, caches, serving
from shardwright.testing import cpu_mesh
from tests.docs.snippets import COLUMNS, ROOT, anchors, blocks, links
from tests.test_house import ORDER
from tools.pictures.rooms import ROOMS

PACKAGE = ROOT / "src" / "shardwright"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
_STEP = re.compile(r"^(?P<file>[\w/]+\.py) +(?P<indent> *)(?P<name>[\w.]+)  +\S", re.MULTILINE)
_NAME_IN_FILE = re.compile(r"`([A-Za-z_][\w.]*)` in `([\w/]+\.py)`")
_FILE = re.compile(r"`([\w/.]+(?:\.py|\.md|\.toml|/))`")


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One line of a path: a function, and how deep in the calls of this path it is."""

    file: str
    name: str
    depth: int

    @property
    def room(self) -> str:
        return self.file.partition("/")[0]

    @property
    def call(self) -> tuple[str, str]:
        return self.file, self.name


def paths() -> dict[str, list[Step]]:
    """Return the paths of the page, by the call that each follows."""
    actual = {}
    for block in blocks(PAGE):
        if block.lang == "text" and (lines := list(_STEP.finditer(block.text))):
            column = min(line.start("name") - line.start() for line in lines)
            actual[block.text.partition("\n")[0]] = [
                Step(line["file"], line["name"], (line.start("name") - line.start() - column) // 2)
                for line in lines
            ]
    return actual


PATHS = paths()


@functools.cache
def defined(file: str) -> frozenset[str]:
    """Return the functions, classes, methods and constants that a file of the package defines."""
    names: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(f"{prefix}{child.name}")
                if isinstance(child, ast.ClassDef):
                    visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                names.update(prefix + target.id for target in targets if hasattr(target, "id"))

    visit(ast.parse(location(file).read_text(encoding="utf-8")), "")
    return frozenset(names)


def location(name: str) -> Path:
    """Return the place of a file or folder: in the package, or in the repository."""
    return PACKAGE / name if (PACKAGE / name).exists() else ROOT / name


def test_the_page_has_four_paths() -> None:
    assert len(PATHS) == 4
    assert all(len(steps) >= 6 for steps in PATHS.values())


def test_paths_fit_the_page() -> None:
    lines = [line for block in blocks(PAGE) for line in block.text.splitlines()]
    assert [line for line in lines if len(line) > COLUMNS] == []


def test_named_files_and_functions_exist() -> None:
    named = [(step.file, step.name) for steps in PATHS.values() for step in steps]
    named += [(file, name) for name, file in _NAME_IN_FILE.findall(PAGE)]
    files = {*_FILE.findall(PAGE), *(file for file, _ in named)}
    missing = [file for file in sorted(files) if not location(file).exists()]
    assert missing == []
    assert [f"{file}: {name}" for file, name in named if name not in defined(file)] == []


def test_links_of_the_page_exist() -> None:
    for target in links(PAGE):
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), target
        assert not anchor or anchor in anchors((ROOT / path).read_text(encoding="utf-8")), target


def test_the_picture_shows_all_rooms() -> None:
    order = [name for name in ORDER if name not in ("shardwright", "__main__")]
    drawn = [name for names, _ in ROOMS for name in names.split(", ")]
    assert sorted(drawn) == sorted(order)
    rooms = [name for name in drawn if name not in ("errors", "_jax")]
    assert rooms == [name for name in reversed(order) if name in rooms]


@pytest.mark.parametrize("title", PATHS)
def test_no_path_enters_a_room_twice(title: str) -> None:
    entered: list[str] = []
    open_steps: list[Step] = []
    last = ""
    for step in PATHS[title]:
        del open_steps[step.depth :]
        # A call inside the caller's room, or inside the room of the line above, is the same visit.
        if step.room not in {last, *(caller.room for caller in open_steps)}:
            entered.append(step.room)
        open_steps.append(step)
        last = step.room
    assert sorted(entered) == sorted(set(entered))


def calls_of(function: Callable[[], Any]) -> list[tuple[tuple[str, str], ...]]:
    """Return the calls of functions of this package, in order, each below its callers."""
    stack: list[tuple[str, str]] = []
    calls = []
    start = f"{PACKAGE}/"

    def profile(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if not file.startswith(start):
            return
        if event == "call":
            stack.append((file.removeprefix(start), frame.f_code.co_qualname))
            calls.append(tuple(stack))
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def assert_walked(steps: list[Step], function: Callable[[], Any]) -> None:
    """Check that the calls contain each step below its callers, in the order of the page."""
    calls = calls_of(function)
    position = 0
    open_steps: list[Step] = []
    for step in steps:
        del open_steps[step.depth :]
        callers = {caller.call for caller in open_steps}
        matches = (
            at
            for at in range(position, len(calls))
            if calls[at][-1] == step.call and callers <= set(calls[at])
        )
        at = next(matches, None)
        assert at is not None, f"{step.file}: {step.name} is not called here, below {callers}"
        position = at
        open_steps.append(step)


def path_of(start: str) -> list[Step]:
    (steps,) = (steps for title, steps in PATHS.items() if title.startswith(start))
    return steps


def manager(preset: str, sizes: str, mode: str) -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset(preset), mesh=cpu_mesh(sizes), mode=mode)


def test_the_path_of_shard() -> None:
    def model(x: jax.Array) -> jax.Array:
        return sw.shard(x, sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)

    with manager("fsdp_tp", "fsdp:2,tp:4", "train"):
        assert_walked(path_of("sw.shard"), lambda: jax.jit(model).lower(jnp.ones((8, 16, 64))))


def test_the_path_of_attention() -> None:
    def model(q: jax.Array) -> Any:
        return attention.dot_product_attention(q, q, q, causal=True)

    path = path_of("attention.dot_product_attention")
    with manager("fsdp_tp", "fsdp:2,tp:4", "train"):
        assert_walked(path, lambda: jax.jit(model).lower(jnp.ones((8, 16, 8, 16))))


def test_the_path_of_append() -> None:
    def model(q: jax.Array, cache: Any) -> Any:
        return attention.append_and_attend(q, q, q, cache)

    sizes = {"capacity": 32, "kv_heads": 8, "head_dim": 16, "dtype": "float32"}
    path = path_of("attention.append_and_attend")
    with manager("serve_tp", "dp:2,tp:4", "decode"):
        cache = caches.init("dense", batch=8, **sizes)  # type: ignore[arg-type]
        assert_walked(path, lambda: jax.jit(model).lower(jnp.ones((8, 1, 8, 16)), cache))


@pytest.mark.full
def test_the_path_of_a_request() -> None:
    def model(params: Any, tokens: jax.Array, held: Any, valid: jax.Array) -> Any:
        q = jax.nn.one_hot(tokens, 8)[:, :, None]
        done = attention.append_and_attend(q, q, q, held[0], valid=valid)
        return done.o[:, :, 0] * params, [done.cache]

    shape = serving.CacheShape(layers=1, kv_heads=1, head_dim=8, dtype="float32")
    engine = serving.Engine(model, jnp.ones(8), shape=shape, slots=2, capacity=16)

    def serve() -> None:
        engine.submit(serving.Request(prompt=[1, 2, 3], max_new_tokens=3))
        while engine.step():
            pass

    assert_walked(path_of("engine.submit"), serve)
