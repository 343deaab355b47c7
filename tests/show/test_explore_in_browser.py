"""The HTML page of plans in headless Chromium: by mouse and keyboard, wide and narrow."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding

from shardwright.errors import visible
from shardwright.plan.search.result import Candidate
from shardwright.show.explore import page_html
from shardwright.vocabulary.axes import axis_label
from shardwright.vocabulary.units import bytes_text, seconds_text
from tests.show.test_explore import EVIL, VARIANTS, explained, found, plan_of

driver = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install it")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium"),
]
DIM = ".dim"


@dataclasses.dataclass(frozen=True)
class Opened:
    """A page, and what it has asked for and complained about."""

    page: Any
    requests: list[str]
    problems: list[str]

    def tile(self, name: str, pane: int = 0) -> str:
        text: str = (
            self.page.locator(".pane").nth(pane).locator(f'[data-name="{name}"]').inner_text()
        )
        return text

    def title(self, pane: int = 0) -> str:
        text: str = self.page.locator("h2").nth(pane).inner_text()
        return text


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with driver.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    # A name that is hostile, because every test of the page is then a test of the name too.
    named = dataclasses.replace(found().candidates[0], name=EVIL)
    candidates = (*found().candidates, named)
    text = page_html(candidates, VARIANTS, title=EVIL, notes=[EVIL])
    path.write_text(text, encoding="utf-8")
    return path


def opened(chromium: Any, path: Path, **options: Any) -> Iterator[Opened]:
    page = chromium.new_page(**{"viewport": {"width": 1400, "height": 900}, **options})
    result = Opened(page, [], [])
    page.on("request", lambda request: result.requests.append(request.url))
    page.on("pageerror", lambda error: result.problems.append(str(error)))
    page.on("console", lambda message: result.problems.append(message.text))
    page.goto(path.as_uri())
    yield result
    assert result.problems == []
    assert result.requests == [path.as_uri()]
    page.close()


@pytest.fixture
def wide(chromium: Any, written: Path) -> Iterator[Opened]:
    yield from opened(chromium, written)


def press(opened: Opened, selector: str, key: str, times: int = 1) -> None:
    """Focus an element and press a key, as a reader without a mouse does."""
    opened.page.locator(selector).first.focus()
    for _ in range(times):
        opened.page.keyboard.press(key)


def check_numbers(opened: Opened, candidate: Candidate, pane: int = 0) -> None:
    report = plan_of(candidate)
    memory, time = report.memory, report.time
    assert time is not None
    shown = {
        "verdict": str(report.verdict),
        "memory per device": f"{bytes_text(memory.low)} to {bytes_text(memory.high)}",
        "time of one run": f"{seconds_text(time.low)} to {seconds_text(time.high)}",
        "sent per device": bytes_text(report.sent_bytes),
        "copies in the state": f"{report.state.stored.replicated_share:.1%}",
        **{kind: f"{kind} {bytes_text(size)}" for kind, size in memory.kinds.items()},
    }
    assert {name: opened.tile(name, pane) for name in shown} == shown
    text = opened.page.locator(".pane").nth(pane).inner_text()
    for axis, sent in report.by_axis().items():
        assert re.search(rf"{axis_label(axis)}\s+{re.escape(bytes_text(sent))}\n", text)


def test_candidates_by_the_keyboard(wide: Opened) -> None:
    for number, candidate in enumerate(found().candidates):
        if number:
            press(wide, ".sliders input", "ArrowRight")
        name = f"{candidate.name} on {candidate.mesh}"
        assert wide.title() == name
        check_numbers(wide, candidate)


def test_numbers_are_rounded_as_in_python(wide: Opened) -> None:
    """A tie goes to the even digit: 1.25 KiB is 1.2 KiB, and 1.75 KiB is 1.8 KiB."""
    sizes = [0, 1023, 1280, 1344, 1792, 5 * 2**28, 7 * 2**28, 10**9, 2**51 * 5, 2**61]
    times = [0.0, 1.25e-7, 0.000125, 0.0015, 0.999999, 1.0, 2.625, 2.375, 1234.5]
    texts = wide.page.evaluate("(sizes) => sizes.map(bytesText)", sizes)
    assert texts == list(map(bytes_text, sizes))
    texts = wide.page.evaluate("(times) => times.map(secondsText)", times)
    assert texts == list(map(seconds_text, times))


def test_mesh_sliders_change_the_numbers(wide: Opened) -> None:
    first = found().candidates[0]
    sizes = sorted({each.sizes["tp"] for each in found().candidates})
    press(wide, 'input[data-axis="tp"]', "Home")
    for size in sizes:
        # 8 devices in all, so one of fsdp and dp follows.
        candidate = next(
            each
            for each in found().candidates
            if (each.name, each.sizes["tp"]) == (first.name, size)
        )
        assert wide.title() == f"{first.name} on {candidate.mesh}"
        check_numbers(wide, candidate)
        focused = wide.page.evaluate("document.activeElement.dataset.axis")
        assert focused == "tp"
        wide.page.keyboard.press("ArrowRight")


def test_a_strategy_is_chosen_with_its_nearest_mesh(wide: Opened) -> None:
    mesh = wide.title().partition(" on ")[2]
    wide.page.locator("select").last.select_option("fsdp_tp_sp")
    assert wide.title() == f"fsdp_tp_sp on {mesh}"
    wide.page.locator("select").last.select_option(visible(EVIL))
    assert wide.title() == f"{visible(EVIL)} on {found().candidates[0].mesh}"


def test_dims_say_why(wide: Opened) -> None:
    """By hovering, and by the keyboard; arrow keys move in the table."""
    candidate = found().candidates[0]
    why = wide.page.locator("#why")
    assert not why.is_visible()
    for (category, path), resolution in explained(candidate).items():
        row = (
            wide.page.locator("tr")
            .filter(has_text=category)
            .filter(
                has_text=re.compile(re.escape(re.sub(r"\d", "*", path)) if path else "the argument")
            )
        )
        for decision in resolution.decisions:
            row.first.locator(DIM).nth(decision.dim).hover()
            lines = [decision.rule.written, decision.rule.place, decision.why]
            assert why.inner_text().split("\n") == lines
    wide.page.mouse.move(0, 0)
    assert not why.is_visible()
    press(wide, ".tensor", "ArrowRight")
    assert why.is_visible()
    before = why.inner_text()
    wide.page.keyboard.press("ArrowRight")
    assert why.inner_text() != before
    wide.page.keyboard.press("ArrowDown")
    assert why.is_visible()
    wide.page.keyboard.press("Escape")
    assert not why.is_visible()


def test_blocks_are_those_of_jax(wide: Opened) -> None:
    """Each device holds the part of each argument that JAX gives it."""
    for number in range(1, len(found().candidates) + 1):
        candidate = found().candidates[number - 1]
        mesh = jax.make_mesh(
            tuple(candidate.sizes.values()),
            tuple(candidate.sizes),
            axis_types=(jax.sharding.AxisType.Auto,) * len(candidate.sizes),
            devices=jax.devices()[:8],
        )
        spec = explained(candidate)["parameters", "layers/0/up"].require()
        places = NamedSharding(mesh, spec).devices_indices_map((64, 256))
        wide.page.get_by_role("button", name="layers/*/up").first.click()
        slider = wide.page.locator('label:has-text("device") input')
        slider.focus()
        wide.page.keyboard.press("Home")
        for device in mesh.devices.flat:
            ranges = [
                ":" if (part.start, part.stop) == (None, None) else f"{part.start}:{part.stop}"
                for part in places[device]
            ]
            text = wide.page.locator(".block").inner_text()
            assert text.startswith(f"It holds [{', '.join(ranges)}], ")
            same = sum(each == places[device] for each in places.values()) - 1
            assert ("No other device" if same == 0 else f"{same} other device") in text
            wide.page.keyboard.press("ArrowRight")
        press(wide, ".sliders input", "ArrowRight")


def test_two_candidates_side_by_side(wide: Opened) -> None:
    wide.page.locator("#compare").check()
    first = found().candidates[0]
    second = next(each for each in found().candidates if each.mesh != first.mesh)
    check_numbers(wide, first, 0)
    check_numbers(wide, second, 1)
    boxes = [wide.page.locator(".pane").nth(at).bounding_box() for at in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]
    table = wide.page.locator("table").first.inner_text()
    assert bytes_text(plan_of(second).memory.high) in table
    wide.page.locator(".card summary").click()
    wide.page.get_by_role("button", name="show candidate 3 as B").click()
    check_numbers(wide, first, 0)
    check_numbers(wide, found().candidates[2], 1)
    wide.page.locator("#compare").uncheck()
    assert wide.page.locator(".pane").count() == 1


def test_names_from_files_run_nothing(wide: Opened) -> None:
    assert wide.page.title() == visible(EVIL)
    assert wide.page.locator("h1").inner_text() == visible(EVIL)
    wide.page.locator("summary").first.click()
    assert wide.page.locator("li").first.inner_text() == visible(EVIL)
    assert wide.page.locator("img").count() == 0
    assert wide.page.evaluate("window.hit") is None


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_readable(chromium: Any, written: Path, width: int, scheme: str) -> None:
    """Nothing is wider than the window, and texts have a contrast of 4.5 or more."""
    viewport = {"width": width, "height": 900}
    for each in opened(chromium, written, viewport=viewport, color_scheme=scheme):
        each.page.locator("#compare").check()
        assert each.page.evaluate("document.documentElement.scrollWidth") <= width
        colors = each.page.evaluate(
            """() => ['body', 'p', 'dt', 'dd', 'th', '.dim b', '.good'].map((name) => {
              const node = document.querySelector(name);
              let back = node;
              while (getComputedStyle(back).backgroundColor === 'rgba(0, 0, 0, 0)') {
                back = back.parentNode;
              }
              return [name, getComputedStyle(node).color, getComputedStyle(back).backgroundColor];
            })"""
        )
        for name, text, back in colors:
            assert contrast(text, back) >= 4.5, (name, text, back)
        light = luminance(colors[0][2]) > 0.5
        assert light == (scheme == "light")


def luminance(color: str) -> float:
    """The relative luminance of `rgb(r, g, b)`, as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
