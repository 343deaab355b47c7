"""Names that a program does not show are guesses, or open; those that it shows are certain."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import compute_on

import shardwright as sw
from shardwright.inference.inferred import Inferred
from shardwright.vocabulary.merged_dims import axis_text
from tests.inference.models import attend

BATCH, LENGTH, EMBED, HEADS, HEAD_DIM = 8, 32, 64, 4, 16
TOKENS = jax.ShapeDtypeStruct((BATCH, LENGTH), "int32")
IDS = jax.ShapeDtypeStruct((BATCH,), "int32")
SEEDS = [("BATCH", "LENGTH")]
MLP = {"up": (EMBED, 128), "down": (128, EMBED)}
ATTENTION = dict.fromkeys("qkvo", (EMBED, EMBED))
BLOCK = {"table": (512, EMBED), **ATTENTION, **MLP}
HEADS_TEXT = "HEAD:4*HEAD_DIM:16"


def features(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, "float32")


def infer(forward: Any, shapes: Any, *inputs: Any, seeds: Any = SEEDS) -> Inferred:
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    inferred = sw.infer_axes(forward, params, *(inputs or (TOKENS,)), seeds=seeds)
    assert inferred.conflicts == ()
    return inferred


def names(inferred: Inferred) -> dict[str, str]:
    """Return the axis of each dim, with a "~" behind guesses, and "?" for open dims."""
    return {
        f"{dim.path} {dim.dim}": "?" if dim.is_open else axis_text(dim.axis) + "~" * dim.guess
        for dim in inferred.evidence
    }


def mlp(params: Any, x: Any) -> Any:
    return x + jax.nn.gelu(x @ params["up"]) @ params["down"]


def attention(params: Any, x: Any, memory: Any = None) -> Any:
    memory = x if memory is None else memory
    q, k, v = (
        (rows @ params[name]).reshape(*rows.shape[:-1], HEADS, -1)
        for name, rows in (("q", x), ("k", memory), ("v", memory))
    )
    return attend(q, k, v, causal=False).reshape(*x.shape) @ params["o"]


def block(params: Any, x: Any) -> Any:
    return mlp(params, x + attention(params, x))


def head(params: Any, x: Any) -> Any:
    return x @ params["table"].T


def on_the_host(function: Any) -> Any:
    make = getattr(compute_on, "compute_on2", compute_on.compute_on)
    return make(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)


@pytest.mark.parametrize(
    "call",
    [lambda each: jax.lax.composite(each, name="tests.mlp"), on_the_host],
    ids=["composite", "compute_on"],
)
def test_calls_name_what_their_bodies_show(call: Any) -> None:
    def forward(params: Any, tokens: Any, *, inner: Any = mlp) -> Any:
        return head(params, inner(params, params["table"][tokens]))

    shapes = {"table": (512, EMBED), **MLP}
    expected = names(infer(forward, shapes))
    assert "?" not in expected.values()
    assert names(infer(functools.partial(forward, inner=call(mlp)), shapes)) == expected


def test_equations_that_hold_an_unknown_jaxpr_are_named() -> None:
    def forward(params: Any, x: Any) -> Any:
        solved = jax.lax.custom_linear_solve(lambda y: 2 * y, x, lambda _, y: y / 2, symmetric=True)
        return solved @ params["up"]

    inferred = infer(forward, MLP, features(BATCH, EMBED), seeds=[("BATCH", "EMBED")])
    assert [each.split()[0] for each in inferred.unknown] == ["custom_linear_solve"]


@pytest.mark.parametrize(("words", "positions"), [(256, 1024), (8192, 2048), (512, 512)])
def test_positions_that_are_an_input(words: int, positions: int) -> None:
    """Only the table that makes the logits is one of tokens, whatever the sizes are."""
    shapes = {"table": (words, EMBED), "positions": (positions, EMBED), **MLP}

    def forward(params: Any, tokens: Any, ids: Any) -> Any:
        return head(params, mlp(params, params["table"][tokens] + params["positions"][ids]))

    found = names(infer(forward, shapes, TOKENS, TOKENS, seeds=SEEDS * 2))
    assert found["table 0"] == "VOCAB"
    assert found["positions 0"] == "VOCAB~"
    assert found["positions 1"] == "EMBED"


def test_only_tables_of_tokens_are_certain() -> None:
    """A model that returns no logits does not show which of two tables has the tokens."""

    def encode(params: Any, tokens: Any, ids: Any) -> Any:
        return mlp(params, params["table"][tokens] + params["positions"][ids])

    shapes = {"table": (256, EMBED), "positions": (1024, EMBED), **MLP}
    found = names(infer(encode, shapes, TOKENS, TOKENS, seeds=SEEDS * 2))
    assert (found["table 0"], found["positions 0"]) == ("VOCAB~", "VOCAB~")
    alone = {"table": (256, EMBED), **MLP}
    found = names(infer(lambda p, t: mlp(p, p["table"][t]), alone))
    assert found["table 0"] == "VOCAB"


@pytest.mark.parametrize("seed", [("BATCH", "LENGTH", None), None])
def test_features_with_position_ids(seed: Any) -> None:
    """The only table is not one of tokens if the model also reads features."""

    def forward(params: Any, x: Any, ids: Any) -> Any:
        return block(params, x + params["table"][ids])

    x = features(BATCH, LENGTH, EMBED)
    found = names(infer(forward, BLOCK, x, TOKENS, seeds=[seed, SEEDS[0]]))
    assert (found["table 0"], found["table 1"]) == ("VOCAB~", "EMBED")


def test_steps_and_labels_of_diffusion() -> None:
    def forward(params: Any, x: Any, step: Any, label: Any) -> Any:
        x = x @ params["in"] + params["time"][step][:, None] + params["label"][label][:, None]
        return mlp(params, x) @ params["out"]

    shapes = {"in": (16, EMBED), "time": (1000, EMBED), "label": (1000, EMBED), "out": (EMBED, 16)}
    seeds = [("BATCH", "LENGTH", None), ("BATCH",), ("BATCH",)]
    x = features(BATCH, LENGTH, 16)
    found = names(infer(forward, {**shapes, **MLP}, x, IDS, IDS, seeds=seeds))
    assert (found["time 0"], found["label 0"]) == ("VOCAB~", "VOCAB~")
    assert (found["time 1"], found["up 0"], found["up 1"]) == ("EMBED", "EMBED", "MLP_INTERMEDIATE")


def test_rows_of_bigrams_are_logits() -> None:
    found = names(infer(lambda table, tokens: table[tokens], (512, 512)))
    assert found == {" 0": "VOCAB", " 1": "EMBED~"}


MOE = {"table": (512, EMBED), "router": (EMBED, 4), "up": (4, EMBED, 128), "down": (4, 128, EMBED)}


def test_scan_over_experts() -> None:
    """The experts add to the carry, and do not read it."""

    def forward(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        gates = jnp.moveaxis(jax.nn.softmax(x @ params["router"]), -1, 0)

        def expert(total: Any, row: Any) -> Any:
            up, down, gate = row
            return total + (jax.nn.gelu(x @ up) @ down) * gate[..., None], None

        y, _ = jax.lax.scan(expert, jnp.zeros_like(x), (params["up"], params["down"], gates))
        return head(params, x + y)

    found = names(infer(forward, MOE))
    assert (found["up 0"], found["down 0"], found["router 1"]) == (
        "EXPERT~",
        "EXPERT~",
        "EXPERT_GATE~",
    )


def test_map_over_output_heads() -> None:
    shapes = {"table": (512, EMBED), "heads": (4, EMBED, 128)}
    found = names(infer(lambda p, t: jax.lax.map(lambda w: p["table"][t] @ w, p["heads"]), shapes))
    assert found["heads 0"] == "LAYERS~"


def test_scan_over_rows_of_positions() -> None:
    """A recurrent model adds a row of positions per step: a length, not layers."""

    def forward(params: Any, tokens: Any) -> Any:
        def step(state: Any, rows: Any) -> Any:
            state = jnp.tanh(state @ params["state"] + sum(rows))
            return state, state

        rows = params["table"][tokens].swapaxes(0, 1), params["positions"]
        return head(params, jax.lax.scan(step, jnp.zeros((BATCH, EMBED)), rows)[1])

    shapes = {"table": (512, EMBED), "state": (EMBED, EMBED), "positions": (LENGTH, EMBED)}
    assert names(infer(forward, shapes))["positions 0"] == "LENGTH"


def test_scan_over_residual_codebooks() -> None:
    """The carry is multiplied by the weights, but only the chosen index depends on the matmul."""

    def forward(params: Any, x: Any) -> Any:
        def quantize(rest: Any, code: Any) -> Any:
            chosen = jnp.argmax(rest @ code.T, -1)
            return rest - code[chosen], chosen

        x = x @ params["in"]
        return (x - jax.lax.scan(quantize, x, params["codes"])[0]) @ params["out"]

    shapes = {"in": (32, EMBED), "codes": (6, 512, EMBED), "out": (EMBED, 32)}
    x = features(BATCH, LENGTH, 32)
    found = names(infer(forward, shapes, x, seeds=[("BATCH", "LENGTH", None)]))
    assert (found["codes 0"], found["codes 1"]) == ("LAYERS~", "VOCAB~")


def test_scan_over_step_embeddings() -> None:
    """One block is applied several times, with a vector per step. No weight is stacked."""

    def forward(params: Any, tokens: Any) -> Any:
        def step(x: Any, row: Any) -> Any:
            return block(params, x + row), None

        return head(params, jax.lax.scan(step, params["table"][tokens], params["steps"])[0])

    assert names(infer(forward, {**BLOCK, "steps": (6, EMBED)}))["steps 0"] == "LAYERS~"


def test_layers_with_a_cache_are_certain() -> None:
    """A scan over layers may also run over activations, such as a cache."""

    def forward(params: Any, tokens: Any, cache: Any) -> Any:
        def layer(x: Any, row: Any) -> Any:
            weights, rows = row
            return mlp(weights, x + rows), rows

        layers = {name: params[name] for name in MLP}
        return head(params, jax.lax.scan(layer, params["table"][tokens], (layers, cache))[0])

    shapes = {"table": (512, EMBED), "up": (3, EMBED, 128), "down": (3, 128, EMBED)}
    cache = features(3, BATCH, LENGTH, EMBED)
    found = names(infer(forward, shapes, TOKENS, cache, seeds=[*SEEDS, None]))
    assert (found["up 0"], found["down 0"]) == ("LAYERS", "LAYERS")


def test_codebook() -> None:
    """Selected vectors are no experts."""

    def forward(params: Any, x: Any) -> Any:
        x = jax.nn.gelu(x @ params["in1"]) @ params["in2"]
        chosen = jnp.argmin(((x[..., None, :] - params["code"]) ** 2).sum(-1), -1)
        return jax.nn.gelu(params["code"][chosen] @ params["out1"]) @ params["out2"]

    shapes = {
        "in1": (32, 128),
        "in2": (128, EMBED),
        "code": (512, EMBED),
        "out1": (EMBED, 128),
        "out2": (128, 32),
    }
    x = features(BATCH, LENGTH, 32)
    found = names(infer(forward, shapes, x, seeds=[("BATCH", "LENGTH", None)]))
    assert found["code 0"] == "VOCAB~"


def test_memory_of_vectors() -> None:
    def forward(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        weights, chosen = jax.lax.top_k(x @ params["keys"], 4)
        rows = jax.nn.softmax(weights)[..., None] * params["values"][chosen]
        return head(params, x + rows.sum(-2))

    shapes = {"table": (512, EMBED), "keys": (EMBED, 1024), "values": (1024, EMBED)}
    found = names(infer(forward, shapes))
    assert (found["keys 1"], found["values 0"]) == ("EXPERT_GATE~", "VOCAB~")


def test_matrices_that_a_router_selects() -> None:
    """They are experts, and so is what the router chooses among, if they are as many."""

    def forward(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        chosen = jnp.argmax(x @ params["router"].T, -1)
        hidden = jax.nn.gelu(jnp.einsum("ble,blef->blf", x, params["up"][chosen]))
        x = x + jnp.einsum("blf,blfe->ble", hidden, params["down"][chosen])
        return head(params, x + params["bias"][chosen])

    shapes = {
        "table": (512, EMBED),
        "router": (5, EMBED),
        "up": (5, EMBED, 128),
        "down": (5, 128, EMBED),
        "bias": (5, EMBED),
    }
    found = names(infer(forward, shapes))
    assert [found[f"up {dim}"] for dim in range(3)] == ["EXPERT", "EMBED", "MLP_INTERMEDIATE"]
    assert [found[f"down {dim}"] for dim in range(3)] == ["EXPERT", "MLP_INTERMEDIATE", "EMBED"]
    assert (found["router 0"], found["router 1"]) == ("EXPERT_GATE", "EMBED")
    assert (found["bias 0"], found["bias 1"]) == ("EXPERT", "EMBED")


def test_groups_of_experts() -> None:
    """The router chooses among groups first, as DeepSeek does."""

    def forward(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        scores = jax.nn.sigmoid(x @ params["router"]) + params["bias"]
        best = jax.lax.top_k(scores.reshape(BATCH, LENGTH, 4, 2), 1)[0].sum(-1)
        groups = jax.nn.one_hot(jax.lax.top_k(best, 2)[1], 4).sum(-2)
        scores = jnp.where(jnp.repeat(groups, 2, -1) > 0, scores, 0)
        weights, chosen = jax.lax.top_k(scores, 3)
        mask = (jax.nn.one_hot(chosen, 8) * weights[..., None]).sum(-2)
        hidden = jax.nn.silu(jnp.einsum("ble,xef->blxf", x, params["up"]))
        return head(params, x + jnp.einsum("blxf,xfe,blx->ble", hidden, params["down"], mask))

    shapes = {
        "table": (512, EMBED),
        "router": (EMBED, 8),
        "bias": (8,),
        "up": (8, EMBED, 128),
        "down": (8, 128, EMBED),
    }
    inferred = infer(forward, shapes)
    assert inferred.guesses == inferred.open == ()
    assert (names(inferred)["router 1"], names(inferred)["bias 0"]) == ("EXPERT_GATE",) * 2


@pytest.mark.parametrize(("size", "axis"), [(512, "VOCAB"), (300, "EXPERT_GATE~")])
def test_top_k_of_a_sampler(size: int, axis: str) -> None:
    """A sampler chooses among as many tokens as the table has rows."""

    def forward(params: Any, tokens: Any) -> Any:
        return jax.lax.top_k(block(params, params["table"][tokens])[:, -1] @ params["head"], 5)[1]

    assert names(infer(forward, {**BLOCK, "head": (EMBED, size)}))["head 1"] == axis


def test_adapters_that_an_input_selects() -> None:
    def forward(params: Any, tokens: Any, language: Any) -> Any:
        x = params["table"][tokens]
        down, up = params["first"][language], params["second"][language]
        low = jnp.einsum("ble,ber->blr", x, down)
        return head(params, mlp(params, x + jnp.einsum("blr,bre->ble", low, up)))

    shapes = {"table": (512, EMBED), "first": (70, EMBED, 8), "second": (70, 8, EMBED), **MLP}
    found = names(infer(forward, shapes, TOKENS, IDS, seeds=[*SEEDS, ("BATCH",)]))
    certain = {found[f"{name} {dim}"] for name in ("first", "second") for dim in range(3)}
    assert {text for text in certain if text[-1] not in "~?"} <= {"EMBED"}


def test_sums_inside_gelu_are_not_residual() -> None:
    """Both summands of the tanh form come from one value by elementwise operations."""

    def autoencoder(params: Any, x: Any) -> Any:
        return jax.nn.gelu(jax.nn.gelu(x @ params["e1"]) @ params["e2"]) @ params["d"]

    shapes = {"e1": (32, 128), "e2": (128, 16), "d": (16, 32)}
    found = names(infer(autoencoder, shapes, features(8, 32), seeds=[("BATCH", None)]))
    assert all(text.endswith(("~", "?")) for text in found.values()), found


def test_sums_of_two_projections_are_not_residual() -> None:
    def forward(params: Any, x: Any, y: Any) -> Any:
        return jax.nn.gelu(x @ params["a"] + y @ params["b"]) @ params["c"]

    shapes = {"a": (32, 128), "b": (16, 128), "c": (128, 32)}
    inputs = features(8, 32), features(8, 16)
    found = names(infer(forward, shapes, *inputs, seeds=[("BATCH", None)] * 2))
    assert all(text.endswith(("~", "?")) for text in found.values()), found


def test_low_rank_sum_beside_a_residual_stream() -> None:
    """The hidden dim is a sum of two projections; only the stream adds what is computed from it."""

    def forward(params: Any, x: Any) -> Any:
        x = x @ params["in"]
        hidden = x @ params["up"] + x @ params["a"] @ params["b"]
        return (x + jax.nn.gelu(hidden) @ params["down"]) @ params["out"]

    shapes = {"in": (48, EMBED), "a": (EMBED, 8), "b": (8, 128), **MLP, "out": (EMBED, 10)}
    seeds = [("BATCH", "LENGTH", None)]
    found = names(infer(forward, shapes, features(BATCH, LENGTH, 48), seeds=seeds))
    assert (found["up 0"], found["up 1"], found["in 1"]) == ("EMBED", "MLP_INTERMEDIATE", "EMBED")


@pytest.mark.parametrize("layers", [1, 2])
def test_linear_attention(layers: int) -> None:
    """Queries read the sum over positions of keys times values. No head is a group of queries."""

    def forward(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        for _ in range(layers):
            q, k, v = ((x @ params[name]).reshape(BATCH, LENGTH, HEADS, HEAD_DIM) for name in "qkv")
            state = jnp.einsum("bmhd,bmhe->bhde", jax.nn.elu(k), v)
            mixed = jnp.einsum("blhd,bhde->blhe", jax.nn.elu(q), state)
            x = x + mixed.reshape(BATCH, LENGTH, EMBED) @ params["o"]
        return head(params, x)

    found = names(infer(forward, {"table": (512, EMBED), **ATTENTION}))
    assert [found[f"{name} 1"] for name in "qkv"] == [HEADS_TEXT] * 3
    assert found["o 0"] == HEADS_TEXT


def test_linear_attention_with_a_running_state() -> None:
    """The state is an input. Queries have a position, and no matmul sums over it."""

    def forward(params: Any, tokens: Any, state: Any) -> Any:
        x = params["table"][tokens]
        q, k, v = ((x @ params[name]).reshape(BATCH, LENGTH, HEADS, HEAD_DIM) for name in "qkv")
        mixed = jnp.einsum("blhd,bhde->blhe", q, state)
        state = state + jnp.einsum("bmhd,bmhe->bhde", k, v)
        return head(params, x + mixed.reshape(BATCH, LENGTH, EMBED) @ params["o"]), state

    state = features(BATCH, HEADS, HEAD_DIM, HEAD_DIM)
    shapes = {"table": (512, EMBED), **ATTENTION}
    found = names(infer(forward, shapes, TOKENS, state, seeds=[*SEEDS, None]))
    assert not any("KV_HEAD" in text and text[-1] != "~" for text in found.values()), found


STACKED = {name: (3, *shape) for name, shape in BLOCK.items() if name != "table"}


def test_models_that_are_vmapped_are_no_heads() -> None:
    def forward(params: Any, tokens: Any) -> Any:
        x, members = params["table"][tokens], {name: params[name] for name in STACKED}
        return jax.vmap(lambda weights: head(params, block(weights, x)))(members)

    found = names(infer(forward, {"table": (512, EMBED), **STACKED}))
    assert {found[f"{name} 0"] for name in STACKED} == {"EXPERT~"}
    assert [found[f"{name} 2"] for name in "qkv"] == [HEADS_TEXT] * 3
    assert found["o 1"] == HEADS_TEXT


def test_vmapped_attention_of_one_head() -> None:
    """Weights are stacked along heads or along models: the program is the same."""

    def forward(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]

        def member(q: Any, k: Any, v: Any, o: Any) -> Any:
            scores = jax.nn.softmax(jnp.einsum("bld,bmd->blm", x @ q, x @ k))
            return jnp.einsum("blm,bmd->bld", scores, x @ v) @ o

        mixed = jax.vmap(member)(*(params[name] for name in "qkvo"))
        return head(params, x + mixed.sum(0))

    shapes = {"table": (512, EMBED), **dict.fromkeys("qkvo", (3, EMBED, EMBED))}
    found = names(infer(forward, shapes))
    assert {found[f"{name} 0"] for name in "qkvo"} == {"HEAD~"}


def test_attention_of_learned_latents() -> None:
    """The latents are positions, in the first block too, where queries depend on weights alone."""

    def forward(params: Any, tokens: Any) -> Any:
        x, latents = params["table"][tokens], jnp.broadcast_to(params["latents"], (BATCH, 6, EMBED))
        for weights in params["blocks"]:
            latents = mlp(weights, latents + attention(weights, latents, x))
        return latents

    weights = {**ATTENTION, **MLP}
    shapes = {"table": (512, EMBED), "latents": (6, EMBED), "blocks": [weights, weights]}
    found = names(infer(forward, shapes))
    heads = {found[f"blocks/{at}/{name} 1"] for at in range(2) for name in "qkv"}
    assert heads == {HEADS_TEXT}
    assert found["latents 0"] == "LENGTH~"


def rotate(x: Any) -> Any:
    """Rotate pairs of neighbors, as in GPT-J."""
    first, second = x[..., ::2], x[..., 1::2]
    angles = jnp.arange(x.shape[1])[:, None, None] * jnp.ones(x.shape[-1] // 2)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    rows = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rows.reshape(x.shape)


def test_interleaved_rotary_embeddings() -> None:
    def forward(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        q, k, v = ((x @ params[name]).reshape(BATCH, LENGTH, HEADS, HEAD_DIM) for name in "qkv")
        mixed = attend(rotate(q), rotate(k), v).reshape(x.shape)
        return head(params, x + mixed @ params["o"])

    inferred = infer(forward, {"table": (512, EMBED), **ATTENTION})
    assert inferred.unknown == ()
    found = names(inferred)
    assert [found[f"{name} 1"] for name in "qkv"] == [HEADS_TEXT] * 3


def test_interleaved_gate_and_up() -> None:
    def forward(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        both = x @ params["up"]
        return head(params, x + (jax.nn.silu(both[..., ::2]) * both[..., 1::2]) @ params["down"])

    found = names(infer(forward, {"table": (512, EMBED), "up": (EMBED, 256), "down": (128, EMBED)}))
    assert (found["up 1"], found["down 0"]) == ("MLP_INTERMEDIATE", "MLP_INTERMEDIATE")


def test_loss_with_one_hot_labels() -> None:
    def loss(params: Any, tokens: Any, labels: Any) -> Any:
        logits = jax.nn.log_softmax(block(params, params["table"][tokens]) @ params["head"])
        return -(logits * jax.nn.one_hot(labels, 512)).sum()

    found = names(infer(loss, {**BLOCK, "head": (EMBED, 512)}, TOKENS, TOKENS, seeds=SEEDS * 2))
    assert found["head 1"] == "VOCAB"


def test_tasks_that_an_input_selects() -> None:
    """One-hot rows that an input selects need not be experts; those of a router are."""

    def forward(params: Any, tokens: Any, task: Any) -> Any:
        rows = jax.nn.one_hot(task, 4)
        x = params["table"][tokens]
        each = jnp.einsum("bx,ble->xble", rows, x)
        hidden = jax.nn.relu(jnp.einsum("xble,xef->xblf", each, params["up"]))
        return head(params, x + jnp.einsum("xblf,xfe->ble", hidden, params["down"]))

    shapes = {name: shape for name, shape in MOE.items() if name != "router"}
    found = names(infer(forward, shapes, TOKENS, IDS, seeds=[*SEEDS, ("BATCH",)]))
    assert found["up 0"] == "EXPERT~"


@pytest.mark.parametrize("cut", ["split", "factor in front", "factor behind"])
def test_scales_and_shifts_in_one_weight(cut: str) -> None:
    """Two parts of EMBED in one dim (adaLN) are not EMBED."""

    def forward(params: Any, tokens: Any, condition: Any) -> Any:
        both = (condition @ params["ada"] + params["bias"])[:, None]
        if cut == "split":
            scale, shift = jnp.split(both, 2, axis=-1)
        elif cut == "factor in front":
            scale, shift = jnp.unstack(both.reshape(BATCH, 1, 2, EMBED), axis=2)
        else:
            scale, shift = jnp.unstack(both.reshape(BATCH, 1, EMBED, 2), axis=3)
        return head(params, mlp(params, params["table"][tokens] * (1 + scale) + shift))

    shapes = {"table": (512, EMBED), "ada": (32, 2 * EMBED), "bias": (2 * EMBED,), **MLP}
    inputs = (TOKENS, features(BATCH, 32))
    found = names(infer(forward, shapes, *inputs, seeds=[*SEEDS, ("BATCH", None)]))
    assert (found["ada 1"], found["bias 0"]) == ("EMBED~", "NORM~")
    assert (found["up 0"], found["down 1"]) == ("EMBED", "EMBED")


def test_weight_of_two_concatenated_streams() -> None:
    """Its output is the residual stream. Its input is two of them (multi-token prediction)."""

    def forward(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        both = jnp.concatenate([x, block(params, x)], axis=-1)
        return head(params, both @ params["join"])

    found = names(infer(forward, {**BLOCK, "join": (2 * EMBED, EMBED)}))
    assert (found["join 0"], found["join 1"]) == ("_~", "EMBED")


def convolve(x: Any, kernel: Any, groups: int = 1) -> Any:
    numbers = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def test_grouped_convolutions() -> None:
    """The kernel has the inputs of one group, which are replicated. The other dims are guesses."""

    def forward(params: Any, x: Any) -> Any:
        for weights in params["blocks"]:
            hidden = jax.nn.relu(convolve(x, weights["in"]))
            hidden = jax.nn.relu(convolve(hidden, weights["grouped"], 4))
            x = x + convolve(hidden, weights["out"])
        return x @ params["head"]

    weights = {"in": (1, EMBED, 32), "grouped": (3, 8, 48), "out": (1, 48, EMBED)}
    shapes = {"blocks": [weights, weights], "head": (EMBED, 10)}
    inferred = infer(forward, shapes, features(BATCH, LENGTH, EMBED), seeds=[(*SEEDS[0], None)])
    found = names(inferred)
    assert [found[f"blocks/0/grouped {dim}"] for dim in range(3)] == ["_", "_", "MLP_INTERMEDIATE~"]
    assert found["blocks/0/in 2"] == found["blocks/0/out 1"] == "MLP_INTERMEDIATE~"
    assert found["blocks/0/in 1"] == found["blocks/0/out 2"] == "EMBED"
    assert inferred.open == ()


def test_block_diagonal_gates_and_sizes() -> None:
    """Without a router, blocks are guessed to be heads. Sizes and paths beat guesses."""

    def forward(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        y = (x @ params["into"]).reshape(*x.shape[:2], 4, 32)
        gate = jax.nn.sigmoid(jnp.einsum("blhi,hij->blhj", y, params["gate"]))
        return (x + (gate * y).reshape(*x.shape[:2], 128) @ params["out"]) @ params["table"].T

    shapes = {"table": (512, 64), "into": (64, 128), "gate": (4, 32, 32), "out": (128, 64)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}

    def text(**options: Any) -> dict[str, str]:
        inferred = sw.infer_axes(
            forward,
            params,
            jax.ShapeDtypeStruct((8, 16), "int32"),
            seeds=[(sw.BATCH, sw.LENGTH)],
            own_axes=["rnn"],
            **options,
        )
        marks = {(dim.path, dim.dim): "?" * dim.guess for dim in inferred.evidence}
        return {
            path: " ".join(axis_text(axis) + marks[path, at] for at, axis in enumerate(row))
            for path, row in inferred.annotations.items()
        }

    guessed = {"table": "VOCAB EMBED", "gate": "HEAD? HEAD_DIM? _?"}
    wide = "HEAD:4*HEAD_DIM:32?"
    assert text() == {**guessed, "into": f"EMBED {wide}", "out": f"{wide} EMBED"}
    assert text(sizes={128: "rnn"}) == {**guessed, "into": "EMBED RNN", "out": "RNN EMBED"}
    by_path = text(sizes={"into dim 1": "rnn", "gate dim 0": "rnn"})
    assert by_path["into"] == "EMBED RNN"
    assert by_path["gate"].startswith("RNN ")
    assert by_path["out"] == "RNN:4*HEAD_DIM:32? EMBED"


def test_images_keep_the_names_of_seeds() -> None:
    """Strides and pooling keep the seeds. Classes are not sharded beside an MLP's features."""

    def conv(x: Any, kernel: Any, stride: int = 1) -> Any:
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def forward(params: Any, x: Any) -> Any:
        x = jax.nn.relu(conv(x, params["stem"], 2) * params["scale"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        x = x + conv(jax.nn.relu(conv(x, params["up"])), params["down"])
        x = x + params["places"]
        hidden = jax.nn.relu(x.mean((1, 2)) @ params["wide"])
        return jax.nn.relu(hidden @ params["features"]) @ params["head"]

    shapes = {
        "stem": (7, 7, 3, 16),
        "scale": (16,),
        "up": (3, 3, 16, 32),
        "down": (3, 3, 32, 16),
        "places": (8, 8, 16),
        "wide": (16, 48),
        "features": (48, 24),
        "head": (24, 10),
    }
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    inferred = sw.infer_axes(
        forward,
        params,
        jax.ShapeDtypeStruct((8, 32, 32, 3), "float32"),
        seeds=[(sw.BATCH, "height", "width", "color")],
        own_axes=["color"],
    )
    rows = {name: " ".join(map(axis_text, row)) for name, row in inferred.annotations.items()}
    assert inferred.unknown == ()
    assert rows == {
        "stem": "_ _ COLOR EMBED",
        "scale": "NORM",
        "up": "_ _ EMBED MLP_INTERMEDIATE",
        "down": "_ _ MLP_INTERMEDIATE EMBED",
        "places": "HEIGHT WIDTH EMBED",
        "wide": "EMBED MLP_INTERMEDIATE",
        "features": "MLP_INTERMEDIATE _",
        "head": "MLP_INTERMEDIATE _",
    }
    for preset in ("tensor", "fsdp_tp"):
        mesh = sw.abstract_mesh("fsdp:4,tp:2")
        own = sw.Strategy.loads("""
            version = 1
            [axes]
            color = "colors"
            [rules]
            color = "-"
        """)
        pm = sw.PartitionManager(sw.Strategy.preset(preset) | own, mesh=mesh)
        pm.shardings(params, inferred.annotations)
