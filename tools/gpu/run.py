"""Check and measure shardwright on one GPU, in at most eight minutes.

    python tools/gpu/run.py --out FOLDER [--small] [--seconds 440] [--only NAME ...]

Each section runs in a process of its own. Sections that only check run at the same time; sections
that measure run one after the other. FOLDER/gpu.json is written after each section, so a run that
is stopped keeps what it has. `--small` has sizes for a CPU, to rehearse the script: its ratios mean
nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The examples have the decoder, and tests/ the same decoder written by hand.
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "examples")]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of what is measured."""

    matmul: int
    copy: int
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rows: tuple[int, ...]
    slots: int
    decoder: dict[str, int]
    batch: int
    length: int
    repeats: int
    cells: int | None


GPU = Sizes(
    matmul=8192,
    copy=2**30,
    lengths=(4096, 16384),
    heads=16,
    kv_heads=4,
    head_dim=128,
    rows=(8192, 32768),
    slots=16,
    # 289M parameters, those of the vocabulary included.
    decoder={
        "layers": 12,
        "embed": 1280,
        "heads": 20,
        "kv_heads": 10,
        "head_dim": 64,
        "mlp": 4096,
        "vocab": 16384,
    },
    batch=8,
    length=2048,
    repeats=20,
    cells=None,
)
SMALL = Sizes(
    matmul=256,
    copy=2**20,
    lengths=(128,),
    heads=4,
    kv_heads=2,
    head_dim=16,
    rows=(256,),
    slots=2,
    decoder={"layers": 2},
    batch=2,
    length=64,
    repeats=3,
    cells=6,
)
TRAIN, DECODE, STEP = (">=", 0.97), (">=", 0.75), ("<=", 1.02)
# Number of steps that are started before the first result is awaited, as programs do.
AHEAD = 8
Row = dict[str, Any]


def row(case: str, value: float, unit: str, *, target: Any = None, **details: Any) -> Row:
    """Return one number as a row. A target is a relation and a bound."""
    met = None
    if target is not None:
        met = value >= target[1] if target[0] == ">=" else value <= target[1]
    return {"case": case, "value": value, "unit": unit, "target": target, "met": met, **details}


def seconds_of(cases: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Return the wall times of cases, which run in turns after a first run of each.

    Each case must wait for its results.
    """
    from benchmarks import timing

    for run in cases.values():
        run()
    prepared = {name: timing.always(run) for name, run in cases.items()}
    return timing.interleave(prepared, repeats=repeats, clock=time.perf_counter)


def waiting(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Return a function that runs a jitted function several times and waits for the last result."""
    import jax

    jitted = jax.jit(function)

    def run() -> Any:
        for _ in range(AHEAD - 1):
            jitted(*arguments)
        return jax.block_until_ready(jitted(*arguments))

    return run


def random(*shape: int, key: int = 0) -> Any:
    """Return random bfloat16 numbers. A matmul of equal numbers would take less power and time."""
    import jax

    return jax.random.normal(jax.random.key(key), shape, "bfloat16")


def fastest() -> str:
    """Return the implementation of JAX's attention that a user would name by hand."""
    import jax

    return "cudnn" if jax.default_backend() == "gpu" else "xla"


def ratio(times: dict[str, list[float]], what: str, beside: str) -> float:
    """Return the median of the ratios of two cases."""
    return statistics.median(a / b for a, b in zip(times[what], times[beside], strict=True))


# Sections: each yields rows.


def peaks(sizes: Sizes, state: dict[str, Any]) -> Iterator[Row]:
    """Measure what this device reaches: a large matmul, and a copy."""
    import jax.numpy as jnp

    side = sizes.matmul
    a, b, x = random(side, side), random(side, side, key=1), random(sizes.copy // 2)
    # Which of them is fastest differs between devices and versions.
    copies = {
        "x + 1 in bfloat16": waiting(lambda x: x + 1, x),
        "x + 1 in float32": waiting(lambda x: x + 1, random(sizes.copy // 4).astype("float32")),
        "jnp.copy": waiting(jnp.copy, x),
    }
    times = seconds_of({"matmul": waiting(lambda a, b: a @ b, a, b), **copies}, sizes.repeats)
    state["flops"] = 2 * side**3 * AHEAD / min(times["matmul"])
    rates = {name: 2 * x.nbytes * AHEAD / min(times[name]) for name in copies}
    state["bytes"] = max(rates.values())
    yield row(f"bfloat16 matmul of {side}", state["flops"] / 1e12, "TFLOP/s")
    yield row("fastest copy, read and written", state["bytes"] / 1e9, "GB/s", **rates)


def conformance(sizes: Sizes, state: dict[str, Any], *, name: str) -> Iterator[Row]:
    """Compare an implementation with the oracle on this device, in bfloat16 and float16."""
    import jax

    from shardwright.testing.attention_conformance import AttentionConformance, check

    device = tuple(jax.local_devices()[:1])
    table = type(
        name,
        (AttentionConformance,),
        {"implementation": name, "devices": device, "dtypes": ("bfloat16", "float16")},
    )

    def outcome(cell: Any) -> tuple[str, str]:
        try:
            refused = check(cell, refuses=None, tolerances=AttentionConformance.tolerances)
        except Exception as error:  # noqa: BLE001  each cell is a result
            return "wrong", f"{cell}: {error!s:.300}"
        return "refused" if refused else "equal", ""

    # XLA compiles without Python's lock, and compiling takes most of the time.
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(outcome, table.cells()[: sizes.cells]))
    counts = {kind: sum(each[0] == kind for each in outcomes) for kind in ("equal", "refused")}
    wrong = [text for kind, text in outcomes if kind == "wrong"]
    yield row(f"conformance of {name}", len(wrong), "wrong", target=("<=", 0), **counts) | {
        "failures": wrong[:20]
    }


def attention(sizes: Sizes, state: dict[str, Any]) -> Iterator[Row]:
    """Time training attention beside a direct call of cuDNN."""
    import jax
    import jax.numpy as jnp

    from shardwright import attention as ours

    heads, dim, direct = sizes.heads, sizes.head_dim, fastest()
    for length in sizes.lengths:
        batch = max(1, sizes.lengths[0] * 4 // length)
        for kv_heads, window, documents in (
            (heads, None, 1),
            (sizes.kv_heads, None, 1),
            (heads, length // 4, 1),
            (heads, None, 4),
        ):
            if documents > 1 and length > sizes.lengths[0]:
                continue  # the direct call needs a mask for every pair
            q, k, v = (
                random(batch, length, count, dim, key=at)
                for at, count in enumerate((heads, kv_heads, kv_heads))
            )
            options: dict[str, Any] = {"mode": "train", "causal": True}
            theirs: dict[str, Any] = {"is_causal": True, "implementation": direct}
            if window is not None:
                options["window"] = theirs["local_window_size"] = (window - 1, 0)
            if documents > 1:
                ids = jnp.broadcast_to(jnp.arange(length) * documents // length, (batch, length))
                options["segment_ids"] = ids
                theirs["mask"] = ids[:, None, :, None] == ids[:, None, None, :]
            yield from _trained(
                functools.partial(ours.dot_product_attention, **options),
                functools.partial(jax.nn.dot_product_attention, **theirs),
                (q, k, v),
                window=window,
                documents=documents,
                chosen=ours.explain(q, k, v, **options).name,
                sizes=sizes,
                state=state,
            )


def _trained(
    mine: Any,
    theirs: Any,
    arrays: tuple[Any, ...],
    *,
    window: int | None,
    documents: int,
    chosen: str,
    sizes: Sizes,
    state: dict[str, Any],
) -> Iterator[Row]:
    import jax
    import jax.numpy as jnp

    def gradient(attend: Any) -> Any:
        return jax.grad(
            lambda *arrays: jnp.sum(attend(*arrays).astype(jnp.float32) ** 2), argnums=(0, 1, 2)
        )

    times = seconds_of(
        {
            "ours": waiting(gradient(mine), *arrays),
            "direct": waiting(gradient(theirs), *arrays),
        },
        sizes.repeats,
    )
    batch, length, heads, dim = arrays[0].shape
    seen = length * length / 2 / documents
    if window is not None:
        seen = length * window - window * window / 2
    # Two matmuls forward and five backward, of 2 operations per pair.
    flops = 7 * 2 * batch * heads * dim * seen
    case = f"{batch}x{length}, {heads}/{arrays[1].shape[2]} heads of {dim}"
    case += f", window {window}" if window else ""
    case += f", {documents} documents per row" if documents > 1 else ""
    yield row(
        f"training attention, {case}",
        1 / ratio(times, "ours", "direct"),
        f"speed of a direct {fastest()} call",
        target=TRAIN,
        chosen=chosen,
        seconds=statistics.median(times["ours"]) / AHEAD,
        share_of_matmul=flops * AHEAD / min(times["ours"]) / state["flops"],
    )


def decode(sizes: Sizes, state: dict[str, Any]) -> Iterator[Row]:
    """Time one decoded token beside the time to read its cache."""
    import jax
    import jax.numpy as jnp

    from shardwright import attention as ours
    from shardwright import caches

    for rows in sizes.rows:
        for kind in ("dense", "quantized", "paged"):
            options = {"page_size": 64} if kind == "paged" else {}
            try:
                cache = caches.init(
                    kind,
                    batch=sizes.slots,
                    capacity=rows,
                    kv_heads=sizes.kv_heads,
                    head_dim=sizes.head_dim,
                    dtype=jnp.bfloat16,
                    **options,
                )
                # Each repetition appends, so some rows stay free.
                full = _filled(cache, rows - AHEAD * (sizes.repeats + 2), sizes)
            except Exception as error:  # noqa: BLE001  a kind may need other options
                yield row(f"decode, {kind}, {rows} rows", 0, "", skipped=f"{error!s:.300}")
                continue
            q = random(sizes.slots, 1, sizes.heads, sizes.head_dim)
            k = random(sizes.slots, 1, sizes.kv_heads, sizes.head_dim)

            @functools.partial(jax.jit, donate_argnums=2)
            def step(q: Any, k: Any, cache: Any) -> Any:
                done = ours.append_and_attend(q, k, k, cache)
                return done.o, done.cache

            # Donate the cache, as an engine does. Otherwise XLA copies it.
            held = [full]

            def once(step: Any = step, q: Any = q, k: Any = k, held: Any = held) -> Any:
                for _ in range(AHEAD):
                    o, held[0] = step(q, k, held[0])
                return jax.block_until_ready(o)

            times = seconds_of({"step": once}, sizes.repeats)
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(held[0]))
            yield row(
                f"decode attention, {kind}, {sizes.slots} x {rows} rows",
                size * AHEAD / min(times["step"]) / state["bytes"],
                "of the bandwidth of a copy",
                target=DECODE if kind == "dense" and rows >= 32768 else None,
                seconds=min(times["step"]) / AHEAD,
                cache_bytes=size,
            )


def _filled(cache: Any, rows: int, sizes: Sizes) -> Any:
    import jax

    k = random(sizes.slots, rows, sizes.kv_heads, sizes.head_dim)
    return jax.jit(lambda cache, k: cache.append(k, k).cache, donate_argnums=0)(cache, k)


def trainer_of(sizes: Sizes) -> tuple[Any, dict[str, Any]]:
    """Return the trainer of the example decoder on one device, and a batch."""
    import jax
    import numpy as np
    import optax
    from decoder.config import DecoderConfig
    from decoder.train import make_trainer

    import shardwright as sw

    config = DecoderConfig(**sizes.decoder, dtype="bfloat16")
    mesh = sw.create_mesh("dp:1,fsdp:1,tp:1,sp:1", devices=jax.local_devices()[:1])
    strategy = sw.Strategy.load(ROOT / "examples/strategies/fsdp_tp.toml")
    trainer = make_trainer(strategy, config, optax.adamw(1e-3), mesh=mesh)
    random = np.random.default_rng(0)
    shape = (sizes.batch, sizes.length + 1)
    tokens = random.integers(0, config.vocab, shape).astype(np.int32)
    return trainer, {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def planned_step(trainer: Any, sizes: Sizes) -> tuple[Any, ...]:
    """Return the step of a trainer, and the shapes of its arguments."""
    import jax
    from decoder.config import decoder_specs
    from decoder.train import train_step

    specs = decoder_specs(trainer.config)
    state = {
        "params": trainer.pm.abstract(specs),
        "opt": trainer.pm.abstract_state(trainer.optimizer, specs),
    }
    tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.length), "int32")
    batch = {"inputs": tokens, "targets": tokens}
    return train_step(trainer.config, trainer.optimizer), state, batch


def planned_options(trainer: Any) -> dict[str, Any]:
    """Return the annotations of the arguments of a step."""
    from decoder.train import BATCH_AXES

    return {"specs": (None, BATCH_AXES), "donated": (0,)}


def training(sizes: Sizes, state: dict[str, Any]) -> Iterator[Row]:
    """Time a training step beside the same step written by hand, and its memory beside the plan."""
    import jax

    from tests.examples import hand_written

    device = jax.local_devices()[0]
    trainer, inputs = trainer_of(sizes)
    chip = next((name for name in ("h200", "h100") if name in device.device_kind.lower()), None)
    report = trainer.pm.plan(
        *planned_step(trainer, sizes),
        **planned_options(trainer),
        topology=None if chip is None else f"{chip}:1",
    )
    batch = trainer.place(inputs)

    def direct(q: Any, k: Any, v: Any) -> Any:
        # The rotation by hand returns float32.
        return jax.nn.dot_product_attention(
            q.astype(v.dtype), k.astype(v.dtype), v, is_causal=True, implementation=fastest()
        )

    by_hand = hand_written.HandWritten(
        mesh=trainer.pm.mesh,
        specs=hand_written.FSDP2_TP4,
        layers=trainer.config.layers,
        attend=direct,
    ).train_step(trainer.optimizer)
    steps = {"ours": trainer.step, "by hand": by_hand}
    states, compiled = {}, {}
    # Lower with shapes, because the peak of our step must not count another state.
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trainer.init(0)
    )
    # For each matmul, XLA times several kernels and remembers the fastest one. So the step that is
    # compiled second takes less time.
    for name in ("by hand", "ours"):
        start = time.perf_counter()
        lowered = steps[name].lower(given, batch)
        traced = time.perf_counter()
        compiled[name] = lowered.compile()
        yield row(f"trace, {name}", traced - start, "s")
        yield row(f"compile, {name}", time.perf_counter() - traced, "s")
    for name, step in steps.items():
        # The scratch memory of kernels that were tried counts in the peak of the allocator.
        tuned = (device.memory_stats() or {}).get("peak_bytes_in_use")
        states[name] = trainer.init(0)
        for _ in range(2):
            states[name], loss = step(states[name], batch)
        jax.block_until_ready(loss)
        if name == "ours":
            yield _peak(device, report, compiled[name].memory_analysis(), tuned)

    def run(name: str) -> Callable[[], Any]:
        def once() -> Any:
            for _ in range(AHEAD):
                states[name], loss = steps[name](states[name], batch)
            return jax.block_until_ready((states[name], loss))

        return once

    times = seconds_of({name: run(name) for name in steps}, max(3, sizes.repeats // 2))
    count = sum(leaf.size for leaf in jax.tree.leaves(states["ours"]["params"]))
    flops = 6 * count * sizes.batch * sizes.length
    seconds = statistics.median(times["ours"]) / AHEAD
    planned = report.time
    yield row(
        f"training step of {count / 1e6:.0f}M parameters, {sizes.batch} x {sizes.length}",
        ratio(times, "ours", "by hand"),
        "x the step by hand",
        target=STEP,
        seconds=seconds,
        share_of_matmul=flops / seconds / state["flops"],
        planned=None if planned is None else [planned.low, planned.high],
    )
    yield _profiled(trainer, states["ours"], batch, report, state["out"])


def _peak(device: Any, report: Any, sizes: Any, tuned: int | None) -> Row:
    """Return the peak of the allocator beside the planned range."""
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    low, high = report.memory.low, report.memory.high
    return row(
        "peak of a training step",
        peak or 0,
        "B",
        peak_after_compiling=tuned,
        compiled=sizes and sizes.argument_size_in_bytes + sizes.temp_size_in_bytes,
        low=low,
        high=high,
        inside=peak is not None and low <= peak <= high,
    )


def _profiled(trainer: Any, trained: Any, batch: Any, report: Any, out: Path) -> Row:
    """Profile two steps, and read the profile beside the plan."""
    import jax

    from shardwright.show.profile import profile_text

    with jax.profiler.trace(out / "profile"):
        for _ in range(2):
            trained, loss = trainer.step(trained, batch)
        jax.block_until_ready(loss)
    profile = trainer.pm.profile(out / "profile", report)
    (out / "profile.txt").write_text(profile_text(profile), encoding="utf-8")
    return row(
        "profile of a training step",
        profile.seconds,
        "s",
        compute=profile.compute,
        matmuls=profile.matmuls,
        runs=profile.runs,
        lines=len(profile.lines),
        without_line=sum(line.seconds for line in profile.lines if not line.source),
    )


def engine(sizes: Sizes, state: dict[str, Any]) -> Iterator[Row]:
    """Time the decode step of an engine beside a loop written by hand."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from decoder.config import DecoderConfig, decoder_specs
    from decoder.served import cache_shape, served

    import shardwright as sw
    from benchmarks.serving import STEPS, _Rows, _times
    from shardwright.serving import Engine, Request
    from tests.examples import hand_written

    config = DecoderConfig(**sizes.decoder, dtype="bfloat16")
    mesh = sw.create_mesh("dp:1,tp:1", devices=jax.local_devices()[:1])
    strategy = sw.Strategy.load(ROOT / "examples/strategies/serve_tp.toml")
    pm = sw.PartitionManager(strategy, mesh=mesh)
    weights = pm.init(decoder_specs(config), jax.random.key(0))
    capacity, prompt = 1024, 32
    ours = Engine(
        served(config),
        weights,
        shape=cache_shape(config),
        manager=pm,
        slots=sizes.slots,
        capacity=capacity,
        prefill_chunk=prompt,
    )
    for _ in range(sizes.slots):
        ours.submit(Request(prompt=[1] * prompt, max_new_tokens=capacity - prompt))
    for _ in range(sizes.slots + 1):
        ours.step()
    shape = (sizes.slots, capacity, config.kv_heads, config.head_dim)
    caches = [
        _Rows(
            length=jnp.full(sizes.slots, prompt, jnp.int32),
            k=jnp.zeros(shape, jnp.bfloat16),
            v=jnp.zeros(shape, jnp.bfloat16),
        )
        for _ in range(config.layers)
    ]
    held = [caches, jnp.zeros(sizes.slots, jnp.int32)]

    def direct(q: Any, k: Any, v: Any, positions: Any, lengths: Any) -> Any:
        del positions
        return jax.nn.dot_product_attention(
            q.astype(v.dtype), k.astype(v.dtype), v, key_value_seq_lengths=lengths
        )

    decode_step = hand_written.HandWritten(
        mesh=mesh, specs=hand_written.DP2_TP4, layers=config.layers, attend=direct
    ).decode_step()

    def by_hand() -> Any:
        held[:] = decode_step(weights, *held)
        np.asarray(held[1])
        return held

    def engine_step() -> Any:
        ours.step()
        return ours._arrays.slots

    # Several steps, and what is in flight after the last one, count for the case that began them.
    times = seconds_of({"engine": _times(engine_step), "by hand": _times(by_hand)}, sizes.repeats)
    yield row(
        f"decode step of {sizes.slots} slots",
        ratio(times, "engine", "by hand"),
        "x the loop by hand",
        seconds=statistics.median(times["engine"]) / STEPS,
    )


def texts(sizes: Sizes, state: dict[str, Any]) -> Iterator[Row]:
    """Compare the texts of an engine on this device with those on the CPU, in float32."""
    import jax
    from decoder.config import DecoderConfig, decoder_specs
    from decoder.served import cache_shape, served

    import shardwright as sw
    from shardwright.serving import Engine, Request

    config = DecoderConfig(layers=2)
    kinds: dict[str, dict[str, Any]] = {
        "dense": {},
        "quantized": {},
        "paged": {"page_size": 16, "pages": 64},
    }

    def written(device: Any, kind: str) -> list[list[int]]:
        mesh = sw.create_mesh("dp:1,tp:1", devices=[device])
        strategy = sw.Strategy.load(ROOT / "examples/strategies/serve_tp.toml")
        pm = sw.PartitionManager(strategy, mesh=mesh)
        with jax.default_device(device), jax.default_matmul_precision("highest"):
            weights = pm.init(decoder_specs(config), jax.random.key(0))
            engine = Engine(
                served(config),
                weights,
                shape=cache_shape(config),
                manager=pm,
                slots=4,
                capacity=128,
                cache=kind,
                cache_options=kinds[kind],
            )
            requests = [
                Request(prompt=list(range(1, 5 + 7 * at)), max_new_tokens=24) for at in range(6)
            ]
            return [list(done.tokens) for done in engine.run(requests)]

    for kind in kinds:
        here, host = (
            written(device, kind) for device in (jax.local_devices()[0], jax.devices("cpu")[0])
        )
        different = sum(a != b for a, b in zip(here, host, strict=True))
        yield row(f"{kind} engine: texts that differ from the CPU's", different, "texts") | {
            "of": len(here)
        }


def fp8(sizes: Sizes, state: dict[str, Any]) -> Iterator[Row]:
    """Check an fp8 matmul, and whether XLA runs it on the tensor cores."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from shardwright.layers import fp8 as layer

    x, w = (
        jax.random.normal(jax.random.key(at), shape, jnp.bfloat16)
        for at, shape in enumerate([(1024, 2048), (2048, 1024)])
    )

    def ours(x: Any, w: Any) -> Any:
        return layer.dense(x, {"w": w}, recipe="current").ys["w"]

    compiled = jax.jit(ours).lower(x, w).compile()
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    error = np.linalg.norm(np.asarray(compiled(x, w), np.float64) - exact)
    text = compiled.as_text()
    yield row(
        "fp8 matmul, relative error",
        float(error / np.linalg.norm(exact)),
        "",
        target=("<=", 0.05),
        tensor_cores="matmul$f8" in text or "triton" in text,
    )


NAMES = ("cudnn", "triton_decode", "sdpa", "blockwise", "flash_decode", "vanilla")
# These only check, so they may run at the same time.
CHECKS: dict[str, Any] = {
    **{f"conformance_{name}": functools.partial(conformance, name=name) for name in NAMES},
    "texts": texts,
    "fp8": fp8,
}
MEASURES: dict[str, Any] = {
    each.__name__: each for each in (peaks, attention, decode, training, engine)
}


@dataclasses.dataclass(slots=True)
class Found:
    """The results of all sections. They are written after each section."""

    file: Path
    cache: str
    lock: Any = dataclasses.field(default_factory=threading.Lock)
    context: dict[str, str] = dataclasses.field(default_factory=dict)
    sections: dict[str, list[Row]] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, name: str, arguments: argparse.Namespace) -> None:
        """Run a section in a process of its own."""
        begun = time.monotonic()
        command = [sys.executable, __file__, "--out", str(arguments.out), "--section", name]
        command += ["--state", json.dumps(self.state), *(["--small"] if arguments.small else [])]
        # A process that takes all memory at once leaves none for those beside it, and hides its
        # peak.
        environment = {
            **os.environ,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_COMPILATION_CACHE_DIR": self.cache,
        }
        rows, error = [], ""
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=arguments.section_seconds,
            )
            output = done.stdout
            if done.returncode:
                error = f"exit status {done.returncode}\n{done.stderr}"
        except subprocess.TimeoutExpired as late:
            output = (late.stdout or b"").decode()
            error = f"it took more than {arguments.section_seconds} s"
        for line in output.splitlines():
            kind, _, text = line.partition(" ")
            if kind == "ROW":
                rows.append(json.loads(text))
            elif kind == "STATE":
                self.state |= json.loads(text)
            elif kind == "CONTEXT":
                self.context = json.loads(text)
        self.sections[name] = rows
        self.seconds[name] = round(time.monotonic() - begun, 1)
        if error:
            self.failed[name] = error[-3000:].replace(f"{ROOT}/", "")
        with self.lock:
            names = ("context", "sections", "seconds", "failed")
            data = {each: getattr(self, each) for each in names}
            self.file.write_text(json.dumps(data, indent=1), encoding="utf-8")
            print(name, self.seconds[name], "s", error[-1500:], flush=True)
            for each in rows:
                print("   ", json.dumps(each)[:400], flush=True)


def run_section(arguments: argparse.Namespace) -> None:
    """Print the rows of a section, one per line, and what later sections need."""
    state = {"flops": 1.0, "bytes": 1.0, **json.loads(arguments.state), "out": arguments.out}
    sizes = SMALL if arguments.small else GPU
    for each in {**CHECKS, **MEASURES}[arguments.section](sizes, state):
        print("ROW", json.dumps(each), flush=True)
    del state["out"]
    print("STATE", json.dumps(state))
    print("CONTEXT", json.dumps(context()))


def main() -> None:
    """Run the sections, checks first, and write what they found after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of gpu.json")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--seconds", type=float, default=440, help="start no section after these")
    parser.add_argument("--section-seconds", type=float, default=200, help="stop a section after")
    parser.add_argument("--only", nargs="*", default=[*CHECKS, *MEASURES])
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--state", default="{}", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        run_section(arguments)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    found = Found(arguments.out / "gpu.json", cache=tempfile.mkdtemp())
    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        checks = [
            pool.submit(found.run, name, arguments) for name in arguments.only if name in CHECKS
        ]
    for check in checks:
        check.result()
    for name in [name for name in arguments.only if name in MEASURES]:
        if time.monotonic() - started > arguments.seconds:
            found.failed[name] = "no time was left"
        else:
            found.run(name, arguments)


def context() -> dict[str, str]:
    """Return the device and the versions."""
    import jax
    import jaxlib

    return {
        "device": jax.local_devices()[0].device_kind,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


if __name__ == "__main__":
    main()
