"""Layers inside a `shard_map`: right where no sum over shards is missing, else refused."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.layers import (
    attention_block,
    dense,
    dropout,
    embedding,
    loss,
    mlp_block,
    norm,
    relative_bias,
    transformer_block,
)
from tests.layers import blocks
from tests.raising import Facts, facts, raises

P = jax.P
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 8, 16)).astype(np.float32)
HEAD = RANDOM.normal(size=(16, 32)).astype(np.float32)
HIDDEN = RANDOM.normal(size=(8, 8, 32)).astype(np.float32)
SCALE = RANDOM.normal(size=16).astype(np.float32)
TOKENS = RANDOM.integers(0, 32, (8, 8))
ROWS = (sw.BATCH, sw.QUERY_LENGTH)
OPERAND = (*ROWS, sw.EMBED)
ATTENTION = attention_block.AttentionConfig(embed=16, heads=4)
MLP = mlp_block.MlpConfig(embed=16, hidden=32)
BIAS = relative_bias.RelativeBiasConfig(heads=8)


def manager(**rules: str) -> sw.PartitionManager:
    strategy = sw.Strategy.preset("tensor") | sw.Strategy(rules=rules)
    return sw.PartitionManager(strategy, mesh=sw.create_mesh("dp:2,tp:4"), mode="train")


def refused(f: Any, arrays: Any, says: Facts, *, pm: Any = None, **options: Any) -> None:
    """Trace a function inside a `shard_map`, and check the facts of the error."""
    mesh = sw.create_mesh("dp:2,tp:4")
    mapped = jax.shard_map(f, mesh=mesh, **{"out_specs": P("dp", None, "tp")} | options)
    with pm or contextlib.nullcontext(), raises(sw.LayerError, says):
        jax.eval_shape(mapped, *arrays)


@pytest.mark.parametrize("check_vma", [True, False])
def test_split_vocabulary_is_refused(check_vma: bool) -> None:
    """A logsumexp needs the whole vocabulary, and a lookup the whole table."""

    def mean(x: Any, head: Any, labels: Any) -> Any:
        return loss.cross_entropy(x, head, labels, chunks=2).mean

    specs = (P("dp"), P(None, "tp"), P("dp"))
    options = {"in_specs": specs, "out_specs": P(), "check_vma": check_vma}
    split = facts("VOCAB", "tp", path="head", fix=("tp", "axis_names"))
    refused(mean, (X, HEAD, TOKENS), split, pm=manager(), **options)
    tied = {**options, "in_specs": (P("dp"), P("tp"), P("dp"))}
    refused(
        lambda *args: loss.cross_entropy(*args, tied=True).mean,
        (X, HEAD.T, TOKENS),
        split,
        pm=manager(),
        **tied,
    )
    look_up = {"in_specs": (P("tp"), P("dp")), "out_specs": P("dp"), "check_vma": check_vma}
    message = facts("VOCAB", "tp", path="table", fix="axis_names")
    refused(embedding.apply, (HEAD.T, TOKENS), message, pm=manager(), **look_up)
    if check_vma:  # otherwise nothing says what varies
        refused(mean, (X, HEAD, TOKENS), facts("VOCAB", "tp", path="head"), **options)
        varies = facts("VOCAB", "tp", path="table")
        refused(embedding.apply, (HEAD.T, TOKENS), varies, **look_up)


def test_split_embed_is_refused() -> None:
    pm, rows = manager(embed="tp", vocab="-"), P("dp", None, "tp")
    options = {"in_specs": (rows, P("tp")), "pm": pm}
    message = facts("x", "scale", "tp", "EMBED", path=...)
    refused(norm.rms_norm, (X, SCALE), message, **options)
    refused(norm.layer_norm, (X, SCALE), message, **options)
    refused(loss.logits, (X, HEAD), facts("EMBED", "tp", path="x"), **options)


@pytest.mark.full(but=["current-True", "None-False"])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("recipe", [None, "current"])
def test_blocks_with_split_weights_are_refused(recipe: str | None, check_vma: bool) -> None:
    stack = transformer_block.TransformerConfig(layers=2, attention=ATTENTION, mlp=MLP)
    mlp = mlp_block.MlpConfig(embed=16, hidden=32, recipe=recipe)
    cases = [
        (mlp_block, mlp, facts("MLP_INTERMEDIATE", "tp", path="down/kernel")),
        (attention_block, ATTENTION, facts("HEAD", "tp", path="out/kernel")),
        (transformer_block, stack, facts("HEAD", "tp", path="out/kernel")),
    ]
    for module, config, message in cases:
        specs: Any = module.specs(config)
        params, pm = blocks.random_params(specs), manager()
        where = jax.tree.map(lambda leaf: leaf.spec, pm.shardings(specs))
        options = {"in_specs": (where, P("dp")), "out_specs": P("dp"), "check_vma": check_vma}

        def block(params: Any, x: Any, module: Any = module, config: Any = config) -> Any:
            return module.apply(config, params, x)[0]

        refused(block, (params, X), message, pm=pm, **options)
        # Without a manager, whole weights are needed, and these are shards.
        if module is not transformer_block:
            with raises(sw.LayerError, "config"):
                jax.eval_shape(jax.shard_map(block, mesh=pm.mesh, **options), params, X)


def test_split_length_is_refused() -> None:
    """The residual is split over sp, and the block needs it whole."""
    strategy = sw.Strategy.preset("fsdp") | sw.Strategy(rules={"length": "sp"})
    pm = sw.PartitionManager(strategy, mesh=sw.create_mesh("fsdp:2,sp:4"), mode="train")
    params = blocks.random_params(mlp_block.specs(MLP))
    mapped = jax.shard_map(
        lambda x: mlp_block.apply(MLP, params, x)[0],
        mesh=pm.mesh,
        in_specs=P("fsdp", "sp"),
        out_specs=P("fsdp", "sp"),
    )
    with (
        pm,
        raises(
            sw.LayerError, "shard_map", "LENGTH", "sp", "QUERY_LENGTH", path="x", fix="shard_map"
        ),
    ):
        jax.eval_shape(mapped, X)


def test_one_key_for_all_shards_is_refused() -> None:
    pm, key, axes = manager(), jax.random.key(0), ("dp",)

    def drop(x: Any, key: Any) -> Any:
        return dropout.dropout(x, key, 0.5)

    def own(x: Any, key: Any) -> Any:
        return drop(x, jax.random.fold_in(key, jax.lax.axis_index(axes)))

    specs = {"in_specs": (P("dp"), P()), "out_specs": P("dp")}
    fold = "jax.random.fold_in(key, jax.lax.axis_index(('dp',)))"
    refused(drop, (X, key), facts("dp", path="key", fix=fold), **specs)
    masks = np.asarray(jax.jit(jax.shard_map(own, mesh=pm.mesh, **specs))(X, key)) != 0
    assert 0.4 < masks.mean() < 0.6
    assert (masks[:4] != masks[4:]).any()


def test_right_inside_shard_map() -> None:
    """What needs no other shard, and a matmul whose sum the caller adds."""
    pm = manager()
    table = RANDOM.normal(size=(8, 32)).astype(np.float32)

    def heads(table: Any) -> Any:
        return relative_bias.apply(BIAS, table, q_length=8, kv_length=8)

    def contracted(h: Any, w: Any) -> Any:
        y = sw.einsum("blm,me->ble", h, w, out=OPERAND) + dense.dense(h, w, out=OPERAND)
        return jax.lax.psum(y, "tp")

    weighted = (*ROWS, sw.MLP_INTERMEDIATE), (sw.MLP_INTERMEDIATE, sw.EMPTY)
    bias_axes = (sw.EMPTY, sw.BIAS_HEAD_SEQ, sw.QUERY_LENGTH, sw.EMPTY)
    with pm:
        logits = pm.shard_map(
            loss.logits, in_axes=[OPERAND, (sw.EMPTY, sw.VOCAB)], out_axes=(*ROWS, sw.VOCAB)
        )
        np.testing.assert_allclose(logits(X, HEAD), X @ HEAD, rtol=1e-4, atol=1e-4)
        bias = pm.shard_map(
            heads,
            in_axes=[(sw.HEAD, sw.EMPTY)],
            out_axes=bias_axes,
            sizes={sw.BIAS_HEAD_SEQ: 8, sw.QUERY_LENGTH: 8},
        )
        np.testing.assert_array_equal(bias(table), heads(table))
        whole = pm.shard_map(
            heads, in_axes=[(sw.EMPTY,) * 2], out_axes=bias_axes, sizes={sw.BIAS_HEAD_SEQ: 8}
        )
        with raises(sw.ManualAxisError, "tp", fix="tp"):
            jax.eval_shape(whole, table)
        summed = pm.shard_map(contracted, in_axes=weighted, out_axes=OPERAND)
        y, pull = jax.vjp(summed, HIDDEN, HEAD.T)
        np.testing.assert_allclose(y, 2 * HIDDEN @ HEAD.T, rtol=1e-4, atol=1e-4)
        wanted = jax.vjp(lambda h, w: 2 * h @ w, HIDDEN, HEAD.T)[1](X)
        blocks.assert_close(pull(jnp.asarray(X)), wanted)
        normed = pm.shard_map(norm.rms_norm, in_axes=[OPERAND, (sw.NORM,)], out_axes=OPERAND)
        np.testing.assert_allclose(normed(X, SCALE), norm.rms_norm(X, SCALE), rtol=1e-6)
    with raises(sw.RankMismatchError, "(4, 32)", path="table"):
        heads(table[:4])


def test_loss_over_a_split_batch() -> None:
    """Totals and weights add up to the loss of the whole batch, and so do gradients."""
    labels = np.where(np.arange(8) < np.arange(1, 9)[:, None], TOKENS, -100)

    def total(table: Any, tokens: Any, labels: Any) -> Any:
        x = embedding.apply(table, tokens)
        return loss.cross_entropy(x, table, labels, tied=True, chunks=2).weighted

    def local(*args: Any) -> Any:
        sums = jax.lax.psum(total(*args), ("fsdp", "dp"))
        return sums.total / sums.weight

    strategy, table = sw.Strategy.preset("fsdp"), HEAD.T
    pm = sw.PartitionManager(strategy, mesh=sw.create_mesh("dp:2,fsdp:4"), mode="train")

    def mean(table: Any) -> Any:
        whole = total(table, TOKENS, labels)
        return whole.total / whole.weight

    expected, wanted = jax.jit(jax.value_and_grad(mean))(table)
    with pm:
        stored = pm.shard(table, sw.VOCAB, sw.EMBED, role="param")
        axes = [sw.ArraySpec(table.shape, np.float32, (sw.VOCAB, sw.EMBED)), ROWS, ROWS]
        mapped = pm.shard_map(local, in_axes=axes, out_axes=())
        value, gradient = jax.jit(jax.value_and_grad(mapped))(stored, TOKENS, labels)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    blocks.assert_close(gradient, wanted)
