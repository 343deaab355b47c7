"""Errors that are also of the class that eformer raises, so that code which catches that class still does."""

from __future__ import annotations

from shardwright.errors import MeshSpecError, StrategyError, UnknownAxisError


class NoMeshError(MeshSpecError, AssertionError):
    """No mesh is at hand."""


class NotRegisteredError(UnknownAxisError, KeyError):
    """An axis that nobody registered is taken back."""

    __str__ = ValueError.__str__  # KeyError's shows the text as a quoted key


class WrongTypeError(StrategyError, TypeError):
    """A value of another type than the call takes."""
