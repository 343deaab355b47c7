"""Search over rules and orders: brute force, planted best candidates, pins, and several modes."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.cli.main import main
from shardwright.errors import ProgramError
from shardwright.plan import Program
from shardwright.plan.collectives.collective import Kind
from shardwright.plan.fit import Verdict
from shardwright.plan.search import SearchReport, search_variants, verify_front
from shardwright.plan.search.run import WALKS
from shardwright.plan.search.space import Space, default_strategies
from shardwright.plan.verify.compiler import Compiled, Target
from shardwright.plan.verify.differences import Sent
from shardwright.plan.verify.run import Verification
from shardwright.show.search import search_text, verified_text
from shardwright.vocabulary.units import bytes_text
from tests.plan.decoder import Decoder
from tests.plan.test_search import program
from tests.raising import Facts, facts, raises

FSDP_TP = {"fsdp_tp": sw.Strategy.preset("fsdp_tp")}
MEMORY = {"peak_memory": 2**30, "argument_size": 2**20}
AXES = ("dp", "fsdp", "tp")
SMALL = Decoder(
    embed=64, inner=128, heads=4, kv_heads=2, dim=16, vocab=256, layers=2, batch=8, length=16
)


def search(given: Any = None, **options: Any) -> SearchReport:
    options = {"topology": "v5e:2x4", "axes": AXES, **options}
    return sw.search(program(32) if given is None else given, FSDP_TP, **options)


def brute_force(
    vary: dict[str, tuple[str, ...]], axes: tuple[str, ...], *, orders: bool
) -> set[tuple[float, ...]]:
    """Return the costs of every candidate, each planned by itself."""
    costs = set()
    sizes = [
        dict(zip(axes, split, strict=True))
        for split in itertools.product((1, 2, 4, 8), repeat=len(axes))
        if math.prod(split) == 8
    ]
    for texts in itertools.product(*vary.values()):
        rules = dict(zip(vary, texts, strict=True))
        params = {key[7:]: rules.pop(key) for key in list(rules) if key.startswith("params.")}
        overlay = sw.Strategy.model_validate({"rules": rules, "params": params})
        for mesh in sizes:
            for order in itertools.permutations(axes) if orders else [axes]:
                pm = sw.PartitionManager(
                    FSDP_TP["fsdp_tp"] | overlay,
                    mesh=sw.abstract_mesh({axis: mesh[axis] for axis in order}),
                )
                given = program(32)
                try:
                    report = pm.plan(
                        given.function, *given.shapes, specs=given.specs, topology="v5e:2x4"
                    )
                except sw.ShardingError:
                    continue
                assert report.verdict is Verdict.FITS
                costs.add((False, report.time.high, report.memory.high, 0))  # one slice
    return costs


@pytest.mark.full(but=["True-axes1-6"])
@pytest.mark.parametrize(
    ("orders", "axes", "meshes"), [(False, AXES, 10), (True, ("fsdp", "tp"), 6)]
)
@pytest.mark.ci
def test_space_equals_brute_force(orders: bool, axes: tuple[str, ...], meshes: int) -> None:
    vary = {"head": ("tp", "-"), "params.embed": ("fsdp", "-")}
    found = search(vary=vary, orders=orders, axes=axes)
    expected = brute_force(vary, axes, orders=orders)
    assert found.exhaustive
    assert {one.costs for one in found.candidates} == expected
    best = {
        costs
        for costs in expected
        if not any(
            t <= costs[1] and m <= costs[2] and (_, t, m, sent) != costs
            for _, t, m, sent in expected
        )
    }
    assert {one.costs for one in found.front} == best
    assert found.judged == 4 * meshes


def test_pins_hold_in_every_row() -> None:
    pins = ("mesh.tp = 2", 'params.embed = "-"')
    found = search(vary={"head": (None, "-"), "params.embed": ("fsdp",)}, pins=pins)
    assert found.candidates
    for one in found.candidates:
        assert one.sizes["tp"] == 2
        assert one.settings["params.embed"] == "-"
        assert one.strategy.params["embed"] == "-"
    assert {one.settings.get("head") for one in found.candidates} == {None, "-"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pins": ["head"]}, facts("head", fix="KEY")),
        ({"pins": ["heads = tp"]}, facts("unknown", "axis", path="rules.heads", fix="head")),
        (
            {"pins": ["head = model"]},
            facts("model", "dp", "fsdp", "tp", path="rules.head", fix="model"),
        ),
        ({"pins": ["mesh.model = 2"]}, facts("strategy", "mesh", "model", fix="dp")),
        ({"pins": ["mesh.tp = many"]}, facts("mesh.tp", "many", fix="mesh.tp")),
        ({"pins": ["mesh.tp = 3"]}, facts("candidates")),
        ({"pins": ["head = tp", "HEAD = -"]}, facts("tp", "-", fix="head = tp, -")),
        ({"pins": ["rules.head = tp", "head = -"]}, facts("tp", "-", fix="head = tp, -")),
        ({"pins": ["modes.decde.head = -"]}, facts("mode", path="modes.decde", fix="decode")),
        ({"pins": ["tensors.a = -"]}, facts("tensors.a", fix="params.embed")),
        ({"pins": ["a.b.c = -"]}, facts("a.b.c", fix="params.embed")),
        ({"pins": ["head = tp", "head.x = tp"]}, facts("head.x", fix="params.embed")),
        ({"pins": ["policy.zero = dp"]}, facts("unknown", "key", path="policy.zero", fix="zero1")),
        (
            {"vary": {"headd": (None, "-")}},
            facts("unknown", "axis", path="rules.headd", fix="head"),
        ),
        (
            {"vary": {"mlp_intermediate": ("tp", "tpp")}},
            facts("tpp", "dp", "fsdp", "tp", path="rules.mlp_intermediate", fix="tp"),
        ),
        ({"vary": {"head": ("-",), "HEAD": ("tp",)}}, facts("head", fix="head = A, B")),
        ({"vary": {"mesh.tp": ("1", "2")}}, facts("mesh.tp", "mesh")),
        (
            {
                "vary": {
                    f"modes.{mode}.{axis}": ("tp", "-", "sp", "ep", "dp")
                    for mode in ("train", "prefill", "decode")
                    for axis in ("head", "vocab")
                }
            },
            facts("156,250", "20,000", fix="fsdp"),
        ),
        ({"given": {}}, facts("program")),
    ],
)
def test_invalid_spaces_are_refused(options: dict[str, Any], says: Facts) -> None:
    with raises(sw.ShardingError, says):
        search(**options)


SERVE_TP = {"serve_tp": sw.Strategy.preset("serve_tp")}


def search_serving(**options: Any) -> SearchReport:
    given = {mode: SMALL.program(mode) for mode in ("prefill", "decode")}
    return sw.search(given, SERVE_TP, topology="v5e:2x4", axes=("dp", "tp"), **options)


@pytest.mark.parametrize("options", [{"pins": ["batch = tp"]}, {"vary": {"batch": ("tp",)}}])
def test_settings_that_a_mode_replaces_are_refused(options: dict[str, Any]) -> None:
    """serve_tp has a rule of its own for the batch in each of the two modes."""
    with raises(
        sw.StrategyError,
        "tp",
        "serve_tp",
        "modes.prefill",
        "modes.decode",
        fix="modes.prefill.batch = tp",
    ) as raised:
        search_serving(**options)
    assert '"modes.prefill.batch = tp" and "modes.decode.batch = tp"' in raised.value.fix


def test_pins_of_modes_hold_in_every_row() -> None:
    found = search_serving(pins=["batch = -", "modes.prefill.batch = -", "modes.decode.batch=-"])
    assert found.candidates
    for one in found.candidates:
        for mode in one.reports:
            manager = sw.PartitionManager(
                one.strategy, mesh=sw.abstract_mesh(dict(one.sizes)), mode=mode
            )
            assert manager.mesh_axes(sw.BATCH) == ()


def test_alternatives_that_fit_one_strategy_are_searched() -> None:
    """Only one of the strategies has the mesh axis of an alternative."""
    own = sw.Strategy.preset("fsdp_tp") | sw.Strategy.loads("[mesh]\nmine = 1")
    found = sw.search(
        program(32),
        {**FSDP_TP, "own": own},
        topology="v5e:2x4",
        axes=AXES,
        vary={"head": ("mine",)},
    )
    assert {one.name for one in found.candidates} == {"own"}
    assert found.dropped["MissingMeshAxisError"] == 10


def test_pipeline_is_varied_where_there_is_one() -> None:
    strategies = {**FSDP_TP, "fsdp_pp": sw.Strategy.preset("fsdp_pp")}
    vary = {"pipeline.microbatches": ("8", "32")}
    space = Space(strategies=strategies, devices=2, axes=("fsdp",), vary=vary)
    assert [(each.name, each.settings) for each in space.points()] == [
        ("fsdp_tp", {}),
        ("fsdp_pp", {"pipeline.microbatches": "8"}),
        ("fsdp_pp", {"pipeline.microbatches": "32"}),
    ]


def test_alternatives_may_need_each_other() -> None:
    strategies = {"fsdp_pp": sw.Strategy.preset("fsdp_pp")}
    repeats, circular = {"pipeline.repeats": ("1", "2")}, {"pipeline.schedule": "circular"}
    Space(strategies=strategies, devices=2, vary=repeats, pins=circular).check_settings()
    both = {**repeats, "pipeline.schedule": ("gpipe", "circular")}
    Space(strategies=strategies, devices=2, vary=both).check_settings()
    with raises(sw.StrategyError, "repeats = 2", path="pipeline.repeats", fix="circular"):
        Space(strategies=strategies, devices=2, vary=repeats).check_settings()


def test_low_ranks_are_counted_not_walked() -> None:
    every = search(vary={"head": (None, "-")}, orders=True)
    some = search(vary={"head": (None, "-")}, orders=True, walks=4)
    assert every.exhaustive
    assert not some.exhaustive
    assert some.walked == 4
    assert some.judged == every.judged
    assert some.dropped["not planned: ranked too low"] == some.skipped > 0
    assert "and planned 4 programs: " in search_text(some)
    # The closed form ranks the fastest candidate of this space among the best.
    assert some.candidates[0].costs == every.candidates[0].costs


def test_the_only_candidate_that_fits_is_found() -> None:
    """64 GiB of float32 weights on devices of 15.75 GiB fit only if all eight share them."""
    specs = {"up": sw.ArraySpec((2**16, 2**18), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))}
    hidden = (sw.BATCH, sw.EMBED)

    def forward(params: Any, x: Any) -> Any:
        return sw.shard(x @ params["up"], sw.BATCH, sw.MLP_INTERMEDIATE)

    up, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2**16, 2**18), (8, 2**16)))
    given = Program(forward, ({"up": up}, x), (specs, hidden))
    # Without tp each device gathers the whole weight; with dp there are copies of it.
    found = search(given, vary={"mlp_intermediate": ("tp", "-")})
    assert [one.mesh for one in found.candidates][:1] == ["tp:8"]
    assert {one.report.verdict for one in found.candidates if one.mesh == "tp:8"} == {"fits"}
    assert all(one.report.verdict != "fits" for one in found.candidates if one.mesh != "tp:8")
    assert found.dropped["does not fit"] > 0


def test_candidate_without_traffic_is_found() -> None:
    """In decode, only replicated weights and a sharded batch send nothing."""
    found = search(
        {"decode": SMALL.program("decode")},
        axes=("fsdp", "tp"),
        vary={"params.embed": ("fsdp", "-")},
        pins=["vocab=-"],
    )
    (silent,) = [one for one in found.candidates if one.sent_bytes == 0]
    assert silent is found.candidates[0]
    assert (silent.settings["params.embed"], silent.mesh) == ("-", "fsdp:8")


def test_kv_heads_that_do_not_divide_are_dropped() -> None:
    found = search({"prefill": SMALL.program("prefill")}, pins=["kv_head = tp"])
    assert {one.sizes["tp"] for one in found.candidates} == {1, 2}
    assert found.dropped["IndivisibleError KV_HEAD"] == 3  # tp:4 with dp or fsdp, and tp:8


@pytest.mark.full
@pytest.mark.ci
def test_modes_share_one_strategy() -> None:
    given = {mode: SMALL.program(mode) for mode in ("prefill", "decode")}
    found = search(given)
    for one in found.candidates:
        assert list(one.reports) == [sw.MODE_PREFILL, sw.MODE_DECODE]
        assert one.seconds == sum(report.time.high for report in one.reports.values())
        assert one.most_bytes == max(report.memory.high for report in one.reports.values())
    for one in found.front:
        others = [other.costs for other in found.candidates if other.costs != one.costs]
        assert not any(
            all(a <= b for a, b in zip(other, one.costs, strict=True)) for other in others
        )


def test_dropped_candidates_have_an_example() -> None:
    found = search(axes=("dp", "tp"), pins=["query_length = tp"])
    assert found.fixed_axes == ("fsdp", "sp", "ep")
    text = search_text(found)
    assert "because --axes does not name them: fsdp, sp, ep" in text
    # The first of them, its error, the line of the model, the rule and the fix.
    assert "fsdp_tp on dp:4,tp:2: AxisConflictError" not in text
    for reason, example in found.examples.items():
        assert found.dropped[reason]
        assert example.startswith("fsdp_tp on ")
    (conflict,) = [text for reason, text in found.examples.items() if "Conflict" in reason]
    assert "test_search.py:" in conflict
    assert "  rule  " in conflict
    assert found.to_json()["examples"] == dict(found.examples)


def test_least_candidate_that_does_not_fit_is_named() -> None:
    found = search(program(2**26), axes=("fsdp", "tp"))
    assert not found.candidates
    assert found.dropped["does not fit"] == 3
    # With tp, more devices hold the same rows of x.
    x = bytes_text(2**26 * 16 * 64 * 2 // 8 + 2 * 64 * (64 + 256) // 8)
    assert found.examples["does not fit"] == f"fsdp_tp on fsdp:8: at least {x} of 15.8 GiB"


def test_overlapping_times_are_counted() -> None:
    found = search()
    first = found.front[0].seconds
    assert found.undecided == sum(one.min_seconds < first for one in found.front)
    says = f"the times of {found.undecided} of them overlap"
    assert (says in search_text(found)) == (found.undecided > 1)


def test_equal_candidates_keep_the_order_of_strategies() -> None:
    same = {name: sw.Strategy.preset("fsdp_tp") for name in ("later", "earlier")}
    found = sw.search(program(32), same, topology="v5e:2x4", axes=("fsdp",))
    assert [one.name for one in found.candidates] == ["later", "earlier"]


def test_variants_are_compared() -> None:
    found = search_variants(
        {f"batch={batch}": program(batch) for batch in (8, 32)},
        FSDP_TP,
        topology="v5e:2x4",
        axes=AXES,
    )
    assert {one.variant for one in found.candidates} == {"batch=8", "batch=32"}
    assert found.judged == 2 * 10
    assert [one.order for one in found.candidates] == sorted(one.order for one in found.candidates)


MODEL = """
from tests.plan.test_search_space import SMALL
import dataclasses


def programs(batch=8):
    decoder = dataclasses.replace(SMALL, batch=batch)
    return {mode: decoder.program(mode) for mode in ("train", "prefill", "decode")}
"""


@pytest.mark.full
def test_command_searches_modes_and_writes_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "searched_model.py"
    model.write_text(MODEL, encoding="utf-8")

    def run(words: str) -> tuple[int, str, str]:
        command = f"search {model}:programs --strategy fsdp_tp --topology v5e:2x4 --axes fsdp,tp"
        code = main(shlex.split(f"{command} {words}"))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    options = "--modes all --vary params.embed --pin kv_head=- --set batch=8,16"
    code, out, _ = run(f"{options} --out {tmp_path}")
    assert code == 0
    assert "mode train\n" in out
    assert "mode prefill+decode\n" in out
    assert "moving the weights from fsdp_tp on" in out
    assert run(f"{options} --out {tmp_path}")[:2] == (code, out)
    files = sorted(tmp_path.glob("*.toml"))
    assert {file.name.split("-")[1] for file in files} == {"train", "prefill"}
    for file in files:
        loaded = sw.Strategy.load(file)
        assert loaded.rules["kv_head"] == "-"
        assert main(["check", str(file)]) == 0
    capsys.readouterr()
    code, out, _ = run("--mode decode --batch 16 --json")
    assert code == 0
    assert json.loads(out)["exhaustive"]
    for words, says in {
        "--modes train,insert": "has no mode insert",
        "--mode train --set rows=3": "unexpected keyword argument 'rows'",
        "--mode train --set batch": "--set 'batch' is not NAME=A,B",
    }.items():
        code, _, message = run(words)
        assert code == 2
        assert says in message


def test_verified_candidates_are_ranked_by_what_was_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"decode": SMALL.program("decode")}
    found = search(given, vary={"params.embed": (None, "-")})
    fast, slow = found.front[:2]
    asked = iter((fast, slow))

    def verify(*_: Any, **__: Any) -> Verification:
        """Compile what was planned; for the fastest candidate, send much more."""
        one = next(asked)
        sent = Sent(
            mesh_axes=tuple(axis for axis, size in one.sizes.items() if size > 1),
            planned={Kind.ALL_GATHER: 2**20},
            compiled={Kind.ALL_REDUCE: 2**40 if one is fast else 2**20},
            reasons=(),
        )
        compiled = Compiled(target=Target(platform="tpu", topology="v5e:2x4"), memory=MEMORY)
        return Verification(report=one.report, compiled=compiled, traffic=(sent,))

    monkeypatch.setattr("shardwright.plan.search.verify.verify_plan", verify)
    verified = verify_front(found, {"": {sw.MODE_DECODE: given["decode"]}}, most=2)
    assert [one.candidate for one in verified] == [slow, fast]
    assert verified[-1].sent_bytes == 2**40
    assert all(one.fits for one in verified)
    assert "1.0 TiB" in verified_text(verified)
    assert verified[0].to_json()["compiled"]["fits"]


def test_candidate_that_cannot_be_compiled_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Verification:
        raise ProgramError("the process was killed", fix="free memory")

    monkeypatch.setattr("shardwright.plan.search.verify.verify_plan", fail)
    (one,) = verify_front(search(), {"": {sw.MODE_TRAIN: program(32)}}, most=1)
    assert not one.fits
    assert "is not verified: the process was killed" in verified_text([one])


@pytest.mark.full
def test_decoder_of_8b_on_64_chips() -> None:
    found = sw.search(
        Decoder().program("train"),
        {name: sw.Strategy.preset(name) for name in ("fsdp_tp", "fsdp_tp_sp")},
        topology="v5p:4x4x4",
        axes=("dp", "fsdp", "sp", "tp"),
        vary={"vocab": (None, "-"), "params.embed": (None, "-"), "policy.zero1": (None, "dp")},
    )
    assert found.judged >= 1000
    assert found.walked == WALKS
    assert found.front[0].mesh


def test_presets_are_tried_by_default() -> None:
    # Train has rules of training, the other modes rules of serving.
    train = ["fsdp_tp", "fsdp_tp_sp"]
    assert list(default_strategies({sw.MODE_TRAIN: program(32)})) == train
    experts = {"up": sw.ArraySpec((8, 64), jnp.bfloat16, (sw.EXPERT, sw.EMBED))}
    moe = Program(lambda params: params, (experts,), (experts,))
    assert list(default_strategies({sw.MODE_TRAIN: moe})) == [*train, "moe_ep"]
    serving = {sw.MODE_PREFILL: moe, sw.MODE_DECODE: program(32)}
    assert list(default_strategies(serving)) == ["serve_tp", "serve_long_context"]


def test_search_without_a_strategy() -> None:
    found = sw.search(program(32), topology="v5e:2x4", axes=AXES)
    names = ("fsdp_tp", "fsdp_tp_sp")
    strategies = {name: sw.Strategy.preset(name) for name in names}
    assert found == sw.search(program(32), strategies, topology="v5e:2x4", axes=AXES)
    assert {each.name for each in found.candidates} == set(names)


def test_progress_is_reported_for_each_candidate() -> None:
    seen: list[str] = []
    found = search(progress=lambda state: seen.append(str(state)))
    judged = [f"judged {n} of 10 candidates" for n in range(1, 11)]
    assert found.judged == 10
    assert seen[:10] == judged
    assert seen[-1] == f"planned {len(found.candidates)} of {len(found.candidates)} candidates"


def test_equal_candidates_with_fewer_mesh_axes_come_first() -> None:
    found = search(axes=None)
    costs = [(each.seconds, each.most_bytes) for each in found.candidates]
    axes = [sum(size > 1 for size in each.sizes.values()) for each in found.candidates]
    ordered = sorted(zip(costs, axes, strict=True))
    assert list(zip(costs, axes, strict=True)) == ordered
    # Some candidates do have equal costs, so the order of these is tested.
    assert len(set(costs)) < len(costs)
