"""Layers inside a `shard_map` over pp alone, as in a pipeline: other mesh axes shard them there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.attention import dot_product_attention, explain
from shardwright.layers import (
    Weighted,
    accumulate,
    attention_block,
    embedding,
    loss,
    mlp_block,
    moe_block,
    relative_bias,
)
from shardwright.layers.moe import MoEConfig
from shardwright.testing import cpu_mesh
from tests.layers import blocks
from tests.raising import raises

P = jax.P
RANDOM = np.random.default_rng(0)
RESIDUAL = (sw.BATCH, sw.LENGTH, sw.EMBED)
ROWS = (sw.BATCH, sw.QUERY_LENGTH)
MOE = moe_block.MoEBlockConfig(moe=MoEConfig(embed=32, hidden=32, experts=4, per_token=2))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A function of (params, x) that runs on both devices of pp, with two sets of both.

    Attributes:
      f: The function.
      specs: Of the parameters.
      mesh: Mesh, whose first axis is pp.
      preset: Rules.
      attention: The implementation of attention.
      axes: Of x.
      length: Length of x.
      rtol: Bound of the relative error.
    """

    f: Callable[[Any, Any], Any]
    specs: Any
    mesh: str = "pp:2,fsdp:2,tp:2"
    preset: str = "fsdp_tp"
    attention: str = "auto"
    axes: Any = RESIDUAL
    length: int = 8
    rtol: float = 2e-5

    @property
    def x(self) -> np.ndarray:
        if self.axes == ROWS:
            return RANDOM.integers(0, 32, (2, 8, 8))
        return RANDOM.normal(size=(2, 8, self.length, 32)).astype(np.float32)


def block(module: Any, config: Any, **options: Any) -> Case:
    def f(params: Any, x: Any) -> Any:
        return module.apply(config, params, x)[0]

    return Case(f=f, specs=module.specs(config), **options)


def attend(params: Any, x: Any) -> Any:
    heads = (x * params["scale"]).reshape(*x.shape[:2], 4, 8)
    return dot_product_attention(heads, heads, heads, causal=True, mode="train")


def entropy(table: Any, tokens: Any) -> Any:
    x = embedding.apply(table, tokens)
    return loss.cross_entropy(x, table, tokens, tied=True, chunks=2).mean


def bias(table: Any, x: Any) -> Any:
    config = relative_bias.RelativeBiasConfig(heads=4)
    return x.sum() * relative_bias.apply(
        config, sw.gather(table, sw.HEAD, sw.EMPTY), q_length=8, kv_length=8
    )


SCALE = {"scale": sw.ArraySpec((32,), jnp.float32, (sw.NORM,))}
TABLE = embedding.specs(32, 32)
ATTENTION = attention_block.AttentionConfig(embed=32, heads=4, kv_heads=2)
MLP = mlp_block.MlpConfig(embed=32, hidden=128)
CASES = {
    "attention": block(attention_block, ATTENTION),
    "current": block(mlp_block, dataclasses.replace(MLP, recipe="current"), rtol=0.02),
    "mxfp8": block(
        mlp_block,
        dataclasses.replace(MLP, recipe="mxfp8"),
        mesh="pp:2,dp:2,tp:2",
        length=32,
        rtol=0.02,
    ),
    "moe": block(moe_block, MOE, mesh="pp:2,fsdp:2,ep:2", preset="moe_ep"),
    "embedding and loss": Case(f=entropy, specs=TABLE, axes=ROWS),
    "relative bias": Case(
        f=bias, specs=relative_bias.specs(relative_bias.RelativeBiasConfig(heads=4))
    ),
    "ring": Case(
        f=attend, specs=SCALE, mesh="pp:2,fsdp:2,sp:2", preset="sequence", attention="ring"
    ),
    "splash": Case(f=attend, specs=SCALE, attention="splash"),
    "splash on pp alone": Case(f=attend, specs=SCALE, mesh="pp:2", attention="splash"),
}


def on_stages(f: Callable[..., Any], pm: sw.PartitionManager) -> Callable[..., Any]:
    """Return a function of what each device of pp has, stacked along dim 0."""

    def local(*arrays: Any) -> Any:
        own = jax.tree.map(lambda leaf: leaf[0], arrays)
        return jax.tree.map(lambda leaf: leaf[None], f(*own))

    return jax.shard_map(
        local,
        mesh=pm.mesh,
        in_specs=P("pp"),
        out_specs=P("pp"),
        axis_names={"pp"},
        check_vma=False,
    )


def manager(preset: str, mesh: str, **options: Any) -> sw.PartitionManager:
    strategy = sw.Strategy.preset(preset) | sw.Strategy(**options)
    return sw.PartitionManager(strategy, mesh=cpu_mesh(mesh), mode="train")


def stacked(pm: sw.PartitionManager, specs: Any) -> tuple[Any, Any]:
    """Return random parameters for both devices of pp: in host memory, and as stored."""
    two = sw.stack_specs(specs, 2, axis=sw.EMPTY)
    params = blocks.random_params(two)
    where = jax.tree.map(
        lambda each: jax.NamedSharding(pm.mesh, P("pp", *each.spec[1:])), pm.shardings(two)
    )
    return params, jax.device_put(params, where)


@pytest.mark.full(but=["attention", "moe", "ring"])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name: str) -> None:
    case = CASES[name]
    x = case.x
    pm = manager(case.preset, case.mesh, attention={"default": case.attention})
    params, stored = stacked(pm, case.specs)

    def each(params: Any, x: Any) -> Any:
        pairs = [jax.tree.map(lambda leaf, at=at: leaf[at], (params, x)) for at in range(2)]
        return jnp.stack([case.f(*pair) for pair in pairs])

    with pm:
        got = blocks.values_and_gradients(on_stages(case.f, pm), stored, jnp.asarray(x))
    # The bias gathers its table, which needs a manager.
    with manager("single", "dp:1"):
        wanted = blocks.values_and_gradients(each, params, x)
    blocks.assert_close(got, wanted, rtol=case.rtol)


def test_accumulate() -> None:
    specs = mlp_block.specs(MLP)
    x = RANDOM.normal(size=(2, 8, 8, 32)).astype(np.float32)

    def total(params: Any, x: Any, channel: Any) -> Any:
        return Weighted(jnp.sum(jnp.sin(mlp_block.apply(MLP, params, x)[0])), x.size), channel

    def step(params: Any, x: Any) -> Any:
        result = accumulate(total, 2, specs=specs)(params, x)
        return result.value, result.grads

    pm = manager("fsdp_tp", "pp:2,fsdp:2,tp:2")
    params, stored = stacked(pm, specs)
    with pm:
        got = jax.jit(on_stages(step, pm))(stored, x)
    pairs = [jax.tree.map(lambda leaf, at=at: leaf[at], (params, x)) for at in range(2)]
    each = [jax.jit(step)(*pair) for pair in pairs]
    blocks.assert_close(got, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))
    over_pp = manager("fsdp_tp", "pp:2,fsdp:2,tp:2", rules={"batch": "fsdp+pp"})
    with over_pp, raises(sw.LayerError, "shard_map", "batch", fix="BATCH"):
        jax.eval_shape(on_stages(step, over_pp), stored, x)


def test_opaque_kernels_run_on_pp_alone() -> None:
    """Nothing is tracked there, so splash is not refused for it."""
    pm, seen = manager("fsdp_tp", "pp:2"), []

    def local(x: Any) -> Any:
        heads = x.reshape(*x.shape[:2], 4, 8)
        seen.append(explain(heads, heads, heads, mode="train", implementation="splash").refusals)
        return x

    with pm:
        jax.eval_shape(on_stages(local, pm), np.zeros((2, 8, 8, 32), np.float32))
    assert seen == [()]
