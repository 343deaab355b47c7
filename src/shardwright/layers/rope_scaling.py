"""Frequencies of rotary positions, for contexts longer than in the original training.

Below, f is any frequency of the original training.

linear    f / factor (Chen et al., arXiv:2306.15595)
llama3    f for short wavelengths, f / factor for long ones, a mean in between (Llama 3.1)
yarn      like llama3, with other bounds, and a scale (Peng et al., arXiv:2309.00071)
longrope  f / factor, one factor for each f, and a scale (Ding et al., arXiv:2402.13753)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from shardwright.errors import LayerError
from shardwright.layers.rope import THETA, RopeFrequencies
from shardwright.vocabulary.integers import read_integer
from shardwright.vocabulary.read import instance, number, one_of, read_value

_POSITIVE: Final = number("positive", fix="copy {name} from config.json of the model")
_MAPPING: Final = instance(Mapping, fix='pass {"rope_type": "llama3", ...}')
_FIRST: Final = "original_max_position_embeddings"


def rope_frequencies(
    head_dim: int,
    *,
    scaling: Mapping[str, Any],
    theta: float | None = None,
    longest: int | None = None,
    length: int | None = None,
) -> RopeFrequencies:
    """Return the frequencies of a model, given `rope_scaling` of its `config.json`.

    The frequencies equal those of `transformers`. Newer configurations of `transformers` call the
    mapping `rope_parameters`.

    >>> rope_frequencies(4, theta=100.0, scaling={"rope_type": "linear", "factor": 4.0})
    RopeFrequencies(values=(0.25, 0.025), scale=1.0)

    Args:
      head_dim: Size of a head.
      scaling: `rope_type` (default, linear, llama3, yarn or longrope), and the values of that type.
        With `partial_rotary_factor`, only this fraction of a head is rotated.
      theta: Base of the frequencies. Defaults to the `rope_theta` of `scaling`, or to 10,000.
      longest: `max_position_embeddings`. YaRN and LongRoPE need it if `scaling` has no factor.
      length: Length of the sequences. LongRoPE has other frequencies for sequences that are longer
        than the original context.

    Raises:
      LayerError: A value is missing, unknown or not valid.
    """
    read_integer("head_dim", head_dim, error=LayerError, fix="pass head_dim=128")
    read_value("scaling", scaling, _MAPPING, error=LayerError)
    values = _Values(scaling, longest, length)
    kind = values.pop("rope_type", values.pop("type", "default"))
    read_value("rope_type", kind, one_of(_TYPES), error=LayerError)
    own = values.pop("rope_theta", None)
    if None not in (own, theta) and own != theta:
        raise LayerError(f"theta={theta!r}, and scaling has rope_theta={own!r}", fix="pass one")
    base: float = next((each for each in (own, theta) if each is not None), 10_000.0)
    read_value("theta", base, THETA, error=LayerError)
    rotated = int(head_dim * values.number("partial_rotary_factor", 1.0))
    if not 0 < rotated <= head_dim or rotated % 2:
        raise LayerError(
            f"{rotated} of {head_dim} elements are rotated", fix="pass an even head_dim"
        )
    powers = np.arange(rotated // 2) / (rotated // 2)
    frequencies, scale = _TYPES[kind](base**-powers, base, values)
    if values.left:
        raise LayerError(
            f"{kind} does not read {', '.join(values.left)}", path="scaling", fix="leave it out"
        )
    return RopeFrequencies(values=tuple(np.asarray(frequencies).tolist()), scale=float(scale))


class _Values:
    """The values of `scaling` that were not read yet."""

    def __init__(self, scaling: Mapping[str, Any], longest: Any, length: Any) -> None:
        self.left = {key: value for key, value in scaling.items() if value is not None}
        self.longest = longest
        self.length = length

    def pop(self, key: str, default: Any) -> Any:
        return self.left.pop(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.required(key, default)
        read_value(key, value, _POSITIVE, error=LayerError)
        return float(value)

    def required(self, key: str, default: Any = None) -> Any:
        if (value := self.left.pop(key, default)) is None:
            fix = f"copy {key} from config.json of the model"
            raise LayerError(f"scaling has no {key}", path="scaling", fix=fix)
        return value

    def factor(self, first: float) -> float:
        """Return the factor by which the context became longer."""
        if "factor" not in self.left and self.longest is not None:
            return float(self.longest) / first
        return self.number("factor")


_ScaledRope = tuple[Any, float]


def _default(f: Any, theta: float, values: _Values) -> _ScaledRope:
    return f, 1.0


def _linear(f: Any, theta: float, values: _Values) -> _ScaledRope:
    return f / values.number("factor"), 1.0


def _llama3(f: Any, theta: float, values: _Values) -> _ScaledRope:
    factor, first = values.number("factor"), values.number(_FIRST)
    low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
    rotations = first * f / (2 * math.pi)  # rotations of each frequency over the original context
    # `clip` gives the results of two branches of Meta's code: with more than `high` rotations, keep
    # f, and with fewer than `low`, divide f by the factor.
    kept = np.clip((rotations - low) / (high - low), 0, 1)
    return kept * f + (1 - kept) * f / factor, 1.0


def _yarn(f: Any, theta: float, values: _Values) -> _ScaledRope:
    if theta <= 1:
        raise LayerError(
            f"theta={theta!r}, and yarn takes its logarithm", fix="pass theta=10_000.0"
        )
    first = values.number(_FIRST)
    factor, points = values.factor(first), f.size
    fast, slow = values.number("beta_fast", 32), values.number("beta_slow", 1)

    def point(rotations: float) -> float:
        """Return the index of the point with this number of rotations in the original context."""
        return float(points * math.log(first / (rotations * 2 * math.pi)) / math.log(theta))

    low, high = point(fast), point(slow)
    if values.pop("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    # The upper bound is head_dim - 1, as in `transformers`, although f has head_dim / 2 entries.
    low, high = max(low, 0), min(high, 2 * points - 1)
    # `transformers` divides by 0.001 too if both bounds are equal.
    slower = np.clip((np.arange(points) - low) / (high - low or 0.001), 0, 1)

    def of_logits(weight: float) -> float:
        # The temperature of the logits in YaRN: sqrt(1 / t) = 0.1 ln(factor) + 1.
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    # DeepSeek's configurations have the weights `mscale` and `mscale_all_dim`.
    weights = values.pop("mscale", 0), values.pop("mscale_all_dim", 0)
    scale = of_logits(weights[0]) / of_logits(weights[1]) if all(weights) else of_logits(1)
    return f / factor * slower + f * (1 - slower), values.number("attention_factor", scale)


def _longrope(f: Any, theta: float, values: _Values) -> _ScaledRope:
    first = values.number(_FIRST)
    if values.length is None:
        raise LayerError(
            f"longrope has other frequencies above {first:g} tokens", fix="pass length="
        )
    other, name = "long_factor", "short_factor"
    if values.length > first:
        other, name = name, other
    values.pop(other, None)
    factors = values.required(name)
    if np.shape(factors) != f.shape:
        raise LayerError(
            f"{name} has shape {np.shape(factors)}, and {f.size} points are rotated",
            path="scaling",
            fix=f"write a list of {f.size} numbers",
        )
    for each in factors:
        read_value(name, each, _POSITIVE, error=LayerError)
    factor = values.factor(first)
    scale = math.sqrt(1 + math.log(factor) / math.log(first)) if factor > 1 else 1.0
    return f / np.asarray(factors), values.number("attention_factor", scale)


_TYPES: Final[Mapping[str, Callable[[Any, float, _Values], _ScaledRope]]] = MappingProxyType(
    {
        "default": _default,
        "linear": _linear,
        "llama3": _llama3,
        "yarn": _yarn,
        "longrope": _longrope,
    }
)
