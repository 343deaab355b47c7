"""Find the PRNG keys that a function closes over."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.vocabulary.keys import as_key


def closed_over_keys(function: Callable[..., Any]) -> list[str]:
    """Return the names of the PRNG keys that a function closes over.

    They are found in its closure, in the globals that it reads, and in the arguments of
    `functools.partial`; likewise in functions of the same module that it names. Keys inside of
    trees and objects are not found: a loss may close over a whole state, which has a key.
    """
    found: list[str] = []
    pending: list[Any] = [function]
    home = getattr(_function(function), "__globals__", None)
    known: set[int] = set()
    while pending:
        part = pending.pop()
        if id(part) in known:
            continue
        known.add(id(part))
        for name, value in _captured(part):
            if _is_key(value):
                found.append(name)
            elif home is not None and getattr(_function(value), "__globals__", None) is home:
                pending.append(value)
    return found


def _function(value: Any) -> Any:
    """Return the plain function of a wrapper, a method or a `functools.partial`."""
    while isinstance(value, functools.partial):
        value = value.func
    value = inspect.unwrap(value) if callable(value) else value
    return getattr(value, "__func__", value)


def _captured(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and the values that a function refers to."""
    while isinstance(part, functools.partial):
        yield from ((f"argument {at}", value) for at, value in enumerate(part.args))
        yield from part.keywords.items()
        part = part.func
    function = _function(part)
    if not inspect.isfunction(function):
        return
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with contextlib.suppress(ValueError):  # an empty cell: its variable is assigned later
            yield name, cell.cell_contents
    for name in dict.fromkeys(_global_names(function.__code__)):
        yield name, function.__globals__.get(name)


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Yield the globals that a function reads, and those of functions that it defines."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _is_key(value: Any) -> bool:
    # A NumPy array of two uint32 is data, such as a size. JAX makes keys as its own arrays.
    if not isinstance(value, jax.Array):
        return False
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key) or as_key(value) is not None
