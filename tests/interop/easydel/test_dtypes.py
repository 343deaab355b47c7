"""The computation dtype of a layer."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.interop.easydel import canonicalize_dtype
from tests.raising import raises


@pytest.mark.parametrize(
    ("args", "options", "expected"),
    [
        ((jnp.ones(2, jnp.bfloat16), None, jnp.ones(2, jnp.int8)), {}, jnp.bfloat16),
        ((jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float32)), {}, jnp.float32),
        ((jnp.ones(2, jnp.int32),), {}, jnp.float32),
        ((jnp.ones(2, jnp.int8), True), {}, jnp.float32),
        ((np.ones(2, np.float16), 1.0), {}, jnp.float16),
        ((jnp.ones(2, jnp.complex64), 1), {}, jnp.complex64),
        ((jnp.ones(2, jnp.int8), jnp.ones(2, jnp.int16)), {"inexact": False}, jnp.int16),
        ((jnp.ones(2, jnp.float32),), {"dtype": jnp.bfloat16}, jnp.bfloat16),
        ((jnp.ones(2, jnp.int4),), {}, jnp.float32),
        ((jnp.ones(2, jnp.float8_e4m3fn),), {}, jnp.float8_e4m3fn),
        ((), {"dtype": "float16"}, jnp.float16),
        ((jnp.ones(2),), {"dtype": jnp.int32, "inexact": False}, jnp.int32),
    ],
)
def test_common_or_given_dtype(args: Any, options: dict[str, Any], expected: Any) -> None:
    assert jnp.dtype(canonicalize_dtype(*args, **options)) == expected


def test_given_dtype_is_returned() -> None:
    assert canonicalize_dtype(1, dtype=jnp.bfloat16) is jnp.bfloat16
    assert canonicalize_dtype(1, dtype="float32") == "float32"


def test_no_computation_dtype() -> None:
    with raises(ValueError, "dtype", "int32", "inexact", fix=("float", "inexact")) as caught:
        canonicalize_dtype(jnp.ones(2), dtype=jnp.int32)
    assert isinstance(caught.value, sw.LayerError)
    with pytest.raises(ValueError, match="at least one array or dtype"):
        canonicalize_dtype(None, None)


def test_no_common_dtype() -> None:
    with pytest.raises(ValueError, match="no available implicit dtype promotion path"):
        canonicalize_dtype(jnp.ones(2, jnp.float8_e4m3fn), None, jnp.ones(2))


def test_unknown_dtype() -> None:
    with pytest.raises(TypeError, match="'bf16' not understood"):
        canonicalize_dtype(dtype="bf16")
