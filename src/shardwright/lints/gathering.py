"""Lints of weights that are gathered for every token, or that should be gathered but are not."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.lints.finding import Code, Finding, Severity
from shardwright.lints.subject import NO_PARAMETER_HAS, Subject
from shardwright.resolution.rules import default_rule
from shardwright.vocabulary.axes import (
    BATCH,
    CAPACITY,
    EXPERT,
    KV_LENGTH,
    LAYERS,
    LENGTH,
    PAGE,
    QUERY_LENGTH,
    Role,
    axis_label,
)
from shardwright.vocabulary.modes import MODE_DECODE, MODE_TRAIN

# If a file has rules of these axes for decode or insert, the file is meant for serving.
_SERVING = (BATCH, KV_LENGTH, PAGE, CAPACITY)
# Axes of activations along which each element is a token.
_TOKENS = (BATCH, LENGTH, QUERY_LENGTH, CAPACITY)
# Dims of a weight over which matmuls do not sum: each layer and each expert has its own matmul.
_STACKED = frozenset({LAYERS, EXPERT})


def not_gathered(subject: Subject) -> Iterator[Finding]:
    """Yield rules that shard weights over a mesh axis that shards tokens too, if `gather` lacks it.

    If the tokens of `x` and a dim of `w` are both sharded over fsdp, each device has its own tokens
    and its own part of `w`. So XLA must move data for each matmul `x @ w`. With fsdp in
    `policy.gather`, `sw.gather` gathers `w` once for all its matmuls.
    """
    tokens: dict[str, str] = {}
    for axis in _TOKENS:
        for name in _activation_axes(subject, axis, MODE_TRAIN):
            tokens.setdefault(name, axis_label(axis))
    stored = [*subject.rules.params[0]]  # rules of train, the first mode
    if (largest_dim := subject.rules.policy.largest_dim) is not None:
        stored.append(("", largest_dim))  # "" stands for every axis of a weight
    for axis, rule in stored:
        if axis in NO_PARAMETER_HAS | _STACKED | {LENGTH} or not _has_parameter(subject, axis):
            continue
        harmless = {*subject.rules.policy.gather, *_activation_axes(subject, axis, MODE_TRAIN)}
        moved = [
            name
            for name in rule.mesh_axes
            if name in tokens and name not in harmless and _splits(subject, name)
        ]
        if moved:
            sharded = " and ".join(dict.fromkeys(tokens[name] for name in moved))
            gather = "+".join((*subject.rules.policy.gather, *moved))
            written = (
                path
                for path, key, other in subject.written()
                if key == axis and other.ref == rule.ref
            )
            yield subject.finding(
                Code.NOT_GATHERED,
                Severity.WARNING,
                next(written, ("params", rule.ref.key)),
                message=f"weights{axis and f' with {axis_label(axis)}'} are stored over "
                f"{'+'.join(moved)}, which also shards {sharded} of activations, and the weights "
                "are not gathered: XLA chooses for every matmul whether to move the weight, "
                "activations or partial sums",
                fix=f'gather the weights for use, [policy] gather = "{gather}", or store them over '
                "another mesh axis",
            )


def gathered_in_decode(subject: Subject) -> Iterator[Finding]:
    """Yield the mesh axes over which a serving strategy gathers weights for every token."""
    if not _serves(subject):
        return
    gathered: dict[str, list[str]] = {}
    # Rules of decode, the third mode.
    for axis, rule in subject.rules.params[2]:
        if axis in NO_PARAMETER_HAS or not _has_parameter(subject, axis):
            continue
        # If the activation rule of this axis has a mesh axis of `gather`, weights are not gathered
        # over this mesh axis; see `Decider.gathered`.
        in_use = _activation_axes(subject, axis, MODE_DECODE)
        for name in rule.mesh_axes:
            is_gathered = name in subject.rules.policy.gather and name not in in_use
            if is_gathered and _splits(subject, name):
                gathered.setdefault(name, []).append(axis_label(axis))
    if gathered:
        names = ", ".join(dict.fromkeys(label for labels in gathered.values() for label in labels))
        yield subject.finding(
            Code.GATHERED_IN_DECODE,
            Severity.WARNING,
            ("policy", "gather"),
            message=f"in decode, weights with {names} are gathered "
            f"over {'+'.join(gathered)} for every token",
            fix='store weights as they are used, [params] embed = "-" and gather = "-", '
            "as in the preset serve_tp",
        )


def _activation_axes(subject: Subject, axis: str, mode: str) -> tuple[str, ...]:
    """Return the mesh axes over which an axis of activations may be sharded in a mode."""
    stated = subject.rules.stated(axis, mode=mode, role=Role.ACTIVATION, path=None)
    rule = stated or default_rule(axis)
    return () if rule is None else rule.mesh_axes


def _has_parameter(subject: Subject, axis: str) -> bool:
    """Tell whether a parameter of the tree has an axis. Without a tree, return True.

    If `axis` is empty, any axis counts.
    """
    axes = subject.axes_of(Role.PARAM)
    return subject.tensors is None or axis in axes or (not axis and bool(axes))


def _splits(subject: Subject, name: str) -> bool:
    """Tell whether a mesh axis has more than one device. Without a mesh, return True."""
    return bool(subject.live((name,)))


def _serves(subject: Subject) -> bool:
    """Tell whether a file has rules of the batch, the cache or the weights for decode or insert.

    Such a file is meant for serving.
    """
    for mode in ("decode", "insert"):
        if any(
            axis in subject.tables.get(("modes", mode), {}) for axis in _SERVING
        ) or subject.tables.get(("modes", mode, "params")):
            return True
    return False
