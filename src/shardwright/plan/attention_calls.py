"""Find the calls of attention in a trace, and which implementation each of them takes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Final

from shardwright import _jax
from shardwright.plan.walk.equations import called_jaxpr, live_equations, nested_jaxprs

# `attention.run` traces every call in a jitted function of this name, under this scope.
_FUNCTION: Final = "attention"
_SCOPE: Final = re.compile(r"attention_(\w+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCalls:
    """The calls of attention that come from one line of the model and take one implementation.

    Attributes:
      implementation: Name of the implementation, such as `blockwise`.
      kernels: Names of the kernels that the calls run, such as `splash_forward`.
      source: Line of the model, `model.py:12`.
    """

    implementation: str
    kernels: tuple[str, ...]
    source: str

    def __str__(self) -> str:
        kernels = f", kernels {', '.join(self.kernels)}" if self.kernels else ""
        return f"attention: {self.implementation} at {self.source or '-'}{kernels}"


def read_attention_calls(jaxpr: Any) -> tuple[AttentionCalls, ...]:
    """Return the calls of attention of a trace, in program order."""
    kernels: dict[tuple[str, str], dict[str, None]] = {}
    for name, source, own in _calls(jaxpr):
        kernels.setdefault((name, source), {}).update(dict.fromkeys(own))
    return tuple(
        AttentionCalls(implementation=name, kernels=tuple(own), source=source)
        for (name, source), own in kernels.items()
    )


def _calls(jaxpr: Any) -> Iterator[tuple[str, str, list[str]]]:
    """Yield implementation, line and kernels of each call and of each derivative of a call."""
    for equation in live_equations(jaxpr):
        body = called_jaxpr(equation)
        if body is not None and equation.params.get("name") == _FUNCTION:
            inside = list(_equations(body))
            scopes = (_SCOPE.search(_jax.scope(each)) for each in inside)
            name = next((scope[1] for scope in scopes if scope is not None), None)
            if name is not None:
                kernels = [kernel for each in inside if (kernel := _jax.kernel_name(each))]
                yield name, _jax.source_line(equation), kernels
                # The kernels of the body are listed, so the body is not searched for further calls.
                continue
        for nested in nested_jaxprs(equation):
            yield from _calls(nested)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of those inside it, without the bodies of kernels."""
    for equation in jaxpr.eqns:
        yield equation
        if not _jax.kernel_name(equation):
            for nested in nested_jaxprs(equation):
                yield from _equations(nested)
