"""One table for every implementation: on each cell it equals the oracle, or `supports` says why not. No third outcome.

A cell is an implementation × a case × a dtype × a mesh × an axis type. A new implementation is one `Row` in `ROWS`, whose
`refuses` repeats in the test's words what its `supports` refuses: refusing more fails, refusing less is compared.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
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
# Optimising a program on a CPU takes five times as long as all the rest, and each of these runs once. In one piece it is
# compiled with less work; older JAX has a way to generate code that takes half the time again.
QUICK: dict[str, bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    **({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}),
}
FORWARD, BACKWARD, RELATIVE = 2e-6, 1e-5, 5e-3
OUTPUTS = ("o", "lse")


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
    stored: str | None = None  # dtype of quantised k and v

    @functools.cache  # noqa: B019  a case lives as long as the tests
    def values(self, dtype: str) -> dict[str, np.ndarray]:
        """q, k, v and the arrays, of this case and of no other. NumPy's: JAX would compile a program for each."""
        random = np.random.default_rng(len(self.name))
        b, t, s, h = self.batch, self.q_length, self.kv_length, self.heads
        shapes = {"q": (b, t, h, self.head_dim), "k": (b, s, self.kv_heads, self.head_dim), "v": (b, s, self.kv_heads, self.v_dim)}
        made = {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
        if self.options.get("layout") == "BHTD":
            made = {name: np.swapaxes(x, 1, 2) for name, x in made.items()}
        # A permutation that puts neighbours far apart, as a balanced ring does, and then some.
        shuffled = np.arange(s, dtype=np.int32).reshape(6, -1)[[0, 5, 1, 4, 2, 3]].reshape(-1)
        rows = np.arange(s, dtype=np.int32)
        known: dict[str, Callable[[], np.ndarray]] = {
            "segment_ids": lambda: np.sort(random.integers(0, 3, (b, t), np.int32)),
            "kv_segment_ids": lambda: np.sort(random.integers(0, 3, (b, s), np.int32)),
            "lengths": lambda: np.resize(np.array([s - 3, s, 5, 9 if self.mode == "decode" else 0], np.int32), (b,)),
            "positions": lambda: s - t + rows[:t] if self.mode == "decode" else shuffled,
            "kv_positions": lambda: np.where(rows % 5 == 3, -1, (rows + 7) % s) if self.mode == "decode" else shuffled,
            "mask": lambda: random.random((b, 1, t, s)) < 0.7,
            "row_mask": lambda: random.random((b, 1, 1, s)) < 0.7,
            "bias": lambda: random.standard_normal((1, h, t, s), np.float32),
            "row_bias": lambda: random.standard_normal((b, 1, 1, s), np.float32),
            "sinks": lambda: random.standard_normal(h, np.float32),
            "dropout_key": lambda: np.uint32(5),
        }
        if self.stored is not None:
            made |= {key: x for name in ("k", "v") for key, x in quantised(name, made[name], self.stored).items()}
        return made | {name.removeprefix("row_"): known[name]() for name in self.arrays}

    def weights(self) -> np.ndarray:
        """What the elements of the output count in the loss."""
        weights = np.random.default_rng(1).standard_normal((self.batch, self.q_length, self.heads, self.v_dim), np.float32)
        return np.swapaxes(weights, 1, 2) if self.options.get("layout") == "BHTD" else weights


def quantised(name: str, x: np.ndarray, dtype: str) -> dict[str, np.ndarray]:
    """Keys or values in a dtype of 8 bits, and their scales; whatever these are, they are to be multiplied."""
    scale = np.abs(x.astype(np.float32)).max(axis=-1) / 100
    return {name: np.round(x.astype(np.float32) / scale[..., None]).astype(dtype), f"{name}_scale": scale}


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
    Case(name="decode int8", mode="decode", q_length=1, stored="int8", options={"causal": True}, arrays=("lengths",)),
    Case(
        name="decode float8, drafts, bhtd",
        mode="decode",
        q_length=3,
        stored="float8_e4m3fn",
        options={"causal": True, "window": (8, None), "softcap": 2.0, "layout": "BHTD", "return_lse": True},
        arrays=("lengths", "sinks", "bias"),
    ),
    Case(
        name="decode float8_e5m2, one kv head", mode="decode", q_length=1, kv_heads=1, stored="float8_e5m2", arrays=("lengths", "row_mask")
    ),
    Case(name="prefill int8", mode="prefill", stored="int8", v_dim=12, options={"causal": True}, arrays=("segment_ids",)),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What an implementation refuses, said once more and independently of its `supports`.

    Attributes:
      refuses: of a call, whether it must be refused.
      forward: tolerance of values in float32.
      backward: tolerance of gradients in float32.
      relative: tolerance in bfloat16, of the norm of the error.
    """

    refuses: Callable[[AttentionCall], bool]
    forward: float = FORWARD
    backward: float = BACKWARD
    relative: float = RELATIVE


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


def scales(call: AttentionCall) -> bool:
    return call.kv_dtype is not None


ROWS: dict[str, Row] = {
    "vanilla": Row(refuses=explicit),
    "blockwise": Row(refuses=sharded_length),
    "ring": Row(refuses=lambda call: apart(call) or scales(call)),
    "ulysses": Row(refuses=lambda call: apart(call) or too_few_heads(call) or scales(call)),
    "allgather_kv": Row(refuses=lambda call: apart(call) or scales(call)),
    "flash_decode": Row(refuses=both_sharded),
    "sdpa": Row(refuses=lambda call: sharded_length(call) or not_in_jax(call) or scales(call)),
    "cudnn": Row(refuses=lambda call: True),  # no GPU here; tests/attention/test_sdpa.py
    # Its gradients of a kv head that several shards read are rounded before they are summed.
    "splash": Row(refuses=lambda call: sharded_length(call) or not_in_splash(call) or scales(call), relative=6e-3),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    implementation: str
    case: Case
    dtype: str
    mesh: str
    axis_types: str
    mode: str

    def __str__(self) -> str:
        mode = f"-{self.mode}" if self.mode != self.case.mode else ""
        return f"{self.implementation}-{self.case.name}-{self.dtype}-{self.mesh}-{self.axis_types}{mode}"


COMBINATIONS = tuple((dtype, axis_types) for dtype in DTYPES for axis_types in AXIS_TYPES)


def cells() -> Iterator[tuple[Cell, bool]]:
    """Cells that are tests of their own, and whether each belongs to the few that run by default.

    Every case stands on every mesh twice: in float32 on Auto axes, and in one of the other three combinations, which go
    round. By default a case runs once in every fourth implementation, on a mesh and in a combination that go round too.
    Implementations come last, so that those of which the programs are the same follow each other.
    """
    for number, case in enumerate(CASES):
        for at, mesh in enumerate(MESHES):
            for which, (dtype, axis_types) in enumerate((COMBINATIONS[0], COMBINATIONS[1 + (number + at) % 3])):
                for mine, name in enumerate(ROWS):
                    cell = Cell(implementation=name, case=case, dtype=dtype, mesh=mesh, axis_types=axis_types, mode=case.mode)
                    yield cell, number % 4 == mine % 4 and at == (number * 3 + mine) % len(MESHES) and which == (number // 2 + mine) % 2


def product(case: Case, mesh: str) -> Iterator[Cell]:
    """Every cell of a case on a mesh: all dtypes, axis types, modes in which it makes sense, and implementations."""
    for dtype, axis_types in COMBINATIONS:
        for mode in ("train", "prefill") if case.mode == "train" else (case.mode,):
            for name in ROWS:
                yield Cell(implementation=name, case=case, dtype=dtype, mesh=mesh, axis_types=axis_types, mode=mode)


def check(cell: Cell) -> None:
    """Assert that an implementation does on a cell what the oracle does, or says why not where its row says so."""
    case, row = cell.case, ROWS[cell.implementation]
    values = case.values(cell.dtype)
    mesh = cpu_mesh(MESHES[cell.mesh], axis_types=cell.axis_types)  # type: ignore[arg-type]
    said = {**case.options, "mode": cell.mode, "implementation": cell.implementation}
    with sw.PartitionManager(sw.Strategy.loads(STRATEGY), mesh=mesh):
        choice = explain(**values, **said)
        refused = [reason for refusal in choice.refusals for reason in refusal.reasons]
        assert bool(refused) == row.refuses(choice.call), f"{cell}: {refused or 'not refused'}"
        assert all(reason and "\n" not in reason for reason in refused)
        if refused:
            return
        attend = functools.partial(dot_product_attention, **said)
        found = _found(_program(attend, case, cell.dtype, values, mesh=cell.mesh, gradients=cell.mode == "train"))
    wanted = _wanted(case, cell.dtype)
    assert set(found) == {name for name in wanted if cell.mode == "train" or name in OUTPUTS}
    for name in sorted(found, key=lambda name: (name not in OUTPUTS, name)):
        _compare(f"{cell}: {name}", found[name], wanted[name], row, cell.dtype)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """A lowered program and what it gets.

    Two with the same text do the same, and the second is not compiled: where no length is sharded, several implementations are one.
    """

    text: bytes
    inputs: tuple[str, str]
    mesh: str
    lowered: Any = dataclasses.field(compare=False)
    given: Any = dataclasses.field(compare=False)


def _program(attend: Callable[..., Any], case: Case, dtype: str, values: dict[str, np.ndarray], *, mesh: str, gradients: bool) -> _Program:
    """Lower outputs by name and, if asked, the gradient of a loss that weighs each of them by each float input."""
    floats = {name: x for name, x in values.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    rest = {name: x for name, x in values.items() if name not in floats}

    def outputs(floats: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
        found = attend(**floats, **rest)
        return {"o": found} if isinstance(found, jax.Array) else {"o": found.o, "lse": found.lse}

    def loss(floats: dict[str, Any], rest: dict[str, Any], weights: Any) -> Any:
        found = outputs(floats, rest)
        weighed = jnp.sum(found["o"].astype(jnp.float32) * weights)
        if "lse" in found:
            weighed += jnp.sum(jnp.where(jnp.isneginf(found["lse"]), 0.0, jnp.sin(found["lse"])))
        return weighed, found

    def everything(floats: dict[str, Any], rest: dict[str, Any], weights: Any) -> dict[str, Any]:
        (_, found), grads = jax.value_and_grad(loss, has_aux=True)(floats, rest, weights)
        return {**found, **{f"d{name}": grad for name, grad in grads.items()}}

    given = (floats, rest, case.weights()) if gradients else (floats, rest)
    lowered = jax.jit(everything if gradients else outputs).lower(*given)
    text = hashlib.sha256(lowered.as_text().encode()).digest()
    return _Program(text=text, inputs=(case.name, dtype), mesh=mesh, lowered=lowered, given=given)


@functools.lru_cache(maxsize=32)
def _found(program: _Program) -> dict[str, np.ndarray]:
    found = program.lowered.compile(compiler_options=QUICK)(*program.given)
    return {name: np.asarray(x, np.float32) for name, x in found.items()}


@functools.cache
def _wanted(case: Case, dtype: str) -> dict[str, np.ndarray]:
    """What the oracle finds, unsharded, in float32, of the inputs as they are in their dtype."""
    values = {name: x.astype(np.float32) if name in ("q", "k", "v") else x for name, x in case.values(dtype).items()}
    if case.stored is not None:
        values |= {name: values[name] * values.pop(f"{name}_scale")[..., None] for name in ("k", "v")}

    def attend(q: Any, k: Any, v: Any, **rest: Any) -> Any:
        options = make_options({**rest, **case.options, "mode": case.mode})
        call, mask = describe(q, k, v, options=options)
        found = vanilla.attend(make_operands(q, k, v, options=options, call=call, mask=mask), call.recipe)
        o = jnp.swapaxes(found.o, 1, 2) if call.layout == "BHTD" else found.o
        return dataclasses.replace(found, o=o) if call.return_lse else o

    return _found(_program(attend, case, dtype, values, mesh="", gradients=case.mode == "train"))


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
        tolerance, error = row.relative, np.linalg.norm(found - want) / max(float(np.linalg.norm(want)), 1e-6)
    assert error <= tolerance, f"{what}: {error:.2e} is more than {tolerance:.0e}"
