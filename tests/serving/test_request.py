"""Requests are checked when they are made, all that is wrong at once."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.errors import ServingError
from shardwright.serving import Request, Sampling


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": []}, "prompt: no tokens"),
        ({"prompt": "text"}, "prompt: prompt='text'"),
        ({"prompt": [1, -1]}, "prompt: token 1 is -1"),
        ({"prompt": [2**31]}, "prompt: token 0 is 2147483648"),
        ({"prompt": [1.5]}, r"prompt: prompt=\[1.5\]"),
        ({"prompt": [True]}, "prompt: token 0 is True"),
        (
            {"max_new_tokens": 0},
            "^max_new_tokens must be a positive integer, got 0\n  fix   pass max_new_tokens=1$",
        ),
        ({"max_new_tokens": True}, "max_new_tokens must be a positive integer, got True"),
        ({"stop": "END"}, "stop='END'"),
        ({"stop": [[]]}, "stop: no tokens"),
        ({"stop": ["END"]}, "stop='END'"),
        ({"stop": [True]}, "stop: token 0 is True"),
        ({"sampling": 0.5}, "sampling=0.5"),
        ({"on_token": 3}, "on_token=3"),
        (
            {"prompt": [], "max_new_tokens": -2},
            "(?s)2 problems.*no tokens.*max_new_tokens must be a positive integer, got -2",
        ),
    ],
)
def test_invalid_requests(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ServingError, match=says):
        Request(**({"prompt": [1], "max_new_tokens": 1} | fields))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        (
            {"top_k": 0},
            (
                "top_k must be an integer from 1 to 2147483647, got 0"
                "\n  fix   pass a number of tokens, or None for all"
            ),
        ),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"seed": 2**32}, "seed must be an integer from 0 to 4294967295, got 4294967296"),
        ({"seed": -1, "top_k": 1.5}, "(?s)2 problems.*got 1.5.*got -1"),
    ],
)
def test_invalid_sampling(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ServingError, match=says):
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
