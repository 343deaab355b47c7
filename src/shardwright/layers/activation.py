"""Activation functions by name, and gated activations, which multiply several activations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final

import jax
import jax.numpy as jnp

from shardwright.errors import LayerError, RankMismatchError
from shardwright.vocabulary.read import Faults, FieldKind, number, one_of, read_fields, read_value

_CONSTANT: Final = number(fix="write {name}=1.0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Clamp:
    """Constants of the clamped activations. The defaults are the values of gpt-oss.

    Attributes:
      limit: Upper bound of a clamped value. For "clamped_linear", `-limit` is the lower bound.
      alpha: Factor inside the sigmoid of "clamped_silu".
      offset: Constant that "clamped_linear" adds.

    Raises:
      LayerError: A constant is not a finite number.
    """

    limit: Annotated[float, _CONSTANT] = 7.0
    alpha: Annotated[float, _CONSTANT] = 1.702
    offset: Annotated[float, _CONSTANT] = 1.0

    def __post_init__(self) -> None:
        read_fields(self, error=LayerError)


CLAMP: Final = Clamp()


def _sigmoid_linear(x: Any, alpha: float) -> Any:
    return x * jax.nn.sigmoid(alpha * x)


# Each activation is a function of an array and the constants of clamping.
ACTIVATIONS: Final[Mapping[str, Callable[[Any, Clamp], Any]]] = MappingProxyType(
    {
        # tanh-GELU is the default of JAX, TransformerEngine and GPT-2. Hugging Face calls it
        # "gelu_new" or "gelu_pytorch_tanh", and calls the exact GELU "gelu".
        "gelu": lambda x, _: jax.nn.gelu(x, approximate=True),
        "gelu_exact": lambda x, _: jax.nn.gelu(x, approximate=False),
        "silu": lambda x, _: jax.nn.silu(x),
        "relu": lambda x, _: jax.nn.relu(x),
        # Hendrycks and Gimpel, arXiv:1606.08415, section 2.
        "quick_gelu": lambda x, _: _sigmoid_linear(x, 1.702),
        "squared_relu": lambda x, _: jnp.square(jax.nn.relu(x)),
        "sigmoid": lambda x, _: jax.nn.sigmoid(x),
        "tanh": lambda x, _: jnp.tanh(x),
        "linear": lambda x, _: x,
        "clamped_silu": lambda x, clamp: _sigmoid_linear(jnp.minimum(x, clamp.limit), clamp.alpha),
        "clamped_linear": lambda x, clamp: jnp.clip(x, -clamp.limit, clamp.limit) + clamp.offset,
    }
)


def activation(name: str, x: Any, *, clamp: Clamp = CLAMP) -> Any:
    """Apply an activation function to `x`, in the dtype of `x`.

    Args:
      name: A key of `ACTIVATIONS`, in upper or lower case.
      x: Array of any shape.
      clamp: Constants of the clamped activations. Defaults to `Clamp()`.

    Raises:
      LayerError: The name is unknown.
    """
    return ACTIVATIONS[read_value("name", name, ACTIVATION, error=LayerError)](x, clamp)


def gated(names: Sequence[str], x: Any, *, axis: int = -2, clamp: Clamp = CLAMP) -> Any:
    """Apply one activation to each slice of `x` along `axis`, and multiply the results.

    `gated(("silu", "linear"), x)` is SwiGLU, `("gelu", "linear")` GEGLU (Shazeer,
    arXiv:2002.05202). With one name, the result is a plain activation.

    Args:
      names: One activation per slice.
      x: Array whose dim `axis` has as many elements as there are names.
      axis: The dim of the slices. It must not be sharded.
      clamp: Constants of the clamped activations. Defaults to `Clamp()`.

    Raises:
      LayerError: A name is unknown, or there are none.
      RankMismatchError: The number of slices is not the number of names.
    """
    names = read_value("names", names, NAMES, error=LayerError)
    if x.shape[axis] != len(names):
        raise RankMismatchError(
            f"x has shape {x.shape}: {x.shape[axis]} slices in dim {axis} for {len(names)} "
            f"activations, {', '.join(names)}",
            path="x",
            fix="pass one slice per activation",
        )
    # Indexing removes the dim of activations from the slices. `jnp.split` would keep it.
    parts = [
        ACTIVATIONS[name](jax.lax.index_in_dim(x, at, axis, keepdims=False), clamp)
        for at, name in enumerate(names)
    ]
    return math.prod(parts[1:], start=parts[0])


def _read_name(name: str, value: Any) -> tuple[Any, Faults]:
    return _KNOWN.read(name, value.lower() if isinstance(value, str) else value)


def _read_names(name: str, values: Any) -> tuple[Any, Faults]:
    if isinstance(values, str) or not values:
        return values, [(f"{name}={values!r} is not a tuple of names", 'write ("silu", "linear")')]
    read = [_read_name(name, value) for value in values]
    return tuple(value for value, _ in read), [fault for _, faults in read for fault in faults]


# ACTIVATION reads one name in upper or lower case, and NAMES reads several.
_KNOWN: Final = one_of(ACTIVATIONS)
ACTIVATION: Final = FieldKind(_read_name)
NAMES: Final = FieldKind(_read_names)


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of activations in lower case.

    Raises:
      LayerError: A name is unknown, or there are none.
    """
    lower: tuple[str, ...] = read_value("activations", names, NAMES, error=LayerError)
    return lower
