"""The demo's model computes the same sharded and unsharded, on every mesh of 8 devices.

The meshes are all factorizations of 8 as dp * fsdp * sp * ep * tp.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import numpy as np
import optax
import pytest
from decoder.config import DecoderConfig, decoder_specs
from decoder.model import forward, next_byte_loss
from decoder.text import stdlib_text, text_batches
from decoder.train import make_trainer
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.layers.loss import LOGITS
from shardwright.testing.meshes import cpu_mesh

pytestmark = pytest.mark.full

NAMES = ("dp", "fsdp", "sp", "ep", "tp")
ALL = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=5) if math.prod(sizes) == 8]
# Each mesh axis alone, then the ways in which two or three of them meet in one array.
EIGHT = [
    (8, 1, 1, 1, 1),
    (1, 8, 1, 1, 1),
    (1, 1, 8, 1, 1),
    (1, 1, 1, 1, 8),
    (1, 2, 1, 1, 4),
    (1, 2, 2, 1, 2),
    (2, 2, 1, 1, 2),
    (2, 1, 1, 2, 2),
]
# Also the axis that no array of this decoder has, and each two axes that do not meet above.
CHOSEN = [*EIGHT, (1, 1, 1, 8, 1), (4, 1, 2, 1, 1), (1, 1, 2, 2, 2), (1, 2, 1, 4, 1)]
CONFIG = DecoderConfig(layers=1, embed=32, heads=8, kv_heads=4, head_dim=8, mlp=64)
# adamw divides a gradient by its own size. Without eps, rounding noise in a gradient near 0 would
# become a whole step.
OPTIMIZER = optax.adamw(1e-2, eps=1e-4)


def text_of(sizes: tuple[int, ...]) -> str:
    return ",".join(f"{name}:{size}" for name, size in zip(NAMES, sizes, strict=True))


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    return next(text_batches(stdlib_text(50_000), batch=8, length=16, seed=5))


@pytest.fixture(scope="module")
def unsharded(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Everything on one device."""
    trainer = make_trainer(sw.Strategy.preset("single"), CONFIG, OPTIMIZER)
    with trainer.pm:
        state = trainer.init(0)
        logits, _ = jax.jit(forward, static_argnums=2)(state["params"], batch["inputs"], CONFIG)
        loss, gradients = jax.jit(jax.value_and_grad(next_byte_loss), static_argnums=2)(
            state["params"], batch, CONFIG
        )
        before = jax.tree.map(np.asarray, state["params"])
        after, _ = trainer.step(state, trainer.place(batch))
    actual = {
        "params": before,
        "logits": logits,
        "loss": loss,
        "gradients": gradients,
        "after": after,
    }
    return jax.tree.map(np.asarray, actual)


def test_there_are_35_factorizations() -> None:
    assert len(ALL) == 35
    assert set(CHOSEN) <= set(ALL)


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(sizes, marks=() if sizes in CHOSEN else pytest.mark.product) for sizes in ALL],
    ids=text_of,
)
def test_logits(
    sizes: tuple[int, ...], batch: dict[str, np.ndarray], unsharded: dict[str, Any]
) -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=cpu_mesh(text_of(sizes))).for_mode(
        "train"
    )
    with pm:
        params = pm.shard(unsharded["params"], decoder_specs(CONFIG), role="param")
        logits, _ = jax.jit(forward, static_argnums=2)(
            params, pm.shard(batch["inputs"], sw.BATCH, sw.LENGTH), CONFIG
        )
    size = dict(zip(NAMES, sizes, strict=True))
    rows = tuple(axis for axis in ("dp", "fsdp") if size[axis] > 1)
    expected = [rows, *("sp" if size["sp"] > 1 else None,), *("tp" if size["tp"] > 1 else None,)]
    assert logits.sharding.is_equivalent_to(jax.NamedSharding(pm.mesh, P(*expected)), 3)
    assert pm.resolve(LOGITS, shape=logits.shape) == logits.sharding.spec
    np.testing.assert_allclose(np.asarray(logits), unsharded["logits"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", EIGHT, ids=text_of)
def test_gradient_and_update(
    sizes: tuple[int, ...], batch: dict[str, np.ndarray], unsharded: dict[str, Any]
) -> None:
    trainer = make_trainer(
        sw.Strategy.preset("fsdp_tp"), CONFIG, OPTIMIZER, mesh=cpu_mesh(text_of(sizes))
    )
    with trainer.pm:
        state = trainer.init(0)
        placed = trainer.place(batch)
        loss, gradients = jax.jit(jax.value_and_grad(next_byte_loss), static_argnums=2)(
            state["params"], placed, CONFIG
        )
        jax.tree.map(np.testing.assert_array_equal, state["params"], unsharded["params"])
        after, loss_of_step = trainer.step(state, placed)
    np.testing.assert_allclose(loss, unsharded["loss"], rtol=2e-6)
    np.testing.assert_allclose(loss_of_step, unsharded["loss"], rtol=2e-6)
    for gradient, param in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(after["params"]), strict=True
    ):
        assert gradient.sharding.is_equivalent_to(param.sharding, gradient.ndim)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6),
        gradients,
        unsharded["gradients"],
    )
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5),
        after,
        unsharded["after"],
    )
    moved = jax.tree.map(
        lambda new, old: float(np.max(np.abs(np.asarray(new) - old))),
        after["params"],
        unsharded["params"],
    )
    assert min(jax.tree.leaves(moved)) > 1e-4
