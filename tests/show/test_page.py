"""The HTML page of a plan: what is on it, and that it needs nothing else."""

from __future__ import annotations

import html.parser
import shlex
from pathlib import Path

import pytest

from shardwright.cli.main import main
from shardwright.plan.collectives.collective import Collective
from shardwright.plan.verify.compiler import Compiled, Target
from shardwright.plan.verify.differences import compare_traffic
from shardwright.plan.verify.run import Verification
from shardwright.show.page import plan_html
from tests.cli.test_plan import MODEL
from tests.plan.test_verify import collective
from tests.plan.test_walk import HIDDEN, SPECS, X, gradient, manager, mlp, plan, shapes

VOID = {"meta", "rect", "line", "br"}


class Page(html.parser.HTMLParser):
    """Checks that tags are balanced, and keeps text and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_page_has_every_number_and_loads_nothing() -> None:
    pm = manager("fsdp_tp", "fsdp:2,tp:4")
    report = pm.plan(
        gradient, shapes(SPECS), X, specs=(SPECS, HIDDEN), outputs=SPECS, topology="v5e:2x4"
    )
    found: list[Collective] = [collective()]
    compiled = Compiled(
        target=Target(platform="cpu"),
        collectives=tuple(found),
        memory={"argument_size": 5, "peak_memory": 7},
    )
    traffic = compare_traffic(report.events, found, cpu=True)
    verification = Verification(report=report, compiled=compiled, traffic=traffic)
    text = plan_html(
        {"train": report, "decode": plan(manager("ddp", "dp:2,tp:4"), mlp)},
        title="<model>",
        verified={"train": verification},
    )
    page = Page(text)
    words = " ".join(page.words)
    for said in ("<model>", "fits", "all_gather", "EMBED", "test_walk.py", "idle: tp"):
        assert said in words
    assert "Compiled by jaxlib" in words
    # Nothing is loaded: no scripts, no links but those to the page's own modes.
    assert "<script" not in text
    assert "@import" not in text
    targets = [value for name, value in page.attributes if name in ("src", "href")]
    assert targets == ["#train", "#decode"]
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text


def test_refused_program_is_shown() -> None:
    report = plan(manager("fsdp_tp", "fsdp:2,tp:4"), mlp)
    compiled = Compiled(target=Target(platform="cpu"), refused="Used 17.5G of 15.75G hbm.")
    verification = Verification(report=report, compiled=compiled, traffic=())
    page = Page(plan_html({"train": report}, verified={"train": verification}))
    assert "does not fit: Used 17.5G of 15.75G hbm." in page.words


def test_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "planned_model.py"
    model.write_text(MODEL, encoding="utf-8")
    command = f"plan {model}:programs --strategy fsdp_tp --mesh fsdp:2,tp:4"
    pages = []
    for _ in range(2):
        assert main(shlex.split(f"{command} --html {tmp_path / 'plan.html'}")) == 0
        pages.append((tmp_path / "plan.html").read_text(encoding="utf-8"))
    assert pages[0] == pages[1]
    Page(pages[0])
    assert main(shlex.split(f"{command} --html {tmp_path / 'absent' / 'plan.html'}")) == 2
    assert "cannot write" in capsys.readouterr().err
