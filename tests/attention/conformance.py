"""The row of every shipped implementation in the conformance table, and the cells that are tests.

A new implementation is one `Row` in `ROWS`. Its `refuses` repeats independently what its `supports`
refuses: refusing more fails, and refusing less is compared with the oracle.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator

from shardwright.attention.call import AttentionCall
from shardwright.testing import attention_conformance
from shardwright.testing.attention_cases import CASES, MESHES
from shardwright.testing.attention_cases import STRATEGY as STRATEGY
from shardwright.testing.attention_cases import Case as Case
from shardwright.testing.attention_conformance import QUICK as QUICK
from shardwright.testing.attention_conformance import Cell, Tolerances, product

USUAL = Tolerances()
# Dtypes and axis types; the dtype changes each time.
COMBINATIONS = (
    ("float32", "auto"),
    ("bfloat16", "explicit"),
    ("float32", "explicit"),
    ("bfloat16", "auto"),
)


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


def not_in_triton(call: AttentionCall) -> bool:
    return (
        call.dtype == "float32"
        or call.q_length * call.heads // call.kv_heads > 64
        or call.segments
        or call.mask_shape is not None
        or call.bias_shape is not None
        or call.recipe.dropout > 0
    )


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
    "triton_decode": Row(refuses=lambda call: sharded_length(call) or not_in_triton(call)),
}


GROUPS = ("shapes", "tokens", "biases", "prefill", "decode")
# Variants of other cases, which only test-full has.
VARIANTS = {
    "hidden by a bias for all queries",
    "hidden by a bias, causal, sinks",
    "large biases and sinks, causal",
    "large logits 64",
    "large logits 80",
    "prefill hidden by a bias",
    "decode hidden by a bias",
    "decode hidden by a bias for all queries, sinks",
    "decode large biases",
}
# The cells of `make test`: every other case on one mesh by one of the first four implementations,
# and a few by each of the others.
QUICK_CELLS: dict[str, tuple[str, ...]] = {
    "vanilla": (
        "full-float32-one-auto",
        "window both sides-float32-odd sp-auto",
        "permuted-float32-tp > kv heads-auto",
        "dense mask-float32-dp-auto",
        "as many kv heads-float32-all-auto",
        "fewer queries-float32-sp-auto",
        "decode-float32-tp-auto",
        "decode int8-float32-one-auto",
        "hidden by a bias-float32-odd sp-auto",
        "hidden by a bias, everything-float32-tp > kv heads-auto",
    ),
    "blockwise": (
        "causal-bfloat16-sp-explicit",
        "chunks-bfloat16-tp-auto",
        "permuted, packed, window-float32-one-explicit",
        "sinks-float32-odd sp-explicit",
        "one kv head-bfloat16-tp > kv heads-explicit",
        "everything-bfloat16-dp-auto",
        "decode drafts-bfloat16-all-auto",
        "decode float8, drafts, bhtd-float32-sp-explicit",
        "large biases-bfloat16-one-auto",
        "large logits 128-float32-tp > kv heads-explicit",
    ),
    "ring": (
        "bhtd-float32-dp-explicit",
        "packed-float32-all-explicit",
        "bias-bfloat16-sp-explicit",
        "dropped-bfloat16-tp-auto",
        "wider values-float32-one-explicit",
        "prefill-float32-odd sp-explicit",
        "decode slots-bfloat16-tp > kv heads-explicit",
        "decode float8_e5m2, one kv head-bfloat16-dp-auto",
        "hidden by a bias in bfloat16, bhtd-bfloat16-all-auto",
    ),
    "ulysses": (
        "window capped-float32-odd sp-auto",
        "lengths-float32-tp > kv heads-auto",
        "broadcast bias and mask-float32-dp-auto",
        "logsumexp-float32-all-auto",
        "cross-float32-sp-auto",
        "prefill packed-float32-tp-auto",
        "decode one kv head-float32-one-auto",
        "prefill int8-float32-odd sp-auto",
    ),
    "allgather_kv": (
        "window both sides-float32-tp-auto",
        "hidden by a bias, everything-float32-one-auto",
    ),
    "flash_decode": ("everything-bfloat16-odd sp-explicit",),
    "sdpa": (
        "packed-float32-tp > kv heads-explicit",
        "prefill-float32-tp-explicit",
        "large biases and sinks, causal-float32-dp-explicit",
    ),
    "cudnn": (
        "lengths-float32-one-auto",
        "prefill packed-float32-all-auto",
        "decode hidden by a bias-float32-odd sp-auto",
    ),
    "splash": (
        "permuted-float32-sp-auto",
        "decode-float32-tp > kv heads-auto",
        "decode hidden by a bias for all queries, sinks-float32-tp-auto",
    ),
    "triton_decode": (
        "decode slots-bfloat16-tp > kv heads-explicit",
        "decode drafts-bfloat16-one-auto",
        "decode int8-bfloat16-one-auto",
    ),
}


def check(cell: Cell) -> None:
    """Assert that an implementation equals the oracle on a cell, or refuses it as its row says."""
    row = ROWS[cell.implementation]
    attention_conformance.check(cell, refuses=row.refuses, tolerances=row.tolerances)


def group_of(case: Case) -> str:
    """The group of a case in the ids of tests."""
    if case.mode != "train":
        return case.mode
    biases = {"bias", "row_bias", "mask", "hiding_bias", "hiding_row_bias", "large_bias"}
    if biases & set(case.arrays) or "bfloat16_hiding_bias" in case.arrays:
        return "biases"
    return "tokens" if case.arrays else "shapes"


def cells(group: str, mesh: str) -> Iterator[Cell]:
    """Yield the cells of a group of cases on a mesh.

    Each case has every other implementation, and the others on the next mesh. Dtypes and axis types
    take turns, so each two values of two parameters meet. Implementations come last: those with
    equal programs compile one if they follow each other.
    """
    at = list(MESHES).index(mesh)
    for number, case in enumerate(CASES):
        dtype, axis_types = COMBINATIONS[(number // 2 + at // 2) % 4]
        for name in list(ROWS)[(number + at) % 2 :: 2] if group_of(case) == group else ():
            yield Cell(
                implementation=name,
                case=case,
                dtype=dtype,
                mesh=mesh,
                axis_types=axis_types,
                mode=case.mode,
            )


def quick_cells(name: str) -> list[Cell]:
    """Return the cells of an implementation that are in `make test`."""
    named = {f"{name}-{cell}" for cell in QUICK_CELLS[name]}
    found = [
        cell
        for case, mesh in itertools.product(CASES, MESHES)
        for cell in product(case, mesh, (name,))
        if str(cell) in named
    ]
    assert len(found) == len(named), named - set(map(str, found))
    return found


def failures(chosen: Iterable[Cell]) -> list[str]:
    """Check each cell, and return what is wrong with any of them."""
    found = []
    for cell in chosen:
        try:
            check(cell)
        except (AssertionError, RuntimeError, TypeError, ValueError) as err:
            found.append(f"{cell}: {type(err).__name__}: {err}")
    return found
