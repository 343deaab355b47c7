"""Convert between the mesh axes of each dim, the canonical `PartitionSpec` and its text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax.sharding import PartitionSpec

UNCONSTRAINED: Any = PartitionSpec.UNCONSTRAINED


def entry_of(names: tuple[str, ...]) -> Any:
    """Return a dim's entry: None, one mesh axis, or a tuple of several."""
    if not names:
        return None
    return names[0] if len(names) == 1 else names


def entry_names(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes that an entry of a spec names."""
    if entry is None or entry is UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def canonical_spec(
    entries: Iterable[Any], unreduced: frozenset[str] = frozenset()
) -> PartitionSpec:
    """Return the spec of entries, without trailing Nones, so that equivalent specs are equal."""
    canonical = list(entries)
    # JAX compares specs as written: P("x") and P("x", None) are unequal, though they shard alike.
    while canonical and canonical[-1] is None:
        canonical.pop()
    return PartitionSpec(*canonical, unreduced=unreduced)


def spec_of(*dims: tuple[str, ...]) -> PartitionSpec:
    """Return the canonical spec of dims. Each argument has the mesh axes of one dim."""
    return canonical_spec(map(entry_of, dims))


def spec_text(spec: PartitionSpec) -> str:
    """Return a spec as text, for instance `P('dp', None, ('fsdp', 'sp'))` or
    `P('dp', unreduced={'tp'})`.
    """
    # Read `partitions`, because JAX refuses to iterate over a spec with unreduced axes.
    entries = [
        "UNCONSTRAINED" if entry is UNCONSTRAINED else repr(entry) for entry in spec.partitions
    ]
    if spec.unreduced:
        entries.append(f"unreduced={{{', '.join(map(repr, sorted(spec.unreduced)))}}}")
    return f"P({', '.join(entries)})"
