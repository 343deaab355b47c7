"""Find the trip counts of loops in compiled programs.

Programs for CPUs and GPUs state `known_trip_count`. Programs for TPUs do not. For these, the
counter of the loop is interpreted: its start value, its condition, and the integers on which they
depend. The count is None if it depends on computed data.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from shardwright.plan.collectives.hlo import BITS, Computation, Instruction, Module

LIMIT = 1 << 16  # largest number of trips to interpret; with more, the count is unknown

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_INTEGERS = frozenset({"pred", *(f"{sign}{bits}" for sign in "su" for bits in (4, 8, 16, 32, 64))})
_SAME = frozenset(
    {"copy", "bitcast", "reshape", "convert", "broadcast", "opt-barrier", "copy-done"}
)
_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


def _quotient(a: int, b: int) -> int:
    # Round toward zero, as XLA does. Python's `//` rounds down.
    return (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


_BINARY: Mapping[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
    "divide": _quotient,
    "remainder": lambda a, b: a - b * _quotient(a, b),
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shift-left": operator.lshift,
    "shift-right-arithmetic": operator.rshift,
}


_UNARY: Mapping[str, Callable[[int], int]] = {
    "negate": operator.neg,
    "abs": abs,
    "sign": lambda a: (a > 0) - (a < 0),
}


@dataclasses.dataclass(slots=True, kw_only=True)
class Frame:
    """One call of a computation.

    Attributes:
      computation: The computation.
      arguments: For each parameter, either an operand of the caller, as (frame, name), or a tuple
        of integers. An unknown integer is None.
      known: Values computed so far, by instruction.
    """

    computation: Computation
    arguments: tuple[tuple[Frame, str] | tuple[int | None, ...], ...] = ()
    known: dict[str, int | None] = dataclasses.field(default_factory=dict)


def called(module: Module, name: str, frame: Frame, operands: tuple[str, ...]) -> Frame:
    """Return the frame of a computation that is called with operands of another frame."""
    return Frame(
        computation=module.computations[name],
        arguments=tuple((frame, operand) for operand in operands),
    )


def trip_count(module: Module, frame: Frame, loop: Instruction) -> int | None:
    """Return the trip count of a `while`, or None if it depends on data."""
    attributes = loop.attributes()
    stated = _KNOWN.search(attributes.get("backend_config", ""))
    if stated:
        return int(stated[1])
    condition = module.computations[attributes["condition"].lstrip("%")]
    body = module.computations[attributes["body"].lstrip("%")]
    try:
        return _run(module, condition, body, _start(module, frame, loop))
    # `_value` is recursive. A very long chain of instructions overflows Python's stack. The count
    # is then unknown.
    except RecursionError:
        return None


def body_frame(module: Module, frame: Frame, loop: Instruction) -> Frame:
    """Return the frame of a loop's body, with those integers of the state that no trip changes."""
    body = module.computations[loop.attributes()["body"].lstrip("%")]
    start = _start(module, frame, loop)
    fixed = tuple(value if _unchanged(body, index) else None for index, value in enumerate(start))
    return Frame(computation=body, arguments=(fixed,))


def _start(module: Module, frame: Frame, loop: Instruction) -> tuple[int | None, ...]:
    """Return the integers of a loop's start values; empty if the state is not a flat tuple."""
    body = module.computations[loop.attributes()["body"].lstrip("%")]
    # `loop.shapes` has the shapes of nested tuples one after another. So with a nested tuple, the
    # position of a shape is not the position of an element of the state.
    nested = body.root.opcode == "tuple" and len(body.root.operands) != len(loop.shapes)
    if nested or not loop.is_tuple:
        return ()
    return tuple(
        _element(module, frame, loop.operands[0], index)
        if shape.dtype in _INTEGERS and shape.elements == 1
        else None
        for index, shape in enumerate(loop.shapes)
    )


def _run(
    module: Module, condition: Computation, body: Computation, state: tuple[int | None, ...]
) -> int | None:
    for trips in range(LIMIT):
        goes_on = _value(
            module, Frame(computation=condition, arguments=(state,)), condition.root.name
        )
        if goes_on is None:
            return None
        if not goes_on:
            return trips
        inside = Frame(computation=body, arguments=(state,))
        following = tuple(
            # Elements that do not start as an integer, such as arrays, are never computed.
            None if value is None else _element(module, inside, body.root.name, index)
            for index, value in enumerate(state)
        )
        if following == state:
            return None
        state = following
    return None


def _unchanged(body: Computation, index: int) -> bool:
    """Tell whether a body passes one element of its state on unchanged."""
    if body.root.opcode != "tuple":
        return False
    instruction = body.instructions[body.root.operands[index]]
    while instruction.opcode in ("copy", "bitcast"):
        instruction = body.instructions[instruction.operands[0]]
    if instruction.opcode != "get-tuple-element" or int(instruction.attributes()["index"]) != index:
        return False
    return body.instructions[instruction.operands[0]].opcode == "parameter"


def _element(module: Module, frame: Frame, name: str, index: int) -> int | None:
    """Return one integer of a tuple, or None."""
    instruction = frame.computation.instructions[name]
    if instruction.opcode == "tuple":
        return _value(module, frame, instruction.operands[index])
    if instruction.opcode in ("copy", "opt-barrier"):
        return _element(module, frame, instruction.operands[0], index)
    if instruction.opcode == "parameter":
        argument = _argument(frame, instruction)
        if argument and isinstance(argument[0], Frame):
            return _element(module, argument[0], argument[1], index)
        value: int | None = argument[index] if index < len(argument) else None
        return value
    if instruction.opcode in ("fusion", "call"):
        inner = called(module, _callee(instruction), frame, instruction.operands)
        return _element(module, inner, inner.computation.root.name, index)
    return None


def _argument(frame: Frame, parameter: Instruction) -> Any:
    at = int(parameter.literal)
    return frame.arguments[at] if at < len(frame.arguments) else ()


def _callee(instruction: Instruction) -> str:
    attributes = instruction.attributes()
    return (attributes.get("calls") or attributes["to_apply"]).lstrip("%")


def _value(module: Module, frame: Frame, name: str) -> int | None:
    """Return the integer that an instruction computes; None if unknown or not a single integer."""
    if name not in frame.known:
        instruction = frame.computation.instructions[name]
        fits = (
            instruction.shapes
            and instruction.shapes[0].dtype in _INTEGERS
            and instruction.shapes[0].elements == 1
        )
        value = _computed(module, frame, instruction) if fits else None
        frame.known[name] = None if value is None else _wrapped(value, instruction.shapes[0].dtype)
    return frame.known[name]


def _computed(module: Module, frame: Frame, instruction: Instruction) -> int | None:
    if instruction.opcode == "constant":
        text = instruction.literal.strip("{} ")
        if text in ("true", "false"):
            return int(text == "true")
        return int(text) if re.fullmatch(r"-?\d+", text) else None
    if instruction.opcode == "get-tuple-element":
        return _element(
            module, frame, instruction.operands[0], int(instruction.attributes()["index"])
        )
    if instruction.opcode == "parameter":
        # An argument is either an operand of the caller, as (frame, name), or the tuple of a loop's
        # state. A tuple is not an integer: `_element` reads its elements.
        argument = _argument(frame, instruction)
        return _value(module, *argument) if argument and isinstance(argument[0], Frame) else None
    if instruction.opcode in ("fusion", "call"):
        inner = called(module, _callee(instruction), frame, instruction.operands)
        return _value(module, inner, inner.computation.root.name)
    if instruction.opcode in _SAME:
        # copy-start returns (copy, original, context). Its operand is the original.
        source = frame.computation.instructions[instruction.operands[0]]
        return _value(
            module,
            frame,
            source.operands[0] if source.opcode == "copy-start" else instruction.operands[0],
        )
    return _arithmetic(
        instruction, [_value(module, frame, operand) for operand in instruction.operands]
    )


def _arithmetic(instruction: Instruction, operands: list[int | None]) -> int | None:
    values = [value for value in operands if value is not None]
    if len(values) < len(operands):
        return None
    if instruction.opcode in _BINARY:
        if instruction.opcode in ("divide", "remainder") and values[1] == 0:
            return None
        return _BINARY[instruction.opcode](values[0], values[1])
    if instruction.opcode == "shift-right-logical":
        # Python's `>>` keeps the sign, so the bits of the type are cut out first.
        return (values[0] & ((1 << BITS[instruction.shapes[0].dtype]) - 1)) >> values[1]
    if instruction.opcode == "compare":
        return int(_COMPARE[instruction.attributes()["direction"]](values[0], values[1]))
    if instruction.opcode == "select":
        return values[1] if values[0] else values[2]
    if instruction.opcode == "clamp":
        return max(values[0], min(values[1], values[2]))
    if instruction.opcode == "not":
        return int(not values[0]) if instruction.shapes[0].dtype == "pred" else ~values[0]
    unary = _UNARY.get(instruction.opcode)
    return None if unary is None else unary(values[0])


def _wrapped(value: int, dtype: str) -> int:
    """Wrap a value to the range of its type."""
    if dtype == "pred":
        return int(bool(value))
    bits = BITS[dtype]
    value &= (1 << bits) - 1
    return value - (1 << bits) if dtype.startswith("s") and value >> (bits - 1) else value
