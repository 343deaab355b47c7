"""A matmul with a kernel. The axes of the result decide how it is sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardwright.errors import RankMismatchError
from shardwright.layers import reduced
from shardwright.layers.dtypes import FLOAT32, Dtypes
from shardwright.manager.einsum import dot_general
from shardwright.resolution.partition_specs import entry_names, entry_of
from shardwright.vocabulary.annotations import ArraySpec

NamedSizes = Sequence[tuple[str, int]]  # (axis, size) of each dim


def specs(
    inputs: NamedSizes,
    outputs: NamedSizes,
    *,
    bias: bool = False,
    init: Any = None,
    bias_init: Any = None,
    dtypes: Dtypes = FLOAT32,
) -> dict[str, ArraySpec]:
    """Return the parameters of a matmul: `kernel`, and `bias` if there is one.

    >>> specs([(EMBED, 64)], [(HEAD, 8), (HEAD_DIM, 16)])["kernel"].shape
    (64, 8, 16)

    Args:
      inputs: Axis and size of the dims that are contracted.
      outputs: Axis and size of the dims of the result.
      bias: Whether there is a bias.
      init: Initializer of the kernel. Defaults to a truncated normal distribution with variance 1 /
        (number of inputs).
      bias_init: Initializer of the bias. Defaults to zeros.
      dtypes: `param` is the dtype of the parameters.
    """
    dtype = dtypes.param
    axes, shape = zip(*inputs, *outputs, strict=True)
    if init is None:
        dims = range(len(shape))
        init = jax.nn.initializers.variance_scaling(
            1.0,
            "fan_in",
            "truncated_normal",
            in_axis=tuple(dims[: len(inputs)]),
            out_axis=tuple(dims[len(inputs) :]),
        )
    params = {"kernel": ArraySpec(shape, dtype, axes, init)}
    if bias:
        own, sizes = zip(*outputs, strict=True)
        params["bias"] = ArraySpec(sizes, dtype, own, bias_init or jax.nn.initializers.zeros)
    return params


def dense(
    x: Any,
    kernel: Any,
    bias: Any = None,
    *,
    out: Any = None,
    contract: int = 1,
    mode: str | None = None,
    dtype: Any = None,
) -> Any:
    """Return `x @ kernel + bias`, sharded as `out` resolves.

    The last `contract` dims of `x` are contracted with the first `contract` dims of the kernel.
    Without an ambient manager nothing is sharded. Inside a `shard_map`, the operands are shards. If
    the `shard_map` has split a contracted dim, the caller must apply `jax.lax.psum` to the result,
    and add the bias only after that.

    Args:
      x: `[..., *inputs]`.
      kernel: `[*inputs, *outputs]`, already gathered.
      bias: `[*outputs]`. Defaults to none.
      out: Annotation of the result, `[..., *outputs]`. Without one, the compiler decides how the
        result is sharded over Auto mesh axes. Over Explicit mesh axes, each dim of the result stays
        sharded as in the operand that it comes from. Kernel and bias are gathered over the mesh
        axes that shard another dim of `x`.
      contract: Number of dims that are contracted.
      mode: Runtime mode. Defaults to the manager's.
      dtype: Dtype of the operands and the result. Defaults to that of `x`.

    Raises:
      RankMismatchError: The shapes do not fit each other.
      ShardingError: `out` does not fit the result, the rules or the mesh.
    """
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    check_kernel(np.shape(x), np.shape(kernel), contract, path="kernel")
    outputs = np.shape(kernel)[contract:]
    if bias is not None and np.shape(bias) != outputs:
        raise RankMismatchError(
            f"bias has shape {np.shape(bias)}, and the outputs of the kernel have shape {outputs}",
            path="bias",
            fix=f"pass a bias of shape {outputs}",
        )
    rank = np.ndim(x)
    dims = (tuple(range(rank - contract, rank)), tuple(range(contract)))
    operands = x.astype(dtype), kernel.astype(dtype)
    if out is None:
        y = _matmul(*operands, contract)
    else:
        y = dot_general(*operands, (dims, ((), ())), out=out, mode=mode)
    return y if bias is None else add_bias(y, bias)


def add_bias(y: Any, bias: Any) -> Any:
    """Return `y + bias` in the dtype of `y`.

    Over Explicit axes, the bias is first sharded like `y`.

    Args:
      y: `[..., *outputs]`.
      bias: `[*outputs]`.
    """
    bias = bias.astype(y.dtype)
    sharding = jax.typeof(y).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return y + bias
    wanted = _entries(sharding.spec, y.ndim)[y.ndim - bias.ndim :]
    own = jax.typeof(bias).sharding.spec
    if wanted != _entries(own, bias.ndim):
        spec = PartitionSpec(*wanted, reduced=own.reduced)
        bias = jax.sharding.reshard(bias, NamedSharding(sharding.mesh, spec))
    return reduced.add(y, bias)


def _matmul(x: Any, kernel: Any, contract: int) -> Any:
    """Multiply without an annotation. Over Explicit mesh axes, choose the spec of the result."""
    rank = x.ndim
    dims = (tuple(range(rank - contract, rank)), tuple(range(contract)))
    left, right = jax.typeof(x).sharding, jax.typeof(kernel).sharding
    # The type of an array without a sharding, such as a constant, has an empty mesh.
    mesh = right.mesh if left.mesh.empty else left.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return jax.lax.dot_general(x, kernel, (dims, ((), ())))
    own, weight = _entries(left.spec, rank), _entries(right.spec, kernel.ndim)
    gathered, out = entries_of_matmul(own, weight, contract)
    if gathered != weight:
        spec = PartitionSpec(*gathered, reduced=right.spec.reduced)
        kernel = jax.sharding.reshard(kernel, NamedSharding(mesh, spec))
    sharding = NamedSharding(mesh, PartitionSpec(*out))
    return jax.lax.dot_general(x, kernel, (dims, ((), ())), out_sharding=sharding)


def entries_of_matmul(
    x: Sequence[Any], kernel: Sequence[Any], contract: int
) -> tuple[list[Any], list[Any]]:
    """Return the entries of two specs: of the gathered kernel, and of the result.

    This is for a result without an annotation: each of its dims stays sharded as in the operand
    that it comes from. The kernel is gathered over the mesh axes that shard another dim of `x`.

    Args:
      x: Entries of the spec of `x`, one per dim.
      kernel: Entries of the spec of the stored kernel, one per dim.
      contract: Number of dims that are contracted.
    """
    rows = len(x) - contract
    # JAX allows a mesh axis only once in a spec. So an axis that shards x cannot shard an output
    # too.
    used = {axis for entry in x for axis in entry_names(entry)}
    free = [
        entry_of(tuple(axis for axis in entry_names(entry) if axis not in used))
        for entry in kernel[contract:]
    ]
    return [*x[rows:], *free], [*x[:rows], *free]


def _entries(spec: PartitionSpec, rank: int) -> list[Any]:
    entries = [entry_of(entry_names(entry)) for entry in spec.partitions]
    return entries + [None] * (rank - len(entries))


def check_kernel(
    x: tuple[int, ...],
    kernel: tuple[int, ...],
    contract: int,
    *,
    path: str,
    tokens: bool = False,
) -> None:
    """Check that the first dims of a kernel are the last dims of an input.

    Args:
      x: Shape of the input.
      kernel: Shape of the kernel.
      contract: Number of dims that are contracted.
      path: Name of the kernel, for the message.
      tokens: Whether the input must have a dim that is not contracted.

    Raises:
      RankMismatchError: The dims do not fit.
    """
    contracted = x[max(len(x) - contract, 0) :]
    if contracted != kernel[:contract] or len(x) < contract + tokens:
        needed = ", ".join(map(str, contracted))
        raise RankMismatchError(
            f"the kernel has shape {kernel}: x of shape {x} does not fit its first {contract} dims",
            path=path,
            fix=f"pass x of shape (tokens, {needed})"
            if contracted == kernel[:contract]
            else f"pass a kernel of shape ({needed}, ...)",
        )
