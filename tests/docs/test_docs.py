"""Every snippet of the pages runs and prints what the page shows, and every link works."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import shardwright as sw
from shardwright.manager import context
from shardwright.testing.golden import Golden
from shardwright.vocabulary.axes import PARALLELISM_AXES, SEMANTIC_AXES, axis_label, file_name
from tests.docs import snippets
from tests.docs.snippets import PAGES, ROOT
from tests.raising import raises

ids = [page.relative_to(ROOT).as_posix() for page in PAGES]
# Pages whose programs take seconds to compile. `make docs` and `make test-full` run them.
LONG = {
    f"docs/{name}.md"
    for name in (
        "accumulate",
        "attention",
        "caches",
        "equinox",
        "fit",
        "fp8",
        "generation",
        "haliax",
        "hugging-face",
        "layers",
        "managers",
        "moe",
        "moving",
        "nnx",
        "open",
        "other-models",
        "pipelines",
        "plan",
        "plan-accuracy",
        "processes",
        "profile",
        "search",
        "second-step",
        "serving",
        "state",
        "testing",
        "training",
        "transformer-engine",
        "trees",
        "tutorial",
        "utilities",
    )
}
assert set(ids) >= LONG


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name, marks=[pytest.mark.full] if name in LONG else [])
        for page, name in zip(PAGES, ids, strict=True)
    ],
)
def test_snippets_print_what_pages_show(
    page: Path, golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in snippets.needs(page):
        pytest.importorskip(name, reason=f"the page uses {name}, which make test installs")
    if page.name == "testing.md" and jax.__version_info__ >= (0, 11):
        pytest.skip(
            "the page shows a failure as JAX 0.10 compiles it; a newer one names another line "
            "of the model"
        )
    if page == ROOT / "docs/haliax.md" and jax.__version_info__ >= (0, 11):
        pytest.skip("matmuls of haliax 1.4.dev453, the newest version, need JAX 0.10")
    monkeypatch.chdir(tmp_path)
    # A page may add "." to the path. Python remembers the folder that "." was at first.
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.path_importer_cache.pop(".", None)
    golden.file(page, snippets.rewritten(page))
    assert context.current() is None


@pytest.mark.full
@pytest.mark.parametrize("name", ["README.md", "docs/tutorial.md"])
def test_page_runs_as_a_script(name: str, tmp_path: Path) -> None:
    """A reader has no test session that made virtual devices: the page itself must."""
    page = ROOT / name
    for block in snippets.blocks(page.read_text(encoding="utf-8")):
        if block.title:
            (tmp_path / block.title).write_text(block.text + "\n", encoding="utf-8")
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in {"XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    }
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src")}
    command = [
        sys.executable,
        "-W",
        "error::DeprecationWarning:shardwright",
        "-c",
        snippets.script(page),
    ]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    sequence = snippets.blocks(page.read_text(encoding="utf-8"))
    shown = [
        after.text
        for block, after in itertools.pairwise(sequence)
        if block.lang == "python" and after.lang == "text"
    ]
    assert snippets.folded(done.stdout).splitlines() == "\n".join(shown).splitlines()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_code_fits_the_page(page: Path) -> None:
    actual = snippets.blocks(page.read_text(encoding="utf-8"))
    lines = [
        (block.line + at, line)
        for block in actual
        for at, line in enumerate(block.text.splitlines())
    ]
    assert [f"line {at}: {line}" for at, line in lines if len(line) > snippets.COLUMNS] == []


def test_long_lines_of_an_output_are_folded() -> None:
    words = " ".join(["words"] * 16)
    assert snippets.folded(f"  fix   {words}") == f"  fix   {words[:77]}\n        words words words"
    assert snippets.folded(f"short\n{words}") == f"short\n{words[:89]}\n  words"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_have_targets(page: Path) -> None:
    for target in snippets.links(page.read_text(encoding="utf-8")):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in snippets.anchors(file.read_text(encoding="utf-8")), (
                f"{target}: no such heading"
            )


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        targets = [
            target.partition("#")[0] for target in snippets.links(page.read_text(encoding="utf-8"))
        ]
        waiting += [
            (page.parent / target).resolve()
            for target in targets
            if target.endswith(".md") and "://" not in target
        ]
    assert [page.name for page in PAGES if page not in reached] == []


def test_pages_name_every_public_word() -> None:
    strategies = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    why = (ROOT / "docs" / "why.md").read_text(encoding="utf-8")
    assert [name for name in sw.Strategy.presets() if f"| `{name}` |" not in strategies] == []
    assert [axis for axis in SEMANTIC_AXES if f"`{axis_label(axis)}`" not in glossary] == []
    assert [
        axis
        for axis in PARALLELISM_AXES
        if f"`{axis_label(axis)}`, `{file_name(axis)}`" not in glossary
    ] == []
    from shardwright import errors
    from shardwright.resolution import decisions

    assert [
        reason.value
        for reason in (*decisions.Reason, *decisions.Outcome)
        if f"`{reason.value}`" not in why
    ] == []
    classes = [
        member.__name__
        for member in vars(errors).values()
        if isinstance(member, type) and issubclass(member, errors.ShardingError)
    ]
    explained = re.findall(r"^(?:### |\| `)(\w+Error)", why, re.MULTILINE)
    assert sorted(explained) == sorted({*classes} - {"ShardingError", "QueueFullError"})


def test_wrong_output_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snippets, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n", encoding="utf-8")
    (shown,) = snippets.run_page(page)
    assert (shown.block.text, shown.actual) == ("3", "2")
    assert snippets.rewritten(page) == "```python\nprint(1 + 1)\n```\n\n```text\n2\n```\n"
    page.write_text("```python\nprint(1)\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"page\.md:2 prints, and the page does not show it"):
        list(snippets.run_page(page))
    page.write_text("```console\n$ rm -r /\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="cannot be run here"):
        list(snippets.run_page(page))
    page.write_text('```toml\n[rules]\nbathc = "dp |"\n```\n', encoding="utf-8")
    with raises(sw.StrategyError, "mesh", "axis", path="page.md:2:2 rules.bathc", fix="+"):
        list(snippets.run_page(page))
