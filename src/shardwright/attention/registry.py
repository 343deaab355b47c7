"""Implementations by name: what one is, and the table of those there are.

An implementation is a class with a name, a `supports` that judges a call before anything is traced, and a forward per
backend that takes global arrays. See the package's docstring for how to add one.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardwright.attention import metadata
from shardwright.attention.call import AttentionCall, Operands
from shardwright.attention.call import Result as Result  # noqa: PLC0414  implementations import it from here
from shardwright.attention.inputs import describe, make_operands
from shardwright.attention.metadata import AttentionMetadata, AttentionOutput
from shardwright.attention.run import serve
from shardwright.errors import AttentionError, did_you_mean

Implementation = TypeVar("Implementation", bound="type[AttentionImpl]")


class AttentionImpl(abc.ABC):
    """An implementation of attention.

    Args:
      metadata: how to run, for calls of the instance itself.
    """

    # Whether it multiplies by the scales of quantised keys and values; a call with them is refused where not.
    takes_scales: ClassVar[bool] = False

    def __init__(self, metadata: AttentionMetadata) -> None:
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
    def refusals(cls, call: AttentionCall) -> tuple[str, ...]:
        """Return why a call cannot be served: what `supports` says, and quantised keys where there are no scales."""
        no_scales = (
            (f"it takes no scales, and k and v are {call.kv_dtype}",)
            if call.kv_dtype and not cls.takes_scales
            else ()
        )
        reasons = cls.supports(call)
        if not isinstance(reasons, (tuple, list)) or not all(
            isinstance(reason, str) for reason in reasons
        ):
            what = f"{cls.__qualname__}.supports returned {reasons!r}"
            raise AttentionError(
                what, fix="return a tuple of reasons why the call cannot be served, () where it can"
            )
        return (*no_scales, *reasons)

    @classmethod
    def inner(cls, call: AttentionCall) -> str:
        """Return which kernel runs on each shard of a call, and why not the platform's own; empty where there is no choice."""
        del call
        return ""

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
        forward = {"cpu": cls.forward_cpu, "gpu": cls.forward_gpu, "tpu": cls.forward_tpu}.get(
            call.platform
        )
        if forward is None:
            raise AttentionError(f"unknown backend {call.platform!r}", fix="use cpu, gpu or tpu")
        return forward(operands, call)

    def __call__(self, q: Any, k: Any, v: Any, **options: Any) -> AttentionOutput:
        """Attend; the options are those of `dot_product_attention`, and a mode must be among them or the manager's."""
        asked = self.metadata.options(options)
        call, mask = describe(q, k, v, options=asked)
        reasons = type(self).refusals(call)
        if reasons:
            name = impl_names(type(self))[0]
            raise AttentionError(
                f"{name} cannot serve this call: {'; '.join(reasons)}",
                fix='use another one, or implementation="auto"',
            )
        found = serve(type(self), make_operands(q, k, v, options=asked, call=call, mask=mask), call)
        return AttentionOutput(attention_weights=found.weights, attention_outputs=found.o)

    def get_mode(
        self,
        q: Any,
        BTHD: bool = True,  # noqa: N803
        *,
        mode: str | None = None,
    ) -> str:
        """Return the mode of a call; see `metadata.get_mode`."""
        return metadata.get_mode(q, BTHD, mode=mode)

    def create_stable_sharding(
        self,
        state_ps: PartitionSpec | None = None,
        preserved_indices: list[int] | None = None,
        clone_ps: PartitionSpec | None = None,
        dep: Any = True,
        tensor: Any = None,
    ) -> PartitionSpec | None:
        """Return a spec that keeps some dims of another one; see `metadata.create_stable_sharding`."""
        return metadata.create_stable_sharding(
            self.metadata.partition_manager, state_ps, preserved_indices, clone_ps, dep, tensor
        )

    def get_impl_metadata(self) -> AttentionMetadata:
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
          AttentionError: a name that another class has; it is no `AttentionImpl`, or lacks a method.
        """
        if not (isinstance(implementation, type) and issubclass(implementation, AttentionImpl)):
            raise AttentionError(
                f"{implementation!r} is no AttentionImpl", fix="class Mine(AttentionImpl): ..."
            )
        if implementation.__abstractmethods__:
            lacks = ", ".join(sorted(implementation.__abstractmethods__))
            raise AttentionError(
                f"{implementation.__qualname__} lacks {lacks}",
                fix="write them as classmethods, as the package's docstring says",
            )
        names = impl_names(implementation)
        for name in names:
            other = cls._known.get(name)
            if other is not None and (other.__module__, other.__qualname__) != (
                implementation.__module__,
                implementation.__qualname__,
            ):
                raise AttentionError(
                    f"the name {name!r} belongs to {other.__qualname__}",
                    fix="give the implementation another name",
                )
        cls._known = {**cls._known, **dict.fromkeys(names, implementation)}
        return implementation

    @classmethod
    def get(cls, name: str, *, line: str = "") -> type[AttentionImpl]:
        """Return the implementation of a name; `line` is what named it, for the message.

        Raises:
          AttentionError: (a ValueError) an unknown name, with what was probably meant.
        """
        if name not in cls._known:
            known = cls.list_implementations()
            fix = f"{did_you_mean(str(name), known)} implementations are {', '.join(known)}; import what registers your own".strip()
            raise AttentionError(f"unknown attention implementation {name!r}", rule=line, fix=fix)
        return cls._known[name]

    @classmethod
    def create(cls, name: str, metadata: AttentionMetadata) -> AttentionImpl:
        """Return an instance of an implementation; see `get`."""
        return cls.get(name)(metadata)

    @classmethod
    def list_implementations(cls) -> list[str]:
        """Return every name, sorted."""
        return sorted(cls._known)
