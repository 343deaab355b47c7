"""Plans of steps that run in the stages of a pipeline equal the compiled programs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.interop.hf import programs, read_config
from shardwright.layers import loss, transformer_block
from shardwright.plan.collectives import Kind, read_collectives
from shardwright.plan.hardware import parse_topology, read_hardware
from shardwright.plan.search.settings import read_pins, with_settings
from shardwright.plan.walk.events import Event
from shardwright.testing import cpu_mesh
from tests.interop.hf.test_decoder_plans import CONFIGS, small_config
from tests.layers import blocks, pipeline_memory
from tests.layers.test_pipeline import DENSE, X
from tests.layers.test_pipeline_loss import manager

ROOT = Path(__file__).parents[2]
RESIDUAL = (sw.BATCH, sw.LENGTH, sw.EMBED)


def program(pm: Any, config: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """Return a training step, the shapes of its arguments, and their annotations."""
    specs = {"layers": transformer_block.specs(config), "head": loss.specs(24, 16)}
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), specs)
    x = jax.ShapeDtypeStruct(X.shape, X.dtype)
    labels = jax.ShapeDtypeStruct(X.shape[:2], jnp.int32)

    def head(weight: Any, y: Any, labels: Any) -> Any:
        return loss.cross_entropy(y, weight, labels).weighted.total

    def total(params: Any, x: Any, labels: Any) -> Any:
        options = {"head": head, "head_params": params["head"], "head_inputs": labels}
        return transformer_block.loss(config, params["layers"], x, **options)[0]

    annotations = (specs, RESIDUAL, (sw.BATCH, sw.QUERY_LENGTH))
    return jax.value_and_grad(total, (0, 1)), (shapes, x, labels), annotations


def sent(found: Iterable[Any], kind: Kind) -> Counter[Any]:
    """Return how often collectives run, by mesh axes and bytes."""
    runs: Counter[Any] = Counter()
    for each in found:
        if each.kind is kind:
            number = each.runs if isinstance(each, Event) else each.count
            runs[each.mesh_axes, each.logical_bytes] += number
    return runs


# With two stages, the last scan of 1f1b is one tick, whose last permute a compiler removes.
@pytest.mark.full(but=["gpipe-pp:2,dp:2,fsdp:2-auto"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(
    ("schedule", "mesh"),
    [
        ("gpipe", "pp:2,fsdp:2,tp:2"),
        ("gpipe", "pp:4,fsdp:2"),
        ("circular", "pp:4,fsdp:2"),
        ("1f1b", "pp:4,fsdp:2"),
        ("1f1b", "pp:4,tp:2"),
        ("gpipe", "pp:2,dp:2,fsdp:2"),
        ("1f1b", "pp:4,dp:2"),
    ],
)
def test_plan_equals_the_program(schedule: str, mesh: str, kind: Any) -> None:
    """Permutes over pp and gathers, by bytes and number; sums are merged by the compiler."""
    with manager(schedule, mesh, kind=kind) as pm:
        step, shapes, axes = program(pm, DENSE)
        plan = pm.plan(step, *shapes, specs=axes)
        given = [pm.abstract(shapes[0], axes[0])]
        given += [
            pm.abstract(each, own, role="activation")
            for each, own in zip(shapes[1:], axes[1:], strict=True)
        ]
        found = list(read_collectives(jax.jit(step).lower(*given).compile(), pm.mesh))
    assert plan.walked.complete
    assert sent(plan.events, Kind.PERMUTE) == sent(found, Kind.PERMUTE)
    gathers = sent(plan.events, Kind.ALL_GATHER)
    if schedule == "circular":
        # Losses of the layers, [microbatches, layers]: zeros here, which a plan does not send.
        gathers[("pp",), 4 * 8 * DENSE.layers] += 1
    assert gathers == sent(found, Kind.ALL_GATHER)
    over_dp = [
        sum(size * runs for (axes, size), runs in sums.items() if axes == ("dp",))
        for sums in (sent(plan.events, Kind.ALL_REDUCE), sent(found, Kind.ALL_REDUCE))
    ]
    assert over_dp[0] == over_dp[1]


@pytest.mark.full(but=["1f1b-auto"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("schedule", ["gpipe", "circular", "1f1b"])
def test_weights_are_gathered_once(schedule: str, kind: Any) -> None:
    """Before the first tick: same values and gradients, and the bytes of the plan."""
    results = []
    for gather in ("tick", "once"):
        sizes = {"rows": 32, "layers": 8, "dtype": "float32", "gather": gather}
        mesh = cpu_mesh("pp:2,fsdp:4", axis_types=kind)
        program = pipeline_memory.Program(schedule, 4, mesh, **sizes)
        compiled, plan = program.compiled(), program.planned()
        gathers, planned = (
            {key: runs for key, runs in sent(each, Kind.ALL_GATHER).items() if "fsdp" in key[0]}
            for each in (read_collectives(compiled, mesh), plan.events)
        )
        assert plan.complete
        assert gathers == planned
        weight = 4 * pipeline_memory.WIDTH**2
        of_layer, of_stage = (gathers.get((("fsdp",), each * weight), 0) for each in (1, 4))
        # A chunk in each tick, forward and backward: 20 layers for gpipe, 18 for circular.
        once = (of_layer, of_stage) == (0, 1)
        assert once if gather == "once" else of_layer >= 36, gathers
        random = np.random.default_rng(0)
        arrays = [
            program.manager.shard(
                random.normal(size=spec.shape).astype(np.float32) / 16, spec, role=role
            )
            for spec, role in zip(program.specs, ("param", "activation", "param"), strict=True)
        ]
        results.append(compiled(*arrays))
    blocks.assert_close(*results, rtol=1e-5)


@pytest.mark.full(but=["1f1b-8-pp:4,fsdp:2"])
@pytest.mark.parametrize("mesh", ["pp:4,fsdp:2", "pp:4"])
@pytest.mark.parametrize(
    ("schedule", "count"),
    [(each, 8) for each in pipeline_memory.SCHEDULES] + [("circular", 16), ("1f1b", 32)],
)
def test_memory_is_in_the_planned_range(schedule: str, count: int, mesh: str) -> None:
    """On CPUs; the page has TPUs."""
    program = pipeline_memory.Program(schedule, count, cpu_mesh(mesh), **pipeline_memory.ON_CPUS)
    plan, found = program.planned().memory, program.compiled().memory_analysis()
    # XLA for CPUs leaves temporary arrays out of its peak.
    held = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    assert plan.low <= held <= plan.high


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="the page has plans of JAX 0.10.2")
@pytest.mark.full
def test_page_shows_memory_on_tpus() -> None:
    """The page has the planned range, and a peak of the compiler inside it."""
    page = (ROOT / "docs/development/compiled.md").read_text()
    rows = re.findall(
        r"^\| (gpipe|circular|1f1b) \| (\d+) \| (.*) to (.*) \| (.*) \|$", page, re.MULTILINE
    )
    assert len(rows) == 9
    for schedule, count, *numbers in rows:
        low, high, found = (int(each.replace(",", "")) for each in numbers)
        mesh = sw.abstract_mesh("pp:4,fsdp:2")
        program = pipeline_memory.Program(schedule, int(count), mesh, **pipeline_memory.ON_TPUS)
        plan = program.planned().memory
        assert (low, high) == (round(plan.low / 2**20), round(plan.high / 2**20)), schedule
        assert low <= found <= high, (schedule, count)


@pytest.mark.full
def test_page_shows_when_a_pipeline_wins(tmp_path: Path) -> None:
    page = (ROOT / "docs/pipelines.md").read_text()
    cells = r" \| ([\d.]+) to ([\d.]+) s"
    rows = re.findall(rf"^\| ([\d.]+){cells * 2} \|$", page, re.MULTILINE)
    assert len(rows) == 3
    sizes, overlay = read_config(str(CONFIGS / "llama-3-8b.json")), tmp_path / "network.toml"
    for rate, *numbers in rows:
        network = f'{{ value = {rate}, source = "the page", date = "2026-11-27" }}'
        overlay.write_text(f"[a100]\ninfiniband_gbps = {network}\n")
        topology, found = parse_topology("4xa100:8", read_hardware(str(overlay))), []
        for preset, mesh, remat in (
            ("fsdp_tp", "dp:4,fsdp:8", "full"),
            ("fsdp_pp", "pp:4,fsdp:8", "none"),
        ):
            made = programs(sizes, batch=64, length=4096, remat=remat)["train"]
            pm = sw.PartitionManager(
                sw.Strategy.preset(preset), mesh=sw.abstract_mesh(mesh), mode="train"
            )
            time = pm.plan(made.function, *made.shapes, specs=made.specs, topology=topology).time
            assert time is not None
            found += [f"{time.low:.2f}", f"{time.high:.2f}"]
        assert found == numbers


@pytest.mark.full
def test_bubbles_take_time() -> None:
    """A stage computes in every tick: m + S - 1 of them for m microbatches."""
    flops = []
    for count in (4, 8, 16):
        with manager("gpipe", "pp:4,fsdp:2", microbatches=count) as pm:
            step, shapes, axes = program(pm, DENSE)
            flops.append(pm.plan(step, *shapes, specs=axes).walked.flops)
    # The layers take (1 + (S - 1) / m) of their time without a bubble, and the head the same.
    assert flops[0] - flops[1] == 2 * (flops[1] - flops[2]) > 0


@pytest.mark.full
def test_search_finds_a_circular_pipeline(tmp_path: Path) -> None:
    """Rows of a microbatch divide over fsdp=4, and do not divide over fsdp and pp together."""
    sizes = read_config(small_config(CONFIGS / "llama-3-8b.json", tmp_path, num_hidden_layers=4))
    found = sw.search(
        {"train": programs(sizes, batch=16, length=8, repeats=2)["train"]},
        {"fsdp_pp": sw.Strategy.preset("fsdp_pp")},
        topology="v5e:2x4",
        pins=["mesh.pp=2", "mesh.fsdp=4", "pipeline.microbatches=4"],
        vary={"pipeline.repeats": ("1", "2"), "pipeline.schedule": ("gpipe", "circular")},
    )
    (only,) = found.candidates
    assert only.settings["pipeline.schedule"] == "circular"
    assert only.settings["pipeline.repeats"] == "2"
    # The specs have two repeats, and a stage of gpipe has one.
    assert found.dropped == {"LayerError": 2, "StrategyError": 1}


def test_pins_of_a_pipeline_are_numbers() -> None:
    pins = read_pins(["pipeline.microbatches = 16", "pipeline.schedule = 1f1b"])
    changed = with_settings(sw.Strategy.preset("fsdp_pp"), pins).compile().pipeline
    assert changed is not None
    assert (changed.microbatches, str(changed.schedule)) == (16, "1f1b")
