"""Meshes over several slices, and device lists that do not fit."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import subprocess
import sys
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwright.errors import MeshSpecError
from shardwright.mesh.build import (
    abstract_mesh,
    arrange_devices,
    create_mesh,
    default_dcn,
    mesh_axis_types,
    mesh_sizes,
    parse_mesh,
    resolve_axis_types,
)
from shardwright.testing import cpu_mesh, virtual_devices
from tests.mesh.test_mesh import ROOT, Device, ids, refused, sliced, torus
from tests.raising import Facts, facts, raises


def test_one_slice_keeps_the_order_given() -> None:
    devices = [Device(id=i) for i in (3, 1, 2, 0)]
    assert ids(arrange_devices(parse_mesh("dp:2,tp:2"), devices)) == [[3, 1], [2, 0]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Slice 0 has devices 0-3, slice 1 has 4-7: the dcn part is the slow part of its axis.
        ("dcn.dp:2,dp:4,tp:2", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("dcn.tp:2,dp:2,tp:4", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("tp:2,dp:4", [[0, 1, 4, 5], [2, 3, 6, 7]]),  # inferred: dp, though it is the fast axis
        ("!tp:2,dp:4", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("dp:1,fsdp:2,tp:4", [[[0, 1, 2, 3], [4, 5, 6, 7]]]),  # dp cannot be divided by 2, fsdp can
        ("fsdp:2,dp:2,pp:2", [[[0, 4], [1, 5]], [[2, 6], [3, 7]]]),  # pp comes before dp
        ("dp:8", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_two_slices(text: str, expected: list[Any], platform: str) -> None:
    assert ids(arrange_devices(parse_mesh(text), sliced(2, 4, platform=platform))) == expected


def test_totals_include_the_slices() -> None:
    grid = arrange_devices(parse_mesh((4, 4), ("dp", "tp"), dcn={"dp": 2}), sliced(2, 8))
    assert grid.shape == (4, 4)
    assert ids(grid) == np.arange(16).reshape(4, 4).tolist()


def test_slices_on_two_axes_in_any_order() -> None:
    spec = parse_mesh("dcn.pp:2,dcn.dp:2,pp:2,dp:4,tp:2")
    grid = arrange_devices(spec, list(reversed(sliced(4, 4))))
    slices = np.vectorize(lambda device: device.slice_index)(grid)
    assert slices[:, :, 0].tolist() == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert (slices[:, :, 0] == slices[:, :, 1]).all()


@given(
    st.sampled_from(["pp", "dp", "fsdp", "tp", "sp"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_only_the_dcn_axis_crosses_slices(
    crossing: str, slices: int, inner: int, other: int
) -> None:
    sizes = {"a": other, crossing: slices * inner, "b": 2}
    spec = parse_mesh(sizes, dcn={crossing: slices})
    grid = arrange_devices(spec, sliced(slices, inner * other * 2))
    assert sorted(np.ravel(ids(grid))) == list(range(grid.size))
    actual = np.vectorize(lambda device: device.slice_index)(grid)
    expected = np.repeat(np.arange(slices), inner)[None, :, None]
    assert (actual == expected).all()


@pytest.mark.parametrize(
    ("mesh", "slices", "fix"),
    [
        ("fsdp:4,tp:32", 16, "dcn={'fsdp': 4, 'tp': 4}, or the mesh fsdp:4,tp:32,dcn.fsdp:4"),
        ("tp:128", 16, "dcn={'tp': 16}, or the mesh tp:128,dcn.tp:16"),
    ],
)
def test_the_axes_of_the_fix_cross_all_slices(mesh: str, slices: int, fix: str) -> None:
    with raises(MeshSpecError, "not a multiple", 16, fix=fix) as caught:
        default_dcn(parse_mesh(mesh), slices)
    whole = str(caught.value).rpartition(" ")[2]
    assert math.prod(parse_mesh(whole).dcn) == slices


def test_gpus_have_domains() -> None:
    with raises(MeshSpecError, "over 2 domains", rule="between domains"):
        default_dcn(parse_mesh("tp:16"), 2, group="domain")


def test_no_axes_that_cannot_cross_are_named() -> None:
    with raises(MeshSpecError, fix="multiple of 16") as caught:
        default_dcn(parse_mesh("fsdp:4,tp:2"), 16)
    assert "dcn=" not in str(caught.value)


@pytest.mark.parametrize("text", ["tp:8", "dp:1,tp:8", "sp:2,ep:4", "dp:3,tp:2,fsdp:1"])
def test_model_axes_do_not_cross_slices(text: str) -> None:
    spec = parse_mesh(text)
    devices = sliced(2, math.prod(spec.sizes) // 2)
    refused(
        lambda: arrange_devices(spec, devices),
        facts(text, 2, "pp", "dp", "fsdp", fix="dcn"),
    )


def test_data_axes_cross_slices_together() -> None:
    grid = arrange_devices(parse_mesh("dp:2,fsdp:2,tp:4"), sliced(4, 4))
    slices = np.vectorize(lambda device: device.slice_index)(grid)
    assert slices[:, :, 0].tolist() == [[0, 1], [2, 3]]
    assert (slices == slices[:, :, :1]).all()


def test_tensor_axis_crosses_slices_with_dcn() -> None:
    assert ids(arrange_devices(parse_mesh("dcn.tp:2,tp:8"), sliced(2, 4))) == list(range(8))


def test_processes_are_slices_only_with_dcn() -> None:
    devices = [
        Device(id=i, process_index=i % 2, platform="cpu", slice_index=None) for i in range(8)
    ]
    assert ids(arrange_devices(parse_mesh("tp:8"), devices)) == list(range(8))
    assert ids(arrange_devices(parse_mesh("dp:2,tp:4", dcn={"dp": 1}), devices)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert ids(arrange_devices(parse_mesh("dcn.dp:2,dp:2,tp:4"), devices)) == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
    ]


def test_processes_of_a_tpu_are_never_slices() -> None:
    devices = [
        dataclasses.replace(device, process_index=device.id // 4) for device in torus(2, 2, 2)
    ]
    message = facts("dp=2", "(2)", 1, fix="leave")
    refused(lambda: arrange_devices(parse_mesh("dcn.dp:2,dp:2,tp:4"), devices), message)


@pytest.mark.parametrize(
    ("text", "devices", "message"),
    [
        ("dp:6", sliced(2, 4)[:6], facts(0, 4, 1, 2)),
        (
            "dcn.dp:4,dp:8",
            sliced(2, 4),
            facts("dp=4", "(4)", 2, fix="2"),
        ),
        (
            "dcn.dp:1,dp:8",
            sliced(2, 4),
            facts("(1)", 2),
        ),
        ("dp:4", sliced(1, 8), facts("dp", 4, 8, fix="sizes")),
        ("dp:2", [Device(id=0), Device(id=0)], facts("id", 0, "gpu", "process_index")),
        (
            "dp:2",
            [Device(id=0), Device(id=1, platform="cpu")],
            facts("devices"),
        ),
    ],
)
def test_devices_that_do_not_fit(text: str, devices: list[Device], message: Facts) -> None:
    refused(lambda: arrange_devices(parse_mesh(text), devices), message)


def hops(grid: np.ndarray, dim: int) -> set[int]:
    """How far apart in the torus two devices are that are next to each other along `dim`."""
    places = np.array([device.coords for device in grid.ravel()]).reshape(*grid.shape, 3)
    return set(np.abs(np.diff(places, axis=dim)).sum(-1).ravel().tolist())


def test_tpus_follow_their_torus() -> None:
    """In a 2x4 box a group of four is a line of the long side; in the order of ids it jumps."""
    devices = torus(2, 4, 1)
    grid = arrange_devices(parse_mesh("dp:2,tp:4"), devices)
    assert ids(grid) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [hops(grid, dim) for dim in range(2)] == [{1}, {1}]
    kept = arrange_devices(parse_mesh("!dp:2,tp:4"), devices)
    assert ids(kept) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [hops(kept, dim) for dim in range(2)] == [{2}, {1, 2}]


def test_torus_axis_is_split_last() -> None:
    devices = torus(4, 4, 4)
    whole = arrange_devices(parse_mesh("dp:16,tp:4"), devices)
    assert ids(whole) == ids(mesh_utils.create_device_mesh((16, 4), devices))
    with pytest.raises(NotImplementedError, match="Failed to find assignment"):
        mesh_utils.create_device_mesh((8, 8), devices)
    split = arrange_devices(parse_mesh("dp:8,tp:8"), devices)
    assert split.shape == (8, 8)
    assert sorted(np.ravel(ids(split))) == list(range(64))


def test_each_tpu_slice_follows_its_torus() -> None:
    devices = torus(2, 4, 1) + torus(2, 4, 1, slice_index=1)
    assert ids(arrange_devices(parse_mesh("dp:4,tp:4"), devices)) == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
        [8, 10, 12, 14],
        [9, 11, 13, 15],
    ]


def test_torus_with_a_hole_has_a_fix() -> None:
    devices = [*torus(2, 2, 1)[:3], *torus(2, 2, 2)[5:6]]
    refused(
        lambda: arrange_devices(parse_mesh("dp:2,tp:2"), devices),
        facts("dp", 2, "tp", 4, "TPU", fix="!dp:2,tp:2"),
    )
    assert ids(arrange_devices(parse_mesh("!dp:2,tp:2"), devices)) == [[0, 1], [2, 5]]


def test_default_mesh_is_all_fsdp() -> None:
    mesh = create_mesh()
    assert dict(mesh.shape) == {"dp": 1, "fsdp": len(jax.devices()), "tp": 1, "sp": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize("spec", ["dp:2,tp:-1", {"dp": 2, "tp": 4}])
def test_create_mesh_places_arrays(spec: Any) -> None:
    mesh = create_mesh(spec, backend="cpu")
    assert (
        ids(mesh.devices)
        == np.array([device.id for device in virtual_devices(8)]).reshape(2, 4).tolist()
    )
    x = jax.device_put(np.arange(32.0).reshape(8, 4), NamedSharding(mesh, P("dp", "tp")))
    assert {shard.data.shape for shard in x.addressable_shards} == {(4, 1)}
    np.testing.assert_array_equal(
        jax.jit(lambda x: x.sum(0))(x), np.arange(32.0).reshape(8, 4).sum(0)
    )


def test_devices_are_arranged_along_32_axes() -> None:
    sizes = {f"a{at}": 1 for at in range(33)}
    with raises(MeshSpecError, 33, 32, fix="size 1"):
        create_mesh(sizes)
    del sizes["a0"]
    assert create_mesh(sizes).size == 1


def test_create_mesh_takes_a_subset_in_its_order() -> None:
    devices = virtual_devices(8)
    assert list(create_mesh("dp:-1", devices=devices[3:5]).devices) == devices[3:5]
    assert list(create_mesh("dp:2", devices=np.array(devices[::-1])).devices) == devices[:-3:-1]
    assert list(create_mesh("dp:2", backend="cpu").devices) == devices[:2]


def test_axis_types() -> None:
    auto, explicit = AxisType.Auto, AxisType.Explicit
    assert mesh_axis_types(cpu_mesh("dp:2,tp:4", axis_types="explicit")) == {
        "dp": explicit,
        "tp": explicit,
    }
    assert mesh_axis_types(
        create_mesh("dp:2,tp:4", backend="cpu", axis_types={"tp": "explicit"})
    ) == {"dp": auto, "tp": explicit}
    assert mesh_axis_types(abstract_mesh("dp:2,tp:4", axis_types={"dp": explicit})) == {
        "dp": explicit,
        "tp": auto,
    }
    assert resolve_axis_types(("a", "b"), auto) == (auto, auto)


def test_default_axis_types_are_auto() -> None:
    for mesh in (cpu_mesh("dp:2,tp:4"), create_mesh("dp:4,tp:2"), abstract_mesh("dp:2")):
        assert set(mesh.axis_types) == {AxisType.Auto}
    assert mesh_sizes(cpu_mesh("fsdp:2,tp:2,ep:2")) == {"fsdp": 2, "tp": 2, "ep": 2}
    assert mesh_sizes(cpu_mesh("dp:4,tp:2")) == {"dp": 4, "tp": 2}


BAD_CALLS: list[tuple[Any, str]] = [
    (
        lambda: create_mesh("dp:2", axis_types="Explicit"),
        facts("axis_types", "Explicit", fix="explicit"),
    ),
    (
        lambda: create_mesh("dp:2", axis_types=AxisType.Manual),
        facts("axis_types", "auto", fix="auto"),
    ),
    (
        lambda: create_mesh("dp:2", axis_types=["auto"]),
        facts("axis_types", "auto", fix="auto"),
    ),
    (
        lambda: create_mesh("dp:2", axis_types={"tp": "auto"}),
        facts("axis_types", "tp", fix="dp"),
    ),
    (
        lambda: create_mesh("dp:2", axis_types={"dp": 1}),
        facts("axis_types", "dp", 1, fix="auto"),
    ),
    (lambda: create_mesh("dp:2", backend="abacus"), facts("devices", "abacus", fix="cpu")),
    (lambda: create_mesh("dp:2", devices=[]), facts("devices", 0)),
    (lambda: create_mesh("dp:2", devices=2), facts("devices", 2, fix="jax.devices")),
    (
        lambda: create_mesh("dp:2", devices=8.0),
        facts("devices", "8.0", fix="jax.devices"),
    ),
    (
        lambda: create_mesh("dp:2", devices="cpu"),
        facts("devices", "cpu", fix="cpu"),
    ),
    (
        lambda: create_mesh("dp:2", devices=[0, 1]),
        facts(0, "int", fix="jax.devices"),
    ),
    (
        lambda: create_mesh("dp:2", devices=[*virtual_devices(1), "cpu:1"]),
        facts("cpu:1", "str", fix="jax.devices"),
    ),
    (
        lambda: create_mesh(b"dp:2"),
        facts("dp", 2, "bytes", fix=("dp:2,tp:4", "dp")),
    ),
    (
        lambda: abstract_mesh(bytearray(b"dp:2")),
        facts("dp", 2, fix="dp:2,tp:4"),
    ),
    (
        lambda: create_mesh("dp:2", devices=np.zeros((2, 2))),
        facts("devices", "ndarray", fix="jax.devices"),
    ),
    (
        lambda: create_mesh("dp:1", devices=virtual_devices(1), backend="cpu"),
        facts("devices", "cpu"),
    ),
    (lambda: create_mesh("dp:2", devices=virtual_devices(1) * 2), facts("cpu", 0)),
    (
        lambda: create_mesh("dp:2", backend="cpu", dcn={"dp": 2}),
        facts("dp=2", "(2)", 1),
    ),
    (
        lambda: create_mesh("dp:16,tp:4", devices=virtual_devices(8)),
        facts("dp=16", "tp=4", 64, 8, fix="CPU"),
    ),
    (
        lambda: abstract_mesh("fsdp:-1,tp:8"),
        facts("fsdp", -1, fix=("devices", "8")),
    ),
    (
        lambda: abstract_mesh("fsdp:-1,tp:3", devices=8),
        facts("fsdp", -1, 8, "tp=3"),
    ),
    (
        lambda: abstract_mesh("fsdp:-1", devices=[1]),
        facts("devices", "[1]"),
    ),
    (lambda: mesh_sizes("dp:2,tp:4"), facts("dp:2,tp:4", "str", fix="AbstractMesh")),
    (lambda: mesh_sizes(["dp"]), facts("dp", "list", "mesh", fix="AbstractMesh")),
    (lambda: mesh_sizes([("dp", 2), ("dp", 4)]), facts("mesh", "axis", "dp")),
    (
        lambda: mesh_sizes({"dp": -1}),
        facts("dp", -1, fix="1"),
    ),
    (
        lambda: mesh_sizes(AbstractMesh((2,), ("a b",), axis_types=(AxisType.Auto,))),
        facts("mesh", "axis", "a b", fix="dp"),
    ),
    (lambda: virtual_devices(0), facts(0)),
]


@pytest.mark.parametrize(
    ("call", "message"), BAD_CALLS, ids=[" ".join(message.what) for _, message in BAD_CALLS]
)
def test_a_bad_call_is_refused(call: Any, message: Facts) -> None:
    refused(call, message)


def test_repeated_mesh_axis_name_is_refused() -> None:
    twice = Mesh(
        np.array(virtual_devices(8)).reshape(2, 4), ("q", "q"), axis_types=(AxisType.Auto,) * 2
    )
    refused(lambda: mesh_sizes(twice), facts("mesh", "axis", "q"))
    refused(lambda: mesh_axis_types(twice), facts("mesh", "axis", "q"))


@pytest.mark.parametrize(
    "mesh",
    [
        {"dp": 2, "tp": 4},
        MappingProxyType({"dp": 2, "tp": 4}),
        [("dp", 2), ("tp", np.int64(4))],
        (["dp", 2], ["tp", 4]),
    ],
)
def test_mesh_sizes_reads_mappings_and_pairs(mesh: Any) -> None:
    actual = mesh_sizes(mesh)
    assert list(actual.items()) == [("dp", 2), ("tp", 4)]
    assert {type(size) for size in actual.values()} == {int}


def test_abstract_and_concrete_meshes_agree() -> None:
    concrete, abstract = cpu_mesh("tp:2,dp:4"), abstract_mesh("tp:2,dp:-1", devices=8)
    assert list(mesh_sizes(concrete)) == ["tp", "dp"]
    assert mesh_sizes(concrete) == mesh_sizes(abstract) == mesh_sizes(concrete.abstract_mesh)
    assert concrete.abstract_mesh.shape_tuple == abstract.shape_tuple


def test_signatures_take_two_positional_arguments() -> None:
    """Others call `create_mesh(dims, names, backend)`: the rest is keyword-only."""
    for function, count in ((create_mesh, 3), (abstract_mesh, 2), (parse_mesh, 2), (cpu_mesh, 2)):
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
        assert kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) == count


def run(script: str) -> str:
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in {"XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    }
    env |= {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [env.get("PYTHONPATH")])]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_abstract_mesh_starts_no_backend() -> None:
    out = run(
        "import jax, shardwright.mesh.build as m, shardwright.testing as t\n"
        "mesh = m.abstract_mesh('fsdp:2048,tp:8')\n"
        "sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('fsdp', 'tp'))\n"
        "print(mesh.size, sharding.shard_shape((16384, 16384)))\n"
        "print(len(t.virtual_devices(3)), len(t.virtual_devices(2)), jax.device_count())\n"
    )
    assert out == "16384 (8, 2048)\n3 2 3\n"


@pytest.mark.full
def test_cpu_mesh_creates_devices() -> None:
    assert (
        run(
            "import shardwright.testing as t; t.cpu_mesh('dp:2'); import jax; "
            "print(jax.device_count())"
        )
        == "8\n"
    )
    assert run("import shardwright.testing as t; print(t.cpu_mesh('dp:4,tp:3').size)") == "12\n"


NOTEBOOK = """
import jax, jax.numpy as jnp
from shardwright.errors import MeshSpecError
from shardwright.mesh.build import create_mesh
from shardwright.testing import cpu_mesh, virtual_devices
jnp.ones(3).sum()
before = jax.config.jax_num_cpu_devices
calls = [lambda: create_mesh("dp:2,tp:4"), lambda: virtual_devices(8)]
for call in (*calls, lambda: cpu_mesh("dp:2,tp:4")):
    try:
        call()
    except MeshSpecError as err:
        print(err)
assert jax.config.jax_num_cpu_devices == before
print(virtual_devices(1) == jax.devices(), cpu_mesh("dp:1").size, create_mesh().size)
"""


@pytest.mark.full
def test_notebook_with_too_few_devices() -> None:
    late = (
        "8 virtual CPU devices are needed, but JAX already runs with 1 CPU device\n"
        "  fix   call virtual_devices(8) before JAX's first operation (in a notebook: restart "
        "the kernel and call it in the first cell), "
        "or start Python with XLA_FLAGS=--xla_force_host_platform_device_count=8\n"
    )
    assert run(NOTEBOOK) == (
        "mesh dp=2, tp=4 needs 8 devices, the number of devices is 1\n"
        "  fix   choose sizes whose product is at most 1, or give one axis the size -1; for "
        "virtual CPU devices call "
        "shardwright.testing.virtual_devices(8) before JAX's first operation (in a notebook: "
        "restart the kernel and call it in the first cell); "
        "abstract_mesh plans without devices\n" + late + late + "True 1 1\n"
    )
