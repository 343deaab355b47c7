"""`python -m benchmarks.published [--compile] [NAME ...]`: compare searches with published meshes.

Each published mesh is planned for the reference decoder of its model, with its batch, length and
rematerialization. A search then chooses a mesh for the same program. The command prints both. It
exits with 1 if a found mesh has a longer planned time than the published one.

`--compile` compiles the published program on a machine without TPUs, and the three fastest programs
that the search found, as `shardwright search --verify 3` does. Their times count the bytes that the
compiled programs send. The command exits with 1 if the compiler refuses the best found mesh. It
also does so if that mesh takes more than 1.05 of the time of the published one, and the compiler
accepts both programs. This needs libtpu (the extra `tpu-aot`) and some minutes for each run.
Nothing is measured, so a shorter time here is only a reason to try a mesh.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import shardwright as sw
from shardwright.interop.hf import Sizes, Stack, programs
from shardwright.layers.attention_block import AttentionConfig
from shardwright.layers.dtypes import Dtypes
from shardwright.layers.mlp_block import MlpConfig
from shardwright.plan.hardware import Topology, parse_topology, read_hardware
from shardwright.plan.planner import PlanReport, Program
from shardwright.plan.search.result import Candidate, SearchReport, mesh_text, seconds_of
from shardwright.plan.search.verify import compiled_seconds, verify_front
from shardwright.plan.verify.run import Verification, verify_plan

FACTS: Final = Path(__file__).with_name("published_meshes.toml")
# Weights are stored as float32 and used as bfloat16, as in the published runs.
DTYPES: Final = Dtypes(param="float32", compute="bfloat16")
AXES: Final = ("fsdp", "tp")
PRESETS: Final = ("fsdp_tp", "fsdp_tp_sp")
CACHE: Final = Path(".cache/compiled")
MOST: Final = 1.05  # largest found time / published time, by the compiled programs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The plans of a published mesh and of the mesh that a search found.

    Attributes:
      name: The published run.
      mesh: The published mesh, and the preset that is used in place of the published rules.
      published: The plan of the published mesh.
      search: The result of the search.
      seconds: Processor time of the search.
    """

    name: str
    mesh: str
    published: PlanReport
    search: SearchReport
    seconds: float

    @property
    def found(self) -> Candidate | None:
        """The fastest candidate that may fit, or None if none does."""
        return next(iter(self.search.candidates), None)

    @property
    def judged(self) -> int:
        """Number of candidates."""
        return self.search.judged

    @property
    def ratio(self) -> float:
        """Time of the found mesh / time of the published one; infinite if none was found."""
        if self.found is None:
            return float("inf")
        return self.found.seconds / seconds_of(self.published)

    @property
    def verdict(self) -> str:
        """`equal`, `found`, or `LOST`."""
        if self.found is None or self.ratio > 1:
            return "LOST"
        return "equal" if self.ratio == 1 else "found"

    def cells(self) -> list[str]:
        """Return the row of the table."""
        found = ["-", "-", "-"]
        if self.found is not None:
            found = [
                f"{self.found.name} {self.found.mesh}",
                f"{self.found.seconds:.3f} s",
                _gib(self.found.report),
            ]
        published = [self.mesh, f"{seconds_of(self.published):.3f} s", _gib(self.published)]
        return [self.name, *published, *found, f"{self.ratio:.2f}", self.verdict]


HEADER: Final = (
    *("run", "published", "time", "GiB", "found", "time", "GiB", "found / published"),
    "verdict",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The compiled programs of a published mesh and of the one that a search found.

    Attributes:
      name: The published run.
      published: The program on the published mesh.
      found: The best program of those that the search found.
    """

    name: str
    published: Verification
    found: Verification

    @property
    def ratio(self) -> float:
        """Time of the found mesh / time of the published one, by the bytes of the programs."""
        return compiled_seconds(self.found) / compiled_seconds(self.published)

    @property
    def verdict(self) -> str:
        """`pass`, or `LOST`. A found mesh whose program is refused always loses."""
        if self.found.compiled.refused:
            return "LOST"
        won = self.published.compiled.refused or self.ratio <= MOST
        return "pass" if won else "LOST"

    def cells(self) -> list[str]:
        """Return the row of the table."""
        cells = [self.name]
        for each in (self.published, self.found):
            layout = each.report.layout
            assert layout is not None, "the plan has a topology"
            share = each.most_bytes / layout.topology.chip.hbm_bytes
            refused = ", refused" if each.compiled.refused else ""
            cells += [
                f"{each.report.strategy} {_mesh_of(each.report)}",
                f"{compiled_seconds(each):.3f} s",
                f"{share:.2f}{refused}",
            ]
        return [*cells, f"{self.ratio:.2f}", self.verdict]


def _mesh_of(report: PlanReport) -> str:
    """Return the mesh axes that have more than one device."""
    return ",".join(axis for axis in report.mesh.split(",") if not axis.endswith(":1"))


COMPILED_HEADER: Final = (
    *("run", "published", "time", "memory", "found", "time", "memory", "found / published"),
    "verdict",
)


def _gib(report: PlanReport) -> str:
    low, high = report.memory.low / 2**30, report.memory.high / 2**30
    return f"{low:.0f}-{high:.0f} {report.verdict}"


def compare(name: str, facts: Mapping[str, Any]) -> Comparison:
    """Plan a published mesh, search on the same slice, and return both."""
    topology = parse_topology(facts["topology"], read_hardware())
    program = training(facts, devices=topology.devices)
    published = plan_published(facts["mesh"], program, topology)
    start = time.process_time()
    found = sw.search(
        program,
        {preset: sw.Strategy.preset(preset) for preset in PRESETS},
        topology=topology,
        axes=AXES,
    )
    return Comparison(
        name=name,
        mesh=f"{published.strategy} {mesh_text(facts['mesh'])}",
        published=published,
        search=found,
        seconds=time.process_time() - start,
    )


def compile_both(name: str, facts: Mapping[str, Any], compared: Comparison) -> Compiled:
    """Compile the programs of a comparison in which a mesh was found."""
    topology = compared.search.topology
    program = training(facts, devices=topology.devices)
    assert compared.found is not None, "the search found no mesh"
    variants = {compared.found.variant: dict.fromkeys(compared.found.reports, program)}
    front = verify_front(compared.search, variants, most=3, cache=CACHE)
    manager = _manager(compared.published.strategy, facts["mesh"])
    published = verify_plan(manager, program, topology=topology, cache=CACHE)
    (found,) = front[0].verifications.values()
    return Compiled(name=name, published=published, found=found)


def plan_published(mesh: Mapping[str, int], program: Program, topology: Topology) -> PlanReport:
    """Return the plan of a published mesh under the better preset.

    The published rules shard the residual in another way, so a preset takes their place.
    """
    plans = [_plan(preset, mesh, program, topology) for preset in PRESETS]
    return min(plans, key=lambda each: (each.verdict == "does not fit", seconds_of(each)))


def _manager(preset: str, mesh: Mapping[str, int]) -> sw.PartitionManager:
    strategy = sw.Strategy.preset(preset)
    sizes = {axis: mesh.get(axis, 1) for axis in strategy.mesh}
    return sw.PartitionManager(strategy, mesh=sw.abstract_mesh(sizes), mode="train")


def _plan(preset: str, mesh: Mapping[str, int], program: Program, topology: Topology) -> PlanReport:
    report: PlanReport = _manager(preset, mesh).plan(
        program.function,
        *program.shapes,
        specs=program.specs,
        outputs=program.outputs,
        holds=program.holds,
        donated=program.donated,
        topology=topology,
    )
    return report


def training(facts: Mapping[str, Any], *, devices: int) -> Program:
    """Return the training step of a published run."""
    model = facts["model"]
    attention = AttentionConfig(
        embed=model["embed"],
        heads=model["heads"],
        kv_heads=model["kv_heads"],
        head_dim=model.get("head_dim", 128),
        dtypes=DTYPES,
    )
    mlp = MlpConfig(embed=model["embed"], hidden=model["mlp"], dtypes=DTYPES)
    sizes = Sizes(
        family="llama",
        vocab=model["vocab"],
        embed=model["embed"],
        stacks=(Stack(layers=model["layers"], attention=attention, mlp=mlp),),
        tied=False,
        longest=facts["length"],
        dtypes=DTYPES,
    )
    batch = facts.get("batch") or facts["batch_per_device"] * devices
    made = programs(sizes, batch=batch, length=facts["length"], remat=facts["planned"])
    return made["train"]


def read_facts() -> dict[str, Any]:
    """Return the published runs by name."""
    return tomllib.loads(FACTS.read_text(encoding="utf-8"))


def main(argv: list[str] | None = None) -> int:
    """Compare, print a table, and return 0 if no search lost."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="defaults to all")
    parser.add_argument(
        "--compile", action="store_true", help="also compile the programs of each run"
    )
    given = parser.parse_args(argv)
    facts = read_facts()
    unknown = [name for name in given.names if name not in facts]
    if unknown:
        parser.error(f"unknown run {unknown[0]!r}: runs are {', '.join(facts)}")
    print(f"| {' | '.join(HEADER)} |")
    print(f"|{' --- |' * len(HEADER)}")
    rows = {}
    for name in given.names or facts:
        rows[name] = compare(name, facts[name])
        print(f"| {' | '.join(rows[name].cells())} |", flush=True)
    lost = [row.name for row in rows.values() if row.verdict == "LOST"]
    ratios = sorted(row.ratio for row in rows.values())
    middle = ratios[len(ratios) // 2]
    print(
        f"{'FAIL' if lost else 'pass'}: {len(rows)} runs, found / published {ratios[0]:.2f} to "
        f"{ratios[-1]:.2f}, median {middle:.2f}; {sum(row.judged for row in rows.values())} "
        f"candidates in {sum(row.seconds for row in rows.values()):.0f} s of processor time"
    )
    if given.compile:
        lost += _print_compiled(rows, facts)
    return 1 if lost else 0


def _print_compiled(rows: Mapping[str, Comparison], facts: Mapping[str, Any]) -> list[str]:
    """Compile the runs in which a mesh was found, print a table, and return those that lost."""
    print(f"\n| {' | '.join(COMPILED_HEADER)} |")
    print(f"|{' --- |' * len(COMPILED_HEADER)}")
    done = []
    for name, row in rows.items():
        if row.found is not None:
            done.append(compile_both(name, facts[name], row))
            print(f"| {' | '.join(done[-1].cells())} |", flush=True)
    lost = [each.name for each in done if each.verdict == "LOST"]
    ratios = ", ".join(f"{each.ratio:.2f}" for each in done)
    print(f"{'FAIL' if lost else 'pass'}: compiled, found / published {ratios}, at most {MOST}")
    return lost


if __name__ == "__main__":
    sys.exit(main())
