"""Meshes: their text form, their sizes, and the place of each device."""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import MeshSpecError
from shardwright.mesh.build import (
    MeshSpec,
    parse_mesh,
    resolve_sizes,
)

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
    actual: list[Any] = np.vectorize(lambda device: device.id, otypes=[int])(grid).tolist()
    return actual


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
    actual = parse_mesh(spec, names)
    assert actual == expected
    assert parse_mesh(str(actual)) == expected


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
        "part '4' has no name, but others have one\n  dp:2,4\n       ^\n  fix   write \"name:4\"",
    ),
    ("dp=2,tp:4", "part 'dp=2' has no size\n  dp=2,tp:4\n  ^\n  fix   write \"dp:2\""),
    ("dp", "part 'dp' has no size\n  dp\n  ^\n  fix   write \"dp:2\""),
    ("dp:2, dp:4", "mesh axis 'dp' occurs twice\n  dp:2, dp:4\n        ^\n"),
    (
        "dp:-1,tp:-1",
        (
            "mesh axes 'dp' and 'tp' are both -1, and only one size can be inferred\n"
            "  dp:-1,tp:-1\n           ^\n"
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
        'mesh axis name "it\'s" contains "\'", which is a quote\n  dp:2,it\'s:2\n       ^\n',
    ),
    ('q"x:2', "mesh axis name 'q\"x' contains '\"', which is a quote\n  q\"x:2\n  ^\n"),
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
    actual = refused(lambda: parse_mesh(text), message)
    assert "\n  fix   " in actual


def test_all_problems_of_a_text_are_listed() -> None:
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
        ((2, 4), {"axis_names": ("dp",)}, "2 sizes for 1 axis: axis_names is dp"),
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
    actual = refused(lambda: resolve_sizes(parse_mesh(text), count), message)
    assert "\n  fix   " in actual
