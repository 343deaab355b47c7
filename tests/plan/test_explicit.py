"""Plans of programs for Explicit and mixed meshes, equal to their own compiled collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.cli.main import main
from shardwright.errors import ProgramError
from shardwright.plan import Program, verify_plan
from shardwright.plan.search import search
from shardwright.show.search import search_text
from shardwright.testing import cpu_mesh
from tests.plan.against_xla import compiled_bytes, planned_bytes
from tests.raising import raises
from tests.tpu_compile import MARKS

# Nothing runs. On TPUs, each device has whole tiles of these.
BATCH, LENGTH, EMBED, INNER, HEADS, DIM, VOCAB, EXPERTS = 16, 512, 1024, 4096, 8, 128, 8192, 4


@dataclasses.dataclass(frozen=True)
class Spelling:
    """How a program says where a value goes.

    Attributes:
      explicit: The Explicit mesh axes. Over the others, programs add constraints.
      unreduced: Whether a sum over shards stays unreduced, until a reshard adds it.
    """

    explicit: frozenset[str] = frozenset({"dp", "tp"})
    unreduced: bool = False

    def over(self, spec: P, axes: frozenset[str]) -> P:
        return P(*(entry if entry in axes else None for entry in spec.partitions))

    def constrain(self, x: Any, spec: P) -> Any:
        auto = frozenset({"dp", "tp"}) - self.explicit
        return jax.lax.with_sharding_constraint(x, self.over(spec, auto)) if auto else x

    def reshard(self, x: Any, spec: P) -> Any:
        return self.constrain(jax.reshard(x, self.over(spec, self.explicit)), spec)

    def einsum(self, terms: str, left: Any, right: Any, out: P) -> Any:
        spec = self.over(out, self.explicit)
        if not self.unreduced:
            return self.constrain(jnp.einsum(terms, left, right, out_sharding=spec), out)
        sides, result = terms.split("->")
        specs = (jax.typeof(side).sharding.spec.partitions for side in (left, right))
        held = {
            axis
            for labels, entries in zip(sides.split(","), specs, strict=True)
            for label, axis in zip(labels, entries, strict=True)
            if axis is not None and label not in result
        }
        kept = (None if axis in held else axis for axis in spec.partitions)
        y = jnp.einsum(terms, left, right, out_sharding=P(*kept, unreduced=held))
        return jax.reshard(y, spec)


def mlp(by: Spelling, weights: Any, x: Any) -> Any:
    """The gradient of scanned layers whose weights are stored over dp and used over tp."""

    def layer(x: Any, w: Any) -> Any:
        inner = jnp.tanh(by.einsum("bse,em->bsm", x, w["up"], P("dp", None, "tp")))
        return x + by.einsum("bsm,me->bse", inner, w["down"], P("dp", None, None)), None

    def loss(weights: Any) -> Any:
        used = {"up": P(None, None, "tp"), "down": P(None, "tp", None)}
        gathered = jax.tree.map(by.reshard, weights, used)
        return (jax.lax.scan(jax.checkpoint(layer), x, gathered)[0] ** 2).sum()

    return jax.grad(loss)(weights)


def attention(by: Spelling, weights: Any, tokens: Any) -> Any:
    """Attention with heads over tp, behind a look-up in a table whose rows are over tp."""
    hidden, heads = P("dp", None, None), P("dp", None, "tp", None)
    rows = weights["table"].at[tokens].get(out_sharding=by.over(hidden, by.explicit))
    x = by.constrain(rows, hidden)
    q, k, v = (by.einsum("bse,ehd->bshd", x, weights[name], heads) for name in "qkv")
    scores = jax.nn.softmax(by.einsum("bshd,bthd->bhst", q, k, P("dp", "tp", None, None)))
    mixed = by.einsum("bhst,bthd->bshd", scores, v, heads)
    x += by.einsum("bshd,hde->bse", mixed, weights["o"], hidden)
    logits = by.einsum("bse,ve->bsv", x, weights["table"], P("dp", None, "tp"))
    return jax.nn.logsumexp(logits, axis=-1)


def sequence(by: Spelling, weights: Any, x: Any) -> Any:
    """The gradient of a block with its residual stream over tp: gathers and reduce-scatters."""

    def loss(weights: Any) -> Any:
        h = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        h = by.reshard(h, P("dp", None, None))
        inner = jax.nn.silu(by.einsum("bse,em->bsm", h, weights["up"], P("dp", None, "tp")))
        return ((x + by.einsum("bsm,me->bse", inner, weights["down"], SEQUENCE)) ** 2).sum()

    return jax.grad(loss)(weights)


def experts(by: Spelling, weights: Any, x: Any) -> Any:
    """A mixture with its experts over dp: an all-to-all to the experts, and one back."""
    chosen = by.einsum("bse,ek->bsk", x, weights["router"], P("dp", None, None))
    gates = jax.nn.one_hot(chosen.argmax(-1), EXPERTS) * jax.nn.softmax(chosen)
    sent = by.reshard(jnp.einsum("bsk,bse->kbse", gates, x), P("dp", None, None, None))
    inner = jax.nn.gelu(by.einsum("kbse,kem->kbsm", sent, weights["up"], P("dp", None, None, "tp")))
    back = by.einsum("kbsm,kme->kbse", inner, weights["down"], P("dp", None, None, None))
    return by.reshard(back, P(None, "dp", None, None)).sum(0)


Array = tuple[tuple[int, ...], P]
ROWS, SEQUENCE = P("dp", None, None), P("dp", "tp", None)
# A model, its weights, and its input.
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Array], Array]] = {
    "mlp": (
        mlp,
        {
            "up": ((3, EMBED, INNER), P(None, "dp", "tp")),
            "down": ((3, INNER, EMBED), P(None, "tp", "dp")),
        },
        ((BATCH, LENGTH, EMBED), ROWS),
    ),
    "attention": (
        attention,
        {
            "table": ((VOCAB, EMBED), P("tp", None)),
            **{name: ((EMBED, HEADS, DIM), P(None, "tp", None)) for name in "qkv"},
            "o": ((HEADS, DIM, EMBED), P("tp", None, None)),
        },
        ((BATCH, LENGTH), P("dp", None)),
    ),
    "sequence": (
        sequence,
        {"up": ((EMBED, INNER), P(None, "tp")), "down": ((INNER, EMBED), P("tp", None))},
        ((BATCH, LENGTH, EMBED), SEQUENCE),
    ),
    "experts": (
        experts,
        {
            "router": ((EMBED, EXPERTS), P(None, None)),
            "up": ((EXPERTS, EMBED, INNER), P("dp", None, "tp")),
            "down": ((EXPERTS, INNER, EMBED), P("dp", "tp", None)),
        },
        ((BATCH, LENGTH, EMBED), ROWS),
    ),
}
SPELLINGS = {"reshard": Spelling(unreduced=True), "out_sharding": Spelling()}
MIXED = {f"{axis} explicit": Spelling(explicit=frozenset({axis})) for axis in ("dp", "tp")}
PROGRAMS = {
    **{f"{name} by {by}": (name, SPELLINGS[by]) for name in MODELS for by in SPELLINGS},
    **{f"{name}, {by}": (name, MIXED[by]) for name in ("mlp", "attention") for by in MIXED},
}


def arguments(name: str, mesh: Any, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    def shaped(shape: tuple[int, ...], spec: P) -> Any:
        own = jnp.int32 if len(shape) == 2 and spec[0] == "dp" else dtype
        return jax.ShapeDtypeStruct(shape, own, sharding=NamedSharding(mesh, spec))

    _, weights, x = MODELS[name]
    return {key: shaped(*each) for key, each in weights.items()}, shaped(*x)


def program(name: str, by: Spelling) -> Callable[[Any, Any], Any]:
    return lambda weights, x: MODELS[name][0](by, weights, x)


@pytest.mark.full(but=["attention by reshard"])
@pytest.mark.parametrize("case", list(PROGRAMS))
@pytest.mark.ci
def test_plan_equals_compiled_program(case: str) -> None:
    name, by = PROGRAMS[case]
    mesh = cpu_mesh("dp:2,tp:4", axis_types=dict.fromkeys(by.explicit, "explicit"))
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=mesh)
    given, run = arguments(name, mesh), program(name, by)
    report = pm.plan(run, *given)
    assert report.walked.complete
    assert planned_bytes(report) == compiled_bytes(pm, run, given)


@pytest.mark.parametrize(
    ("sizes", "w", "out", "kind"),
    [
        # Both operands have dp. The larger one, w, is gathered, since the type keeps the rows.
        ("dp:8", P(None, "dp"), P("dp", None), "all_gather"),
        # tp cuts a dim of the result, which sends nothing, and the sum over it is one over tp.
        ("dp:2,tp:4", P(None, None), P("dp", "tp"), "all_reduce"),
    ],
)
def test_type_of_result_decides_what_is_sent(sizes: str, w: P, out: P, kind: str) -> None:
    mesh = cpu_mesh(sizes, axis_types="explicit")
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=mesh)

    def run(x: Any, w: Any) -> Any:
        return jnp.einsum("be,em->bm", x, w, out_sharding=out).sum(1)

    given = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((16, 64), P("dp", None)), ((64, 128), w))
    ]
    planned = planned_bytes(pm.plan(run, *given))
    assert [each for each, _ in planned] == [kind]
    assert planned == compiled_bytes(pm, run, given)


def mean_of_rows(table: Any, tokens: Any) -> Any:
    """The gradient of an embedding, whose cotangent is a constant that is sharded by its type."""
    return jax.grad(lambda t: t.at[tokens].get(out_sharding=P("dp", None, None)).mean())(table)


def mean_of_head(w: Any, x: Any) -> Any:
    """The gradient of a critic's head, the same."""
    return jax.grad(lambda w: jnp.einsum("be,em->bm", x, w, out_sharding=P("dp", None)).mean())(w)


def count(x: Any, tokens: Any) -> Any:
    """A count of tokens: constants are added to zeros."""
    return jnp.zeros(64).at[tokens].add(1.0, out_sharding=P())


def loop_over(w: Any, x: Any) -> Any:
    """A loop that adds partial sums in each run."""

    def layer(x: Any, _: Any) -> Any:
        return jnp.tanh(jnp.einsum("be,em->bm", x, w, out_sharding=P("dp", "tp"))), None

    return jax.lax.scan(layer, x, None, length=3)[0]


def gathered_weight(w: Any, x: Any) -> Any:
    """A matmul whose result is whole over the mesh axis of the weight."""
    return jnp.einsum("be,em->bm", x, w, out_sharding=P("dp", None))


def replicated_look_up(table: Any, rows: Any) -> Any:
    """A look-up whose result is sharded as the table is, and its indices are not."""
    return jnp.tanh(table.at[rows].get(out_sharding=P("dp", "tp")))


def stored_gradient(x: Any, y: Any) -> Any:
    """The gradient of a weight: a sum over both batch axes, of which one stores it."""
    return jax.reshard(jnp.einsum("be,bm->em", x, y, out_sharding=P()), P("tp"))


# A program, its two arguments, and the kinds of what it sends.
SMALL: dict[str, tuple[Callable[..., Any], Array, Array, list[str]]] = {
    "rows": (mean_of_rows, ((128, 64), P("tp", None)), ((16, 8), P("dp", None)), ["all_reduce"]),
    "head": (mean_of_head, ((64, 64), P()), ((16, 64), P("dp", None)), ["all_reduce"]),
    "count": (count, ((256,), P("dp")), ((256,), P("dp")), ["all_reduce"]),
    "loop": (loop_over, ((64, 64), P("tp", None)), ((16, 64), P("dp", "tp")), ["all_reduce"]),
    "weight": (
        gathered_weight,
        ((64, 256), P(None, "tp")),
        ((16, 64), P("dp", None)),
        ["all_gather"],
    ),
    "stored": (
        stored_gradient,
        ((16, 64), P(("dp", "tp"))),
        ((16, 256), P(("dp", "tp"))),
        ["all_reduce"],
    ),
    "look-up": (replicated_look_up, ((16, 64), P("dp", "tp")), ((16,), P()), ["all_gather"]),
}


@pytest.mark.full(but=["rows", "loop"])
@pytest.mark.parametrize("case", list(SMALL))
def test_types_decide_over_constants_loops_and_weights(case: str) -> None:
    run, *arrays, kinds = SMALL[case]
    mesh = cpu_mesh("dp:2,tp:4", axis_types="explicit")
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=mesh)
    looks_up = case in ("rows", "count", "look-up")
    given = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (shape, spec), dtype in zip(
            arrays, (jnp.float32, jnp.int32 if looks_up else jnp.float32), strict=True
        )
    ]
    report = pm.plan(run, *given)
    assert report.walked.complete
    assert [each for each, _ in planned_bytes(report)] == kinds
    assert planned_bytes(report) == compiled_bytes(pm, run, given)


HIDDEN = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
INSIDE = (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
SPECS = {
    "up": sw.ArraySpec((EMBED, INNER), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE)),
    "down": sw.ArraySpec((INNER, EMBED), jnp.float32, (sw.MLP_INTERMEDIATE, sw.EMBED)),
}
SHAPES = (
    {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in SPECS.items()},
    jax.ShapeDtypeStruct((BATCH, LENGTH, EMBED), jnp.float32),
)


def annotated(weights: Any, x: Any) -> Any:
    """The gradient of a block that any mesh can run."""

    def loss(weights: Any) -> Any:
        w = sw.gather(weights, SPECS)
        inner = jnp.tanh(sw.einsum("bse,em->bsm", sw.shard(x, HIDDEN), w["up"], out=INSIDE))
        return (sw.einsum("bsm,me->bse", inner, w["down"], out=HIDDEN) ** 2).sum()

    return jax.grad(loss)(weights)


@pytest.mark.parametrize("types", ["explicit", {"tp": "explicit"}])
def test_annotations_explain_the_same_collectives(types: Any) -> None:
    def events(types: Any) -> list[Any]:
        mesh = sw.abstract_mesh("fsdp:2,tp:4", axis_types=types)
        pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh)
        report = pm.plan(annotated, *SHAPES, specs=(SPECS, HIDDEN), outputs=SPECS)
        return sorted(
            (str(each.kind), each.mesh_axes, each.axes, each.logical_bytes)
            for each in report.events
        )

    assert events(types) == events("auto")


def contracted(weights: Any, x: Any) -> Any:
    """A program that JAX refuses if tp is Explicit and has several devices."""
    return jnp.tanh(x @ weights["up"]) @ weights["down"]


def test_refused_program_names_line_and_fix() -> None:
    mesh = sw.abstract_mesh("dp:2,tp:4", axis_types="explicit")
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=mesh)
    with raises(ProgramError, "Contracting dimensions", "test_explicit.py:", fix="sw.einsum"):
        pm.plan(contracted, *SHAPES, specs=(SPECS, HIDDEN))


def asserts(x: Any) -> Any:
    assert x.shape[0] == 3, "three rows"
    return x


def raises_a_mode(x: Any) -> Any:
    raise NotImplementedError("this sharding is not written yet")


FAULTS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "assert": (asserts, AssertionError, "three rows"),
    "own": (raises_a_mode, NotImplementedError, "not written yet"),
    "sizes": (lambda x: x @ x, TypeError, "contracting dimensions"),
    "dtypes": (
        lambda x: jax.lax.scan(lambda c, _: (c.astype(jnp.int32), None), x, length=2),
        TypeError,
        "dtypes do not match",
    ),
    "carry": (
        lambda x: jax.lax.scan(lambda c, _: (jax.reshard(c, P()), None), x, length=2),
        ProgramError,
        "on a mesh with Explicit axes: scan body",
    ),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_only_errors_about_shardings_are_refusals(fault: str) -> None:
    run, error, text = FAULTS[fault]
    mesh = sw.abstract_mesh("dp:2,tp:4", axis_types="explicit")
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=mesh)
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=NamedSharding(mesh, P("dp", "tp")))
    with pytest.raises(error, match=text) as caught:
        pm.plan(run, x)
    assert type(caught.value) is error


def test_search_raises_own_fault_of_program() -> None:
    strategy = sw.Strategy.preset("tensor") | sw.Strategy.model_validate(
        {"mesh": {"dp": -1, "tp": 1}, "axis_types": "explicit"}
    )
    program = Program(lambda weights, x: asserts(x), SHAPES, (SPECS, HIDDEN))
    with pytest.raises(AssertionError, match="three rows"):
        search(program, {"tensor": strategy}, topology="v5e:2x4")


def test_search_traces_each_explicit_candidate_once() -> None:
    traces = []

    def counted(weights: Any, x: Any) -> Any:
        traces.append(dict(jax.typeof(x).sharding.mesh.shape))
        return contracted(weights, x)

    strategy = sw.Strategy.preset("tensor") | sw.Strategy.model_validate(
        {"mesh": {"dp": -1, "tp": 1}, "axis_types": "explicit"}
    )
    program = Program(counted, SHAPES, (SPECS, HIDDEN))
    found = search(program, {"tensor": strategy}, topology="v5e:2x4")
    assert [each.mesh for each in found.candidates] == ["dp:8"]
    refused = ["tensor on dp:2,tp:4", "tensor on dp:4,tp:2", "tensor on tp:8"]
    assert sorted(point for point, _ in found.refused) == refused
    assert found.judged == 4
    assert "refused: tensor on tp:8\n  JAX refuses" in str(search_text(found))
    # The first trace is on one device: it finds the mesh axes that no tensor uses.
    assert sorted(each["dp"] for each in traces) == [1, 1, 2, 4, 8]


def differences(case: str, **target: Any) -> list[int]:
    """Bytes over each set of mesh axes that a compiler adds to the plan."""
    name, by = PROGRAMS[case]
    types = dict.fromkeys(by.explicit, "explicit")
    mesh = sw.abstract_mesh("dp:2,tp:4", axis_types=types)
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=mesh)
    given = arguments(name, mesh, jnp.bfloat16 if "topology" in target else jnp.float32)
    verified = verify_plan(pm, Program(program(name, by), given), **target)
    return [sent.difference for sent in verified.traffic]


@pytest.mark.full
def test_verify_compiles_explicit_program() -> None:
    assert differences("experts by out_sharding", platform="cpu") == [0, 0]


class TestTPU:
    pytestmark = MARKS

    @pytest.mark.parametrize(
        "case",
        ["mlp by reshard", "mlp, tp explicit", "sequence by out_sharding", "experts by reshard"],
    )
    def test_plan_equals_program_for_tpus(self, case: str) -> None:
        assert differences(case, topology="v5e:2x4") == [0, 0]

    def test_gradients_of_one_weight_are_added_first(self) -> None:
        """It is used in a matmul and elementwise. CPUs send both gradients."""
        specs = {"w": sw.ArraySpec((EMBED,), jnp.float32, (sw.EMBED,))}

        def loss(weights: Any, x: Any) -> Any:
            w = sw.gather(weights, specs)["w"]
            y = jnp.einsum("bse,e->bs", x, w)
            return jnp.sin(y).sum() + jnp.sin(x * w).sum()

        mesh = sw.abstract_mesh("dp:2,fsdp:4", axis_types="explicit")
        pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=mesh, mode="train")
        given = {"w": jax.ShapeDtypeStruct((EMBED,), jnp.float32)}, SHAPES[1]
        program = Program(jax.grad(loss), given, (specs, HIDDEN), specs)
        verified = verify_plan(pm, program, topology="v5e:2x4")
        assert [sent.difference for sent in verified.traffic] == [0, 0]


def test_infer_and_check_read_explicit_program(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(_MODEL)
    for command in ("check", "infer"):
        array = ("--input", "int32[8,32] BATCH LENGTH")
        assert main([command, f"{file}:forward", "--params", "init", *array]) == 0


_MODEL = """
import jax
import jax.numpy as jnp
import shardwright as sw
from jax.sharding import PartitionSpec as P

def init():
    inner = sw.ArraySpec((64, 128), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))
    table = sw.ArraySpec((512, 64), jnp.float32, (sw.VOCAB, sw.EMBED))
    return {"table": table, "up": inner}

def forward(params, tokens):
    x = params["table"].at[tokens].get(out_sharding=P("dp", None, None))
    inner = jnp.einsum("bse,em->bsm", x, params["up"], out_sharding=P("dp", None, "tp"))
    x += jnp.einsum("bsm,em->bse", jax.nn.silu(inner), params["up"], out_sharding=P("dp"))
    return jnp.einsum("bse,ve->bsv", x, params["table"], out_sharding=P("dp", None, "tp"))
"""
