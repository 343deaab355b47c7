"""Errors that also have the class of eformer's error, so that existing `except` clauses work."""

from __future__ import annotations

from shardwright.errors import MeshSpecError, StrategyError, UnknownAxisError


class NoMeshError(MeshSpecError, AssertionError):
    """There is no current mesh."""


class NotRegisteredError(UnknownAxisError, KeyError):
    """The axis to unregister is not registered."""

    __str__ = ValueError.__str__  # KeyError shows the text in quotes


class WrongTypeError(StrategyError, TypeError):
    """A value has a type that the function does not accept."""


class NotProvidedError(StrategyError, NotImplementedError):
    """A function or a class of eformer is not provided."""
