"""The primitive that keeps an annotation in a jaxpr, in place of a resolved constraint.

A program that is traced for a plan contains `annotate_axes` where an ordinary trace contains a
sharding constraint. The walk resolves each annotation later, so one trace can be planned under many
strategies and meshes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from shardwright.resolution.request import ShardingRequest


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Annotation:
    """The request of one `shard`, `hint` or `gather` call.

    Attributes:
      request: The annotation to resolve, with shape, mode, role and path.
      strict: Whether a dim that does not fit is an error, as for `shard` and `gather`. Otherwise
        the dim is left to the compiler, as for `hint`.
    """

    request: ShardingRequest
    strict: bool = True


annotate_axes_p = Primitive("annotate_axes")
# The implementation and the lowering drop the annotation: only the walk of a plan reads it.
annotate_axes_p.def_impl(lambda x, **_: x)
annotate_axes_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(annotate_axes_p, lambda _, x, **__: [x])
# The transpose gives the cotangent the same annotation, as for a sharding constraint.
ad.deflinear2(
    annotate_axes_p,
    lambda cotangent, _, **parameters: [annotate_axes_p.bind(cotangent, **parameters)],
)


def _batch(args: Any, dims: Any, *, annotation: Annotation, added: tuple[int, ...]) -> Any:
    """Batch an annotation. The batched annotation says nothing about the dim that `vmap` adds."""
    (x,), (dim,) = args, dims
    # This `vmap` inserts its dim at `dim`. So the dims that other `vmap`s have added move up by
    # one, if they are at `dim` or behind it.
    shifted = tuple(at + (at >= dim) for at in added)
    return annotate_axes_p.bind(x, annotation=annotation, added=(*shifted, dim)), dim


batching.primitive_batchers[annotate_axes_p] = _batch


def annotate(x: Any, annotation: Annotation) -> Any:
    """Return x, with an annotation in the jaxpr of the current trace."""
    return annotate_axes_p.bind(x, annotation=annotation, added=())


def annotate_weight(w: Any, use: Annotation, stored: Annotation) -> Any:
    """Annotate a weight for its use, and its gradient with the annotation of the stored weight."""

    @jax.custom_jvp
    def gathered(w: Any) -> Any:
        return annotate(w, use)

    @gathered.defjvp
    def _tangent(primals: tuple[Any], tangents: tuple[Any]) -> Any:
        # JAX transposes this tangent rule, so the gradient is annotated too. A custom VJP needs
        # no tangent rule, but does not support forward mode.
        (primal,), (tangent,) = primals, tangents
        return gathered(primal), annotate(tangent, stored)

    return gathered(w)
