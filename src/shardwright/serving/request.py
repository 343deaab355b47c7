"""The values that callers pass to an engine and get back. They have no arrays."""

from __future__ import annotations

import dataclasses
import enum
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import jax
import numpy as np

from shardwright.errors import ServingError
from shardwright.vocabulary.integers import quoted
from shardwright.vocabulary.read import Faults, FieldKind, instance, integer, passes, read_fields

# The smallest normal and the largest number of float32. Tokens are sampled in float32.
_LEAST_FLOAT, _MOST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127
MOST_TOKEN = 2**31 - 1
_TOKENS_FIX = "pass token numbers, which are non-negative integers, as the tokenizer returns them"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


TEMPERATURE: Final = passes(
    lambda value: _is_number(value) and (value == 0 or _LEAST_FLOAT <= value <= _MOST_FLOAT),
    "is neither 0 nor a positive float32",
    fix="pass 0 for the most likely token, or a float in the range of float32, from "
    f"{_LEAST_FLOAT:.3g} to {_MOST_FLOAT:.3g}",
)
TOP_K: Final = integer(most=MOST_TOKEN, fix="pass a number of tokens, or None for all")
PROBABILITY: Final = passes(
    lambda value: _is_number(value) and 0 < value <= 1,
    "is not a probability above 0",
    fix="pass a probability above 0 and up to 1",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is sampled. By default, the most likely token is taken.

    A draw depends only on the logits, the seed and the number of tokens that the request has
    written.

    Attributes:
      temperature: Divides the logits. 0 means the most likely token. If several tokens are equally
        likely, the token with the lowest number is taken.
      top_k: Number of the most likely tokens to draw from. None means all tokens.
      top_p: Draw from the smallest set of most likely tokens whose probabilities sum to at least
        this number. 1 means all tokens.
      seed: Seed of the request, from 0 to 2**32 - 1.
    """

    temperature: Annotated[float, TEMPERATURE] = 0.0
    top_k: Annotated[int, TOP_K] | None = None
    top_p: Annotated[float, PROBABILITY] = 1.0
    seed: Annotated[int, integer(0, 2**32 - 1)] = 0

    def __post_init__(self) -> None:
        read_fields(self, error=ServingError)


SAMPLING: Final = instance(Sampling, fix="pass serving.Sampling(temperature=..., seed=...)")
ON_TOKEN: Final = passes(callable, "is not a function", fix="pass a function of one token, or None")


def _read_tokens(name: str, given: Any) -> tuple[tuple[int, ...], Faults]:
    """Return token numbers as a tuple of ints."""
    try:
        if isinstance(given, (str, dict, set)):
            raise TypeError
        values = list(given)
        # Unlike a size, a token may also be a 0-d array, because programs compute tokens. A bool is
        # an integer in Python, so turn a bool into -1, which is refused below.
        tokens = tuple(-1 if isinstance(token, bool) else operator.index(token) for token in values)
    except TypeError:
        return (), [(f"{name}={quoted(given)} is not a list of tokens", _TOKENS_FIX)]
    if not tokens:
        return (), [("no tokens", "pass at least one token")]
    wrong = (at for at, token in enumerate(tokens) if not 0 <= token <= MOST_TOKEN)
    return tokens, [(f"token {at} is {values[at]!r}", _TOKENS_FIX) for at in wrong][:1]


def _read_stop(name: str, stop: Any) -> tuple[tuple[tuple[int, ...], ...], Faults]:
    """Return the entries of `stop` as sequences: a single token becomes a sequence of one."""
    # Accept arrays too, because tokens that a program computes are arrays.
    is_array = isinstance(stop, (np.ndarray, jax.Array)) and stop.ndim
    if isinstance(stop, (str, bytes)) or not (is_array or isinstance(stop, Sequence)):
        what = f"{name}={quoted(stop)} is not a list"
        return (), [(what, "pass a list of tokens, or of lists of tokens")]
    read = []
    for entry in stop:
        is_token = isinstance(entry, numbers.Integral) or getattr(entry, "ndim", None) == 0
        read.append(_read_tokens(name, (entry,) if is_token else entry))
    return tuple(tokens for tokens, _ in read), [fault for _, faults in read for fault in faults]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, and how to continue it.

    Attributes:
      prompt: The tokens, as integers; at least one.
      max_new_tokens: Maximum number of tokens to write, including those of a stop sequence.
      sampling: How tokens are sampled.
      stop: Tokens, or sequences of tokens, that end the text. They are not part of the text.
      on_token: Called with each token, as soon as the token can no longer become part of a stop
        sequence. An exception that it raises fails only this request.
    """

    prompt: Annotated[Sequence[int], FieldKind(_read_tokens)]
    max_new_tokens: Annotated[int, integer()]
    sampling: Annotated[Sampling, SAMPLING] = dataclasses.field(default_factory=Sampling)
    stop: Annotated[Sequence[int | Sequence[int]], FieldKind(_read_stop)] = ()
    on_token: Annotated[Callable[[int], object], ON_TOKEN] | None = None

    def __post_init__(self) -> None:
        read_fields(self, error=ServingError)

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
        are several versions if the weights were updated while the request ran.
      logprobs: Natural logarithm of the probability that the model gave each token, before
        temperature, top_k and top_p.
    """

    tokens: tuple[int, ...]
    finish: Finish
    error: Exception | None = None
    versions: tuple[int | str, ...] = ()
    logprobs: tuple[float, ...] = ()
