"""Every implementation on its cells of the table."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import pytest

from shardwright.attention import implementation
from shardwright.testing.attention_conformance import AttentionConformance, product
from tests.attention.conformance import (
    CASES,
    GROUPS,
    MESHES,
    ROWS,
    VARIANTS,
    Cell,
    cells,
    check,
    failures,
    group_of,
    quick_cells,
)


@pytest.mark.parametrize("name", ROWS)
def test_one_mesh_of_each_case(name: str) -> None:
    assert not (wrong := failures(quick_cells(name))), "\n".join(wrong)


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("group", GROUPS)
def test_equals_the_oracle_or_says_why_not(group: str, mesh: str) -> None:
    assert not (wrong := failures(cells(group, mesh))), "\n".join(wrong)


@pytest.mark.product
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("group", GROUPS)
def test_every_dtype_axis_type_and_mode(group: str, mesh: str) -> None:
    every = (
        cell
        for case in CASES
        if group_of(case) == group
        for cell in product(case, mesh, tuple(ROWS))
    )
    assert not (wrong := failures(every)), "\n".join(wrong)


def test_one_device_has_one_mesh_and_float16() -> None:
    class OneDevice(AttentionConformance):
        implementation = "blockwise"
        devices = jax.devices()[:1]
        dtypes = ("bfloat16", "float16")

    cells = OneDevice.cells()
    assert {cell.mesh for cell in cells} == {"one"}
    assert {cell.dtype for cell in cells} == {"bfloat16", "float16"}
    assert len({str(cell) for cell in cells}) == len(cells) == 2 * len(CASES)
    half = next(cell for cell in cells if cell.dtype == "float16")
    check(half)


def test_every_implementation_has_a_row() -> None:
    assert set(ROWS) == {kernel.name for kernel in implementation.SHIPPED}


def test_quick_cells_cover_cases_and_meshes() -> None:
    quick = [cell for name in ROWS for cell in quick_cells(name)]
    few = [cell for cell in quick if cell.implementation in list(ROWS)[:4]]
    assert {case.name for case in CASES} - {cell.case.name for cell in few} == VARIANTS
    assert {cell.mesh for cell in few} == set(MESHES)
    assert {cell.axis_types for cell in few} == {"auto", "explicit"}
    assert {cell.dtype for cell in few} == {"float32", "bfloat16"}
    assert {cell.implementation for cell in quick} == set(ROWS)


def cell_of(case: str, mesh: str, implementation: str = "blockwise") -> Cell:
    actual = next(listed for listed in CASES if listed.name == case)
    return Cell(
        implementation=implementation,
        case=actual,
        dtype="float32",
        mesh=mesh,
        axis_types="auto",
        mode=actual.mode,
    )


def replace_blockwise(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Put another implementation in the place of blockwise."""
    blockwise = dataclasses.replace(implementation.find("blockwise"), **changes)
    shipped = [
        blockwise if kernel.name == "blockwise" else kernel for kernel in implementation.SHIPPED
    ]
    monkeypatch.setattr(implementation, "SHIPPED", tuple(shipped))


def test_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = implementation.find("blockwise").run
    replace_blockwise(monkeypatch, run=lambda x, call: real(x.replace(q=x.q * 1.0001), call))
    with pytest.raises(AssertionError, match=r"blockwise-full.*: o: .* is more than 2e-06"):
        check(cell_of("full", "one"))


def test_refusing_more_than_the_row_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_blockwise(monkeypatch, supports=lambda call: ("I am tired",))
    with pytest.raises(
        AssertionError, match=re.escape("blockwise-full-float32-one-auto: ['I am tired']")
    ):
        check(cell_of("full", "one"))


def test_refusing_less_than_the_row_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_blockwise(monkeypatch, supports=lambda call: ())
    with pytest.raises(
        AssertionError, match=re.escape("blockwise-full-float32-sp-auto: not refused")
    ):
        check(cell_of("full", "sp"))
