"""`sw.einsum` and `sw.dot_general` on Auto, Explicit and mixed meshes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright._jax import watch_compilations
from shardwright.testing import cpu_mesh
from tests.manager.programs import AXIS_TYPES, make_manager, numbers, sharded_over
from tests.raising import raises

HIDDEN = (sw.BATCH, sw.LENGTH, sw.MLP_INTERMEDIATE)
RESIDUAL = (sw.BATCH, sw.LENGTH, "wide")
# `wide` is sharded over the mesh axis that the second matmul contracts.
RULES = """
version = 1
name = "einsum"
[axes]
wide = "the embedding, sharded like the middle of the MLP"
open = "left to the compiler"
[rules]
batch = "dp"
length = "-"
wide = "tp"
mlp_intermediate = "tp"
open = "?"
embed = "-"
head = "tp"
[modes.decode]
wide = "-"
"""


def operands() -> tuple[np.ndarray, ...]:
    return numbers(4, 6, 8), numbers(8, 16), numbers(16, 8)


def by_einsum(x: Any, up: Any, down: Any, *, out: Any = RESIDUAL, mode: Any = None) -> Any:
    hidden = sw.einsum("ble,em->blm", x, up, out=HIDDEN)
    return sw.einsum("blm,me->ble", jnp.sin(hidden), down, out=out, mode=mode)


def by_dot_general(x: Any, up: Any, down: Any, *, out: Any = RESIDUAL, mode: Any = None) -> Any:
    last = (((2,), (0,)), ((), ()))
    hidden = sw.dot_general(x, up, last, out=HIDDEN)
    return sw.dot_general(jnp.sin(hidden), down, last, out=out, mode=mode)


def loss(f: Any) -> Any:
    return lambda *arrays: jnp.sum(jnp.cos(f(*arrays)))


def wanted() -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the result and the gradients of the two matmuls, in float64 NumPy."""
    x, up, down = (array.astype(np.float64) for array in operands())
    before = x @ up
    y = np.sin(before) @ down
    from_y = -np.sin(y)
    from_hidden = from_y @ down.T * np.cos(before)
    return y, [
        from_hidden @ up.T,
        np.einsum("ble,blm->em", x, from_hidden),
        np.einsum("blm,ble->me", np.sin(before), from_y),
    ]


@pytest.mark.parametrize("kind", AXIS_TYPES)
@pytest.mark.full(but=["tp explicit"])
def test_matmuls_equal_unsharded(kind: str) -> None:
    pm = make_manager(kind, text=RULES)
    y, gradients = wanted()
    axes = [
        (sw.BATCH, sw.LENGTH, sw.EMBED),
        (sw.EMPTY, sw.MLP_INTERMEDIATE),
        (sw.MLP_INTERMEDIATE, sw.EMPTY),
    ]
    with pm:
        placed = [pm.shard(array, *own) for array, own in zip(operands(), axes, strict=True)]
        for f, eager in ((by_einsum, by_einsum), (by_dot_general, None)):
            for call in filter(None, (eager, jax.jit(f))):
                result = call(*placed)
                assert sharded_over(result, pm.mesh, "dp", None, "tp")
                np.testing.assert_allclose(result, y, rtol=2e-6, atol=2e-6)
            decoded = jax.jit(lambda *arrays, f=f: f(*arrays, mode="decode"))(*placed)
            assert sharded_over(decoded, pm.mesh, "dp")
            for number, actual in enumerate(jax.jit(jax.grad(loss(f), (0, 1, 2)))(*placed)):
                np.testing.assert_allclose(actual, gradients[number], rtol=2e-6, atol=2e-5)
                assert kind == "auto" or sharded_over(
                    actual, pm.mesh, *placed[number].sharding.spec
                )


@pytest.mark.parametrize("kind", AXIS_TYPES)
@pytest.mark.full(but=["auto"])
def test_eager_matmuls_compile_once(kind: str) -> None:
    with make_manager(kind, text=RULES):
        for f in (by_einsum, by_dot_general):
            first = f(*operands())
            with watch_compilations() as compilations:
                again = f(*operands())
            assert compilations.compiled == []
            np.testing.assert_array_equal(again, first)


def test_matmuls_without_a_manager() -> None:
    y, _ = wanted()
    np.testing.assert_allclose(by_einsum(*operands()), y, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(by_dot_general(*operands()), y, rtol=2e-6, atol=2e-6)


@pytest.mark.full(but=["auto", "tp explicit"])
@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_matmuls_inside_transforms(kind: str) -> None:
    """A manager entered inside a trace, a dim left to the compiler, and vmap."""
    pm = make_manager(kind, text=RULES)
    y, _ = wanted()

    @jax.jit
    def entered_inside(*arrays: Any) -> Any:
        with pm:
            return by_einsum(*arrays, out=(sw.BATCH, "open", "wide"))

    if kind == "auto":
        np.testing.assert_allclose(entered_inside(*operands()), y, rtol=2e-6, atol=2e-6)
    with pm:
        opened = jax.jit(lambda *a: by_einsum(*a, out=(sw.BATCH, "open", "wide")))(*operands())
        np.testing.assert_allclose(opened, y, rtol=2e-6, atol=2e-6)
        x, up, down = operands()
        mapped = jax.jit(jax.vmap(by_einsum, (0, None, None)))(np.stack([x, x]), up, down)
        np.testing.assert_allclose(mapped, np.stack([y, y]), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", AXIS_TYPES)
@pytest.mark.full(but=["explicit"])
def test_matmuls_of_a_manager_that_is_entered_inside_a_trace(kind: str) -> None:
    """Such a manager sets no mesh."""
    pm = make_manager(kind, text=RULES)

    @jax.jit
    def entered_inside(*arrays: Any) -> Any:
        with pm:
            return by_einsum(*arrays)

    x, up, down = operands()
    placed = (
        pm.shard(x, sw.BATCH, sw.LENGTH, sw.EMBED),
        pm.shard(up, sw.EMPTY, sw.MLP_INTERMEDIATE),
        pm.shard(down, sw.MLP_INTERMEDIATE, sw.EMPTY),
    )
    np.testing.assert_allclose(entered_inside(*placed), wanted()[0], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_matmuls_inside_shard_map(kind: str) -> None:
    pm = make_manager(kind, text=RULES)
    x, up, _ = operands()

    def local(x: Any, up: Any) -> Any:
        return sw.einsum("ble,em->blm", x, up, out=HIDDEN)

    mapped = pm.shard_map(
        local,
        in_axes=((sw.BATCH, sw.LENGTH, sw.EMPTY), (sw.EMPTY, sw.MLP_INTERMEDIATE)),
        out_axes=HIDDEN,
    )
    with pm:
        np.testing.assert_allclose(mapped(x, up), x @ up, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_matmuls_refuse_what_does_not_fit(kind: str) -> None:
    pm = make_manager(kind, text=RULES)
    x, up, _ = operands()
    with pm, raises(sw.IndivisibleError, "tp=4", size=6, fix="tp | -"):
        jax.jit(lambda: sw.einsum("ble,em->blm", x, up, out=(sw.BATCH, sw.HEAD, sw.EMBED)))()
    with pm, raises(sw.RankMismatchError, "BATCH", "HEAD", 2, 3, fix="EMPTY"):
        jax.jit(lambda: sw.einsum("ble,em->blm", x, up, out=(sw.BATCH, sw.HEAD)))()


def test_error_on_explicit_axes_has_a_fix() -> None:
    mesh = jax.make_mesh((2, 4), ("fsdp", "tp"))
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=mesh)
    x = pm.shard(jnp.ones((8, 32)), sw.BATCH, sw.MLP_INTERMEDIATE)
    w = pm.shard(jnp.ones((32, 16)), sw.MLP_INTERMEDIATE, sw.EMBED, role="param")
    with pytest.raises(Exception, match="Contracting dimensions are sharded") as caught, pm, pm:
        jax.jit(jnp.matmul)(x, w)
    notes = [note for note in caught.value.__notes__ if "sw.create_mesh" in note]
    assert len(notes) == 1
    assert "fix   build the mesh with Auto axes, as sw.create_mesh does by default" in notes[0]
    with pytest.raises(ValueError, match="mine") as other, pm:
        raise ValueError("mine")
    assert not hasattr(other.value, "__notes__")


def test_matmuls_under_the_manager_of_eformer() -> None:
    from shardwright.interop import eformer

    pm = eformer.PartitionManager(eformer.PartitionAxis(), mesh=cpu_mesh("dp:2,tp:4"))
    x, w = np.ones((4, 8), np.float32), np.ones((8, 16), np.float32)
    f = functools.partial(sw.einsum, "be,em->bm", out=(sw.BATCH, sw.MLP_INTERMEDIATE))
    with pm:
        for matmul in (f, jax.jit(f)):
            y = matmul(x, w)
            assert y.sharding.spec == jax.P("dp", "tp")
            np.testing.assert_array_equal(y, x @ w)
