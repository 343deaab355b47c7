"""Implementations of attention as values, and the table of those that the package ships.

To write an implementation of your own:

1. Write `supports(call)`. It gets an `AttentionCall`: sizes, mode, mask rules, specs, mesh and
   platform, but no arrays. It traces nothing. It returns the reasons why the implementation cannot
   serve the call, one line each. For every call that it accepts, values and gradients must equal
   those of attention in float64; `shardwright.testing.AttentionConformance` checks that. Set
   `takes_scales=True` if `run` multiplies by `k_scale` and `v_scale`; otherwise calls with
   quantized keys are refused.
2. Write `run(operands, call)`. It gets `Operands`: global BTHD arrays in one pytree, always with
   positions. It returns a `Result`.
3. Build on `attention.extend`. `run_on_shards(kernel, operands, call)` calls `shard_map`. The
   kernel gets local `Operands`, and their k and v already hold the heads that the local query heads
   read. `call.specs` names the mesh axes of each dim. A kernel that JAX cannot look into, such as a
   Pallas kernel, goes to `run_opaque` instead. To have gradients, such a kernel must have its own
   backward pass.
4. Compose a kernel from pure local functions. Forward: `forward` adds a set of keys to a running
   state (`Running`: float32 o, m, l), `merge` joins two states, and `finish` returns the output and
   the logsumexp. Sinks are added by `finish`, or by `add_sinks` on exactly one shard. Backward:
   `delta` once, `backward` for each set of keys, `sinks_gradient` once. Masks, windows, segments
   and dropout depend on global positions, so a kernel switches to another shard of keys by
   `operands.replace(k=…, v=…, kv_positions=…, kv_segment_ids=…)`. The kernel itself must slice
   dense masks and dense biases.
5. `run_on_shards` sums the gradients of replicated operands, so a backward pass needs no `psum` for
   them. Make the carry of a scan with `start` or `zeros_like`, so that it varies over the mesh axes
   of the operands. If the output is sharded over all mesh axes of the call, residuals are kept for
   the backward pass; otherwise the backward pass runs the kernel again.
6. Pass both functions to `register(Implementation(name=…, supports=…, run=…))`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from shardwright.attention.call import AttentionCall, Operands, Result
from shardwright.attention.kernels import (
    allgather_kv,
    blockwise,
    cudnn,
    flash_decode,
    ring,
    sdpa,
    splash,
    triton_decode,
    ulysses,
    vanilla,
)
from shardwright.errors import AttentionError, did_you_mean


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """An implementation of attention.

    Attributes:
      name: The name that `implementation=` and strategies use.
      supports: Function of a call. Returns the reasons why the call cannot be served, or () if it
        can be served. Each reason is one line, and names the value that is not supported. The
        function traces nothing.
      run: Function of global operands and their call. Returns a `Result`.
      aliases: Other names of the implementation.
      takes_scales: Whether `run` multiplies by the scales of quantized keys and values.
      inner: Function of a call. Returns a line that names the kernel that runs on each shard and,
        if this is not the platform's own kernel, says why. Empty if the implementation has a single
        kernel.
    """

    name: str
    supports: Callable[[AttentionCall], tuple[str, ...]]
    run: Callable[[Operands, AttentionCall], Result]
    aliases: tuple[str, ...] = ()
    takes_scales: bool = False
    inner: Callable[[AttentionCall], str] = lambda call: ""

    def refusals(self, call: AttentionCall) -> tuple[str, ...]:
        """Return every reason why a call cannot be served; () if it can be served.

        Raises:
          AttentionError: `supports` does not return a tuple of reasons.
        """
        reasons = self.supports(call)
        lines = reasons if isinstance(reasons, (tuple, list)) else (None,)
        if not all(isinstance(line, str) for line in lines):
            raise AttentionError(
                f"supports of {self.name!r} returned {reasons!r}",
                fix="return a tuple of reasons why the call cannot be served, () if it can",
            )
        if call.kv_dtype is None or self.takes_scales:
            return tuple(reasons)
        return (f"it takes no scales, and k and v are {call.kv_dtype}", *reasons)


# The implementations that come with the package. A new implementation is one entry here.
SHIPPED: Final[tuple[Implementation, ...]] = (
    Implementation(name="vanilla", supports=vanilla.supports, run=vanilla.run, takes_scales=True),
    Implementation(
        name="blockwise", supports=blockwise.supports, run=blockwise.run, takes_scales=True
    ),
    Implementation(name="ring", supports=ring.supports, run=ring.run, inner=ring.inner),
    Implementation(name="ulysses", supports=ulysses.supports, run=ulysses.run, inner=ulysses.inner),
    Implementation(
        name="allgather_kv",
        supports=allgather_kv.supports,
        run=allgather_kv.run,
        inner=allgather_kv.inner,
    ),
    Implementation(
        name="flash_decode", supports=flash_decode.supports, run=flash_decode.run, takes_scales=True
    ),
    Implementation(name="sdpa", supports=sdpa.supports, run=sdpa.run),
    Implementation(name="cudnn", supports=cudnn.supports, run=cudnn.run),
    Implementation(name="splash", supports=splash.supports, run=splash.run),
    Implementation(
        name="triton_decode",
        supports=triton_decode.supports,
        run=triton_decode.run,
        takes_scales=True,
    ),
)
# Implementations that users register. A registration replaces the tuple, so readers need no lock.
_own: tuple[Implementation, ...] = ()


def implementations() -> tuple[Implementation, ...]:
    """Return the shipped implementations and the registered ones."""
    return (*SHIPPED, *_own)


def register(implementation: Implementation) -> Implementation:
    """Make an implementation available by its name, and return it.

    If a registered implementation shares a name with the new one, and both `run` functions have the
    same qualified name and module, the new implementation replaces the old one. So a notebook cell
    that registers an implementation may run twice.

    Raises:
      AttentionError: The value is not an `Implementation`, or another implementation has its name.
    """
    global _own  # noqa: PLW0603  the only place that writes it
    if not isinstance(implementation, Implementation):
        raise AttentionError(
            f"{implementation!r} is not an attention.Implementation",
            fix='register(Implementation(name="mine", supports=supports, run=run))',
        )
    others = []
    for other in implementations():
        shared = [name for name in _names(implementation) if name in _names(other)]
        if shared and _source(implementation) != _source(other):
            raise AttentionError(
                f"the name {shared[0]!r} belongs to {' of '.join(_source(other))}",
                fix="give the implementation another name",
            )
        if other in _own and not shared:
            others.append(other)
    _own = (*others, implementation)
    return implementation


def find(name: str, *, line: str = "") -> Implementation:
    """Return the implementation of a name.

    Args:
      name: A name or an alias.
      line: The line of the strategy that has the name, for the message.

    Raises:
      AttentionError: The name is unknown.
    """
    for implementation in implementations():
        if name == implementation.name or name in implementation.aliases:
            return implementation
    known = names()
    fix = (
        f"{did_you_mean(str(name), known)} implementations are {', '.join(known)}; "
        "import the module that registers your own"
    )
    raise AttentionError(f"unknown attention implementation {name!r}", rule=line, fix=fix.strip())


def names() -> list[str]:
    """Return every name and alias, sorted."""
    return sorted(name for each in implementations() for name in _names(each))


def _names(implementation: Implementation) -> tuple[str, ...]:
    return (implementation.name, *implementation.aliases)


def _source(implementation: Implementation) -> tuple[str, str]:
    """Return the qualified name and the module of `run`.

    Both stay the same if a notebook cell is executed twice.
    """
    run = implementation.run
    return getattr(run, "__qualname__", repr(run)), getattr(run, "__module__", "")
