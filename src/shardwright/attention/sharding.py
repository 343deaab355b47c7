"""Where q, k and v lie, resolved jointly: k and v may be replicated over an axis of q's heads, but never by accident.

Query head h reads kv head `h * kv_heads // heads`. If that is to hold on every device, the kv heads lie over the same mesh
axes as the query heads, or over the leading ones of them, and each device picks what its queries read.
"""

from __future__ import annotations

from typing import Any

from shardwright import _jax
from shardwright.attention.call import JointSpecs, KVHeads
from shardwright.errors import AttentionError
from shardwright.manager.manager import PartitionManager
from shardwright.resolution import resolver
from shardwright.resolution.decisions import ModeFrom, Outcome, Resolution
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
Dims = tuple[int, int, int, int]


def resolve_joint(
    manager: PartitionManager, *, q: Dims, k: Dims, v: Dims, mode: str, repeated: bool = False
) -> JointSpecs:
    """Return where a call's arrays lie under a manager; mesh axes that a `shard_map` around it has applied are left out.

    Args:
      manager: rules and mesh.
      q: `[batch, q_length, heads, head_dim]`.
      k: `[batch, kv_length, kv_heads, head_dim]`.
      v: `[batch, kv_length, kv_heads, v_dim]`.
      mode: runtime mode.
      repeated: whether k and v have q's heads already, and lie as HEAD says.

    Raises:
      ShardingError: what the rules say does not fit the sizes.
      AttentionError: what they say of q, of k and of v does not go together.
    """
    key_axes = REPEATED_KEY_AXES if repeated else KEY_AXES
    resolved = {
        name: _resolve(manager, axes, shape, mode=mode, name=name)
        for name, axes, shape in (("q", QUERY_AXES, q), ("k", key_axes, k))
    }
    _resolve(manager, key_axes, v, mode=mode, name="v")
    (batch, q_length, heads, _), (kv_batch, kv_length, kv_heads, _) = (
        _mesh_axes(found) for found in resolved.values()
    )
    if batch != kv_batch:
        raise _apart("batch", batch, kv_batch, resolved["k"], dim=0)
    if kv_heads != heads[: len(kv_heads)]:
        raise _apart("heads", heads, kv_heads, resolved["k"], dim=2)
    grouping, why = _grouping(heads, kv_heads, kv_length, resolved["k"])
    return JointSpecs(
        batch=batch,
        q_length=q_length,
        kv_length=kv_length,
        heads=heads,
        kv_heads=kv_heads,
        grouping=grouping,
        why=why,
    )


def resolve_pages(manager: PartitionManager, *, q: Dims, k: Dims, v: Dims, mode: str) -> JointSpecs:
    """Return where queries and pages of keys lie under a manager, `kv_length` being the mesh axes of the pages; see `resolve_joint`.

    Args:
      manager: rules and mesh.
      q: `[batch, q_length, heads, head_dim]`.
      k: `[pages, page_size, kv_heads, head_dim]`.
      v: `[pages, page_size, kv_heads, v_dim]`.
      mode: runtime mode.

    Raises:
      ShardingError: what the rules say does not fit the sizes.
      AttentionError: what they say of q and of the pages does not go together.
    """
    queries = _resolve(manager, QUERY_AXES, q, mode=mode, name="q")
    found = _resolve(manager, PAGE_AXES, k, mode=mode, name="k_pages")
    _resolve(manager, PAGE_AXES, v, mode=mode, name="v_pages")
    (batch, q_length, heads, _), (pages, _, kv_heads, _) = _mesh_axes(queries), _mesh_axes(found)
    _check_pages(found, pages, batch=batch, q_length=q_length)
    if kv_heads != heads[: len(kv_heads)]:
        raise _apart("heads", heads, kv_heads, found, dim=2)
    grouping, why = _grouping(heads, kv_heads, pages, found)
    return JointSpecs(
        batch=batch,
        q_length=q_length,
        kv_length=pages,
        heads=heads,
        kv_heads=kv_heads,
        grouping=grouping,
        why=why,
    )


def _check_pages(found: Resolution, pages: tuple[str, ...], **queries: tuple[str, ...]) -> None:
    decision = found.decisions[0]
    where: dict[str, Any] = {
        "path": "k_pages",
        "dim": 0,
        "axis": decision.label,
        "rule": str(decision.rule or ""),
    }
    if decision.manual:
        what = f"a shard_map around the call has split the pages over {'+'.join(decision.manual)}, and tables number them globally"
        raise AttentionError(what, **where, fix="call attention outside of that shard_map")
    for dim, over in queries.items():
        both = [axis for axis in pages if axis in over]
        if both:
            what = f"the pages and the {dim} of the queries both lie over {both[0]}: a shard would lack pages that its queries read"
            fix = 'page = "-" keeps every page on every shard of the queries; or shard pages over a mesh axis of their own'
            raise AttentionError(what, **where, fix=fix)


def _grouping(
    heads: tuple[str, ...], kv_heads: tuple[str, ...], kv_length: tuple[str, ...], found: Resolution
) -> tuple[KVHeads, str]:
    rest = heads[len(kv_heads) :]
    if not rest:
        return (
            KVHeads.SAME,
            f"kv heads lie over {'+'.join(heads)} as the query heads do"
            if heads
            else "heads are not sharded",
        )
    why = found.decisions[2].why
    shared = tuple(axis for axis in rest if axis in kv_length)
    if shared:
        over = "+".join(kv_heads) or "no mesh axis"
        return (
            KVHeads.FACTOR,
            f"kv heads lie over {over}, and the keys' length over {'+'.join(shared)} of the heads' mesh axes ({why})",
        )
    if kv_heads:
        return (
            KVHeads.PREFIX,
            f"kv heads lie over {'+'.join(kv_heads)}; over {'+'.join(rest)} each shard picks what its queries read ({why})",
        )
    return (
        KVHeads.INDEX,
        f"kv heads are replicated; over {'+'.join(rest)} each shard picks what its queries read ({why})",
    )


def _resolve(
    manager: PartitionManager, axes: tuple[str, ...], shape: Dims, *, mode: str, name: str
) -> Resolution:
    manual = manager.manual_axes(_jax.ambient_mesh())
    found = resolver.explain(
        axes,
        manager.rules,
        manager.mesh,
        mode=mode,
        shape=shape,
        path=name,
        manual=manual,
        mode_from=ModeFrom.CALL,
    )
    found.require()
    for decision in found.decisions:
        if decision.outcome is Outcome.UNCONSTRAINED:
            raise AttentionError(
                '"?" leaves this dim to the compiler, but a kernel must know where it lies',
                path=name,
                dim=decision.dim,
                axis=decision.label,
                rule=str(decision.rule or ""),
                fix='give the axis a rule without "?"',
            )
    if found.decisions[1].manual:
        raise AttentionError(
            f"a shard_map around the call has split the length over {'+'.join(found.decisions[1].manual)}: it sees a part of the sequence",
            path=name,
            dim=1,
            axis=found.decisions[1].label,
            rule=str(found.decisions[1].rule or ""),
            fix="call attention outside of that shard_map, or build on the functions of shardwright.attention.kernels.blockwise",
        )
    if _left(found.decisions[3]):
        raise AttentionError(
            f"the dim of a head is sharded over {'+'.join(_left(found.decisions[3]))}",
            path=name,
            dim=3,
            axis=found.decisions[3].label,
            rule=str(found.decisions[3].rule or ""),
            fix='shard the heads instead: head_dim = "-"',
        )
    return found


def _mesh_axes(found: Resolution) -> tuple[tuple[str, ...], ...]:
    return tuple(_left(decision) for decision in found.decisions)


def _left(decision: Any) -> tuple[str, ...]:
    return tuple(axis for axis in decision.mesh_axes if axis not in decision.manual)


def _apart(
    what: str, q: tuple[str, ...], k: tuple[str, ...], found: Resolution, *, dim: int
) -> AttentionError:
    decision = found.decisions[dim]
    return AttentionError(
        f"the {what} of k and v lie over {'+'.join(k) or '-'}, those of q over {'+'.join(q) or '-'}",
        path="k",
        dim=dim,
        axis=decision.label,
        rule=str(decision.rule or ""),
        fix="let k and v lie over the same mesh axes as q, or over the leading ones of them and replicated over the rest",
    )
