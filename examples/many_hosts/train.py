"""Train on all hosts of a job, save, and continue after a preemption: the script of each process.

    python examples/many_hosts/train.py CHECKPOINTS [--steps N] [--every N] [--strategy FILE]

A launcher starts this script once per host: docs/many-hosts.md shows Slurm, Kubernetes, TPU pods
and Ray. If the job is started again, it continues from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import numpy as np
import optax

import shardwright as sw
from shardwright import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from decoder.config import DecoderConfig, decoder_specs
from decoder.text import stdlib_text, text_batches
from decoder.train import make_trainer

CONFIG = DecoderConfig(embed=64, mlp=128)
BATCH, LENGTH = 16, 32


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on all hosts of a job.")
    parser.add_argument("checkpoints", help="a folder that all hosts see")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--every", type=int, default=5, help="steps from one checkpoint to the next"
    )
    parser.add_argument("--strategy", default="fsdp", help="a preset, or a file")
    options = parser.parse_args()

    jax.distributed.initialize()  # finds Slurm, Cloud TPU and JobSet by itself
    strategy = sw.Strategy.read(options.strategy)
    mesh = sw.create_mesh("fsdp:-1")  # all devices of all hosts
    optimizer, specs = optax.adamw(1e-2), decoder_specs(CONFIG)
    trainer = make_trainer(strategy, CONFIG, optimizer, mesh=mesh)
    # `with` waits until all processes have entered an equal manager. If another process dies, the
    # watchdog ends this process, so that the launcher can start the job again.
    with sw.PartitionManager(strategy, mesh=mesh, mode="train", watchdog=60) as pm:
        saved = checkpoint.steps(options.checkpoints)
        if saved:
            target = {"params": pm.abstract(specs), "opt": pm.abstract_state(optimizer, specs)}
            state, begin = checkpoint.restore(options.checkpoints, target), saved[-1]
        else:
            state, begin = trainer.init(seed=0), 0
        batches = text_batches(stdlib_text(200_000), batch=BATCH, length=LENGTH, seed=0)
        for step, batch in zip(range(options.steps), batches, strict=False):
            if step < begin:
                continue  # a real input pipeline saves its position instead
            count, rank = jax.process_count(), jax.process_index()
            rows = {name: np.split(each, count)[rank] for name, each in batch.items()}
            state, loss = trainer.step(state, trainer.place(rows))
            if rank == 0:
                print(f"step {step} loss {float(loss):.5f}", flush=True)
            if (step + 1) % options.every == 0:
                checkpoint.save(options.checkpoints, state, step=step + 1)


if __name__ == "__main__":
    main()
