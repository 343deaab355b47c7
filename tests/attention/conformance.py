"""One table for every implementation: on each cell it equals the oracle, or `supports` says why not. No third outcome.

A cell is an implementation × a case × a dtype × a mesh × an axis type. A new implementation is one `Row` in `ROWS`, whose
`refuses` repeats in the test's words what its `supports` refuses: refusing more fails, refusing less is compared.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardwright as sw
from shardwright.attention import vanilla
from shardwright.attention.api import dot_product_attention, explain
from shardwright.attention.arguments import describe, make_operands, make_options
from shardwright.attention.call import AttentionCall
from shardwright.testing.meshes import cpu_mesh

STRATEGY = """
[rules]
batch = "dp"
query_length = "sp"
kv_length = "sp"
head = "tp"
kv_head = "tp | -"
[modes.decode]
query_length = "-"
"""
# Name -> mesh. The fourth has more tensor shards than kv heads, the sixth an odd number of sequence shards.
MESHES = {
    "one": "dp:1",
    "dp": "dp:4",
    "tp": "tp:2",
    "tp > kv heads": "tp:4",
    "sp": "sp:4",
    "odd sp": "sp:3",
    "all": "dp:2,sp:2,tp:2",
}
DTYPES = ("float32", "bfloat16")
AXIS_TYPES = ("auto", "explicit")
# Optimising a program on a CPU takes five times as long as all the rest, and each of these runs once.
QUICK = {"xla_backend_optimization_level": 0}
FORWARD, BACKWARD, RELATIVE = 2e-6, 1e-5, 5e-3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One call: sizes, static options, and which arrays it has."""

    name: str
    mode: str = "train"
    batch: int = 4
    q_length: int = 24
    kv_length: int = 24
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    v_dim: int = 8
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    arrays: tuple[str, ...] = ()

    def values(self, dtype: str) -> dict[str, jax.Array]:
        """q, k, v and the arrays, of this case and of no other."""
        keys = iter(jax.random.split(jax.random.key(len(self.name)), 12))
        b, t, s, h = self.batch, self.q_length, self.kv_length, self.heads
        order = (lambda x: jnp.swapaxes(x, 1, 2)) if self.options.get("layout") == "BHTD" else (lambda x: x)
        made = {
            "q": order(jax.random.normal(next(keys), (b, t, h, self.head_dim))),
            "k": order(jax.random.normal(next(keys), (b, s, self.kv_heads, self.head_dim))),
            "v": order(jax.random.normal(next(keys), (b, s, self.kv_heads, self.v_dim))),
        }
        made = {name: x.astype(dtype) for name, x in made.items()}
        # A permutation that puts neighbours far apart, as a balanced ring does, and then some.
        shuffled = jnp.arange(s).reshape(6, -1)[jnp.array([0, 5, 1, 4, 2, 3])].reshape(-1)
        slots = jnp.where(jnp.arange(s) % 5 == 3, -1, (jnp.arange(s) + 7) % s)
        known: dict[str, Callable[[], jax.Array]] = {
            "segment_ids": lambda: jnp.sort(jax.random.randint(next(keys), (b, t), 0, 3)),
            "kv_segment_ids": lambda: jnp.sort(jax.random.randint(next(keys), (b, s), 0, 3)),
            "lengths": lambda: jnp.resize(jnp.array([s - 3, s, 5, 0 if self.mode == "train" else 9], jnp.int32), (b,)),
            "positions": lambda: shuffled if self.mode == "train" else s - t + jnp.arange(t),
            "kv_positions": lambda: shuffled if self.mode == "train" else slots,
            "mask": lambda: jax.random.bernoulli(next(keys), 0.7, (b, 1, t, s)),
            "row_mask": lambda: jax.random.bernoulli(next(keys), 0.7, (b, 1, 1, s)),
            "bias": lambda: jax.random.normal(next(keys), (1, h, t, s)),
            "row_bias": lambda: jax.random.normal(next(keys), (b, 1, 1, s)),
            "sinks": lambda: jax.random.normal(next(keys), (h,)),
            "dropout_key": lambda: jnp.uint32(5),
        }
        return made | {name.removeprefix("row_"): known[name]() for name in self.arrays}


CASES = (
    Case(name="full"),
    Case(name="causal", options={"causal": True}),
    Case(name="bhtd", options={"causal": True, "layout": "BHTD"}),
    Case(name="window capped", options={"causal": True, "window": (5, None), "softcap": 2.0}),
    Case(name="window both sides", options={"window": (7, 3), "scale": 0.5}),
    Case(name="chunks", options={"causal": True, "chunk": 7}),
    Case(name="packed", options={"causal": True}, arrays=("segment_ids",)),
    Case(name="lengths", arrays=("lengths",)),
    Case(name="permuted", options={"causal": True}, arrays=("positions", "kv_positions")),
    Case(name="permuted, packed, window", options={"causal": True, "window": (9, 0)}, arrays=("positions", "kv_positions", "segment_ids")),
    Case(name="bias", options={"causal": True}, arrays=("bias",)),
    Case(name="broadcast bias and mask", arrays=("row_bias", "row_mask")),
    Case(name="dense mask", arrays=("mask",)),
    Case(name="sinks", options={"causal": True}, arrays=("sinks",)),
    Case(name="dropped", options={"causal": True, "dropout": 0.3}, arrays=("dropout_key",)),
    Case(name="logsumexp", options={"causal": True, "return_lse": True}, arrays=("sinks", "lengths")),
    Case(name="as many kv heads", kv_heads=4, options={"causal": True}),
    Case(name="one kv head", kv_heads=1, options={"causal": True}),
    Case(name="wider values", v_dim=12, options={"causal": True}),
    Case(name="cross", kv_length=48, arrays=("segment_ids", "kv_segment_ids")),
    Case(name="fewer queries", q_length=12, options={"causal": True}),
    Case(
        name="everything",
        options={"causal": True, "window": (11, 0), "softcap": 3.0, "dropout": 0.2, "return_lse": True},
        arrays=("segment_ids", "lengths", "mask", "bias", "sinks", "dropout_key"),
    ),
    Case(name="prefill", mode="prefill", options={"causal": True}),
    Case(name="prefill packed", mode="prefill", options={"causal": True}, arrays=("segment_ids", "lengths")),
    Case(name="decode", mode="decode", q_length=1, options={"causal": True}, arrays=("lengths",)),
    Case(name="decode drafts", mode="decode", q_length=3, options={"causal": True, "window": (8, None)}, arrays=("lengths", "sinks")),
    Case(
        name="decode slots", mode="decode", q_length=1, options={"causal": True, "return_lse": True}, arrays=("positions", "kv_positions")
    ),
    Case(name="decode one kv head", mode="decode", q_length=1, kv_heads=1, options={"softcap": 2.0}, arrays=("lengths", "row_bias")),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What an implementation refuses, said once more and independently of its `supports`.

    Attributes:
      refuses: of a call, whether it must be refused.
      forward: tolerance of values in float32.
      backward: tolerance of gradients in float32.
    """

    refuses: Callable[[AttentionCall], bool]
    forward: float = FORWARD
    backward: float = BACKWARD


def sharded_length(call: AttentionCall) -> bool:
    return bool(call.specs.q_length or call.specs.kv_length)


def apart(call: AttentionCall) -> bool:
    return call.specs.q_length != call.specs.kv_length


def too_few_heads(call: AttentionCall) -> bool:
    return bool(call.heads % (call.shards(call.specs.heads) * call.shards(call.specs.q_length)))


def both_sharded(call: AttentionCall) -> bool:
    return bool(set(call.specs.q_length) & set(call.specs.kv_length))


def explicit(call: AttentionCall) -> bool:
    return call.mesh is not None and "Explicit" in str(call.mesh.axis_types) and bool(call.specs.mesh_axes)


def not_in_jax(call: AttentionCall) -> bool:
    recipe = call.recipe
    return recipe.softcap is not None or call.sinks or recipe.dropout > 0 or call.head_dim != call.v_dim or call.return_lse


def not_in_splash(call: AttentionCall) -> bool:
    arrays = call.mask_shape is not None or call.bias_shape is not None or call.q_offset is None
    return arrays or call.recipe.dropout > 0 or call.return_lse


ROWS: dict[str, Row] = {
    "vanilla": Row(refuses=explicit),
    "blockwise": Row(refuses=sharded_length),
    "ring": Row(refuses=apart),
    "ulysses": Row(refuses=lambda call: apart(call) or too_few_heads(call)),
    "allgather_kv": Row(refuses=apart),
    "flash_decode": Row(refuses=both_sharded),
    "sdpa": Row(refuses=lambda call: sharded_length(call) or not_in_jax(call)),
    "cudnn": Row(refuses=lambda call: True),  # no GPU here; tests/attention/test_sdpa.py
    "splash": Row(refuses=lambda call: sharded_length(call) or not_in_splash(call)),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    implementation: str
    case: Case
    dtype: str
    mesh: str
    axis_types: str

    def __str__(self) -> str:
        return f"{self.implementation}-{self.case.name}-{self.dtype}-{self.mesh}-{self.axis_types}"


def cells(implementation: str) -> Iterator[tuple[Cell, bool]]:
    """Cells of an implementation, and whether each belongs to the few that run by default.

    Every case stands on every mesh twice: in float32 on Auto axes, and in one of the other three combinations, which go
    round. By default a case runs once in every fourth implementation, on a mesh and in a combination that go round too.
    """
    meshes = list(MESHES)
    others = [(dtype, axis_types) for dtype in DTYPES for axis_types in AXIS_TYPES][1:]
    mine = list(ROWS).index(implementation)
    for number, case in enumerate(CASES):
        for at, mesh in enumerate(meshes):
            for which, (dtype, axis_types) in enumerate((("float32", "auto"), others[(number + at) % 3])):
                cell = Cell(implementation=implementation, case=case, dtype=dtype, mesh=mesh, axis_types=axis_types)
                yield cell, number % 4 == mine % 4 and at == (number * 3 + mine) % len(meshes) and which == (number // 2 + mine) % 2


def check(cell: Cell) -> None:
    """Assert that an implementation does on a cell what the oracle does, or says why not where its row says so."""
    case, row = cell.case, ROWS[cell.implementation]
    values = case.values(cell.dtype)
    arrays = {name: values[name] for name in ("q", "k", "v")}
    rest = {name: x for name, x in values.items() if name not in arrays}
    mesh = cpu_mesh(MESHES[cell.mesh], axis_types=cell.axis_types)  # type: ignore[arg-type]
    manager = sw.PartitionManager(sw.Strategy.loads(STRATEGY), mesh=mesh)
    with manager:
        choice = explain(**arrays, **rest, **case.options, mode=case.mode, implementation=cell.implementation)
        refused = [reason for refusal in choice.refusals for reason in refusal.reasons]
        assert bool(refused) == row.refuses(choice.call), f"{cell}: {refused or 'not refused'}"
        assert all(reason and "\n" not in reason for reason in refused)
        if refused:
            return

        def attend(floats: dict[str, Any]) -> Any:
            return dot_product_attention(**{**arrays, **rest, **floats}, **case.options, mode=case.mode, implementation=cell.implementation)

        found = _run(attend, _floats(values), gradients=case.mode == "train")
    wanted = _wanted(case, cell.dtype)
    for name, want in wanted.items():
        _compare(f"{cell}: {name}", np.asarray(found[name], np.float32), want, row, cell.dtype)


def _floats(values: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in values.items() if jnp.issubdtype(x.dtype, jnp.floating)}


def _run(attend: Callable[[dict[str, Any]], Any], floats: dict[str, Any], *, gradients: bool) -> dict[str, Any]:
    """Outputs by name, and the gradient of a loss that weighs each of them by each float input."""

    def outputs(floats: dict[str, Any]) -> dict[str, Any]:
        found = attend(floats)
        return {"o": found} if isinstance(found, jax.Array) else {"o": found.o, "lse": found.lse}

    def loss(floats: dict[str, Any]) -> Any:
        found = outputs(floats)
        weighed = [jnp.sum(x.astype(jnp.float32) * _weights(x.shape)) for x in (found["o"],)]
        if "lse" in found:
            weighed.append(jnp.sum(jnp.where(jnp.isneginf(found["lse"]), 0.0, jnp.sin(found["lse"]))))
        return sum(weighed), found

    if not gradients:
        return dict(jax.jit(outputs, compiler_options=QUICK)(floats))
    (_, found), grads = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)(floats)
    return {**found, **{f"d{name}": grad for name, grad in grads.items()}}


def _weights(shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape)


@functools.cache
def _wanted(case: Case, dtype: str) -> dict[str, np.ndarray]:
    """What the oracle finds, unsharded, in float32, of the inputs as they are in their dtype."""
    values = case.values(dtype)
    values = {name: x.astype(jnp.float32) if name in ("q", "k", "v") else x for name, x in values.items()}

    def attend(floats: dict[str, Any]) -> Any:
        given = {**values, **floats}
        q, k, v = (given.pop(name) for name in ("q", "k", "v"))
        options = make_options({**given, **case.options, "mode": case.mode})
        call, mask = describe(q, k, v, options=options)
        found = vanilla.attend(make_operands(q, k, v, options=options, call=call, mask=mask), call.recipe)
        o = jnp.swapaxes(found.o, 1, 2) if call.layout == "BHTD" else found.o
        return dataclasses.replace(found, o=o) if call.return_lse else o

    found = _run(attend, _floats(values), gradients=case.mode == "train")
    return {name: np.asarray(x, np.float32) for name, x in found.items()}


def _compare(what: str, found: np.ndarray, want: np.ndarray, row: Row, dtype: str) -> None:
    assert found.shape == want.shape, what
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(want), err_msg=what)
    found, want = (np.where(np.isneginf(want), 0.0, x) for x in (found, want))
    assert np.isfinite(found).all(), what
    gradient = what.rpartition(" ")[2].startswith("d")
    if not gradient:  # a row without keys
        np.testing.assert_array_equal(found[want == 0.0], 0.0, err_msg=what)
    if dtype == "float32":
        tolerance = row.backward if gradient else row.forward
        error = np.abs(found - want).max() / max(1.0, np.abs(want).max())
    else:
        tolerance, error = RELATIVE, np.linalg.norm(found - want) / max(float(np.linalg.norm(want)), 1e-6)
    assert error <= tolerance, f"{what}: {error:.2e} is more than {tolerance:.0e}"
