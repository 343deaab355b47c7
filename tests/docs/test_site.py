"""The navigation has every page, the API pages have every public name, and pages stay short."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.snippets import PAGES, ROOT
from tools import plans

DOCS = ROOT / "docs"
# The guides; then what releases, the action, the page on many hosts, accumulation, the page on the
# second step, fixes, proofs and pictures of shards, the page on profiles, clusters of GPUs, models
# that are not decoders, the pages on exploring plans and on pipelines, host memory, sums that stay
# unreduced, the loss in a pipeline, the comparison of ways to accumulate, plans of host memory, the
# page on what does not fit, the kernel that decodes on GPUs, and when a pipeline wins add.
WORDS_FOR_USERS = 46_000 + (
    300
    + 500
    + 340
    + 620
    + 1_100
    + 850
    + 460
    + 2_100
    + 180
    + 450
    + 1_000
    + 600
    + 110
    + 150
    + 200
    + 200
    + 700
    + 60
    + 110
)
# The last two numbers are the programs that were compiled for GPUs, and what one GPU measured.
WORDS_FOR_MAINTAINERS = 13_000 + 660 + 400 + 300 + 210 + 1_100 + 950
# What users import from.
PACKAGES = (
    "shardwright",
    "shardwright.attention",
    "shardwright.layers",
    "shardwright.plan",
    "shardwright.testing",
)


def nav_pages(entry: Any) -> Iterator[str]:
    """Return the pages of a navigation, in order."""
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from nav_pages(inner)


def shown_on_api_pages() -> set[str]:
    """Return what the API pages show: modules, and single names of modules."""
    return {
        name
        for page in (DOCS / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }


def test_every_page_is_in_the_navigation() -> None:
    """Pages for maintainers, in docs/development, are linked from other pages only."""
    nav = list(
        nav_pages(
            tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
        )
    )
    there = [
        page.relative_to(DOCS).as_posix()
        for page in PAGES
        if page.is_relative_to(DOCS) and not page.is_relative_to(DOCS / "development")
    ]
    assert [page for page in there if page not in nav] == [], "add each to nav in zensical.toml"
    assert [page for page in nav if page not in there] == [], "no such page"
    assert len(set(nav)) == len(nav)


def titles(entry: Any) -> Iterator[tuple[str, str]]:
    """Return each page of a navigation with its title there."""
    for title, inner in entry.items():
        if isinstance(inner, str):
            yield inner, title
        else:
            for each in inner:
                yield from titles(each)


def test_navigation_titles_equal_page_titles() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    named = {
        page: title
        for entry in nav
        for page, title in titles(entry)
        if not page.endswith("index.md")
    }
    assert named == {
        page: (DOCS / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        for page in named
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_on_an_api_page(package: str) -> None:
    module, shown = importlib.import_module(package), shown_on_api_pages()
    missing = []
    for name in (name for name in dir(module) if not name.startswith("_")):
        value = getattr(module, name)
        home = getattr(value, "__module__", "")
        public = (inspect.isclass(value) or inspect.isroutine(value)) and home.startswith(
            "shardwright."
        )
        if public and not {home, f"{home}.{name}"} & shown:
            missing.append(f"{package}.{name}: write `::: {home}` on a page of docs/api")
    assert missing == []


def test_api_pages_show_each_name_once() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    names = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert sorted(names) == sorted(set(names))
    for name in names:
        home, _, last = name.rpartition(".")
        # `find_spec` would import packages of some modules, which need flax.
        path = ROOT.joinpath("src", *name.split("."))
        assert (
            path.is_dir() or path.with_suffix(".py").is_file()
            if not last[0].isupper()
            else hasattr(importlib.import_module(home), last)
        ), name


def test_plans_of_models_are_written() -> None:
    """`make docs` writes each page of plans that the page on exploring plans links to."""
    page = (DOCS / "open.md").read_text(encoding="utf-8")
    assert re.findall(r'href="plans/(.+?)\.html"', page) == list(plans.MODELS)
    assert f"with {plans.CANDIDATES} candidates each" in page
    assert [name for name in plans.MODELS if not (plans.CONFIGS / f"{name}.json").is_file()] == []


def words(pages: Iterable[Path]) -> int:
    """Return the number of words of pages, as `wc -w` counts them."""
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def test_pages_stay_within_their_budget_of_words() -> None:
    maintainers = DOCS / "development"
    users = [
        ROOT / "README.md",
        *(
            page
            for page in DOCS.rglob("*.md")
            if not page.is_relative_to(maintainers) and not page.is_relative_to(DOCS / "api")
        ),
    ]
    assert len(users) > 30
    assert words(users) <= WORDS_FOR_USERS, "shorten a page of docs/, or the README"
    assert words(maintainers.rglob("*.md")) <= WORDS_FOR_MAINTAINERS, "shorten docs/development"
