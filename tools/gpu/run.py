"""Check and measure shardwright on one GPU, in at most eight minutes.

    python tools/gpu/run.py --out FOLDER [--small] [--seconds 440] [--only NAME ...]

Each section adds rows to FOLDER/gpu.json, so a run that is stopped keeps what it has. `--small` has
sizes for a CPU, to rehearse the script: its ratios mean nothing. The first section runs in a
process of its own, because the peak of the allocator is that of a whole process.
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
import time
import traceback
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
    # 302M parameters, those of the vocabulary included.
    decoder={
        "layers": 24,
        "embed": 1024,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 64,
        "mlp": 2816,
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
Row = dict[str, Any]


def row(case: str, value: float, unit: str, *, target: Any = None, **details: Any) -> Row:
    """Return one number. A target is a relation and a bound."""
    met = None
    if target is not None:
        met = value >= target[1] if target[0] == ">=" else value <= target[1]
    return {"case": case, "value": value, "unit": unit, "target": target, "met": met, **details}


def seconds_of(cases: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Return wall times of cases that wait for their results, interleaved and warm."""
    from benchmarks import timing

    for run in cases.values():
        run()
    prepared = {name: timing.always(run) for name, run in cases.items()}
    return timing.interleave(prepared, repeats=repeats, clock=time.perf_counter)


def waiting(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Return a run of a jitted function that waits for the result."""
    import jax

    jitted = jax.jit(function)
    return lambda: jax.block_until_ready(jitted(*arguments))


def fastest() -> str:
    """Return the implementation of JAX's attention that a user would name by hand."""
    import jax

    return "cudnn" if jax.default_backend() == "gpu" else "xla"


def ratio(times: dict[str, list[float]], what: str, beside: str) -> float:
    """Return the median of the ratios of two cases."""
    return statistics.median(a / b for a, b in zip(times[what], times[beside], strict=True))


# Sections: each yields rows.


def memory(sizes: Sizes, state: dict[str, Any]) -> Iterator[Row]:
    """Put the peak of the allocator beside the planned range, for a training step."""
    import jax

    trainer, inputs = trainer_of(sizes)
    report = trainer.pm.plan(*planned_step(trainer, sizes), **planned_options(trainer))
    trained, batch = trainer.init(0), trainer.place(inputs)
    for _ in range(2):
        trained, loss = trainer.step(trained, batch)
    jax.block_until_ready(loss)
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    low, high = report.memory.low, report.memory.high
    if peak is None:
        yield row("peak of a training step", 0, "B", skipped="this device counts no memory")
    else:
        inside = low <= peak <= high
        yield row("peak of a training step", peak, "B", low=low, high=high, inside=inside)


def peaks(sizes: Sizes, state: dict[str, Any]) -> Iterator[Row]:
    """Measure what this device reaches: a large matmul, and a copy."""
    import jax
    import jax.numpy as jnp

    side = sizes.matmul
    a = jnp.ones((side, side), jnp.bfloat16)
    x = jnp.ones(sizes.copy // 2, jnp.bfloat16)
    times = seconds_of(
        {"matmul": waiting(lambda a: a @ a, a), "copy": waiting(lambda x: x + 1, x)},
        sizes.repeats,
    )
    state["flops"] = 2 * side**3 / min(times["matmul"])
    state["bytes"] = 2 * x.nbytes / min(times["copy"])
    yield row(f"bfloat16 matmul of {side}", state["flops"] / 1e12, "TFLOP/s")
    yield row("copy, read and written", state["bytes"] / 1e9, "GB/s")
    del jax


def conformance(sizes: Sizes, state: dict[str, Any]) -> Iterator[Row]:
    """Compare every implementation with the oracle on this device, in bfloat16 and float16."""
    import jax

    from shardwright.testing.attention_conformance import AttentionConformance, check

    tolerances = AttentionConformance.tolerances
    device = tuple(jax.local_devices()[:1])
    names = ("cudnn", "sdpa", "blockwise", "flash_decode", "vanilla")
    cells = []
    for name in names:
        table = type(
            name,
            (AttentionConformance,),
            {"implementation": name, "devices": device, "dtypes": ("bfloat16", "float16")},
        )
        cells += table.cells()[: sizes.cells]

    def outcome(cell: Any) -> tuple[str, str, str]:
        try:
            refused = check(cell, refuses=None, tolerances=tolerances)
        except Exception as error:  # noqa: BLE001  each cell is a result
            return cell.implementation, "wrong", f"{cell}: {error!s:.300}"
        return cell.implementation, "refused" if refused else "equal", ""

    # XLA compiles without Python's lock, and compiling takes most of the time.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(outcome, cells))
    for name in names:
        own = [each for each in outcomes if each[0] == name]
        counts = {kind: sum(each[1] == kind for each in own) for kind in ("equal", "refused")}
        wrong = [text for _, kind, text in own if kind == "wrong"]
        yield row(f"conformance of {name}", len(wrong), "wrong", target=("<=", 0), **counts) | {
            "failures": wrong[:20]
        }


def attention(sizes: Sizes, state: dict[str, Any]) -> Iterator[Row]:
    """Time training attention beside a direct call of cuDNN."""
    import jax
    import jax.numpy as jnp

    from shardwright import attention as ours

    heads, dim = sizes.heads, sizes.head_dim
    direct = fastest()
    for length in sizes.lengths:
        batch = max(1, sizes.lengths[0] * 4 // length)
        keys = jax.random.split(jax.random.key(0), 3)
        for kv_heads, window in ((heads, None), (sizes.kv_heads, None), (heads, length // 4)):
            q, k, v = (
                jax.random.normal(key, (batch, length, count, dim), jnp.bfloat16)
                for key, count in zip(keys, (heads, kv_heads, kv_heads), strict=True)
            )

            def mine(q: Any, k: Any, v: Any, window: Any = window) -> Any:
                options = {"window": (window - 1, 0)} if window else {}
                return ours.dot_product_attention(q, k, v, mode="train", causal=True, **options)

            def theirs(q: Any, k: Any, v: Any, window: Any = window) -> Any:
                size = None if window is None else (window - 1, 0)
                return jax.nn.dot_product_attention(
                    q, k, v, is_causal=True, local_window_size=size, implementation=direct
                )

            chosen = ours.explain(q, k, v, mode="train", causal=True).implementation.name
            yield from _trained(mine, theirs, (q, k, v), window, chosen, direct, sizes, state)


def _trained(
    mine: Any,
    theirs: Any,
    arrays: tuple[Any, ...],
    window: int | None,
    chosen: str,
    direct: str,
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
    seen = length * length / 2 if window is None else length * window - window * window / 2
    # Two matmuls forward and five backward, of 2 operations per pair.
    flops = 7 * 2 * batch * heads * dim * seen
    case = f"{batch}x{length}, {heads}/{arrays[1].shape[2]} heads of {dim}"
    case += f", window {window}" if window else ""
    yield row(
        f"training attention, {case}",
        1 / ratio(times, "ours", "direct"),
        f"speed of a direct {direct} call",
        target=TRAIN,
        chosen=chosen,
        seconds=statistics.median(times["ours"]),
        share_of_matmul=flops / min(times["ours"]) / state["flops"],
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
                full = _filled(cache, rows - 128, sizes)
            except Exception as error:  # noqa: BLE001  a kind may need other options
                yield row(f"decode, {kind}, {rows} rows", 0, "", skipped=f"{error!s:.300}")
                continue
            q = jnp.ones((sizes.slots, 1, sizes.heads, sizes.head_dim), jnp.bfloat16)
            k = jnp.ones((sizes.slots, 1, sizes.kv_heads, sizes.head_dim), jnp.bfloat16)

            @functools.partial(jax.jit, donate_argnums=2)
            def step(q: Any, k: Any, cache: Any) -> Any:
                done = ours.append_and_attend(q, k, k, cache)
                return done.o, done.cache

            # Donated, as an engine does: without it, XLA copies the cache.
            held = [full]

            def once(step: Any = step, q: Any = q, k: Any = k, held: Any = held) -> Any:
                o, held[0] = step(q, k, held[0])
                return jax.block_until_ready(o)

            times = seconds_of({"step": once}, sizes.repeats)
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(held[0]))
            yield row(
                f"decode attention, {kind}, {sizes.slots} x {rows} rows",
                size / min(times["step"]) / state["bytes"],
                "of the bandwidth of a copy",
                target=DECODE if kind == "dense" and rows >= 32768 else None,
                seconds=min(times["step"]),
                cache_bytes=size,
            )


def _filled(cache: Any, rows: int, sizes: Sizes) -> Any:
    import jax
    import jax.numpy as jnp

    k = jnp.ones((sizes.slots, rows, sizes.kv_heads, sizes.head_dim), jnp.bfloat16)
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
    """Time a training step beside the same step written by hand."""
    import jax

    from tests.examples import hand_written

    trainer, inputs = trainer_of(sizes)
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
    states = {name: trainer.init(0) for name in steps}
    compiled = {}
    for name, step in steps.items():
        start = time.perf_counter()
        states[name], loss = step(states[name], batch)
        jax.block_until_ready(loss)
        compiled[name] = time.perf_counter() - start

    def run(name: str) -> Callable[[], Any]:
        def once() -> Any:
            states[name], loss = steps[name](states[name], batch)
            return jax.block_until_ready((states[name], loss))

        return once

    times = seconds_of({name: run(name) for name in steps}, sizes.repeats)
    count = sum(leaf.size for leaf in jax.tree.leaves(states["ours"]["params"]))
    flops = 6 * count * sizes.batch * sizes.length
    yield row(
        f"training step of {count / 1e6:.0f}M parameters, {sizes.batch} x {sizes.length}",
        ratio(times, "ours", "by hand"),
        "x the step by hand",
        target=STEP,
        seconds=statistics.median(times["ours"]),
        share_of_matmul=flops / statistics.median(times["ours"]) / state["flops"],
    )
    for name, seconds in compiled.items():
        yield row(f"trace and compile, {name}", seconds, "s")


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
        yield row(f"texts of an engine, {kind}, unlike the CPU's", different, "texts") | {
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


SECTIONS = {
    each.__name__: each
    for each in (peaks, conformance, attention, decode, training, engine, texts, fp8)
}


def run_memory(arguments: argparse.Namespace) -> list[Row]:
    """Run the section on memory in a process that allocates only what it uses."""
    command = [sys.executable, __file__, "--out", str(arguments.out), "--only", "memory"]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [*command, *(["--small"] if arguments.small else [])],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode or not lines:
        raise RuntimeError(done.stderr[-600:])
    rows: list[Row] = json.loads(lines[-1])
    return rows


def main() -> None:
    """Run the sections, most valuable first, and write what they found after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of gpu.json")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--seconds", type=float, default=440, help="start no section after these")
    parser.add_argument("--only", nargs="*", default=["memory", *SECTIONS])
    arguments = parser.parse_args()
    sizes = SMALL if arguments.small else GPU
    if arguments.only == ["memory"]:
        print(json.dumps(list(memory(sizes, {}))))
        return
    started = time.monotonic()
    found: dict[str, Any] = {"context": {}, "sections": {}, "seconds": {}, "failed": {}}
    state: dict[str, Any] = {"flops": 1.0, "bytes": 1.0}
    for name in arguments.only:
        if time.monotonic() - started > arguments.seconds:
            found["failed"][name] = "no time was left"
            continue
        begun = time.monotonic()
        rows: list[Row] = []
        try:
            if name == "memory":
                rows = run_memory(arguments)
            else:
                for each in SECTIONS[name](sizes, state):
                    rows.append(each)
        except Exception:  # noqa: BLE001  a section that fails must not take the others with it
            found["failed"][name] = traceback.format_exc()[-3000:]
        found["sections"][name] = rows
        found["seconds"][name] = round(time.monotonic() - begun, 1)
        found["context"] = context()
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "gpu.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(name, found["seconds"][name], "s", found["failed"].get(name, ""), flush=True)
        for each in rows:
            print("   ", json.dumps(each)[:300], flush=True)


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
