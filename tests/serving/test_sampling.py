"""Drawing tokens: by the chances that the logits give, by a key of each request's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.serving import Sampling
from shardwright.serving.sampling import draw_of, logprobs_of, rules_of, sample

LOGITS = np.log(np.array([0.05, 0.4, 0.15, 0.3, 0.1], np.float32))
DRAWN = 4000


def drawn(sampling: Sampling, logits: Any = LOGITS) -> np.ndarray:
    """Return draws from the same logits that differ only in the index."""
    rules = rules_of(DRAWN, dict.fromkeys(range(DRAWN), sampling))
    draw = draw_of(jnp.asarray(rules), jnp.arange(DRAWN))
    return np.asarray(jax.jit(sample)(jnp.broadcast_to(logits, (DRAWN, logits.size)), draw))


def first_draws(batch: int, sampling: dict[int, Sampling]) -> Any:
    """Return how the sequences of a batch draw their first tokens."""
    return draw_of(jnp.asarray(rules_of(batch, sampling)), jnp.zeros(batch, jnp.int32))


@pytest.mark.parametrize(
    ("sampling", "chances"),
    [
        (Sampling(temperature=1.0), [0.05, 0.4, 0.15, 0.3, 0.1]),
        (Sampling(temperature=1.0, top_k=2), [0, 4 / 7, 0, 3 / 7, 0]),
        (Sampling(temperature=1.0, top_k=1), [0, 1, 0, 0, 0]),
        (Sampling(temperature=1.0, top_k=99, seed=2**32 - 1), [0.05, 0.4, 0.15, 0.3, 0.1]),
        (Sampling(temperature=1.0, top_p=0.65), [0, 4 / 7, 0, 3 / 7, 0]),
        (Sampling(temperature=1.0, top_p=0.75), [0, 8 / 17, 3 / 17, 6 / 17, 0]),
        (Sampling(temperature=1.0, top_p=1e-6), [0, 1, 0, 0, 0]),
        (
            Sampling(temperature=0.5),
            [0.0025 / 0.285, 0.16 / 0.285, 0.0225 / 0.285, 0.09 / 0.285, 0.01 / 0.285],
        ),
        (Sampling(), [0, 1, 0, 0, 0]),
    ],
)
def test_sampling_frequencies(sampling: Sampling, chances: list[float]) -> None:
    actual = np.bincount(drawn(sampling), minlength=5) / DRAWN
    # Four standard deviations of a relative frequency are at most 0.032 here.
    np.testing.assert_allclose(actual, chances, atol=0.032)
    assert all(share == 0 for share, chance in zip(actual, chances, strict=True) if chance == 0)


@pytest.mark.full
def test_token_depends_on_own_logits_seed_and_index() -> None:
    logits = jax.random.normal(jax.random.key(0), (6, 40))
    sampling = {
        at: Sampling(temperature=0.5 + at, top_k=5 * at + 1, top_p=0.9, seed=at)
        for at in range(1, 6)
    }
    together = np.asarray(sample(logits, first_draws(6, sampling)))
    for at in range(6):
        given = {} if at == 0 else {0: sampling[at]}
        assert np.asarray(sample(logits[at : at + 1], first_draws(1, given))).tolist() == [
            together[at]
        ]
    assert together[0] == np.argmax(logits[0])


@pytest.mark.full
def test_seeds_and_positions_draw_differently() -> None:
    flat = np.zeros(1000, np.float32)
    first, other = (drawn(Sampling(temperature=1.0, seed=seed), flat) for seed in (1, 2))
    assert len(set(first.tolist())) > 900
    assert np.mean(first == other) < 0.01


@pytest.mark.full(but=["row0--1-0.0"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("row", "token"),
    [([np.nan, 1, 2], -1), ([-np.inf] * 3, -1), ([np.inf, 0, 1], -1), ([-np.inf, 0, -np.inf], 1)],
)
def test_logits_that_are_not_numbers(row: list[float], token: int, temperature: float) -> None:
    given = first_draws(1, {0: Sampling(temperature=temperature)})
    assert np.asarray(sample(jnp.asarray([row], jnp.float32), given)).tolist() == [token]


def test_argmax_takes_lowest_of_equal_tokens() -> None:
    assert np.asarray(sample(jnp.zeros((2, 4)), first_draws(2, {}))).tolist() == [0, 0]


@pytest.mark.full
def test_logprobs_have_the_bits_of_log_softmax() -> None:
    random = np.random.default_rng(0)
    logits = jnp.asarray(random.normal(size=(6, 200)) * [[1], [30], [1e4], [1], [1], [1]])
    logits = logits.astype(jnp.float32).at[3, 7].set(jnp.nan).at[4].set(-jnp.inf)
    tokens = jnp.asarray([0, 199, 3, 5, 9, 7])
    logits = logits.at[5, 7].set(-jnp.inf)
    expected = jax.nn.log_softmax(logits)[jnp.arange(6), tokens]
    np.testing.assert_array_equal(logprobs_of(logits, tokens), expected)
    assert np.isnan(expected[3:5]).all()
    assert expected[5] == -np.inf
