"""Where activations come from: which sums are residual, and which matmuls feed each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ActivationOrigin:
    """The origin of an activation. What is computed elementwise from it keeps its origin.

    Attributes:
      parents: The origins of the operands that it is computed from.
      is_matmul: Whether a matmul returns it.
      depth: Number of origins on the longest way to an input.
    """

    parents: tuple[ActivationOrigin, ...] = ()
    is_matmul: bool = False
    depth: int = 0


def new_origin(parents: Sequence[ActivationOrigin], *, is_matmul: bool = False) -> ActivationOrigin:
    """Return the origin of a value that is computed from others."""
    depth = 1 + max((parent.depth for parent in parents), default=0)
    return ActivationOrigin(tuple(parents), is_matmul, depth)


def is_residual(first: ActivationOrigin | None, second: ActivationOrigin | None) -> bool:
    """Tell whether one of two summands is computed from the other, by more than its elements."""
    if first is None or second is None or first is second:
        return False
    older, younger = (first, second) if first.depth < second.depth else (second, first)
    seen, waiting = {younger}, [younger]
    while waiting:
        for parent in waiting.pop().parents:
            if parent is older:
                return True
            # A parent is less deep than its child, so nothing at this depth or below comes from
            # `older`.
            if parent.depth > older.depth and parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return False


def nearest_matmuls(origin: ActivationOrigin | None) -> set[ActivationOrigin]:
    """Return the matmuls that a value is computed from without another matmul in between."""
    found: set[ActivationOrigin] = set()
    seen, waiting = set(), [] if origin is None else [origin]
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        if each.is_matmul:
            found.add(each)
        else:
            waiting.extend(each.parents)
    return found
