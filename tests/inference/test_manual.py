"""Inference follows `shard_map`, its collectives, and scatter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import shardwright as sw
from tests.inference import models
from tests.inference.models import EMBED, EXPERTS, HIDDEN, LLAMA, MOE_PARAMS, VOCAB, Model

P = jax.P
SEEDS = (("BATCH", "LENGTH"),)


def mesh() -> Any:
    return sw.abstract_mesh("dp:2,tp:2")


def annotations(model: Model) -> list[str]:
    inferred = sw.infer_axes(
        model.forward, model.shapes, *model.inputs, seeds=model.seeds, strict=True
    )
    assert inferred.unknown == ()
    texts: dict[str, list[str]] = {}
    for dim in inferred.evidence:
        texts.setdefault(dim.path, []).append(sw_text(dim.axis))
    return [" ".join(row) for row in texts.values()]


def sw_text(axis: Any) -> str:
    from shardwright.vocabulary.merged_dims import axis_text

    return axis_text(axis)


def hand(model: Model) -> list[str]:
    return [" ".join(row) for row in model.axes]


def test_matmuls_and_sums_over_shards() -> None:
    """Megatron's MLP by hand: a column-wise matmul, a row-wise one, and a sum."""

    def mlp(x: Any, up: Any, down: Any) -> Any:
        return jax.lax.psum(jax.nn.gelu(x @ up) @ down, "tp")

    def forward(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        sharded = jax.shard_map(
            mlp,
            mesh=mesh(),
            in_specs=(P("dp"), P(None, "tp"), P("tp")),
            out_specs=P("dp"),
        )
        return (x + sharded(x, params["up"], params["down"])) @ params["table"].T

    params = {
        "table": ((VOCAB, EMBED), "VOCAB EMBED"),
        "up": ((EMBED, HIDDEN), "EMBED MLP_INTERMEDIATE"),
        "down": ((HIDDEN, EMBED), "MLP_INTERMEDIATE EMBED"),
    }
    model = Model("manual", forward, params)
    assert annotations(model) == hand(Model("", forward, dict(sorted(params.items()))))


def test_gathered_weights() -> None:
    """FSDP by hand: weights are gathered inside, gradients are not needed here."""

    def mlp(x: Any, up: Any, down: Any) -> Any:
        up = jax.lax.all_gather(up, "dp", axis=0, tiled=True)
        down = jax.lax.all_gather(down, "dp", axis=1, tiled=True)
        return jax.nn.gelu(x @ up) @ down

    def forward(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        sharded = jax.shard_map(
            mlp,
            mesh=mesh(),
            in_specs=(P("dp"), P("dp"), P(None, "dp")),
            out_specs=P("dp"),
        )
        return (x + sharded(x, params["up"], params["down"])) @ params["table"].T

    params = {
        "down": ((HIDDEN, EMBED), "MLP_INTERMEDIATE EMBED"),
        "table": ((VOCAB, EMBED), "VOCAB EMBED"),
        "up": ((EMBED, HIDDEN), "EMBED MLP_INTERMEDIATE"),
    }
    model = Model("gathered", forward, params)
    assert annotations(model) == hand(model)


def test_attention_over_sharded_heads() -> None:
    def forward(params: Any, tokens: Any) -> Any:
        attend = jax.shard_map(
            models.attend,
            mesh=mesh(),
            in_specs=(P("dp", None, "tp"),) * 3,
            out_specs=P("dp", None, "tp"),
        )
        x = params["embedding"][tokens]
        q = jnp.einsum("ble,ehd->blhd", x, params["q"])
        k = jnp.einsum("ble,ekd->blkd", x, params["k"])
        v = (x @ params["v"]).reshape(k.shape)
        k, v = (jnp.repeat(rows, 2, axis=2) for rows in (k, v))
        x = x + attend(q, k, v).reshape(*x.shape[:2], -1) @ params["o"]
        return x @ params["embedding"].T

    params = {
        "embedding": ((VOCAB, EMBED), "VOCAB EMBED"),
        "k": ((EMBED, 2, 6), "EMBED KV_HEAD KV_HEAD_DIM"),
        "o": ((24, EMBED), "HEAD:4*HEAD_DIM:6 EMBED"),
        "q": ((EMBED, 4, 6), "EMBED HEAD HEAD_DIM"),
        "v": ((EMBED, 12), "EMBED KV_HEAD:2*KV_HEAD_DIM:6"),
    }
    model = Model("heads", forward, params)
    assert annotations(model) == hand(model)


def test_whole_model_inside_shard_map() -> None:
    """Data parallelism by hand: nothing is known about the model but local arrays."""

    def forward(params: Any, tokens: Any) -> Any:
        return jax.shard_map(
            LLAMA.forward, mesh=mesh(), in_specs=(P(), P("dp")), out_specs=P("dp")
        )(params, tokens)

    params = dict(LLAMA.params)
    model = Model("whole", forward, params)
    plain = sw.infer_axes(LLAMA.forward, LLAMA.shapes, *LLAMA.inputs, seeds=SEEDS)
    inside = sw.infer_axes(forward, model.shapes, *model.inputs, seeds=SEEDS)
    assert inside.annotations == plain.annotations


def test_experts_by_scatter() -> None:
    """Rows are scattered to slots of experts, and gathered again."""

    def experts(params: Any, x: Any) -> Any:
        rows = x.reshape(-1, EMBED)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(rows @ params["router"]), 1)
        place = jnp.arange(rows.shape[0]) % 4
        slots = jnp.zeros((EXPERTS, 4, EMBED)).at[chosen[:, 0], place].add(rows)
        hidden = jax.nn.relu(jnp.einsum("xce,xef->xcf", slots, params["up"]))
        made = jnp.einsum("xcf,xfe->xce", hidden, params["down"])
        return (made[chosen[:, 0], place] * weights).reshape(x.shape)

    model = Model("scatter", lambda p, t: models.moe(p, t, experts), MOE_PARAMS)
    inferred = sw.infer_axes(model.forward, model.shapes, *model.inputs, seeds=model.seeds)
    wrong = [
        (dim.path, dim.dim, dim.axis)
        for dim, axis in zip(
            inferred.evidence, [axis for row in model.axes for axis in row], strict=True
        )
        if sw_text(dim.axis) != axis
    ]
    assert wrong == []
    assert inferred.guesses == ()
