"""A decoder whose state, weights or activations are on the host trains as on the device.

CPUs compute on host arrays without a word, so a test also looks for arithmetic on host values in
the traced step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import shardwright as sw
from shardwright import checkpoint
from shardwright.layers import attention_block, embedding, loss, mlp_block, transformer_block
from shardwright.testing import cpu_mesh
from tests.layers import blocks
from tests.manager.programs import counting
from tests.manager.test_memory import host_operands, kinds

CONFIG = transformer_block.TransformerConfig(
    layers=2,
    attention=attention_block.AttentionConfig(embed=16, heads=4, kv_heads=4, head_dim=4),
    mlp=mlp_block.MlpConfig(embed=16, hidden=32),
    remat="blocks",
)
VOCAB, STEPS = 32, 20
SPECS = {
    "embedding": embedding.specs(VOCAB, 16),
    "layers": transformer_block.specs(CONFIG),
    "head": loss.specs(VOCAB, 16),
}
ADAM = optax.adamw(1e-2)
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(8, 9)).astype(np.int32)
AXES = (sw.BATCH, sw.EMPTY)
ON_HOST: dict[str, Any] = {"state": "host", "params": "host", "activations": "host"}
CELLS: dict[str, dict[str, Any]] = {**{key: {key: "host"} for key in ON_HOST}, "all": ON_HOST}


def make_manager(
    mesh: str, preset: str, memory: Any, *, axis_types: Any = "auto", **options: Any
) -> sw.PartitionManager:
    strategy = sw.Strategy.preset(preset) | sw.Strategy(memory=memory, **options)
    mode = "decode" if preset == "serve_tp" else "train"
    return sw.PartitionManager(strategy, mesh=cpu_mesh(mesh, axis_types=axis_types), mode=mode)


def mean_loss(params: Any, tokens: Any) -> jax.Array:
    x = embedding.apply(params["embedding"], tokens[:, :-1])
    x, _ = transformer_block.apply(CONFIG, params["layers"], x)
    return loss.cross_entropy(x, params["head"], tokens[:, 1:]).mean


def on_device(state: Any, tokens: Any) -> Any:
    value, grads = jax.value_and_grad(mean_loss)(state["params"], tokens)
    updates, moments = ADAM.update(grads, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, value


def by_layer(state: Any, tokens: Any) -> Any:
    value, grads = jax.value_and_grad(mean_loss)(state["params"], tokens)
    optimizer = sw.offloaded(ADAM, SPECS)
    params, moments = optimizer.apply_gradients(grads, state["moments"], state["params"])
    return {"params": params, "moments": moments}, value


def train(pm: sw.PartitionManager, step: Any) -> tuple[Any, list[float]]:
    """Train, with one compilation and no leaf that changes its memory. Return state and losses."""
    counted, traces = counting(step)
    state = abstract(pm, step)
    params = jax.device_put(blocks.random_params(SPECS), pm.shardings(SPECS))
    state["params"] = params
    state["moments"] = pm.init_state(optimizer_of(step), params, SPECS)
    before, jitted = kinds(state), pm.jit_step(counted, state, AXES)
    assert host_operands(jitted.trace(state, TOKENS).jaxpr.jaxpr) == []
    losses = []
    for _ in range(STEPS):
        state, value = jitted(state, TOKENS)
        losses.append(float(value))
        assert kinds(state) == before
    assert (len(traces), jitted._cache_size()) == (1, 1)
    return state, losses


def optimizer_of(step: Any) -> Any:
    return sw.offloaded(ADAM, SPECS) if step is by_layer else ADAM


def abstract(pm: sw.PartitionManager, step: Any) -> dict[str, Any]:
    moments = pm.abstract_state(optimizer_of(step), SPECS)
    return {"params": pm.abstract(SPECS), "moments": moments}


def assert_placed(tree: Any, targets: Any, values: Any) -> None:
    """Each leaf has the sharding and the memory of its target."""
    for found, target, value in zip(*map(jax.tree.leaves, (tree, targets, values)), strict=True):
        assert found.sharding == target.sharding
        np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.full(but=["all-auto"])
@pytest.mark.alternate
def test_training_equals_that_on_the_device(name: str, axis_types: str, tmp_path: Path) -> None:
    memory = CELLS[name]
    mesh = "fsdp:2,tp:4" if axis_types == "auto" else "fsdp:8"
    _, expected = train(make_manager(mesh, "fsdp_tp", {}, axis_types=axis_types), on_device)
    step = by_layer if "params" in memory else on_device
    pm = make_manager(mesh, "fsdp_tp", memory, axis_types=axis_types)
    state, losses = train(pm, step)
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-6)  # they fall from 4 to 0.01
    assert losses[-1] < losses[0]
    arrays = [x for x in jax.tree.leaves(state["moments"]) if x.ndim]
    assert {x.sharding.memory_kind for x in arrays} == {
        "pinned_host" if "state" in memory else "device"
    }

    checkpoint.save(tmp_path / "run", state, step=STEPS)
    other = abstract(make_manager("fsdp:8", "fsdp", memory), step)
    assert kinds(other) == kinds(state)
    assert_placed(checkpoint.restore(tmp_path / "run", other), other, state)

    served: Any = {"decode": {"memory": {"params": "device"}}}
    server = make_manager("dp:2,tp:4", "serve_tp", memory, modes=served)
    targets = server.abstract(SPECS)
    assert set(jax.tree.leaves(kinds(targets))) == {"device"}
    assert_placed(server.reshard(state["params"], SPECS), targets, state["params"])
