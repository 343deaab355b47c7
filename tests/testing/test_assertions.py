"""Each assertion passes for correct values, and otherwise names the tensor, axis and bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding

import shardwright as sw
from shardwright.errors import (
    IndivisibleError,
    MeshMismatchError,
    MeshSpecError,
    MissingMeshAxisError,
    NoManagerError,
    ProgramError,
    StrategyError,
    UnknownAxisError,
)
from shardwright.plan import read_collectives
from shardwright.testing import (
    assert_collectives,
    assert_max_replicated,
    assert_no_collectives,
    assert_sharding,
    assert_spec,
    cpu_mesh,
)
from shardwright.testing.golden import Golden
from tests.raising import facts, raises

P = jax.P
SIZES = "dp:1,fsdp:2,sp:1,ep:1,tp:4"
AXES = {
    "mlp": {"up": (sw.EMBED, sw.MLP_INTERMEDIATE), "down": (sw.MLP_INTERMEDIATE, sw.EMBED)},
    "norm": (sw.NORM,),
}
SHAPES = {"mlp": {"up": (8, 16), "down": (16, 8)}, "norm": (8,)}
FIXTURES = Path(__file__).resolve().parents[1] / "plan" / "fixtures"


def manager(mesh: Any = None) -> sw.PartitionManager:
    return sw.PartitionManager(
        sw.Strategy.preset("fsdp_tp"), mesh=cpu_mesh(SIZES) if mesh is None else mesh
    )


def placed(pm: sw.PartitionManager, axes: Any = AXES) -> Any:
    values = jax.tree.map(
        lambda shape: np.zeros(shape, np.float32),
        SHAPES,
        is_leaf=lambda value: isinstance(value, tuple),
    )
    return pm.shard(values, axes, role="param")


def failing(call: Callable[[], Any]) -> str:
    with pytest.raises(AssertionError) as caught:
        call()
    return str(caught.value)


def mlp(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ sw.gather(params["mlp"]["up"], sw.EMBED, sw.MLP_INTERMEDIATE))
    return sw.shard(
        hidden @ sw.gather(params["mlp"]["down"], sw.MLP_INTERMEDIATE, sw.EMBED), sw.BATCH, sw.EMBED
    )


def batch(pm: sw.PartitionManager) -> Any:
    return pm.shard(np.zeros((4, 8), np.float32), sw.BATCH, sw.EMBED)


# assert_spec, assert_sharding


def test_expected_shardings_pass() -> None:
    pm = manager()
    params = placed(pm)
    assert_spec(params, AXES, manager=pm, role="param")
    assert_spec(params["mlp"]["up"], P("fsdp", "tp"))
    assert_spec(params["norm"], P(None))
    assert_sharding(params, pm.shardings(params, AXES))
    assert_sharding(params["mlp"], {"up": P(("dp", "fsdp"), "tp"), "down": P("tp", "fsdp")})
    with pm:
        assert_spec(params["mlp"]["up"], sw.EMBED, sw.MLP_INTERMEDIATE, role="param")
        assert_spec(params["mlp"]["up"], sw.ColumnWise)
        assert_spec(jax.jit(mlp)(params, batch(pm)), sw.BATCH, sw.EMBED)


def test_abstract_arrays() -> None:
    pm = manager(sw.abstract_mesh("dp:1,fsdp:64,sp:1,ep:1,tp:4"))
    specs = {"up": sw.ArraySpec((1024, 4096), jnp.bfloat16, AXES["mlp"]["up"])}
    assert_spec(pm.abstract(specs), {"up": AXES["mlp"]["up"]}, manager=pm, role="param")
    assert_sharding(pm.abstract(specs), P("fsdp", "tp"))


def test_mode_and_role_arguments() -> None:
    pm = sw.PartitionManager(
        sw.Strategy.preset("serve_tp"), mesh=cpu_mesh("dp:2,fsdp:1,sp:1,ep:1,tp:4")
    )
    q = pm.shard(
        np.zeros((2, 8, 4, 16), np.float32),
        sw.BATCH,
        sw.QUERY_LENGTH,
        sw.HEAD,
        sw.HEAD_DIM,
        mode="decode",
    )
    assert_spec(q, sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM, manager=pm, mode="decode")


def test_one_tensor_differs(golden: Golden) -> None:
    pm = manager()
    params = placed(pm)
    params["mlp"]["down"] = pm.shard(params["mlp"]["down"], sw.EMPTY, sw.EMPTY)
    golden(failing(lambda: assert_spec(params, AXES, manager=pm, role="param")))


def test_several_tensors_differ(golden: Golden) -> None:
    pm = manager()
    golden(failing(lambda: assert_sharding(placed(pm), P("tp"))))


def test_single_array_differs(golden: Golden) -> None:
    pm = manager()
    golden(failing(lambda: assert_spec(batch(pm), sw.EMPTY, sw.BATCH, manager=pm)))


def test_an_array_on_another_mesh(golden: Golden) -> None:
    x = manager(cpu_mesh("dp:1,fsdp:4,sp:1,ep:1,tp:2")).shard(
        np.zeros((8, 8), np.float32), sw.BATCH, sw.EMBED
    )
    golden(failing(lambda: assert_sharding(x, NamedSharding(cpu_mesh(SIZES), P("fsdp")))))


def test_array_without_a_mesh(golden: Golden) -> None:
    pm = manager()
    tree = {"host": np.zeros((8, 16), np.float32), "device": jnp.zeros((8, 16))}
    golden(
        failing(
            lambda: assert_spec(tree, (sw.EMBED, sw.MLP_INTERMEDIATE), manager=pm, role="param")
        )
    )


def test_memory_kind_is_compared() -> None:
    pm = manager()
    x = jax.ShapeDtypeStruct(
        (8,), jnp.float32, sharding=NamedSharding(pm.mesh, P("tp"), memory_kind="pinned_host")
    )
    assert "memory: pinned_host, not device" in failing(lambda: assert_sharding(x, P("tp")))


def test_invalid_comparisons() -> None:
    pm = manager()
    x = batch(pm)
    with raises(NoManagerError, "assert_spec", "PartitionManager"):
        assert_spec(x, sw.BATCH, sw.EMBED)
    with raises(StrategyError, "tp", "mesh", fix="NamedSharding"):
        assert_sharding(np.zeros(4), P("tp"))
    with raises(StrategyError, "shardings", "tuple", path="x", fix="structure"):
        assert_sharding({"x": x}, {"x": (sw.BATCH, sw.EMBED)})
    with raises(StrategyError, "tuple"):
        assert_sharding([{"x": x}], ({"x": P()},))
    places = [facts("shardings", path=f"mlp/{name}", count=3) for name in ("up", "upp", "down")]
    with raises(StrategyError, *places):
        assert_sharding({"mlp": {"up": x, "down": x}}, {"mlp": {"upp": P()}})
    with raises(StrategyError, "dict", "array", path="a", fix="structure"):
        assert_sharding({"a": x}, {"a": {"c": P("tp")}})
    says = facts("mesh", "axis", "fdsp", path="a", dim=0, fix="fsdp")
    with raises(MissingMeshAxisError, says):
        assert_sharding({"a": x}, {"a": P("fdsp")})
    six = pm.shard(np.zeros((6, 16), np.float32), sw.BATCH, sw.EMPTY)
    with raises(sw.IndivisibleError, "tp=4", dim=0, size=6):
        assert_sharding(six, P("tp"))
    with raises(sw.IndivisibleError, "tp=4", size=6, fix="tp | -"):
        assert_spec(np.zeros((8, 6)), sw.EMPTY, sw.HEAD, manager=pm)


@pytest.mark.parametrize("policy", [{"indivisible": "replicate"}, {"preset": "eformer"}], ids=str)
def test_literal_spec_ignores_policy(
    policy: dict[str, Any],
) -> None:
    pm = sw.PartitionManager(
        sw.Strategy.preset("fsdp_tp") | sw.Strategy(policy=policy), mesh=cpu_mesh(SIZES)
    )
    copies = pm.shard(jnp.ones((6, 8)), P("tp"))
    assert copies.sharding.is_fully_replicated
    assert_spec(
        copies, sw.HEAD, sw.EMPTY, manager=pm
    )  # the annotation means what the policy makes of it
    with raises(IndivisibleError, "tp=4", size=6):
        assert_spec(copies, P("tp"), manager=pm)
    assert "dim 1: -, not tp" in failing(lambda: assert_spec(copies, P(None, "tp"), manager=pm))


# assert_max_replicated


def test_copies_within_limits() -> None:
    params = placed(manager())
    assert_max_replicated(params["mlp"], bytes=0)
    assert_max_replicated(params, fraction=0.2)
    assert_max_replicated(params, bytes=7 * 32)  # the norm is on all eight


@pytest.mark.parametrize(
    "limit", [{"bytes": 7 * 32 - 1}, {"fraction": 0.17}], ids=["bytes", "fraction"]
)
def test_too_many_copies(limit: dict[str, Any], golden: Golden) -> None:
    golden(failing(lambda: assert_max_replicated(placed(manager()), **limit)))


def test_shardings_of_abstract_arrays() -> None:
    pm = manager()
    shapes = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    assert_max_replicated(shapes, pm.shardings(shapes, (sw.EMBED, sw.MLP_INTERMEDIATE)), bytes=0)
    assert "most are of w, over fsdp and tp" in failing(
        lambda: assert_max_replicated(shapes, NamedSharding(pm.mesh, P()), bytes=0)
    )


@pytest.mark.parametrize("limits", [{}, {"bytes": 1, "fraction": 0.1}])
def test_one_limit_is_needed(limits: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"needs one limit: bytes=, or fraction="):
        assert_max_replicated(placed(manager()), **limits)


@pytest.mark.parametrize("fraction", [2, -0.1, 1.01, float("nan")])
def test_invalid_fraction(fraction: float) -> None:
    with pytest.raises(
        ValueError,
        match=r"is not a fraction from 0 to 1 .* for bytes write bytes=",
    ):
        assert_max_replicated(placed(manager()), fraction=fraction)


def test_negative_limit_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"bytes=-1 is not a number of bytes: it must be 0 or more"
    ):
        assert_max_replicated(placed(manager())["mlp"], bytes=-1)


def test_arrays_on_one_device_are_refused() -> None:
    loose = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
    with raises(StrategyError, "device", "mesh", fix="pm.shard"):
        assert_max_replicated(loose, fraction=0.0)
    mesh = cpu_mesh("fsdp:1,tp:1")  # on purpose, as one of several meshes
    assert_max_replicated(jax.device_put(loose, NamedSharding(mesh, P())), fraction=0.0)
    assert_max_replicated({**loose, **placed(manager())["mlp"]}, bytes=0)


# assert_collectives, assert_no_collectives


def test_collectives_of_a_program() -> None:
    """A tensor-parallel MLP with sharded storage: two weights gathered, one sum."""
    pm = manager()
    params, x = placed(pm), batch(pm)
    weights = 2 * 8 * 16 * 4 // 4
    assert_collectives(mlp, params, x, all_gather=2, all_reduce=1, only=True, manager=pm)
    assert_collectives(
        mlp, params, x, all_gather=2, axis="fsdp", bytes=weights, only=True, manager=pm
    )
    assert_collectives(
        mlp, params, x, all_reduce=1, all_gather=0, axis="tp", bytes=4 // 2 * 8 * 4, manager=pm
    )
    assert_collectives(mlp, params, x, all_reduce=range(1, 3), axis=sw.MLP_INTERMEDIATE, manager=pm)
    assert_collectives(mlp, params, x, all_reduce=1, axis="head", manager=pm)
    assert_collectives(mlp, params, x, all_gather=0, axis=("fsdp", "tp"), manager=pm)
    assert_no_collectives(mlp, params, x, axis="dp", manager=pm)


def test_a_program_in_every_form() -> None:
    pm = manager()
    params, x = placed(pm), batch(pm)
    with pm:
        lowered = jax.jit(mlp).lower(params, x)
        compiled = lowered.compile()
        forms: tuple[Any, ...] = (
            lowered,
            compiled,
            compiled.as_text(),
            read_collectives(compiled, pm.mesh),
        )
        for program in forms:
            assert_collectives(program, all_gather=2, all_reduce=1, only=True)
        assert_collectives(jax.jit(mlp), params, x, all_gather=2)
        assert_collectives(mlp, *pm_abstract(pm), all_gather=2)
    # The mesh of the program's own arrays will do, and so will an explicit one.
    assert_collectives(compiled, all_reduce=1, axis="tp")
    assert_collectives(compiled.as_text(), all_reduce=1, axis="tp", mesh=pm.mesh)
    assert_collectives(forms[-1], all_reduce=1, axis="tp")


def pm_abstract(pm: sw.PartitionManager) -> tuple[Any, Any]:
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        SHAPES,
        is_leaf=lambda value: isinstance(value, tuple),
    )
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    return pm.abstract(shapes, AXES), pm.abstract(x, (sw.BATCH, sw.EMBED), role="activation")


def test_no_collectives() -> None:
    pm = manager()
    x = batch(pm)
    assert_no_collectives(lambda x: jnp.sin(x) * 2, x)
    assert_no_collectives(jax.jit(lambda x: sw.shard(x, sw.BATCH, sw.EMBED)), x, manager=pm)


def test_loops_count_every_trip() -> None:
    mesh = cpu_mesh("dp:2,tp:4")
    spec = P(("dp", "tp"))

    def f(x: Any, limit: Any) -> Any:
        once = lax.fori_loop(0, 6, lambda _, y: jnp.sin(lax.psum(y, "tp")), x)
        return lax.while_loop(
            lambda s: s[0] < limit,
            lambda s: (s[0] + 1, lax.ppermute(s[1], "tp", [(0, 1)])),
            (0, once),
        )[1]

    mapped = jax.shard_map(f, mesh=mesh, in_specs=(spec, P()), out_specs=spec, check_vma=False)
    args = (
        jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, spec)),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    assert_collectives(mapped, *args, all_reduce=6, axis="tp")
    assert_collectives(
        mapped, *args, all_reduce=6, permute=5, bytes=(6 + 5) * 4 * 4, only=True, trips=5
    )
    message = failing(lambda: assert_collectives(mapped, *args, permute=5, bytes=80))
    assert (
        "permute: 5 expected, found in a loop whose end depends on data: pass trips= to say how "
        "often it runs"
    ) in message
    assert (
        "bytes: 80 expected, found in a loop whose end depends on data: pass trips= to say how "
        "often it runs" in message
    )
    assert "an unknown number found" in failing(lambda: assert_no_collectives(mapped, *args))


def text(name: str) -> str:
    return (FIXTURES / f"{name}.hlo").read_text(encoding="utf-8")


FAILURES: dict[str, Callable[[], None]] = {
    "count": lambda: assert_collectives(
        text("cpu_train_step"), all_gather=12, mesh=cpu_mesh("dp:2,tp:4")
    ),
    "range": lambda: assert_collectives(
        text("cpu_train_step"), all_gather=range(13), axis="dp", mesh=cpu_mesh("dp:2,tp:4")
    ),
    "none_found": lambda: assert_collectives(
        text("cpu_train_step"), reduce_scatter=1, mesh=cpu_mesh("dp:2,tp:4")
    ),
    "others_too": lambda: assert_collectives(
        text("cpu_train_step"), all_reduce=18, only=True, mesh=cpu_mesh("dp:2,tp:4")
    ),
    "bytes": lambda: assert_collectives(
        text("cpu_train_step"), all_reduce=12, axis="tp", bytes=16384, mesh=cpu_mesh("dp:2,tp:4")
    ),
    "all_bytes": lambda: assert_collectives(
        text("cpu_train_step"), bytes=range(2**20), mesh=cpu_mesh("dp:2,tp:4")
    ),
    "no_collectives": lambda: assert_no_collectives(
        text("cpu_nested_loops"),
        axis=sw.HEAD,
        manager=sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=cpu_mesh("dp:2,tp:4")),
    ),
    "several_axes": lambda: assert_collectives(
        text("cpu_nested_loops"), all_reduce=1, axis=("dp", "tp"), mesh=cpu_mesh("dp:2,tp:4")
    ),
}


@pytest.mark.parametrize("name", list(FAILURES))
def test_wrong_collectives_fail(name: str, golden: Golden) -> None:
    golden(failing(FAILURES[name]), name)


@pytest.mark.parametrize("count", ["1", (1, 100), 1.0, True])
@pytest.mark.parametrize("name", ["all_reduce", "bytes"])
def test_count_is_an_integer_or_a_range(name: str, count: Any) -> None:
    says = (
        rf"{name}={re.escape(repr(count))} is neither an integer nor a range: write {name}=1, or "
        rf"{name}=range\(1, 4\) for 1 to 3"
    )
    with pytest.raises(TypeError, match=says):
        assert_collectives(text("cpu_nested_loops"), **{name: count}, mesh=cpu_mesh("dp:2,tp:4"))


def test_only_the_named_axis_counts() -> None:
    """Over dp the step gathers too; over tp it sums and does nothing else."""
    assert_collectives(
        text("cpu_train_step"), all_reduce=12, axis="tp", only=True, mesh=cpu_mesh("dp:2,tp:4")
    )


def test_failure_names_function_and_line() -> None:
    pm = manager()
    message = failing(lambda: assert_no_collectives(mlp, placed(pm), batch(pm), manager=pm))
    assert message.startswith(
        "collectives of mlp on dp=1, fsdp=2, sp=1, ep=1, tp=4:\n"
        "  all_gather: none is expected, 2 (256 B) found\n"
    )
    assert "test_assertions.py:" in message
    assert "tp may carry HEAD, KV_HEAD, MLP_INTERMEDIATE, VOCAB" in message


def test_invalid_program_arguments() -> None:
    pm = manager()
    params, x = placed(pm), batch(pm)
    with pytest.raises(
        TypeError, match=r"asserts nothing: name a kind, as in all_reduce=1, or bytes="
    ):
        assert_collectives(mlp, params, x, manager=pm)
    with raises(UnknownAxisError, "hed", "dp", 1, "fsdp", fix="dp"):
        assert_no_collectives(mlp, params, x, axis="hed", manager=pm)
    with raises(UnknownAxisError, "__HEAD__", "dp", 1, "fsdp", fix="dp"):
        assert_no_collectives(lambda x: x * 2, x, axis=sw.HEAD)
    with raises(ProgramError, "int", fix="jitted.lower"):
        assert_no_collectives(3)
    with raises(ProgramError, 1):
        assert_no_collectives(jax.jit(lambda x: x * 2).lower(x), x)
    with raises(MeshSpecError, "mesh"):
        assert_no_collectives(lambda x: x * 2, 1.0)
    with raises(MeshSpecError, "mesh"):
        assert_no_collectives(text("cpu_nested_loops"))
    with raises(MeshMismatchError, "dp", "fsdp", "sp", "ep", "tp"):
        assert_no_collectives(lambda x: x * 2, x, mesh=cpu_mesh("dp:2,tp:4"))
