"""Parsed HLO text equals XLA's own view of the same program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding

import shardwright as sw
from shardwright.errors import ProgramError
from shardwright.plan.collectives.hlo import bytes_of, parse_hlo, split
from shardwright.testing import cpu_mesh
from tests.plan.programs import FIXTURES, OPS, in_loops, mapped
from tests.raising import raises

P = jax.P


def compiled(f: Any, mesh: Any, dtype: Any = jnp.float32) -> Any:
    x = jax.ShapeDtypeStruct(
        (64 * mesh.size, 16), dtype, sharding=NamedSharding(mesh, P(mesh.axis_names))
    )
    return jax.jit(f).lower(x).compile()


def branches(x: Any) -> Any:
    return lax.cond(x.sum() > 0, lambda y: lax.psum(y, "tp"), lambda y: jnp.sort(y, axis=0) * 2, x)


PROGRAMS = {**{name: in_loops(op, ("tp",)) for name, op in OPS.items()}, "branches": branches}


@pytest.mark.full(but=["psum_scatter", "all_to_all", "branches"])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_instructions_equal_xla_module(name: str) -> None:
    """XLA hands out the program as objects too: the same computations, opcodes and operands."""
    mesh, f = mapped(PROGRAMS[name], "dp:2,tp:4")
    program = compiled(f, mesh, jnp.bfloat16)
    (own,) = program.runtime_executable().hlo_modules()
    module = parse_hlo(program.as_text())
    theirs = {
        function.name: {each.name: each for each in function.instructions()}
        for function in own.computations()
    }
    assert {name: set(function.instructions) for name, function in module.computations.items()} == {
        name: set(other) for name, other in theirs.items()
    }
    seen = 0
    for name, computation in module.computations.items():
        for instruction in computation.instructions.values():
            each = theirs[name][instruction.name]
            # kAllReduce is all-reduce, kSin sine.
            assert instruction.opcode.replace("-", "").removesuffix("e") == str(
                each.opcode
            ).rpartition(".k")[2].lower().removesuffix("e")
            assert list(instruction.operands) == [operand.name for operand in each.operands()]
            seen += 1
    assert seen > 20


def test_frame_is_the_caller_line() -> None:
    pm = sw.PartitionManager(
        sw.Strategy.preset("fsdp"), mesh=cpu_mesh("dp:1,fsdp:8,sp:1,ep:1,tp:1")
    )
    w = pm.abstract(sw.ArraySpec((64, 16), jnp.float32, (sw.EMBED, sw.EMPTY)))
    text = jax.jit(lambda w: pm.gather(w, sw.EMBED, sw.EMPTY) * 2).lower(w).compile().as_text()
    assert "shardwright/manager/constraint.py" in text
    frames = parse_hlo(text).frames
    files = [frame.partition(":")[0] for frame in frames.values()]
    assert files.count(__file__) > 3, "this line, and ours that stand for it"
    assert not [
        file
        for file in files
        if "/shardwright/" in file and file.endswith(("constraint.py", "manager.py"))
    ]


def test_frame_is_outside_of_libraries() -> None:
    files = [
        "/home/me/model.py",
        "/env/lib/python3.11/site-packages/flax/linear.py",
        "/usr/lib/python3/dist-packages/numpy/core.py",
    ]
    files += ["/usr/lib/python3.11/contextlib.py", "<frozen runpy>"]
    chains = {
        "1": (1, 1),
        "2": (4, 2),
        "3": (2, 3),
        "4": (5, 1),
        "5": (3, 5),
    }  # frame: its file, its caller plus one
    tables = [
        *("FileNames", *(f'{at} "{file}"' for at, file in enumerate(files, 1))),
        *("", "FunctionNames", '1 "f"', ""),
        *(
            "FileLocations",
            *(
                f"{at} {{file_name_id={at} function_name_id=1 line={10 * at}}}"
                for at in range(1, len(files) + 1)
            ),
        ),
        *(
            "",
            "StackFrames",
            *(
                f"{key} {{file_location_id={at} parent_frame_id={up}}}"
                for key, (at, up) in chains.items()
            ),
        ),
    ]
    text = "\n".join(
        [
            "HloModule m",
            "",
            *tables,
            "",
            "ENTRY main (a: f32[]) -> f32[] {",
            "  ROOT a = f32[] parameter(0)",
            "}",
        ]
    )
    frames = parse_hlo(text).frames
    assert {key: frames[key] for key in ("1", "2", "3")} == dict.fromkeys(
        ("1", "2", "3"), "/home/me/model.py:10"
    )
    assert (frames["4"], frames["5"]) == (
        "<frozen runpy>:50",
        "/usr/lib/python3/dist-packages/numpy/core.py:30",
    )


def test_shapes_of_tuples_and_tiles() -> None:
    text = (FIXTURES / "gpu_nested_tuple_starts.hlo").read_text(encoding="utf-8")
    starts = [
        instruction
        for instruction in parse_hlo(text).entry.instructions.values()
        if instruction.opcode == "all-to-all-start"
    ]
    assert [(shape.dtype, shape.dims) for shape in starts[0].shapes] == [("bf16", (2, 64, 128))] * 2
    text = (FIXTURES / "tpu_permute_start_done.hlo").read_text(encoding="utf-8")
    (start,) = (
        instruction
        for computation in parse_hlo(text).computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "collective-permute-start"
    )
    assert [(shape.dtype, shape.bytes) for shape in start.shapes] == [
        ("bf16", 2048),
        ("bf16", 2048),
        ("u32", 4),
        ("u32", 4),
    ]


@pytest.mark.parametrize(
    ("dtype", "elements", "count"),
    [("pred", 3, 3), ("s4", 3, 2), ("f8e4m3fn", 5, 5), ("c128", 2, 32), ("token", 1, 0)],
)
def test_bytes(dtype: str, elements: int, count: int) -> None:
    assert bytes_of(dtype, elements) == count


def test_unknown_element_type_is_an_error() -> None:
    with raises(ProgramError, "f3"):
        bytes_of("f3", 1)


PIECES = st.sampled_from(
    [
        "channel_id=1",
        "replica_groups={{0,1},{2,3}}",
        "device_ids=([2,4]T(1,0)) {'a':(2)2}",
        r'metadata={op_name="a, \"b\", {c" x=1}',
        "slice={[0:1], [2:3]}",
    ]
)


@given(st.lists(PIECES, max_size=6))
def test_split_attributes(pieces: list[str]) -> None:
    assert split(", ".join(pieces)) == pieces


def test_computation_without_root_is_an_error() -> None:
    with raises(ProgramError, "ROOT", fix="compiled.as_text"):
        parse_hlo("HloModule x\n\nENTRY %main () -> f32[] {\n  %a = f32[] constant(1)\n}\n")


def test_pallas_metadata_spans_lines() -> None:
    text = """HloModule x

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %kernel.1 = (f32[8]{0}, s32[]) custom-call(%a), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}",
"other":"x"
}}, metadata={op_name="jit(f)/pallas_call" stack_frame_id=21}
  ROOT %part = f32[8]{0} get-tuple-element(%kernel.1), index=0
}
"""
    instructions = parse_hlo(text).entry.instructions
    assert list(instructions) == ["a", "kernel.1", "part"]
    assert 'metadata={op_name="jit(f)/pallas_call"' in instructions["kernel.1"].rest
    assert instructions["part"].line == 9
