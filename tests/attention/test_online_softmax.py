"""The running softmax, piece by piece, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.attention.parts import online_softmax as online
from shardwright.vocabulary.axes import DEFAULT_MASK_VALUE

BATCH, HEADS, KV_HEADS, Q, KV, D, V = 2, 6, 2, 3, 6, 5, 7
RNG = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


start, update, merge, finish = map(
    jax.jit, (online.start, online.update, online.merge, online.finish)
)
QUERIES, KEYS, VALUES = (
    draw(BATCH, Q, HEADS, D),
    draw(BATCH, KV, KV_HEADS, D),
    draw(BATCH, KV, KV_HEADS, V),
)
LOGITS = draw(BATCH, HEADS, Q, KV) * 3
SCALES = np.abs(draw(BATCH, KV, KV_HEADS)) + 0.5
SINKS = draw(HEADS)
# The last query of the first sequence sees nothing. The first query of the second sequence sees
# only the second piece.
SEEN = RNG.random((BATCH, HEADS, Q, KV)) < 0.7
SEEN[0, :, -1] = False
SEEN[1, :, 0, :4] = False
SEEN[1, :, 0, 4:] = True


def expected(
    seen: np.ndarray = SEEN, sinks: Any = None, scale: Any = None, keep: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Output and logsumexp in float64."""
    weights = np.where(seen, np.exp(LOGITS.astype(np.float64)), 0.0)
    total = weights.sum(-1) + (0.0 if sinks is None else np.exp(sinks.astype(np.float64))[:, None])
    values = VALUES.astype(np.float64) * (1.0 if scale is None else scale[..., None])
    values = np.repeat(values, HEADS // KV_HEADS, axis=2)
    kept = weights if keep is None else weights * keep
    out = np.einsum("bhts,bshd->bthd", kept, values)
    with np.errstate(divide="ignore"):
        lse = np.log(total)
    return out / np.where(total == 0, 1.0, total).swapaxes(1, 2)[..., None], lse


def piece(state: online.Running, low: int, high: int, **extra: Any) -> online.Running:
    cut = {
        name: jnp.asarray(x[:, low:high] if name == "v_scale" else x[..., low:high])
        for name, x in extra.items()
    }
    return update(
        state,
        jnp.asarray(LOGITS[..., low:high]),
        jnp.asarray(SEEN[..., low:high]),
        jnp.asarray(VALUES[:, low:high]),
        **cut,
    )


def begin() -> online.Running:
    return start(jnp.asarray(QUERIES), jnp.asarray(VALUES))


def assert_finished(
    state: online.Running, wanted: tuple[np.ndarray, np.ndarray], **options: Any
) -> None:
    out, lse = finish(state, **options)
    assert out.dtype == lse.dtype == jnp.float32
    np.testing.assert_allclose(out, wanted[0], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse, wanted[1], rtol=2e-5, atol=2e-6)


def test_state_before_any_key() -> None:
    state = start(jnp.asarray(QUERIES, jnp.bfloat16), jnp.asarray(VALUES, jnp.bfloat16))
    assert {x.dtype for x in (state.o, state.m, state.l)} == {jnp.dtype(jnp.float32)}
    np.testing.assert_array_equal(state.o, np.zeros((BATCH, HEADS, Q, V)))
    np.testing.assert_array_equal(
        state.m, np.full((BATCH, HEADS, Q), np.float32(DEFAULT_MASK_VALUE))
    )
    np.testing.assert_array_equal(state.l, np.zeros((BATCH, HEADS, Q)))


@pytest.mark.parametrize("cuts", [(0, 6), (0, 4, 6), (0, 1, 2, 6)])
def test_pieces_give_the_whole(cuts: tuple[int, ...]) -> None:
    state = begin()
    for low, high in itertools.pairwise(cuts):
        state = piece(state, low, high)
    assert_finished(state, expected())
    out, lse = finish(state)
    assert not out[0, -1].any(), "a row without keys is exactly 0"
    assert np.isneginf(lse[0, :, -1]).all()


def test_scaled_and_dropped_values() -> None:
    keep = np.where(RNG.random(LOGITS.shape) < 0.5, 2.0, 0.0).astype(np.float32)
    state = piece(piece(begin(), 0, 2, v_scale=SCALES, keep=keep), 2, 6, v_scale=SCALES, keep=keep)
    assert_finished(state, expected(scale=SCALES, keep=keep))


def test_disjoint_sets_of_keys_merge() -> None:
    first, second = piece(begin(), 0, 4), piece(begin(), 4, 6)
    assert_finished(merge(first, second), expected())
    assert_finished(merge(second, first), expected())
    assert_finished(merge(first, begin()), finish(first))


def test_sinks_take_weight_and_give_nothing() -> None:
    state = piece(begin(), 0, 6)
    assert_finished(state, expected(sinks=SINKS), sinks=jnp.asarray(SINKS))
    assert_finished(online.add_sinks(state, jnp.asarray(SINKS)), expected(sinks=SINKS))
    large = SINKS + 20
    assert_finished(state, expected(sinks=large), sinks=jnp.asarray(large))


def test_rounding_error_of_a_logsumexp() -> None:
    """Three logits of -1e9: the logarithm of 3 does not fit beside them."""
    logits = jnp.full((1, 1, 2, 3), -1e9, jnp.float32)
    seen = jnp.array([[True] * 3, [False] * 3])[None, None]
    values = jnp.ones((1, 3, 1, 1))
    state = update(start(jnp.ones((1, 2, 1, 1)), values), logits, seen, values)
    lse = finish(state)[1]
    lost = online.lse_error_of(state, lse)
    np.testing.assert_allclose(lost[0, 0], [np.log(3.0), 0.0], rtol=1e-6)
    state = piece(begin(), 0, 6)
    assert np.abs(online.lse_error_of(state, finish(state)[1])).max() < 1e-5


@pytest.mark.full(but=["bfloat16"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_matmuls_by_head(dtype: Any) -> None:
    """Queries, keys and weights meet the key heads of their group; sums are float32."""
    q, k, v = (jnp.asarray(x, dtype) for x in (QUERIES, KEYS, VALUES))
    p = jnp.asarray(LOGITS, dtype)
    group = HEADS // KV_HEADS
    wide_q, wide_p = np.asarray(q, np.float64), np.asarray(p, np.float64)
    wide_k, wide_v = (np.repeat(np.asarray(x, np.float64), group, axis=2) for x in (k, v))
    grouped = (
        wide_p.reshape(BATCH, KV_HEADS, group, Q, KV),
        wide_q.reshape(BATCH, Q, KV_HEADS, group, D),
    )
    for actual, wanted in (
        (online.scores_of(q, k), np.einsum("bthd,bshd->bhts", wide_q, wide_k)),
        (online.weighted_sum(p, v), np.einsum("bhts,bshd->bhtd", wide_p, wide_v)),
        (online.queries_of(p, k), np.einsum("bhts,bshd->bthd", wide_p, wide_k)),
        (online.keys_of(p, q, KV_HEADS), np.einsum("bkgts,btkgd->bskd", *grouped)),
    ):
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-4)


def test_logits_are_scaled_then_biased_then_capped() -> None:
    bias = draw(BATCH, 1, Q, KV)
    scales = np.repeat(SCALES, HEADS // KV_HEADS, axis=2).swapaxes(1, 2)[:, :, None]
    keys = np.repeat(KEYS.astype(np.float64), HEADS // KV_HEADS, axis=2)
    plain = np.einsum("bthd,bshd->bhts", QUERIES.astype(np.float64), keys) * 0.3
    scores = online.scores_of(jnp.asarray(QUERIES), jnp.asarray(KEYS))
    for options, wanted in (
        ({}, plain),
        ({"k_scale": jnp.asarray(SCALES)}, plain * scales),
        ({"bias": jnp.asarray(bias)}, plain + bias),
        ({"softcap": 2.0, "bias": jnp.asarray(bias)}, 2.0 * np.tanh((plain + bias) / 2.0)),
    ):
        actual = online.logits_of(scores, scale=0.3, **options)  # type: ignore[arg-type]
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
