"""Why a dim has its name: the reason, the primitive, and the line of the model."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardwright import _jax


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EquationLocation:
    """An equation of a jaxpr, and its place in the model.

    Attributes:
      equation: The equation.
      caller: The equation whose source line is in the model. It is the call of the library function
        that contains this equation, or the equation itself.
    """

    equation: Any
    caller: Any

    @property
    def primitive(self) -> str:
        """Name of the JAX primitive."""
        return str(self.equation.primitive.name)

    @property
    def source(self) -> str:
        """Line of the model, such as `model.py:12`, or empty."""
        # Look the line up only when it is shown: most equations name no dim, so their lines are
        # never shown.
        return _jax.source_line(self.caller, skip_libraries=True)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Why a dim has its name.

    Attributes:
      reason: What the program does with the dim.
      location: The equation that does it, or None.
    """

    reason: str
    location: EquationLocation | None = None

    @property
    def primitive(self) -> str:
        """Name of the JAX primitive, or empty."""
        return "" if self.location is None else self.location.primitive

    @property
    def source(self) -> str:
        """Line of the model, such as `model.py:12`, or empty."""
        return "" if self.location is None else self.location.source

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.primitive, self.source) if part)
        return f"{self.reason} ({place})" if place else self.reason
