"""EasyDeL's registry of attention implementations, in which an implementation is a class.

A class has a name, a method `supports`, and a `forward_*` method for each backend. `supports`
checks a call before anything is traced. The `forward_*` methods take global arrays. When a class is
registered, an `attention.Implementation` with its methods is registered too.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardwright.attention import implementation as core
from shardwright.attention.call import AttentionCall, Operands
from shardwright.attention.call import Result as Result  # noqa: PLC0414  for old imports
from shardwright.attention.implementation import Implementation
from shardwright.attention.inputs import read
from shardwright.attention.run import run
from shardwright.errors import AttentionError
from shardwright.interop.easydel import attention_metadata
from shardwright.interop.easydel.attention_metadata import AttentionMetadata, AttentionOutput
from shardwright.manager.context import platform_of

ImplClass = TypeVar("ImplClass", bound="type[AttentionImpl]")


class AttentionImpl(abc.ABC):
    """An implementation of attention as a class.

    Args:
      metadata: Options of all calls of the instance.
    """

    # Whether the implementation multiplies by the scales of quantized keys and values. If not, it
    # refuses calls with scales.
    takes_scales: ClassVar[bool] = False

    def __init__(self, metadata: AttentionMetadata) -> None:
        self.metadata = metadata

    @classmethod
    @abc.abstractmethod
    def get_impl_name(cls) -> str | Sequence[str]:
        """Return the name of the implementation, or several names. Messages show the first one."""

    @classmethod
    @abc.abstractmethod
    def supports(cls, call: AttentionCall) -> tuple[str, ...]:
        """Return the reasons why a call cannot be served; see `attention.Implementation`."""

    @classmethod
    def inner(cls, call: AttentionCall) -> str:
        """Return which kernel runs on each shard of a call; see `attention.Implementation`."""
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
        """Run on the call's platform, which is cpu, gpu or tpu."""
        forwards = {"cpu": cls.forward_cpu, "gpu": cls.forward_gpu, "tpu": cls.forward_tpu}
        return forwards[call.platform](operands, call)

    @classmethod
    def value(cls) -> Implementation:
        """Return the `attention.Implementation` of this class."""
        name, *aliases = impl_names(cls)
        return Implementation(
            name=name,
            aliases=tuple(aliases),
            supports=cls.supports,
            run=cls.run,
            takes_scales=cls.takes_scales,
            inner=cls.inner,
        )

    def __call__(self, q: Any, k: Any, v: Any, **options: Any) -> AttentionOutput:
        """Run attention. Options that the call does not give come from the metadata.

        Args:
          q: As in `dot_product_attention`.
          k: As in `dot_product_attention`.
          v: As in `dot_product_attention`.
          **options: As in `dot_product_attention`. The options or the manager must have a mode.

        Raises:
          AttentionError: The implementation cannot serve the call.
        """
        operands, call = read(q, k, v, self.metadata.options(options))
        implementation = self.value()
        reasons = implementation.refusals(call)
        if reasons:
            raise AttentionError(
                f"{implementation.name} cannot serve this call: {'; '.join(reasons)}",
                fix='use another implementation, or implementation="auto"',
            )
        result = run(implementation, operands, call)
        return AttentionOutput(attention_weights=result.weights, attention_outputs=result.o)

    def get_mode(
        self,
        q: Any,
        BTHD: bool = True,  # noqa: N803
        *,
        mode: str | None = None,
    ) -> str:
        """Return the mode of a call; see `attention_metadata.get_mode`."""
        return attention_metadata.get_mode(q, BTHD, mode=mode)

    def create_stable_sharding(
        self,
        state_ps: PartitionSpec | None = None,
        preserved_indices: list[int] | None = None,
        clone_ps: PartitionSpec | None = None,
        dep: Any = True,
        tensor: Any = None,
    ) -> PartitionSpec | None:
        """Return a spec that keeps some dims of another spec; see `create_stable_sharding`."""
        return attention_metadata.create_stable_sharding(
            self.metadata.partition_manager, state_ps, preserved_indices, clone_ps, dep, tensor
        )

    def get_impl_metadata(self) -> AttentionMetadata:
        """Return the metadata of the instance."""
        return self.metadata

    @staticmethod
    def current_backend() -> str:
        """Return "tpu", "gpu" or "cpu"."""
        return platform_of(None)

    @staticmethod
    def repeat_kv_heads(k: jax.Array, v: jax.Array, num_reps: int) -> tuple[jax.Array, jax.Array]:
        """Repeat each head of `[batch, length, kv_heads, dim]` `num_reps` times."""
        return jnp.repeat(k, num_reps, axis=2), jnp.repeat(v, num_reps, axis=2)

    @staticmethod
    def _split_attention_mask(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return whether each query sees any key, and whether each key is seen by any query.

        The mask has the shape `[..., q, kv]`.
        """
        return jnp.any(mask, axis=-1), jnp.any(mask, axis=-2)

    @staticmethod
    def _combine_query_kv_masks(q_mask: jax.Array, kv_mask: jax.Array) -> jax.Array:
        """Return the mask `[..., q, kv]` of pairs whose query and key are both True."""
        return jnp.logical_and(q_mask[..., :, None], kv_mask[..., None, :])

    @staticmethod
    def _create_causal_mask(length: int) -> jax.Array:
        """Return the causal mask `[length, length]`, True = attend."""
        return jnp.tril(jnp.ones((length, length), dtype=bool))


def impl_names(cls: type[AttentionImpl]) -> tuple[str, ...]:
    """Return the names of an implementation. Messages show the first name."""
    names = cls.get_impl_name()
    return (names,) if isinstance(names, str) else tuple(names)


class AttentionRegistry:
    """Implementation classes by name. All methods are classmethods."""

    _known: ClassVar[dict[str, type[AttentionImpl]]] = {}

    @classmethod
    def register(cls, implementation: ImplClass) -> ImplClass:
        """Register a class under all its names, and return the class. Can be used as a decorator.

        Raises:
          AttentionError: The class is not an `AttentionImpl`, lacks a method, or uses the name of
            another class.
        """
        if not (isinstance(implementation, type) and issubclass(implementation, AttentionImpl)):
            raise AttentionError(
                f"{implementation!r} is not an AttentionImpl", fix="class Mine(AttentionImpl): ..."
            )
        if implementation.__abstractmethods__:
            missing = ", ".join(sorted(implementation.__abstractmethods__))
            raise AttentionError(
                f"{implementation.__qualname__} lacks {missing}",
                fix="write these methods as classmethods",
            )
        names = impl_names(implementation)
        for name in names:
            other = cls._known.get(name)
            # A module that is reloaded defines the same class again, which is allowed.
            if other is not None and _source(other) != _source(implementation):
                raise AttentionError(
                    f"the name {name!r} belongs to {other.__qualname__}",
                    fix="give the implementation another name",
                )
        # Call `core.register` first. It raises an error if shardwright itself uses one of the
        # names, and `_known` must not change in this case.
        core.register(implementation.value())
        # Make a new dict, because another thread may be reading the old one.
        cls._known = {**cls._known, **dict.fromkeys(names, implementation)}
        return implementation

    @classmethod
    def get(cls, name: str) -> type[AttentionImpl]:
        """Return the class with a name. An implementation without a class is wrapped in one.

        Raises:
          AttentionError: (a ValueError) The name is unknown. The message suggests a known name.
        """
        # shardwright's own implementations, for example, have no class.
        return cls._known.get(name) or _class_of(core.find(name))

    @classmethod
    def create(cls, name: str, metadata: AttentionMetadata) -> AttentionImpl:
        """Return an instance of an implementation; see `get`."""
        return cls.get(name)(metadata)

    @classmethod
    def list_implementations(cls) -> list[str]:
        """Return every name, sorted."""
        return core.names()


def _source(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


# Cache one class for each implementation, so that `get` returns the same class each time.
@functools.cache
def _class_of(implementation: Implementation) -> type[AttentionImpl]:
    """Return an `AttentionImpl` that calls an `attention.Implementation`."""

    class Wrapped(AttentionImpl):
        takes_scales = implementation.takes_scales

        @classmethod
        def get_impl_name(cls) -> tuple[str, ...]:
            return (implementation.name, *implementation.aliases)

        @classmethod
        def supports(cls, call: AttentionCall) -> tuple[str, ...]:
            return implementation.supports(call)

        @classmethod
        def inner(cls, call: AttentionCall) -> str:
            return implementation.inner(call)

        @classmethod
        def forward_native(cls, operands: Operands, call: AttentionCall) -> Result:
            return implementation.run(operands, call)

    words = implementation.name.split("_")
    Wrapped.__name__ = Wrapped.__qualname__ = "".join(map(str.title, words)) + "Attention"
    return Wrapped
