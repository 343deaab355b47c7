"""Canonical specs, and the mesh axes of their entries."""

from __future__ import annotations

from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from shardwright.resolution.partition_specs import (
    UNCONSTRAINED,
    canonical_spec,
    entry_names,
    entry_of,
    spec_of,
    spec_text,
)


@pytest.mark.parametrize(("names", "entry"), [((), None), (("a",), "a"), (("a", "b"), ("a", "b"))])
def test_an_entry_and_its_names(names: tuple[str, ...], entry: Any) -> None:
    assert entry_of(names) == entry
    assert entry_names(entry) == names


def test_unconstrained_names_nothing() -> None:
    assert entry_names(UNCONSTRAINED) == ()


@pytest.mark.parametrize(
    ("entries", "spec"),
    [
        ((), P()),
        ((None, None), P()),
        ((None, "a", None), P(None, "a")),
        ((None, UNCONSTRAINED, None), P(None, UNCONSTRAINED)),
        ((("a", "b"), None), P(("a", "b"))),
    ],
)
def test_a_canonical_spec_has_no_none_at_its_end(entries: tuple[Any, ...], spec: P) -> None:
    assert tuple(canonical_spec(entries)) == tuple(spec)


def test_a_spec_of_mesh_axes_by_dim() -> None:
    assert tuple(spec_of(("a",), (), ("b", "c"), ())) == ("a", None, ("b", "c"))


def test_a_spec_as_text() -> None:
    assert spec_text(P()) == "P()"
    assert (
        spec_text(P(None, ("a", "b"), "c", P.UNCONSTRAINED))
        == "P(None, ('a', 'b'), 'c', UNCONSTRAINED)"
    )
    assert spec_text(P("dp", unreduced={"tp", "ep"})) == "P('dp', unreduced={'ep', 'tp'})"
