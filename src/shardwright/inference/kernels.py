"""Kernels of Pallas and of the FFI. The walk reads a function of plain JAX in place of each kernel.

The program of a kernel is about blocks of memory, and says nothing about whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from shardwright.errors import Problem, StrategyError, did_you_mean
from shardwright.inference.step import ArrayFacts, InferenceStep


class Kernels:
    """Functions that stand for kernels.

    Args:
      functions: Name of a kernel -> a function that has the kernel's operands and results.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        if not isinstance(functions, Mapping) or not all(map(callable, functions.values())):
            raise StrategyError(
                "kernels is not a mapping of names to functions",
                path="kernels",
                fix='write kernels={"my_kernel": jnp.matmul}',
            )
        self._functions = dict(functions)
        self._called: set[str] = set()

    def walk(self, step: InferenceStep, name: str) -> list[ArrayFacts] | None:
        """Walk the function that stands for a kernel, or return None if there is no function.

        Raises:
          StrategyError: The function cannot take the operands, or has other results.
        """
        self._called.add(name)
        function = self._functions.get(name)
        if function is None:
            return None
        equation = step.equation
        operands = [
            jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype)
            for variable in equation.invars
        ]
        try:
            closed = jax.make_jaxpr(function)(*operands)
        except Exception as error:
            what = f"the function raises {type(error).__name__}: {error}"
            raise StrategyError(what, path=f"kernels/{name}", fix=_FIX) from error
        results, own = (
            ", ".join(f"{each.aval.dtype}{list(each.aval.shape)}" for each in variables)
            for variables in (closed.jaxpr.outvars, equation.outvars)
        )
        if results != own:
            raise StrategyError(
                f"the function returns {results}, and the kernel returns {own}",
                path=f"kernels/{name}",
                fix=_FIX,
            )
        # Arrays that the function closes over are constants of its jaxpr. Nothing is known about
        # them.
        return step.walk(closed.jaxpr, step.values, called_at=step.location.caller)

    def unused(self) -> list[Problem]:
        """Return a problem for each function whose kernel the program does not call."""
        called = sorted(self._called)
        return [
            Problem(
                error=StrategyError,
                what="the program calls no such kernel",
                path=f"kernels/{name}",
                fix=did_you_mean(name, called) or f"it calls {', '.join(called) or 'none'}",
            )
            for name in self._functions
            if name not in self._called
        ]


_FIX = "write a function of plain JAX with the operands and the results of the kernel"
