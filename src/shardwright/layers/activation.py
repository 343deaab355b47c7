"""Activation functions by name, and gated activations, which are products of several."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp

from shardwright.errors import LayerError, RankMismatchError, did_you_mean
from shardwright.layers.inputs import check_number


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Clamp:
    """Constants of the clamped activations; the defaults are those of gpt-oss.

    Attributes:
      limit: Largest size of a clamped value.
      alpha: Factor inside the sigmoid of "clamped_silu".
      offset: Added by "clamped_linear".

    Raises:
      LayerError: A constant is not a finite number.
    """

    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0

    def __post_init__(self) -> None:
        for name in ("limit", "alpha", "offset"):
            check_number(name, getattr(self, name), fix=f"write {name}=1.0")


CLAMP: Final = Clamp()


def _clamped_silu(x: Any, clamp: Clamp) -> Any:
    x = jnp.minimum(x, clamp.limit)
    return jax.nn.sigmoid(clamp.alpha * x) * x


def _clamped_linear(x: Any, clamp: Clamp) -> Any:
    return jnp.clip(x, -clamp.limit, clamp.limit) + clamp.offset


# Each is a function of an array and the constants of clamping.
ACTIVATIONS: Final[Mapping[str, Callable[[Any, Clamp], Any]]] = MappingProxyType(
    {
        "gelu": lambda x, _: jax.nn.gelu(x, approximate=True),
        "gelu_exact": lambda x, _: jax.nn.gelu(x, approximate=False),
        "silu": lambda x, _: jax.nn.silu(x),
        "relu": lambda x, _: jax.nn.relu(x),
        "quick_gelu": lambda x, _: x * jax.nn.sigmoid(1.702 * x),
        "squared_relu": lambda x, _: jnp.square(jax.nn.relu(x)),
        "sigmoid": lambda x, _: jax.nn.sigmoid(x),
        "tanh": lambda x, _: jnp.tanh(x),
        "linear": lambda x, _: x,
        "clamped_silu": _clamped_silu,
        "clamped_linear": _clamped_linear,
    }
)


def activation(name: str, x: Any, *, clamp: Clamp = CLAMP) -> Any:
    """Apply an activation function to `x`, in the dtype of `x`.

    Args:
      name: A key of `ACTIVATIONS`; upper and lower case are the same.
      x: Array of any shape.
      clamp: Constants of the clamped activations. Defaults to `Clamp()`.

    Raises:
      LayerError: The name is unknown.
    """
    return ACTIVATIONS[check_names((name,))[0]](x, clamp)


def gated(names: Sequence[str], x: Any, *, axis: int = -2, clamp: Clamp = CLAMP) -> Any:
    """Apply one activation to each slice of `x` along `axis`, and return their product.

    `gated(("silu", "linear"), x)` is SwiGLU, `("gelu", "linear")` GEGLU (Shazeer,
    arXiv:2002.05202). One name is a plain activation.

    Args:
      names: One per slice.
      x: Array whose dim `axis` has as many elements as there are names.
      axis: The dim of the slices. It must not be sharded.
      clamp: Constants of the clamped activations. Defaults to `Clamp()`.

    Raises:
      LayerError: A name is unknown, or there are none.
      RankMismatchError: The number of slices is not the number of names.
    """
    names = check_names(names)
    if x.shape[axis] != len(names):
        raise RankMismatchError(
            f"x has shape {x.shape}: {x.shape[axis]} slices in dim {axis} for {len(names)} "
            f"activations, {', '.join(names)}",
            path="x",
            fix="pass one slice per activation",
        )
    parts = [
        ACTIVATIONS[name](jax.lax.index_in_dim(x, at, axis, keepdims=False), clamp)
        for at, name in enumerate(names)
    ]
    return math.prod(parts[1:], start=parts[0])


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of activations in lower case.

    Raises:
      LayerError: A name is unknown, or there are none.
    """
    if isinstance(names, str) or not names:
        raise LayerError(
            f"activations={names!r} is not a tuple of names", fix='write ("silu", "linear")'
        )
    lower = tuple(str(name).lower() for name in names)
    for name in lower:
        if name not in ACTIVATIONS:
            hint = did_you_mean(name, ACTIVATIONS)
            known = ", ".join(ACTIVATIONS)
            raise LayerError(
                f"activation {name!r} is unknown", fix=f"{hint} write one of {known}".strip()
            )
    return lower
