"""Embedding and cross-entropy: equal to NumPy and optax, and over a sharded vocabulary."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.layers import embedding, loss
from shardwright.layers.dtypes import Dtypes
from tests.layers import blocks
from tests.raising import facts, raises

VOCAB, EMBED = 32, 16
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(-1, VOCAB + 1, (8, 8))
LABELS = RNG.integers(-1, VOCAB, (8, 8))
LABELS[::3, ::2] = -1  # not `ignore`, but negative: ignored too
X = RNG.normal(size=(8, 8, EMBED)).astype(np.float32)
TABLE, HEAD = embedding.specs(VOCAB, EMBED), loss.specs(VOCAB, EMBED)
TOKEN_AXES = (sw.BATCH, sw.QUERY_LENGTH)
RESIDUAL = (sw.BATCH, sw.LENGTH, sw.EMBED)


def look_up(table: Any, tokens: Any) -> Any:
    return embedding.apply(table, tokens)


def mean_loss(head: Any, x: Any) -> Any:
    return loss.cross_entropy(x, head, LABELS).mean


@functools.cache
def unsharded(f: Any, spec: sw.ArraySpec) -> Any:
    return blocks.values_and_gradients(f, blocks.random_params(spec), TOKENS if f is look_up else X)


@blocks.cases()
def test_embedding_sharded_equals_unsharded(preset: str, kind: str) -> None:
    inputs = (blocks.random_params(TABLE), TABLE, TOKENS, TOKEN_AXES)
    wanted = unsharded(look_up, TABLE)
    rows = blocks.check_sharded("embedding", look_up, inputs, wanted, preset, kind)
    with blocks.make_manager(preset, kind) as pm:
        assert rows.sharding.is_equivalent_to(pm.sharding(RESIDUAL, shape=rows.shape), 3)


@blocks.cases()
def test_loss_sharded_equals_unsharded(preset: str, kind: str) -> None:
    inputs = (blocks.random_params(HEAD), HEAD, X, RESIDUAL)
    wanted = unsharded(mean_loss, HEAD)
    blocks.check_sharded("loss.cross_entropy", mean_loss, inputs, wanted, preset, kind)


def test_embedding_equals_numpy() -> None:
    table = blocks.random_params(TABLE)
    inside = (TOKENS >= 0) & (TOKENS < VOCAB)
    wanted = np.where(inside[..., None], table[np.where(inside, TOKENS, 0)], 0)
    (_, rows), (gradient,) = unsharded(look_up, TABLE)
    np.testing.assert_array_equal(rows, wanted)
    by_row = np.zeros_like(table)
    np.add.at(by_row, TOKENS[inside], np.cos(wanted[inside]))
    np.testing.assert_allclose(gradient, by_row, rtol=1e-5, atol=1e-6)
    half = jax.eval_shape(
        functools.partial(embedding.apply, dtypes=Dtypes(compute="bfloat16")), table, TOKENS
    )
    assert half.dtype == jnp.bfloat16


def by_numpy(head: Any, *, z_loss: float = 0.0, cap: float | None = None) -> list[float]:
    """Return mean, cross-entropy, z-loss and tokens, in float64."""
    logits = X.astype(np.float64) @ head
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    total = np.log(np.exp(logits).sum(-1))
    counts = LABELS >= 0
    chosen = np.take_along_axis(logits, np.where(counts, LABELS, 0)[..., None], -1)[..., 0]
    entropy = (total - chosen)[counts].mean()
    square = z_loss * (total**2)[counts].mean()
    return [entropy + square, entropy, square, counts.sum()]


@pytest.mark.full(but=["uint8"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "uint32"])
def test_bytes_are_tokens_and_labels(dtype: str) -> None:
    """A vocabulary of 256 has as many rows as a uint8 has values, and -100 is its 156."""
    table, ids = RNG.normal(size=(256, EMBED)), np.arange(256).reshape(8, 32)
    rows = embedding.apply(table, ids.astype(dtype))
    np.testing.assert_array_equal(rows, embedding.apply(table, ids))
    x = RNG.normal(size=(8, 32, EMBED)).astype(np.float32)
    run = jax.jit(loss.cross_entropy)
    narrow, wide = (run(x, table.T, labels) for labels in (ids.astype(dtype), ids))
    assert int(narrow.tokens) == 256
    assert float(narrow.mean) == float(wide.mean)


def test_int8_tokens_are_looked_up() -> None:
    table, ids = RNG.normal(size=(256, EMBED)), np.array([[-1, 0, 127]])
    rows = embedding.apply(table, ids.astype(np.int8))
    np.testing.assert_array_equal(rows, embedding.apply(table, ids))


def test_loss_equals_numpy() -> None:
    head = blocks.random_params(HEAD)
    options: list[dict[str, Any]] = [
        {},
        {"z_loss": 0.1, "softcap": 2.0, "chunks": 4},
        {"z_loss": 0.1, "softcap": 2.0, "tied": True, "ignore": -1},
    ]

    @jax.jit
    def run(head: Any, x: Any) -> Any:
        return [
            loss.cross_entropy(x, head.T if given.get("tied") else head, LABELS, **given)
            for given in options
        ]

    for got, given in zip(run(head, X), options, strict=True):
        wanted = by_numpy(head, z_loss=given.get("z_loss", 0.0), cap=given.get("softcap"))
        values = [got.mean, got.cross_entropy, got.z_loss, got.tokens]
        np.testing.assert_allclose(values, wanted, rtol=1e-5, err_msg=str(given))
    everything_ignored = loss.cross_entropy(X, head, np.full_like(LABELS, -100))
    assert [float(everything_ignored.mean), int(everything_ignored.tokens)] == [0.0, 0]


def test_loss_equals_optax() -> None:
    optax = pytest.importorskip("optax")
    head = blocks.random_params(HEAD)

    def wanted(head: Any, x: Any) -> Any:
        each = optax.softmax_cross_entropy_with_integer_labels(x @ head, jnp.maximum(LABELS, 0))
        return jnp.sum(jnp.where(LABELS >= 0, each, 0)) / jnp.sum(LABELS >= 0)

    blocks.assert_close(unsharded(mean_loss, HEAD), blocks.values_and_gradients(wanted, head, X))


@pytest.mark.parametrize("tied", [False, True])
def test_matmuls_of_bfloat16_stay_bfloat16(tied: bool) -> None:
    """The logits are float32, and their cotangent is rounded before it is multiplied."""
    head, x = (a.astype(jnp.bfloat16) for a in (blocks.random_params(HEAD), jnp.asarray(X)))

    def mean(head: Any, x: Any, dtypes: Dtypes) -> Any:
        head = head.T if tied else head
        return loss.cross_entropy(x, head, LABELS, tied=tied, dtypes=dtypes).mean

    gradient = jax.jit(jax.value_and_grad(mean, (0, 1)), static_argnums=2)
    half = Dtypes(compute="bfloat16")
    lines = gradient.lower(head, x, half).as_text().splitlines()
    operands = [line.split(" : (")[1].split(")")[0] for line in lines if "dot_general" in line]
    assert len(operands) == 3
    assert all("xf32>" not in types for types in operands)
    wide = [a.astype(jnp.float32) for a in (head, x)]
    (value, grads), (exact, wanted) = gradient(head, x, half), gradient(*wide, Dtypes())
    np.testing.assert_allclose(value, exact, rtol=1e-6)
    for grad, want in zip(grads, wanted, strict=True):
        error = np.linalg.norm(np.asarray(grad, np.float32) - want) / np.linalg.norm(want)
        assert error < 1e-2  # as of any matmul of bfloat16 that returns bfloat16
    # A frozen head has no tangent, and forward derivatives are those of the matmul.
    _, tangent = jax.jit(lambda x: jax.jvp(lambda x: mean(head, x, half), (x,), (x,)))(x)
    np.testing.assert_allclose(tangent, np.vdot(wanted[1], wide[1]), rtol=2e-2)


@pytest.mark.full
def test_chunks_keep_one_part_of_the_logits() -> None:
    """Values and gradients are equal, and the largest array is a chunk of the logits."""
    head = blocks.random_params(HEAD)

    def chunked(head: Any, x: Any) -> Any:
        return loss.cross_entropy(x, head, LABELS, chunks=4).mean

    blocks.assert_close(blocks.values_and_gradients(chunked, head, X), unsharded(mean_loss, HEAD))
    with blocks.make_manager("fsdp_tp_sp", "explicit") as pm:
        stored, x = pm.shard(head, HEAD, role="param"), pm.shard(X, RESIDUAL)
        compiled = jax.jit(jax.value_and_grad(chunked)).lower(stored, x).compile()
    text = compiled.as_text()
    assert text is not None
    assert "f32[4,2,8]" in text, "a chunk of the logits of one device"
    assert not [shape for shape in ("f32[4,8,8]", "f32[4,8,32]", "f32[8,8,32]") if shape in text]


def test_tied_head_is_one_leaf() -> None:
    table = blocks.random_params(TABLE)

    def tied(table: Any, tokens: Any) -> Any:
        x = embedding.apply(table, tokens)
        return loss.cross_entropy(x, table, LABELS, tied=True).mean

    wanted = blocks.values_and_gradients(tied, table, TOKENS)

    def two_leaves(table: Any, head: Any) -> Any:
        x = look_up(table, TOKENS)
        return jnp.sin(loss.cross_entropy(x, head, LABELS, tied=True).mean)

    parts = jax.jit(jax.grad(two_leaves, (0, 1)))(table, table)
    blocks.assert_close(wanted[1], (parts[0] + parts[1],))
    with blocks.make_manager("fsdp_tp", "auto"):
        blocks.assert_close(blocks.values_and_gradients(tied, table, TOKENS), wanted)


def test_logits() -> None:
    head = blocks.random_params(HEAD)
    got = loss.logits(X, head, softcap=3.0)
    wanted = 3 * np.tanh(X.astype(np.float64) @ head / 3)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    with blocks.make_manager("fsdp_tp_sp", "explicit") as pm:
        sharded = jax.jit(loss.logits)(X, pm.shard(head, HEAD, role="param"))
    assert sharded.sharding.spec == jax.sharding.PartitionSpec("fsdp", None, "tp")
    assert sharded.dtype == jnp.float32


WORDS = 27  # of a vocabulary that is padded to 32


def padded_loss(head: Any, x: Any) -> Any:
    labels = np.where(LABELS < WORDS, LABELS, -1)
    return loss.cross_entropy(x, head, labels, vocab=WORDS, z_loss=0.1, softcap=5.0, chunks=2).mean


@functools.cache
def without_padding() -> Any:
    """Return the loss and gradients of the same head without its padding."""
    head = blocks.random_params(HEAD)[:, :WORDS]
    labels = np.where(LABELS < WORDS, LABELS, -1)

    def plain(head: Any, x: Any) -> Any:
        return loss.cross_entropy(x, head, labels, z_loss=0.1, softcap=5.0, chunks=2).mean

    (value, mean), (gradient, dx) = blocks.values_and_gradients(plain, head, X)
    return (value, mean), (np.pad(gradient, ((0, 0), (0, VOCAB - WORDS))), dx)


@blocks.cases()
def test_padded_vocabulary_is_hidden(preset: str, kind: str) -> None:
    """The loss, its gradients and its z-loss are those of the vocabulary without padding."""
    with blocks.make_manager(preset, kind) as pm:
        head, x = pm.shard(blocks.random_params(HEAD), HEAD, role="param"), pm.shard(X, RESIDUAL)
        got = blocks.values_and_gradients(padded_loss, head, x)
        shown = jax.jit(functools.partial(loss.logits, vocab=WORDS))(x, head)
        whole = jax.jit(loss.logits)(x, head)
    blocks.assert_close(got, without_padding())
    assert not np.asarray(got[1][0])[:, WORDS:].any()
    shown, whole = np.asarray(shown), np.asarray(whole)
    np.testing.assert_array_equal(shown[..., :WORDS], whole[..., :WORDS])
    assert np.all(shown[..., WORDS:] == -np.inf)


def test_padding_of_a_tied_table_stays_zero() -> None:
    table = np.pad(blocks.random_params(TABLE)[:WORDS], ((0, VOCAB - WORDS), (0, 0)))
    tokens = np.clip(TOKENS, 0, WORDS - 1)

    def tied(table: Any) -> Any:
        x = embedding.apply(table, tokens)
        return loss.cross_entropy(x, table, tokens, tied=True, vocab=WORDS).mean

    gradient = jax.jit(jax.grad(tied))(table)
    assert not np.asarray(gradient[WORDS:]).any()
    np.testing.assert_allclose(
        gradient[:WORDS],
        jax.jit(
            jax.grad(
                lambda rows: (
                    loss.cross_entropy(embedding.apply(rows, tokens), rows, tokens, tied=True).mean
                )
            )
        )(table[:WORDS]),
        atol=1e-6,
    )
    with raises(sw.LayerError, 1, 32, 33):
        loss.logits(X, table.T, vocab=VOCAB + 1)
    with raises(sw.LayerError, 30, 27, path="labels", fix="ignore"):
        loss.cross_entropy(X, table.T, np.full((8, 8), 30), vocab=WORDS)


def test_bad_input() -> None:
    table, head = blocks.random_params(TABLE), blocks.random_params(HEAD)
    cases: list[tuple[Any, str]] = [
        (lambda: embedding.apply(table[0], TOKENS), facts("(16,)", path="table")),
        (lambda: embedding.apply(table, TOKENS[0]), facts("(8,)", path="tokens")),
        (
            lambda: embedding.apply(table, TOKENS.astype(np.float32)),
            facts("float32", path="tokens"),
        ),
        (
            lambda: loss.cross_entropy(X, head.T, LABELS),
            facts("(32, 16)", "(8, 8, 16)", path="head"),
        ),
        (
            lambda: loss.cross_entropy(X, head, LABELS[0]),
            facts("(8,)", path="labels", fix="length"),
        ),
        (lambda: loss.cross_entropy(X, head, LABELS * 1.0), facts("float32", path="labels")),
        (lambda: loss.cross_entropy(X, head, LABELS, chunks=3), facts(3, 8, path="chunks")),
        (lambda: loss.cross_entropy(X, head, LABELS, chunks=0), facts("chunks", 0)),
        (
            lambda: loss.cross_entropy(X.astype(np.float16), head, LABELS),
            facts("float16", 0, path="x", fix="bfloat16"),
        ),
        (
            lambda: loss.cross_entropy(X, head, LABELS, dtypes=Dtypes(compute="float16")),
            facts("float16", 0, path="x", fix="bfloat16"),
        ),
        (lambda: loss.cross_entropy(X, head, LABELS, z_loss=-1), facts(-1, path="z_loss")),
        (lambda: loss.logits(X, head, softcap=0), facts(0, path="softcap")),
    ]
    for call, message in cases:
        with raises(sw.ShardingError, message) as caught:
            call()
        assert "fix  " in str(caught.value)
    rules = 'version = 1\nname = "own"\n[rules]\nbatch = "fsdp"\nquery_length = "tp"\nvocab = "tp"'
    strategy = sw.Strategy.loads(rules)
    mesh = blocks.make_manager("fsdp_tp", "auto").mesh
    with (
        sw.PartitionManager(strategy, mesh=mesh),
        raises(sw.LayerError, "tp", "VOCAB", path="tokens", fix="VOCAB"),
    ):
        embedding.apply(table, TOKENS)
