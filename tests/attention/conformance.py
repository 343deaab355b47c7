"""The row of every shipped implementation in the conformance table, and the cells that are tests.

A new implementation is one `Row` in `ROWS`. Its `refuses` repeats independently what its `supports`
refuses: refusing more fails, and refusing less is compared with the oracle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from shardwright.attention.call import AttentionCall
from shardwright.testing import attention_conformance
from shardwright.testing.attention_cases import CASES, COMBINATIONS, MESHES
from shardwright.testing.attention_cases import STRATEGY as STRATEGY
from shardwright.testing.attention_cases import Case as Case
from shardwright.testing.attention_conformance import QUICK as QUICK
from shardwright.testing.attention_conformance import Cell, Tolerances

USUAL = Tolerances()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What an implementation must refuse, independently of its `supports`, and its largest errors.

    Attributes:
      refuses: Function of a call that tells whether it must be refused.
      tolerances: The largest errors if it is not.
    """

    refuses: Callable[[AttentionCall], bool]
    tolerances: Tolerances = USUAL


def sharded_length(call: AttentionCall) -> bool:
    return bool(call.specs.q_length or call.specs.kv_length)


def apart(call: AttentionCall) -> bool:
    return call.specs.q_length != call.specs.kv_length


def too_few_heads(call: AttentionCall) -> bool:
    return bool(call.heads % (call.shards(call.specs.heads) * call.shards(call.specs.q_length)))


def partly_shared(call: AttentionCall) -> bool:
    """Whether some, but not all, mesh axes of the keys shard the queries too."""
    shared = set(call.specs.q_length) & set(call.specs.kv_length)
    return bool(shared) and shared != set(call.specs.kv_length)


def explicit(call: AttentionCall) -> bool:
    return (
        call.mesh is not None
        and "Explicit" in str(call.mesh.axis_types)
        and bool(call.specs.mesh_axes)
    )


def not_in_jax(call: AttentionCall) -> bool:
    recipe = call.recipe
    return (
        recipe.softcap is not None
        or call.sinks
        or recipe.dropout > 0
        or call.head_dim != call.v_dim
        or call.return_lse
    )


def not_in_splash(call: AttentionCall) -> bool:
    return call.mask_shape is not None or call.bias_shape is not None or call.recipe.dropout > 0


def scales(call: AttentionCall) -> bool:
    return call.kv_dtype is not None


ROWS: dict[str, Row] = {
    "vanilla": Row(refuses=explicit),
    "blockwise": Row(refuses=sharded_length),
    "ring": Row(refuses=lambda call: apart(call) or scales(call)),
    "ulysses": Row(refuses=lambda call: apart(call) or too_few_heads(call) or scales(call)),
    "allgather_kv": Row(refuses=lambda call: apart(call) or scales(call)),
    "flash_decode": Row(refuses=partly_shared),
    "sdpa": Row(refuses=lambda call: sharded_length(call) or not_in_jax(call) or scales(call)),
    "cudnn": Row(refuses=lambda call: True),  # no GPU here; tests/attention/test_sdpa.py
    "splash": Row(refuses=lambda call: sharded_length(call) or not_in_splash(call) or scales(call)),
}


def check(cell: Cell) -> None:
    """Assert that an implementation equals the oracle on a cell, or refuses it as its row says."""
    row = ROWS[cell.implementation]
    attention_conformance.check(cell, refuses=row.refuses, tolerances=row.tolerances)


def cells() -> Iterator[tuple[Cell, str]]:
    """Cells that are tests of their own, each with its marker; "" runs by default.

    Every case is on every mesh twice: in float32 on Auto axes, and in one of the other three
    combinations in turn. By default a case runs once for every fourth implementation; its mesh and
    its combination take turns too. For implementations after the first four, three quarters of
    these cells are in the wide run. Implementations come last, so that those with equal programs
    follow each other.
    """
    for number, case in enumerate(CASES):
        for at, mesh in enumerate(MESHES):
            for which, (dtype, axis_types) in enumerate(
                (COMBINATIONS[0], COMBINATIONS[1 + (number + at) % 3])
            ):
                for mine, name in enumerate(ROWS):
                    cell = Cell(
                        implementation=name,
                        case=case,
                        dtype=dtype,
                        mesh=mesh,
                        axis_types=axis_types,
                        mode=case.mode,
                    )
                    fast = (
                        number % 4 == mine % 4
                        and at == (number * 3 + mine) % len(MESHES)
                        and which == (number // 2 + mine) % 2
                    )
                    wide = mine >= 4 and number % 16 != mine % 16
                    yield cell, marker_of(fast=fast, wide=wide)


def marker_of(*, fast: bool, wide: bool) -> str:
    """The marker of a cell: most are slow, and some of the others wide."""
    if not fast:
        return "slow"
    return "wide" if wide else ""
