"""Serving on 8 CPU devices, compared with single requests and with a hand-written cache."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import shardwright as sw
from benchmarks import timing
from benchmarks.timing import Row, Target
from shardwright.serving import Engine, Request
from shardwright.testing.meshes import cpu_mesh

EXAMPLES = Path(__file__).parents[1] / "examples"
SLOTS, CAPACITY, PROMPT, NEW, CHUNK = 8, 1024, 32, 16, 32
REQUESTS, STEPS = 16, 8
STEP, WAITING_STEP, AHEAD_STEP = (Target(at_most=most) for most in (1.05, 1.1, 1.1))
TOGETHER, PER_SLOT = Target(at_most=0.5), Target(at_most=2)
ENGINE, WAITING, LOOP = "engine", "engine, ahead=False", "one after the other"
WRITTEN, WRITTEN_AHEAD = "hand-written cache", "hand-written cache, one step in flight"
FEW, MANY = 8, 128


def run(*, peers: bool, repeats: int) -> list[Row]:
    """Measure decode steps with all slots in use, and requests from start to end."""
    del peers
    sys.path.insert(0, str(EXAMPLES))
    try:
        steps = _steps(repeats=repeats)
        return [*steps, _requests(repeats=max(3, repeats // 3)), _host(repeats=repeats)]
    finally:
        sys.path.remove(str(EXAMPLES))


def _steps(*, repeats: int) -> list[Row]:
    server, weights = _server(SLOTS), _weights()
    cases = {
        ENGINE: timing.always(_times(_engine_step(ahead=True))),
        WAITING: timing.always(_times(_engine_step(ahead=False))),
        WRITTEN: timing.always(_times(_written_step(server, weights))),
        WRITTEN_AHEAD: timing.always(_times(_written_step(server, weights, ahead=True))),
    }
    times = timing.interleave(cases, repeats=repeats, clock=time.process_time)
    case = f"{STEPS} steps of {SLOTS} slots of {CAPACITY} tokens, serve_tp on dp:2,tp:4"
    return [
        timing.ratio(times, what, against=against, subject="serving", case=case, target=target)
        for what, against, target in (
            (ENGINE, WRITTEN, STEP),
            (ENGINE, WRITTEN_AHEAD, AHEAD_STEP),
            (WAITING, WRITTEN, WAITING_STEP),
        )
    ]


def _engine_step(*, ahead: bool) -> Callable[[], Any]:
    """Return the step of an engine whose slots are all in use."""
    engine = _engine(SLOTS, ahead=ahead)
    for _ in range(SLOTS):
        engine.submit(Request(prompt=_prompt(PROMPT), max_new_tokens=CAPACITY - PROMPT))
    for _ in range(SLOTS + 1):
        engine.step()

    def step() -> Any:
        engine.step()
        return engine._arrays.slots

    return step


def _host(*, repeats: int) -> Row:
    """Measure how much the time of the host grows with the number of slots."""
    cases = {slots: timing.always(_times(_host_step(slots))) for slots in (FEW, MANY)}
    times = timing.interleave(
        {str(slots): case for slots, case in cases.items()},
        repeats=max(50, repeats),
        clock=time.process_time,
    )
    few, many = (min(times[str(slots)]) / STEPS for slots in (FEW, MANY))
    return Row(
        subject="serving",
        case=f"time of the host in a step, per slot, from {FEW} to {MANY} slots",
        what=ENGINE,
        value=1e6 * (many - few) / (MANY - FEW),
        unit="us",
        seconds=many,
        spread=timing.spread(times[str(MANY)]),
        repeats=len(times[str(MANY)]),
        target=PER_SLOT,
    )


def _host_step(slots: int) -> Callable[[], Any]:
    """Return the step of an engine whose devices have nothing to do."""
    from tests.serving.stub import SHAPE, stub

    engine = Engine(stub, np.int32(1), shape=SHAPE, slots=slots, capacity=4096, prefill_rows=slots)
    for _ in range(slots):
        engine.submit(Request(prompt=[1], max_new_tokens=4096))
    engine.step()
    engine.step()
    sampled = engine._arrays.decode(dict)
    engine._arrays.decode = lambda _: sampled
    return engine.step


def _requests(*, repeats: int) -> Row:
    from decoder.serve import generate

    engine, server, weights = _engine(SLOTS), _server(1), _weights()
    prompts = [
        _prompt(length) for length in np.random.default_rng(0).integers(1, PROMPT + 1, REQUESTS)
    ]

    def together() -> Any:
        return engine.run(Request(prompt=prompt, max_new_tokens=NEW) for prompt in prompts)

    def loop() -> Any:
        return [
            generate(
                server, weights, [prompt.astype(np.uint8).tobytes()], new_bytes=NEW, on_step=_ignore
            )
            for prompt in prompts
        ]

    cases = {ENGINE: timing.always(together), LOOP: timing.always(loop)}
    times = timing.interleave(cases, repeats=repeats, clock=time.process_time)
    case = (
        f"{REQUESTS} prompts of up to {PROMPT} tokens, {NEW} new ones each, {SLOTS} slots, "
        "serve_tp on dp:2,tp:4"
    )
    return timing.ratio(times, ENGINE, against=LOOP, subject="serving", case=case, target=TOGETHER)


def _manager() -> sw.PartitionManager:
    return sw.PartitionManager(_strategy(), mesh=cpu_mesh("dp:2,tp:4"))


def _strategy() -> sw.Strategy:
    return sw.Strategy.load(EXAMPLES / "strategies" / "serve_tp.toml")


def _weights() -> Any:
    from decoder.config import DecoderConfig, decoder_specs

    return _manager().init(decoder_specs(DecoderConfig()), jax.random.key(0))


def _engine(slots: int, *, ahead: bool = True) -> Engine:
    from decoder.config import DecoderConfig
    from decoder.served import cache_shape, served

    config = DecoderConfig()
    sizes = {"slots": slots, "capacity": CAPACITY, "prefill_chunk": CHUNK, "ahead": ahead}
    return Engine(
        served(config), _weights(), shape=cache_shape(config), manager=_manager(), **sizes
    )


def _server(slots: int) -> Any:
    from decoder.config import DecoderConfig
    from decoder.serve import make_server

    return make_server(
        _strategy(),
        DecoderConfig(),
        slots=slots,
        capacity=CAPACITY,
        prompt_length=PROMPT,
        mesh=cpu_mesh("dp:2,tp:4"),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """A hand-written cache of one layer: `length[batch]`, `k` and `v` `[batch, row, head, dim]`."""

    length: jax.Array
    k: jax.Array
    v: jax.Array


def _written_step(server: Any, weights: Any, *, ahead: bool = False) -> Callable[[], Any]:
    """Return a function that decodes every slot once, reads tokens as the engine does, and returns
    what the devices may still compute.

    Args:
      server: Sizes of the decoder.
      weights: Weights of the decoder.
      ahead: Whether a step reads the tokens of the step before it.
    """
    from tests.examples import hand_written

    config, mesh = server.config, server.pm.mesh
    shape = (server.slots, server.capacity, config.kv_heads, config.head_dim)

    def put(x: np.ndarray, *spec: str | None) -> jax.Array:
        return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))

    # Each cache has arrays of its own, because the step donates them.
    caches = [
        _Rows(
            length=put(np.full(server.slots, PROMPT, np.int32), "dp"),
            k=put(np.zeros(shape, np.float32), "dp", None, "tp"),
            v=put(np.zeros(shape, np.float32), "dp", None, "tp"),
        )
        for _ in range(config.layers)
    ]
    last = put(np.zeros(server.slots, np.int32), "dp")
    decode = hand_written.HandWritten(
        mesh=mesh, specs=hand_written.DP2_TP4, layers=config.layers
    ).decode_step()

    if ahead:
        # The tokens of a step are read after the next step has begun, so `decode` must not donate
        # them.
        decode = jax.jit(decode.__wrapped__, donate_argnums=1)
    before = None

    def step() -> Any:
        nonlocal caches, last, before
        caches, last = decode(weights, caches, last)
        read, before = (before, last) if ahead else (last, None)
        if read is not None:
            np.asarray(read)
        return caches, last

    return step


def _times(step: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        for _ in range(STEPS):
            in_flight = step()
        # The clock counts all threads. A step that a case leaves in flight would be counted for the
        # next case: one step of eight too few here, and one too many there.
        jax.block_until_ready(in_flight)

    return run


def _prompt(length: int) -> np.ndarray:
    return np.arange(length) % 256


def _ignore(line: str) -> None:
    del line
