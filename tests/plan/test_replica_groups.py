"""Device groups in all three forms, and the mesh axes that they span."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import ProgramError
from shardwright.plan.collectives.replica_groups import (
    GroupSpan,
    parse_groups,
    parse_pairs,
    span_of,
    span_of_pairs,
)
from tests.raising import Facts, facts, raises

EIGHT = {"dp": 2, "fsdp": 2, "tp": 2}


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3),)),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("mesh[a=2,b=2] {a}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
        ("mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'b'}", ((0, 3), (1, 2))),
        ("mesh['a'=1,'b'=4] {'a','b'}", ((0, 1, 2, 3),)),
        ("mesh['a'=4], device_ids=([2,2]T(1,0)) {'a':(1)2,'a':(2)2}", ((0, 2, 1, 3),)),
        ("mesh['with=sign'=2,'b, c'=2] {'b, c'}", ((0, 1), (2, 3))),
    ],
)
def test_every_form(text: str, groups: Any) -> None:
    assert parse_groups(text, devices=4) == groups


SHAPES = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)


@given(SHAPES, st.data())
def test_iota_equals_numpy_transpose(shape: list[int], data: Any) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    count = math.prod(shape)
    size = data.draw(
        st.sampled_from([number for number in range(1, count + 1) if count % number == 0])
    )
    expected = np.arange(count).reshape(shape).transpose(order).reshape(-1, size)
    text = f"[{count // size},{size}]<=[{','.join(map(str, shape))}]T({','.join(map(str, order))})"
    assert parse_groups(text, devices=count) == tuple(map(tuple, expected.tolist()))


@given(SHAPES, st.data())
def test_groups_by_mesh_axes(shape: list[int], data: Any) -> None:
    """Members of a group differ along the group's axes only, and `span_of` finds these axes."""
    names = [f"a{at}" for at in range(len(shape))]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    positions = np.arange(math.prod(shape)).reshape(shape)
    dims = [names.index(name) for name in chosen]
    rest = [dim for dim in range(len(shape)) if dim not in dims]
    expected = positions.transpose([*rest, *dims]).reshape(
        -1, math.prod(shape[dim] for dim in dims)
    )
    mesh = ",".join(f"'{name}'={size}" for name, size in zip(names, shape, strict=True))
    text = f"mesh[{mesh}] {{{','.join(f'{name!r}' for name in chosen)}}}"
    groups = parse_groups(text, devices=positions.size)
    assert groups == tuple(map(tuple, expected.tolist()))
    sizes = dict(zip(names, shape, strict=True))
    wanted = tuple(name for name in names if name in chosen and sizes[name] > 1)
    assert span_of(groups, sizes) == GroupSpan(
        mesh_axes=wanted, devices=expected.shape[1], partial=False
    )


@given(
    st.sampled_from([2, 3, 4]),
    st.sampled_from([2, 3]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3]),
)
def test_groups_by_part_of_an_axis(major: int, size: int, minor: int, other: int) -> None:
    whole = major * size * minor
    positions = np.arange(whole * other).reshape(major, size, minor, other)
    expected = positions.transpose(0, 2, 3, 1).reshape(-1, size)
    groups = parse_groups(
        f"mesh['a'={whole},'b'={other}] {{'a':({major}){size}}}", devices=whole * other
    )
    assert groups == tuple(map(tuple, expected.tolist()))
    assert span_of(groups, {"a": whole, "b": other}) == GroupSpan(
        mesh_axes=("a",), devices=size, partial=True
    )


@pytest.mark.parametrize(
    ("groups", "axes", "devices", "partial"),
    [
        ((tuple(range(8)),), ("dp", "fsdp", "tp"), 8, False),
        (((0, 1), (2, 3), (4, 5), (6, 7)), ("tp",), 2, False),
        (((0, 4), (1, 5), (2, 6), (3, 7)), ("dp",), 2, False),
        (((0, 1, 4, 5), (2, 3, 6, 7)), ("dp", "tp"), 4, False),
        (((0, 7), (1, 6)), ("dp", "fsdp", "tp"), 2, True),
        (((0,), (1,)), (), 1, False),
    ],
)
def test_mesh_axes_of_groups(
    groups: Any, axes: tuple[str, ...], devices: int, partial: bool
) -> None:
    assert span_of(groups, EIGHT) == GroupSpan(mesh_axes=axes, devices=devices, partial=partial)


def test_positions_of_a_part_of_the_mesh() -> None:
    sizes = {"dcn": 2, "tp": 2}
    assert span_of(((0, 1),), sizes, positions=[2, 3]).mesh_axes == ("tp",)
    assert span_of(((0, 1),), sizes, positions=[0, 2]).mesh_axes == ("dcn",)


@pytest.mark.parametrize(
    ("pairs", "axes", "devices", "partial"),
    [
        ("{{0,1},{1,0},{2,3},{3,2}}", ("tp",), 2, False),
        ("{{0,1},{1,3},{3,0}}", ("fsdp", "tp"), 3, True),
        ("{{0,0},{1,1}}", (), 1, False),
        ("{}", (), 1, False),
        ("{{0,4}}", ("dp",), 2, False),
    ],
)
def test_mesh_axes_of_sends(pairs: str, axes: tuple[str, ...], devices: int, partial: bool) -> None:
    assert span_of_pairs(parse_pairs(pairs, devices=8), EIGHT) == GroupSpan(
        mesh_axes=axes, devices=devices, partial=partial
    )


def test_large_ring_is_fast() -> None:
    count = 16384
    pairs = tuple((at, (at + 1) % count) for at in range(count))
    assert span_of_pairs(pairs, {"fsdp": count}).devices == count


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[2,2]<=", facts("device", "[2,2]<=")),
        ("[2,2]<=[5]", facts("device", "[2,2]<=[5]")),
        ("mesh['a'=4] {'b'}", facts("device", "mesh['a'=4] {'b'}")),
        ("mesh['a'=4] {'a':(3)2}", facts("device", "mesh['a'=4] {'a':(3)2}")),
        (
            "mesh['a'=4], device_ids=(0,0,1,2) {'a'}",
            facts("device", "mesh['a'=4], device_ids=(0,0,1,2) {'a'}"),
        ),
        ("{{0,4}}", facts("{{0,4}}", 4)),
    ],
)
def test_other_forms_are_errors(text: str, says: Facts) -> None:
    with raises(ProgramError, says):
        parse_groups(text, devices=4)


def test_pair_of_three_is_an_error() -> None:
    with raises(ProgramError, "{{0,1,2}}"):
        parse_pairs("{{0,1,2}}", devices=4)


def test_pair_with_missing_device_is_an_error() -> None:
    with raises(ProgramError, "{{0,4}}", 4):
        parse_pairs("{{0,4}}", devices=4)
