"""Choose the values that a compiler fuses into their uses, which take no memory.

A fused value keeps its operands in memory instead.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Final

from shardwright.plan.walk.entries import Buffer, Entry

# Bytes of the scratch memory that compilers for TPUs give one kernel by default.
_KERNEL: Final = 16 * 2**20
_SMALL: Final = 16  # an operand that is that many times smaller than a value hardly counts


class Fusion(enum.Enum):
    """Which values a compiler fuses into their uses. The first two were seen to take the most.

    Attributes:
      NARROW: Values with one use, and those with several that are cheap to compute again from what
        is in memory. A conversion to a narrower type is held if what it converts is fused.
      WIDE: Conversions are fused into all uses. Values that a reduction reads are held.
      MOST: Values that are expensive to compute again are fused, too, if that saves memory.
      EAGER: Only values whose fusion saves memory are fused.
    """

    NARROW = enum.auto()
    WIDE = enum.auto()
    MOST = enum.auto()
    EAGER = enum.auto()


def fused_buffers(
    entries: Sequence[Entry], results: Iterable[Buffer], stacked: Container[Buffer], fusion: Fusion
) -> set[Buffer]:
    """Return the buffers that are fused into their uses.

    Args:
      entries: The equations, in order.
      results: Buffers that are alive at the end.
      stacked: Buffers that are written to the stacks of a loop.
      fusion: Which values are fused.
    """
    uses = Counter(buffer for entry in entries for buffer in set(entry.uses))
    matmuls = Counter(buffer for entry in entries if entry.matmul for buffer in set(entry.uses))
    needed = set(results).union(*(entry.uses for entry in entries if entry.loop))
    reach = _reach(entries) if fusion is Fusion.NARROW else {}
    fused: set[Buffer] = set()

    def again(buffer: Buffer) -> bool:
        """Tell whether the value is computed again for each use."""
        if not _saves_memory(buffer, fused):
            return False
        if fusion is Fusion.WIDE and buffer.reduced:
            # A softmax holds its scores or their exponentials, and not both.
            return not buffer.costly and _in_one_kernel(buffer, min_row_bytes=1)
        if fusion is not Fusion.NARROW or not buffer.costly:
            return True
        kept = buffer.reduced and _in_one_kernel(buffer)
        return matmuls[buffer] <= 1 and not kept

    def fuses(buffer: Buffer) -> bool:
        if fusion is not Fusion.EAGER and uses[buffer] <= 1:
            return True
        if fusion is not Fusion.NARROW:
            return buffer.cheap or again(buffer)
        return _is_copy(buffer, fused) or _is_at_hand(buffer, fused, reach) or again(buffer)

    for entry in entries:
        for buffer in entry.births:
            written = buffer in stacked and not uses[buffer]
            may_fuse = buffer.operands is not None and buffer not in needed
            if written or (may_fuse and fuses(buffer)):
                fused.add(buffer)
    return fused


def _reach(entries: Sequence[Entry]) -> dict[Buffer, int]:
    """Return the last equation that reads each buffer, or what is computed from it by element."""
    reach: dict[Buffer, int] = {}
    for at in range(len(entries) - 1, -1, -1):
        births = entries[at].births
        later = [reach.get(birth, at) for birth in births if birth.operands is not None]
        for use in entries[at].uses:
            reach[use] = max(reach.get(use, 0), at, *later)
    return reach


def inside_kernels(entries: Sequence[Entry], fused: set[Buffer]) -> set[Buffer]:
    """Return the matmuls that a compiler at its best never holds. Only one equation reads them.

    * An elementwise value, which is held: the kernel of the matmul computes it.
    * Another matmul: its kernel computes the first one row by row, if the weight fits into the
      memory of a kernel, as in the forward pass of a small feed-forward layer.

    Args:
      entries: The equations, in order.
      fused: Buffers that are fused into their uses.
    """
    readers: dict[Buffer, list[Entry]] = {}
    for entry in entries:
        if entry.births and fused.issuperset(entry.births):
            continue
        for buffer in {each for use in entry.uses for each in held(use, fused)}:
            readers.setdefault(buffer, []).append(entry)
    inside = set[Buffer]()
    for buffer in (birth for entry in entries if entry.matmul for birth in entry.births):
        if len(readers.get(buffer, ())) != 1:
            continue
        [reader] = readers[buffer]
        elementwise = any(birth.operands is not None for birth in reader.births)
        if elementwise or (reader.matmul and 2 * buffer.row < _KERNEL):
            inside.add(buffer)
    return inside


def _saves_memory(buffer: Buffer, fused: set[Buffer]) -> bool:
    """Tell whether the operands of a value together take no more memory than the value.

    A compiler then holds the operands, and computes the value again for each use.
    """
    operands = {each for operand in buffer.operands or () for each in held(operand, fused)}
    return sum(operand.size for operand in operands) <= buffer.size


def _is_copy(buffer: Buffer, fused: set[Buffer]) -> bool:
    """Tell whether a value is another form of one that is in memory, such as a conversion."""
    while buffer.cheap and len(buffer.operands or ()) == 1:
        (buffer,) = buffer.operands or ()
        if buffer not in fused:
            return True
    return buffer.cheap and not buffer.operands


def _is_at_hand(buffer: Buffer, fused: set[Buffer], reach: Mapping[Buffer, int]) -> bool:
    """Tell whether a value is cheap to compute from one that is in memory longer than it anyway."""
    small = buffer.size // _SMALL
    large = [each for each in held(buffer, {*fused, buffer}) if each.size > small]
    if len(large) != 1 or (buffer.costly and not large[0].costly):
        return False
    return reach.get(large[0], 0) > reach.get(buffer, 0)


def _in_one_kernel(buffer: Buffer, *, min_row_bytes: int = 0) -> bool:
    """Tell whether a TPU may compute a value in the kernel of the matmul that it starts with.

    The kernel then has whole rows of the matmul, as for a softmax. It holds the operand that makes
    a row twice, in order to read ahead.

    Args:
      buffer: The value.
      min_row_bytes: Least bytes of that operand. With 0, the value need not start with a matmul.
    """
    return all(min_row_bytes <= 2 * root.row < _KERNEL for root in roots(buffer))


def roots(buffer: Buffer) -> list[Buffer]:
    """Return the closest buffers that cannot be fused, from which a buffer is computed."""
    return _closest(buffer, lambda each: each.operands is None)


def held(buffer: Buffer, fused: set[Buffer]) -> list[Buffer]:
    """Return the buffers that a use of a buffer reads: itself, or its operands if it is fused."""
    return _closest(buffer, lambda each: each not in fused)


def _closest(buffer: Buffer, ends: Callable[[Buffer], bool]) -> list[Buffer]:
    """Return the first buffers for which `ends` holds, from a buffer back through its operands."""
    found: dict[Buffer, None] = {}
    seen = {buffer}
    waiting = [buffer]
    while waiting:
        current = waiting.pop()
        if ends(current):
            found[current] = None
            continue
        for operand in current.operands or ():
            if operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    return list(found)
