"""`shardwright prove`: which programs count as the same, and where a difference is found."""

from __future__ import annotations

import functools
import json
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.cli.main import main
from shardwright.errors import ProgramError
from shardwright.plan import Program
from shardwright.plan.verify import prove as proving
from shardwright.plan.verify.prove import lower_program, prove
from shardwright.plan.verify.same import compare_programs
from tests.raising import raises

TEXT = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}, \
num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%body (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %reduced = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, \
to_apply=%sum, metadata={op_name="jit(step)/psum" source_file="model.py" source_line=7}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %one = f32[8]{0} negate(%p), metadata={op_name="a"}
  %two = f32[8]{0} cosine(%p)
  %both = f32[8]{0} add(%one, %two)
  %call = f32[8]{0} call(%both), to_apply=%body
  ROOT %kernel = f32[8]{0} custom-call(%call), custom_call_target="k", backend_config="v1"
}
"""


def swapped(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


SAME = {
    "names": [("%one", "%negate.7"), ("%body", "%region_3"), ("jit_step", "jit_other")],
    "ids": [("channel_id=1", "channel_id=9"), ("source_line=7", "source_line=12")],
    "order": [
        ('  %one = f32[8]{0} negate(%p), metadata={op_name="a"}\n', ""),
        ("  %both", "  %one = f32[8]{0} negate(%p)\n  %both"),
    ],
}
OTHER = {
    "groups": [("{{0,1},{2,3}}", "{{0,2},{1,3}}"), "all-reduce f32[8]"],
    "reduction": [("add(%a, %b)", "maximum(%a, %b)"), "all-reduce f32[8]"],
    "operand": [("negate(%p)", "sine(%p)"), "sine f32[8]"],
    "order of operands": [("add(%one, %two)", "add(%two, %one)"), "add f32[8]"],
    "layout": [("%two = f32[8]{0}", "%two = f32[8]{0:T(8)}"), "cosine f32[8]"],
    "kernel": [('"v1"', '"v2"'), "custom-call f32[8]"],
}


@pytest.mark.parametrize("case", SAME)
def test_names_ids_and_order_do_not_count(case: str) -> None:
    assert compare_programs(TEXT, swapped(TEXT, *SAME[case])) is None


@pytest.mark.parametrize("case", OTHER)
def test_first_difference_is_found(case: str) -> None:
    pair, op = OTHER[case]
    found = compare_programs(TEXT, swapped(TEXT, pair))
    assert found is not None
    assert found.right is not None
    assert found.right.text == op
    if case == "groups":
        assert found.right.source == "model.py:7"


def test_an_extra_instruction_has_no_partner() -> None:
    extra = swapped(TEXT, ("%call = f32[8]{0} call(%both)", "%call = f32[8]{0} call(%twice)"))
    extra = swapped(extra, ("  %call", "  %twice = f32[8]{0} add(%both, %both)\n  %call"))
    found = compare_programs(TEXT, extra)
    assert found is not None
    assert found.left is not None
    assert found.right is not None
    assert (found.left.text, found.right.text) == ("call f32[8]", "add f32[8]")


SENT = """  %token = token[] after-all()
  %send = (f32[8], u32[], token[]) send(%both, %token), channel_id=4, \
frontend_attributes={_xla_host_transfer_rendezvous="all-reduce.10_0",\
_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0:15}",\
_xla_megascale_transfer_type="ALL_REDUCE",_xla_send_recv_source_target_pairs={{0,1},{1,2}}}
  %call"""


@pytest.mark.parametrize(
    "pair",
    [
        ('"SUM"', '"MAX"'),
        ("{1,2}x", "{1,3}x"),
        ('"ALL_REDUCE"', '"REDUCE_SCATTER"'),
        ("{{0,1},{1,2}}", "{{1,0},{2,1}}"),
    ],
)
def test_where_a_send_goes_counts(pair: tuple[str, str]) -> None:
    text = swapped(TEXT, ("  %call", SENT))
    found = compare_programs(text, swapped(text, pair))
    assert found is not None
    assert found.left is not None
    assert found.left.text.startswith("send ")


def test_the_rendezvous_of_a_send_does_not_count() -> None:
    text = swapped(TEXT, ("  %call", SENT))
    assert compare_programs(text, swapped(text, ("all-reduce.10_0", "all-reduce.99_0"))) is None


def test_donation_counts() -> None:
    donated = swapped(
        TEXT, ("entry_comp", "input_output_alias={ {}: (0, {}, may-alias) }, entry_comp")
    )
    found = compare_programs(TEXT, donated)
    assert found is not None
    assert "donated" in found.what


# Programs.

UP = (sw.EMBED, sw.MLP_INTERMEDIATE)
HIDDEN = (sw.BATCH, sw.EMBED)
INNER = (sw.BATCH, sw.MLP_INTERMEDIATE)
SHAPES = (
    {name: jax.ShapeDtypeStruct((64, 256), jnp.float32) for name in ("up", "gate")},
    jax.ShapeDtypeStruct((8, 64), jnp.float32),
)
SPECS = (
    {"up": sw.ArraySpec((64, 256), jnp.float32, UP)}
    | {"gate": sw.ArraySpec((64, 256), jnp.float32, UP)},
    HIDDEN,
)


def mlp(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    w = sw.gather(weights, SPECS[0])
    x = sw.shard(x, HIDDEN)
    up, gate = x @ w["up"], x @ w["gate"]
    return sw.shard(up * jax.nn.silu(gate), INNER)


def other_order(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The same, written in another order, with literal specs."""
    w = {name: sw.gather(weights[name], SPECS[0][name]) for name in ("up", "gate")}
    hidden = sw.shard(x, P("fsdp", None))
    gate = jax.nn.silu(hidden @ w["gate"])
    return sw.shard((hidden @ w["up"]) * gate, P("fsdp", "tp"))


def ungathered(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    up, gate = x @ weights["up"], x @ weights["gate"]
    return sw.shard(up * jax.nn.silu(gate), INNER)


def lowered(function: object, preset: str = "fsdp_tp") -> proving.ProgramSide:
    pm = sw.PartitionManager(sw.Strategy.preset(preset), mesh=sw.abstract_mesh("fsdp:2,tp:4"))
    return lower_program(pm, Program(function, SHAPES, SPECS))


def test_equal_exports_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(proving, "compile_exported", refuse)
    found = prove(lowered(mlp), lowered(functools.partial(mlp)), timeout=60)
    assert found.same
    assert found.compiler == ""


@pytest.mark.full
@pytest.mark.ci
def test_a_strategy_that_differs_is_explained() -> None:
    found = prove(lowered(mlp), lowered(mlp, "tensor"), timeout=300)
    assert not found.same
    assert found.cause is not None
    assert found.cause.place == "argument 0 gate"
    assert found.cause.axes == ("EMBED", "EMBED")
    assert found.cause.specs == ("P('fsdp', 'tp')", "P(None, 'tp')")
    assert 'embed = "fsdp+sp"' in found.cause.rules[0]
    assert "tensor.toml" in found.cause.rules[1]
    assert found.left is not None
    assert found.left.op.startswith("parameter")


@pytest.mark.full
def test_a_rewritten_function_is_the_same() -> None:
    found = prove(lowered(mlp), lowered(other_order), timeout=300)
    assert found.same
    assert found.collectives[0] == found.collectives[1] > 0
    assert "jaxlib" in found.compiler


@pytest.mark.full
def test_a_missing_gather_is_found() -> None:
    found = prove(lowered(mlp), lowered(ungathered), timeout=300)
    assert not found.same
    assert found.left is not None
    assert "test_prove.py" in found.left.source or found.left.mesh_axes == ("fsdp",)


@pytest.mark.full
@pytest.mark.parametrize("case", ["float32", "bfloat16", "indices", "swapped"])
def test_values_of_constants_count(case: str) -> None:
    # Of more than ten elements, so `as_text` of JAX leaves their values out.
    def adds(dtype: object, value: int) -> object:
        table = (jnp.arange(20) % 7 + value).astype(dtype)
        return lambda _, x: x[:, :20] + table

    def reads(value: int) -> object:
        indices = jnp.arange(20) % 7 + value
        return lambda _, x: x[:, indices]

    one = jnp.arange(64 * 64, dtype=jnp.float32).reshape(64, 64)
    sides = {
        "float32": (adds(jnp.float32, 0), adds(jnp.float32, 1)),
        "bfloat16": (adds(jnp.bfloat16, 0), adds(jnp.bfloat16, 1)),
        "indices": (reads(0), reads(1)),
        # The same two constants, in the other order.
        "swapped": (lambda _, x: x @ one @ one.T, lambda _, x: x @ one.T @ one),
    }[case]
    assert not prove(*map(lowered, sides), timeout=300).same


def test_host_memory_counts() -> None:
    mesh = sw.abstract_mesh("fsdp:2,tp:4")
    preset = sw.Strategy.preset("fsdp_tp")
    hosted = preset | sw.Strategy.loads(
        '[memory]\nparams = "host"\n[[memory.tensors]]\nmatch = "gate"\nparams = "device"\n'
    )
    one, other = (
        lower_program(sw.PartitionManager(each, mesh=mesh), Program(mlp, SHAPES, SPECS))
        for each in (preset, hosted)
    )
    found = prove(one, other, timeout=60)
    assert not found.same
    assert found.what == "argument 0 up is in host memory on one side only"
    assert prove(other, other, timeout=60).same


@pytest.mark.full
@pytest.mark.parametrize("what", ["arguments", "results"])
def test_mesh_axes_of_the_same_size_are_not_the_same(what: str) -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("fsdp:2,tp:2"))

    def side(spec: P) -> proving.ProgramSide:
        given = spec if what == "arguments" else P()
        zeros = jnp.zeros((8, 64))

        def step(x: jax.Array) -> jax.Array:
            return x * 2 if what == "arguments" else sw.shard(zeros, spec)

        return lower_program(pm, Program(step, SHAPES[1:], (given,)))

    found = prove(side(P("fsdp")), side(P("tp")), timeout=300)
    assert not found.same
    # In JAX 0.10, the sharding of an argument is in the program.
    assert found.what == f"the sharding of the {what}" or found.left is not None


MODEL = """
import jax, jax.numpy as jnp
import shardwright as sw
from jax.sharding import PartitionSpec as P
from shardwright.plan import Program
from helper import scale

up = sw.ArraySpec((64, 256), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))
shapes = (jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.ShapeDtypeStruct((8, 64), jnp.float32))

def annotated():
    def forward(w, x):
        x = sw.shard(x, sw.BATCH, sw.EMBED)
        return scale(sw.shard(x @ sw.gather(w, up), sw.BATCH, sw.MLP_INTERMEDIATE))
    return Program(forward, shapes, (up, (sw.BATCH, sw.EMBED)))

def by_hand():
    def forward(w, x):
        x = sw.shard(x, P("fsdp", None))
        return scale(sw.shard(x @ sw.gather(w, P("fsdp", "tp")), P("fsdp", "tp")))
    return Program(forward, shapes, (P("fsdp", "tp"), P("fsdp", None)))
"""
MESH = "--mesh fsdp:2,tp:4"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, factor in ((".", 2), ("before", 2), ("wrong", 3)):
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "model.py").write_text(MODEL, encoding="utf-8")
        Path(folder, "helper.py").write_text(f"def scale(x): return {factor} * x\n")


def run(words: str) -> int:
    return main(shlex.split(f"prove {words}"))


@pytest.mark.usefixtures("files")
def test_command_compares_two_versions(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"model.py:annotated --strategy fsdp_tp {MESH}"
    assert run(f"before/model.py:annotated {words}") == 0
    assert run(f"model.py:by_hand {words} --json") == 0
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert first == "mode train: the same program, before it is partitioned"
    assert json.loads(rest)["same"] is True


@pytest.mark.full
@pytest.mark.usefixtures("files")
def test_command_reads_what_each_version_imports(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"model.py:annotated --strategy fsdp_tp {MESH}"
    assert run(f"wrong/model.py:annotated {words}") == 1
    out = capsys.readouterr().out
    assert "the programs differ" in out
    assert "constant(3) f32[] at helper.py:1" in out
    assert "constant(2) f32[] at helper.py:1" in out
    assert run(f"fsdp_tp tensor --model model.py:annotated {MESH}") == 1
    assert 'embed = "fsdp+sp"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("fsdp tensor", "are not two strategies with --model"),
        ("model.py:annotated fsdp --strategy fsdp", "are not two strategies"),
        ("model.py:annotated model.py:by_hand", "with --strategy"),
    ],
)
@pytest.mark.usefixtures("files")
def test_wrong_sides_have_a_fix(words: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    err = capsys.readouterr().err
    assert part in err
    assert "fix" in err


def test_a_program_that_does_not_fit_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    real = proving.Compiled

    def refused(*_: object, **__: object) -> object:
        return real(target=proving.make_target(None), refused="RESOURCE_EXHAUSTED")

    monkeypatch.setattr(proving, "compile_exported", refused)
    with raises(ProgramError, "memory", fix="--topology"):
        prove(lowered(mlp), lowered(mlp, "tensor"), timeout=60)
