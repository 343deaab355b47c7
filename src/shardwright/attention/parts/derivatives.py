"""Derivatives of kernels in both modes: a backward pass written by hand, and tangents by JAX.

`jax.custom_vjp` gives a function a backward pass, but `jax.jvp`, `jax.jacfwd` and `jax.linearize`
then raise. With `jax.custom_jvp` alone, JAX would transpose the tangents of a loop over blocks and
keep all of its weights. Here the rule of a `custom_jvp` calls one linear primitive. The primitive
evaluates to the tangent of the plain function, and its transpose is the backward pass. Both are
ordinary JAX code, so derivatives nest in every order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad, batching, mlir

from shardwright.errors import AttentionError

Values = Callable[[Any, dict[str, Any], Any], Any]
# `(static, residuals, cotangents of the results) -> cotangents of the floats by name`, with None
# for an absent float. The residuals are the kept operands and results.
Backward = Callable[[Any, Any, Any], dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Job:
    """What the primitive does, on flat lists of arrays.

    Attributes:
      tangents: `(operands, results, tangents of the floats) -> tangents of the results`.
      backward: `(operands, results, cotangents of the results) -> cotangents of the floats`.
      results: Number of results. They are the first arguments.
      operands: Number of operands. They come next, and the tangents last.
    """

    tangents: Callable[..., list[Any]]
    backward: Callable[..., list[Any]]
    results: int
    operands: int

    def split(self, arguments: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the results, the operands and the tangents among the arguments."""
        middle = self.results + self.operands
        return (
            list(arguments[: self.results]),
            list(arguments[self.results : middle]),
            list(arguments[middle:]),
        )


def differentiable(values: Values, backward: Backward, *, names: tuple[str, ...] = ()) -> Values:
    """Return `values` with a backward pass of its own.

    Args:
      values: Function of `(static, floats, others)`: a hashable value, arrays by name that have
        gradients, and the rest, a pytree. It returns a tree of floating-point arrays.
      backward: Function of `(static, (floats, others, results), cotangents)`. It returns the
        cotangents of the floats.
      names: Names of the results for `checkpoint_name`; the last one also names further results. If
        a remat policy saves them, the backward pass reads them and the forward pass does not run
        again.
    """
    call = jax.custom_jvp(values, nondiff_argnums=(0,))

    @call.defjvp
    def rule(static: Any, primals: Any, tangents: Any) -> Any:
        floats, others = primals
        results = call(static, floats, others)
        flat, structure = jax.tree.flatten(results)
        flat = [
            checkpoint_name(x, names[min(at, len(names) - 1)]) if names else x
            for at, x in enumerate(flat)
        ]
        results = jax.tree.unflatten(structure, flat)
        operands, operands_structure = jax.tree.flatten((floats, others))
        float_tangents, floats_structure = jax.tree.flatten(tangents[0])

        def push(operands: list[Any], results: list[Any], float_tangents: list[Any]) -> list[Any]:
            del results
            floats, others = jax.tree.unflatten(operands_structure, operands)
            tangents = jax.tree.unflatten(floats_structure, float_tangents)
            return jax.tree.leaves(
                jax.jvp(lambda floats: values(static, floats, others), (floats,), (tangents,))[1]
            )

        def pull(operands: list[Any], results: list[Any], cotangents: list[Any]) -> list[Any]:
            floats, others = jax.tree.unflatten(operands_structure, operands)
            residuals = (floats, others, jax.tree.unflatten(structure, results))
            return jax.tree.leaves(
                backward(static, residuals, jax.tree.unflatten(structure, cotangents))
            )

        job = _Job(tangents=push, backward=pull, results=len(flat), operands=len(operands))
        result_tangents = _tangents.bind(*flat, *operands, *float_tangents, job=job)
        return results, jax.tree.unflatten(structure, result_tangents)

    return call


def refuse_tangents(arrays: dict[str, Any], what: str) -> dict[str, Any]:
    """Return arrays unchanged, and refuse forward-mode derivatives through them.

    Gradients pass. Forward mode raises AttentionError when it is evaluated or compiled.

    Args:
      arrays: Arrays by name; None for an absent one.
      what: The subject of the message: the kernel that has no forward mode.
    """

    def refuse(*_: Any) -> list[Any]:
        raise _no_forward_mode(what)

    @jax.custom_jvp
    def same(arrays: dict[str, Any]) -> dict[str, Any]:
        return arrays

    @same.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        flat, structure = jax.tree.flatten(primals[0])
        job = _Job(
            tangents=refuse,
            backward=lambda operands, results, cotangents: cotangents,
            results=len(flat),
            operands=0,
        )
        return primals[0], jax.tree.unflatten(
            structure, _tangents.bind(*flat, *jax.tree.leaves(tangents[0]), job=job)
        )

    unchanged: dict[str, Any] = same(arrays)
    return unchanged


def without_tangents(f: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Return a function that raises AttentionError if it is differentiated."""
    plain = jax.custom_jvp(f)

    @plain.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        raise _no_forward_mode(what)

    return plain


def _no_forward_mode(what: str) -> AttentionError:
    fix = (
        'pass implementation="vanilla", "sdpa" or "blockwise"; over a sharded sequence "ring", '
        '"ulysses" or "allgather_kv", on TPUs and GPUs with backend="cpu" in the metadata'
    )
    return AttentionError(
        f"{what} has no forward-mode derivatives (jvp, jacfwd, linearize, hessian)",
        path="implementation",
        fix=fix,
    )


_tangents = jax.extend.core.Primitive("attention_tangents")
_tangents.multiple_results = True


def _evaluate(*arguments: Any, job: _Job) -> list[Any]:
    results, operands, tangents = job.split(arguments)
    return job.tangents(operands, results, tangents)


def _abstract(*arguments: Any, job: _Job) -> list[Any]:
    # A tangent has the type of its result: shape, dtype, sharding, varying mesh axes.
    return job.split(arguments)[0]


def _nested(primals: Any, tangents: Any, *, job: _Job) -> Any:
    instantiated = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return jax.jvp(functools.partial(_evaluate, job=job), tuple(primals), tuple(instantiated))


def _transpose(cotangents: Any, *arguments: Any, job: _Job) -> list[Any]:
    results, operands, tangents = job.split(arguments)
    instantiated = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    grads = job.backward(operands, results, instantiated)
    of_tangents = [
        grad if ad.is_undefined_primal(tangent) else None
        for grad, tangent in zip(grads, tangents, strict=True)
    ]
    return [None] * (len(results) + len(operands)) + of_tangents


def _batch(arguments: Any, dims: Any, *, job: _Job) -> Any:
    size = next(x.shape[dim] for x, dim in zip(arguments, dims, strict=True) if dim is not None)

    def first(x: Any, dim: Any) -> Any:
        return (
            jnp.broadcast_to(x[None], (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        )

    results, operands, tangents = job.split(arguments)
    results_dims, operands_dims, tangents_dims = job.split(dims)
    results, tangents = (
        [first(x, dim) for x, dim in zip(xs, of, strict=True)]
        for xs, of in ((results, results_dims), (tangents, tangents_dims))
    )
    in_axes = (operands_dims, 0, 0)
    batched = dataclasses.replace(
        job,
        tangents=jax.vmap(job.tangents, in_axes=in_axes),
        backward=jax.vmap(job.backward, in_axes=in_axes),
    )
    result_tangents = _tangents.bind(*results, *operands, *tangents, job=batched)
    return result_tangents, [0] * len(result_tangents)


_tangents.def_impl(_evaluate)
_tangents.def_abstract_eval(_abstract)
mlir.register_lowering(_tangents, mlir.lower_fun(_evaluate, multiple_results=True))
ad.primitive_jvps[_tangents] = _nested
ad.primitive_transposes[_tangents] = _transpose
batching.primitive_batchers[_tangents] = _batch
