"""Training: one jitted step with donated state, sharded by the strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import optax

import shardwright as sw
from decoder.config import DecoderConfig, decoder_specs
from decoder.model import next_byte_loss

BATCH_AXES = (sw.BATCH, sw.LENGTH)
State = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A model in training on one mesh.

    Attributes:
      pm: The manager, in train mode.
      config: Sizes.
      optimizer: Any optax transformation.
      step: Jitted `(state, batch) -> (state, loss)`; it donates the state.
    """

    pm: sw.PartitionManager
    config: DecoderConfig
    optimizer: optax.GradientTransformation
    step: Callable[[State, Any], tuple[State, jax.Array]]

    def init(self, seed: int) -> State:
        """Return new parameters and optimizer state. The values depend only on the seed."""
        return self.start(self.pm.init(decoder_specs(self.config), jax.random.key(seed)))

    def start(self, params: Any) -> State:
        """Return parameters, sharded as this strategy stores them, and new optimizer state."""
        specs = decoder_specs(self.config)
        params = self.pm.shard(params, specs, role="param")
        return {"params": params, "opt": self.pm.init_state(self.optimizer, params, specs)}

    def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Build the global batch from the rows that each process has loaded."""
        rows = jax.process_count()
        return {
            name: self.pm.global_array(
                part, BATCH_AXES, global_shape=(rows * part.shape[0], part.shape[1])
            )
            for name, part in batch.items()
        }


def make_trainer(
    strategy: sw.Strategy,
    config: DecoderConfig,
    optimizer: optax.GradientTransformation,
    *,
    mesh: Any = None,
) -> Trainer:
    """Build the training step of a strategy.

    Args:
      strategy: Decides the shardings.
      config: Sizes.
      optimizer: Any optax transformation.
      mesh: Defaults to the mesh of the strategy.

    Raises:
      ShardingError: Parameters do not fit the strategy. The error lists all of them, each with its
        path, rule and fix.
    """
    pm = sw.PartitionManager(strategy, mesh=mesh, mode="train")
    specs = decoder_specs(config)
    state = {"params": pm.abstract(specs), "opt": pm.abstract_state(optimizer, specs)}
    step = pm.jit_step(train_step(config, optimizer), state, BATCH_AXES)
    return Trainer(pm=pm, config=config, optimizer=optimizer, step=step)


def train_step(
    config: DecoderConfig, optimizer: optax.GradientTransformation
) -> Callable[[State, Any], tuple[State, jax.Array]]:
    """Return the step as a plain function."""

    def step(state: State, batch: dict[str, jax.Array]) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(next_byte_loss)(state["params"], batch, config)
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The state after the last step, and the loss at each step in nats per byte."""

    state: State
    losses: tuple[float, ...]


def train(
    trainer: Trainer,
    state: State,
    batches: Iterable[dict[str, np.ndarray]],
    *,
    on_step: Callable[[float], None] = print,
) -> Trained:
    """Train one step per batch; the given state is donated.

    Raises:
      IndivisibleError: A batch does not divide over the mesh.
    """
    losses = []
    for batch in batches:
        state, loss = trainer.step(state, trainer.place(batch))
        losses.append(float(loss))
        on_step(losses[-1])
    return Trained(state=state, losses=tuple(losses))
