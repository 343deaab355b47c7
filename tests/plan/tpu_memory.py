"""Compare the range of live memory with the peak of the TPU compiler, for a v5e:2x4.

The programs are those of `CASES`, of `foreign_programs`, and of `held_out_programs`. Attention is
plain, or `dot_product_attention`, which takes the kernels of a TPU.

    python -m tests.plan.tpu_memory [--record] [name ...]

prints a line of JSON per program, in bytes. It needs libtpu, which the extra `tpu-aot` brings.
`--record` writes the peaks to `fixtures/tpu_peaks.json`, which tests without libtpu read.
"""

from __future__ import annotations

import os

from tests.tpu_compile import SETTINGS, TOPOLOGY, tell, tpu_mesh

if __name__ == "__main__":
    os.environ.update(SETTINGS)  # libtpu reads them when it is loaded

import dataclasses
import functools
import importlib.metadata
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp

import shardwright as sw
from shardwright import attention
from shardwright.plan.planner import PlanReport
from tests.plan import foreign_programs, held_out_programs
from tests.plan.foreign_programs import Foreign

EMBED, INNER, HEADS, DIM, VOCAB = 1024, 4096, 8, 128, 16384
BATCH, LENGTH, LAYERS = 16, 1024, 4
HIDDEN = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
INSIDE = (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
QUERY = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)
KEY = (sw.BATCH, sw.KV_LENGTH, sw.HEAD, sw.HEAD_DIM)
F32 = jnp.float32
LAYER = {
    **{
        name: sw.ArraySpec((EMBED, HEADS, DIM), F32, (sw.EMBED, sw.HEAD, sw.HEAD_DIM))
        for name in ("q", "k", "v")
    },
    "o": sw.ArraySpec((HEADS, DIM, EMBED), F32, (sw.HEAD, sw.HEAD_DIM, sw.EMBED)),
    "gate": sw.ArraySpec((EMBED, INNER), F32, (sw.EMBED, sw.MLP_INTERMEDIATE)),
    "up": sw.ArraySpec((EMBED, INNER), F32, (sw.EMBED, sw.MLP_INTERMEDIATE)),
    "down": sw.ArraySpec((INNER, EMBED), F32, (sw.MLP_INTERMEDIATE, sw.EMBED)),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A decoder, and how it runs: scanned or unrolled, rematerialized, trained or only run.

    Attributes:
      attends: Options of `dot_product_attention`, or None for plain attention.
    """

    name: str
    preset: str
    mesh: Mapping[str, int]
    scan: bool = True
    remat: bool = True
    train: bool = True
    attends: Mapping[str, Any] | None = None

    @property
    def key(self) -> str:
        """A name that no other case has."""
        return f"{self.name}, {self.preset}"


RECORD: Final = Path(__file__).parent / "fixtures" / "tpu_peaks.json"
CAUSAL: Mapping[str, Any] = {"causal": True}
WINDOW: Mapping[str, Any] = {"window": (255, 0)}
TP, FSDP = {"fsdp": 4, "tp": 2}, {"fsdp": 8}
CASES = (
    Case(name="train, remat", preset="fsdp_tp", mesh=TP),
    Case(name="train, remat", preset="fsdp", mesh=FSDP),
    Case(name="train, no remat", preset="fsdp_tp", mesh=TP, remat=False),
    Case(name="train, no remat", preset="fsdp", mesh=FSDP, remat=False),
    Case(name="train, remat, unrolled", preset="fsdp_tp", mesh=TP, scan=False),
    Case(name="train, no remat, unrolled", preset="fsdp", mesh=FSDP, scan=False, remat=False),
    Case(name="train, remat", preset="ddp", mesh={"dp": 8}),
    Case(name="forward", preset="fsdp_tp", mesh=TP, train=False),
    Case(name="forward, unrolled", preset="fsdp", mesh=FSDP, train=False, scan=False),
    Case(name="train, causal", preset="fsdp_tp", mesh=TP, attends=CAUSAL),
    Case(name="train, windows", preset="fsdp_tp", mesh=TP, attends=WINDOW),
    Case(name="train, windows, unrolled", preset="fsdp", mesh=FSDP, scan=False, attends=WINDOW),
    Case(name="train, windows, no remat", preset="fsdp", mesh=FSDP, remat=False, attends=WINDOW),
    Case(name="forward, windows", preset="fsdp_tp", mesh=TP, train=False, attends=WINDOW),
)


def block(x: Any, weights: Any, attends: Mapping[str, Any] | None = None) -> Any:
    """One layer: attention and a gated feed-forward, both computed in bfloat16."""
    gathered = sw.gather(weights, LAYER)
    w = {name: value.astype(jnp.bfloat16) for name, value in gathered.items()}
    q = sw.shard(jnp.einsum("bse,ehd->bshd", x, w["q"]), QUERY)
    k = sw.shard(jnp.einsum("bse,ehd->bshd", x, w["k"]), KEY)
    v = sw.shard(jnp.einsum("bse,ehd->bshd", x, w["v"]), KEY)
    if attends is None:
        scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(F32) * DIM**-0.5
        weighted = jax.nn.softmax(scores).astype(jnp.bfloat16)
        mixed = sw.shard(jnp.einsum("bhst,bthd->bshd", weighted, v), QUERY)
    else:
        mixed = attention.dot_product_attention(q, k, v, mode="train", **attends)
    x = sw.shard(x + jnp.einsum("bshd,hde->bse", mixed, w["o"]), HIDDEN)
    inside = jax.nn.silu(sw.shard(x @ w["gate"], INSIDE)) * sw.shard(x @ w["up"], INSIDE)
    return sw.shard(x + inside @ w["down"], HIDDEN)


def program(case: Case) -> tuple[Any, Callable[..., Any]]:
    """Return the parameters' specs, and the loss as a function of parameters and tokens."""
    stacked = {
        name: sw.ArraySpec((LAYERS, *spec.shape), F32, (sw.EMPTY, *spec.axes))
        for name, spec in LAYER.items()
    }
    specs = {
        "layers": stacked if case.scan else [LAYER] * LAYERS,
        "embed": sw.ArraySpec((VOCAB, EMBED), F32, (sw.VOCAB, sw.EMBED)),
        "head": sw.ArraySpec((EMBED, VOCAB), F32, (sw.EMBED, sw.VOCAB)),
    }
    layer = functools.partial(block, attends=case.attends)
    run = jax.checkpoint(layer) if case.remat else layer

    def loss(params: Any, tokens: Any) -> Any:
        embed = sw.gather(params["embed"], sw.VOCAB, sw.EMBED).astype(jnp.bfloat16)
        x = sw.shard(embed[tokens], HIDDEN)
        if case.scan:
            x, _ = jax.lax.scan(lambda x, w: (run(x, w), None), x, params["layers"])
        else:
            for weights in params["layers"]:
                x = run(x, weights)
        head = sw.gather(params["head"], sw.EMBED, sw.VOCAB).astype(jnp.bfloat16)
        logits = sw.shard(x @ head, sw.BATCH, sw.QUERY_LENGTH, sw.VOCAB).astype(F32)
        return jax.nn.logsumexp(logits, -1).mean()

    return specs, loss


def arguments(case: Case, pm: sw.PartitionManager) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return what runs, and its arguments: parameters, moments if it trains, and tokens."""
    specs, loss = program(case)
    tokens = pm.sharding((sw.BATCH, sw.QUERY_LENGTH), shape=(BATCH, LENGTH))
    batch = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32, sharding=tokens)
    params = pm.abstract(specs)
    if not case.train:
        return loss, (params, batch)

    def step(params: Any, moments: Any, batch: Any) -> Any:
        gradients = jax.grad(loss)(params, batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments

    return step, (params, pm.abstract(specs, role="state"), batch)


def plan_decoder(case: Case) -> PlanReport:
    """Return the plan of a program."""
    mesh = sw.abstract_mesh(",".join(f"{axis}:{size}" for axis, size in case.mesh.items()))
    pm = sw.PartitionManager(sw.Strategy.preset(case.preset), mesh=mesh)
    function, given = arguments(case, pm)
    holds = ("parameters", "optimizer", "inputs") if case.train else ("parameters", "inputs")
    donated = (0, 1) if case.train else ()
    report: PlanReport = pm.plan(function, *given, holds=holds, donated=donated, topology=TOPOLOGY)
    return report


def compile_decoder(case: Case) -> Any:
    """Compile a program."""
    pm = sw.PartitionManager(sw.Strategy.preset(case.preset), mesh=tpu_mesh(**case.mesh))
    function, given = arguments(case, pm)
    with pm:
        lowered = jax.jit(function, donate_argnums=(0, 1) if case.train else ()).lower(*given)
    # Low effort changes bytes by less than 10%, and takes a quarter of the time.
    return lowered.compile(compiler_options={"exec_time_optimization_effort": -1.0})


PROGRAMS: Final[Mapping[str, Case | Foreign]] = {
    **{case.key: case for case in CASES},
    **foreign_programs.PROGRAMS,
    **held_out_programs.PROGRAMS,
}


def plan(name: str) -> PlanReport:
    """Return the plan of a program."""
    case = PROGRAMS[name]
    return plan_decoder(case) if isinstance(case, Case) else foreign_programs.plan(case)


def compiled_peak(name: str) -> int:
    """Return the compiler's peak of a program, in bytes on one device."""
    case = PROGRAMS[name]
    compile_case = compile_decoder if isinstance(case, Case) else foreign_programs.compile_for_tpus
    peak: int = compile_case(case).memory_analysis().peak_memory_in_bytes
    return peak


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The planned range of a program's memory and its compiled peak, in bytes on one device."""

    name: str
    low: int
    high: int
    peak: int


def measure(name: str) -> Measured:
    """Plan and compile a program."""
    memory = plan(name).memory
    return Measured(name=name, low=memory.low, high=memory.high, peak=compiled_peak(name))


def main(names: list[str], *, record: bool) -> None:
    """Print one line per program that has one of these names; for all programs without names."""
    peaks: dict[str, int] = {}
    for name in names or PROGRAMS:
        measured = measure(name)
        peaks[name] = measured.peak
        tell(measured)
    if record:
        versions = {each: importlib.metadata.version(each) for each in ("jax", "libtpu")}
        found = {**versions, "topology": TOPOLOGY, "effort": "low", "peaks": peaks}
        RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main([each for each in sys.argv[1:] if each != "--record"], record="--record" in sys.argv)
