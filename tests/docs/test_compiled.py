"""The page on compiled plans shows the file of results; `--update-golden -k compiled` writes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks.compiled import MESHES, Row, judge, read_rows
from shardwright.testing.golden import Golden
from tests.docs.compiled import programs_table, with_tables
from tests.docs.snippets import ROOT

PAGE = ROOT / "docs" / "development" / "compiled.md"
RESULTS = ROOT / "benchmarks" / "results" / "compiled" / "v5e-2x4.json"
GPUS = ROOT / "benchmarks" / "results" / "compiled" / "h100-8.json"
MODES = ("train", "prefill", "decode", "insert")


def row(planned: int, compiled: int, mode: str = "train") -> Row:
    sent: dict[str, Any] = {
        "mesh_axes": ["fsdp"],
        "planned": {"all_reduce": planned},
        "compiled": {"all_reduce": compiled},
        "difference": compiled - planned,
        "reasons": [],
    }
    return Row(model="one", preset="fsdp", mesh="fsdp:8", mode=mode, traffic=[sent], marks=[])


def test_the_page_shows_the_compiled_results(golden: Golden) -> None:
    text = PAGE.read_text(encoding="utf-8")
    golden.file(PAGE, with_tables(text, *read_rows(RESULTS), gpus=read_rows(GPUS)))


def test_results_have_three_models_and_all_modes() -> None:
    rows, refused, _ = read_rows(RESULTS)
    seen = [(each.model, each.preset, each.mode) for each in rows]
    seen += [(each["model"], each["preset"], each["mode"]) for each in refused]
    measured = dict.fromkeys((model, preset) for model, preset, _ in seen)
    assert len({model for model, _ in measured}) == 3
    assert {preset for _, preset in measured} == set(MESHES)
    assert sorted(seen) == sorted((*each, mode) for each in measured for mode in MODES)


def test_gpu_results_have_twenty_programs() -> None:
    rows, _, context = read_rows(GPUS)
    assert context["target"] == "h100:8"
    assert len({(each.model, each.preset, each.mode) for each in rows}) >= 20


def test_programs_show_what_differs() -> None:
    one = row(2**20, 2**21)
    one = dataclasses.replace(one, memory=[2**20, 2**21, 2**22])
    table = programs_table([one, dataclasses.replace(one, memory=[0, 2**23, 2**22], traffic=[])])
    assert table.splitlines()[2:] == [
        "| one, fsdp, train | fsdp: all_reduce 1.0 MiB / 2.0 MiB | 1 to 2 | **4** |",
        "| one, fsdp, train | nothing | 0 to 8 | 4 |",
    ]


def test_a_miss_has_the_sign_of_its_bytes() -> None:
    page = "".join(
        f"<!-- compiled: {name} -->\n<!-- end -->\n" for name in ("verdicts", "misses", "refused")
    )
    text = with_tables(page, [row(2**20, 2**21)], [], {"target": "v5e:2x4"})
    assert "one, fsdp, train: **+50.00%**\n    - over fsdp +1.0 MiB: not explained" in text


def test_targets_are_judged() -> None:
    exact, near, far = row(100, 100), row(95, 100), row(50, 100)
    assert list(judge([exact] * 7 + [near] * 3).values()) == [True, True, True]
    assert list(judge([exact] * 6 + [near] * 4).values()) == [False, True, True]
    assert list(judge([exact] * 8 + [far] * 2).values()) == [True, False, True]
    assert list(judge([row(99, 100, "decode")]).values()) == [True, True, False]


def test_missing_marker_is_detected() -> None:
    with pytest.raises(AssertionError, match="the page has"):
        with_tables("", [row(1, 1)], [], {"target": "v5e:2x4"})
