"""Trip counts: interpreted loops equal the counts that XLA states in the same programs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from shardwright.plan.collectives.hlo import parse_hlo
from shardwright.plan.collectives.trip_counts import LIMIT, Frame, body_frame, called, trip_count

KNOWN = re.compile(r',?"known_trip_count":\{"n":"\d+"\}')


def loop(
    start: int,
    goes_on: Callable[[Any], Any],
    following: Callable[[Any], Any],
    dtype: Any = jnp.int32,
) -> Callable[[Any], Any]:
    def program(x: Any) -> Any:
        return lax.while_loop(
            lambda c: goes_on(c[0]),
            lambda c: (following(c[0]).astype(dtype), jnp.sin(c[1])),
            (dtype(start), x),
        )[1]

    return program


def counts(text: str) -> list[int | None]:
    """Return the trip count of each loop of a program, outermost first."""
    module = parse_hlo(text)

    def of(frame: Frame) -> list[int | None]:
        actual: list[int | None] = []
        for instruction in frame.computation.instructions.values():
            if instruction.opcode == "while":
                actual += [
                    trip_count(module, frame, instruction),
                    *of(body_frame(module, frame, instruction)),
                ]
            elif instruction.opcode == "call":
                actual += of(
                    called(
                        module,
                        instruction.attributes()["to_apply"].lstrip("%"),
                        frame,
                        instruction.operands,
                    )
                )
        return actual

    return of(Frame(computation=module.entry))


@functools.cache
def text_of(program: Callable[[Any], Any]) -> str:
    return jax.jit(program).lower(jnp.ones((64, 64))).compile().as_text()


LOOPS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "up": (loop(0, lambda i: i < 9, lambda i: i + 1), 9),
    "up to and with": (loop(1, lambda i: i <= 9, lambda i: i + 1), 9),
    "by three": (loop(2, lambda i: i < 17, lambda i: i + 3), 5),
    "down": (loop(9, lambda i: i > 0, lambda i: i - 1), 9),
    "until equal": (loop(0, lambda i: i != 12, lambda i: i + 4), 3),
    "doubling": (loop(1, lambda i: i < 100, lambda i: i * 2), 7),
    "halving": (loop(100, lambda i: i > 0, lambda i: i // 2), 7),
    "shifting": (loop(1, lambda i: i < 1000, lambda i: i << 2), 5),
    "remainders": (loop(7, lambda i: i != 0, lambda i: (i * 3 + 2) % 7), 6),
    "two conditions": (loop(0, lambda i: (i < 50) & (i * i < 200), lambda i: i + 1), 15),
    "select": (loop(0, lambda i: i < 20, lambda i: jnp.where(i < 10, i + 5, i + 1)), 12),
    "between limits": (loop(0, lambda i: lax.clamp(2, i, 6) < 6, lambda i: i + 1), 6),
    "clamped": (loop(0, lambda i: jnp.minimum(i, 6) < 6, lambda i: i + 1), 6),
    "unsigned wrap": (loop(250, lambda i: i > 5, lambda i: i + 1, jnp.uint8), 6),
    "negative": (loop(-5, lambda i: i < -1, lambda i: i + 1), 4),
    "not at all": (loop(5, lambda i: i < 5, lambda i: i + 1), 0),
}


@pytest.mark.parametrize("name", list(LOOPS))
def test_count_with_and_without_hint(name: str) -> None:
    program, trips = LOOPS[name]
    text = text_of(program)
    if not trips:
        assert " while(" not in text or counts(text) == [0], "XLA drops a loop that never runs"
        return
    if " while(" in text:
        assert counts(KNOWN.sub("", text)) == [trips]
        assert counts(text) == [trips]
    else:
        pytest.fail("XLA unrolled the loop: make it longer")


def test_compiler_states_most_counts() -> None:
    """So that the comparison above is one."""
    written = [name for name, (program, _) in LOOPS.items() if KNOWN.search(text_of(program))]
    assert len(written) >= 5, written


def test_nested_loops() -> None:
    def program(x: Any) -> Any:
        def outer(i: Any, c: Any) -> Any:
            return lax.while_loop(
                lambda s: s[0] < s[1], lambda s: (s[0] + 1, s[1], jnp.sin(s[2])), (0, c[0], c[1])
            )[1:]

        return lax.fori_loop(0, 4, outer, (jnp.int32(6), x))[1]

    text = text_of(program)
    assert counts(KNOWN.sub("", text)) == [4, 6]


def test_triangular_loops_have_no_count() -> None:
    def program(x: Any) -> Any:
        def outer(i: Any, x: Any) -> Any:
            return lax.while_loop(lambda s: s[0] < i, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x))[
                1
            ]

        return lax.fori_loop(0, 5, outer, x)

    assert counts(KNOWN.sub("", text_of(program))) == [5, None]


@pytest.mark.full(but=["on data", "a limit from data"])
@pytest.mark.parametrize(
    "program",
    [
        lambda x: lax.while_loop(lambda c: c.max() < 100.0, lambda c: c * 2, x),
        lambda x: lax.while_loop(
            lambda c: c[0] < c[1].sum().astype(jnp.int32),
            lambda c: (c[0] + 1, jnp.sin(c[1])),
            (0, x),
        )[1],
        loop(0, lambda i: i < LIMIT + 1, lambda i: i + 1),
    ],
    ids=["on data", "a limit from data", "too long"],
)
def test_unknown_count_is_none(program: Any) -> None:
    assert counts(KNOWN.sub("", text_of(program))) == [None]


@given(
    st.integers(-50, 50),
    st.integers(1, 9),
    st.integers(0, 200),
    st.sampled_from(["LT", "LE", "NE"]),
)
def test_any_counting_loop(start: int, step: int, trips: int, direction: str) -> None:
    """On a text of our own, since compiling takes longer than counting."""
    end = start + step * trips - (direction == "LE" and trips > 0)
    expected = trips
    if direction == "LE" and trips == 0:
        expected = int(start <= end)
    text = f"""HloModule counted

%body (s: (s32[], s32[])) -> (s32[], s32[]) {{
  %s = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %end = s32[] get-tuple-element(%s), index=1
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  ROOT %out = (s32[], s32[]) tuple(%next, %end)
}}

%condition (t: (s32[], s32[])) -> pred[] {{
  %t = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %limit = s32[] get-tuple-element(%t), index=1
  ROOT %less = pred[] compare(%j, %limit), direction={direction}
}}

ENTRY %main () -> (s32[], s32[]) {{
  %start = s32[] constant({start})
  %stop = s32[] constant({end})
  %state = (s32[], s32[]) tuple(%start, %stop)
  ROOT %while = (s32[], s32[]) while(%state), condition=%condition, body=%body
}}
"""
    assert counts(text) == [expected]
