"""The work of `benchmarks.tree` and `benchmarks.trace` in flax, eformer and haliax.

The rules are the same, and the code is written as the documentation of each library shows.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardwright as sw
from benchmarks import trees
from shardwright import AxisRules, Role
from shardwright.vocabulary.modes import MODE_TRAIN

NAMES = ("flax", "eformer", "haliax")
EFORMER_NAMES = {
    sw.BATCH: "batch_axis",
    sw.QUERY_LENGTH: "query_sequence_axis",
    sw.EMBED: "hidden_state_axis",
    sw.HEAD: "head_axis",
    sw.KV_HEAD: "kv_head_axis",
    sw.HEAD_DIM: "attention_dim_axis",
    sw.KV_HEAD_DIM: "attention_kv_dim_axis",
    sw.MLP_INTERMEDIATE: "mlp_intermediate_axis",
    sw.VOCAB: "vocab_axis",
    sw.EXPERT_GATE: "expert_gate_axis",
    sw.BIAS_KV_SEQ: "bias_key_sequence_axis",
}
Kinds = tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]


def missing() -> list[str]:
    """Return the peers that cannot be imported, each with the reason."""
    reasons = []
    for name in NAMES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _supply_alias()
                importlib.import_module(name)
        except ImportError as error:
            reasons.append(f"{name}: {error}")
    return reasons


def _supply_alias() -> None:
    """Define the alias that haliax 1.3 imports and that newer JAX does not have."""
    tree_util = importlib.import_module("jax._src.tree_util")
    if not hasattr(tree_util, "BuiltInKeyEntry"):
        tree_util.BuiltInKeyEntry = Any


def versions() -> dict[str, str]:
    """Return the versions of the peers."""
    return {name: importlib.metadata.version(name) for name in NAMES}


def _candidates(rules: AxisRules, role: Role, mesh: Mesh) -> dict[str, list[tuple[str, ...]]]:
    """Return each axis's candidates in train mode, in order; empty for replicated."""
    table = dict((rules.params if role is Role.PARAM else rules.activations)[0])
    return {
        axis: [tuple(name for name in names if name in mesh.shape) for names in rule.candidates]
        for axis, rule in table.items()
    }


def _flax_rules(rules: AxisRules, role: Role, mesh: Mesh) -> list[tuple[str, Any]]:
    pairs = []
    for axis, candidates in _candidates(rules, role, mesh).items():
        pairs += [(axis, names) for names in candidates]
        pairs.append((axis, None))
    return pairs


def flax_shardings(
    rules: AxisRules, mesh: Mesh, leaves: trees.Leaves
) -> Callable[[], Callable[[], Any]]:
    """Return a case: `logical_to_mesh_sharding` of a new tree of logical specs."""
    from flax import linen

    pairs = _flax_rules(rules, Role.PARAM, mesh)

    def prepare() -> Callable[[], Any]:
        tree = trees.build(leaves, lambda _, axes: PartitionSpec(*axes))
        return lambda: linen.logical_to_mesh_sharding(tree, mesh, pairs)

    return prepare


def _eformer_manager(rules: AxisRules, role: Role, mesh: Mesh) -> Any:
    from eformer.escale import PartitionAxis, PartitionManager

    first = {
        axis: candidates[0] if candidates else None
        for axis, candidates in _candidates(rules, role, mesh).items()
    }
    return PartitionManager(
        PartitionAxis(**{name: first[axis] for axis, name in EFORMER_NAMES.items()})
    )


def _eformer_axes(axes: tuple[str, ...]) -> tuple[str | None, ...]:
    """Return axes, with None for those that eformer does not have; these are replicated here."""
    return tuple(axis if axis in EFORMER_NAMES else None for axis in axes)


@contextlib.contextmanager
def eformer_shardings(rules: AxisRules, mesh: Mesh) -> Iterator[Callable[..., Callable[[], Any]]]:
    """Yield a function that prepares eformer's shardings of a tree.

    Without `checked`, eformer only resolves the axes of each leaf and builds the sharding. With
    `checked`, it also fits the spec to the shape of the leaf, as shardwright does.
    """
    from eformer.escale.partition.constraints import get_corrected_named_sharding

    manager = _eformer_manager(rules, Role.PARAM, mesh)

    def one(value: Any, axes: tuple[str, ...]) -> NamedSharding:
        return NamedSharding(mesh, manager.resolve(axes, mode=MODE_TRAIN))

    def one_checked(value: Any, axes: tuple[str, ...]) -> NamedSharding:
        return get_corrected_named_sharding(value.shape, manager.resolve(axes, mode=MODE_TRAIN))

    def prepare(leaves: trees.Leaves, *, checked: bool) -> Callable[[], Any]:
        tree, annotations = (
            trees.abstract_arrays(leaves),
            trees.build(leaves, lambda _, axes: _eformer_axes(axes)),
        )
        return lambda: jax.tree.map(one_checked if checked else one, tree, annotations)

    with _legacy_mesh(mesh):
        yield prepare


@contextlib.contextmanager
def _legacy_mesh(mesh: Mesh) -> Iterator[None]:
    """Enter a mesh by the legacy `with mesh:`, because eformer reads it. JAX warns of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mesh:
            yield


def tracers(
    rules: AxisRules, mesh: Mesh, stack: contextlib.ExitStack
) -> dict[str, Callable[[Kinds, int], Callable[[], Any]]]:
    """Return, for each peer, a function that prepares a trace of `count` constraints."""
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    return {
        "flax with_logical_constraint": functools.partial(
            _trace, _flax_constrain(rules, mesh), jax.set_mesh, mesh
        ),
        "eformer apply_logical_sharding": functools.partial(
            _trace, _eformer_constrain(rules, mesh), _legacy_mesh, mesh
        ),
        "haliax auto_sharded": functools.partial(_trace_haliax, rules, mesh),
    }


def _flax_constrain(rules: AxisRules, mesh: Mesh) -> Callable[[Any, Any], Any]:
    from flax import linen

    pairs = _flax_rules(rules, Role.ACTIVATION, mesh)
    return lambda x, axes: linen.with_logical_constraint(x, axes, rules=pairs, mesh=mesh)


def _eformer_constrain(rules: AxisRules, mesh: Mesh) -> Callable[[Any, Any], Any]:
    from eformer.escale import apply_logical_sharding

    manager = _eformer_manager(rules, Role.ACTIVATION, mesh)
    known: dict[Any, Any] = {}
    return lambda x, axes: apply_logical_sharding(
        x,
        manager,
        axes=known.get(axes) or known.setdefault(axes, _eformer_axes(axes)),
        mode=MODE_TRAIN,
    )


def _trace(
    constrain: Callable[[Any, Any], Any],
    enter: Callable[[Mesh], Any],
    mesh: Mesh,
    kinds: Kinds,
    count: int,
) -> Callable[[], Any]:
    def constrained(arrays: list[Any]) -> list[Any]:
        arrays = list(arrays)
        for step in range(count):
            at = step % len(kinds)
            arrays[at] = constrain(arrays[at], kinds[at][1])
        return arrays

    def trace() -> Any:
        with enter(mesh):
            return jax.make_jaxpr(constrained)(
                [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape, _ in kinds]
            )

    return trace


def _trace_haliax(rules: AxisRules, mesh: Mesh, kinds: Kinds, count: int) -> Callable[[], Any]:
    """Trace `auto_sharded` of named arrays. Their axes need no annotation at the call."""
    import haliax

    mapping = {
        axis: names
        for axis, candidates in _candidates(rules, Role.ACTIVATION, mesh).items()
        for names in candidates[:1]
        if names
    }

    def constrained(arrays: list[Any]) -> list[Any]:
        named = [haliax.named(array, axes) for array, (_, axes) in zip(arrays, kinds, strict=True)]
        for step in range(count):
            at = step % len(kinds)
            named[at] = haliax.auto_sharded(named[at], mesh)
        return [axis_array.array for axis_array in named]

    def trace() -> Any:
        with jax.set_mesh(mesh), haliax.axis_mapping(mapping):
            return jax.make_jaxpr(constrained)(
                [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape, _ in kinds]
            )

    return trace
