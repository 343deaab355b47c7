"""Programs that look like a usual one and are another: what may be wrong is a guess."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.inference.report import axis_text

TOKENS = jax.ShapeDtypeStruct((8, 32), jnp.int32)
LENGTH = (sw.BATCH, sw.LENGTH)
MLP = {"up": (64, 128), "down": (128, 64)}
ATTENTION = dict.fromkeys("qkvo", (64, 64))
TABLE = {"tok": (512, 64)}


def infer(
    forward: Callable[..., Any], shapes: Mapping[str, Any], *inputs: Any, seeds: Any = (LENGTH,)
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the names that are certain, and the guesses, by array and dim."""
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    found = sw.infer_axes(forward, params, *inputs, seeds=list(seeds))
    assert found.conflicts == ()
    certain, guessed = {}, {}
    for dim in found.evidence:
        if not dim.is_open:
            target = guessed if dim.guess else certain
            target[f"{dim.path} {dim.dim}"] = axis_text(dim.axis)
    return certain, guessed


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(params: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ params["up"]) @ params["down"]


@pytest.mark.parametrize(("words", "positions"), [(256, 1024), (8192, 2048)])
def test_positions_as_input(words: int, positions: int) -> None:
    """Of two tables that inputs look up, the one that the logits use has the tokens."""

    def forward(params: Any, tokens: Any, places: Any) -> Any:
        x = params["tok"][tokens] + params["pos"][places]
        return (x + mlp(params, x)) @ params["tok"].T

    shapes = {"tok": (words, 64), "pos": (positions, 64), **MLP}
    certain, guessed = infer(forward, shapes, TOKENS, TOKENS, seeds=[LENGTH] * 2)
    assert certain["tok 0"] == "VOCAB"
    assert {*guessed} == {"pos 0"}


def test_positions_beside_floats() -> None:
    """The only table that inputs look up has positions."""

    def forward(params: Any, x: Any, places: Any) -> Any:
        x = x @ params["in"] + params["pos"][places]
        return x + mlp(params, x)

    shapes = {"in": (16, 64), "pos": (2048, 64), **MLP}
    certain, guessed = infer(
        forward, shapes, floats(8, 32, 16), TOKENS, seeds=[(*LENGTH, None), LENGTH]
    )
    assert "pos 0" in guessed
    assert certain["pos 1"] == "EMBED"


def test_steps_and_labels() -> None:
    def diffuse(params: Any, x: Any, step: Any, label: Any) -> Any:
        x = x @ params["in"] + params["time"][step][:, None] + params["label"][label][:, None]
        return (x + mlp(params, x)) @ params["out"]

    shapes = {"in": (16, 64), "time": (1000, 64), "label": (1000, 64), **MLP, "out": (64, 16)}
    numbers = jax.ShapeDtypeStruct((8,), jnp.int32)
    seeds = [(*LENGTH, None), (sw.BATCH,), (sw.BATCH,)]
    certain, guessed = infer(diffuse, shapes, floats(8, 32, 16), numbers, numbers, seeds=seeds)
    assert {"time 0", "label 0"} <= {*guessed}
    assert "VOCAB" not in certain.values()


def test_experts_by_scan() -> None:
    """The usual reference of a mixture adds up its experts. A stack of layers changes the carry."""

    def forward(params: Any, tokens: Any) -> Any:
        x = params["tok"][tokens]
        gates = jax.nn.softmax(x @ params["router"])

        def body(total: Any, expert: Any) -> Any:
            up, down, gate = expert
            return total + mlp({"up": up, "down": down}, x) * gate[..., None], None

        experts = (params["up"], params["down"], jnp.moveaxis(gates, -1, 0))
        total, _ = jax.lax.scan(body, jnp.zeros_like(x), experts)
        return (x + total) @ params["tok"].T

    shapes = {**TABLE, "router": (64, 4), "up": (4, 64, 128), "down": (4, 128, 64)}
    certain, guessed = infer(forward, shapes, TOKENS)
    assert (guessed["up 0"], guessed["down 0"]) == ("EXPERT", "EXPERT")
    assert "LAYERS" not in certain.values()


def test_heads_by_map() -> None:
    def forward(params: Any, tokens: Any) -> Any:
        x = params["tok"][tokens]
        return jax.lax.map(lambda weight: x @ weight, params["heads"])

    certain, guessed = infer(forward, {**TABLE, "heads": (4, 64, 128)}, TOKENS)
    assert guessed["heads 0"] == "LAYERS"
    assert certain["heads 1"] == "EMBED"


def test_codebooks_and_memories() -> None:
    def quantize(params: Any, x: Any) -> Any:
        distances = ((x[..., None, :] - params["code"]) ** 2).sum(-1)
        return params["code"][jnp.argmin(distances, -1)] @ params["out"]

    certain, guessed = infer(
        quantize,
        {"code": (512, 64), "out": (64, 32)},
        floats(8, 16, 64),
        seeds=[(*LENGTH, None)],
    )
    assert guessed["code 0"] == "EXPERT"

    def remember(params: Any, tokens: Any) -> Any:
        x = params["tok"][tokens]
        weights, chosen = jax.lax.top_k(x @ params["keys"], 4)
        rows = params["values"][chosen] * jax.nn.softmax(weights)[..., None]
        return (x + rows.sum(-2)) @ params["tok"].T

    shapes = {**TABLE, "keys": (64, 1024), "values": (1024, 64)}
    certain, guessed = infer(remember, shapes, TOKENS)
    assert {*guessed} == {"keys 1", "values 0"}
    assert certain["keys 0"] == "EMBED"


def test_tokens_that_are_sampled() -> None:
    def sample(params: Any, tokens: Any) -> Any:
        logits = params["tok"][tokens] @ params["head"]
        return jax.lax.top_k(logits, 5)[0]

    _, guessed = infer(sample, {**TABLE, "head": (64, 512)}, TOKENS)
    assert "head 1" in guessed


def test_gelu_is_no_residual() -> None:
    """It adds a value and its cube."""

    def encode(params: Any, x: Any) -> Any:
        hidden = jax.nn.gelu(x @ params["in"])
        return jax.nn.gelu(hidden @ params["code"]) @ params["out"]

    shapes = {"in": (32, 128), "code": (128, 16), "out": (16, 32)}
    certain, _ = infer(encode, shapes, floats(8, 32), seeds=[(sw.BATCH, None)])
    assert certain == {}


def test_attention_without_scores() -> None:
    def forward(params: Any, tokens: Any) -> Any:
        x = params["tok"][tokens]
        q, k, v = ((x @ params[name]).reshape(8, 32, 4, 16) for name in "qkv")
        state = jnp.einsum("bmhd,bmhe->bhde", jax.nn.elu(k), v)
        mixed = jnp.einsum("blhd,bhde->blhe", jax.nn.elu(q), state).reshape(8, 32, 64)
        return (x + mixed @ params["o"]) @ params["tok"].T

    _, guessed = infer(forward, {**TABLE, **ATTENTION}, TOKENS)
    heads = "HEAD:4*HEAD_DIM:16"
    assert guessed == {"q 1": heads, "k 1": heads, "v 1": heads, "o 0": heads}


def test_models_side_by_side() -> None:
    """Three models under vmap. Their number is in every product, also in that of scores."""

    def block(params: Any, x: Any) -> Any:
        q, k, v = ((x @ params[name]).reshape(8, 32, 4, 16) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("blhd,bmhd->bhlm", q, k))
        mixed = jnp.einsum("bhlm,bmhd->blhd", scores, v).reshape(8, 32, 64)
        x = x + mixed @ params["o"]
        return x + mlp(params, x)

    def forward(params: Any, tokens: Any) -> Any:
        table = params["tok"]
        rest = {name: value for name, value in params.items() if name != "tok"}
        return jax.vmap(lambda own: block(own, table[tokens]) @ table.T)(rest)

    stacked = {name: (3, *shape) for name, shape in {**ATTENTION, **MLP}.items()}
    certain, guessed = infer(forward, {**TABLE, **stacked}, TOKENS)
    assert {*guessed} == {f"{name} 0" for name in stacked}
    assert certain["q 2"] == certain["k 2"] == "HEAD:4*HEAD_DIM:16"
