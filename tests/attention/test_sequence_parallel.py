"""The collectives of attention over a sharded sequence: which, how often, how many bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.attention import zigzag
from shardwright.attention.api import dot_product_attention, explain
from shardwright.attention.kernels import ring
from shardwright.testing import assert_collectives, assert_no_collectives, cpu_mesh

# Minutes of compiling: the conformance table has a few cells of every implementation by default.
pytestmark = pytest.mark.full

RULES = """
[rules]
batch = "dp"
query_length = "{length}"
kv_length = "{length}"
head = "tp"
kv_head = "tp | -"
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call under a manager, as shapes: compiled and never run."""

    mesh: str
    length: str = "sp"
    batch: int = 2
    rows: int = 48
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 8
    v_dim: int = 8
    dtype: str = "float32"

    @property
    def manager(self) -> sw.PartitionManager:
        return sw.PartitionManager(
            sw.Strategy.loads(RULES.format(length=self.length)), mesh=cpu_mesh(self.mesh)
        ).for_mode("train")

    def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        pm = self.manager
        dims = {
            "q": (self.heads, self.head_dim),
            "k": (self.kv_heads, self.head_dim),
            "v": (self.kv_heads, self.v_dim),
        }
        axes = {"q": (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)}
        kv_axes = (sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM)
        values = []
        for name, (heads, dim) in dims.items():
            shape = (self.batch, self.rows, heads, dim)
            values.append(
                jax.ShapeDtypeStruct(
                    shape, self.dtype, sharding=pm.sharding(axes.get(name, kv_axes), shape=shape)
                )
            )
        return tuple(values)

    def compiled(self, implementation: str, **options: Any) -> Any:
        """The forward pass."""
        with self.manager:
            return jax.jit(attending(implementation, **options)).lower(*self.arrays()).compile()

    def compiled_backward(self, implementation: str, **options: Any) -> Any:
        """The backward pass as a program of its own, which shares nothing with the forward pass."""
        attend = attending(implementation, **options)
        with self.manager:
            arrays = [
                jax.device_put(jnp.ones(spec.shape, spec.dtype), spec.sharding)
                for spec in self.arrays()
            ]
            o, pull_back = jax.jit(lambda *arrays: jax.vjp(attend, *arrays))(*arrays)
            return jax.jit(lambda pull_back, do: pull_back(do)).lower(pull_back, o).compile()

    def kv_bytes(
        self, ranks: int, *, itemsize: int = 4, per_batch: int = 1, per_head: int = 1
    ) -> int:
        """Bytes of one rank's keys and values."""
        rows = self.batch // per_batch * self.rows // ranks
        return rows * self.kv_heads // per_head * (self.head_dim + self.v_dim) * itemsize


def attending(implementation: str, **options: Any) -> Callable[..., Any]:
    return lambda q, k, v: dot_product_attention(
        q, k, v, causal=True, implementation=implementation, **options
    )


@pytest.mark.parametrize(("ranks", "v_dim"), [(4, 8), (3, 12), (2, 8)])
def test_ring_sends_keys_ranks_minus_one_times(ranks: int, v_dim: int) -> None:
    call = Call(mesh=f"sp:{ranks}", v_dim=v_dim)
    sent = (ranks - 1) * call.kv_bytes(ranks)
    assert_collectives(
        call.compiled("ring"),
        permute=ranks - 1,
        bytes=sent,
        axis="sp",
        mesh=call.manager.mesh,
        only=True,
    )


@pytest.mark.parametrize("ranks", [3, 2])
def test_ring_backward_sends_keys_and_gradients(ranks: int) -> None:
    call = Call(mesh=f"sp:{ranks}")
    times = ranks - 1 + ranks
    compiled = call.compiled_backward("ring")
    assert_collectives(
        compiled,
        permute=times,
        bytes=times * call.kv_bytes(ranks),
        axis="sp",
        mesh=call.manager.mesh,
        only=True,
    )


def test_ring_over_two_mesh_axes() -> None:
    call = Call(mesh="fsdp:2,sp:3", length="fsdp+sp")
    assert_collectives(
        call.compiled("ring"),
        permute=5,
        bytes=5 * call.kv_bytes(6),
        axis=("fsdp", "sp"),
        mesh=call.manager.mesh,
        only=True,
    )


@pytest.mark.parametrize("implementation", ["ring", "ulysses", "allgather_kv"])
def test_no_communication_over_batch_or_heads(implementation: str) -> None:
    call = Call(mesh="dp:2,sp:2,tp:2")
    compiled = call.compiled_backward(implementation)
    for axis in ("dp", "tp"):
        assert_no_collectives(compiled, axis=axis, mesh=call.manager.mesh)


@pytest.mark.parametrize("implementation", ["ring", "ulysses", "allgather_kv"])
def test_whole_sequences_send_nothing(implementation: str) -> None:
    call = Call(mesh="dp:2,tp:2")
    assert_no_collectives(call.compiled_backward(implementation), mesh=call.manager.mesh)


def test_shared_kv_heads_add_a_sum_of_gradients() -> None:
    call = Call(mesh="sp:2,tp:4")
    compiled = call.compiled_backward("ring")
    assert_collectives(
        compiled,
        permute=3,
        axis="sp",
        mesh=call.manager.mesh,
        only=True,
        bytes=3 * call.kv_bytes(2, per_head=2),
    )
    assert_collectives(
        compiled,
        all_reduce=range(1, 3),
        axis="tp",
        mesh=call.manager.mesh,
        only=True,
        bytes=call.kv_bytes(2),
    )


def test_window_needs_fewer_turns() -> None:
    call = Call(mesh="sp:4")
    assert_collectives(
        call.compiled("ring", window=(11, 0)),
        permute=1,
        bytes=call.kv_bytes(4),
        mesh=call.manager.mesh,
        only=True,
    )
    there_and_home = call.compiled_backward("ring", window=(11, 0))
    assert_collectives(
        there_and_home, permute=3, bytes=3 * call.kv_bytes(4), mesh=call.manager.mesh, only=True
    )


def described(call: Call, **options: Any) -> Any:
    with call.manager:
        return explain(*call.arrays(), implementation="ring", **options).call


def test_turns_that_a_mask_leaves() -> None:
    call = Call(mesh="sp:4")  # 12 rows each
    assert ring.steps_of(described(call)) == (0, 1, 2, 3)
    assert ring.steps_of(described(call, causal=True)) == (0, 1, 2, 3)
    assert ring.steps_of(described(call, causal=True, window=(12, None))) == (0, 1)
    assert ring.steps_of(described(call, causal=True, window=(13, None))) == (0, 1, 2)
    assert ring.steps_of(described(call, causal=True, window=(0, None))) == (0,)
    assert ring.steps_of(described(call, window=(1, 1))) == (0, 1, 3)
    assert ring.steps_of(described(call, causal=True, chunk=24)) == (0, 1)
    assert ring.steps_of(described(call, causal=True, chunk=12)) == (0,)
    assert ring.steps_of(
        described(call, causal=True, window=(0, None), positions=jnp.arange(48))
    ) == (0, 1, 2, 3)


def test_position_arrays_are_gathered_once() -> None:
    call = Call(mesh="sp:4")
    order = zigzag.positions(call.rows, shards=4)
    compiled = call.compiled("ring", positions=order)
    assert_collectives(compiled, permute=3, bytes=3 * call.kv_bytes(4), mesh=call.manager.mesh)
    assert_collectives(
        compiled,
        permute=3,
        all_gather=1,
        bytes=3 * call.kv_bytes(4) + 4 * call.rows,
        mesh=call.manager.mesh,
        only=True,
    )


def test_next_keys_are_sent_before_the_work() -> None:
    call = Call(mesh="sp:4")
    with call.manager:
        text = str(
            jax.make_jaxpr(
                lambda *x: dot_product_attention(*x, causal=True, implementation="ring")
            )(*call.arrays())
        )
    body = text[text.index("ppermute") :]
    assert text.count("ppermute[") == 1
    assert "dot_general" not in text[: text.index("ppermute")]
    assert "dot_general" in body


def test_ulysses_all_to_alls() -> None:
    call = Call(mesh="sp:2")
    rows = call.batch * call.rows // 2
    moved = 4 * rows * (call.heads * (call.head_dim + call.v_dim)) + call.kv_bytes(2)
    assert_collectives(
        call.compiled("ulysses"),
        all_to_all=4,
        bytes=moved,
        axis="sp",
        mesh=call.manager.mesh,
        only=True,
    )
    backward = call.compiled_backward("ulysses")
    assert_collectives(
        backward, all_to_all=4, bytes=moved, axis="sp", mesh=call.manager.mesh, only=True
    )


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "sent"), [(4, 8, 2, 4), (6, 12, 4, 12), (3, 12, 2, 6)]
)
def test_ulysses_repeats_few_kv_heads(ranks: int, heads: int, kv_heads: int, sent: int) -> None:
    call = Call(mesh=f"sp:{ranks}", heads=heads, kv_heads=kv_heads)
    rows = call.batch * call.rows // ranks
    moved = 4 * rows * (heads + sent) * (call.head_dim + call.v_dim)
    assert_collectives(
        call.compiled("ulysses"),
        all_to_all=4,
        bytes=moved,
        axis="sp",
        mesh=call.manager.mesh,
        only=True,
    )


def test_gathered_keys_are_not_kept() -> None:
    call = Call(mesh="sp:4")
    whole = call.kv_bytes(1)
    assert_collectives(
        call.compiled("allgather_kv"),
        all_gather=1,
        bytes=whole,
        axis="sp",
        mesh=call.manager.mesh,
        only=True,
    )
    backward = call.compiled_backward("allgather_kv")
    assert_collectives(
        backward,
        all_gather=1,
        reduce_scatter=1,
        bytes=2 * whole,
        axis="sp",
        mesh=call.manager.mesh,
        only=True,
    )


def refusal(call: Call, implementation: str, **options: Any) -> str:
    with call.manager:
        (actual,) = explain(*call.arrays(), implementation=implementation, **options).refusals
    return "\n".join(actual.reasons)


def test_refusals() -> None:
    weights = "it never has all weights at once, and the call asks for them"
    for name in ("ring", "ulysses", "allgather_kv"):
        assert refusal(Call(mesh="sp:4"), name, return_weights=True) == weights
    assert (
        refusal(Call(mesh="sp:3,tp:2"), "ulysses")
        == "4 query heads per device do not divide over sp=3"
    )


def test_queries_and_keys_over_different_axes() -> None:
    call = Call(mesh="sp:4")
    both = (
        "the length of the queries is sharded over no mesh axis, that of the keys over "
        "sp; it needs both over the same mesh axes"
    )
    with sw.PartitionManager(
        sw.Strategy.loads(
            RULES.format(length="sp").replace('query_length = "sp"', 'query_length = "-"')
        ),
        mesh=cpu_mesh(call.mesh),
    ):
        for name in ("ring", "ulysses"):
            (actual,) = explain(*call.arrays(), implementation=name, mode="train").refusals
            assert actual.reasons == (both,)
        (actual,) = explain(*call.arrays(), implementation="allgather_kv", mode="train").refusals
    assert actual.reasons == (
        (
            "the length of the keys is sharded over sp and that of the queries is not: all "
            "devices along sp would compute the same"
        ),
    )


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "zigzag": lambda: {"positions": zigzag.positions(48, shards=6)},
    "window to both sides": lambda: {"window": (9, 3), "causal": False},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", ["ring", "ulysses", "allgather_kv"])
def test_two_mesh_axes_equal_one_device(implementation: str, name: str) -> None:
    call = Call(mesh="fsdp:2,sp:3", length="fsdp+sp", heads=12, kv_heads=4)
    keys = jax.random.split(jax.random.key(1), 3)
    arrays = tuple(
        jax.random.normal(key, spec.shape) for key, spec in zip(keys, call.arrays(), strict=True)
    )

    def run(implementation: str) -> Callable[..., Any]:
        options = {
            "causal": True,
            **CASES[name](),
            "mode": "train",
            "implementation": implementation,
        }
        return jax.jit(
            jax.value_and_grad(
                lambda arrays: jnp.sum(jnp.sin(dot_product_attention(*arrays, **options)))
            )
        )

    wanted = run("vanilla")(arrays)
    with call.manager:
        actual = run(implementation)(arrays)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, wanted
    )
