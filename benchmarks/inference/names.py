"""Infer the axes of published models, and count the names that are right."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

import shardwright as sw
from benchmarks.inference.right_axes import GROUPED, RIGHT, Rules, is_same, right
from benchmarks.models.case import SEEDS, TOKENS, Case
from benchmarks.models.cases import CASES
from shardwright.vocabulary.merged_dims import axis_text


def rows_of(name: str, checkouts: Path) -> Iterator[Mapping[str, Any]]:
    """Yield a row for a model, and one for its variant whose queries share heads of keys."""
    case = CASES[name](checkouts)
    yield count(case.name, case, RIGHT[name])
    if name in GROUPED:
        grouped = CASES[name](checkouts, kv_heads=2)
        yield count(f"{case.name}, grouped heads", grouped, [*GROUPED[name], *RIGHT[name]])


def count(title: str, case: Case, rules: Rules) -> dict[str, Any]:
    """Return how many dims are named right, and the dims whose names differ."""
    mesh = jax.tree.leaves(case.params)[0].sharding.mesh if _is_explicit(case) else None
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        inferred = sw.infer_axes(case.forward, case.params, TOKENS, seeds=SEEDS)
    differing, unmarked = [], 0
    for dim in inferred.evidence:
        axis, expected = axis_text(dim.axis), right(rules, dim.path)[dim.dim]
        if not dim.is_open and is_same(axis, expected):
            continue
        unmarked += not dim.guess and not dim.is_open
        differing.append(f"{dim.path} dim {dim.dim}: {axis}, not {expected} ({dim.evidence})")
    return {
        "model": title,
        "dims": len(inferred.evidence),
        "right": len(inferred.evidence) - len(differing),
        "guesses": len(inferred.guesses),
        "open": len(inferred.open),
        "wrong, not marked": unmarked,
        "conflicts": len(inferred.conflicts),
        "differing": differing,
    }


def _is_explicit(case: Case) -> bool:
    return not jax.typeof(jax.tree.leaves(case.params)[0]).sharding.mesh.empty
