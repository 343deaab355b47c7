"""Check that processes pass equal host data, or parts of equal shape for a global array."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardwright import _jax
from shardwright.errors import StrategyError
from shardwright.processes.compare import (
    PATIENCE_S,
    Fact,
    ProcessGroup,
    array_text,
    compare,
    digest_of,
    processes_text,
)
from shardwright.resolution.partition_specs import spec_text
from shardwright.trees import paths
from shardwright.vocabulary.axes import axis_label

_BYTES_OF_DIGEST: Final = 8


def compare_data(group: ProcessGroup, values: Any, what: str = "shard") -> None:
    """Compare the NumPy arrays, numbers and uncommitted arrays of a tree between processes.

    `what` is the call that places these leaves, for messages.

    Raises:
      AgreementError: Leaves differ in shape, dtype or values, or a process did not make the call.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(values)
    facts = {
        paths.path_text(path) or "the array": Fact(_data_text(leaf))
        for path, leaf in leaves
        if _is_host_data(leaf)
    }
    if facts:
        # The topic depends on the paths, so that threads may place different trees at the same
        # time.
        topic = f"data/{digest_of(' '.join([what, *facts]))[:16]}"
        fix = (
            "pass the same values in every process, or join each process's part with "
            "pm.global_array"
        )
        detail = f"{what} of {_shortened(list(facts))}"
        compare(group, topic, facts, what=what, fix=fix, patience=PATIENCE_S, detail=detail)


def compare_parts(
    group: ProcessGroup, annotation: Any, local: Any, global_shape: Sequence[int] | None
) -> None:
    """Compare the shapes and dtypes of the processes' parts of a global array.

    Raises:
      AgreementError: The parts differ, or a process did not make the call.
    """
    facts = {"the local array": Fact(array_text(local))}
    if global_shape is not None:
        is_shape = isinstance(global_shape, Sequence)
        facts["global_shape"] = Fact(str(tuple(global_shape) if is_shape else global_shape))
    topic = f"parts/{digest_of(repr(annotation))[:16]}"
    fix = "pass parts of one shape and dtype in every process: pad or drop the last batch"
    what = "pm.global_array"
    entries = annotation if isinstance(annotation, (tuple, list)) else (annotation,)
    names = (axis_label(entry) if isinstance(entry, str) else str(entry) for entry in entries)
    detail = f"{what} of ({', '.join(names)})"
    compare(group, topic, facts, what=what, fix=fix, patience=PATIENCE_S, detail=detail)


def compare_copies(
    group: ProcessGroup, sharding: NamedSharding, local: np.ndarray, shape: Sequence[int]
) -> None:
    """Compare the data of shards that devices of several processes hold.

    Each process cuts these shards from its own part of the global array.

    Raises:
      AgreementError: The data differs, or a process did not make the call.
    """
    call = (sharding, tuple(shape), local.shape, group.rank)
    shared = dict(_shared_shards(*call))
    advice = f"whose devices hold the same shards of {spec_text(sharding.spec)}"
    alternative = "or shard the array over them"
    whole = _given_whole(*call)
    if whole:
        shared = {whole: (("", (slice(None),) * local.ndim),)}
        advice = "since global_shape has the size of the local array"
        alternative = "or leave global_shape out, to join the parts"
    # All processes must make these comparisons in the same order, because each comparison waits for
    # the other processes.
    for ranks in sorted(shared):
        facts = {
            f"the local array at {text}" if text else "the local array": Fact(
                _data_text(local[cut])
            )
            for text, cut in shared[ranks]
        }
        fix = f"pass equal data in {processes_text(ranks)}, {advice}; {alternative}"
        topic = f"copies/{digest_of(' '.join([str(sharding.spec), *facts]))[:16]}"
        pair = ProcessGroup(store=group.store, ranks=ranks)
        compare(pair, topic, facts, what="pm.global_array", fix=fix, patience=PATIENCE_S)


LocalSlices = tuple[slice, ...]
Bounds = tuple[tuple[int, int], ...]


def _holders(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Bounds, set[int]]:
    """Return a map: bounds of a shard -> the processes whose devices hold this shard."""
    holders: dict[Bounds, set[int]] = {}
    indices: dict[Any, Any] = dict(sharding.devices_indices_map(shape))
    for device, index in indices.items():
        bounds = (cut.indices(size) for cut, size in zip(index, shape, strict=True))
        box = tuple((low, high) for low, high, _ in bounds)
        holders.setdefault(box, set()).add(device.process_index)
    return holders


def _sides(holders: dict[Bounds, set[int]], rank: int, dims: int) -> list[list[tuple[int, int]]]:
    """Return the bounds of the shards of a process along each dim, in order."""
    own = [box for box, ranks in holders.items() if rank in ranks]
    return [sorted({box[dim] for box in own}) for dim in range(dims)]


@functools.lru_cache(maxsize=256)
def _given_whole(
    sharding: NamedSharding, shape: tuple[int, ...], local: tuple[int, ...], rank: int
) -> tuple[int, ...]:
    """Return the processes that pass a whole dim although their devices hold only a part of it.

    These processes must pass equal data. The result is empty if this process passes no such dim.
    """
    holders = _holders(sharding, shape)
    sides = _sides(holders, rank, len(shape))
    dims = [
        dim
        for dim, (size, whole) in enumerate(zip(local, shape, strict=True))
        # The process passes the whole dim, and its devices hold a part of it.
        if size == whole and sum(high - low for low, high in sides[dim]) < whole
    ]
    if not dims:
        return ()
    others = [dim for dim in range(len(shape)) if dim not in dims]
    ranks = []
    for other in sorted(set().union(*holders.values())):
        theirs = _sides(holders, other, len(shape))
        if all(theirs[dim] == sides[dim] for dim in others):
            ranks.append(other)
    return tuple(ranks) if len(ranks) > 1 else ()


@functools.lru_cache(maxsize=256)
def _shared_shards(
    sharding: NamedSharding, shape: tuple[int, ...], local: tuple[int, ...], rank: int
) -> dict[tuple[int, ...], tuple[tuple[str, LocalSlices], ...]]:
    """Return the shards of a process that other processes hold too, by the ranks of all holders.

    Each shard is a pair: its place as text, and its slices in the part that this process passes.
    The text is empty if the shard is the whole part. `local` is the shape of this part.
    """
    holders = _holders(sharding, shape)
    sides = _sides(holders, rank, len(shape))
    own = [box for box, ranks in holders.items() if rank in ranks]
    shared: dict[tuple[int, ...], list[tuple[str, LocalSlices]]] = {}
    for box in own:
        if len(holders[box]) > 1:
            # Along each dim, the part that a process passes is the whole dim, or consists of the
            # shards of this process in order, without gaps.
            starts = [
                side[0] if size == whole else known.index(side) * (side[1] - side[0])
                for known, side, size, whole in zip(sides, box, local, shape, strict=True)
            ]
            cut = tuple(
                slice(start, start + high - low)
                for start, (low, high) in zip(starts, box, strict=True)
            )
            text = ", ".join(f"{low}:{high}" for low, high in box) if len(own) > 1 else ""
            shared.setdefault(tuple(sorted(holders[box])), []).append((text, cut))
    return {ranks: tuple(cuts) for ranks, cuts in shared.items()}


def read_local(local: Any) -> Any:
    """Return the part of a global array that this process passes, as an array.

    Raises:
      StrategyError: The part is not an array of numbers.
    """
    if isinstance(local, jax.Array):
        return local
    array = local if isinstance(local, np.ndarray) else np.asarray(local)
    if array.dtype == np.bool_ or jnp.issubdtype(array.dtype, jnp.number):
        return array
    raise StrategyError(
        f"the local array is {type(local).__name__}, with the dtype {array.dtype}",
        fix="pass an array of numbers",
    )


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _is_host_data(leaf: Any) -> bool:
    """Tell whether JAX reads a leaf from the memory of each process, and not from devices."""
    if isinstance(leaf, jax.core.Tracer) or not _jax.is_array(leaf):
        return False
    if not isinstance(leaf, jax.Array):
        return True
    return not leaf.committed and leaf.is_fully_addressable


def _data_text(leaf: Any) -> str:
    """Return dtype, shape and a digest of the values."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return f"{array_text(leaf)} with values {_digits(jax.random.key_data(leaf))}"
    return f"{array_text(leaf)} with values {_digits(leaf)}"


def _digits(leaf: Any) -> str:
    array = np.ascontiguousarray(np.asarray(leaf))
    # View the values as bytes, because dtypes such as bfloat16 have no buffer protocol.
    data = array.reshape(-1).view(np.uint8)
    return hashlib.blake2b(data.data, digest_size=_BYTES_OF_DIGEST).hexdigest()
