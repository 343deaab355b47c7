"""What an operation on a cache returns: the cache after it, and what it refused."""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwright.caches.refusals import Refusal
from shardwright.errors import CacheError

C = TypeVar("C")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change(Generic[C]):
    """A cache after an operation, and what the operation refused.

    Attributes:
      cache: The cache after the operation. A refused slot keeps its content and its length.
      refused: int8 codes of `Refusal`, 0 where the operation succeeded. `append`, `rewind` and
        `reorder` return one code per slot. Operations that name slots return one code per entry of
        the list of slots that they were given.
      positions: `[batch, q_length]` int32 of the appended tokens, -1 for padding and for refused
        tokens. None unless the operation is `append`.
    """

    cache: C
    refused: jax.Array
    positions: jax.Array | None = None

    @property
    def ok(self) -> jax.Array:
        """Where the operation succeeded."""
        return self.refused == Refusal.NONE

    @property
    def overflow(self) -> jax.Array:
        """Which slots overflowed."""
        return self.refused == Refusal.OVERFLOW

    def reasons(self) -> dict[int, Refusal]:
        """Return the refusals by their index in `refused`. Call this outside `jit`.

        If the slots are sharded over processes, this is a collective: call it in every process.

        Raises:
          CacheError: The call is inside a trace, where the codes are not known; or the change holds
            several caches, stacked by `vmap` or `scan`.
        """
        if isinstance(self.refused, jax.core.Tracer):
            raise CacheError(
                "refusals are not known while a function is traced",
                path="refused",
                fix="return the change, or `ok`, from the compiled function, and read the result "
                "outside",
            )
        codes = np.asarray(readable(self.refused))
        if codes.ndim != 1:
            raise CacheError(
                f"refused has shape {codes.shape}: these are changes of several caches",
                path="refused",
                fix="read one change at a time: jax.tree.map(lambda x: x[0], change).reasons()",
            )
        return {int(at): Refusal(int(code)) for at, code in enumerate(codes) if code}

    def check(self, *, fix: str) -> None:
        """Raise CacheError if something was refused. Call this outside `jit`.

        Args:
          fix: Text of the error's `fix` line.
        """
        reasons = self.reasons()
        if reasons:
            at, first = next(iter(reasons.items()))
            more = f" (1 of {len(reasons)} refused entries)" if len(reasons) > 1 else ""
            raise CacheError(f"entry {at} was refused: {first.meaning}{more}", fix=fix)

    def require(self) -> C:
        """Return the cache. Call this outside `jit`.

        Raises:
          CacheError: Something was refused.
        """
        self.check(fix="read `reasons()` of the change")
        return self.cache


def readable(x: jax.Array) -> jax.Array:
    """Return an array with all of its values in this process.

    If the array is sharded over processes, this is a collective: call it in every process.
    """
    # NumPy can read these arrays. If an array is replicated, each device of this process has all of
    # its values.
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return x
    assert isinstance(x.sharding, NamedSharding)
    replicated: jax.Array = jax.jit(jnp.copy, out_shardings=NamedSharding(x.sharding.mesh, P()))(x)
    return replicated
