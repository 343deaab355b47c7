"""Products and sums of an activation and a weight that may be `reduced` in its type.

The gradient of such a weight is `unreduced`, so a loop can sum gradients without a collective. JAX
accepts a reduced operand together with a sharded one only in matmuls. So here a product and a sum
both read the weight in a matmul. The gradient of the weight is a matmul too, which sums over the
tokens of a device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardwright.resolution.partition_specs import entry_names


def multiply(x: Any, weight: Any) -> Any:
    """Return `x * weight`. The weight has the last dims and the dtype of `x`."""
    spec = jax.typeof(weight).sharding.spec
    if not spec.reduced:
        return x * weight
    tokens = jax.typeof(x).sharding.spec.partitions[: x.ndim - weight.ndim]
    summed = {axis for entry in tokens for axis in entry_names(entry)}
    # The gradient of the weight is a matmul. Its result can be unreduced over all mesh axes of the
    # contracted dims, or over none. So make the weight reduced over all these mesh axes: the
    # transpose of this reshard sums over the added ones, such as tp over heads.
    weight = jax.reshard(weight, PartitionSpec(*spec.partitions, reduced=spec.reduced | summed))
    dims = "abcd"[: weight.ndim]
    return jnp.einsum(f"...{dims},{dims}->...{dims}", x, weight)


def add(x: Any, weight: Any) -> Any:
    """Return `x + weight`. The weight has the last dims and the dtype of `x`."""
    if not jax.typeof(weight).sharding.spec.reduced:
        return x + weight
    return x + multiply(jnp.ones_like(x), weight)
