"""`Resolution._repr_html_`: which device holds which part, escaped and bounded in size."""

from __future__ import annotations

import html.parser
import re
from typing import Any

import pytest

import shardwright as sw
from shardwright.testing import Golden

AXES = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
WEIGHT = (sw.EMBED, sw.MLP_INTERMEDIATE)


def explain(
    axes: Any, mesh: str = "fsdp:2,tp:4", *, text: str = "", **request: Any
) -> sw.Resolution:
    strategy = sw.Strategy.preset("fsdp_tp")
    strategy = strategy | sw.Strategy.loads(text, format="toml") if text else strategy
    manager = sw.PartitionManager(strategy, mesh=sw.abstract_mesh(mesh))
    return manager.explain(axes, **request)


class Tags(html.parser.HTMLParser):
    """Checks that every tag is closed, and collects the text of tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.found.append((self.open[-1] if self.open else "", data))

    def texts(self, tag: str) -> list[str]:
        return [data for name, data in self.found if name == tag]


def cells(resolution: sw.Resolution) -> list[str]:
    return Tags(resolution._repr_html_()).texts("text")


def test_weight(golden: Golden) -> None:
    text = explain(WEIGHT, shape=(64, 256), role="param", path="mlp/up")._repr_html_()
    golden(text.replace("><", ">\n<"), "weight")


def test_devices_by_part() -> None:
    assert cells(explain(WEIGHT, shape=(64, 256), role="param")) == [str(n) for n in range(8)]
    assert cells(explain(AXES, shape=(8, 4, 64))) == ["0, 1, 2, 3", "4, 5, 6, 7"]
    assert cells(explain((sw.HEAD,), shape=(8,))) == ["0, 4", "1, 5", "2, 6", "3, 7"]
    assert cells(explain((sw.NORM,), shape=(8,))) == ["0 to 7"]
    assert cells(explain((sw.HEAD,), "fsdp:8,tp:2", shape=(8,))) == ["0, 2, … 14", "1, 3, … 15"]


def test_several_mesh_axes_on_one_dim() -> None:
    """The first mesh axis of a dim is the major one, whatever its place in the mesh."""
    text = '[rules]\nembed = "tp+fsdp"'
    assert cells(explain((sw.EMBED,), "fsdp:2,tp:2", text=text, shape=(8,))) == ["0", "2", "1", "3"]


@pytest.mark.parametrize(
    "resolution",
    [
        explain(WEIGHT, "fsdp:32,tp:4", shape=(64, 256), role="param"),
        explain(WEIGHT, "fsdp:32,tp:1", shape=(64, 256), role="param"),
        explain(AXES, shape=(3, 4, 64)),
        explain(
            (sw.BATCH, sw.LENGTH, sw.HEAD), "fsdp:2,sp:2,tp:2", shape=(8, 8, 8), role="activation"
        ),
    ],
    ids=["devices", "columns", "failed", "dims"],
)
def test_no_picture_but_a_table(resolution: sw.Resolution) -> None:
    text = resolution._repr_html_()
    assert "<svg" not in text
    assert len(Tags(text).texts("td")) >= 4


def test_size_is_bounded() -> None:
    longest = max(
        len(explain(WEIGHT, mesh, shape=(512, 512), role="param")._repr_html_())
        for mesh in ("fsdp:8,tp:8", "fsdp:16,tp:4", "fsdp:64", "fsdp:256,tp:16")
    )
    assert longest < 40_000


def test_text_is_escaped() -> None:
    text = '[rules]\nembed = "tp"'
    shown = explain((sw.EMBED,), text=text, shape=(8,), path='<script>"&')._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;&quot;&amp;" in shown
    failed = explain((sw.EMBED,), shape=(8, 8), path="<b>")._repr_html_()
    assert "&lt;b&gt;" in failed
    assert Tags(failed).texts("pre")


def test_colors_suit_light_and_dark() -> None:
    shown = explain(WEIGHT, shape=(64, 256), role="param")._repr_html_()
    assert set(re.findall(r'stroke="([^"]*)"', shown)) == {"currentColor"}
    assert "fill-opacity" in shown
    assert "background" not in shown
