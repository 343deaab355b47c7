"""Random lists of logical axis rules, and specs without what does not change the sharding."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

NAMES = "abcdef"
MESH_AXES = ("dp", "fsdp", "tp", "sp", "x", "y")


def random_lists(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield meshes, lists of rules and the names of some arrays."""
    random = Random(seed)
    for _ in range(count):
        rules = []
        for _ in range(random.randrange(1, 12)):
            kind = random.random()
            value: Any = random.choice(MESH_AXES)
            if kind < 0.13:
                value = None if kind < 0.1 else []
            elif kind > 0.75:
                value = random.sample(MESH_AXES, random.choice((1, 2, 3)))
            rules.append([random.choice(NAMES), value])
        arrays = []
        for _ in range(3):
            names: list[str | None] = list(random.sample(NAMES, random.randrange(1, 5)))
            if random.random() < 0.2:
                names[random.randrange(len(names))] = None
            arrays.append(names)
        mesh = {axis: random.choice((1, 2, 2, 4)) for axis in MESH_AXES}
        yield {"mesh": mesh, "rules": rules, "arrays": arrays}


def as_tuples(rules: list[list[Any]]) -> tuple[Any, ...]:
    """Return rules from JSON as flax takes them."""
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value) for name, value in rules
    )


def entries(spec: Any, mesh: dict[str, int]) -> list[list[str]]:
    """Return the mesh axes of more than one device of each dim, without trailing empty dims."""
    names = [[entry] if isinstance(entry, str) else [*(entry or ())] for entry in spec]
    kept = [[axis for axis in entry if mesh[axis] > 1] for entry in names]
    while kept and not kept[-1]:
        kept.pop()
    return kept
