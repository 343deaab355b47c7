"""Give a kernel a backward pass of its own, or refuse to differentiate it.

Kernels in blocks need a backward pass that is written by hand: JAX's transpose of a loop keeps the
weights of every block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from shardwright.errors import AttentionError

ValuesFunction = Callable[[Any, dict[str, Any], Any], Any]
# `(static, residuals, cotangents of the results) -> cotangents of the floats by name`. An absent
# float has the cotangent None. The residuals are the operands and the results.
Backward = Callable[[Any, Any, Any], dict[str, Any]]


def differentiable(values: ValuesFunction, backward: Backward) -> ValuesFunction:
    """Return `values` with a backward pass of its own.

    JAX differentiates the forward and the backward pass if derivatives nest, so `jax.hessian` and
    `jax.jvp` of `jax.grad` work. JAX refuses `jax.jvp` of `values` itself.

    Args:
      values: Function of `(static, floats, others)`. `static` is hashable, `floats` is a dict of
        the arrays that have gradients, and `others` is a pytree of the other arguments. The
        function returns a tree of floating-point arrays.
      backward: Function of `(static, (floats, others, results), cotangents)`. It returns the
        cotangents of the floats.
    """
    call = jax.custom_vjp(values, nondiff_argnums=(0,))

    def forward(static: Any, floats: dict[str, Any], others: Any) -> Any:
        results = values(static, floats, others)
        return results, (floats, others, results)

    def pull_back(static: Any, residuals: Any, cotangents: Any) -> Any:
        return backward(static, residuals, cotangents), None

    call.defvjp(forward, pull_back)
    return call


def not_differentiable(f: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Return a function that raises AttentionError if it is differentiated.

    Args:
      f: A function of arrays.
      what: The subject of the message.
    """
    # JAX calls `rule` only to differentiate, so this check costs other calls nothing.
    plain = jax.custom_jvp(f)

    @plain.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        raise AttentionError(
            f"{what} has no derivatives of gradients (hessian, jvp of grad)",
            path="implementation",
            fix='pass implementation="vanilla", "sdpa" or "blockwise"; for a sharded sequence, '
            'pass "ring", "ulysses" or "allgather_kv", and on TPUs and GPUs also backend="cpu" '
            "in the metadata",
        )

    return plain
