"""`shard_map` and its collectives. A sharded dim has two factors: (shards, local part)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from shardwright import _jax
from shardwright.inference.atoms import Atom, AtomDim, finest, new_dim, size_of
from shardwright.inference.step import ArrayFacts, InferenceStep


def shard_map(step: InferenceStep) -> list[ArrayFacts]:
    """Walk the body with local dims.

    In the results, a sharded dim is two factors: first the number of its shards, then the local
    dim.
    """
    parameters = step.parameters
    manual = _jax.newly_manual_axes(parameters)
    sizes = {name: size for name, size in parameters["mesh"].shape.items() if name in manual}
    local, sharded = [], []
    for value, spec in zip(step.values, parameters["in_specs"], strict=True):
        dims = []
        for dim, shards in zip(value.dims, _shards(spec, len(value.dims), sizes), strict=True):
            dims.append(_local(dim, shards))
            # `_local` may have split the dim. The factors of the dim before the local part count
            # its shards.
            major = tuple(finest(dim)[: len(finest(dim)) - len(dims[-1])])
            if major and dims[-1]:
                sharded.append((major, dims[-1]))
        local.append(dataclasses.replace(value, dims=tuple(dims), one_hot=None))
    body = getattr(parameters["jaxpr"], "jaxpr", parameters["jaxpr"])
    results = step.walk(body, local)
    # If the local parts of two operands are one dim in the body, their whole dims are one dim
    # outside. So the factors that count their shards are the same too.
    for (major, part), (other_major, other_part) in itertools.combinations(sharded, 2):
        if finest(part) == finest(other_part):
            step.same(major, other_major)
    step.facts.shards.extend(sharded)
    whole = []
    for value, spec in zip(results, parameters["out_specs"], strict=True):
        counts = _shards(spec, len(value.dims), sizes)
        dims = [
            _known_whole(dim, shards, sharded) or _whole(dim, shards)
            for dim, shards in zip(value.dims, counts, strict=True)
        ]
        whole.append(dataclasses.replace(value, dims=tuple(dims), one_hot=None))
    return whole


def _shards(spec: Any, rank: int, sizes: Mapping[str, int]) -> list[int]:
    """Return the number of shards of each dim."""
    entries = [*spec, *(None,) * (rank - len(spec))]
    names = [(entry,) if isinstance(entry, str) else entry or () for entry in entries]
    return [math.prod([sizes.get(name, 1) for name in axes]) for axes in names]


def _local(dim: AtomDim, shards: int) -> AtomDim:
    """Return the part of a dim that each shard has. Split a factor of the dim if necessary."""
    factors = finest(dim)
    while shards > 1 and factors:
        first = factors[0]
        if shards % first.size == 0:
            # This whole factor counts shards. A part of the next factor may also count shards.
            first.is_shards = True
            shards //= first.size
            factors = factors[1:]
        elif first.size % shards:
            break
        else:
            first.split(shards, keep_name=True)
            factors = finest(factors)
    return tuple(factors)


def _known_whole(dim: AtomDim, shards: int, sharded: Iterable[tuple[AtomDim, AtomDim]]) -> AtomDim:
    """Return the whole dim whose local part is `dim`, or nothing if no operand has this part."""
    for major, part in sharded:
        if finest(part) == finest(dim) and size_of(finest(major)) == shards:
            return (*major, *part)
    return ()


def _whole(dim: AtomDim, shards: int) -> AtomDim:
    if shards == 1:
        return dim
    return (Atom(shards, is_shards=True), *dim)


def collective(step: InferenceStep) -> list[ArrayFacts]:
    """Return the operands, because sums over shards and permutations of shards keep all dims."""
    # Clear `one_hot`: a row in a shard may lack the 1, and a row of a sum may have several 1s.
    return [dataclasses.replace(value, one_hot=None) for value in step.values]


def resized(step: InferenceStep) -> list[ArrayFacts]:
    """Follow collectives that change sizes. A dim that grows gets a factor of shards in front."""
    results = []
    pairs = zip(step.values, step.operand_shapes, step.shapes, strict=True)
    for value, old_shape, new_shape in pairs:
        # all_gather and all_to_all without tiled=True add or drop a dim.
        if len(old_shape) != len(new_shape):
            return step.new_results()
        dims = [
            _resized(dim, old, new)
            for dim, old, new in zip(value.dims, old_shape, new_shape, strict=True)
        ]
        results.append(dataclasses.replace(value, dims=tuple(dims), one_hot=None))
    return results


def _resized(dim: AtomDim, old: int, new: int) -> AtomDim:
    if new >= old:
        return _whole(dim, new // old) if new % old == 0 else new_dim(new)
    return _local(dim, old // new) if old % new == 0 else new_dim(new)
