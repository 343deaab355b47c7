"""The values that callers pass to an engine and get back. They have no arrays."""

from __future__ import annotations

import dataclasses
import enum
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from shardwright.errors import Problem, ServingError, raise_problems
from shardwright.vocabulary.integers import integer_problem

MOST_SEED = 2**32 - 1
# The smallest normal and the largest number of float32. Tokens are drawn in float32.
LEAST_FLOAT, MOST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127
MOST_TOKEN = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn. Defaults to the most likely token.

    A draw depends only on the logits, the seed and the number of tokens that the request has
    written.

    Attributes:
      temperature: Divides the logits. 0 takes the most likely token. If several are equally likely,
        it takes the one with the lowest number.
      top_k: Number of the most likely tokens to draw from. None means all tokens.
      top_p: Draw from the smallest set of most likely tokens whose probabilities sum to at least
        this number. 1 means all tokens.
      seed: Seed of the request, from 0 to 2**32 - 1.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if not _number(self.temperature) or not (
            self.temperature == 0 or LEAST_FLOAT <= self.temperature <= MOST_FLOAT
        ):
            fix = (
                "pass 0 for the most likely token, or a float in the range of float32, from "
                f"{LEAST_FLOAT:.3g} to {MOST_FLOAT:.3g}"
            )
            problems.append(_problem("temperature", self.temperature, fix))
        if self.top_k is not None:
            problems += _read(
                self, "top_k", most=MOST_TOKEN, fix="pass a number of tokens, or None for all"
            )
        if not _number(self.top_p) or not 0 < self.top_p <= 1:
            problems.append(_problem("top_p", self.top_p, "pass a probability above 0 and up to 1"))
        problems += _read(self, "seed", least=0, most=MOST_SEED)
        raise_problems(problems)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, and how to continue it.

    Attributes:
      prompt: Token numbers. There is at least one.
      max_new_tokens: Maximum number of tokens to write, including those of a stop sequence.
      sampling: How tokens are drawn.
      stop: Tokens, or sequences of tokens, that end the text. They are not part of it.
      on_token: Called with each token, as soon as the token can no longer become part of a stop
        sequence. An exception that it raises fails only this request.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    stop: Sequence[int | Sequence[int]] = ()
    on_token: Callable[[int], object] | None = None

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        object.__setattr__(self, "prompt", _tokens("prompt", self.prompt, problems))
        stop = self.stop
        # Tokens that a program computes are arrays.
        is_array = isinstance(stop, (np.ndarray, jax.Array)) and stop.ndim
        if isinstance(stop, (str, bytes)) or not (is_array or isinstance(stop, Sequence)):
            problems.append(_problem("stop", stop, "pass a list of tokens, or of lists of tokens"))
        else:
            entries = (
                _tokens("stop", (entry,) if _is_single(entry) else entry, problems)
                for entry in stop
            )
            object.__setattr__(self, "stop", tuple(entries))
        problems += _read(self, "max_new_tokens")
        if not isinstance(self.sampling, Sampling):
            problems.append(
                _problem(
                    "sampling", self.sampling, "pass serving.Sampling(temperature=..., seed=...)"
                )
            )
        if self.on_token is not None and not callable(self.on_token):
            problems.append(
                _problem("on_token", self.on_token, "pass a function of one token, or None")
            )
        raise_problems(problems)

    @property
    def rows(self) -> int:
        """Largest number of cache rows that the request needs. Its last token needs no row."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def stop_sequences(self) -> tuple[tuple[int, ...], ...]:
        """`stop`, with every entry as a sequence."""
        return tuple(
            tuple(entry) if isinstance(entry, Sequence) else (entry,) for entry in self.stop
        )


class Finish(enum.StrEnum):
    """Why a request ended."""

    LENGTH = "length"
    STOP = "stop"
    CANCELED = "canceled"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The result of a request.

    Attributes:
      tokens: The text, without the stop sequence that ended it.
      finish: Why it ended.
      error: The error that made it fail, or None.
      versions: Versions of the weights that read its prompt and drew its tokens, in order. There
        are several if the weights were updated while it ran.
      logprobs: Natural logarithm of the probability that the model gave each token, before
        temperature, top_k and top_p.
    """

    tokens: tuple[int, ...]
    finish: Finish
    error: Exception | None = None
    versions: tuple[int | str, ...] = ()
    logprobs: tuple[float, ...] = ()


def _tokens(name: str, given: Any, problems: list[Problem]) -> tuple[int, ...]:
    """Return token numbers as a tuple of ints, and add their problems to `problems`."""
    fix = "pass token numbers, which are non-negative integers, as the tokenizer returns them"
    if isinstance(given, (str, dict, set)):
        problems.append(_problem(name, given, fix))
        return ()
    try:
        values = list(given)
        # Unlike a size, a token may also be a 0-d array, because programs compute tokens.
        tokens = tuple(-1 if isinstance(token, bool) else operator.index(token) for token in values)
    except TypeError:
        problems.append(_problem(name, given, fix))
        return ()
    index = next((at for at, token in enumerate(tokens) if not 0 <= token <= MOST_TOKEN), None)
    if index is not None:
        what = f"token {index} is {values[index]!r}"
        problems.append(Problem(error=ServingError, what=what, path=name, fix=fix))
    if not tokens:
        problems.append(
            Problem(error=ServingError, what="no tokens", path=name, fix="pass at least one token")
        )
    return tokens


def _is_single(entry: Any) -> bool:
    """Tell whether an entry of `stop` is one token."""
    return isinstance(entry, numbers.Integral) or getattr(entry, "ndim", None) == 0


def _read(value: Any, name: str, **limits: Any) -> list[Problem]:
    """Store an integer field of a frozen dataclass as an int. Return its problems."""
    given = getattr(value, name)
    problem = integer_problem(name, given, error=ServingError, **limits)
    if problem is not None:
        return [problem]
    object.__setattr__(value, name, int(given))
    return []


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _problem(name: str, value: Any, fix: str) -> Problem:
    return Problem(error=ServingError, what=f"{name}={value!r}", path=name, fix=fix)
