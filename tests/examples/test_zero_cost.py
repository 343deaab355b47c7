"""The demo's train and decode steps compile to the program of a hand-written model.

The hand-written model has literal specs.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from decoder.cache import cache_specs
from decoder.config import DecoderConfig, decoder_specs
from decoder.serve import make_server
from decoder.train import make_trainer
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.testing.meshes import cpu_mesh
from tests import programs
from tests.examples import hand_written

# Programs of several seconds; the parts are tested by themselves.
pytestmark = pytest.mark.wide

STRATEGIES = Path(__file__).parents[2] / "examples" / "strategies"
TINY = DecoderConfig(layers=1, embed=32, heads=8, kv_heads=4, head_dim=8, mlp=64)
DEMO = DecoderConfig()
MESHES = {
    "fsdp2_tp4": ("fsdp:2,tp:4", hand_written.FSDP2_TP4),
    "dp2_tp4": ("dp:2,fsdp:1,sp:1,ep:1,tp:4", hand_written.DP2_TP4),
    "fsdp2_sp2_tp2": ("dp:1,fsdp:2,sp:2,tp:2", hand_written.FSDP2_SP2_TP2),
}


def strategy_for(name: str) -> sw.Strategy:
    return (
        sw.Strategy.load(STRATEGIES / "fsdp_tp.toml")
        if name == "fsdp2_tp4"
        else sw.Strategy.preset("fsdp_tp")
    )


@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param("fsdp2_tp4", TINY, id="fsdp2_tp4"),
        pytest.param("dp2_tp4", TINY, id="dp2_tp4", marks=pytest.mark.slow),
        pytest.param("fsdp2_tp4", DEMO, id="demo-fsdp2_tp4", marks=pytest.mark.slow),
        pytest.param("dp2_tp4", DEMO, id="demo-dp2_tp4", marks=pytest.mark.slow),
        pytest.param("fsdp2_sp2_tp2", DEMO, id="demo-fsdp2_sp2_tp2", marks=pytest.mark.slow),
    ],
)
def test_train_step_equals_hand_written(name: str, config: DecoderConfig) -> None:
    text, specs = MESHES[name]
    mesh, optimizer = cpu_mesh(text), optax.adamw(1e-3)
    trainer = make_trainer(strategy_for(name), config, optimizer, mesh=mesh)
    params = trainer.pm.abstract(decoder_specs(config))
    tokens = jax.ShapeDtypeStruct(
        (8, 128), jnp.int32, sharding=trainer.pm.sharding(sw.BATCH, sw.LENGTH)
    )
    opt = trainer.pm.abstract_state(optimizer, decoder_specs(config))
    arguments = ({"params": params, "opt": opt}, {"inputs": tokens, "targets": tokens})
    ours = trainer.step.lower(*arguments).compile()
    theirs = (
        hand_written.HandWritten(mesh=mesh, specs=specs, sizes=config)
        .train_step(optimizer)
        .lower(*arguments)
        .compile()
    )
    programs.assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param("serve_tp", TINY, id="serve_tp"),
        pytest.param("fsdp2_tp4", TINY, id="fsdp2_tp4"),
        pytest.param("serve_tp", DEMO, id="demo-serve_tp", marks=pytest.mark.slow),
        pytest.param("fsdp2_tp4", DEMO, id="demo-fsdp2_tp4", marks=pytest.mark.slow),
        pytest.param("dp2_tp4", DEMO, id="demo-dp2_tp4", marks=pytest.mark.slow),
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
    server = make_server(strategy, config, slots=8, capacity=32, prompt_length=16, mesh=mesh)
    decoding = server.pm.for_mode("decode")
    cache = decoding.abstract(cache_specs(config, batch=8, capacity=32), role="activation")
    last = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=decoding.sharding(sw.BATCH, shape=(8,)))
    arguments = (decoding.abstract(decoder_specs(config)), cache, last)
    with decoding:
        ours = server.decode.lower(*arguments).compile()
    theirs = (
        hand_written.HandWritten(mesh=mesh, specs=specs, sizes=config)
        .decode_step()
        .lower(*arguments)
        .compile()
    )
    programs.assert_same(ours, theirs)


def test_changed_spec_changes_program() -> None:
    """The comparison sees what it is for: the same model with one spec changed differs."""
    mesh = cpu_mesh("fsdp:2,tp:4")
    pm = sw.PartitionManager(strategy_for("fsdp2_tp4"), mesh=mesh)
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32, sharding=pm.sharding(sw.BATCH, sw.LENGTH))

    def loss(specs: hand_written.Specs) -> str:
        model = hand_written.HandWritten(mesh=mesh, specs=specs, sizes=TINY)
        return programs.text_of(
            jax.jit(model.loss)
            .lower(pm.abstract(decoder_specs(TINY)), {"inputs": tokens, "targets": tokens})
            .compile()
        )

    good = loss(hand_written.FSDP2_TP4)
    assert good == loss(dataclasses.replace(hand_written.FSDP2_TP4))
    assert good != loss(dataclasses.replace(hand_written.FSDP2_TP4, mlp=P("fsdp")))


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
