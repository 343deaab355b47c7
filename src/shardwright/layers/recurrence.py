"""The linear recurrence of state space models and gated RNNs, also over a sharded length."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardwright import _jax
from shardwright.errors import LayerError, RankMismatchError, raise_problems
from shardwright.manager import context
from shardwright.manager.core import needs_sharding
from shardwright.manager.shards import place_for_shard_map
from shardwright.resolution.request import ShardingRequest
from shardwright.vocabulary.annotations import read_annotation
from shardwright.vocabulary.axes import KV_LENGTH, LENGTH, QUERY_LENGTH, Role
from shardwright.vocabulary.lowering import describe, lower

_LENGTHS = frozenset({LENGTH, QUERY_LENGTH, KV_LENGTH})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _LinearScan:
    """The static part of a call.

    Attributes:
      dim: Index of the dim that is the length.
      reverse: Whether the scan runs from the last element to the first.
      over: Mesh axes that split the length, major first.
      spec: Spec of the arrays, without mesh axes that an enclosing `shard_map` has already split.
      mesh: Mesh of the spec, or None if nothing is left to split.
    """

    dim: int
    reverse: bool
    over: tuple[str, ...] = ()
    spec: PartitionSpec = dataclasses.field(default_factory=PartitionSpec)
    mesh: Mesh | AbstractMesh | None = None

    def map(self, local: Callable[..., Any], *arrays: jax.Array) -> Any:
        """Call a function of local arrays. All arguments and results have the spec."""
        if self.mesh is None:
            return local(*arrays)
        mesh = self.mesh if _jax.ambient_mesh() is None else None
        specs = (self.spec,) * len(arrays)
        return _jax.call_shard_map(local, mesh=mesh, in_specs=specs, out_specs=self.spec)(*arrays)

    def run(self, a: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the local states, and the state that enters the shard, with a length of 1."""
        product, h = jax.lax.associative_scan(_then, (a, x), axis=self.dim, reverse=self.reverse)
        if not self.over:
            return h, jnp.zeros_like(self._end(h))
        # A shard maps the state that enters it to product * state + h. Two elements of each shard,
        # which one all-gather sends, are enough to compose the maps of all shards before this one.
        ends = jax.lax.all_gather(jnp.stack([self._end(product), self._end(h)]), self.over)
        _, left = jax.lax.associative_scan(_then, (ends[:, 0], ends[:, 1]), reverse=self.reverse)
        before = jax.lax.axis_index(self.over) + (1 if self.reverse else -1)
        is_first = (before < 0) | (before >= len(left))
        entering = jnp.where(is_first, 0, left[jnp.clip(before, 0, len(left) - 1)])
        # No state enters the first shard, so its result is h. `h + product * 0` would be NaN if the
        # first coefficient, which must have no effect, were infinite or NaN.
        return jnp.where(is_first, h, h + product * entering), entering

    def _end(self, array: jax.Array) -> jax.Array:
        """Return the last element in the direction of the scan, with a length of 1."""
        at = 0 if self.reverse else array.shape[self.dim] - 1
        return jax.lax.slice_in_dim(array, at, at + 1, axis=self.dim)

    def shifted(self, h: jax.Array, entering: jax.Array) -> jax.Array:
        """Return the state before each element."""
        size = h.shape[self.dim]
        if self.reverse:
            parts = [jax.lax.slice_in_dim(h, 1, size, axis=self.dim), entering]
        else:
            parts = [entering, jax.lax.slice_in_dim(h, 0, size - 1, axis=self.dim)]
        return jnp.concatenate(parts, axis=self.dim)


def _then(first: Any, second: Any) -> Any:
    """Compose two maps h -> a * h + x; return a and x of the map that applies both in order."""
    (a, x), (b, y) = first, second
    return a * b, b * x + y


def linear_scan(a: Any, x: Any, *axes: Any, reverse: bool = False) -> Any:
    """Return the states `h[t] = a[t] * h[t - 1] + x[t]` of a linear recurrence along the length.

    The state before the first element is 0. For another first state, add `a[0] * state` to `x[0]`.
    If the length is sharded, each device scans its part. One all-gather of the last states of all
    parts then corrects the results. The backward pass sends the same amount. Without a manager, the
    length counts as unsharded.

    States of bfloat16 and float16 are computed in float32. Only reverse-mode derivatives exist. The
    scan multiplies elements of `a` with each other, so a product over the length must not overflow.
    If it does, states are NaN.

    Args:
      a: Coefficients, [..., length, ...].
      x: Inputs, of the same shape.
      *axes: Annotation of `a` and `x`, with LENGTH, QUERY_LENGTH or KV_LENGTH.
      reverse: Whether `h[t]` depends on `h[t + 1]` instead.

    Raises:
      RankMismatchError: The shapes differ.
      LayerError: No dim or several dims are a length, or the length is in a composite or merged
        dim. Or the dtype of `x` cannot hold the states, or `a` has integers.
      ShardingError: The annotation does not resolve.

    >>> import shardwright as sw
    >>> a, x = jnp.full((1, 4), 0.5), jnp.ones((1, 4))
    >>> linear_scan(a, x, sw.BATCH, sw.LENGTH)
    Array([[1.   , 1.5  , 1.75 , 1.875]], dtype=float32)
    """
    shape = np.shape(x)
    if np.shape(a) != shape:
        what = f"a has shape {np.shape(a)}, and x has shape {shape}"
        raise RankMismatchError(what, path="a", fix="pass jnp.broadcast_to(a, x.shape)")
    annotation = read_annotation(axes)
    a, x = jnp.asarray(a), jnp.asarray(x)
    _check_dtypes(a, x)
    scan = _planned(annotation, shape, reverse)
    if not shape[scan.dim]:
        return x
    # Over Explicit mesh axes, and inside another shard_map, a cotangent must have the type of its
    # argument. So give the arguments the types with which the shard_map runs, before the call of
    # the custom_vjp.
    a, x = _jax.vary_together((a, x))
    if scan.mesh is not None:
        a, x = place_for_shard_map((a, x), (scan.spec, scan.spec), mesh=scan.mesh)
    return _linear_scan(scan, a, x)


def _check_dtypes(a: jax.Array, x: jax.Array) -> None:
    """Refuse dtypes in which states or gradients would lose a fraction or an imaginary part."""
    for name, array in (("a", a), ("x", x)):
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            what = f"{name} has dtype {array.dtype}, and the states have fractions"
            raise LayerError(what, path=name, fix=f"pass {name}.astype(jnp.float32)")
    is_complex = [jnp.issubdtype(array.dtype, jnp.complexfloating) for array in (a, x)]
    if is_complex == [True, False]:
        what = f"a has dtype {a.dtype}, and x of dtype {x.dtype} cannot hold complex states"
        raise LayerError(what, path="x", fix="pass x.astype(a.dtype)")


def _planned(annotation: Any, shape: tuple[int, ...], reverse: bool) -> _LinearScan:
    dims = lower(annotation, shape).dims
    lengths = [at for at, dim in enumerate(dims) if _LENGTHS & {*dim.axes}]
    if len(lengths) != 1 or len(dims[lengths[0]].axes) != 1 or dims[lengths[0]].merged:
        raise LayerError(
            f"{describe(annotation)} does not name one dim as the length of the scan",
            path="axes",
            fix="write LENGTH for the dim along which the states depend on each other, such as "
            "(BATCH, LENGTH, EMBED)",
        )
    (dim,) = lengths
    manager = context.current()
    if manager is None:
        return _LinearScan(dim=dim, reverse=reverse)
    ambient = _jax.ambient_mesh()
    manual = manager.manual_axes(ambient)
    request = ShardingRequest(annotation, shape, None, Role.ACTIVATION, None, manual)
    resolution = manager.answer(request, ambient)
    spec = resolution.require()
    raise_problems(needs_sharding(resolution), resolution=resolution)
    over = resolution.decisions[dim].mesh_axes
    mesh = manager.mesh if any(spec) else None
    return _LinearScan(dim=dim, reverse=reverse, over=over, spec=spec, mesh=mesh)


# This derivative is written by hand, because JAX's own derivative of `associative_scan` stores the
# values of each level of the scan. The custom_vjp is outside of the shard_map, as in
# `attention/parts/shards.py`.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_scan(scan: _LinearScan, a: jax.Array, x: jax.Array) -> jax.Array:
    def local(a: jax.Array, x: jax.Array) -> jax.Array:
        return scan.run(_wide(a), _wide(x))[0].astype(x.dtype)

    states: jax.Array = scan.map(local, a, x)
    return states


def _forward(scan: _LinearScan, a: jax.Array, x: jax.Array) -> Any:
    def local(a: jax.Array, x: jax.Array) -> Any:
        h, entering = scan.run(_wide(a), _wide(x))
        return h.astype(x.dtype), entering

    h, entering = scan.map(local, a, x)
    return h, (a, h, entering)


def _backward(scan: _LinearScan, saved: Any, cotangent: jax.Array) -> Any:
    """Return the gradients of a and x.

    The gradient of x is g[t] = dh[t] + a[t + 1] * g[t + 1]. Let u[t] = a[t] * g[t]. Then u is a
    scan with the same coefficients in the other direction: u[t] = a[t] * u[t + 1] + a[t] * dh[t].
    """
    back = dataclasses.replace(scan, reverse=not scan.reverse)

    def local(a: jax.Array, h: jax.Array, entering: jax.Array, dh: jax.Array) -> Any:
        wide, dh_wide = _wide(a), _wide(dh)
        g = dh_wide + back.shifted(*back.run(wide, wide * dh_wide))
        return (g * scan.shifted(_wide(h), entering)).astype(a.dtype), g.astype(dh.dtype)

    a, h, entering = saved
    if scan.mesh is not None:
        (cotangent,) = place_for_shard_map((cotangent,), (scan.spec,), mesh=scan.mesh)
    gradients: Any = scan.map(local, a, h, entering, cotangent)
    return gradients


_linear_scan.defvjp(_forward, _backward)


def _wide(array: jax.Array) -> jax.Array:
    """Return an array cast to float32 at least."""
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))
