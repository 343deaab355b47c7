"""Routers beside NumPy, and the statistics of a call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.layers import moe
from shardwright.layers.moe.routing import route, shares
from tests.layers.moe.reference import config, error, manager, parameters, tokens

routed = jax.jit(route, static_argnums=0)


def numpy_routes(
    moe_config: moe.MoEConfig, logits: np.ndarray, bias: np.ndarray
) -> list[dict[int, float]]:
    """Pick experts token by token, in float64: expert -> weight."""
    routes = []
    for row in logits.astype(np.float64):
        scores = 1 / (1 + np.exp(-row))
        if moe_config.score == "softmax":
            scores = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        preferred = scores + bias
        groups = np.split(np.arange(moe_config.experts), moe_config.groups)
        best = [np.sort(preferred[group])[-2:].sum() for group in groups]
        chosen = np.argsort(best)[::-1][: moe_config.top_groups]
        allowed = [expert for group in chosen for expert in groups[group]]
        picked = sorted(allowed, key=lambda expert: -preferred[expert])[: moe_config.per_token]
        total = scores[picked].sum() if moe_config.normalize else 1.0
        routes.append({int(e): scores[e] / total * moe_config.scale for e in picked})
    return routes


def test_routes_equal_numpy() -> None:
    random = np.random.default_rng(3)
    bias = random.standard_normal(16) / 4
    faults = []
    for score in ("softmax", "sigmoid"):
        for groups, best, normalize, scale in (
            (1, 1, True, 1),
            (4, 2, True, 2.5),
            (8, 4, False, 1),
        ):
            moe_config = config(
                experts=16,
                per_token=4,
                score=score,
                groups=groups,
                top_groups=best,
                normalize=normalize,
                scale=scale,
            )
            router, x = parameters(moe_config)["router"], tokens(32, 16)
            routes = routed(moe_config, router, jnp.asarray(bias, jnp.float32), x)
            expected = numpy_routes(moe_config, x @ router, bias)
            for row, wanted in enumerate(expected):
                weights = dict(zip(routes.experts[row].tolist(), routes.weights[row], strict=True))
                if weights.keys() != wanted.keys() or any(
                    abs(weights[expert] - wanted[expert]) > 1e-5 for expert in wanted
                ):
                    faults.append((score, groups, row, weights, wanted))
    assert not faults


@jax.jit
def underflowing(router: Any) -> Any:
    moe_config = config(score="sigmoid", balance_loss=0.1)
    x = np.eye(2, 16, dtype=np.float32)

    def weighted(router: Any) -> Any:
        routes = route(moe_config, router, None, x)
        return jnp.sum(routes.weights * jnp.array([0.0, 3.0])) + routes.probabilities[0, 0], routes

    return jax.grad(weighted, has_aux=True)(router)


@pytest.mark.parametrize("least", [-20.0, -50.0, -200.0, -1e30])
def test_weights_where_all_scores_underflow(least: float) -> None:
    """The weights are those of the logarithms: positive, with sum 1, and with a finite gradient."""
    router = np.zeros((16, 8), np.float32)
    router[:2] = 2 * least
    router[0, :2] = least + 1, least
    router[1] = least
    gradient, routes = underflowing(router)
    second = float(jax.nn.sigmoid(1.0)) if least > -1e10 else 0.5
    np.testing.assert_allclose(routes.weights[0], [second, 1 - second], rtol=1e-5)
    np.testing.assert_allclose(routes.weights[1], [0.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(routes.probabilities.sum(-1), 1, rtol=1e-6)
    assert np.isfinite(gradient).all()
    if least > -1e10:
        assert np.abs(gradient[0]).max() > 0.1


def test_ordinary_weights_are_plain_quotients() -> None:
    """Bit for bit, as if the case of underflow did not exist."""
    logits = 8 * tokens(256, 4)
    scores = jax.nn.sigmoid(logits)
    got = jax.jit(shares)(scores, jax.nn.log_sigmoid(logits))
    wanted = jax.jit(lambda scores: scores / scores.sum(-1, keepdims=True))(scores)
    np.testing.assert_array_equal(got, wanted)


def test_bias_that_picks_experts_without_score() -> None:
    """A softmax of (200, 0, 0, ...) is 0 elsewhere, and a bias may pick only those."""
    x = np.eye(1, 16, dtype=np.float32)
    router = np.zeros((16, 8), np.float32)
    router[0, 0] = 200
    bias = jnp.zeros(8).at[0].set(-10.0)
    routes = routed(config(), router, bias, x)
    assert routes.experts.tolist() == [[1, 2]]
    np.testing.assert_allclose(routes.weights, [[0.5, 0.5]])


def test_equal_scores_go_to_the_lower_index() -> None:
    routes = routed(config(), np.zeros((16, 8), np.float32), None, tokens(4, 16))
    assert routes.experts.tolist() == [[0, 1]] * 4


@pytest.mark.full
def test_losses_are_global_means() -> None:
    moe_config = config(balance_loss=0.5, z_loss=0.25)
    params, x = parameters(moe_config), tokens(8, 4, 16)
    flat = x.reshape(-1, 16).astype(np.float64)
    logits = flat @ params["router"]
    exp = np.exp(logits)
    probabilities = exp / exp.sum(-1, keepdims=True)
    picked = np.zeros(8)
    for row in np.argsort(-logits)[:, :2]:
        picked[row] += 1 / (32 * 2)
    balance = 8 * (picked * probabilities.mean(0)).sum()
    z = np.square(np.log(exp.sum(-1))).mean()

    def aux(params: dict[str, jax.Array]) -> jax.Array:
        return moe.apply(moe_config, params, x)[1].stats.aux

    alone = jax.grad(aux)(params)["router"]
    with manager("moe_ep", "fsdp:2,ep:4"):
        value, gradient = jax.jit(jax.value_and_grad(aux))(params)
    assert error(value, 0.5 * balance + 0.25 * z) <= 1e-6
    assert error(gradient["router"], alone) <= 1e-5


def test_dropped_equals_a_numpy_count() -> None:
    moe_config = config(capacity=moe.CapacityFactor(0.75))
    params, x = parameters(moe_config), tokens(8, 4, 16)
    with manager("moe_ep", "fsdp:2,ep:4"):
        dispatch = moe.explain(moe_config, x.shape)
        y, state = moe.apply(moe_config, params, x)
        again, _ = moe.apply(moe_config, params, x)
    # Every device sends the tokens of one row of the batch.
    assert dispatch.slots == 1  # ceil(4 tokens * 2 / 8 experts * 0.75)
    dropped, reference = 0, np.zeros_like(x)
    for sender, rows in enumerate(x):
        used = np.zeros(8, int)
        logits = rows @ params["router"]
        for position, row in enumerate(logits):
            best = np.argsort(-row, kind="stable")[:2]
            weights = np.exp(row[best]) / np.exp(row[best]).sum()
            for expert, weight in zip(best, weights, strict=True):
                used[expert] += 1
                if used[expert] > dispatch.slots:
                    dropped += 1
                    continue
                token = rows[position]
                gate = token @ params["gate"][expert]
                hidden = gate / (1 + np.exp(-gate)) * (token @ params["up"][expert])
                reference[sender, position] += weight * (hidden @ params["down"][expert])
    assert 0 < dropped == int(state.stats.dropped)
    assert int(state.stats.load.sum()) == 64
    assert error(y, reference) <= 1e-5
    np.testing.assert_array_equal(again, y)


def test_bias_moves_tokens_and_is_updated() -> None:
    moe_config = config(per_token=1)
    params, x = parameters(moe_config), tokens(8, 4, 16)
    bias = jnp.zeros(8).at[3].set(10.0)
    with manager("moe_ep", "fsdp:2,ep:4"):
        y, state = moe.apply(moe_config, params, x, state=moe.MoEState(bias=bias))
    assert state.stats.load.tolist() == [0, 0, 0, 32, 0, 0, 0, 0]
    # The bias picks; it does not weigh.
    assert jnp.isfinite(y).all()
    updated = moe.update_bias(state.bias, state.stats.load, rate=0.5)
    np.testing.assert_array_equal(updated, [0.5, 0.5, 0.5, 9.5, 0.5, 0.5, 0.5, 0.5])
