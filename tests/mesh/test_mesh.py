"""Meshes: their text form, their sizes, and the place of each device."""

from __future__ import annotations

import dataclasses
import enum
import math
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
from tests.raising import Facts, facts, raises

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


def refused(call: Any, message: Facts) -> None:
    """Check that a call is refused with these facts."""
    with raises(MeshSpecError, message):
        call()


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
    ("dp:2,,tp:4", facts("mesh", snippet="dp:2,,tp:4\n     ^", fix="dp:2,tp:4")),
    (
        "dp:2,4",
        facts(4, snippet="dp:2,4\n     ^", fix="name:4"),
    ),
    ("dp=2,tp:4", facts("dp=2", snippet="dp=2,tp:4\n^", fix="dp:2")),
    ("dp", facts("dp", snippet="dp\n^", fix="dp:2")),
    ("dp:2, dp:4", facts("mesh", "axis", "dp", snippet="dp:2, dp:4\n      ^")),
    (
        "dp:-1,tp:-1",
        facts("dp", "tp", -1, snippet="dp:-1,tp:-1\n         ^", fix="tp"),
    ),
    ("dp:2,tp:0", facts("tp", 0, snippet="dp:2,tp:0\n        ^")),
    ("dp:2,tp: -3", facts("tp", -3, snippet="dp:2,tp: -3\n         ^")),
    (
        "tp:4,dp:" + "9" * 5000,
        facts("dp", "[...]", "too large"),
    ),
    ("dp:" + "9" * 25, facts("dp", "9" * 25, "too large")),
    ("9" * 25 + ",1,1,1", facts("dp", "9" * 25, "too large")),
    ("dp:2.5", facts("dp", "2.5", snippet="dp:2.5\n   ^")),
    ("dp:2:3", facts("dp", "2:3", snippet="dp:2:3\n   ^")),
    ("dp:", facts("mesh", "axis", "dp", snippet="dp:\n   ^")),
    (":2", facts("mesh", "axis", snippet=":2\n^", fix="dp")),
    ("dp:2,-:2", facts("mesh", "axis", "-", snippet="dp:2,-:2\n     ^", fix="dp")),
    ("?:2", facts("mesh", "axis", "?", snippet="?:2\n^", fix="dp")),
    ("_:2", facts("mesh", "axis", "_", snippet="_:2\n^", fix="dp")),
    ("a+b:2", facts("a+b", "+", snippet="a+b:2\n^", fix="dp")),
    ("a|b:2", facts("a|b", "|", snippet="a|b:2\n^", fix="dp")),
    ("d p:2", facts("mesh", "axis", "d p", snippet="d p:2\n^", fix="dp")),
    ("a?b:2", facts("a?b", "?", snippet="a?b:2\n^", fix="dp")),
    (
        "dp:2,it's:2",
        facts("it's", "'", snippet="dp:2,it's:2\n     ^", fix="dp"),
    ),
    ('q"x:2', facts('q"x', '"', snippet='q"x:2\n^', fix="dp")),
    (
        "-x:2",
        facts("-x", "-", snippet="-x:2\n^", fix="dp"),
    ),
    (
        "dcn.dp:3,dp:4",
        facts(3, "dp", 4, snippet="dcn.dp:3,dp:4\n       ^", fix="dp"),
    ),
    (
        "dcn.fsp:2,fsdp:4",
        facts("fsp", "axis", "mesh", snippet="dcn.fsp:2,fsdp:4\n    ^", fix="fsdp"),
    ),
    (
        "dcn.dp:2,dcn.dp:2,dp:4",
        facts("dp", snippet="dcn.dp:2,dcn.dp:2,dp:4\n             ^"),
    ),
    ("dcn.dp:-1,dp:4", facts("dp", -1, snippet="dcn.dp:-1,dp:4\n       ^")),
    ("dcn.dp:2", facts("mesh", "axis", snippet="dcn.dp:2\n^", fix="dp:-1")),
    ("2,4", facts(2, 4, "dp", "fsdp", "tp", snippet="2,4\n   ^", fix="dp:2,tp:4")),
    ("", facts("mesh", fix="dp:2,tp:4")),
    ("!", facts("mesh", snippet="!\n ^", fix="dp:2,tp:4")),
]


@pytest.mark.parametrize(("text", "message"), BAD_TEXTS, ids=[text for text, _ in BAD_TEXTS])
def test_a_bad_text_points_at_the_fault(text: str, message: Facts) -> None:
    refused(lambda: parse_mesh(text), message)


def test_all_problems_of_a_text_are_listed() -> None:
    problems = facts("dp", 0, count=3), facts("a+b", "+"), facts("dp", "twice")
    with raises(MeshSpecError, *problems):
        parse_mesh("dp:0,a+b:2,dp:2")


@pytest.mark.parametrize(
    ("spec", "kwargs", "message"),
    [
        ({"dp": 2}, {"axis_names": ("dp",)}, facts("axis_names", fix="axis_names")),
        (
            "dp:2",
            {"axis_names": ("dp",)},
            facts("axis_names", "dp:2", fix="axis_names"),
        ),
        ((2, 4), {"axis_names": ("dp",)}, facts(2, 1, "axis names", "dp", fix="dp:2,tp:4")),
        ((2,), {"axis_names": "dp"}, facts("axis_names", "dp", fix="axis_names")),
        ((2, 4), {"axis_names": ("dp", 3)}, facts(3, "int", fix="dp")),
        ((2, 4), {"axis_names": ("dp", "dp")}, facts("mesh", "axis", "dp")),
        (
            (2, True),
            {"axis_names": ("dp", "tp")},
            facts("tp", "True"),
        ),
        ((2, 4.0), {"axis_names": ("dp", "tp")}, facts("tp", "4.0")),
        ({}, {}, facts("mesh", "axis", fix="dp:-1")),
        (
            {"dcn.dp": 2, "dp": 4},
            {},
            facts("dcn.dp", "dcn.", fix="dp"),
        ),
        ({"!dp": 2}, {}, facts("!dp", "!", fix="dp")),
        (8, {}, facts(8, "int", fix="dp:2,tp:4")),
        ({"dp", "tp"}, {}, facts("dp", "tp", fix="dp:2,tp:4")),
        ("dcn.dp:2,dp:4", {"dcn": {"dp": 2}}, facts("slices", "twice")),
        ({"dp": 4}, {"dcn": {"tp": 2}}, facts("tp", "axis", "mesh", fix="dp")),
        ({"dp": 4}, {"dcn": 2}, facts("int", "axis", fix="dp")),
    ],
)
def test_a_bad_mesh_is_refused(spec: Any, kwargs: dict[str, Any], message: Facts) -> None:
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
            facts("fsdp", -1, 8, "dp=3"),
        ),
        (
            "dp:3,tp:2,fsdp:-1",
            8,
            facts("fsdp", -1, "dp=3", "tp=2", 6),
        ),
        (
            "fsdp:-1,tp:4",
            1,
            facts("fsdp", -1, 1, "tp=4"),
        ),
        ("dp:4,tp:4", 8, facts("dp=4", "tp=4", 16, 8)),
        (
            "dcn.dp:2,dp:-1,tp:8",
            8,
            facts(2, "dp", 1, fix="dp"),
        ),
        ("dp:-1", 0, facts("devices", 0)),
    ],
)
def test_sizes_that_do_not_fit(text: str, count: int, message: Facts) -> None:
    refused(lambda: resolve_sizes(parse_mesh(text), count), message)
