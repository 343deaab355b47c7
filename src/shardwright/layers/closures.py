"""Find the PRNG keys that a function closes over."""

from __future__ import annotations

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

    The search covers the closure of the function, the globals that it reads, and the arguments of
    `functools.partial`. It also covers functions of the same module to which the function refers.
    Keys inside trees and objects are not reported, because a loss may close over a whole training
    state, which has a key.
    """
    found: list[str] = []
    pending: list[Any] = [function]
    known: set[int] = set()
    home: Any = None
    while pending:
        part, named = pending.pop(), {}
        while isinstance(part, functools.partial):
            named.update({f"argument {at}": value for at, value in enumerate(part.args)})
            named.update(part.keywords)
            part = part.func
        part = inspect.unwrap(part)
        part = getattr(part, "__func__", part)  # the function of a method
        if isinstance(part, types.FunctionType) and id(part) not in known:
            # Search each function only once, because two functions may refer to each other.
            known.add(id(part))
            home = part.__globals__ if home is None else home
            # Functions of other modules, such as those of a library, are not searched.
            if part.__globals__ is home:
                named.update(_captured(part))
        for name, value in named.items():
            # A NumPy array of two uint32 counts as data, such as a size. Only a JAX array counts as
            # a key.
            if isinstance(value, jax.Array):
                if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) or as_key(value) is not None:
                    found.append(name)
            elif callable(value):
                pending.append(value)
    return found


def _captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a function's closure, and of the globals that it reads.

    `inspect.getclosurevars` is not used, because it also reports globals that only share their name
    with an attribute.
    """
    code, cells = function.__code__, function.__closure__ or ()
    for name, cell in zip(code.co_freevars, cells, strict=True):
        if cell != types.CellType():  # skip a variable that is assigned later
            yield name, cell.cell_contents
    codes = [code]
    for inner in codes:  # the loop body appends the functions that `inner` defines
        codes += [constant for constant in inner.co_consts if isinstance(constant, types.CodeType)]
        for instruction in dis.get_instructions(inner):
            if instruction.opname == "LOAD_GLOBAL":
                yield instruction.argval, function.__globals__.get(instruction.argval)
