"""Log-probabilities of the tokens of a request, beside a whole forward pass in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwright import serving
from shardwright.serving import Request, Sampling
from tests.serving.stub import SHAPE, VOCAB, stub, text_of

PAGED: dict[str, Any] = {"cache": "paged", "cache_options": {"page_size": 4, "pages": 5}}


@pytest.mark.parametrize("options", [{}, PAGED, {"decode_steps": 3}, PAGED | {"decode_steps": 3}])
@pytest.mark.full(but=["options0", "options2"])
def test_logprobs_are_those_of_the_model(options: dict[str, Any]) -> None:
    engine = serving.Engine(
        stub, np.int32(1), shape=SHAPE, slots=2, capacity=16, prefill_chunk=3, **options
    )
    # A temperature of 3 draws tokens of both probabilities.
    requests = [
        Request(prompt=[1, 2, 3], max_new_tokens=8, sampling=Sampling(temperature=3.0, seed=seed))
        for seed in range(4)
    ]
    seen = set()
    for request, done in zip(requests, engine.run(requests), strict=True):
        assert len(done.logprobs) == len(done.tokens) == 8
        for at, (token, logprob) in enumerate(zip(done.tokens, done.logprobs, strict=True)):
            # The model gives one token the logit 4, and all others 0.
            likeliest = text_of([*request.prompt, *done.tokens[:at]], 1, shift=1)[0]
            expected = 4.0 * (token == likeliest) - np.log(np.exp(4.0) + VOCAB - 1)
            np.testing.assert_allclose(logprob, expected, atol=1e-5)
            seen.add(token == likeliest)
    assert seen == {True, False}


def test_logprobs_leave_out_a_stop_sequence() -> None:
    engine = serving.Engine(stub, np.int32(1), shape=SHAPE, slots=2, capacity=16, prefill_chunk=3)
    text = text_of([1, 2], 5, shift=1)
    done = engine.run([Request(prompt=[1, 2], max_new_tokens=8, stop=[text[3]])])[0]
    assert len(done.logprobs) == len(done.tokens) == text.index(text[3])
