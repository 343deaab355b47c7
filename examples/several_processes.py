"""Train in several processes, lose one, go on with fewer, and serve.

    python examples/several_processes.py [--processes 2 4] [--steps N]

Local processes with four virtual CPU devices each take the place of hosts. They train under
`fsdp_tp` and save half-way. Then the last process is killed. Each of the other processes has a
watchdog, which says so and ends that process. Half as many processes restore the checkpoint and
train on. One process serves. The demo fails unless the losses equal those of one process that was
never interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from decoder.config import DecoderConfig, decoder_specs
from decoder.serve import generate, make_server
from decoder.text import stdlib_text, text_batches
from decoder.train import make_trainer

import shardwright as sw
from shardwright import checkpoint

CONFIG = DecoderConfig(embed=64, mlp=128)
BATCH, LENGTH, SEED, WATCHDOG_S = 16, 32, 0, 8
# A float32 sum in another order rounds differently, by about 1e-6 of the loss.
TOLERANCE = 2e-5
PROMPTS = (b"import ", b"def __init__(self", b"    return self.", b"# Copyright ")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train in several processes, and lose one.")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], help="(2 4)")
    parser.add_argument("--steps", type=int, default=6, help="steps in all (6)")
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.work:
        address, count, rank, folder, fails = options.work
        return work(address, int(count), int(rank), folder, options.steps, fails == "fails")
    with tempfile.TemporaryDirectory() as folder:
        expected = losses_of(launch(1, f"{folder}/1", options.steps))
        print(f"1 process:  losses {text_of(expected)}", flush=True)
        wrong = [
            f"{count} processes: {problem}"
            for count in options.processes
            for problem in lose_one(count, f"{folder}/{count}", options.steps, expected)
        ]
    print("\n".join(["FAILED", *wrong]) if wrong else "All losses agree.")
    return 1 if wrong else 0


def lose_one(count: int, folder: str, steps: int, expected: dict[int, float]) -> Iterator[str]:
    """Train in some processes, lose one, and continue with half of them; yield what is wrong."""
    begun = time.monotonic()
    ended = launch(count, folder, steps, fails=True)
    first = losses_of(ended)
    print(f"{count} processes: losses {text_of(first)}; then process {count - 1} was killed")
    for process in ended[:-1]:
        said = [line for line in process.stdout.splitlines() if "watchdog" in line]
        print(f"  {said[0] if said else process.stdout}")
        if not said or "no sign of life" not in said[0]:
            yield "a process did not say who is missing"
    half = max(1, count // 2)
    rest = losses_of(launch(half, folder, steps))
    seconds = time.monotonic() - begun
    print(f"  restarted with {half}: losses {text_of(rest)} ({seconds:.0f} s)", flush=True)
    if sorted({**first, **rest}) != sorted(expected) or min(rest, default=0) != steps // 2:
        yield f"steps {sorted(first)} and {sorted(rest)} were made"
    for step, loss in [*first.items(), *rest.items()]:
        if abs(loss - expected[step]) > TOLERANCE * expected[step]:
            yield f"step {step} has loss {loss}, not {expected[step]}"


def launch(
    count: int, folder: str, steps: int, *, fails: bool = False
) -> list[subprocess.CompletedProcess[str]]:
    """Run this file in some processes until all have ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "XLA_FLAGS": ""}
    options, how = ["--steps", str(steps), "--work", address], "fails" if fails else "works"
    commands = [
        [sys.executable, __file__, *options, str(count), str(rank), folder, how]
        for rank in range(count)
    ]
    with tempfile.TemporaryDirectory() as outputs:
        files = [Path(outputs, str(rank)) for rank in range(count)]
        running = []
        for command, file in zip(commands, files, strict=True):
            with file.open("w") as stream:
                running.append(
                    subprocess.Popen(
                        command, env={**os.environ, **cpu}, stdout=stream, stderr=subprocess.STDOUT
                    )
                )
        return [
            subprocess.CompletedProcess(process.args, process.wait(), file.read_text())
            for process, file in zip(running, files, strict=True)
        ]


def losses_of(ended: list[subprocess.CompletedProcess[str]]) -> dict[int, float]:
    """Return the losses that process 0 printed, and what the server wrote."""
    lines = [line for line in ended[0].stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit("\n".join(process.stdout for process in ended))
    for line in ended[0].stdout.splitlines():
        if line.startswith("serves"):
            print(f"  {line}")
    return {step: loss for line in lines for step, loss in [json.loads(line).values()]}


def text_of(losses: dict[int, float]) -> str:
    return ", ".join(f"{loss:.5f}" for loss in losses.values())


def work(address: str, count: int, rank: int, folder: str, steps: int, fails: bool) -> int:
    """Train as one of `count` processes. Start from the checkpoint if there is one."""
    if count > 1:
        jax.distributed.initialize(address, count, rank)
    mesh = sw.create_mesh(f"dp:1,fsdp:{count},tp:4")
    strategy, optimizer = sw.Strategy.preset("fsdp_tp"), optax.adamw(1e-2)
    trainer = make_trainer(strategy, CONFIG, optimizer, mesh=mesh)
    specs = decoder_specs(CONFIG)
    watched = sw.PartitionManager(strategy, mesh=mesh, mode="train", watchdog=WATCHDOG_S)
    with watched as pm:  # waits until all processes have entered it
        state, begin = trainer.init(SEED), 0
        pm.agree(state["params"], specs)
        if checkpoint.steps(folder):
            begin = checkpoint.steps(folder)[-1]
            target = {"params": pm.abstract(specs), "opt": pm.abstract_state(optimizer, specs)}
            state = checkpoint.restore(folder, target)
        for step, rows in enumerate(rows_of(rank, count, steps)):
            if step < begin:
                continue
            if step == steps // 2 and step > begin and count > 1:
                checkpoint.save(folder, state, step=step)
                if fails and rank == count - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            state, loss = trainer.step(state, trainer.place(rows))
            if rank == 0:
                print(json.dumps({"step": step, "loss": float(loss)}), flush=True)
            loss.block_until_ready()
    if count == 1:
        serve(state["params"])
    return 0


def rows_of(rank: int, count: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield this process's part of each batch. The batches do not depend on the processes."""
    batches = text_batches(stdlib_text(200_000), batch=BATCH, length=LENGTH, seed=SEED)
    for _, batch in zip(range(steps), batches, strict=False):
        yield {name: np.split(rows, count)[rank] for name, rows in batch.items()}


def serve(params: dict[str, Any]) -> None:
    """Serve the trained parameters under `serve_tp`, and say how much was written."""
    mesh = sw.create_mesh("dp:1,tp:4")
    server = make_server(
        sw.Strategy.preset("serve_tp"),
        CONFIG,
        slots=4,
        capacity=64,
        prompt_length=32,
        mesh=mesh,
    )
    served = server.pm.reshard(params, decoder_specs(CONFIG))
    texts = generate(server, served, PROMPTS, new_bytes=8)
    print(f"serves {len(texts)} prompts: {sum(map(len, texts))} bytes", flush=True)


if __name__ == "__main__":
    sys.exit(main())
