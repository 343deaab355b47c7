"""Recover the element types of a program's collectives where the backend has widened them.

XLA for CPUs converts some types before a collective and converts the result back: bfloat16 is sent
as float32, floats of 8 and 4 bits as float16 (float8_e8m0fnu as float32), and int4 as int8. Each of
these signs shows that the backend converted:

* The reduction's computation has a name with `_promoted`.
* The reduction's computation still adds values of the narrow type.
* There is a conversion right before the collective, and one right after it. A conversion that the
  program itself contains cannot be told from one of the backend.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.plan.collectives.hlo import Computation, Instruction, Module, bits_of

# Key: type in which XLA reduces. Value: type of the program, which XLA widens for reductions.
_PROMOTED = {"f32": "bf16", "s32": "s16", "u32": "u16"}
# Key: type that XLA sends in any collective. Value: integer type of the program, which XLA widens.
# No entry has the value s8: a program may itself widen s8 to s32, to add it.
_UNPACKED = {"s8": "s4", "u8": "u4"}
_MOVES = frozenset(
    {"bitcast", "copy", "reshape", "transpose", "slice", "dynamic-slice", "broadcast"}
)
_FLOATS = ("f", "bf")


def program_type(
    module: Module, computation: Computation, instruction: Instruction, position: int
) -> str:
    """Return the element type of an operand of a collective before the backend widened it."""
    operand = computation.instructions[instruction.operands[position]]
    wire = operand.shapes[0].dtype
    lone = len(instruction.operands) == 1
    reduction = instruction.attributes().get("to_apply", "")
    # XLA names re-associated sums `_reassoc_promoted`, even if the program itself adds in `wire`.
    # So this suffix alone does not show that XLA widened the type.
    promoted = wire in _PROMOTED and reduction.removesuffix("_reassoc_promoted").endswith(
        "_promoted"
    )
    if lone and reduction:
        if promoted:
            return _PROMOTED[wire]
        adder = module.computations.get(reduction.lstrip("%"))  # absent if the text was cut
        adds = wire if adder is None else adder.root.shapes[0].dtype
        # Return only types of up to 8 bits. If XLA for CPUs widens a larger type, such as bf16, it
        # names the adder `_promoted`. Without that name, the program may be mixed precision on
        # another backend, and itself add in the wider type.
        return adds if bits_of(adds) <= 8 and _widens(adds, wire) else wire
    goes_to = set(
        _uses(
            module, computation, instruction, None if lone or not instruction.is_tuple else position
        )
    )
    # XLA may combine reductions and promote only some of them. So a type counts as narrow only if
    # the result is converted back to it. A promoted operand may lack a conversion before the
    # collective, because a dot may compute it in the wide type.
    if len(goes_to) == 1 and (promoted or goes_to == set(_sources(module, computation, operand))):
        narrow = goes_to.pop()
        if _widens(narrow, wire):
            return narrow
    return wire


def _widens(narrow: str, wire: str) -> bool:
    """Tell whether a backend may have widened one type to another."""
    if wire.startswith(_FLOATS):
        return narrow.startswith(_FLOATS) and bits_of(narrow) < bits_of(wire)
    return _UNPACKED.get(wire) == narrow


def _sources(module: Module, computation: Computation, instruction: Instruction) -> Iterator[str]:
    """Yield the types that a value was converted from; `""` if it was not converted."""
    if instruction.opcode == "convert":
        yield computation.instructions[instruction.operands[0]].shapes[0].dtype
    elif instruction.opcode in _MOVES:
        yield from _sources(module, computation, computation.instructions[instruction.operands[0]])
    elif instruction.opcode == "fusion":
        inner = module.computations[instruction.attributes()["calls"].lstrip("%")]
        yield from _sources(module, inner, inner.root)
    elif instruction.opcode == "concatenate":
        for operand in instruction.operands:
            yield from _sources(module, computation, computation.instructions[operand])
    else:
        yield ""


def _uses(
    module: Module, computation: Computation, instruction: Instruction, index: int | None
) -> Iterator[str]:
    """Yield the types that users of a value convert it to; `""` for any other use."""
    if instruction.is_root:
        yield ""
    for user in computation.users.get(instruction.name, ()):
        if user.opcode == "get-tuple-element":
            if index is None or int(user.attributes()["index"]) == index:
                yield from _uses(module, computation, user, None)
        elif user.opcode == "convert":
            yield user.shapes[0].dtype
        elif user.opcode in _MOVES or user.opcode.endswith("-done"):
            yield from _uses(module, computation, user, index)
        elif user.opcode == "fusion":
            inner = module.computations[user.attributes()["calls"].lstrip("%")]
            places = [at for at, operand in enumerate(user.operands) if operand == instruction.name]
            for parameter in inner.instructions.values():
                if parameter.opcode == "parameter" and int(parameter.literal) in places:
                    yield from _uses(module, inner, parameter, None)
        else:
            yield ""
