"""A stack of layers is restored under a pipeline with other repeats, or under none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright import checkpoint
from shardwright.errors import CheckpointError
from shardwright.interop import hf
from shardwright.layers import attention_block, embedding, mlp_block, transformer_block
from shardwright.layers import loss as losses
from shardwright.testing import cpu_mesh
from tests.interop.hf.test_decoders import write
from tests.layers import blocks
from tests.raising import raises

pytest.importorskip("orbax.checkpoint")
optax = pytest.importorskip("optax")

INIT = jax.nn.initializers.normal(1.0)
SPEC = sw.ArraySpec((4, 6), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE), INIT)


def manager(mesh: str, **pipeline: Any) -> sw.PartitionManager:
    strategy: Any = sw.Strategy.preset("fsdp_pp" if pipeline else "fsdp_tp")
    if pipeline:
        strategy |= sw.Strategy(pipeline={"microbatches": 8, **pipeline})
    strategy |= sw.Strategy(policy={"zero1": "dp | -"})
    return sw.PartitionManager(strategy, mesh=cpu_mesh(mesh), mode="train")


MANAGERS = {
    "two repeats": (manager("pp:4,fsdp:2", schedule="circular", repeats=2), 2),
    "four repeats": (manager("pp:2,fsdp:2", schedule="circular", repeats=4), 4),
    "stages": (manager("pp:2,fsdp:4", schedule="1f1b"), 1),
    "no pipeline": (manager("fsdp:4,tp:2"), 1),
}


def test_a_stack_is_restored_in_other_repeats(tmp_path: Path) -> None:
    """On devices and as NumPy arrays; without `recut` the shapes have to be equal."""
    saved = {}
    for step, (name, (pm, repeats)) in enumerate(MANAGERS.items()):
        specs = {"w": sw.stack_specs(SPEC, 8, repeats=repeats)}
        saved[name] = pm.init(specs, jax.random.key(0))["w"]
        checkpoint.save(tmp_path, {"w": saved[name]}, step=step)
    for step, first in enumerate(MANAGERS):
        for second, (pm, repeats) in MANAGERS.items():
            target = pm.abstract({"w": sw.stack_specs(SPEC, 8, repeats=repeats)})
            got = checkpoint.restore(tmp_path, target, step=step, recut=True)["w"]
            assert got.sharding == target["w"].sharding, (first, second)
            np.testing.assert_array_equal(got, saved[second])
    host = {"w": np.zeros((8, 4, 6), np.float32)}
    got = checkpoint.restore(tmp_path, host, step=0, recut=True)["w"]
    np.testing.assert_array_equal(got, saved["no pipeline"])
    with raises(CheckpointError, "[2, 4, 4, 6]", "[8, 4, 6]", path="w", fix="recut=True"):
        checkpoint.restore(tmp_path, host, step=0)
    other = {"w": np.zeros((4, 8, 6), np.float32)}
    with raises(CheckpointError, "[2, 4, 4, 6]", "[4, 8, 6]", path="w", fix="convert"):
        checkpoint.restore(tmp_path, other, step=0, recut=True)


def test_hugging_face_layers_are_cut_in_repeats(tmp_path: Path) -> None:
    """Import them, save them, and restore them under a circular pipeline."""
    pytest.importorskip("safetensors.numpy")
    write(tmp_path, "gemma3_text")
    pm, _ = MANAGERS["no pipeline"]
    params, _ = hf.load(tmp_path, pm, stack_layers=True)
    checkpoint.save(tmp_path / "saved", params, step=0)
    single, circular = hf.read(tmp_path).specs, MANAGERS["two repeats"][0]
    specs = {
        name: sw.stack_specs(single[name.replace("layers.", "layers.0.")], 8, repeats=2)
        if "layers." in name
        else single[name]
        for name in params
    }
    target = circular.abstract(specs)
    got = checkpoint.restore(tmp_path / "saved", target, step=0, recut=True)
    for name, stored in params.items():
        assert got[name].sharding == target[name].sharding
        np.testing.assert_array_equal(np.reshape(got[name], stored.shape), stored)
    assert got["model.layers.mlp.up_proj.weight"].sharding.spec[1] == "pp"


CONFIG = transformer_block.TransformerConfig(
    layers=8,
    attention=attention_block.AttentionConfig(embed=16, heads=4),
    mlp=mlp_block.MlpConfig(embed=16, hidden=32),
)
OPTIMIZER = optax.adamw(1e-2)
TOKENS = np.random.default_rng(0).integers(0, 24, (6, 32, 6))


def train(pm: sw.PartitionManager, state: Any, steps: Any) -> tuple[Any, list[float]]:
    """Run steps of a model whose table is also its head."""

    def head(table: Any, y: Any, given: Any) -> Any:
        entropy = losses.cross_entropy(y, table, given["labels"], tied=True)
        return entropy.weighted.total / given["tokens"]

    def loss(params: Any, tokens: Any) -> Any:
        return transformer_block.loss(
            CONFIG,
            params["layers"],
            embedding.apply(params["table"], tokens),
            head=head,
            head_params=params["table"],
            head_inputs={"labels": jnp.roll(tokens, -1, 1), "tokens": tokens.size},
        )[0]

    def step(params: Any, moments: Any, tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, moments = OPTIMIZER.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    values = []
    with pm:
        run, (params, moments) = jax.jit(step), state
        for number in steps:
            tokens = pm.shard(TOKENS[number], sw.BATCH, sw.QUERY_LENGTH)
            params, moments, value = run(params, moments, tokens)
            values.append(float(value))
    return (params, moments), values


def specs_of(pm: sw.PartitionManager) -> dict[str, Any]:
    with pm:
        return {"table": embedding.specs(24, 16), "layers": transformer_block.specs(CONFIG)}


@pytest.mark.full
def test_training_goes_on_under_other_pipelines(tmp_path: Path) -> None:
    """Losses are those of a run without a pipeline: tied embeddings, zero1, adam."""
    plain = MANAGERS["no pipeline"][0]
    params = plain.init(specs_of(plain), jax.random.key(0))
    start = (params, plain.init_state(OPTIMIZER, params, specs_of(plain)))
    _, wanted = train(plain, start, range(6))
    checkpoint.save(tmp_path, start, step=0)
    got: list[float] = []
    for name in ("two repeats", "stages", "no pipeline"):
        pm, done = MANAGERS[name][0], len(got)
        specs = specs_of(pm)
        target = (pm.abstract(specs), pm.abstract_state(OPTIMIZER, specs))
        state = checkpoint.restore(tmp_path, target, step=done, recut=True)
        state, values = train(pm, state, range(done, done + 2))
        got += values
        checkpoint.save(tmp_path, state, step=len(got))
    blocks.assert_close(np.array(got), np.array(wanted), rtol=1e-5)
