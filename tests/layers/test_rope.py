"""Rotary embeddings of given tables, and repeated kv heads, against loops."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.layers import apply_rotary_pos_emb, repeat_kv_bnsh, repeat_kv_bsnh, rotate_half


def tables(length: int, dim: int) -> tuple[jax.Array, jax.Array]:
    angles = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(dim // 2) / (dim // 2))
    both = jnp.concatenate([angles, angles], axis=-1)[None, None]
    return jnp.sin(both), jnp.cos(both)


def test_half_is_rotated() -> None:
    np.testing.assert_array_equal(rotate_half(jnp.array([1.0, 2.0, 3.0, 4.0])), [-3.0, -4.0, 1.0, 2.0])


def test_rotation_is_that_of_complex_numbers_and_tables_are_cut() -> None:
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 3, 5, 8)))
    sin, cos = tables(9, 8)
    found = apply_rotary_pos_emb(jnp.asarray(x), sin, cos)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * np.arange(5)[:, None] * 10000.0 ** (-np.arange(4) / 4))
    np.testing.assert_allclose(found, np.concatenate([turned.real, turned.imag], axis=-1), atol=1e-5)


@pytest.mark.parametrize("repeats", [1, 3])
def test_copies_of_kv_heads_are_adjacent(repeats: int) -> None:
    x = jnp.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    for repeat, dim in ((repeat_kv_bnsh, 1), (repeat_kv_bsnh, 2)):
        found = repeat(x, repeats)
        assert found.shape[dim] == x.shape[dim] * repeats
        for head in range(found.shape[dim]):
            np.testing.assert_array_equal(found.take(head, axis=dim), x.take(head // repeats, axis=dim))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: rotate_half(x[..., :3]), "the last dim of (1, 2, 4, 3) is odd"),
        (lambda x: apply_rotary_pos_emb(x, *tables(3, 8)), "sin_: sin_ has shape (1, 1, 3, 8), the tensor (1, 2, 4, 8)"),
        (lambda x: apply_rotary_pos_emb(x, tables(4, 8)[0], tables(4, 6)[1]), "cos_: cos_ has shape (1, 1, 4, 6)"),
        (lambda x: repeat_kv_bnsh(x[0], 2), "the array has shape (2, 4, 8), not 4 dims"),
        (lambda x: repeat_kv_bsnh(x, 0), "n_rep=0 copies"),
    ],
)
def test_bad_arrays_are_named(call: Any, says: str) -> None:
    with pytest.raises(sw.RankMismatchError, match=re.escape(says)):
        call(jnp.zeros((1, 2, 4, 8)))
