"""Random lists of logical axis rules, compared with flax and with JAX."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import jax

import shardwright as sw
from shardwright.interop.logical_rules import Semantics, to_strategy

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


def compare_lists(semantics: Semantics, *, seed: int, count: int) -> tuple[int, list[Any]]:
    """Compare random lists with a library, and return how many arrays, and those that differ.

    flax decides for "flax" and "nnx". JAX decides which specs are errors, under "nnx" and "strict".
    """
    compared, different = 0, []
    for case in random_lists(seed, count):
        rules, mesh = as_tuples(case["rules"]), case["mesh"]
        if semantics == "strict":
            rules = tuple(dict(rules).items())
        own = {name: f"name_{name}" for name in NAMES} if semantics == "flax" else None
        imported = to_strategy(
            rules,
            mesh=mesh,
            names=own,
            semantics=semantics,
            own_axes=() if own is None else own.values(),
        )
        compiled = imported.strategy.compile()
        arrays = case["arrays"]
        if semantics == "nnx":
            arrays = [*arrays, [*arrays[0][1:], MESH_AXES[len(rules) % len(MESH_AXES)]]]
        for names in arrays:
            expected = library_spec(semantics, names, rules, mesh)
            try:
                found: Any = sw.resolve(imported.annotation(names), compiled, mesh).spec
            except sw.ShardingError:
                found = None
            compared += 1
            specs = [None if spec is None else entries(spec, mesh) for spec in (expected, found)]
            if specs[0] != specs[1]:
                different.append((rules, mesh, names, *specs))
    return compared, different


def library_spec(semantics: Semantics, names: Any, rules: Any, mesh: dict[str, int]) -> Any:
    """Return the spec that flax and JAX give, or None if it is an error."""
    from flax.core.spmd import get_pspec
    from flax.linen.spmd import logical_to_mesh_axes

    if semantics == "flax":
        return logical_to_mesh_axes(tuple(names), rules)
    table = dict(rules)
    if semantics == "nnx":
        spec = get_pspec(tuple(names), rules)
    elif any(name is not None and name not in table for name in names):
        return None
    else:
        spec = jax.P(*(None if name is None else table[name] for name in names))
    abstract = jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh))
    try:
        return jax.NamedSharding(abstract, spec).spec
    except Exception as error:
        # JAX does not export the class that it raises for a mesh axis that occurs twice.
        if type(error).__name__ not in ("DuplicateSpecError", "ValueError"):
            raise
        return None
