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
STEP, TOGETHER = Target(at_most=1.05), Target(at_most=0.5)
ENGINE, WRITTEN, LOOP = "engine", "hand-written cache", "one after the other"


def run(*, peers: bool, repeats: int) -> list[Row]:
    """Measure decode steps with all slots in use, and requests from start to end."""
    del peers
    sys.path.insert(0, str(EXAMPLES))
    try:
        return [_steps(repeats=repeats), _requests(repeats=max(3, repeats // 3))]
    finally:
        sys.path.remove(str(EXAMPLES))


def _steps(*, repeats: int) -> Row:
    engine, server, weights = _engine(SLOTS), _server(SLOTS), _weights()
    for _ in range(SLOTS):
        engine.submit(Request(prompt=_prompt(PROMPT), max_new_tokens=CAPACITY - PROMPT))
    for _ in range(SLOTS + 1):
        engine.step()
    cases = {
        ENGINE: timing.always(_times(engine.step)),
        WRITTEN: timing.always(_times(_written_step(server, weights))),
    }
    times = timing.interleave(cases, repeats=repeats, clock=time.process_time)
    case = f"{STEPS} steps of {SLOTS} slots of {CAPACITY} tokens, serve_tp on dp:2,tp:4"
    return timing.ratio(times, ENGINE, against=WRITTEN, subject="serving", case=case, target=STEP)


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


def _engine(slots: int) -> Engine:
    from decoder.config import DecoderConfig
    from decoder.served import cache_shape, served

    config = DecoderConfig()
    sizes = {"slots": slots, "capacity": CAPACITY, "prefill_chunk": CHUNK}
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


def _written_step(server: Any, weights: Any) -> Callable[[], Any]:
    """Return a function that decodes every slot once and reads the tokens, as the engine does."""
    from tests.examples import hand_written

    config, mesh = server.config, server.pm.mesh
    shape = (server.slots, server.capacity, config.kv_heads, config.head_dim)

    def put(x: np.ndarray, *spec: str | None) -> jax.Array:
        return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))

    # Each array of its own: the step donates them.
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

    def step() -> Any:
        nonlocal caches, last
        caches, last = decode(weights, caches, last)
        return np.asarray(last)

    return step


def _times(step: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        for _ in range(STEPS):
            step()

    return run


def _prompt(length: int) -> np.ndarray:
    return np.arange(length) % 256


def _ignore(line: str) -> None:
    del line
