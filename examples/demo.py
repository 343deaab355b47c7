"""Train one decoder under four strategy files and serve it under a fifth.

    python examples/demo.py [--quick] [--steps N] [--batch N]

Eight virtual CPU devices take the place of eight accelerators. Only the strategy file differs
between runs. The demo fails unless losses and texts agree.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

try:
    import optax
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ModuleNotFoundError as error:
    sys.exit(
        f"The demo needs {(error.name or '').partition('.')[0]}: run "
        'python -m pip install -e ".[demo]" in the clone, or make demo.'
    )

from decoder import report
from decoder.config import DecoderConfig, decoder_specs
from decoder.model import forward
from decoder.serve import generate, make_server
from decoder.text import stdlib_text, text_batches
from decoder.train import Trained, Trainer, make_trainer, train

import shardwright as sw
from shardwright.testing.meshes import virtual_devices

Tree = dict[str, Any]
STRATEGIES = Path(__file__).parent / "strategies"
# 500 steps in five precisions take minutes, so the demo shows the committed losses.
PRECISIONS = Path(__file__).parents[1] / "benchmarks" / "results" / "fp8" / "losses.json"
TRAINED_UNDER = ("single", "fsdp", "fsdp_tp", "sequence")
CONTINUED_UNDER = "fsdp_tp"
SERVED_UNDER = ("single", "serve_tp")
# A float32 sum in another order rounds differently: by about 1e-6 of the loss over 40 steps, as
# measured.
TOLERANCE = 2e-5
SEED = 0
LENGTH, SLOTS, CAPACITY, PROMPT_LENGTH = 128, 8, 128, 64
PROMPTS = (
    b"import ",
    b"def __init__(self",
    b"    return self.",
    b"class Error(Exception):\n    ",
    b"for name in ",
    b'if __name__ == "__main__',
    b"        if not isinstance(value, int):\n            raise ",
    b"# Copyright ",
)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    jax.config.update("jax_platforms", "cpu")
    virtual_devices(8)  # JAX fixes the number of devices at its first operation
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 132)
    try:
        failures = run(options, console)
    except sw.ShardingError as error:
        console.print(f"[bold red]{type(error).__name__}[/]  {escape(str(error))}", soft_wrap=True)
        return 2
    for failure in failures:
        console.print(f"[bold red]FAILED[/] {failure}")
    return 1 if failures else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a decoder under four strategy files, serve it under a fifth."
    )
    parser.add_argument("--steps", type=int, default=None, help="steps under every strategy (40)")
    parser.add_argument(
        "--further",
        type=int,
        default=None,
        help=f"more steps under {CONTINUED_UNDER} before serving (150)",
    )
    parser.add_argument("--batch", type=int, default=8, help="windows per step (8)")
    parser.add_argument(
        "--new-bytes", type=int, default=48, help="bytes to write after each prompt (48)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="5 steps per strategy, and no further training"
    )
    options = parser.parse_args(argv)
    steps, further = (5, 0) if options.quick else (40, 150)
    options.steps = steps if options.steps is None else options.steps
    options.further = further if options.further is None else options.further
    if min(options.steps, options.batch, options.new_bytes) < 1 or options.further < 0:
        parser.error(
            "--steps, --batch and --new-bytes must be at least 1, and --further at least 0"
        )
    return options


def run(options: argparse.Namespace, console: Console) -> list[str]:
    """Train, serve, and return what failed."""
    started = time.perf_counter()
    config, text = DecoderConfig(), stdlib_text()
    count = sum(math.prod(spec.shape) for spec in jax.tree.leaves(decoder_specs(config)))
    console.print(
        f"[bold]shardwright demo[/]  JAX {jax.__version__}, {jax.device_count()} virtual CPU "
        "devices\n"
        f"One decoder source ({count:,} parameters), {len(text):,} bytes of Python's standard "
        "library, and a strategy file per run."
    )
    params, failures = train_everywhere(options, config, text, console)
    failures += serve_everywhere(options, config, params, console)
    console.print(
        (
            f"\n{'Everything agrees' if not failures else 'Ended'}, "
            f"{time.perf_counter() - started:.0f} s."
        ),
        style="bold",
    )
    tool = os.path.relpath(Path(sys.executable).with_name("shardwright"))
    heading(console, 10, "Next", "a strategy and a model of your own")
    console.print(
        f"  {tool} presets copy fsdp_tp mine.toml\n"
        f"  {tool} check mine.toml --devices 8\n"
        "  examples/strategies/*.toml     change a rule, and run the demo again\n"
        "  examples/quickstart.ipynb      break a size, read the error, fix the rule\n"
        "  docs/tutorial.md               annotate a model of your own"
    )
    return failures


def heading(console: Console, number: int, title: str, text: str = "") -> None:
    """Print the heading of a section. Each section fits a terminal of 24 lines."""
    console.print(f"\n[bold]{number}. {title}[/]  {text}".rstrip())


def train_everywhere(
    options: argparse.Namespace, config: DecoderConfig, text: np.ndarray, console: Console
) -> tuple[Tree, list[str]]:
    """Train from one seed under each strategy, compare, and return the weights to serve."""
    each = f"{options.steps} steps of {options.batch} x {LENGTH} bytes from seed {SEED}"
    heading(console, 1, "Train", f"{each}, under each strategy")
    optimizer = optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, 1e-2, 20, max(21, options.steps + options.further)),
        b2=0.95,
    )
    trainers = {name: make_trainer(load(name), config, optimizer) for name in TRAINED_UNDER}
    trained, seconds = {}, {}
    first: Tree = {}
    with progress(console) as bar:
        for name, trainer in trainers.items():
            begun, advance = (
                time.perf_counter(),
                bar(f"{name}: {report.mesh_text(trainer.pm)}", options.steps),
            )
            # `init` would give every strategy the same values. Compiling it only once saves ten
            # seconds.
            state = trainer.start(first) if first else trainer.init(SEED)
            # Keep a copy, because the step overwrites the memory of its state.
            first = first or jax.device_get(state["params"])
            batches = text_batches(text, batch=options.batch, length=LENGTH, seed=SEED)
            trained[name] = train(
                trainer,
                state,
                itertools.islice(batches, options.steps),
                on_step=advance,
            )
            seconds[name] = time.perf_counter() - begun
    managers = {name: trainer.pm for name, trainer in trainers.items()}
    losses = {name: run.losses for name, run in trained.items()}
    heading(console, 2, "Compare", "the losses of the runs, nats per byte")
    console.print(report.loss_table(losses))
    console.print(report.precision_table(json.loads(PRECISIONS.read_text(encoding="utf-8"))))
    difference = report.largest_difference(losses)
    console.print(
        f"Largest relative difference from {TRAINED_UNDER[0]} over all steps: {difference:.1e} "
        f"(at most {TOLERANCE:.0e})."
    )
    heading(console, 3, "Shardings", "the mesh axes of each dim in training, by strategy")
    console.print(report.training_table(config, managers, batch=options.batch, length=LENGTH))
    heading(console, 4, "Memory", "bytes per device in training")
    console.print(
        report.memory_table({name: run.state for name, run in trained.items()}, managers, seconds)
    )
    failures = (
        []
        if difference <= TOLERANCE
        else [f"losses differ by {difference:.1e}, more than {TOLERANCE:.0e}"]
    )
    return train_further(
        trainers[CONTINUED_UNDER], trained[CONTINUED_UNDER], options, batches, console
    ), failures


def train_further(
    trainer: Trainer,
    begun: Trained,
    options: argparse.Namespace,
    batches: Iterator[dict[str, np.ndarray]],
    console: Console,
) -> Tree:
    """Train one run further, for better text, and return its weights."""
    if not options.further:
        return begun.state["params"]
    more = f"{options.further} more steps under {CONTINUED_UNDER}, for better texts"
    heading(console, 5, "Train on", more)
    with progress(console) as bar:
        advance = bar(CONTINUED_UNDER, options.further)
        done = train(
            trainer, begun.state, itertools.islice(batches, options.further), on_step=advance
        )
    last = done.losses[-20:]
    console.print(
        f"Loss {begun.losses[-1]:.2f} -> {sum(last) / len(last):.2f} nats per byte (mean of "
        f"the last {len(last)} steps)."
    )
    return done.state["params"]


def serve_everywhere(
    options: argparse.Namespace, config: DecoderConfig, params: Tree, console: Console
) -> list[str]:
    """Serve the same weights under each serving strategy, and return how the texts differ."""
    one_by_one = f"{len(PROMPTS)} prompts are prefilled one by one, inserted into {SLOTS} slots"
    together = f"decoded together for {options.new_bytes} bytes"
    weights = f"the weights of {CONTINUED_UNDER}"
    heading(console, 6, "Serve", f"{weights}: {one_by_one}, {together}")
    sizes = {"slots": SLOTS, "capacity": CAPACITY, "prompt_length": PROMPT_LENGTH}
    servers = {name: make_server(load(name), config, **sizes) for name in SERVED_UNDER}
    texts = {}
    with progress(console) as bar:
        for name, server in servers.items():
            advance = bar(
                f"{name}: {report.mesh_text(server.pm)}", len(PROMPTS) + options.new_bytes - 1
            )
            texts[name] = generate(
                server, params, PROMPTS, new_bytes=options.new_bytes, on_step=advance
            )
    for each in servers.values():
        console.print(report.serving_memory(each, params))
    modes = f"the same tensors under {server.pm.name} in each mode (texts x new positions)"
    heading(console, 7, "Modes", modes)
    console.print(report.serving_table(config, server.pm, **sizes))
    heading(console, 8, "Ask why", "one prompt is not sharded over dp, as decode slots are")
    one_prompt = (1, PROMPT_LENGTH, config.kv_heads, config.head_dim)
    console.print(
        escape(str(server.pm.explain(report.CACHE_AXES, mode="prefill", shape=one_prompt)))
    )
    heading(console, 9, "Texts", "of both servers, greedy")
    console.print(report.text_table(PROMPTS, texts))
    failures = [
        f"slot {slot}: {' and '.join(SERVED_UNDER)} differ from byte {byte}"
        for slot, byte in enumerate(report.differing(texts))
        if byte is not None
    ]
    wrong = contradicted(config, params, texts[SERVED_UNDER[-1]])
    console.print(
        f"Checked against the model without any cache, under {SERVED_UNDER[0]}: "
        f"{len(PROMPTS) - len(wrong)} of {len(PROMPTS)} texts confirmed."
    )
    return failures + [
        f"slot {slot}: without a cache the model writes another text" for slot in wrong
    ]


def contradicted(config: DecoderConfig, params: Tree, texts: Sequence[bytes]) -> list[int]:
    """Return the slots whose text differs from that of a plain forward pass on one device."""
    pm = sw.PartitionManager(load(SERVED_UNDER[0]))
    rows = [
        np.frombuffer(prompt + text, np.uint8) for prompt, text in zip(PROMPTS, texts, strict=True)
    ]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for slot, row in enumerate(rows):
        tokens[slot, : len(row)] = row
    with pm:
        weights = pm.shard(params, decoder_specs(config), role="param")
        logits, _ = jax.jit(forward, static_argnums=2)(weights, tokens, config)
    likeliest = np.argmax(np.asarray(logits), axis=-1)
    ends = [slice(len(prompt) - 1, len(row) - 1) for prompt, row in zip(PROMPTS, rows, strict=True)]
    return [
        slot
        for slot, (row, part) in enumerate(zip(rows, ends, strict=True))
        if not np.array_equal(likeliest[slot, part], row[part.start + 1 :])
    ]


def load(name: str) -> sw.Strategy:
    return sw.Strategy.load(STRATEGIES / f"{name}.toml")


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str, int], Callable[[Any], None]]]:
    """Show progress bars. Yield a function that starts a bar and returns its update function."""
    columns = (
        TextColumn("  {task.description:28}"),
        BarColumn(30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with Progress(*columns, console=console) as bars:

        def start(name: str, total: int) -> Callable[[Any], None]:
            task = bars.add_task(name, total=total, said="")
            return lambda said: bars.update(
                task, advance=1, said=said if isinstance(said, str) else f"loss {said:.4f}"
            )

        yield start


if __name__ == "__main__":
    sys.exit(main())
