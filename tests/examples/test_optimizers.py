"""Ten optimizers on the demo's parameters.

A moment is replicated only as its parameter is, and training equals training on one device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from decoder.config import DecoderConfig, decoder_specs
from decoder.model import next_byte_loss
from decoder.text import stdlib_text, text_batches
from optax import contrib

import shardwright as sw
from shardwright.plan import bytes_by_path
from shardwright.resolution.rules import parse_rule

STRATEGIES = Path(__file__).parents[2] / "examples" / "strategies"
TINY = DecoderConfig(layers=1, embed=32, heads=8, kv_heads=4, head_dim=8, mlp=64)
SPECS = decoder_specs(TINY)
STEPS = 20
DDP = sw.Strategy.preset("ddp") | sw.Strategy(mesh={"dp": 8})


def by_rank() -> Any:
    def labels(params: Any) -> Any:
        return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "rest", params)

    return optax.partition(
        {"matrix": optax.sgd(0.1, momentum=0.9), "rest": optax.adam(1e-2)}, labels
    )


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "sgd momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adagrad": lambda: optax.adagrad(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-3, momentum=0.9),
    "lamb": lambda: optax.lamb(1e-2),
    "schedule_free": lambda: contrib.schedule_free_adamw(1e-2),
    "accumulated": lambda: optax.MultiSteps(
        optax.adamw(1e-2), every_k_schedule=2
    ).gradient_transformation(),
    "guarded": lambda: optax.apply_if_finite(
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2), 3
    ),
    "by rank": by_rank,
    "noisy": lambda: optax.chain(
        optax.add_noise(1e-6, 0.55, key=jax.random.key(0)), optax.adamw(1e-2)
    ),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=32, momentum=0.9),
    "sm3": lambda: optax.sm3(0.1),
    "history": lambda: optax.chain(optax.scale_by_lbfgs(memory_size=3), optax.sgd(3e-2)),
}
SUMS = ("adafactor", "sm3")


def held(name: str, strategy: sw.Strategy, mesh: Any, config: DecoderConfig) -> tuple[Any, Any]:
    """Bytes of the parameters and of the optimizer's state, on paper."""
    pm = sw.PartitionManager(strategy, mesh=mesh)
    specs = decoder_specs(config)
    state = jax.eval_shape(OPTIMIZERS[name]().init, pm.abstract(specs))
    shardings = pm.state_shardings(state, specs)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    return bytes_by_path(pm.abstract(specs)), bytes_by_path(state, shardings)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_moments_replicate_like_parameters(name: str) -> None:
    """Each leaf of the state is replicated over the same mesh axes as its parameter."""
    params, state = held(
        name, sw.Strategy.preset("fsdp_tp"), sw.abstract_mesh("fsdp:4,tp:2"), DecoderConfig()
    )
    by_path = {leaf.path: leaf for leaf in params.leaves}
    assert {leaf.path for leaf in params.most_replicated().leaves} == {
        path for path in by_path if path.endswith("norm/scale")
    }
    copies, sums, others = 0, 0, 0
    for leaf in state.leaves:
        owner = next(
            (item for path, item in by_path.items() if leaf.path.endswith("/" + path)), None
        )
        if owner is not None and leaf.shape[-len(owner.shape) :] == owner.shape:
            assert leaf.replicated * owner.total == owner.replicated * leaf.total
            copies += leaf.replicated
        elif leaf.total <= 16:
            others += leaf.replicated  # counts, keys, learning rates, stand-ins
        else:
            assert name in SUMS
            sums += leaf.replicated
    assert others < 4096
    norms = sum(leaf.total for leaf in state.leaves if leaf.path.endswith("norm/scale"))
    assert copies <= 7 * norms, "norms alone are replicated, by rule"
    assert sums <= 0.05 * state.held, "sums over a dim are replicated over that dim's mesh axes"
    assert state.replicated == copies + sums + others


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_zero1_replicates_no_moment(name: str) -> None:
    """Parameters are replicated: zero1 then replicates only leaves without dims, such as counts."""
    spread = sw.Strategy.preset("ddp") | sw.Strategy(policy={"zero1": "dp"})
    _, plain = held(name, sw.Strategy.preset("ddp"), sw.abstract_mesh("dp:4"), DecoderConfig())
    _, state = held(name, spread, sw.abstract_mesh("dp:4"), DecoderConfig())
    assert plain.replicated_share == pytest.approx(3 / 4)
    assert all(leaf.total <= 16 for leaf in state.most_replicated().leaves)
    assert state.replicated < 0.005 * state.held


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The demo's model on one mesh: its gradient is compiled once, whatever the optimizer."""

    pm: sw.PartitionManager
    gradient: Callable[[Any, Any], Any]
    batches: list[Any]


@functools.cache
def model(name: str) -> Model:
    pm = (
        sw.PartitionManager(sw.Strategy.load(STRATEGIES / f"{name}.toml"))
        if name != "ddp"
        else sw.PartitionManager(DDP)
    )
    shardings = pm.shardings(SPECS)
    gradient = jax.jit(
        jax.value_and_grad(lambda params, batch: next_byte_loss(params, batch, TINY)),
        out_shardings=(None, shardings),
    )
    texts = itertools.islice(text_batches(stdlib_text(50_000), batch=8, length=32, seed=1), STEPS)
    axes = sw.BATCH, sw.LENGTH
    return Model(pm=pm, gradient=gradient, batches=[pm.shard(text, axes) for text in texts])


def trained(name: str, on: str, *, zero1: str = "-") -> tuple[list[float], Any]:
    """Losses and the last state, which must keep its shardings."""
    optimizer, tx = model(on), OPTIMIZERS[name]()
    policy = dataclasses.replace(optimizer.pm.rules.policy, zero1=parse_rule(zero1))
    spread = sw.PartitionManager(
        dataclasses.replace(optimizer.pm.rules, policy=policy), mesh=optimizer.pm.mesh
    )
    placed = (
        optimizer.pm.shardings(SPECS),
        spread.state_shardings(jax.eval_shape(tx.init, optimizer.pm.abstract(SPECS)), SPECS),
    )

    def update(gradients: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(update, out_shardings=placed, donate_argnums=(1, 2))
    losses = []
    with optimizer.pm:
        params = optimizer.pm.init(SPECS, jax.random.key(7))
        state = jax.jit(tx.init, out_shardings=placed[1])(params)
        for batch in optimizer.batches:
            loss, gradients = optimizer.gradient(params, batch)
            params, state = jitted(gradients, state, params)
            losses.append(float(loss))
    assert jax.tree.map(lambda leaf: leaf.sharding, (params, state)) == placed
    assert min(losses) < losses[0]  # the last batch may be a hard one
    return losses, state


@pytest.mark.full
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_twenty_steps_equal_one_device(name: str) -> None:
    sharded, single = trained(name, "fsdp_tp"), trained(name, "single")
    # L-BFGS divides by differences of gradients, which magnifies their rounding.
    rtol = 1e-4 if name == "history" else 1e-5
    np.testing.assert_allclose(sharded[0], single[0], rtol=rtol)


@pytest.mark.full
@pytest.mark.parametrize("name", ["adamw", "adafactor", "sm3", "schedule_free"])
def test_twenty_steps_with_zero1_are_equal(name: str) -> None:
    spread, plain = trained(name, "ddp", zero1="dp | -"), trained(name, "ddp")
    np.testing.assert_allclose(spread[0], plain[0], rtol=1e-5)
    assert (
        bytes_by_path(spread[1]).replicated_share < 0.2 < bytes_by_path(plain[1]).replicated_share
    )
