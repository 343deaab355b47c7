"""The demo's train and decode steps compile to the program of a hand-written model.

The hand-written model has literal specs. Attention is `vanilla`, which is a few lines in plain JAX;
other implementations are kernels of their own. With the implementation that the demo chooses by
itself, the hand-written model calls the library's attention.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from decoder.config import DecoderConfig, decoder_specs
from decoder.serve import empty_caches, make_server
from decoder.train import make_trainer
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright import attention
from shardwright.testing.meshes import cpu_mesh
from tests import programs
from tests.examples import hand_written

STRATEGIES = Path(__file__).parents[2] / "examples" / "strategies"
TINY = DecoderConfig(layers=1, embed=32, heads=8, kv_heads=4, head_dim=8, mlp=64)
DEMO = DecoderConfig()
MESHES = {
    "fsdp2_tp4": ("fsdp:2,tp:4", hand_written.FSDP2_TP4),
    "dp2_tp4": ("dp:2,fsdp:1,sp:1,ep:1,tp:4", hand_written.DP2_TP4),
    "fsdp2_sp2_tp2": ("dp:1,fsdp:2,sp:2,tp:2", hand_written.FSDP2_SP2_TP2),
}


VANILLA = sw.Strategy(attention={"train": "vanilla", "decode": "vanilla"})


def strategy_for(name: str) -> sw.Strategy:
    if name == "fsdp2_tp4":
        return sw.Strategy.load(STRATEGIES / "fsdp_tp.toml")
    return sw.Strategy.preset("fsdp_tp")


def by_hand(config: DecoderConfig, **fields: Any) -> hand_written.HandWritten:
    return hand_written.HandWritten(layers=config.layers, **fields)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param("fsdp2_tp4", TINY, id="fsdp2_tp4"),
        pytest.param("dp2_tp4", TINY, id="dp2_tp4"),
        pytest.param("fsdp2_tp4", DEMO, id="demo-fsdp2_tp4"),
        pytest.param("dp2_tp4", DEMO, id="demo-dp2_tp4"),
        pytest.param("fsdp2_sp2_tp2", DEMO, id="demo-fsdp2_sp2_tp2"),
    ],
)
def test_train_step_equals_hand_written(name: str, config: DecoderConfig) -> None:
    ours, theirs = train_steps(name, config, VANILLA)
    programs.assert_same(ours, theirs)


@pytest.mark.full
@pytest.mark.parametrize("name", MESHES)
def test_train_step_as_it_is_equals_hand_written(name: str) -> None:
    """The same without choosing an implementation of attention."""
    attend = functools.partial(attention.dot_product_attention, causal=True)
    ours, theirs = train_steps(name, DEMO, sw.Strategy(), attend=attend)
    programs.assert_same(ours, theirs)


def train_steps(
    name: str, config: DecoderConfig, own: sw.Strategy, **fields: Any
) -> tuple[Any, Any]:
    """Return the compiled train steps of the demo and of the hand-written model."""
    text, specs = MESHES[name]
    mesh, optimizer = cpu_mesh(text), optax.adamw(1e-3)
    trainer = make_trainer(strategy_for(name) | own, config, optimizer, mesh=mesh)
    params = trainer.pm.abstract(decoder_specs(config))
    tokens = jax.ShapeDtypeStruct(
        (8, 128), jnp.int32, sharding=trainer.pm.sharding(sw.BATCH, sw.LENGTH)
    )
    opt = trainer.pm.abstract_state(optimizer, decoder_specs(config))
    arguments = ({"params": params, "opt": opt}, {"inputs": tokens, "targets": tokens})
    ours = trainer.step.lower(*arguments).compile(programs.OPTIONS)
    theirs = by_hand(config, mesh=mesh, specs=specs, **fields).train_step(optimizer)
    with trainer.pm:  # for the library's attention
        return ours, theirs.lower(*arguments).compile(programs.OPTIONS)


@pytest.mark.full(but=["serve_tp"])
@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param("serve_tp", TINY, id="serve_tp"),
        pytest.param("fsdp2_tp4", TINY, id="fsdp2_tp4"),
        pytest.param("serve_tp", DEMO, id="demo-serve_tp"),
        pytest.param("fsdp2_tp4", DEMO, id="demo-fsdp2_tp4"),
        pytest.param("dp2_tp4", DEMO, id="demo-dp2_tp4"),
    ],
)
def test_decode_step_equals_hand_written(name: str, config: DecoderConfig) -> None:
    text, specs = MESHES.get(name, ("dp:2,tp:4", hand_written.DP2_TP4))
    mesh = cpu_mesh(text)
    one_prompt = sw.Strategy(
        modes={"prefill": {"batch": "-"}}
    )  # a training strategy does not say what becomes of a single prompt
    strategy = (
        sw.Strategy.load(STRATEGIES / "serve_tp.toml")
        if name == "serve_tp"
        else strategy_for(name) | one_prompt
    )
    server = make_server(
        strategy | VANILLA, config, slots=8, capacity=32, prompt_length=16, mesh=mesh
    )
    with server.pm.for_mode("decode") as decoding:
        caches = jax.tree.map(abstract, empty_caches(config, 8, 32))
        sharding = decoding.sharding(sw.BATCH, shape=(8,))
        last = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=sharding)
        arguments = (decoding.abstract(decoder_specs(config)), caches, last)
        ours = server.decode.lower(*arguments).compile(programs.OPTIONS)
    theirs = (
        by_hand(config, mesh=mesh, specs=specs)
        .decode_step()
        .lower(*arguments)
        .compile(programs.OPTIONS)
    )
    programs.assert_same(ours, theirs)


def abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


@pytest.mark.full
def test_changed_spec_changes_program() -> None:
    """The comparison sees what it is for: the same model with one spec changed differs."""
    mesh = cpu_mesh("fsdp:2,tp:4")
    pm = sw.PartitionManager(strategy_for("fsdp2_tp4"), mesh=mesh)
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32, sharding=pm.sharding(sw.BATCH, sw.LENGTH))

    def loss(specs: hand_written.Specs) -> str:
        model = by_hand(TINY, mesh=mesh, specs=specs)
        return programs.text_of(
            jax.jit(model.loss)
            .lower(pm.abstract(decoder_specs(TINY)), {"inputs": tokens, "targets": tokens})
            .compile(programs.OPTIONS)
        )

    good = loss(hand_written.FSDP2_TP4)
    assert good == loss(dataclasses.replace(hand_written.FSDP2_TP4))
    assert good != loss(dataclasses.replace(hand_written.FSDP2_TP4, hidden=P("fsdp")))


def test_hand_written_model_is_independent() -> None:
    tree = ast.parse(Path(hand_written.__file__).read_text(encoding="utf-8"))
    modules = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in modules}.isdisjoint(
        {"shardwright", "decoder", "examples"}
    )
