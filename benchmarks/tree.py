"""Shardings of a whole parameter tree, compared with building `NamedSharding`s by hand.

"by hand" is `[NamedSharding(mesh, P(*entries)) for entries in ...]` over a list with the entries of
each leaf, without a tree, rules or checks. The other cases call `pm.shardings(tree, annotations)`,
which flattens and unflattens the tree, and checks every size. "first" starts with empty caches, new
rules and a new manager. "again" calls the same manager with the same tree once more.

Every repetition gets a new tree. Equal annotations are the same tuple object, and equal names are
the same string object, as in a model that names them once. Every case but "again, rebuilt" runs
once before it is timed; "first" then drops its manager and its caches. In "again, rebuilt", every
leaf and key has its own tuple and string. This case shows that no cache depends on object identity,
and how long it takes to read the whole tree from memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import shardwright as sw
from benchmarks import timing, trees
from benchmarks.timing import Row, Target
from shardwright.testing.meshes import cpu_mesh

BY_HAND = "by hand"
TARGETS = {
    "first": Target(at_most=1.0),
    "again": Target(at_most=0.5),
    "first, ArraySpecs": Target(at_most=1.0),
    "again, ArraySpecs": Target(at_most=0.5),
}
# eformer does the same work only with its size check. Without the check it only resolves names.
PEER_TARGETS = {
    "flax logical_to_mesh_sharding": Target(at_least=8.0),
    "eformer, sizes checked": Target(at_least=4.0),
}


def run(*, peers: bool, repeats: int) -> list[Row]:
    """Measure both models on 8 devices and on an abstract mesh of a cluster; peers on 8 devices."""
    rows = []
    for model in trees.MODELS:
        strategy = sw.Strategy.preset(model.preset) | sw.Strategy.loads(model.overlay)
        for mesh in (cpu_mesh(model.devices8), sw.abstract_mesh(model.cluster)):
            rows += _measure(
                model, strategy, mesh, peers=peers and isinstance(mesh, Mesh), repeats=repeats
            )
    return rows


def _measure(
    model: trees.Model,
    strategy: sw.Strategy,
    mesh: Mesh | AbstractMesh,
    *,
    peers: bool,
    repeats: int,
) -> list[Row]:
    leaves = model.leaves()
    warm = sw.PartitionManager(strategy, mesh=mesh)
    expected = jax.tree.leaves(
        warm.shardings(trees.abstract_arrays(leaves), trees.annotations(leaves))
    )
    assert len(expected) == len(leaves)
    cases = {
        BY_HAND: lambda: timing.warmed(_by_hand(mesh, expected)),
        "first": lambda: _twice(lambda: _annotated(_fresh(strategy, mesh), leaves)),
        "again": lambda: timing.warmed(_annotated(warm, leaves)),
        "again, rebuilt": lambda: _annotated(warm, leaves, share=False),
        "first, ArraySpecs": lambda: _twice(lambda: _specs(_fresh(strategy, mesh), leaves)),
        "again, ArraySpecs": lambda: timing.warmed(_specs(warm, leaves)),
    }
    _agree(cases, expected, model, prefix=("first", "again"))
    with contextlib.ExitStack() as stack:
        if peers:
            cases |= _peers(leaves, model, strategy, mesh, expected, stack)
        times = timing.interleave(cases, repeats=3 * repeats if len(leaves) < 10_000 else repeats)
    case = f"{model.name}, {len(leaves):,} leaves, {_mesh_text(mesh)}"
    ours = [name for name in cases if name.startswith(("first", "again"))]
    rows = [
        timing.ratio(
            times, name, against=BY_HAND, subject="tree", case=case, target=TARGETS.get(name)
        )
        for name in ours
    ]
    others = [name for name in cases if name not in ours and name != BY_HAND]
    return rows + [
        timing.ratio(
            times, name, against="first", subject="tree", case=case, target=PEER_TARGETS.get(name)
        )
        for name in others
    ]


def _fresh(strategy: sw.Strategy, mesh: Mesh | AbstractMesh) -> sw.PartitionManager:
    timing.clear_module_caches()
    return sw.PartitionManager(strategy.compile(), mesh=mesh)


def _twice(make: Callable[[], timing.Run]) -> timing.Run:
    """Return a run with empty caches. One such run comes before, so that the code is warm."""
    make()()
    return make()


def _by_hand(mesh: Mesh | AbstractMesh, expected: list[NamedSharding]) -> Callable[[], Any]:
    entries = [(*sharding.spec.partitions,) for sharding in expected]
    return lambda: [NamedSharding(mesh, PartitionSpec(*entry)) for entry in entries]


def _annotated(
    manager: sw.PartitionManager, leaves: trees.Leaves, *, share: bool = True
) -> Callable[[], Any]:
    tree, annotations = (
        trees.abstract_arrays(leaves, share=share),
        trees.annotations(leaves, share=share),
    )
    return lambda: manager.shardings(tree, annotations)


def _specs(manager: sw.PartitionManager, leaves: trees.Leaves) -> Callable[[], Any]:
    tree = trees.specs(leaves)
    # Building ArraySpecs fills the package's caches, which "first" must find empty.
    timing.clear_module_caches()
    return lambda: manager.shardings(tree)


def _peers(
    leaves: trees.Leaves,
    model: trees.Model,
    strategy: sw.Strategy,
    mesh: Any,
    expected: list[Any],
    stack: contextlib.ExitStack,
) -> dict[str, Any]:
    """Return the cases of the peers, after a check that they give the same shardings."""
    from benchmarks import peers

    rules = strategy.compile()
    eformer = stack.enter_context(peers.eformer_shardings(rules, mesh))
    cases = {
        "flax logical_to_mesh_sharding": peers.flax_shardings(rules, mesh, leaves),
        "eformer": lambda: eformer(leaves, checked=False),
        "eformer, sizes checked": lambda: eformer(leaves, checked=True),
    }
    _agree(cases, expected, model)
    return cases


def _agree(
    cases: dict[str, Any],
    expected: list[NamedSharding],
    model: trees.Model,
    prefix: tuple[str, ...] = ("",),
) -> None:
    """Check, untimed, that the cases compute the same shardings."""
    ranks = [len(shape) for _, shape in sorted_shapes(model.leaves())]
    for name in (name for name in cases if name.startswith(prefix)):
        shardings = jax.tree.leaves(
            cases[name]()(), is_leaf=lambda leaf: isinstance(leaf, NamedSharding)
        )
        same = [
            sharding.is_equivalent_to(other, rank)
            for sharding, other, rank in zip(shardings, expected, ranks, strict=True)
        ]
        assert all(same), (
            f"{name} gives another sharding than ours for leaf {same.index(False)} of {model.name}"
        )


def sorted_shapes(leaves: trees.Leaves) -> list[tuple[str, tuple[int, ...]]]:
    """Return (path, shape) in the order in which JAX flattens the tree: by key, level by level."""
    paths = trees.build(
        {path: (shape, (path,)) for path, (shape, _) in leaves.items()},
        lambda shape, path: (path[0], shape),
    )
    return jax.tree.leaves(paths, is_leaf=lambda leaf: isinstance(leaf, tuple))


def _mesh_text(mesh: Mesh | AbstractMesh) -> str:
    return "8 CPU devices" if isinstance(mesh, Mesh) else f"abstract mesh of {mesh.size:,}"
