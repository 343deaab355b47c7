"""Collectives read from programs equal jaxprs, closed forms and texts of three backends."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding

import shardwright as sw
from shardwright.errors import MeshMismatchError, ProgramError
from shardwright.plan import Collective, read_collectives
from shardwright.plan.collectives.collective import Kind, total
from shardwright.show.collectives import collectives_text
from shardwright.testing import cpu_mesh
from tests.plan.programs import (
    FIXTURES,
    OPS,
    PLACES,
    compiled_runs,
    in_loops,
    mapped,
    traced_runs,
    ways,
)
from tests.raising import Facts, facts, raises

P = jax.P
ROWS, COLUMNS = 64, 16  # of each device


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("name", list(OPS))
@pytest.mark.full(
    but=[
        "all_gather-outer two of 3-f32",
        "psum_scatter-outer two of 3-bf16",
        "psum-tp of 2-bf16",
        "ppermute-middle of 3-f32",
    ]
)
@pytest.mark.pairwise
def test_counts_equal_those_of_jax(name: str, place: str, dtype: Any) -> None:
    sizes, axes = PLACES[place]
    mesh, f = mapped(in_loops(OPS[name], axes), sizes)
    x = jax.ShapeDtypeStruct(
        (ROWS * mesh.size, COLUMNS), dtype, sharding=NamedSharding(mesh, P(mesh.axis_names))
    )
    collectives = read_collectives(jax.jit(f).lower(x).compile(), mesh)
    expected = traced_runs(f, x)
    assert list(expected.values()) == [14]
    assert compiled_runs(collectives) == expected
    for collective in collectives:
        assert collective.devices == ways(mesh, axes)
        assert not collective.partial
        assert not collective.maybe
        assert (
            name.removeprefix("psum_scatter") in collective.op_name
            or "reduce_scatter" in collective.op_name
        )
        assert "programs.py:" in collective.source


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_collectives_of_the_partitioner(dtype: Any) -> None:
    """A matmul with a sharded contraction, and one with a gathered weight.

    Bytes from shapes alone.
    """
    mesh = cpu_mesh("dp:2,tp:4")
    size, name = jnp.dtype(dtype).itemsize, {4: "f32", 2: "bf16"}[jnp.dtype(dtype).itemsize]

    def one(a: Any, b: Any, out: Any) -> list[Collective]:
        args = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
            for shape, spec in (a, b)
        ]
        compiled = (
            jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, out)).lower(*args).compile()
        )
        return list(read_collectives(compiled, mesh))

    (reduced,) = one(((64, 128), P("dp", "tp")), ((128, 32), P("tp")), P("dp"))
    assert (reduced.kind, reduced.mesh_axes, reduced.dtype) == (Kind.ALL_REDUCE, ("tp",), name)
    assert (reduced.count, reduced.logical_bytes) == (1, 64 // 2 * 32 * size)
    (gathered,) = one(((64, 128), P("dp")), ((128, 32), P("dp", "tp")), P("dp", "tp"))
    assert (gathered.kind, gathered.mesh_axes, gathered.dtype) == (Kind.ALL_GATHER, ("dp",), name)
    assert (gathered.count, gathered.logical_bytes) == (1, 128 * 32 // 4 * size)


def test_gather_counts_per_layer_and_pass() -> None:
    """FSDP over a scan of layers.

    The closed form of its traffic, gathers of each weight forward and backward.
    """
    layers, embed, hidden = 5, 16, 64
    mesh = cpu_mesh("dp:1,fsdp:8,sp:1,ep:1,tp:1")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=mesh)
    kernel = (sw.LAYERS, sw.EMBED, sw.MLP_INTERMEDIATE)
    w = pm.shard(np.zeros((layers, embed, hidden), np.float32), kernel, role="param")
    x = pm.shard(np.zeros((32, embed), np.float32), sw.BATCH, sw.EMBED)

    def loss(w: Any, x: Any) -> Any:
        def layer(x: Any, value: Any) -> Any:
            value = sw.gather(value, sw.EMBED, sw.MLP_INTERMEDIATE)
            return jnp.tanh(x @ value) @ value.T, None

        return (lax.scan(jax.checkpoint(layer), x, w)[0] ** 2).sum()

    with pm:
        collectives = read_collectives(jax.jit(jax.grad(loss)).lower(w, x).compile(), mesh)
    weight = embed * hidden * 4
    gathers = [collective for collective in collectives if collective.kind is Kind.ALL_GATHER]
    assert {collective.mesh_axes for collective in collectives} == {("fsdp",)}
    assert {collective.logical_bytes for collective in gathers} == {weight}
    # The forward pass, the repeated forward pass of remat; its weight may serve the backward pass
    # too.
    assert total(gathers) in (2 * layers * weight, 3 * layers * weight)
    # CPU sums gradients whole and slices; elsewhere that is a reduce-scatter of the same bytes.
    sums = [
        collective
        for collective in collectives
        if collective.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
        and collective.logical_bytes > 4
    ]
    assert total(sums) in (layers * weight, 2 * layers * weight)


def texts() -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(FIXTURES.glob("*.hlo"))}


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """As much of a TPU device as a mesh and its slices need."""

    id: int
    slice_index: int
    platform: str = "tpu"
    process_index: int = 0


TWO_SLICES = Mesh(
    np.array([Device(at, at // 16) for at in range(32)], dtype=object).reshape(8, 4), ("fsdp", "tp")
)
MESHES: dict[str, Any] = {
    "cpu_list_groups_strided": {"dp": 8},
    "tpu_permute_start_done": {"dp": 2, "fsdp": 2, "tp": 2},
    "tpu_async_collective_fusions": {"fsdp": 64, "tp": 4},
    "tpu_gather_as_all_reduce": {"fsdp": 64, "tp": 1},
    "tpu_combined_reduce_scatter": {"fsdp": 8},
    "tpu_combined_reduce_scatters_of_one_channel": {"fsdp": 8},
    "tpu_two_slices": TWO_SLICES,
}


def row(value: Collective) -> str:
    over = (
        "+".join(value.mesh_axes)
        + (f" part {value.devices}" if value.partial else "")
        + (" dcn" if value.between_slices else "")
    )
    dtype = (
        value.dtype if value.dtype == value.wire_dtype else f"{value.dtype} as {value.wire_dtype}"
    )
    kind = f"{value.kind} as gather" if value.gathers else str(value.kind)
    text = f"{value.count} {kind} {over} {dtype} {value.logical_bytes} {value.wire_bytes}"
    return f"{text} maybe" if value.maybe else text


def rows(name: str, **options: Any) -> list[str]:
    return [
        row(collective)
        for collective in read_collectives(
            texts()[name], MESHES.get(name, {"dp": 2, "tp": 4}), **options
        )
    ]


MLP = 4096 * 4096 * 2  # bytes of one bfloat16 weight on one tensor shard
# The collectives in each text, counted by hand from the program that it was compiled from.
EXPECTED: dict[str, list[str]] = {
    "async_generic": ["1 reduce_scatter tp f32 4096 3072"],
    "cpu_list_groups_promoted": ["1 all_reduce tp bf16 as f32 2048 6144"],
    "cpu_list_groups_strided": ["1 all_reduce dp part 2 f32 4096 4096"],
    "cpu_iota_groups": ["1 all_reduce tp bf16 as f32 32768 98304"],
    "cpu_compiler_mesh_with_device_ids": [
        "1 all_to_all tp part 2 f32 65536 32768",
        "1 permute dp+tp part 2 f32 65536 65536",
    ],
    "cpu_named_mesh_part_of_an_axis": [
        "1 all_to_all tp part 2 f32 65536 32768",
        "1 permute dp+tp part 2 f32 65536 65536",
    ],
    "cpu_named_mesh_widened_gather": ["1 all_gather dp bf16 as f32 32768 32768"],
    "cpu_tuple_all_to_all": ["1 all_to_all tp bf16 as f32 65536 98304"],
    "cpu_variadic_reduce": ["1 all_reduce tp bf16+f32 as f32 10240 18432"],
    "cpu_nested_loops": ["3 all_gather dp f32 8192 4096", "12 all_reduce tp f32 4096 6144"],
    "cpu_conditional": ["1 all_reduce dp f32 4096 4096 maybe"] * 3,
    "cpu_loop_on_data": ["None all_reduce tp f32 4096 6144"],
    "cpu_train_step": [
        *["6 all_gather dp bf16 as f32 65536 65536"] * 2,
        "6 all_reduce tp bf16 as f32 16384 49152",
        *["6 all_gather dp bf16 as f32 65536 65536"] * 3,
        "6 all_reduce tp bf16 as f32 16384 49152",
        "6 all_reduce dp bf16 as f32 131072 262144",
    ],
    "tpu_nested_loops_without_counts": [
        "12 all_reduce tp f32 4096 6144",
        "3 all_gather dp f32 8192 4096",
    ],
    "tpu_loop_by_three": ["5 all_reduce tp f32 4096 6144"],
    "tpu_loop_downwards": ["9 all_reduce tp f32 4096 6144"],
    "tpu_loop_doubling": ["7 all_reduce tp f32 4096 6144"],
    "tpu_loop_on_data": ["None all_reduce tp f32 4096 6144"],
    "tpu_permute_start_done": ["7 permute dp+tp bf16 2048 2048"],
    "tpu_reduce_scatter_fusion": ["1 reduce_scatter tp bf16 32768 24576"],
    # Four gradients of 64 KiB in one fusion, each cut into slices.
    "tpu_combined_reduce_scatter": ["1 reduce_scatter fsdp bf16 262144 229376"],
    # Two of them, which have the same channel.
    "tpu_combined_reduce_scatters_of_one_channel": ["1 reduce_scatter fsdp bf16 8388608 7340032"]
    * 2,
    # An all-reduce that adds in float32 and rounds its result: the operand travels.
    "tpu_widened_all_reduce": ["1 all_reduce tp f32 4096 6144"],
    # Two weights of four layers, gathered forward and backward; printed three times each, run once.
    "tpu_async_collective_fusions": [
        *[f"4 all_gather fsdp bf16 {MLP} {MLP * 63 // 64}"] * 2,
        f"4 all_reduce tp bf16 {MLP} {MLP * 3 // 2}",
        *[f"4 all_gather fsdp bf16 {MLP} {MLP * 63 // 64}"] * 2,
        *[f"4 reduce_scatter fsdp bf16 {MLP} {MLP * 63 // 64}"] * 2,
        f"4 all_reduce tp bf16 {MLP} {MLP * 3 // 2}",
    ],
    # Here the compiler gathers by summing into zeros, which sends twice as much: as it is compiled,
    # so it is read.
    "tpu_gather_as_all_reduce": [
        *[f"4 all_reduce as gather fsdp bf16 {4 * MLP} {2 * 4 * MLP * 63 // 64}"] * 4,
        *[f"4 all_reduce fsdp bf16 {4 * MLP} {2 * 4 * MLP * 63 // 64}"] * 2,
    ],
    "gpu_reduce_scatter_start": ["1 reduce_scatter tp bf16 32768 24576"],
    "gpu_nested_tuple_starts": [
        "1 all_to_all tp part 2 bf16 32768 16384",
        "1 permute dp+tp part 2 bf16 32768 32768",
    ],
    "gpu_train_step_combined": [
        "6 all_gather dp bf16 131072 65536",
        "6 all_reduce tp bf16 16384 24576",
        "6 all_gather dp bf16 196608 98304",
        "6 reduce_scatter dp bf16 131072 65536",
        "6 all_reduce tp bf16 16384 24576",
    ],
    "gpu_true_false_branches": ["1 all_reduce dp f32 4096 4096 maybe"] * 3,
    "gpu_permute_as_send_and_recv": ["7 permute tp f32 4096 4096"],
    "gpu_ragged_all_to_all": ["1 ragged_all_to_all tp f32 4096 3072"],
    "gpu_broadcast": ["1 broadcast tp f32 4096 4096"],
    "gpu_reassociated": ["1 all_reduce tp f32 4096 6144"],
}


def test_every_fixture_has_an_expectation() -> None:
    assert set(texts()) == {*EXPECTED, "tpu_two_slices"}


@pytest.mark.parametrize("name", list(EXPECTED))
def test_every_printed_form(name: str) -> None:
    assert rows(name) == EXPECTED[name]


def test_collectives_of_two_slices() -> None:
    """Each fsdp gather of 8 is one of 4 inside a slice and one of 2 between slices.

    Three of four layers are in the loop.
    """
    collectives = read_collectives(texts()["tpu_two_slices"], TWO_SLICES)
    between = [collective for collective in collectives if collective.between_slices]
    assert {
        (collective.mesh_axes, collective.devices, collective.partial) for collective in between
    } == {(("fsdp",), 2, True)}
    assert {collective.kind for collective in between} == {Kind.ALL_GATHER, Kind.ALL_REDUCE}
    inside = [collective for collective in collectives if not collective.between_slices]
    assert {(collective.mesh_axes, collective.devices) for collective in inside} == {
        (("fsdp",), 4),
        (("tp",), 4),
    }
    gathers = [collective for collective in inside if collective.kind is Kind.ALL_GATHER]
    # Two weights of four layers in two passes; and their gradients, which are summed as scatter,
    # sum between slices, gather.
    assert sum(collective.count or 0 for collective in gathers) == 2 * 4 * (2 + 1)
    assert (
        sum(collective.count or 0 for collective in between if collective.kind is Kind.ALL_GATHER)
        == 2 * 2 * 4
    )
    with raises(MeshMismatchError, 16, "fsdp", 8, "tp", 4):
        read_collectives(texts()["tpu_two_slices"], {"fsdp": 8, "tp": 4})


def test_trips_of_loops_on_data() -> None:
    assert rows("tpu_loop_on_data", trips=11) == ["11 all_reduce tp f32 4096 6144"]
    assert rows("tpu_loop_by_three", trips=11) == ["5 all_reduce tp f32 4096 6144"], (
        "what is known is not overruled"
    )
    assert total(read_collectives(texts()["cpu_loop_on_data"], {"dp": 2, "tp": 4})) is None


def test_given_element_types() -> None:
    assert rows("cpu_loop_on_data", dtypes={"f32": "bf16"}, trips=1) == [
        "1 all_reduce tp bf16 as f32 2048 6144"
    ]


def test_sum_widened_by_the_program() -> None:
    mesh = cpu_mesh("dp:2,tp:4")
    wide = jax.shard_map(
        lambda x: lax.psum(x.astype(jnp.float32), "tp").astype(jnp.bfloat16),
        mesh=mesh,
        in_specs=P("dp", "tp"),
        out_specs=P("dp", None),
    )
    x = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16, sharding=NamedSharding(mesh, P("dp", "tp")))
    (actual,) = read_collectives(jax.jit(wide).lower(x).compile(), mesh)
    assert (actual.dtype, actual.wire_dtype) == ("f32", "f32")


def test_device_ids_are_positions_in_the_mesh() -> None:
    """On a mesh in another device order the program's groups are the same positions."""
    plain = cpu_mesh("dp:2,tp:4")
    turned = Mesh(plain.devices[:, ::-1], plain.axis_names, axis_types=plain.axis_types)
    for mesh in (plain, turned):
        f = jax.shard_map(
            lambda x: lax.psum(x, "tp"), mesh=mesh, in_specs=P("dp", "tp"), out_specs=P("dp", None)
        )
        x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P("dp", "tp")))
        (actual,) = read_collectives(jax.jit(f).lower(x).compile(), mesh)
        assert (actual.mesh_axes, actual.partial) == (("tp",), False)


def test_one_device_sends_nothing() -> None:
    mesh = cpu_mesh("dp:8,tp:1")
    f = jax.shard_map(
        lambda x: lax.psum(x, "tp"), mesh=mesh, in_specs=P("dp", "tp"), out_specs=P("dp", None)
    )
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P("dp", "tp")))
    assert read_collectives(jax.jit(f).lower(x).compile(), mesh) == ()
    alone = jax.jit(lambda x: x + 1).lower(1.0).compile()
    assert read_collectives(alone, cpu_mesh("dp:1")) == ()
    with raises(ProgramError, "dp", 8, fix="pm.shard"):
        read_collectives(alone, cpu_mesh("dp:8"))


LIST = "replica_groups={{0,1,2,3},{4,5,6,7}}"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("HloModule", "module", facts("HloModule", fix="jitted.lower")),
        (LIST, "replica_groups=V4<8>", facts("device", "V4<8>")),
        (LIST, "replica_groups={{0,1,2,8}}", facts("{{0,1,2,8}}", 8)),
        (
            "num_partitions=8",
            "num_partitions=8, replica_count=2",
            facts(2, fix="shard_map"),
        ),
        (
            "num_partitions=8",
            "num_partitions=4",
            facts(4, "dp", 2, "tp", 8),
        ),
        (
            "f32[16,64]{1,0} fusion(%param.1)",
            "f3[16,64]{1,0} fusion(%param.1)",
            facts("f3"),
        ),
        (
            "ROOT %add.2 = f32[] add(%x.2, %y)",
            "ROOT %add.2 f32[] add(%x.2, %y)",
            facts(23),
        ),
        ("ENTRY %", "%", facts("ENTRY", fix="compiled.as_text")),
        (
            "all-reduce(%wrapped_convert)",
            "all-reduce(%wrapped_convert",
            facts("compiled", "unclosed"),
        ),
    ],
)
def test_unreadable_text_is_an_error(old: str, new: str, says: Facts) -> None:
    text = texts()["cpu_list_groups_promoted"]
    assert old in text
    with raises((ProgramError, MeshMismatchError), says):
        read_collectives(text.replace(old, new), {"dp": 2, "tp": 4})


def test_unreachable_collective_is_an_error() -> None:
    text = texts()["cpu_nested_loops"]
    hidden = text.replace(" while(", " wile(")
    with raises(ProgramError, "instruction", "collectives"):
        read_collectives(hidden, {"dp": 2, "tp": 4})


@pytest.mark.parametrize(
    "opcode", ["all-broadcast", "collective-reduce-start", "all-reduce-scatter"]
)
def test_unknown_collective_is_an_error(opcode: str) -> None:
    text = texts()["cpu_list_groups_promoted"].replace(" all-reduce(", f" {opcode}(")
    with raises(ProgramError, opcode, 39):
        read_collectives(text, {"dp": 2, "tp": 4})


def test_unknown_slice_transfer_is_an_error() -> None:
    text = texts()["tpu_two_slices"].replace('transfer_type="ALL_GATHER"', 'transfer_type="GOSSIP"')
    with raises(ProgramError, 101, "GOSSIP"):
        read_collectives(text, TWO_SLICES)


def test_as_data() -> None:
    (actual,) = read_collectives(texts()["async_generic"], {"dp": 2, "tp": 4})
    assert actual.to_json() == {
        "kind": "reduce_scatter",
        "mesh_axes": ["tp"],
        "devices": 4,
        "partial": False,
        "count": 1,
        "maybe": False,
        "gathers": False,
        "between_slices": False,
        "dtype": "f32",
        "wire_dtype": "f32",
        "logical_bytes": 4096,
        "wire_bytes": 3072,
        "name": "reduce-scatter.0",
        "op_name": "jit(shifted)/psum_scatter",
        "source": "",
    }
    assert (actual.total_bytes, actual.total_wire_bytes) == (4096, 3072)


def test_as_a_table() -> None:
    collectives = read_collectives(texts()["cpu_nested_loops"], {"dp": 2, "tp": 4})
    collectives += read_collectives(
        texts()["cpu_compiler_mesh_with_device_ids"], {"dp": 2, "tp": 4}
    )[:1]
    collectives += read_collectives(texts()["cpu_loop_on_data"], {"dp": 2, "tp": 4})
    collectives += read_collectives(texts()["cpu_conditional"], {"dp": 2, "tp": 4})[:1]
    collectives += read_collectives(texts()["cpu_list_groups_promoted"], {"dp": 2, "tp": 4})
    collectives += read_collectives(texts()["tpu_two_slices"], TWO_SLICES)[:1]
    assert (
        collectives_text(collectives, carried={"tp": (sw.HEAD, sw.VOCAB), "sp": (sw.LENGTH,)})
        == TABLE
    )
    assert collectives_text(collectives, rows=1).splitlines()[2:] == ["and 6 more"]
    assert collectives_text(()) == "no collectives"


TABLE = """\
times  collective  over            dtype          bytes     all times
       where
4      all_gather  fsdp (dcn)      bf16           8.0 MiB   32.0 MiB
       send.16
1      all_to_all  tp (2 devices)  f32            64.0 KiB  64.0 KiB
       jit(<lambda>)/mul model.py:55
12     all_reduce  tp              f32            4.0 KiB   48.0 KiB
       …y/eval_jaxpr/while/body/eval_jaxpr/psum model.py:36
3      all_gather  dp              f32            8.0 KiB   24.0 KiB
       …rd_map/while/body/eval_jaxpr/all_gather model.py:36
?      all_reduce  tp              f32            4.0 KiB   ?
       jit(<lambda>)/shard_map/while/body/pmax model.py:38
≤1     all_reduce  dp              f32            4.0 KiB   4.0 KiB
       …mbda>)/shard_map/cond/branch_0_fun/psum model.py:37
1      all_reduce  tp              bf16 (as f32)  2.0 KiB   2.0 KiB
       jit(<lambda>)/shard_map/psum model.py:27
tp may carry HEAD, VOCAB"""
