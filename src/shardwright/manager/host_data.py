"""Check that processes pass equal host data, or parts of equal shape for a global array."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwright import _jax
from shardwright.manager.processes import (
    PATIENCE_S,
    Fact,
    ProcessGroup,
    array_text,
    compare,
    digest_of,
)
from shardwright.trees import paths

_BYTES_OF_DIGEST: Final = 8


def compare_data(group: ProcessGroup, values: Any) -> None:
    """Compare the NumPy arrays, numbers and uncommitted arrays of a tree between processes.

    Raises:
      AgreementError: Leaves differ in shape, dtype or values, or a process did not make the call.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(values)
    facts = {
        paths.path_text(path) or "the array": Fact(_data_text(leaf))
        for path, leaf in leaves
        if _is_host_data(leaf)
    }
    if facts:
        # The topic depends on the paths, so that threads may place different trees at the same
        # time.
        topic = f"data/{digest_of(' '.join(facts))[:16]}"
        fix = (
            "pass the same values in every process, or join each process's part with "
            "pm.global_array"
        )
        compare(group, topic, facts, what="shard", fix=fix, patience=PATIENCE_S)


def compare_parts(
    group: ProcessGroup, annotation: Any, local: Any, global_shape: Sequence[int] | None
) -> None:
    """Compare the shapes and dtypes of the processes' parts of a global array.

    Raises:
      AgreementError: The parts differ, or a process did not make the call.
    """
    facts = {"the local array": Fact(array_text(local))}
    if global_shape is not None:
        facts["global_shape"] = Fact(str(tuple(global_shape)))
    topic = f"parts/{digest_of(repr(annotation))[:16]}"
    fix = "pass parts of one shape and dtype in every process: pad or drop the last batch"
    compare(group, topic, facts, what="pm.global_array", fix=fix, patience=PATIENCE_S)


def _is_host_data(leaf: Any) -> bool:
    """Tell whether JAX reads a leaf from the memory of each process, and not from devices."""
    if isinstance(leaf, jax.core.Tracer) or not _jax.is_array(leaf):
        return False
    if not isinstance(leaf, jax.Array):
        return True
    return not leaf.committed and leaf.is_fully_addressable


def _data_text(leaf: Any) -> str:
    """Return dtype, shape and a digest of the values."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return f"{array_text(leaf)} with values {_digits(jax.random.key_data(leaf))}"
    return f"{array_text(leaf)} with values {_digits(leaf)}"


def _digits(leaf: Any) -> str:
    array = np.ascontiguousarray(np.asarray(leaf))
    # View the values as bytes, because dtypes such as bfloat16 have no buffer.
    data = array.reshape(-1).view(np.uint8)
    return hashlib.blake2b(data.data, digest_size=_BYTES_OF_DIGEST).hexdigest()
