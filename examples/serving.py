"""Serve the demo's decoder: 64 requests of all lengths share 16 slots on eight virtual devices.

    python examples/serving.py [--quick] [--strategy NAME] [--cache KIND] [--json]

Prompts are pieces of the standard library of Python. Half of the requests are greedy, and half
sample with their own seed; one is canceled. At the end the example serves each request alone,
checks that the text is the same, and prints the report of the engine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

try:
    import optax
except ModuleNotFoundError as error:
    sys.exit(
        f"The example needs {error.name}: run "
        'python -m pip install -e ".[demo]" in the clone, or make demo.'
    )

from decoder.config import DecoderConfig, decoder_specs
from decoder.served import cache_shape, served
from decoder.text import stdlib_text, text_batches
from decoder.train import make_trainer, train

import shardwright as sw
from shardwright.serving import Completion, Engine, Finish, Request, Sampling
from shardwright.testing.meshes import cpu_mesh, virtual_devices

MESHES = {"single": "dp:1", "serve_tp": "dp:2,tp:4", "serve_long_context": "dp:2,sp:2,tp:2"}
CAPACITY, CHUNK, WINDOW = 128, 16, 32
CACHES: dict[str, dict[str, Any]] = {
    "dense": {"capacity": CAPACITY},
    "sliding": {"capacity": WINDOW},
    "quantized": {"capacity": CAPACITY},
    "paged": {"capacity": CAPACITY, "cache_options": {"page_size": 16, "pages": 64}},
}
STREAMED, CANCELED = (0, 1), 5


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    jax.config.update("jax_platforms", "cpu")
    virtual_devices(8)  # JAX fixes the number of devices at its first operation
    text = stdlib_text(200_000)
    config = (
        DecoderConfig(layers=1, embed=64, heads=8, kv_heads=4, head_dim=8, mlp=128)
        if options.quick
        else DecoderConfig()
    )
    params = trained(config, text, options.steps)
    requests = make_requests(text, options.requests)
    engine = make_engine(config, params, options.strategy, options.cache, slots=options.slots)
    say = (lambda *said: None) if options.json else print
    say(
        f"{len(requests)} requests, {options.slots} slots, {options.cache} caches, "
        f"{options.strategy} on {MESHES[options.strategy]}\n"
    )
    engine.compile()
    done = serve(engine, requests, say)
    alone = make_engine(config, params, "single", options.cache, slots=1)
    different = differing(alone, requests, done)
    say(
        f"\n{len(done) - len(different)} of {len(done)} texts equal the text of the request "
        "served alone, on one device.\n"
    )
    report = engine.report()
    print(
        json.dumps({"report": report.to_json(), "different": different}, indent=1)
        if options.json
        else report
    )
    return 1 if different else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve 64 requests of all lengths together.")
    parser.add_argument(
        "--quick", action="store_true", help="a smaller model, fewer requests, no training"
    )
    parser.add_argument("--strategy", choices=MESHES, default="serve_tp")
    parser.add_argument("--cache", choices=CACHES, default="dense")
    parser.add_argument("--json", action="store_true", help="print only the figures, as JSON")
    options = parser.parse_args(argv)
    options.steps, options.requests, options.slots = (0, 12, 4) if options.quick else (60, 64, 16)
    return options


def trained(config: DecoderConfig, text: np.ndarray, steps: int) -> Any:
    """Train a few steps on one device, and return the weights on the host."""
    trainer = make_trainer(
        sw.Strategy.preset("single"), config, optax.adamw(3e-3), mesh=cpu_mesh(MESHES["single"])
    )
    batches = itertools.islice(text_batches(text, batch=16, length=64, seed=0), steps)
    state = train(trainer, trainer.init(0), batches, on_step=lambda loss: None).state
    return jax.tree.map(np.asarray, state["params"])


def make_requests(text: np.ndarray, count: int) -> list[Request]:
    """Return requests with prompts of 1 to 80 bytes and 1 to 40 new bytes."""
    draw = np.random.default_rng(0)
    requests = []
    for number in range(count):
        start, length = int(draw.integers(0, len(text) - 80)), int(draw.integers(1, 81))
        sampling = (
            Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=number)
            if number % 2
            else Sampling()
        )
        requests.append(
            Request(
                prompt=text[start : start + length],
                max_new_tokens=int(draw.integers(1, 41)),
                sampling=sampling,
                stop=[b"\n\n"],
            )
        )
    return requests


def make_engine(
    config: DecoderConfig, params: Any, strategy: str, cache: str, *, slots: int
) -> Engine:
    """Return an engine under a preset, with the weights placed accordingly."""
    pm = sw.PartitionManager(sw.Strategy.preset(strategy), mesh=cpu_mesh(MESHES[strategy]))
    weights = pm.shard(params, decoder_specs(config), role="param")
    shape = cache_shape(config, window=WINDOW if cache == "sliding" else None)
    rows = max(1, slots // 2)
    sizes = {"slots": slots, "prefill_rows": rows, "prefill_chunk": CHUNK} | CACHES[cache]
    return Engine(served(config), weights, shape=shape, cache=cache, manager=pm, **sizes)


def serve(engine: Engine, requests: Sequence[Request], say: Any) -> list[Completion]:
    """Serve all requests, stream the first ones, and cancel one."""
    handles = [engine.submit(request) for request in requests]
    for number in STREAMED:
        text = bytearray()
        for token in handles[number]:
            text.append(token)
            if number == STREAMED[0] and len(text) == 2:
                handles[CANCELED].cancel()
        say(f"request {number}: {bytes(requests[number].prompt)[-24:]!r} -> {bytes(text)!r}")
    return [handle.result() for handle in handles]


def differing(alone: Engine, requests: Sequence[Request], done: Sequence[Completion]) -> list[int]:
    """Return the numbers of the requests whose text differs if they are served alone.

    For a canceled request, only the tokens before its end are compared.
    """
    different = []
    for number, (request, completion) in enumerate(zip(requests, done, strict=True)):
        tokens = alone.submit(request).result().tokens
        if completion.tokens != (
            tokens[: len(completion.tokens)] if completion.finish is Finish.CANCELED else tokens
        ):
            different.append(number)
    return different


if __name__ == "__main__":
    sys.exit(main())
