"""Why a dim has its name: the reason, the primitive, and the line of the model."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardwright import _jax


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Why a dim has its name.

    Attributes:
      reason: What the program does with the dim.
      equation: The equation of the jaxpr that does it, or None.
    """

    reason: str
    equation: Any = None

    @property
    def primitive(self) -> str:
        """Name of the JAX primitive, or empty."""
        return "" if self.equation is None else str(self.equation.primitive.name)

    @property
    def source(self) -> str:
        """Line of the model, such as `model.py:12`, or empty."""
        return "" if self.equation is None else _jax.source_line(self.equation)

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.primitive, self.source) if part)
        return f"{self.reason} ({place})" if place else self.reason
