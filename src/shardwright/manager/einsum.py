"""`einsum` and `dot_general` with a sharded result, on Auto, Explicit and mixed meshes.

Over Auto mesh axes, the result gets a constraint. Over Explicit mesh axes, the sharding is passed
as `out_sharding`: if a sharded dim is contracted, JAX refuses a matmul without `out_sharding`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardwright import _jax
from shardwright.manager import constraint, context
from shardwright.manager.constraint import Placement
from shardwright.manager.core import Manager
from shardwright.manager.place import check_varying, decide_array, place
from shardwright.resolution.partition_specs import UNCONSTRAINED, entry_names, entry_of
from shardwright.resolution.request import ShardingRequest
from shardwright.vocabulary.annotations import read_annotation


@dataclasses.dataclass(frozen=True, slots=True)
class _Contraction:
    """A matmul of arrays with fixed options. It is hashable, as a static argument of jit must be.

    Attributes:
      function: `jnp.einsum` or `jax.lax.dot_general`.
      before: Arguments before the operands.
      after: Arguments after the operands.
      precision: As in `einsum` and `dot_general`.
      preferred_element_type: As in `einsum` and `dot_general`.
    """

    function: Callable[..., Any]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    precision: Any
    preferred_element_type: Any

    def __call__(self, *operands: Any, out_sharding: Any = None) -> Any:
        return self.function(
            *self.before,
            *operands,
            *self.after,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
        )


def einsum(
    spec: str,
    *operands: Any,
    out: Any,
    mode: str | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Any:
    """Compute `jnp.einsum`, with the result sharded as the ambient manager resolves `out`.

    Use `sw.einsum` instead of `sw.shard(jnp.einsum(...), *out)`. Both do the same on Auto meshes.
    `sw.einsum` also works on Explicit and mixed meshes, where JAX requires the sharding of the
    result if a sharded dim is contracted. A dim that a rule leaves to the compiler (`?`) is not
    sharded over Explicit axes. Without an ambient manager, `sw.einsum` is `jnp.einsum`. Inside a
    `shard_map`, `sw.einsum` multiplies shards: if the `shard_map` has split a contracted dim, add
    `jax.lax.psum`.

    >>> import shardwright as sw
    >>> sw.einsum("ij,jk->ik", jnp.ones((2, 3)), jnp.ones((3, 4)), out=(sw.BATCH, sw.EMBED)).shape
    (2, 4)

    Args:
      spec: Subscripts, as in `jnp.einsum`.
      *operands: Arrays.
      out: Annotation of the result: a tuple of axes, or a layout.
      mode: Runtime mode. Defaults to the manager's mode.
      precision: As in `jnp.einsum`.
      preferred_element_type: As in `jnp.einsum`.

    Raises:
      ShardingError: The annotation does not fit the result, the rules or the mesh.
    """
    matmul = _Contraction(jnp.einsum, (spec,), (), precision, preferred_element_type)
    return _sharded(matmul, operands, out, mode)


def dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    *,
    out: Any,
    mode: str | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Any:
    """Compute `jax.lax.dot_general`, with the result sharded as the ambient manager resolves `out`.

    The dims of the result are the batch dims, then the free dims of `lhs`, then those of `rhs`. See
    `einsum` for the behavior on each kind of mesh.

    Args:
      lhs: Array.
      rhs: Array.
      dimension_numbers: As in `jax.lax.dot_general`.
      out: Annotation of the result: a tuple of axes, or a layout.
      mode: Runtime mode. Defaults to the manager's mode.
      precision: As in `jax.lax.dot_general`.
      preferred_element_type: As in `jax.lax.dot_general`.

    Raises:
      ShardingError: The annotation does not fit the result, the rules or the mesh.
    """
    numbers = _as_tuples(dimension_numbers)
    matmul = _Contraction(jax.lax.dot_general, (), (numbers,), precision, preferred_element_type)
    return _sharded(matmul, (lhs, rhs), out, mode)


def _as_tuples(value: Any) -> Any:
    # Make tuples, because a static argument of jit must be hashable, and JAX also takes lists of
    # dimension numbers.
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def _sharded(matmul: _Contraction, operands: tuple[Any, ...], out: Any, mode: str | None) -> Any:
    entered = context.current()
    if entered is None:
        return matmul(*operands)
    # eformer's manager holds a `Manager`, which decides.
    manager: Manager = entered if isinstance(entered, Manager) else entered.native()
    mesh = _jax.ambient_mesh() or manager.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return place(manager, matmul(*operands), (out,), mode)
    # The spec depends on the shape of the result, so first evaluate that shape with P(), with which
    # JAX accepts every matmul here. A bare spec would need an ambient mesh, and a manager that is
    # entered inside a trace sets none.
    whole: Any = NamedSharding(mesh, PartitionSpec())
    result = jax.eval_shape(functools.partial(matmul, out_sharding=whole), *operands)
    decided = decide_array(manager, ShardingRequest(read_annotation((out,)), result.shape, mode))
    placement = decided.placement
    if placement is None:  # an enclosing shard_map has made all mesh axes Manual
        y = matmul(*operands)
    elif placement.auto is None or _jax.in_trace():
        y = _place_result(matmul, placement, *operands)
    else:
        # Outside of jit, the constraint over Auto axes would undo the sharding over Explicit axes.
        y = _place_result_jitted(matmul, placement, *operands)
    if decided.manual is not None:
        check_varying(y, decided.manual, None)
    return y


def _place_result(matmul: _Contraction, placement: Placement, *operands: Any) -> Any:
    assert placement.explicit is not None
    entries = [None if entry is UNCONSTRAINED else entry for entry in placement.explicit.partitions]
    spec = PartitionSpec(*entries, unreduced=placement.explicit.unreduced)
    first = _before_scatter(matmul, operands, spec)
    mesh: Any = _jax.ambient_mesh() or placement.mesh
    y = matmul(*operands, out_sharding=NamedSharding(mesh, first))
    y = y if first == spec else jax.reshard(y, NamedSharding(mesh, spec))
    return y if placement.auto is None else constraint.constrain(y, constraint.auto_part(placement))


def _before_scatter(
    matmul: _Contraction, operands: tuple[Any, ...], spec: PartitionSpec
) -> PartitionSpec:
    """Return the `out_sharding` of a matmul whose result is then resharded to `spec`.

    The two specs differ if JAX marks the weight as reduced. JAX then refuses a cotangent whose
    tokens are sharded over a mesh axis that the weight is contracted over, such as tp, if tp shards
    LENGTH too. So the sum first stays unreduced over such mesh axes.
    """
    weight = jax.typeof(operands[-1]).sharding.spec
    if not weight.reduced or matmul.function is not jax.lax.dot_general:
        return spec
    (_, contracted), _ = matmul.after[0]
    summed = {axis for dim in contracted for axis in entry_names(weight.partitions[dim])}
    of_result = [entry_names(entry) for entry in spec.partitions]
    scattered = frozenset(axis for entry in of_result for axis in entry if axis in summed)
    kept = [entry_of(tuple(a for a in entry if a not in scattered)) for entry in of_result]
    return PartitionSpec(*kept, unreduced=spec.unreduced | scattered) if scattered else spec


_place_result_jitted = jax.jit(_place_result, static_argnums=(0, 1))
