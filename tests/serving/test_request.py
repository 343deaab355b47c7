"""Requests are checked when they are made, all that is wrong at once."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.errors import ServingError
from shardwright.serving import Request, Sampling
from tests.raising import Facts, facts, raises


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": []}, facts("tokens", path="prompt")),
        ({"prompt": "text"}, facts("text", path="prompt")),
        ({"prompt": [1, -1]}, facts(1, -1, path="prompt")),
        ({"prompt": [2**31]}, facts(0, 2147483648, path="prompt")),
        ({"prompt": [1.5]}, facts("1.5", path="prompt")),
        ({"prompt": [True]}, facts(0, "True", path="prompt")),
        (
            {"max_new_tokens": 0},
            facts(0, path="max_new_tokens", fix=("max_new_tokens", "1")),
        ),
        ({"max_new_tokens": True}, facts("True", path="max_new_tokens", fix="max_new_tokens")),
        ({"stop": "END"}, facts("END", path="stop")),
        ({"stop": [[]]}, facts("tokens", path="stop")),
        ({"stop": ["END"]}, facts("END", path="stop")),
        ({"stop": [True]}, facts(0, "True", path="stop")),
        ({"sampling": 0.5}, facts("0.5", path="sampling", fix="serving.Sampling")),
        ({"on_token": 3}, facts(3, path="on_token")),
        (
            {"prompt": [], "max_new_tokens": -2},
            (
                facts("tokens", path="prompt", fix="token"),
                facts(-2, path="max_new_tokens", fix="max_new_tokens"),
            ),
        ),
    ],
)
def test_invalid_requests(fields: dict[str, Any], says: Facts) -> None:
    with raises(ServingError, says):
        Request(**({"prompt": [1], "max_new_tokens": 1} | fields))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": -0.1}, facts("-0.1", path="temperature", fix="float32")),
        ({"temperature": float("nan")}, facts("nan", path="temperature", fix="float32")),
        ({"temperature": float("inf")}, facts("inf", path="temperature", fix="float32")),
        (
            {"top_k": 0},
            facts(1, 2147483647, 0, path="top_k", fix="None"),
        ),
        ({"top_p": 0.0}, facts("0.0", path="top_p")),
        ({"top_p": 1.1}, facts("1.1", path="top_p")),
        ({"seed": 2**32}, facts(0, 4294967295, 4294967296, path="seed", fix="seed")),
        (
            {"seed": -1, "top_k": 1.5},
            (
                facts(1, 2147483647, "1.5", path="top_k", fix="None"),
                facts(0, 4294967295, -1, path="seed", fix=("seed", "0")),
            ),
        ),
    ],
)
def test_invalid_sampling(fields: dict[str, Any], says: Facts) -> None:
    with raises(ServingError, says):
        Sampling(**fields)


def test_tokens_may_be_any_integers() -> None:
    request = Request(
        prompt=np.array([3, 4], np.uint8), max_new_tokens=5, stop=[np.int64(7), np.array([8, 9])]
    )
    assert request.prompt == (3, 4)
    assert request.stop == ((7,), (8, 9))
    for stop in (np.array([7, 8]), jnp.array([7, 8]), [jnp.array(7), np.array(8)]):
        assert Request(prompt=[1], max_new_tokens=1, stop=stop).stop_sequences == ((7,), (8,))
    rows = Request(prompt=[1], max_new_tokens=1, stop=np.array([[7, 8], [9, 9]]))
    assert rows.stop_sequences == ((7, 8), (9, 9))
    assert request.rows == 6
