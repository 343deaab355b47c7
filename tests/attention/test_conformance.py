"""Every implementation on its cells of the table; most cells are slow tests."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from shardwright.attention import implementation
from shardwright.testing.attention_conformance import product
from tests.attention.conformance import CASES, MESHES, ROWS, Case, Cell, cells, check

EVERY = [
    pytest.param(cell, id=str(cell), marks=[getattr(pytest.mark, marker)] if marker else [])
    for cell, marker in cells()
]


@pytest.mark.parametrize("cell", EVERY)
def test_equals_the_oracle_or_says_why_not(cell: Cell) -> None:
    check(cell)


@pytest.mark.product
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_dtype_axis_type_and_mode(case: Case, mesh: str) -> None:
    failures = []
    for cell in product(case, mesh, tuple(ROWS)):
        try:
            check(cell)
        except (
            AssertionError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as err:  # report all of them at once
            failures.append(f"{cell}: {type(err).__name__}: {err}")
    assert not failures, "\n".join(failures)


def test_every_implementation_has_a_row() -> None:
    assert set(ROWS) == {kernel.name for kernel in implementation.SHIPPED}


def test_default_cells_cover_cases_and_meshes() -> None:
    default = [cell for cell, marker in cells() if not marker]
    few = [cell for cell in default if cell.implementation in list(ROWS)[:4]]
    assert {cell.case for cell in few} == set(CASES)
    assert {cell.mesh for cell in few} == set(MESHES)
    assert {cell.axis_types for cell in few} == {"auto", "explicit"}
    assert {cell.dtype for cell in few} == {"float32", "bfloat16"}
    assert {cell.implementation for cell in default} == set(ROWS)


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
