"""Rank candidates by a closed form, to choose which candidates of a large space are walked.

The closed form reads the annotations of a program, not its equations. It divides the operations by
the largest number of shards of an activation. It counts one all-gather for each gathered weight. It
counts one all-reduce for each activation that is not sharded over a mesh axis that shards the
activation annotated before it. The result only orders candidates. It is never shown as a cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from shardwright import _jax
from shardwright.errors import ShardingError, located
from shardwright.manager.core import Manager
from shardwright.plan.annotate import Annotation, annotate_axes_p
from shardwright.plan.collectives.collective import Kind, ring_bytes
from shardwright.plan.layout import Layout
from shardwright.plan.links import collective_seconds
from shardwright.plan.trace import Trace
from shardwright.plan.walk.equations import live_equations, nested_jaxprs
from shardwright.plan.walk.values import KEEP, Dims, dims_of_spec
from shardwright.resolution import resolver
from shardwright.resolution.request import ShardingRequest
from shardwright.vocabulary.axes import Role

# Share of the peak that matmuls reach. `plan.time` assumes the same for the upper end of its range.
_USE: Final = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnnotationRequest:
    """An annotation of a program.

    Attributes:
      request: The request that the manager resolves.
      number: Number of the request. Equal requests of one program have the same number.
      strict: Whether a dim that does not fit is an error, as for `shard`. For `hint`, it is left to
        the compiler.
      bytes: Bytes of the whole array; 0 for arguments and results.
      dtype: Its element type; "" for arguments and results.
      runs: How often it runs; 0 for arguments and results.
      source: Line of the model, `model.py:12`; "" for arguments and results.
    """

    request: ShardingRequest
    number: int
    strict: bool
    bytes: int = 0
    dtype: str = ""
    runs: int = 0
    source: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedAnnotation:
    """An annotation, with its role and the mesh axes of each dim under one candidate."""

    annotation: AnnotationRequest
    role: Role
    dims: Dims


def read_annotations(traced: Trace) -> tuple[AnnotationRequest, ...]:
    """Return the annotations of a trace: of its arguments, its results and its equations."""
    ends = [each for each in (*traced.inputs, *traced.outputs) if isinstance(each, ShardingRequest)]
    found = [*((request, True, {}) for request in ends), *_inside(traced.jaxpr, 1, "")]
    numbers: dict[Any, int] = {}
    requests = []
    for request, strict, facts in found:
        # The key leaves out the source line, since equal requests on several lines resolve alike.
        key = (repr(request.annotation), tuple(request.shape or ()), *request[2:], strict)
        number = numbers.setdefault(key, len(numbers))
        requests.append(AnnotationRequest(request=request, number=number, strict=strict, **facts))
    return tuple(requests)


def _inside(
    jaxpr: Any, runs: int, outer: str
) -> Iterator[tuple[ShardingRequest, bool, dict[str, Any]]]:
    """Yield request, strictness and the other fields of each annotation of a jaxpr."""
    for equation in live_equations(jaxpr):
        # An equation inside `gather` has no line of its own, so take the line of the call.
        source = _jax.source_line(equation) or outer
        if equation.primitive is annotate_axes_p:
            annotation: Annotation = equation.params["annotation"]
            aval = equation.outvars[0].aval
            facts = {
                "bytes": aval.size * aval.dtype.itemsize,
                "dtype": str(aval.dtype),
                "runs": runs,
                "source": source,
            }
            yield annotation.request, annotation.strict, facts
        # The runs of a `while` are not known, so its body counts once.
        inner = runs * equation.params["length"] if equation.primitive.name == "scan" else runs
        for nested in nested_jaxprs(equation):
            yield from _inside(nested, inner, source)


def resolve_all(
    manager: Manager, requests: Sequence[AnnotationRequest], sizes: Mapping[str, int]
) -> tuple[ResolvedAnnotation, ...]:
    """Resolve all annotations of a program under a candidate.

    Args:
      manager: The candidate.
      requests: The annotations.
      sizes: Size of each mesh axis that has more than one device.

    Raises:
      ShardingError: An annotation does not resolve.
    """
    resolved = []
    known: dict[int, tuple[Role, Dims]] = {}
    for each in requests:
        key = each.number
        if key not in known:
            resolution = manager.answer(each.request)
            if not each.strict:
                resolution = resolver.left_open(resolution)
            try:
                spec = resolution.require()
            except ShardingError as error:
                raise located(error, each.source) from error
            ndim = len(each.request.shape or ())
            known[key] = resolution.role, dims_of_spec(spec.partitions, ndim, sizes)
        role, dims = known[key]
        resolved.append(ResolvedAnnotation(annotation=each, role=role, dims=dims))
    return tuple(resolved)


def closed_form(
    resolved: Sequence[ResolvedAnnotation],
    manager: Manager,
    layout: Layout,
    *,
    flops: float,
) -> float:
    """Return the seconds by which a candidate is ranked.

    Args:
      resolved: The annotations, resolved under the candidate.
      manager: The candidate.
      layout: Assignment of its mesh axes to the slice.
      flops: Operations of the program's matmuls on all devices together.
    """
    sizes = {axis: size for axis, size in manager.mesh.shape.items() if size > 1}
    inner = [each for each in resolved if each.annotation.runs]
    activations = [each for each in inner if each.role is Role.ACTIVATION]
    used = [_axes(each.dims) for each in activations]
    # Matmuls are assumed to have as many shards as the most sharded activation.
    widest = max((_ways(axes, sizes) for axes in used), default=1)
    seconds = flops / widest / (_USE * layout.topology.chip.flops)
    before = frozenset().union(*used)
    for each, axes in zip(activations, used, strict=True):
        # If the activation before this one is sharded over a mesh axis and this one is not, count a
        # sum over that axis, as for the residual stream after a matmul whose hidden dim is over tp.
        # Further annotations of the residual stream send nothing.
        missing, before = before - axes, axes
        if missing:
            local = each.annotation.bytes // _ways(axes, sizes)
            one = _seconds(layout, Kind.ALL_REDUCE, local, missing, sizes)
            seconds += each.annotation.runs * one
    for each in inner:
        if each.role is Role.ACTIVATION:
            continue
        # This is a gathered weight, or its gradient. It is sent over the mesh axes that only one of
        # its specs (PARAM, USE) has.
        request = each.annotation.request
        other = Role.PARAM if each.role is Role.USE else Role.USE
        spec = manager.answer(request.of(other, tuple(request.shape or ()))).spec
        if spec is None:
            continue
        ndim = len(request.shape or ())
        pair = _axes(each.dims), _axes(dims_of_spec(spec.partitions, ndim, sizes))
        # `moved`: mesh axes that only one spec has, such as fsdp. `kept`: mesh axes that both specs
        # have. The kept axes divide the bytes that are sent.
        moved, kept = pair[0] ^ pair[1], pair[0] & pair[1]
        if moved:
            local = each.annotation.bytes // _ways(kept, sizes)
            one = _seconds(layout, Kind.ALL_GATHER, local, moved, sizes)
            seconds += each.annotation.runs * one
    return seconds


def _axes(dims: Dims) -> frozenset[str]:
    return frozenset(axis for dim in dims if dim is not KEEP for axis in dim)


def _ways(axes: frozenset[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _seconds(
    layout: Layout, kind: Kind, local: int, axes: frozenset[str], sizes: Mapping[str, int]
) -> float:
    """Return the seconds of one collective, at the upper end of the range."""
    wire = ring_bytes(kind, local, _ways(axes, sizes))
    names = tuple(sorted(axes))
    return collective_seconds(layout, kind, names, logical_bytes=local, wire_bytes=wire).high
