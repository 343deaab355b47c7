"""`python -m benchmarks.compiled [--t5x CHECKOUT]`: compare plans with programs compiled for TPUs.

Three small models with bfloat16 weights are planned under every preset that resolves, in every
mode. They are also compiled for the eight TPUs of a v5e:2x4, on a machine without TPUs. For each
program, the command prints the bytes that one device sends, as planned and as compiled. It exits
with 1 if a target is missed. It needs libtpu (the extra `tpu-aot`) and, for T5X's decoder, flax and
a checkout of https://github.com/google-research/t5x. `--topology h100:8` compiles for GPUs, in the
environment of `make test-gpu`.

Compiled programs are kept in `.cache/compiled`, so a second run only plans. `--json FILE` writes
the results that the page on compiled plans shows.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import importlib.metadata
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import shardwright as sw
from benchmarks.compiled_models import decoder, moe_decoder, t5x_decoder
from shardwright.errors import ShardingError
from shardwright.plan.planner import Program
from shardwright.plan.verify.gpus import cuda_plugin
from shardwright.plan.verify.run import Verification, verify_plan

TOPOLOGY: Final = "v5e:2x4"
CACHE: Final = Path(".cache/compiled")
MESHES: Final = {
    "single": "dp:8",
    "ddp": "dp:8",
    "fsdp": "fsdp:8",
    "fsdp_tp": "fsdp:4,tp:2",
    "fsdp_tp_sp": "fsdp:4,tp:2",
    "tensor": "dp:2,tp:4",
    "sequence": "fsdp:4,sp:2",
    "moe_ep": "fsdp:2,ep:4",
    "serve_tp": "dp:2,tp:4",
    "serve_long_context": "dp:2,sp:4",
}
# Largest allowed difference of totals -> share of the programs that must stay within it.
TARGETS: Final = {0.02: 0.7, 0.1: 0.9}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Bytes that one device sends, by a plan and by the compiled program.

    Attributes:
      model: The model.
      preset: The strategy.
      mesh: Its mesh.
      mode: The mode.
      traffic: Planned and compiled bytes over each set of mesh axes, with reasons.
      marks: The kinds of places where the plan is unsure.
      memory: The planned range and the compiled peak, in bytes; empty in older files.
    """

    model: str
    preset: str
    mesh: str
    mode: str
    traffic: Sequence[Mapping[str, Any]]
    marks: Sequence[str]
    memory: Sequence[int] = ()

    @property
    def planned(self) -> int:
        """Bytes by the plan."""
        return sum(sum(sent["planned"].values()) for sent in self.traffic)

    @property
    def compiled(self) -> int:
        """Bytes by the compiled program."""
        return sum(sum(sent["compiled"].values()) for sent in self.traffic)

    @property
    def error(self) -> float:
        """Difference of the totals, relative to the compiled program."""
        if self.planned == self.compiled:
            return 0.0
        return abs(self.planned - self.compiled) / max(self.compiled, 1)


def measure(model: str, preset: str, mode: str, program: Program, topology: str) -> Row:
    """Plan and compile a program.

    Raises:
      ShardingError: The program does not resolve under the preset.
    """
    mesh = sw.abstract_mesh(MESHES[preset])
    pm = sw.PartitionManager(sw.Strategy.preset(preset), mesh=mesh, mode=mode)
    verified = verify_plan(pm, program, topology=topology, cache=CACHE)
    return Row(
        model=model,
        preset=preset,
        mesh=MESHES[preset],
        mode=mode,
        traffic=[sent.to_json() for sent in verified.traffic],
        marks=_marks(verified),
        memory=[
            verified.report.memory.low,
            verified.report.memory.high,
            verified.compiled.peak or 0,
        ],
    )


def _marks(verified: Verification) -> list[str]:
    walked = verified.report.walked
    marks = {"chosen": walked.choices, "idle": walked.idle, "incomplete": walked.unknown}
    return [name for name, places in marks.items() if places]


def judge(rows: Sequence[Row]) -> dict[str, bool]:
    """Return each target with the numbers behind it, and whether it is met."""
    verdicts = {}
    for limit, share in TARGETS.items():
        near = sum(row.error <= limit for row in rows)
        words = (
            f"{near} of {len(rows)} totals are within {limit:.0%} (target: at least {share:.0%})"
        )
        verdicts[words] = near >= share * len(rows)
    decodes = [row for row in rows if row.mode == "decode"]
    exact = sum(row.error == 0 for row in decodes)
    words = f"{exact} of {len(decodes)} decode steps are exact (target: all)"
    verdicts[words] = exact == len(decodes)
    return verdicts


def main(argv: list[str] | None = None) -> int:
    """Compare, print, and return 0 if the targets are met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("--t5x", type=Path, metavar="CHECKOUT", help="also compare T5X's decoder")
    parser.add_argument("--topology", default=TOPOLOGY, help="slice, or domain of GPUs")
    parser.add_argument("--modes", nargs="*", help="only these modes")
    parser.add_argument("--presets", nargs="*", choices=MESHES, default=list(MESHES))
    parser.add_argument("--models", nargs="*", default=["decoder", "moe", "t5x"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    given = parser.parse_args(argv)
    models = {"decoder": decoder, "moe": moe_decoder}
    if given.t5x is not None:
        models["t5x"] = lambda: t5x_decoder(given.t5x)
    rows, refused = [], []
    start = time.monotonic()
    for name in given.models:
        if name not in models:
            print(f"{name} is left out: pass --{name} CHECKOUT")
            continue
        programs = models[name]()
        for preset in given.presets:
            for mode, program in programs.items():
                if mode not in (given.modes or programs):
                    continue
                try:
                    row = measure(name, preset, mode, program, given.topology)
                except ShardingError as error:
                    why = str(error).split("\n", maxsplit=1)[0]
                    refused.append({"model": name, "preset": preset, "mode": mode, "why": why})
                    print(name, preset, mode, "does not resolve:", why)
                    continue
                rows.append(row)
                _print(row)
    verdicts = judge(rows)
    for words, met in verdicts.items():
        print(f"{'pass' if met else 'FAIL'}: {words}")
    print(f"{time.monotonic() - start:.0f} s")
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(_text(rows, refused, given.topology), encoding="utf-8")
    return 0 if all(verdicts.values()) else 1


def _text(rows: Sequence[Row], refused: Sequence[Mapping[str, str]], topology: str) -> str:
    """Return the results as JSON with one line for each program."""
    parts = {"rows": [dataclasses.asdict(row) for row in rows], "refused": refused}
    lines = [f'"context": {json.dumps(_context(topology))}']
    for name, values in parts.items():
        lines.append(f'"{name}": [\n' + ",\n".join(map(json.dumps, values)) + "\n]")
    return "{" + ",\n".join(lines) + "}\n"


def read_rows(path: Path) -> tuple[list[Row], list[dict[str, str]], dict[str, str]]:
    """Return the rows of a file of results, the programs that do not resolve, and the context."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return [Row(**row) for row in data["rows"]], data["refused"], data["context"]


def _print(row: Row) -> None:
    marks = f" ({', '.join(row.marks)})" if row.marks else ""
    print(
        f"{row.model} {row.preset} {row.mesh} {row.mode}: {row.planned:,} {row.compiled:,} "
        f"{row.error:.1%}{marks}",
        flush=True,
    )
    if row.error == 0:
        return
    for sent in row.traffic:
        print("   ", sent["mesh_axes"], sent["planned"], sent["compiled"])
        for reason in sent["reasons"]:
            print("       ", reason["adds"], reason["what"], *reason["sources"][:4])


def _context(topology: str) -> dict[str, str]:
    plugin = cuda_plugin() if topology != TOPOLOGY else None
    names = ("jax", "jaxlib", plugin or "libtpu", "flax")
    versions = {name: importlib.metadata.version(name) for name in names if _installed(name)}
    return {**versions, "target": topology, "date": dt.datetime.now(dt.UTC).date().isoformat()}


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
