"""Resolve the sharding of q, k and v jointly.

k and v may be replicated over a mesh axis that shards q's heads, but only if a rule says so. Query
head h reads kv head `h * kv_heads // heads`. For that to hold on every device, the kv heads must be
sharded over the same mesh axes as the query heads, or over only the first ones of these mesh axes.
Each device then picks the kv heads that its queries read.
"""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh

from shardwright import _jax
from shardwright.attention.call import JointSpecs, KVHeads
from shardwright.errors import AttentionError
from shardwright.manager.manager import PartitionManager
from shardwright.resolution.decisions import DimDecision, Outcome, Resolution
from shardwright.resolution.request import ShardingRequest
from shardwright.vocabulary.axes import (
    BATCH,
    EMPTY,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    PAGE,
    QUERY_LENGTH,
)

QUERY_AXES = (BATCH, QUERY_LENGTH, HEAD, HEAD_DIM)
KEY_AXES = (BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM)
REPEATED_KEY_AXES = (BATCH, KV_LENGTH, HEAD, HEAD_DIM)
PAGE_AXES = (PAGE, EMPTY, KV_HEAD, KV_HEAD_DIM)
ArrayShape = tuple[int, int, int, int]
MeshAxes = tuple[str, ...]


def resolve_joint(
    manager: PartitionManager,
    *,
    q: ArrayShape,
    k: ArrayShape,
    v: ArrayShape,
    mode: str,
    repeated: bool = False,
) -> JointSpecs:
    """Return the sharding of a call's arrays under a manager.

    Mesh axes that a surrounding `shard_map` has applied already are left out.

    Args:
      manager: Rules and mesh.
      q: `[batch, q_length, heads, head_dim]`.
      k: `[batch, kv_length, kv_heads, head_dim]`.
      v: `[batch, kv_length, kv_heads, v_dim]`.
      mode: Runtime mode.
      repeated: Whether k and v already have as many heads as q, and their heads have the axis HEAD.

    Raises:
      ShardingError: The rules do not fit the sizes.
      AttentionError: The rules for q, k and v do not fit each other.
    """
    ambient = _jax.ambient_mesh()
    key_axes = REPEATED_KEY_AXES if repeated else KEY_AXES
    # The layers of a model make equal calls, so the specs are resolved once.
    specs: JointSpecs = manager.remember(
        ("resolve_joint", q, k, v, mode, repeated, ambient),
        lambda: _joint(manager, {"q": q, "k": k, "v": v}, mode, key_axes, ambient),
    )
    return specs


def resolve_pages(
    manager: PartitionManager, *, q: ArrayShape, k: ArrayShape, v: ArrayShape, mode: str
) -> JointSpecs:
    """Return the sharding of queries and pages of keys under a manager; see `resolve_joint`.

    `kv_length` of the result holds the mesh axes of the pages.

    Args:
      manager: Rules and mesh.
      q: `[batch, q_length, heads, head_dim]`.
      k: `[pages, page_size, kv_heads, head_dim]`.
      v: `[pages, page_size, kv_heads, v_dim]`.
      mode: Runtime mode.

    Raises:
      ShardingError: The rules do not fit the sizes.
      AttentionError: The rules for q and for the pages do not fit each other.
    """
    shapes = {"q": q, "k_pages": k, "v_pages": v}
    return _joint(manager, shapes, mode, PAGE_AXES, _jax.ambient_mesh())


def split_axes(manager: PartitionManager | None, q: ArrayShape, mode: str) -> frozenset[str]:
    """Return the mesh axes over which a surrounding `shard_map` may have split the queries.

    If JAX tracks varying mesh axes, return all Manual mesh axes: JAX then knows which of them split
    the queries. If not, return the Manual mesh axes in the rules of the queries. The stages of a
    pipeline do not track varying mesh axes, and their rules do not have pp, so pp is not returned.
    """
    ambient = _jax.ambient_mesh()
    manual = frozenset() if ambient is None else frozenset(ambient.manual_axes)
    if manager is None or _jax.tracks_varying():
        return manual
    request = ShardingRequest(QUERY_AXES, q, mode, None, "q", manual)
    decisions = manager.answer(request).decisions
    return frozenset(axis for decision in decisions for axis in decision.manual)


def _joint(
    manager: PartitionManager,
    shapes: dict[str, ArrayShape],
    mode: str,
    key_axes: tuple[str, ...],
    ambient: AbstractMesh | None,
) -> JointSpecs:
    """Resolve q, k and v, and check that their shardings fit each other.

    Dim 0 of k and v is the pages if `key_axes` is `PAGE_AXES`, else the batch.
    """
    axes = (QUERY_AXES, key_axes, key_axes)
    manual = manager.manual_axes(ambient)
    # Resolve v only to find its errors: v shares its first three dims with k, and so it shares
    # their mesh axes.
    queries, keys, _ = (
        _resolve(manager, mode, manual, name, own, shapes[name])
        for name, own in zip(shapes, axes, strict=True)
    )
    batch, q_length, heads, _ = _mesh_axes(queries)
    first, kv_length, kv_heads, _ = _mesh_axes(keys)
    if key_axes == PAGE_AXES:
        kv_length = first
        _check_pages(keys.decisions[0], first, q_length)
    elif batch != first:
        raise _mismatch("batch", batch, first, keys.decisions[0], dim=0)
    # The mesh axes of the kv heads must be the first mesh axes of the query heads. Only then does
    # each shard have the kv heads `h * kv_heads // heads` of its query heads `h`.
    if kv_heads != heads[: len(kv_heads)]:
        raise _mismatch("heads", heads, kv_heads, keys.decisions[2], dim=2)
    grouping, why = _grouping(heads, kv_heads, kv_length, keys.decisions[2].why)
    return JointSpecs(
        batch=batch,
        q_length=q_length,
        kv_length=kv_length,
        heads=heads,
        kv_heads=kv_heads,
        grouping=grouping,
        why=why,
    )


def _check_pages(decision: DimDecision, pages: MeshAxes, q_length: MeshAxes) -> None:
    """Check that each shard of the queries can reach every page."""
    where = _location("k_pages", decision, dim=0)
    if decision.manual:
        raise AttentionError(
            f"a shard_map around the call has split the pages over {'+'.join(decision.manual)}, "
            "but the tables have global page numbers",
            **where,
            fix="call attention outside of that shard_map",
        )
    shared = [axis for axis in pages if axis in q_length]
    if shared:
        raise AttentionError(
            f"the pages and the q_length of the queries are both sharded over {shared[0]}: "
            "a shard would lack pages that its queries read",
            **where,
            fix='write page = "-" to keep every page on every shard of the queries, '
            "or shard pages over a mesh axis of their own",
        )


def _grouping(
    heads: MeshAxes, kv_heads: MeshAxes, kv_length: MeshAxes, reason: str
) -> tuple[KVHeads, str]:
    """Return how the kv heads are sharded, relative to the query heads, and why.

    Args:
      heads: Mesh axes of the query heads.
      kv_heads: Mesh axes of the kv heads, a prefix of `heads`.
      kv_length: Mesh axes of the keys' length.
      reason: The reason for the mesh axes of the kv heads.
    """
    rest = heads[len(kv_heads) :]
    if not rest:
        over = "+".join(heads)
        why = f"kv heads are sharded over {over} like the query heads"
        return KVHeads.SAME, why if heads else "heads are not sharded"
    shared = tuple(axis for axis in rest if axis in kv_length)
    over = "+".join(kv_heads)
    if shared:
        kv = f"kv heads are sharded over {over or 'no mesh axis'}"
        length = f"the keys' length over {'+'.join(shared)}, which shards the query heads too"
        return KVHeads.FACTOR, f"{kv}, and {length} ({reason})"
    picks = f"over {'+'.join(rest)}, each shard picks the heads that its queries read ({reason})"
    if kv_heads:
        return KVHeads.PREFIX, f"kv heads are sharded over {over}; {picks}"
    return KVHeads.INDEX, f"kv heads are replicated; {picks}"


def _resolve(
    manager: PartitionManager,
    mode: str,
    manual: frozenset[str],
    name: str,
    axes: tuple[str, ...],
    shape: ArrayShape,
) -> Resolution:
    """Resolve one array, and refuse shardings that no kernel can serve."""
    resolution = manager.answer(ShardingRequest(axes, shape, mode, None, name, manual))
    resolution.require()
    for decision in resolution.decisions:
        if decision.outcome is Outcome.UNCONSTRAINED:
            raise AttentionError(
                '"?" leaves this dim to the compiler, but a kernel must know its sharding',
                **_location(name, decision, dim=decision.dim),
                fix='give the axis a rule without "?"',
            )
    length, head_dim = resolution.decisions[1], resolution.decisions[3]
    if length.manual:
        raise AttentionError(
            f"a shard_map around the call has split the length over {'+'.join(length.manual)}: "
            "attention would see only a part of the sequence",
            **_location(name, length, dim=1),
            fix="call attention outside of that shard_map, or build on the functions of "
            "shardwright.attention.kernels.blockwise",
        )
    if _free(head_dim):
        raise AttentionError(
            f"head_dim is sharded over {'+'.join(_free(head_dim))}",
            **_location(name, head_dim, dim=3),
            fix='shard the heads instead: head_dim = "-"',
        )
    return resolution


def _mesh_axes(resolution: Resolution) -> list[MeshAxes]:
    return [_free(decision) for decision in resolution.decisions]


def _free(decision: DimDecision) -> MeshAxes:
    """Return the mesh axes of a dim, without those that a surrounding `shard_map` has applied."""
    return tuple(axis for axis in decision.mesh_axes if axis not in decision.manual)


def _location(path: str, decision: DimDecision, *, dim: int) -> dict[str, Any]:
    """Return the keywords of an error that say where it occurred."""
    rule = str(decision.rule or "")
    return {"path": path, "dim": dim, "axis": decision.label, "rule": rule}


def _mismatch(
    what: str, q: MeshAxes, k: MeshAxes, decision: DimDecision, *, dim: int
) -> AttentionError:
    return AttentionError(
        f"the {what} of k and v are sharded over {'+'.join(k) or '-'}, "
        f"those of q over {'+'.join(q) or '-'}",
        **_location("k", decision, dim=dim),
        fix="shard k and v over the same mesh axes as q, "
        "or over only the first of these mesh axes, which replicates k and v over the others",
    )
