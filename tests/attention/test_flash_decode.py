"""Decode over sharded keys: what is sent, what is copied, and which kv heads are read."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.attention import dot_product_attention, explain
from shardwright.attention.kernels import flash_decode
from shardwright.errors import AttentionError
from shardwright.testing import assert_collectives, assert_no_collectives, assert_spec, cpu_mesh
from tests.raising import raises

# Minutes of compiling: the conformance table has a few cells of every implementation by default.
pytestmark = pytest.mark.full

RULES = """
[rules]
batch = "dp"
head = "{head}"
kv_head = "tp | -"
kv_length = "{keys}"
query_length = "{queries}"
"""
Q_AXES, KV_AXES = (
    (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM),
    (sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call in decode: sizes and rules."""

    mesh: str = "sp:4"
    head: str = "tp"
    keys: str = "sp"
    queries: str = "-"
    batch: int = 2
    drafts: int = 1
    rows: int = 48
    heads: int = 8
    kv_heads: int = 2
    dim: int = 8
    v_dim: int = 8
    dtype: str = "float32"

    @property
    def manager(self) -> sw.PartitionManager:
        rules = sw.Strategy.loads(
            RULES.format(head=self.head, keys=self.keys, queries=self.queries)
        )
        return sw.PartitionManager(rules, mesh=cpu_mesh(self.mesh)).for_mode("decode")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        q = (self.batch, self.drafts, self.heads, self.dim)
        return {
            "q": q,
            "k": (self.batch, self.rows, self.kv_heads, self.dim),
            "v": (self.batch, self.rows, self.kv_heads, self.v_dim),
        }

    def abstract(self) -> list[jax.ShapeDtypeStruct]:
        axes = {"q": Q_AXES, "k": KV_AXES, "v": KV_AXES}
        sharding = self.manager.sharding
        return [
            jax.ShapeDtypeStruct(shape, self.dtype, sharding=sharding(axes[name], shape=shape))
            for name, shape in self.shapes().items()
        ]

    def arrays(self) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(3), 3)
        return [
            jax.random.normal(key, shape, self.dtype)
            for key, shape in zip(keys, self.shapes().values(), strict=True)
        ]

    def compiled(self, **options: Any) -> Any:
        with self.manager:
            return jax.jit(attend(**options)).lower(*self.abstract()).compile()


def attend(**options: Any) -> Callable[..., Any]:
    return lambda q, k, v: dot_product_attention(
        q, k, v, **{"causal": True, "implementation": "flash_decode"} | options
    )


@pytest.fixture(params=["one collective", "two"])
def _either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test's few queries be combined in both ways."""
    if request.param == "two":
        monkeypatch.setattr(flash_decode, "_FEW_BYTES", -(2**40))


@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=["", "logsumexp"])
@pytest.mark.parametrize("mesh", ["sp:4", "sp:3"])
@pytest.mark.parametrize("rows", [48, 192])
@pytest.mark.pairwise
def test_few_queries_take_one_gather(rows: int, mesh: str, options: dict[str, Any]) -> None:
    call = Call(rows=rows, mesh=mesh, drafts=2)
    parts = 4 * call.batch * call.heads * call.drafts * (call.v_dim + 1) * call.manager.mesh.size
    assert_collectives(
        call.compiled(**options),
        all_gather=1,
        bytes=parts,
        axis="sp",
        mesh=call.manager.mesh,
        only=True,
    )


@pytest.mark.parametrize("rows", [48, 192])
def test_many_queries_take_all_to_all_and_gather(
    rows: int,
) -> None:
    call = Call(rows=rows, batch=64, v_dim=32)
    compiled = call.compiled()
    results = 4 * call.batch * call.heads
    assert_collectives(
        compiled, all_to_all=1, bytes=results * (call.v_dim + 1), axis="sp", mesh=call.manager.mesh
    )
    assert_collectives(
        compiled, all_gather=1, bytes=results * call.v_dim, axis="sp", mesh=call.manager.mesh
    )
    assert_collectives(compiled, all_to_all=1, all_gather=1, only=True, mesh=call.manager.mesh)


@pytest.mark.parametrize("rows", [48, 192])
def test_indivisible_heads_take_maximum_and_sum(rows: int) -> None:
    call = Call(rows=rows, mesh="sp:3", drafts=2, batch=48, v_dim=32)
    rows_of_queries = 4 * call.batch * call.heads * call.drafts
    assert_collectives(
        call.compiled(),
        all_reduce=2,
        bytes=rows_of_queries * (call.v_dim + 2),
        axis="sp",
        mesh=call.manager.mesh,
        only=True,
    )


def test_output_heads_over_the_keys_mesh_axis() -> None:
    call = Call(mesh="sp:2,tp:2", head="tp+sp", rows=48)
    compiled = call.compiled()
    local = 4 * call.batch * call.heads // 2
    assert_collectives(
        compiled, all_gather=1, bytes=local * call.dim, axis="sp", mesh=call.manager.mesh
    )
    assert_collectives(
        compiled, all_to_all=1, bytes=local * (call.v_dim + 1), axis="sp", mesh=call.manager.mesh
    )
    assert_collectives(compiled, all_to_all=1, all_gather=1, only=True, mesh=call.manager.mesh)
    with call.manager:
        actual = jax.jit(attend())(*call.arrays())
        assert_spec(actual, call.manager.resolve(Q_AXES, shape=actual.shape))


def test_whole_keys_send_nothing() -> None:
    call = Call(mesh="dp:2,tp:2")
    assert_no_collectives(call.compiled(), mesh=call.manager.mesh)


def test_logsumexp_is_sent_with_output() -> None:
    call = Call(batch=64, v_dim=32)
    assert_collectives(
        call.compiled(return_lse=True),
        all_to_all=1,
        all_gather=1,
        only=True,
        mesh=call.manager.mesh,
    )


@pytest.mark.parametrize(
    ("mesh", "implementation"),
    [("dp:1", "blockwise"), ("sp:4", "flash_decode"), ("sp:3", "flash_decode")],
)
def test_cache_is_not_copied(mesh: str, implementation: str) -> None:
    # Prime numbers of rows per device, which no block divides. In float32, because XLA for CPUs
    # widens all of a bfloat16 array.
    calls = [
        Call(mesh=mesh, rows=rows * cpu_mesh(mesh).size, batch=1, dim=16, v_dim=16)
        for rows in (4099, 16411)
    ]
    memory = [call.compiled(implementation=implementation).memory_analysis() for call in calls]
    more = memory[1].argument_size_in_bytes - memory[0].argument_size_in_bytes
    assert more > 3 * 2**20
    # Row numbers, 4 bytes each, and what aligns them.
    assert (
        memory[1].temp_size_in_bytes - memory[0].temp_size_in_bytes
        <= 4 * (16411 - 4099) + 256
        < more / 50
    )


@pytest.mark.parametrize("rows", [521, 1031])
def test_last_block_reads_no_key_twice(rows: int) -> None:
    call = Call(mesh="sp:2", rows=2 * rows)
    q, k, v = call.arrays()
    lengths = jnp.array([rows + 3, 2 * rows], jnp.int32)
    wanted = jax.jit(attend(lengths=lengths, implementation="vanilla", mode="decode"))(q, k, v)
    with call.manager:
        actual = jax.jit(attend(lengths=lengths))(q, k, v)
    np.testing.assert_allclose(actual, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("mesh", ["sp:4", "sp:3", "sp:2,tp:4"])
def test_no_kv_head_is_repeated(mesh: str) -> None:
    # 8 heads read one kv head of at least 512 keys per shard. Repeated keys would be the largest
    # array by far.
    call = Call(mesh=mesh, rows=1536, dim=32, v_dim=32, kv_heads=1)
    text = call.compiled().as_text()
    shapes = [
        math.prod(int(size) for size in dims.split(","))
        for dims in re.findall(r"(?:f32|bf16)\[([\d,]+)\]", text)
    ]
    shards = call.manager.mesh.shape
    gathered_elements = call.batch * call.rows // shards["sp"] * call.dim
    heads = call.heads // shards.get("tp", 1)
    assert max(shapes) == gathered_elements  # the cache itself, and nothing larger
    assert heads * gathered_elements > gathered_elements


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("shards", ["sp:4", "sp:3"])
def test_drafts_equal_single_tokens(shards: str) -> None:
    call = Call(mesh=shards, drafts=3)
    q, k, v = call.arrays()
    lengths = jnp.array([17, 48], jnp.int32)
    with call.manager:
        at_once = jax.jit(attend(lengths=lengths, window=(20, None)))(q, k, v)
        decode_one = jax.jit(lambda q, lengths: attend(lengths=lengths, window=(20, None))(q, k, v))
        each = [decode_one(q[:, i : i + 1], lengths - 2 + i) for i in range(3)]
    np.testing.assert_allclose(at_once, jnp.concatenate(each, axis=1), rtol=2e-6, atol=2e-6)


def test_keys_interleaved_over_shards() -> None:
    call = Call(drafts=2)
    q, k, v = call.arrays()
    blocks = jnp.arange(48).reshape(3, 4, 4)  # position p is on shard p // 4 % 4
    kept = blocks.swapaxes(0, 1).reshape(-1)
    positions = jnp.array([[20, 21], [40, 41]])
    wanted = dot_product_attention(
        q, k, v, positions=positions, causal=True, mode="decode", implementation="vanilla"
    )
    with call.manager:
        given = {"positions": positions, "kv_positions": kept}
        actual = jax.jit(attend(**given))(q, k[:, kept], v[:, kept])
        compiled = call.compiled(**given)
    np.testing.assert_allclose(actual, wanted, rtol=2e-6, atol=2e-6)
    assert_collectives(compiled, all_gather=1, only=True, mesh=call.manager.mesh)


FACTORED = {
    "the last mesh axis of the heads": Call(mesh="tp:2,sp:2", head="tp+sp", kv_heads=2),
    "all of the heads": Call(mesh="sp:4", head="sp", kv_heads=2),
    "and a mesh axis of its own": Call(mesh="tp:2,sp:2,dp:2", head="tp", keys="dp+tp", kv_heads=1),
    "heads that do not divide": Call(
        mesh="tp:2,sp:3", head="tp", keys="sp+tp", kv_heads=1, heads=4
    ),
    "fewer heads than the keys' shards": Call(
        mesh="sp:2,ep:4", head="sp", keys="ep+sp", kv_heads=1, heads=4
    ),
}


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("name", FACTORED)
def test_mesh_axis_of_keys_and_query_heads(name: str) -> None:
    call = dataclasses.replace(FACTORED[name], drafts=2)
    if "dp" in call.keys:
        rules = RULES.format(head=call.head, keys=call.keys, queries="-").replace(
            'batch = "dp"', 'batch = "-"'
        )
        manager = sw.PartitionManager(
            sw.Strategy.loads(rules.replace("tp | -", "-")), mesh=cpu_mesh(call.mesh)
        ).for_mode("decode")
    else:
        manager = call.manager
    keys = jax.random.split(jax.random.key(8), 2)
    given = {
        "sinks": jax.random.normal(keys[0], (call.heads,)),
        "bias": jax.random.normal(keys[1], (call.batch, 1, 1, call.rows)),
        "lengths": jnp.array([30, 3], jnp.int32),
        "dropout": 0.2,
        "dropout_key": 3,
        "return_lse": True,
    }
    arrays = call.arrays()
    wanted = jax.jit(attend(**given, implementation="vanilla", mode="decode"))(*arrays)
    with manager:
        assert explain(*arrays, implementation="flash_decode").call.specs.grouping == "factor"
        actual = jax.jit(attend(**given))(*arrays)
    np.testing.assert_allclose(actual.o, wanted.o, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(actual.lse, wanted.lse, rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("mesh", ["sp:4", "sp:3", "sp:2,tp:2"])
def test_gradients(mesh: str) -> None:
    call = Call(mesh=mesh, drafts=4, head="tp+sp" if "tp" in mesh else "tp")
    keys = jax.random.split(jax.random.key(8), 2)
    floats = {
        **dict(zip("qkv", call.arrays(), strict=True)),
        "sinks": jax.random.normal(keys[0], (call.heads,)),
        "bias": jax.random.normal(keys[1], (1, 1, 4, call.rows)),
    }
    lengths = jnp.array([30, 0], jnp.int32)

    def loss(floats: dict[str, jax.Array], implementation: str) -> jax.Array:
        output = dot_product_attention(
            **floats,
            lengths=lengths,
            softcap=3.0,
            mode="decode",
            return_lse=True,
            implementation=implementation,
        )
        return jnp.sum(jnp.sin(output.o)) + jnp.sum(
            jnp.sin(jnp.where(jnp.isneginf(output.lse), 0.0, output.lse))
        )

    wanted = jax.jit(jax.grad(loss), static_argnums=1)(floats, "vanilla")
    with call.manager:
        actual = jax.jit(jax.grad(loss), static_argnums=1)(floats, "flash_decode")
    for name in floats:
        np.testing.assert_allclose(actual[name], wanted[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_mesh_axis_of_size_one() -> None:
    call = Call(mesh="dp:1,sp:1,tp:1")
    with call.manager:
        actual = jax.jit(attend())(*call.arrays())
    wanted = jax.jit(attend(implementation="vanilla", mode="decode"))(*call.arrays())
    np.testing.assert_allclose(actual, wanted, rtol=2e-6, atol=2e-6)
    assert_no_collectives(call.compiled(), mesh=call.manager.mesh)


def test_partial_results_combine_in_float32() -> None:
    call = Call(dtype="bfloat16", rows=64)
    q, k, v = call.arrays()
    wanted = dot_product_attention(
        *(x.astype(jnp.float32) for x in (q, k, v)),
        causal=True,
        mode="decode",
        implementation="vanilla",
    )
    with call.manager:
        actual = jax.jit(attend())(q, k, v)
    assert actual.dtype == jnp.bfloat16
    error = np.linalg.norm(np.asarray(actual, np.float32) - wanted) / np.linalg.norm(wanted)
    assert error < 5e-3


def test_auto_choice_for_sharded_keys_in_decode() -> None:
    call = Call()
    with call.manager:
        choice = explain(*call.abstract(), causal=True)
    assert (choice.name, choice.alternatives) == ("flash_decode", ("vanilla",))
    assert choice.why == "the keys are sharded over sp: partial softmaxes are combined"


REFUSED = {
    "queries over some of the mesh axes": (
        Call(mesh="sp:2,ep:2", keys="sp+ep", queries="sp", drafts=4),
        {},
        (
            "sp shards the lengths of the keys and of the queries, and ep only that of the keys: "
            "it needs all mesh axes of the keys to shard the queries, or none"
        ),
    ),
    "weights": (
        Call(),
        {"return_weights": True},
        "it never has all weights at once, and the call asks for them",
    ),
    "not the last of the heads' mesh axes": (
        Call(mesh="sp:2,ep:2", head="sp+ep"),
        {},
        "sp shards the keys too, and is not the last of the heads' mesh axes sp+ep",
    ),
    "a bias for every head and key": (
        Call(head="sp"),
        {"bias": jax.ShapeDtypeStruct((1, 8, 1, 48), jnp.float32)},
        "sp shards both the heads and the keys of the bias",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, options, reason = REFUSED[name]
    with call.manager:
        (refusal,) = explain(*call.abstract(), implementation="flash_decode", **options).refusals
        assert refusal.reasons == (reason,)
        if "bias" not in options:
            with raises(AttentionError, "flash_decode", fix="auto"):
                attend(**options)(*call.arrays())
