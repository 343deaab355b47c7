"""Meshes: their text form, their sizes, and the place of each device."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import os
import re
import subprocess
import sys
from pathlib import Path
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
    MeshSpec,
    abstract_mesh,
    arrange_devices,
    create_mesh,
    mesh_axis_types,
    mesh_sizes,
    parse_mesh,
    resolve_axis_types,
    resolve_sizes,
)
from shardwright.testing import cpu_mesh, virtual_devices

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What `arrange_devices` reads of a device."""

    id: int
    platform: str = "gpu"
    process_index: int = 0
    slice_index: int | None = 0
    device_kind: str = ""
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0


def sliced(slices: int, per_slice: int, **fields: Any) -> list[Device]:
    return [Device(id=i, slice_index=i // per_slice, **fields) for i in range(slices * per_slice)]


def torus(x: int, y: int, z: int, *, slice_index: int = 0) -> list[Device]:
    """TPU v4 chips, numbered with x fastest as the runtime does."""
    places = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    start = slice_index * len(places)
    kind = {"platform": "tpu", "device_kind": "TPU v4", "slice_index": slice_index}
    return [Device(id=start + n, coords=place, **kind) for n, place in enumerate(places)]


def ids(grid: np.ndarray) -> list[Any]:
    found: list[Any] = np.vectorize(lambda device: device.id, otypes=[int])(grid).tolist()
    return found


def refused(call: Any, message: str) -> str:
    """Check that the error of a call starts with `message`, and return the whole message."""
    with pytest.raises(MeshSpecError, match=f"^{re.escape(message)}") as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("spec", "names", "expected"),
    [
        ("dp:2,fsdp:-1,tp:4", None, MeshSpec(names=("dp", "fsdp", "tp"), sizes=(2, -1, 4))),
        ("tp:4,dp:2", None, MeshSpec(names=("tp", "dp"), sizes=(4, 2))),
        (" dp : 2 , tp:4 ", None, MeshSpec(names=("dp", "tp"), sizes=(2, 4))),
        (
            "2,-1,4",
            ("data", "seq", "model"),
            MeshSpec(names=("data", "seq", "model"), sizes=(2, -1, 4)),
        ),
        ("1,-1,1,1", None, MeshSpec(names=("dp", "fsdp", "tp", "sp"), sizes=(1, -1, 1, 1))),
        ("!dp:2,tp:4", None, MeshSpec(names=("dp", "tp"), sizes=(2, 4), contiguous=True)),
        ("!8", ("x",), MeshSpec(names=("x",), sizes=(8,), contiguous=True)),
        ("dcn.dp:2,dp:4,tp:2", None, MeshSpec(names=("dp", "tp"), sizes=(4, 2), dcn=(2, 1))),
        ("dp:4,tp:-1,dcn.tp:2", None, MeshSpec(names=("dp", "tp"), sizes=(4, -1), dcn=(1, 2))),
        ("dcn.dp:1,dp:4", None, MeshSpec(names=("dp",), sizes=(4,), dcn=(1,))),
        ({"dp": 2, "tp": -1}, None, MeshSpec(names=("dp", "tp"), sizes=(2, -1))),
        ((2, np.int64(4)), ["dp", "tp"], MeshSpec(names=("dp", "tp"), sizes=(2, 4))),
        ([8], ("dp",), MeshSpec(names=("dp",), sizes=(8,))),
    ],
)
def test_parse_mesh(spec: Any, names: Any, expected: MeshSpec) -> None:
    found = parse_mesh(spec, names)
    assert found == expected
    assert parse_mesh(str(found)) == expected


def test_dcn_may_come_beside_any_form() -> None:
    assert parse_mesh({"dp": 4, "tp": 2}, dcn={"dp": 2}).dcn == (2, 1)
    assert parse_mesh("dp:4,tp:2", dcn={"dp": 2}).dcn == (2, 1)
    assert parse_mesh((4, 2), ("dp", "tp"), dcn=MappingProxyType({"tp": 2})).dcn == (1, 2)
    assert parse_mesh("dp:4,tp:2", dcn={}).dcn == ()


def test_names_and_sizes_become_exact_str_and_int() -> None:
    class Axis(str, enum.Enum):  # noqa: UP042  the kind whose str() is not its value
        DATA = "data"

    spec = parse_mesh({Axis.DATA: np.int32(2)}, dcn={Axis.DATA: 2})  # type: ignore[dict-item]
    assert [type(name) for name in spec.names] == [str]
    assert spec.names == ("data",)
    assert [type(size) for size in (*spec.sizes, *spec.dcn)] == [int, int]


axis_sizes = st.lists(
    st.tuples(st.sampled_from(["dp", "fsdp", "tp", "my", "x.y", "é"]), st.integers(1, 64)),
    min_size=1,
    max_size=5,
)


@given(axis_sizes, st.integers(0, 4), st.booleans(), st.booleans())
def test_a_spec_survives_its_own_text(
    axes: list[tuple[str, int]], hole: int, contiguous: bool, crossing: bool
) -> None:
    sizes = dict(axes)
    names = tuple(sizes)
    spec = MeshSpec(
        names=names,
        sizes=tuple(-1 if i == hole else size for i, size in enumerate(sizes.values())),
        dcn=tuple(sizes.values()) if crossing else (),
        contiguous=contiguous,
    )
    assert parse_mesh(str(spec)) == spec


@given(st.text(alphabet="dptfs:,-!?_+|. 0123=\n", max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        spec = parse_mesh(text)
    except MeshSpecError as err:
        for problem in err.problems:
            assert problem.fix
            if problem.snippet:
                shown, caret = problem.snippet.split("\n")
                assert len(shown) == len(text)
                assert 0 <= caret.index("^") <= len(text)
    else:
        assert parse_mesh(str(spec)) == spec


BAD_TEXTS = [
    ("dp:2,,tp:4", "a part of the mesh is empty\n  dp:2,,tp:4\n       ^\n"),
    (
        "dp:2,4",
        "part '4' has no name, others have one\n  dp:2,4\n       ^\n  fix   write \"name:4\"",
    ),
    ("dp=2,tp:4", "part 'dp=2' has no size\n  dp=2,tp:4\n  ^\n  fix   write \"dp:2\""),
    ("dp", "part 'dp' has no size\n  dp\n  ^\n  fix   write \"dp:2\""),
    ("dp:2, dp:4", "mesh axis 'dp' occurs twice\n  dp:2, dp:4\n        ^\n"),
    (
        "dp:-1,tp:-1",
        (
            "mesh axes 'dp' and 'tp' are both -1, only one can be inferred\n  dp:-1,tp:-1\n       "
            "    ^\n"
        ),
    ),
    ("dp:2,tp:0", "mesh axis 'tp': size 0 is not positive\n  dp:2,tp:0\n          ^\n"),
    ("dp:2,tp: -3", "mesh axis 'tp': size -3 is not positive\n  dp:2,tp: -3\n           ^\n"),
    (
        "tp:4,dp:" + "9" * 5000,
        "mesh axis 'dp': a size of 20 digits is too large\n  tp:4,dp:"
        + "9" * 72
        + "\n          ^\n",
    ),
    ("dp:2.5", "mesh axis 'dp': size '2.5' is not an integer\n  dp:2.5\n     ^\n"),
    ("dp:2:3", "mesh axis 'dp': size '2:3' is not an integer\n  dp:2:3\n     ^\n"),
    ("dp:", "mesh axis 'dp': size '' is not an integer\n  dp:\n     ^\n"),
    (":2", "mesh axis name '' is empty\n  :2\n  ^\n"),
    ("dp:2,-:2", "mesh axis name '-' is a word of the rule grammar\n  dp:2,-:2\n       ^\n"),
    ("?:2", "mesh axis name '?' is a word of the rule grammar\n  ?:2\n  ^\n"),
    ("_:2", "mesh axis name '_' is a word of the rule grammar\n  _:2\n  ^\n"),
    ("a+b:2", "mesh axis name 'a+b' contains '+', which rules and mesh texts use\n  a+b:2\n  ^\n"),
    ("a|b:2", "mesh axis name 'a|b' contains '|', which rules and mesh texts use\n  a|b:2\n  ^\n"),
    ("d p:2", "mesh axis name 'd p' contains ' ', which rules and mesh texts use\n  d p:2\n  ^\n"),
    ("a?b:2", "mesh axis name 'a?b' contains '?', which rules and mesh texts use\n  a?b:2\n  ^\n"),
    (
        "dp:2,it's:2",
        'mesh axis name "it\'s" contains "\'", which quotes a text\n  dp:2,it\'s:2\n       ^\n',
    ),
    ('q"x:2', "mesh axis name 'q\"x' contains '\"', which quotes a text\n  q\"x:2\n  ^\n"),
    (
        "-x:2",
        "mesh axis name '-x' starts with '-', which means replicated in a rule\n  -x:2\n  ^\n",
    ),
    (
        "dcn.dp:3,dp:4",
        (
            "dcn part 3 does not divide dp = 4 (totals include the slices)\n  dcn.dp:3,dp:4\n     "
            "    ^\n"
        ),
    ),
    (
        "dcn.fsp:2,fsdp:4",
        (
            "dcn names 'fsp', which is not an axis of the mesh\n  dcn.fsp:2,fsdp:4\n      ^\n  "
            "fix   did you mean 'fsdp'?"
        ),
    ),
    (
        "dcn.dp:2,dcn.dp:2,dp:4",
        "dcn names 'dp' twice\n  dcn.dp:2,dcn.dp:2,dp:4\n               ^\n",
    ),
    ("dcn.dp:-1,dp:4", "dcn part of 'dp': size -1 is not positive\n  dcn.dp:-1,dp:4\n         ^\n"),
    ("dcn.dp:2", "a mesh needs at least one axis\n  dcn.dp:2\n  ^\n"),
    ("2,4", "2 sizes for 4 axes: the default axis names are dp, fsdp, tp, sp\n  2,4\n     ^\n"),
    ("", "a part of the mesh is empty\n"),
    ("!", "a part of the mesh is empty\n  !\n   ^\n"),
]


@pytest.mark.parametrize(("text", "message"), BAD_TEXTS, ids=[text for text, _ in BAD_TEXTS])
def test_a_bad_text_points_at_the_fault(text: str, message: str) -> None:
    found = refused(lambda: parse_mesh(text), message)
    assert "\n  fix   " in found


def test_all_problems_of_a_text_are_told_at_once() -> None:
    with pytest.raises(MeshSpecError, match="3 problems") as caught:
        parse_mesh("dp:0,a+b:2,dp:2")
    assert [problem.what for problem in caught.value.problems] == [
        "mesh axis 'dp': size 0 is not positive",
        "mesh axis name 'a+b' contains '+', which rules and mesh texts use",
        "mesh axis 'dp' occurs twice",
    ]


@pytest.mark.parametrize(
    ("spec", "kwargs", "message"),
    [
        ({"dp": 2}, {"axis_names": ("dp",)}, "axis_names is given, but the mapping names its axes"),
        (
            "dp:2",
            {"axis_names": ("dp",)},
            "axis_names is given, but the text 'dp:2' names its axes",
        ),
        ((2, 4), {"axis_names": ("dp",)}, "2 sizes for 1 axes: axis_names is dp"),
        ((2,), {"axis_names": "dp"}, "axis_names is 'dp', not a sequence of names"),
        ((2, 4), {"axis_names": ("dp", 3)}, "mesh axis name 3 is of type int, not a string"),
        ((2, 4), {"axis_names": ("dp", "dp")}, "mesh axis 'dp' occurs twice"),
        (
            (2, True),
            {"axis_names": ("dp", "tp")},
            "mesh axis 'tp': size True is not an integer",
        ),
        ((2, 4.0), {"axis_names": ("dp", "tp")}, "mesh axis 'tp': size 4.0 is not an integer"),
        ({}, {}, "a mesh needs at least one axis"),
        (
            {"dcn.dp": 2, "dp": 4},
            {},
            "mesh axis name 'dcn.dp' starts with 'dcn.', which mesh texts use",
        ),
        ({"!dp": 2}, {}, "mesh axis name '!dp' starts with '!', which mesh texts use"),
        (8, {}, "a mesh cannot be read from 8 of type int"),
        ({"dp", "tp"}, {}, "a mesh cannot be read from"),
        ("dcn.dp:2,dp:4", {"dcn": {"dp": 2}}, "slices are given twice: in the text and in dcn="),
        ({"dp": 4}, {"dcn": {"tp": 2}}, "dcn names 'tp', which is not an axis of the mesh"),
        ({"dp": 4}, {"dcn": 2}, "dcn is of type int, not a mapping of axis to size"),
    ],
)
def test_a_bad_mesh_is_refused(spec: Any, kwargs: dict[str, Any], message: str) -> None:
    refused(lambda: parse_mesh(spec, **kwargs), message)


@pytest.mark.parametrize(
    ("text", "count", "sizes"),
    [
        ("dp:2,fsdp:-1,tp:2", 8, (2, 2, 2)),
        ("dp:-1", 6, (6,)),
        ("dp:2", 8, (2,)),
        ("fsdp:-1,tp:8", 8, (1, 8)),
    ],
)
def test_resolve_sizes(text: str, count: int, sizes: tuple[int, ...]) -> None:
    assert resolve_sizes(parse_mesh(text), count).sizes == sizes


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 4096))
def test_inferred_size_uses_every_device(dp: int, tp: int, count: int) -> None:
    spec = parse_mesh({"dp": dp, "fsdp": -1, "tp": tp})
    if count % (dp * tp):
        refused(lambda: resolve_sizes(spec, count), "mesh axis fsdp = -1 has no size")
    else:
        assert math.prod(resolve_sizes(spec, count).sizes) == count


@pytest.mark.parametrize(
    ("text", "count", "message"),
    [
        (
            "dp:3,fsdp:-1",
            8,
            "mesh axis fsdp = -1 has no size: 8 devices cannot be divided by dp=3\n",
        ),
        (
            "dp:3,tp:2,fsdp:-1",
            8,
            "mesh axis fsdp = -1 has no size: 8 devices cannot be divided by dp=3, tp=2 (6)\n",
        ),
        (
            "fsdp:-1,tp:4",
            1,
            "mesh axis fsdp = -1 has no size: 1 device cannot be divided by tp=4\n",
        ),
        ("dp:4,tp:4", 8, "mesh dp=4, tp=4 needs 16 devices, there are 8\n"),
        (
            "dcn.dp:2,dp:-1,tp:8",
            8,
            "dcn part 2 does not divide dp = 1 (totals include the slices)\n",
        ),
        ("dp:-1", 0, "devices must be a positive integer, got 0\n"),
    ],
)
def test_sizes_that_do_not_fit(text: str, count: int, message: str) -> None:
    found = refused(lambda: resolve_sizes(parse_mesh(text), count), message)
    assert "\n  fix   " in found


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
def test_only_the_asked_axis_crosses_slices(
    crossing: str, slices: int, inner: int, other: int
) -> None:
    sizes = {"a": other, crossing: slices * inner, "b": 2}
    spec = parse_mesh(sizes, dcn={crossing: slices})
    grid = arrange_devices(spec, sliced(slices, inner * other * 2))
    assert sorted(np.ravel(ids(grid))) == list(range(grid.size))
    found = np.vectorize(lambda device: device.slice_index)(grid)
    expected = np.repeat(np.arange(slices), inner)[None, :, None]
    assert (found == expected).all()


@pytest.mark.parametrize("text", ["tp:8", "dp:1,tp:8", "sp:2,ep:4", "dp:3,tp:2,fsdp:1"])
def test_model_axes_do_not_cross_slices(text: str) -> None:
    spec = parse_mesh(text)
    devices = sliced(2, math.prod(spec.sizes) // 2)
    found = refused(
        lambda: arrange_devices(spec, devices),
        f"mesh {text} over 2 slices: none of pp, dp, fsdp has a size that 2 divides\n",
    )
    assert "as in dcn={" in found


def test_tensor_axis_crosses_slices_with_dcn() -> None:
    assert ids(arrange_devices(parse_mesh("dcn.tp:2,tp:8"), sliced(2, 4))) == list(range(8))


def test_processes_are_slices_only_where_dcn_says_so() -> None:
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
    message = "dcn puts dp=2 across slices (2), the devices are 1 slice\n  fix   leave dcn out"
    refused(lambda: arrange_devices(parse_mesh("dcn.dp:2,dp:2,tp:4"), devices), message)


@pytest.mark.parametrize(
    ("text", "devices", "message"),
    [
        ("dp:6", sliced(2, 4)[:6], "slices of unequal size: slice 0 has 4, slice 1 has 2\n"),
        (
            "dcn.dp:4,dp:8",
            sliced(2, 4),
            (
                "dcn puts dp=4 across slices (4), the devices are 2 slices\n  fix   make the "
                "product of dcn 2"
            ),
        ),
        (
            "dcn.dp:1,dp:8",
            sliced(2, 4),
            "dcn puts nothing across slices (1), the devices are 2 slices\n",
        ),
        ("dp:4", sliced(1, 8), "mesh dp:4 is not for 8 devices\n"),
        ("dp:2", [Device(id=0), Device(id=0)], "device Device(id=0, "),
        (
            "dp:2",
            [Device(id=0), Device(id=1, platform="cpu")],
            "devices of several platforms: cpu, gpu\n",
        ),
    ],
)
def test_devices_that_do_not_fit(text: str, devices: list[Device], message: str) -> None:
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


def test_a_torus_with_a_hole_is_refused_with_a_way_out() -> None:
    devices = [*torus(2, 2, 1)[:3], *torus(2, 2, 2)[5:6]]
    found = refused(
        lambda: arrange_devices(parse_mesh("dp:2,tp:2"), devices),
        "mesh dp:2,tp:2: the torus of 4 TPU devices has no 2x2 arrangement\n",
    )
    assert 'write "!dp:2,tp:2"' in found
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
        "axis_types is 'Explicit', neither auto nor explicit\n  fix   did you mean",
    ),
    (
        lambda: create_mesh("dp:2", axis_types=AxisType.Manual),
        "axis_types is Manual, neither auto nor explicit\n",
    ),
    (
        lambda: create_mesh("dp:2", axis_types=["auto"]),
        "axis_types is ['auto'], neither auto nor explicit\n",
    ),
    (
        lambda: create_mesh("dp:2", axis_types={"tp": "auto"}),
        "axis_types names 'tp', which is not an axis of the mesh\n  fix   name some of dp",
    ),
    (
        lambda: create_mesh("dp:2", axis_types={"dp": 1}),
        "axis_types['dp'] is 1, neither auto nor explicit\n",
    ),
    (lambda: create_mesh("dp:2", backend="abacus"), "no devices of backend 'abacus'\n"),
    (lambda: create_mesh("dp:2", devices=[]), "devices must be a positive integer, got 0\n"),
    (lambda: create_mesh("dp:2", devices=2), "devices is 2, not a sequence of devices\n"),
    (
        lambda: create_mesh("dp:2", devices=8.0),
        "devices is 8.0, not a sequence of devices\n  fix   pass jax.devices()",
    ),
    (
        lambda: create_mesh("dp:2", devices="cpu"),
        "devices is 'cpu', not a sequence of devices\n  fix   write backend='cpu'",
    ),
    (
        lambda: create_mesh("dp:2", devices=[0, 1]),
        "0 of type int in devices= is not a device\n  fix   pass the devices themselves",
    ),
    (
        lambda: create_mesh("dp:2", devices=[*virtual_devices(1), "cpu:1"]),
        "'cpu:1' of type str in devices= is not a device\n  fix   pass some",
    ),
    (
        lambda: create_mesh(b"dp:2"),
        "a mesh cannot be read from b'dp:2' of type bytes\n  fix   write \"dp:2,tp:4\"",
    ),
    (
        lambda: abstract_mesh(bytearray(b"dp:2")),
        "a mesh cannot be read from bytearray(b'dp:2') of type bytearray\n",
    ),
    (
        lambda: create_mesh("dp:2", devices=np.zeros((2, 2))),
        "devices is an array of shape (2, 2)\n",
    ),
    (
        lambda: create_mesh("dp:1", devices=virtual_devices(1), backend="cpu"),
        "devices and backend 'cpu' are both given\n",
    ),
    (lambda: create_mesh("dp:2", devices=virtual_devices(1) * 2), "device "),
    (
        lambda: create_mesh("dp:2", backend="cpu", dcn={"dp": 2}),
        "dcn puts dp=2 across slices (2), the devices are 1 slice\n",
    ),
    (
        lambda: create_mesh("dp:16,tp:4", devices=virtual_devices(8)),
        "mesh dp=16, tp=4 needs 64 devices, there are 8\n",
    ),
    (
        lambda: abstract_mesh("fsdp:-1,tp:8"),
        "mesh axis fsdp = -1 needs a number of devices\n  fix   pass devices=8",
    ),
    (
        lambda: abstract_mesh("fsdp:-1,tp:3", devices=8),
        "mesh axis fsdp = -1 has no size: 8 devices cannot be divided by tp=3\n",
    ),
    (
        lambda: abstract_mesh("fsdp:-1", devices=[1]),
        "devices must be a positive integer, got [1]\n",
    ),
    (lambda: mesh_sizes("dp:2,tp:4"), "'dp:2,tp:4' of type str is not a mesh\n"),
    (lambda: mesh_sizes(["dp"]), "['dp'] of type list is not a mesh\n"),
    (lambda: mesh_sizes([("dp", 2), ("dp", 4)]), "mesh axis 'dp' occurs twice\n"),
    (
        lambda: mesh_sizes({"dp": -1}),
        "mesh axis 'dp': size -1 is not positive\n  fix   give a size of 1 or more",
    ),
    (
        lambda: mesh_sizes(AbstractMesh((2,), ("a b",), axis_types=(AxisType.Auto,))),
        "mesh axis name 'a b' contains ' '",
    ),
    (lambda: virtual_devices(0), "count must be a positive integer, got 0\n"),
]


@pytest.mark.parametrize(
    ("call", "message"), BAD_CALLS, ids=[message.partition("\n")[0] for _, message in BAD_CALLS]
)
def test_a_bad_call_is_refused(call: Any, message: str) -> None:
    refused(call, message)


def test_a_mesh_with_one_name_for_two_axes_is_refused() -> None:
    twice = Mesh(
        np.array(virtual_devices(8)).reshape(2, 4), ("q", "q"), axis_types=(AxisType.Auto,) * 2
    )
    refused(lambda: mesh_sizes(twice), "mesh axis 'q' occurs twice")
    refused(lambda: mesh_axis_types(twice), "mesh axis 'q' occurs twice")


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
    found = mesh_sizes(mesh)
    assert list(found.items()) == [("dp", 2), ("tp", 4)]
    assert {type(size) for size in found.values()} == {int}


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
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_abstract_mesh_starts_no_backend() -> None:
    out = run(
        "import jax, shardwright.mesh.build as m, shardwright.testing as t\n"
        "mesh = m.abstract_mesh('fsdp:2048,tp:8')\n"
        "sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('fsdp', 'tp'))\n"
        "print(mesh.size, sharding.shard_shape((16384, 16384)))\n"
        "print(len(t.virtual_devices(3)), len(t.virtual_devices(2)), jax.device_count())\n"
    )
    assert out == "16384 (8, 2048)\n3 2 3\n"


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


def test_notebook_with_too_few_devices() -> None:
    late = (
        "8 virtual CPU devices are needed, JAX already runs with 1 CPU device\n"
        "  fix   call virtual_devices(8) before JAX's first operation (in a notebook: restart "
        "the kernel, first cell), "
        "or start Python with XLA_FLAGS=--xla_force_host_platform_device_count=8\n"
    )
    assert run(NOTEBOOK) == (
        "mesh dp=2, tp=4 needs 8 devices, there is 1\n"
        "  fix   choose sizes whose product is at most 1, or give one axis the size -1; for "
        "virtual CPU devices call "
        "shardwright.testing.virtual_devices(8) before JAX's first operation (in a notebook: "
        "restart the kernel, first cell); "
        "abstract_mesh plans without devices\n" + late + late + "True 1 1\n"
    )
