"""Train, push the weights to a running engine, generate, score, and train on the best texts.

    python examples/post_training.py [--rounds N] [--quick]

Training is sharded by `fsdp_tp` and serving by `serve_tp`, on one set of eight virtual devices.
The score of a text is its share of lowercase letters. After each round of training, the weights
move to the engine without a stop: requests that are running go on with the new weights. The example
fails if an engine that was created with the last weights writes other texts.
"""

from __future__ import annotations

import argparse
import itertools
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
from decoder.train import Trainer, make_trainer, train

import shardwright as sw
from shardwright.serving import Completion, Engine, Request, Sampling
from shardwright.testing.meshes import cpu_mesh, virtual_devices

TRAIN_MESH, SERVE_MESH = "fsdp:4,tp:2", "dp:2,tp:4"
PROMPT, LENGTH, BATCH = 16, 48, 16
STEPS = 5
LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyz")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    jax.config.update("jax_platforms", "cpu")
    virtual_devices(8)  # JAX fixes the number of devices at its first operation
    config = (
        DecoderConfig(layers=1, embed=64, heads=8, kv_heads=4, head_dim=8, mlp=128)
        if options.quick
        else DecoderConfig()
    )
    text = stdlib_text(200_000)
    trainer = make_trainer(
        sw.Strategy.preset("fsdp_tp"), config, optax.adamw(3e-3), mesh=cpu_mesh(TRAIN_MESH)
    )
    batches = itertools.islice(
        text_batches(text, batch=BATCH, length=LENGTH, seed=0), options.warmup
    )
    state = train(trainer, trainer.init(0), batches, on_step=lambda loss: None).state
    engine = make_engine(config, state["params"])
    engine.compile()
    print(
        f"{'round':>5} {'version':>8} {'bytes sent':>11} {'score':>6} {'loss':>6}  during the push"
    )
    for number in range(options.rounds):
        state = run_round(number, trainer, engine, state, text)
    return check(config, engine, state["params"], text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=4, help="pushes of weights")
    parser.add_argument("--quick", action="store_true", help="a smaller model, less training")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error("--rounds is at least 1")
    options.warmup = 4 if options.quick else 60
    return options


def make_engine(config: DecoderConfig, params: Any) -> Engine:
    """Return an engine with a copy of the weights, sharded for serving."""
    pm = sw.PartitionManager(sw.Strategy.preset("serve_tp"), mesh=cpu_mesh(SERVE_MESH))
    weights = pm.reshard(params, decoder_specs(config))
    return Engine(
        served(config),
        weights,
        shape=cache_shape(config),
        manager=pm,
        slots=16,
        capacity=PROMPT + LENGTH,
        prefill_rows=8,
        prefill_chunk=PROMPT,
    )


def run_round(number: int, trainer: Trainer, engine: Engine, state: Any, text: np.ndarray) -> Any:
    """Push the weights while a request runs, generate, score, and train on the best half."""
    running = engine.submit(make_requests(text, seed=1000 + number)[0])
    for _ in range(4):
        engine.step()
    update = engine.update_params(state["params"])
    requests = make_requests(text, seed=number)
    texts = engine.run(requests)
    best = sorted(zip(requests, texts, strict=True), key=lambda pair: -score(pair[1]))
    rows = [[*request.prompt, *done.tokens] for request, done in best[: len(best) // 2]]
    windows = np.array(rows, np.int32)
    batch = {"inputs": windows[:, :-1], "targets": windows[:, 1:]}
    trained = train(trainer, state, [batch] * STEPS, on_step=lambda loss: None)
    mean = sum(map(score, texts)) / len(texts)
    versions = " then ".join(map(str, running.result().versions))
    print(
        f"{number + 1:5} {update.version:8} {update.bytes_sent:11,} {mean:6.3f} "
        f"{trained.losses[-1]:6.3f}  a request ran with version {versions}"
    )
    return trained.state


def make_requests(text: np.ndarray, *, seed: int) -> list[Request]:
    """Return two requests per row of a batch, because only half of the texts are trained on."""
    draw = np.random.default_rng(seed)
    starts = draw.integers(0, len(text) - PROMPT, size=2 * BATCH)
    return [
        Request(
            prompt=text[start : start + PROMPT],
            max_new_tokens=LENGTH,
            sampling=Sampling(temperature=1.0, seed=int(start)),
        )
        for start in starts
    ]


def score(done: Completion) -> float:
    """Return the share of lowercase letters."""
    return sum(token in LETTERS for token in done.tokens) / len(done.tokens)


def check(config: DecoderConfig, engine: Engine, params: Any, text: np.ndarray) -> int:
    """Push the last weights, and compare with an engine that was created with them."""
    engine.update_params(params)
    requests = make_requests(text, seed=0)[:4]
    pushed, created = (
        [done.tokens for done in each.run(requests)]
        for each in (engine, make_engine(config, params))
    )
    if pushed != created:
        print("FAILED: an engine that was created with the last weights writes other texts.")
        return 1
    print("An engine that was created with the last weights writes the same texts.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
