"""How far windows reach, against the elements that a convolution of JAX depends on."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwright.dims.windows import windows_of


def test_reach_is_what_each_part_depends_on() -> None:
    images = jnp.eye(32)[:, :, None]  # one for each element, so that the results are a Jacobian
    cases = itertools.product((2, 3, 5), (1, 2), ((0, 0), (2, 1)), (1, 2), (1, 2))

    def convolve() -> list[jax.Array]:
        return [
            lax.conv_general_dilated(
                *(images, jnp.ones((size, 1, 1)), (stride,), (padding,), (spread,), (dilation,)),
                dimension_numbers=("NHC", "HIO", "NHC"),
            )
            for size, stride, padding, dilation, spread in cases
        ]

    different = []
    traced = jax.jit(convolve).trace()
    equations = [each for each in traced.jaxpr.eqns if each.primitive is lax.conv_general_dilated_p]
    results = traced.lower().compile()()
    assert len(equations) == len(results) == 48
    for equation, result in zip(equations, results, strict=True):
        needed = np.asarray(result)[..., 0].T != 0
        (window,) = windows_of(equation)
        for parts in (2, 4):
            if needed.shape[0] % parts:
                continue
            own = 32 // parts
            columns = [np.nonzero(rows.any(0))[0] for rows in np.split(needed, parts)]
            before = max(at * own - columns[at].min() for at in range(1, parts))
            after = max(columns[at].max() + 1 - (at + 1) * own for at in range(parts - 1))
            expected = (max(before, 0), max(after, 0))
            actual = window.reach(32, needed.shape[0], parts)
            if (actual and actual[:2]) != (expected if max(expected) <= own else None):
                different.append((window, parts, actual, expected))
    assert not different
