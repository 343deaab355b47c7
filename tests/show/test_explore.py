"""The HTML page of plans: its data are those of `pm.plan` and `explain`, and it loads nothing."""

from __future__ import annotations

import functools
import html.parser
import json
import math
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.cli.main import main
from shardwright.errors import visible
from shardwright.plan.planner import PlanReport, Program
from shardwright.plan.search.result import Candidate, SearchReport
from shardwright.show.explore import page_data, page_html
from shardwright.trees.paths import path_text
from shardwright.vocabulary.axes import axis_label
from tests.cli.test_plan import MODEL
from tests.cli.test_reference import CONFIG

HIDDEN = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
LAYER = {
    "key": sw.ArraySpec((64, 2, 16), jnp.float32, (sw.EMBED, sw.KV_HEAD, sw.KV_HEAD_DIM)),
    "up": sw.ArraySpec((64, 256), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE)),
    "down": sw.ArraySpec((256, 64), jnp.float32, (sw.MLP_INTERMEDIATE, sw.EMBED)),
}
SPECS = {"layers": [LAYER, LAYER], "norm": sw.ArraySpec((64,), jnp.float32, (sw.NORM,))}
ANNOTATIONS = {"parameters": SPECS, "optimizer": SPECS, "inputs": HIDDEN}
INSIDE = {"activations": "activation", "weights in use": "use"}  # category -> role
TOPOLOGY = "v5e:2x4"
EVIL = '</script><img src=x onerror="window.hit = 1"><!--\u202e\x1b]'


def loss(params: Any, x: Any) -> Any:
    weights = sw.gather(params, SPECS)
    x = sw.shard(x, HIDDEN) * weights["norm"]
    for layer in weights["layers"]:
        keys = jnp.einsum("bse,ehd->bshd", x, layer["key"])
        keys = sw.shard(keys, sw.BATCH, sw.QUERY_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM)
        inner = sw.shard(x @ layer["up"], sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
        x = sw.shard(x + inner @ layer["down"], HIDDEN) + keys.mean()
    return x.sum()


def step(params: Any, moments: Any, x: Any) -> Any:
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, jax.grad(loss)(params, x))
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments


def is_spec(leaf: Any) -> bool:
    return isinstance(leaf, sw.ArraySpec)


PARAMS = jax.tree.map(
    lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), SPECS, is_leaf=is_spec
)
PROGRAM = Program(
    step,
    (PARAMS, PARAMS, jax.ShapeDtypeStruct((32, 16, 64), jnp.float32)),
    (SPECS, SPECS, HIDDEN),
    outputs=(SPECS, SPECS),
    holds=tuple(ANNOTATIONS),
    donated=(0, 1),
)
VARIANTS = {"": {"__train__": PROGRAM}}


@functools.cache
def found() -> SearchReport:
    # With one device along sp, both presets give the same specs, so they share their walks.
    strategies = {name: sw.Strategy.preset(name) for name in ("fsdp_tp", "fsdp_tp_sp")}
    return sw.search(PROGRAM, strategies, topology=TOPOLOGY, axes=("fsdp", "tp"))


@functools.cache
def shown() -> dict[str, Any]:
    return page_data(found().candidates, VARIANTS)


def manager_of(candidate: Candidate) -> sw.PartitionManager:
    mesh = sw.abstract_mesh(dict(candidate.sizes))
    return sw.PartitionManager(candidate.strategy, mesh=mesh, mode="train")


def plan_of(candidate: Candidate) -> PlanReport:
    return manager_of(candidate).plan(
        step,
        *PROGRAM.shapes,
        specs=PROGRAM.specs,
        outputs=PROGRAM.outputs,
        holds=PROGRAM.holds,
        donated=PROGRAM.donated,
        topology=TOPOLOGY,
    )


def explained(candidate: Candidate) -> dict[tuple[str, str], sw.Resolution]:
    """The resolution of each argument by its category and its path."""
    manager = manager_of(candidate)
    answers = {}
    for category, tree in ANNOTATIONS.items():
        role = {"parameters": "param", "optimizer": "state", "inputs": "activation"}[category]
        leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_spec)[0]
        if category == "inputs":
            leaves = [((), tree)]
        for path, spec in leaves:
            shape = spec.shape if is_spec(spec) else (32, 16, 64)
            answers[category, path_text(path)] = manager.explain(
                spec, role=role, shape=shape, path=path_text(path) or None
            )
    return answers


def reasons(resolution: sw.Resolution) -> list[dict[str, Any]]:
    found = []
    for decision in resolution.decisions:
        assert decision.rule is not None
        found.append(
            {
                "axis": decision.label,
                "over": list(decision.mesh_axes),
                "rule": decision.rule.written,
                "place": decision.rule.place,
                "why": decision.why,
            }
        )
    return found


def test_numbers_are_those_of_the_plan() -> None:
    data = shown()
    assert len(data["candidates"]) == len(found().candidates) >= 6
    for candidate, each in zip(found().candidates, data["candidates"], strict=True):
        report, plan = plan_of(candidate), each["modes"]["train"]
        assert each["mesh"] == list(candidate.sizes.items())
        assert plan["memory"] == [report.memory.low, report.memory.high]
        assert dict(plan["kinds"]) == dict(report.memory.kinds)
        assert plan["time"][0] == ["all", report.time.low, report.time.high]
        assert plan["verdict"] == report.verdict
        assert plan["copies"] == report.state.stored.replicated_share
        by_axis: Counter[str] = Counter()
        by_line: Counter[str] = Counter()
        for number, _, _, sent in plan["events"]:
            collective = data["collectives"][number]
            by_line[collective["where"]] += sent
            for axis in collective["axes"] or [""]:
                by_axis[axis] += sent
        assert by_axis == {axis_label(axis): sent for axis, sent in report.by_axis().items()}
        lines: Counter[str] = Counter()
        for event in report.events:
            lines[event.source] += event.total_wire_bytes
        assert by_line == lines
        assert sum(by_line.values()) == plan["sent"] == report.sent_bytes
        held = sum(
            count * size
            for number, count, size, _ in plan["tensors"]
            if data["tensors"][number]["category"] not in INSIDE
        )
        assert held == report.state.of().per_device
    assert data["usable"] == found().topology.chip.hbm_bytes


def test_reasons_are_those_of_explain() -> None:
    data = shown()
    for candidate, each in zip(found().candidates, data["candidates"], strict=True):
        rows = {
            (data["tensors"][number]["category"], data["tensors"][number]["path"]): (count, dims)
            for number, count, _, dims in each["modes"]["train"]["tensors"]
        }
        assert {category for category, _ in rows} == {*ANNOTATIONS, *INSIDE}
        for (category, path), resolution in explained(candidate).items():
            pattern = path.replace("/0/", "/*/").replace("/1/", "/*/")
            count, dims = rows[category, pattern]
            assert count == (2 if "layers" in path else 1)
            assert [data["decisions"][dim] for dim in dims] == reasons(resolution)
    places = {each["place"].partition(":")[0] for each in data["decisions"]}
    assert places == {"fsdp_tp.toml", "fsdp_tp_sp.toml"}
    assert "tp: 2 % 4 != 0" in str([each["why"] for each in data["decisions"]])


def test_activations_and_weights_in_use_have_rows() -> None:
    data = shown()
    inner = (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
    for candidate, each in zip(found().candidates, data["candidates"], strict=True):
        manager = manager_of(candidate)
        for category, axes, shape in (
            ("activations", inner, (32, 16, 256)),
            ("weights in use", LAYER["up"].axes, (64, 256)),
        ):
            resolution = manager.explain(*axes, shape=shape, role=INSIDE[category])
            ((number, size, dims),) = [
                (number, size, dims)
                for number, _, size, dims in each["modes"]["train"]["tensors"]
                if data["tensors"][number]["category"] == category
                and data["tensors"][number]["shape"] == list(shape)
            ]
            assert [data["decisions"][dim] for dim in dims] == reasons(resolution)
            parts = math.prod(candidate.sizes[axis] for dim in dims for axis in over(data, dim))
            assert size * parts == math.prod(shape) * 4
            assert re.fullmatch(r"test_explore\.py:\d+", data["tensors"][number]["path"])


def over(data: dict[str, Any], dim: int) -> list[str]:
    axes: list[str] = data["decisions"][dim]["over"]
    return axes


class Page(html.parser.HTMLParser):
    """The tags, attributes and scripts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, str] = {}
        self.last = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs
        self.last = dict(attrs).get("id") or tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.last, data)


def test_page_loads_nothing() -> None:
    text = page_html(found().candidates, VARIANTS, title="<model>")
    page = Page(text)
    assert json.loads(page.texts["data"]) == json.loads(json.dumps(shown()))
    assert page.texts["title"] == page.texts["h1"] == "<model>"
    assert [value for name, value in page.attributes if name in ("src", "href")] == ["data:,"]
    for absent in ("http:", "https:", "@import", "url(", "innerHTML"):
        assert absent not in text
    assert "prefers-color-scheme: dark" in text


def test_names_from_files_stay_text() -> None:
    specs = {EVIL: sw.ArraySpec((64,), jnp.float32, (sw.NORM,))}
    program = Program(lambda x: x, ({EVIL: jax.ShapeDtypeStruct((64,), "float32")},), (specs,))
    strategy = sw.Strategy.preset("fsdp_tp") | sw.Strategy.model_validate({"name": "mine"})
    strategies = {EVIL: strategy}
    report = sw.search(program, strategies, topology=TOPOLOGY, pins=("mesh.fsdp = 8",))
    (candidate,) = report.candidates
    text = page_html([candidate], {"": {"__train__": program}}, title=EVIL, notes=[EVIL])
    page = Page(text)
    assert (page.tags["script"], page.tags["img"]) == (2, 0)
    assert "<!--" not in text
    assert "\u202e" not in text
    data = json.loads(page.texts["data"])
    assert data["notes"] == [data["candidates"][0]["strategy"]] == [visible(EVIL)]
    assert data["tensors"][0]["path"] == visible(EVIL)


def test_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "planned_model.py"
    model.write_text(MODEL, encoding="utf-8")
    out = tmp_path / "page.html"
    command = f"open {model}:programs --strategy fsdp_tp --out {out}"
    pages = []
    for _ in range(2):
        assert main(shlex.split(f"{command} --mesh fsdp:2,tp:4 --mesh fsdp:8")) == 0
        pages.append(out.read_text(encoding="utf-8"))
    assert pages[0] == pages[1]
    said = capsys.readouterr().out
    assert f"planned 2 candidates for train, decode\nwrote {out}:" in said
    data = json.loads(Page(pages[0]).texts["data"])
    assert [each["mesh"] for each in data["candidates"]] == [
        [["fsdp", 2], ["tp", 4]],
        [["fsdp", 8]],
    ]
    assert data["usable"] is None
    assert main(shlex.split(f"{command} --topology v5e:2x2 --candidates 2 --mode train")) == 0
    data = json.loads(Page(out.read_text(encoding="utf-8")).texts["data"])
    assert len(data["candidates"]) == 2
    assert "train: dropped 8: not planned: ranked too low" in data["notes"]
    for words, error in (
        ("", "nothing says which meshes to plan"),
        ("--mesh fsdp:8 --orders", "--orders is for a search"),
        ("--hardware chips.toml", "--hardware describes chips"),
        (f"--mesh fsdp:8 --out {tmp_path / 'absent' / 'page.html'}", "cannot write"),
    ):
        assert main(shlex.split(f"{command} {words}")) == 2
        assert error in capsys.readouterr().err


@pytest.mark.full
def test_page_of_a_large_model_is_small(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    }
    model = tmp_path / "config.json"
    model.write_text(json.dumps({**CONFIG, **sizes, "sliding_window": None}), encoding="utf-8")
    assert main(shlex.split(f"open {model} --topology v5p:4x4x4 --out {tmp_path}/page.html")) == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    data = json.loads(Page(text).texts["data"])
    modes = Counter(mode for each in data["candidates"] for mode in each["modes"])
    assert modes["train"] == modes["decode"] == 60
    assert len(text.encode()) < 2_000_000


@pytest.mark.full
@pytest.mark.ci
def test_the_batch_divides_over_each_mesh(tmp_path: Path) -> None:
    model, out = tmp_path / "config.json", tmp_path / "page.html"
    model.write_text(json.dumps({**CONFIG, "sliding_window": None}), encoding="utf-8")
    words = f"open {model} --strategy fsdp --mode train --out {out} --mesh fsdp:2 --mesh fsdp:4"
    assert main(shlex.split(words)) == 0
    data = json.loads(Page(out.read_text(encoding="utf-8")).texts["data"])
    assert "assumed: batch 4," in str(data["notes"])
