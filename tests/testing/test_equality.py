"""`assert_same_as_unsharded` passes for correct programs and fails for each kind of mistake.

The mistakes are in the forward and in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.errors import MeshSpecError, ProgramError
from shardwright.testing import assert_same_as_unsharded, cpu_mesh
from shardwright.testing.golden import Golden
from tests.raising import facts, raises

P = jax.P
KERNEL = (sw.EMBED, sw.MLP_INTERMEDIATE)


def manager(axis_types: Any = "auto") -> sw.PartitionManager:
    return sw.PartitionManager(
        sw.Strategy.preset("fsdp_tp"),
        mesh=cpu_mesh("dp:1,fsdp:2,sp:1,ep:1,tp:4", axis_types=axis_types),
    )


def inputs(pm: sw.PartitionManager, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    up, down, x = (
        jnp.asarray(rng.normal(size=shape), dtype) for shape in ((8, 16), (16, 8), (4, 8))
    )
    params = {
        "up": pm.shard(up, *KERNEL, role="param"),
        "down": pm.shard(down, *reversed(KERNEL), role="param"),
    }
    return params, pm.shard(x, sw.BATCH, sw.EMBED)


def mlp(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ sw.gather(params["up"], *KERNEL))
    return sw.shard(hidden @ sw.gather(params["down"], *reversed(KERNEL)), sw.BATCH, sw.EMBED)


def failing(call: Callable[[], Any]) -> str:
    with pytest.raises(AssertionError, match=r"\S") as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "values"])
@pytest.mark.full(but=["gradients-f32", "values-f32"])
def test_correct_program_passes(grad: bool, dtype: Any) -> None:
    pm = manager()
    assert_same_as_unsharded(mlp, *inputs(pm, dtype), manager=pm, grad=grad)


def test_ambient_manager_jit_and_trees() -> None:
    pm = manager()

    @jax.jit
    def step(params: Any, x: Any, at: Any) -> dict[str, Any]:
        y = mlp(params, x)
        return {"y": y, "loss": (y**2).mean(), "at": at + 1, "keep": (y > 0)}

    with pm:
        assert_same_as_unsharded(step, *inputs(pm), jnp.int32(3))


def test_random_keys_are_compared_too() -> None:
    pm = manager()

    def noisy(x: Any, key: Any) -> Any:
        key, use = jax.random.split(key)
        return x + jax.random.normal(use, x.shape), key

    assert_same_as_unsharded(noisy, inputs(pm)[1], jax.random.key(0), manager=pm)


def test_a_mesh_without_a_manager() -> None:
    pm = manager()
    assert_same_as_unsharded(lambda params, x: x @ params["up"], *inputs(pm), mesh=pm.mesh)


def test_mesh_defaults_to_the_arguments() -> None:
    _, x = inputs(manager())
    assert_same_as_unsharded(lambda x: jax.lax.with_sharding_constraint(jnp.sin(x), P("fsdp")), x)
    assert "result" in failing(
        lambda: assert_same_as_unsharded(
            per_shard(lambda value: value - value.sum()), x, grad=False
        )
    )


def test_no_mesh_stays_set_after_a_failure() -> None:
    pm = manager()
    copies = pm.shard(np.ones((4, 8), np.float32), sw.EMPTY, sw.EMPTY)

    def raises(x: Any) -> Any:
        raise RuntimeError("no")

    for wrong, error in ((raises, RuntimeError), (lambda x: x * 2, AssertionError)):
        with pytest.raises(error, match="no"):
            assert_same_as_unsharded(wrong, copies, mesh=pm.mesh)
        assert jax.sharding.get_mesh().empty


def test_explicit_axes() -> None:
    pm = manager("explicit")
    _, x = inputs(pm)
    assert_same_as_unsharded(lambda x: sw.shard(jnp.sin(x) * 2, sw.BATCH, sw.EMBED), x, manager=pm)


def test_bound_function_needs_a_reference() -> None:
    pm = manager()
    params, x = inputs(pm)

    def bound(params: Any, x: Any) -> Any:
        return pm.shard(x @ params["up"], sw.BATCH, sw.MLP_INTERMEDIATE)

    with raises(ProgramError, "device", fix="sw.shard"):
        assert_same_as_unsharded(bound, params, x, manager=pm)
    named = jax.NamedSharding(pm.mesh, P("fsdp"))
    fix = facts("device", fix=("sw.shard", "pm.shard"))
    with raises(ProgramError, fix):
        assert_same_as_unsharded(
            lambda x: jax.lax.with_sharding_constraint(x * 2, named), x, mesh=pm.mesh
        )
    assert_same_as_unsharded(
        bound, params, x, manager=pm, reference=lambda params, x: x @ params["up"]
    )
    assert "result" in failing(
        lambda: assert_same_as_unsharded(
            bound, params, x, manager=pm, reference=lambda params, x: x @ params["up"] + 1
        )
    )


def per_shard(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Run on each fsdp shard by itself, on whichever mesh is ambient."""

    def run(x: Any) -> Any:
        return jax.shard_map(f, in_specs=P("fsdp"), out_specs=P("fsdp"))(x)

    return run


@jax.custom_vjp
def forgets(x: Any) -> Any:
    return x * 1.0


def _forward(x: Any) -> Any:
    return x * 1.0, None


def _backward(_: Any, cotangent: Any) -> Any:
    return (
        per_shard(lambda value: value * (1 + jax.lax.axis_index("fsdp")).astype(value.dtype))(
            cotangent
        ),
    )


forgets.defvjp(_forward, _backward)


def test_values_that_differ(golden: Golden) -> None:
    """Each shard normalizes over its own rows, which is wrong on several shards."""
    pm = manager()
    x = pm.shard(np.arange(32, dtype=np.float32).reshape(4, 8), sw.BATCH, sw.EMBED)
    wrong = per_shard(lambda value: value - value.sum())
    golden(failing(lambda: assert_same_as_unsharded(wrong, x, manager=pm, grad=False)))


def test_only_gradients_differ() -> None:
    pm = manager()
    x = pm.shard(np.ones((4, 8), np.float32), sw.BATCH, sw.EMBED)
    message = failing(lambda: assert_same_as_unsharded(forgets, x, manager=pm))
    assert_same_as_unsharded(forgets, x, manager=pm, grad=False)
    lines = message.splitlines()
    assert lines[0] == "1 tensor differs between forgets on the mesh and on one device:"
    assert lines[3].startswith("gradient 0  4x8    float32  P('fsdp')  64 B")


def test_integers_nan_and_infinity() -> None:
    pm = manager()
    x = pm.shard(np.array([[np.nan, np.inf], [1.0, -np.inf]], np.float32), sw.BATCH, sw.EMPTY)
    assert_same_as_unsharded(lambda x: x * 2, x, manager=pm)
    index = per_shard(
        lambda value: jnp.where(jnp.isnan(value), jax.lax.axis_index("fsdp") + 1.0, value)
    )
    assert_same_as_unsharded(index, x, manager=pm, grad=False)
    second = pm.shard(np.array([[1.0, 1.0], [np.nan, 1.0]], np.float32), sw.BATCH, sw.EMPTY)
    assert "8 B         2        1          1,0  ±2.0e-05" in failing(
        lambda: assert_same_as_unsharded(index, second, manager=pm, grad=False)
    )
    counts = per_shard(lambda value: value.astype(jnp.int32) + jax.lax.axis_index("fsdp"))
    ones = pm.shard(np.ones((4, 2), np.float32), sw.BATCH, sw.EMPTY)
    assert "int32" in failing(
        lambda: assert_same_as_unsharded(counts, ones, manager=pm, grad=False)
    )


def test_different_trees_and_empty_results() -> None:
    pm = manager()
    _, x = inputs(pm)
    for reference in (lambda x: {"b": x, "c": x * 2}, lambda x: {"a": x}, lambda x: (x, x * 2)):
        with pytest.raises(
            AssertionError, match=r"return different trees: .*\n  fix   return the same names"
        ):
            assert_same_as_unsharded(
                lambda x: {"a": x, "b": x * 2}, x, manager=pm, reference=reference, grad=False
            )
    with pytest.raises(AssertionError, match="result is not finite"):
        assert_same_as_unsharded(lambda x: x * np.nan, x, manager=pm, grad=False)


def test_tolerances() -> None:
    pm = manager()
    x = pm.shard(np.full((4, 8), 2.0, np.float32), sw.BATCH, sw.EMBED)
    off = per_shard(lambda value: value + 1e-3 * jax.lax.axis_index("fsdp"))
    assert "±4.0e-05" in failing(lambda: assert_same_as_unsharded(off, x, manager=pm, grad=False))
    assert_same_as_unsharded(off, x, manager=pm, grad=False, rtol=1e-3)
    assert_same_as_unsharded(off, x, manager=pm, grad=False, atol=1e-2)
    assert failing(lambda: assert_same_as_unsharded(off, x, manager=pm, grad=False, rtol=1e-5))


@pytest.mark.parametrize("nothing", [lambda x: x[:0], lambda x: {}], ids=["size 0", "no arrays"])
def test_result_without_finite_numbers(nothing: Callable[[Any], Any]) -> None:
    _, x = inputs(pm := manager())
    message = failing(lambda: assert_same_as_unsharded(nothing, x, manager=pm, grad=False))
    assert "nothing to compare" in message


def test_unsharded_program_fails() -> None:
    pm = manager()
    copies = pm.shard(np.ones((4, 8), np.float32), sw.EMPTY, sw.EMPTY)
    message = failing(lambda: assert_same_as_unsharded(lambda x: x * 2, copies, manager=pm))
    assert message == (
        "<lambda> does the same on each device: nothing is sharded, so there is "
        "nothing to compare\n"
        "  fix   place the arguments first, over mesh axes of more than one device"
    )
    # Inputs and outputs that are whole, and work in between that is not.
    assert_same_as_unsharded(
        lambda x: sw.shard(sw.shard(x, sw.BATCH, sw.EMBED) * 2, sw.EMPTY, sw.EMPTY),
        copies,
        manager=pm,
    )


def test_invalid_arguments() -> None:
    pm = manager()
    _, x = inputs(pm)
    with raises(MeshSpecError, "manager", "mesh", fix="cpu_mesh"):
        assert_same_as_unsharded(lambda x: x, np.ones(4))
    other = jax.device_put(np.ones(8, np.float32), jax.NamedSharding(cpu_mesh("dp:8"), P("dp")))
    with raises(MeshSpecError, "arguments", "several", fix="cpu_mesh"):
        assert_same_as_unsharded(lambda x, y: x.sum() + y.sum(), x, other)
    with raises(MeshSpecError, "mesh", "abstract", fix="mesh"):
        assert_same_as_unsharded(
            lambda x: x, x, manager=sw.PartitionManager(pm.rules, mesh=sw.abstract_mesh("fsdp:8"))
        )
    with raises(ProgramError, "floating", "differentiate", fix=("grad", "False")):
        assert_same_as_unsharded(lambda x: x > 0, x, manager=pm)
