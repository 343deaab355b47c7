"""A train step of the blocks compiles to the program of a hand-written decoder.

Attention is `vanilla`, which is a few lines in plain JAX; other implementations are kernels of
their own.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import shardwright as sw
from shardwright.layers import attention_block, embedding, loss, mlp_block, norm, transformer_block
from tests import programs
from tests.layers import blocks, hand_written

CONFIG = transformer_block.TransformerConfig(
    layers=2,
    attention=attention_block.AttentionConfig(embed=32, heads=8, kv_heads=4, head_dim=8),
    mlp=mlp_block.MlpConfig(embed=32, hidden=64),
)
OPTIMIZER = optax.adamw(1e-3)


def specs_of(config: transformer_block.TransformerConfig) -> dict[str, Any]:
    layers = transformer_block.specs(config)
    return {
        "table": embedding.specs(256, 32),
        "layers": layers[0] if config.scan else layers,
        "norm": norm.specs(norm.RMS, 32),
    }


def program_of_blocks(preset: str, *, scan: bool) -> tuple[Any, Any]:
    """Return the compiled step of the blocks, and its arguments."""
    config = dataclasses.replace(CONFIG, scan=scan)
    specs = specs_of(config)

    def mean_loss(params: Any, batch: Any) -> Any:
        x = embedding.apply(params["table"], batch["inputs"])
        layers = [params["layers"]] if scan else params["layers"]
        x, _ = transformer_block.apply(config, layers, x)
        x = norm.apply(norm.RMS, sw.gather(params["norm"], specs["norm"]), x)
        return loss.cross_entropy(x, params["table"], batch["targets"], tied=True).mean

    def step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(mean_loss)(state["params"], batch)
        updates, opt = OPTIMIZER.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    strategy = sw.Strategy.preset(preset) | sw.Strategy(attention={"train": "vanilla"})
    pm = sw.PartitionManager(strategy, mesh=blocks.make_manager(preset, "auto").mesh, mode="train")
    state = {"params": pm.abstract(specs), "opt": pm.abstract_state(OPTIMIZER, specs)}
    axes = (sw.BATCH, sw.LENGTH)
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32, sharding=pm.sharding(*axes, shape=(8, 16)))
    arguments = (state, {"inputs": tokens, "targets": tokens})
    return pm.jit_step(step, state, axes).lower(*arguments).compile(programs.OPTIONS), arguments


def program_by_hand(preset: str, arguments: Any, *, scan: bool, **changed: Any) -> Any:
    model = hand_written.HandWritten(
        mesh=blocks.make_manager(preset, "auto").mesh,
        specs=dataclasses.replace(hand_written.SPECS[preset], **changed),
        layers=CONFIG.layers,
        scan=scan,
    )
    return model.train_step(OPTIMIZER).lower(*arguments).compile(programs.OPTIONS)


@pytest.mark.full(but=["True-fsdp_tp"])
@pytest.mark.parametrize("preset", hand_written.SPECS)
@pytest.mark.parametrize("scan", [False, True])
def test_train_step_equals_hand_written(preset: str, scan: bool) -> None:
    ours, arguments = program_of_blocks(preset, scan=scan)
    programs.assert_same(ours, program_by_hand(preset, arguments, scan=scan))


@pytest.mark.full
def test_changed_spec_changes_program() -> None:
    """The comparison sees what it is for: the same model with one spec changed differs."""
    ours, arguments = program_of_blocks("fsdp_tp", scan=True)
    other = program_by_hand("fsdp_tp", arguments, scan=True, hidden=jax.P("fsdp"))
    assert programs.text_of(ours) != programs.text_of(other)


def test_hand_written_model_is_independent() -> None:
    tree = ast.parse(Path(hand_written.__file__).read_text(encoding="utf-8"))
    modules = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "shardwright" not in {name.split(".")[0] for name in modules}
