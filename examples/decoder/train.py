"""Training: one jitted step with donated state, everything placed by the strategy."""

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
      pm: the manager, in train mode.
      config: sizes.
      optimizer: any optax transformation.
      shardings: where parameters and optimizer state lie.
      step: jitted `(state, batch) -> (state, loss)`; the state is donated.
    """

    pm: sw.PartitionManager
    config: DecoderConfig
    optimizer: optax.GradientTransformation
    shardings: State
    step: Callable[[State, Any], tuple[State, jax.Array]]

    def init(self, seed: int) -> State:
        """Return fresh parameters and optimizer state; the values depend on the seed alone, not on the mesh."""
        with self.pm:
            params = self.pm.init(decoder_specs(self.config), jax.random.key(seed))
            return {
                "params": params,
                "opt": jax.jit(self.optimizer.init, out_shardings=self.shardings["opt"])(params),
            }

    def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Build the global batch from what each process has loaded."""
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
    """Build the training step of a strategy, on its own mesh unless another is given.

    Raises:
      ShardingError: a parameter does not fit the strategy; all of them at once, each with its path,
        rule and fix.
    """
    pm = sw.PartitionManager(strategy, mesh=mesh).for_mode("train")
    specs = decoder_specs(config)
    params = pm.abstract(specs)
    opt = jax.eval_shape(optimizer.init, params)
    shardings = {"params": pm.shardings(specs), "opt": pm.state_shardings(opt, specs)}
    step = jax.jit(
        train_step(config, optimizer),
        in_shardings=(shardings, pm.sharding(BATCH_AXES)),
        out_shardings=(shardings, pm.sharding(())),
        donate_argnums=0,
    )
    return Trainer(pm=pm, config=config, optimizer=optimizer, shardings=shardings, step=step)


def train_step(
    config: DecoderConfig, optimizer: optax.GradientTransformation
) -> Callable[[State, Any], tuple[State, jax.Array]]:
    """Return the step as a plain function, to be jitted under a manager."""

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
    """Train a step per batch, from a state that is used up.

    Raises:
      IndivisibleError: a batch does not divide over the mesh.
    """
    losses = []
    with trainer.pm:
        for batch in batches:
            state, loss = trainer.step(state, trainer.place(batch))
            losses.append(float(loss))
            on_step(losses[-1])
    return Trained(state=state, losses=tuple(losses))
