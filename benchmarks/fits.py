"""`python -m benchmarks.fits`: compare verdicts on memory with a TPU's compiler.

Thirty programs of seven reference decoders are planned, and compiled for the eight chips of a
v5e:2x4 on a machine without TPUs. They need 0.5 to 1.5 of the memory of a chip. For each program,
the command prints the range of the plan, the verdict, and what the compiled program needs. All are
shares of the memory that a program may use. It exits with 1 if a target is missed.

It needs libtpu (the extra `tpu-aot`). Compiled programs are kept in `.cache/compiled`, so a second
run only plans. `--json FILE` writes the results that the page on compiled plans shows.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import shardwright as sw
from shardwright.interop.hf import Sizes, Stack, programs
from shardwright.layers.attention_block import AttentionConfig
from shardwright.layers.dtypes import Dtypes
from shardwright.layers.mlp_block import MlpConfig
from shardwright.layers.moe import MoEConfig
from shardwright.layers.moe_block import MoEBlockConfig
from shardwright.plan.fit import Verdict
from shardwright.plan.verify.run import verify_plan

TOPOLOGY: Final = "v5e:2x4"
CACHE: Final = Path(".cache/compiled")
# Trained decoders have float32 weights, and served decoders have bfloat16 weights. All matmuls are
# bfloat16.
TRAINED: Final = Dtypes(param="float32", compute="bfloat16", cache="bfloat16")
SERVED: Final = Dtypes(param="bfloat16", compute="bfloat16", cache="bfloat16")
MOST_CLOSE: Final = 0.2  # share of the cases
LEAST_UPPER_END: Final = 0.95  # of what the compiled program needs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Sizes of a decoder."""

    embed: int
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    vocab: int
    dtypes: Dtypes = TRAINED
    head_dim: int = 128
    experts: int = 0
    tied: bool = False


DECODERS: Final = MappingProxyType(
    {
        "1B": Decoder(
            embed=2048,
            hidden=8192,
            heads=32,
            kv_heads=8,
            layers=16,
            vocab=128256,
            head_dim=64,
            tied=True,
        ),
        "2B, 256,000 tokens": Decoder(
            embed=2048,
            hidden=16384,
            heads=8,
            kv_heads=1,
            layers=18,
            vocab=256000,
            head_dim=256,
            tied=True,
        ),
        "3B": Decoder(
            embed=3072, hidden=8192, heads=24, kv_heads=8, layers=28, vocab=128256, tied=True
        ),
        "4B": Decoder(embed=4096, hidden=11008, heads=32, kv_heads=32, layers=20, vocab=32000),
        "MoE of 3B": Decoder(
            embed=2048, hidden=4096, heads=16, kv_heads=8, layers=16, vocab=32000, experts=8
        ),
        "8B": Decoder(
            embed=4096,
            hidden=14336,
            heads=32,
            kv_heads=8,
            layers=32,
            vocab=128256,
            dtypes=SERVED,
        ),
        "13B": Decoder(
            embed=5120,
            hidden=13824,
            heads=40,
            kv_heads=40,
            layers=40,
            vocab=32000,
            dtypes=SERVED,
        ),
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program: a decoder, where it runs, and how.

    Attributes:
      decoder: Name of the decoder.
      preset: The strategy.
      mesh: Its mesh.
      batch: Number of sequences on all devices.
      mode: `train`, `prefill` or `decode`.
      length: Tokens of a sequence; in decode, rows of a cache.
      remat: Policy of rematerialization: which values of a layer the forward pass keeps.
      chunks: Number of parts that the loss is computed in.
    """

    decoder: str
    preset: str
    mesh: str
    batch: int
    mode: str = "train"
    length: int = 2048
    remat: str = "full"
    chunks: int = 1


def _cases() -> tuple[Case, ...]:
    fsdp, tp = ("fsdp", "fsdp:8"), ("fsdp_tp", "fsdp:4,tp:2")
    sp, ep = ("fsdp_tp_sp", "fsdp:4,tp:2"), ("moe_ep", "fsdp:2,ep:4")
    ddp, tensor, serve = ("ddp", "dp:8"), ("tensor", "dp:2,tp:4"), ("serve_tp", "dp:1,tp:8")
    rows: list[tuple[str, tuple[str, str], tuple[int, ...], dict[str, Any]]] = [
        ("1B", fsdp, (32, 48, 64), {}),
        ("1B", ddp, (8,), {}),
        ("1B", tp, (128, 192, 256), {"chunks": 8}),
        ("2B, 256,000 tokens", fsdp, (64,), {"chunks": 8}),
        ("3B", fsdp, (32, 128), {"chunks": 8}),
        ("3B", fsdp, (32,), {"chunks": 8, "remat": "dots"}),
        ("3B", sp, (64, 160), {"chunks": 8}),
        ("4B", tp, (16, 32, 96), {}),
        ("4B", tensor, (2,), {}),
        ("MoE of 3B", fsdp, (64,), {}),
        ("MoE of 3B", ep, (96, 128, 160), {}),
        ("8B", fsdp, (8,), {"chunks": 8}),
        ("8B", serve, (64, 96, 128, 160), {"mode": "decode", "length": 8192}),
        ("8B", serve, (64, 128), {"mode": "prefill", "length": 4096}),
        ("13B", serve, (12, 40), {"mode": "decode", "length": 4096}),
    ]
    return tuple(
        Case(decoder=name, preset=where[0], mesh=where[1], batch=batch, **how)
        for name, where, batches, how in rows
        for batch in batches
    )


CASES: Final = _cases()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Memory of a program on one device, as shares of the memory that a program may use.

    Attributes:
      case: The program.
      low: Lower end of the planned range.
      high: Upper end of the planned range.
      verdict: Verdict of the plan on whether the program fits.
      compiled: What the compiled program needs. For a refused program, what the compiler's message
        states.
      refused: Whether the compiler refused the program.
    """

    case: Case
    low: float
    high: float
    verdict: str
    compiled: float
    refused: bool

    @property
    def wrong(self) -> bool:
        """Whether the verdict is `fits` or `does not fit`, and the compiler disagrees."""
        compilers = Verdict.DOES_NOT_FIT if self.refused else Verdict.FITS
        return self.verdict not in (Verdict.CLOSE, compilers)


def measure(case: Case) -> Row:
    """Plan and compile a program."""
    sizes = sizes_of(DECODERS[case.decoder])
    made = programs(
        sizes, batch=case.batch, length=case.length, remat=case.remat, chunks=case.chunks
    )
    mesh = sw.abstract_mesh(case.mesh)
    pm = sw.PartitionManager(sw.Strategy.preset(case.preset), mesh=mesh, mode=case.mode)
    verified = verify_plan(pm, made[case.mode], topology=TOPOLOGY, cache=CACHE)
    report, peak = verified.report, verified.compiled.peak
    assert report.layout is not None, "the plan has a topology"
    assert peak is not None, "a compiler for TPUs tells the memory"
    usable = report.layout.topology.chip.hbm_bytes
    return Row(
        case=case,
        low=round(report.memory.low / usable, 4),
        high=round(report.memory.high / usable, 4),
        verdict=str(report.verdict),
        compiled=round(peak / usable, 4),
        refused=bool(verified.compiled.refused),
    )


def sizes_of(decoder: Decoder) -> Sizes:
    """Return the sizes as the reference decoder takes them."""
    attention = AttentionConfig(
        embed=decoder.embed,
        heads=decoder.heads,
        kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        dtypes=decoder.dtypes,
    )
    mlp: MlpConfig | MoEBlockConfig = MlpConfig(
        embed=decoder.embed, hidden=decoder.hidden, dtypes=decoder.dtypes
    )
    if decoder.experts:
        experts = MoEConfig(
            embed=decoder.embed,
            hidden=decoder.hidden,
            experts=decoder.experts,
            per_token=2,
            # "auto" depends on the backend: programs are planned on CPUs, but compiled for TPUs.
            exchange="slots",
            dtypes=decoder.dtypes,
        )
        mlp = MoEBlockConfig(moe=experts)
    return Sizes(
        family="llama",
        vocab=decoder.vocab,
        embed=decoder.embed,
        stacks=(Stack(layers=decoder.layers, attention=attention, mlp=mlp),),
        tied=decoder.tied,
        longest=8192,
        dtypes=decoder.dtypes,
    )


def judge(rows: Sequence[Row]) -> dict[str, bool]:
    """Return each target with the numbers behind it, and whether it is met."""
    needs = [row.compiled for row in rows]
    refused = [row for row in rows if row.refused]
    rejected = sum(row.verdict == Verdict.FITS for row in refused)
    sure = [row for row in rows if row.verdict != Verdict.CLOSE]
    wrong, close = sum(row.wrong for row in rows), len(rows) - len(sure)
    uppers = [row.high / row.compiled for row in rows]
    return {
        f"{len(rows)} programs need {min(needs):.2f} to {max(needs):.2f} of the memory "
        "(target: 0.6 or less, to 1.4 or more)": (min(needs) <= 0.6 and max(needs) >= 1.4),
        f"{rejected} of {len(refused)} programs that the compiler refused have the verdict `fits` "
        "(target: none)": not rejected,
        f"{len(sure) - wrong} of {len(sure)} verdicts other than `close` agree with the compiler "
        "(target: all)": not wrong,
        f"{close} of {len(rows)} verdicts are `close` (target: at most {MOST_CLOSE:.0%})": (
            close <= MOST_CLOSE * len(rows)
        ),
        f"the upper end is {min(uppers):.2f} to {max(uppers):.2f} of what the program needs "
        f"(target: at least {LEAST_UPPER_END})": min(uppers) >= LEAST_UPPER_END,
    }


HEADER: Final = ("decoder", "preset", "mesh", "mode", "batch", "plan", "verdict", "compiled")


def cells(row: Row) -> list[str]:
    """Return a row of the table. A wrong verdict is in bold type."""
    case = row.case
    mode = case.mode if case.mode != "train" else f"train, remat {case.remat}"
    if case.chunks > 1:
        mode += f", loss in {case.chunks} parts"
    verdict = f"**{row.verdict}**" if row.wrong else row.verdict
    compiled = f"{row.compiled:.2f}{', refused' if row.refused else ''}"
    span = f"{row.low:.2f} to {row.high:.2f}"
    where = [case.decoder, case.preset, case.mesh, mode, f"{case.batch} x {case.length}"]
    return [*where, span, verdict, compiled]


def main(argv: list[str] | None = None) -> int:
    """Compare, print a table, and return 0 if the targets are met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fits", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    given = parser.parse_args(argv)
    print(f"| {' | '.join(HEADER)} |")
    print(f"|{' --- |' * len(HEADER)}")
    rows = []
    for case in CASES:
        rows.append(measure(case))
        print(f"| {' | '.join(cells(rows[-1]))} |", flush=True)
    verdicts = judge(rows)
    for words, met in verdicts.items():
        print(f"{'pass' if met else 'FAIL'}: {words}")
    if given.json is not None:
        _write(given.json, rows)
    return 0 if all(verdicts.values()) else 1


def _write(path: Path, rows: Sequence[Row]) -> None:
    """Write results as JSON with one line for each program."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
    today = dt.datetime.now(dt.UTC).date().isoformat()
    context = {**versions, "target": TOPOLOGY, "date": today}
    lines = ",\n".join(json.dumps(dataclasses.asdict(row)) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f'{{"context": {json.dumps(context)},\n"rows": [\n{lines}\n]}}\n'
    path.write_text(text, encoding="utf-8")


def read_rows(path: Path) -> tuple[list[Row], dict[str, str]]:
    """Return the rows of a file of results, and the context."""
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = [Row(**{**row, "case": Case(**row["case"])}) for row in data["rows"]]
    return rows, data["context"]


if __name__ == "__main__":
    sys.exit(main())
