"""Implementations by name: what one is, and the table of those there are.

An implementation is a class with a name, a `supports` that judges a call before anything is traced, and a forward per
backend that takes global arrays. See the package's docstring for how to add one.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp

from shardwright.attention.call import AttentionCall, Operands
from shardwright.errors import AttentionError, did_you_mean

Implementation = TypeVar("Implementation", bound="type[AttentionImpl]")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """What an implementation returns, of global arrays.

    Attributes:
      o: `[batch, q_length, heads, v_dim]`, in the call's dtype.
      lse: `[batch, heads, q_length]` float32, -inf for a row without keys; required if `call.return_lse`.
      weights: `[batch, heads, q_length, kv_length]`; required if `call.return_weights`.
    """

    o: Any
    lse: Any = None
    weights: Any = None


class AttentionImpl(abc.ABC):
    """An implementation of attention.

    Args:
      metadata: how to run, for calls of the instance itself.
    """

    def __init__(self, metadata: Any) -> None:
        self.metadata = metadata

    @classmethod
    @abc.abstractmethod
    def get_impl_name(cls) -> str | Sequence[str]:
        """Return the name, or several that mean the same, the first of which is shown."""

    @classmethod
    @abc.abstractmethod
    def supports(cls, call: AttentionCall) -> tuple[str, ...]:
        """Return why a call cannot be served, each reason one line that names the value; empty if it can. Traces nothing."""

    @classmethod
    @abc.abstractmethod
    def forward_native(cls, operands: Operands, call: AttentionCall) -> Result:
        """Run on any backend, with global arrays."""

    @classmethod
    def forward_cpu(cls, operands: Operands, call: AttentionCall) -> Result:
        """Run on a CPU."""
        return cls.forward_native(operands, call)

    @classmethod
    def forward_tpu(cls, operands: Operands, call: AttentionCall) -> Result:
        """Run on a TPU."""
        return cls.forward_native(operands, call)

    @classmethod
    def forward_gpu(cls, operands: Operands, call: AttentionCall) -> Result:
        """Run on a GPU."""
        return cls.forward_native(operands, call)

    @classmethod
    def run(cls, operands: Operands, call: AttentionCall) -> Result:
        """Run on the call's platform.

        Raises:
          AttentionError: a platform that is none of cpu, gpu and tpu.
        """
        forward = {"cpu": cls.forward_cpu, "gpu": cls.forward_gpu, "tpu": cls.forward_tpu}.get(call.platform)
        if forward is None:
            raise AttentionError(f"unknown backend {call.platform!r}", fix="use cpu, gpu or tpu")
        return forward(operands, call)

    def get_impl_metadata(self) -> Any:
        """Return how the instance runs."""
        return self.metadata

    @staticmethod
    def current_backend() -> str:
        """Return "tpu", "gpu" or "cpu"."""
        backend = jax.default_backend()
        return "gpu" if backend in ("cuda", "rocm") else backend

    @staticmethod
    def repeat_kv_heads(k: jax.Array, v: jax.Array, num_reps: int) -> tuple[jax.Array, jax.Array]:
        """Return k and v `[batch, length, kv_heads, dim]` with each head `num_reps` times, copies adjacent."""
        return jnp.repeat(k, num_reps, axis=2), jnp.repeat(v, num_reps, axis=2)

    @staticmethod
    def _split_attention_mask(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return which queries attend to any key, and which keys any query attends to, of a mask `[..., q, kv]`."""
        return jnp.any(mask, axis=-1), jnp.any(mask, axis=-2)

    @staticmethod
    def _combine_query_kv_masks(q_mask: jax.Array, kv_mask: jax.Array) -> jax.Array:
        """Return the mask `[..., q, kv]` of pairs that are both marked."""
        return jnp.logical_and(q_mask[..., :, None], kv_mask[..., None, :])

    @staticmethod
    def _create_causal_mask(length: int) -> jax.Array:
        """Return the causal mask `[length, length]`, True = attend."""
        return jnp.tril(jnp.ones((length, length), dtype=bool))


def impl_names(cls: type[AttentionImpl]) -> tuple[str, ...]:
    """Return an implementation's names, the one that is shown first."""
    names = cls.get_impl_name()
    return (names,) if isinstance(names, str) else tuple(names)


class AttentionRegistry:
    """Implementations by name. Classmethods only: an implementation registers itself with its class statement."""

    _known: ClassVar[dict[str, type[AttentionImpl]]] = {}

    @classmethod
    def register(cls, implementation: Implementation) -> Implementation:
        """Add an implementation under all its names, and return it: a class decorator.

        Raises:
          AttentionError: a name that another class has.
        """
        names = impl_names(implementation)
        for name in names:
            other = cls._known.get(name)
            if other is not None and (other.__module__, other.__qualname__) != (implementation.__module__, implementation.__qualname__):
                raise AttentionError(f"the name {name!r} belongs to {other.__qualname__}", fix="give the implementation another name")
        cls._known = {**cls._known, **dict.fromkeys(names, implementation)}
        return implementation

    @classmethod
    def get(cls, name: str) -> type[AttentionImpl]:
        """Return the implementation of a name.

        Raises:
          AttentionError: (a ValueError) an unknown name, with what was probably meant.
        """
        if name not in cls._known:
            known = cls.list_implementations()
            fix = f"{did_you_mean(str(name), known)} implementations are {', '.join(known)}".strip()
            raise AttentionError(f"unknown attention implementation {name!r}", fix=fix)
        return cls._known[name]

    @classmethod
    def create(cls, name: str, metadata: Any) -> AttentionImpl:
        """Return an instance of an implementation; see `get`."""
        return cls.get(name)(metadata)

    @classmethod
    def list_implementations(cls) -> list[str]:
        """Return every name, sorted."""
        return sorted(cls._known)
