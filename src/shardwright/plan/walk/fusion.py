"""Choose the values that a compiler fuses into their uses.

A fused value takes no memory, but keeps its operands in memory.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Final

from shardwright.plan.walk.entries import Buffer, Entry

# Bytes of the scratch memory that compilers for TPUs give one kernel by default.
_KERNEL: Final = 16 * 2**20
# Most elements of the weight of a matmul inside the kernel of another matmul, as measured for v5e:
# for float32 and bfloat16, and widths from 64 to 2,048.
_NESTED: Final = 9 * 2**17
_SMALL: Final = 16  # an operand is negligible if it is this many times smaller than the value


class Fusion(enum.Enum):
    """Which values a compiler fuses into their uses. The first two choices need the most memory.

    Attributes:
      NARROW: Values with one use are fused. Values with several uses are fused if they are cheap to
        compute again from values in memory. A conversion to a narrower type is kept in memory if
        its operand is fused.
      WIDE: Conversions are fused into all uses. Values that a reduction reads are kept in memory.
      MOST: Values that are expensive to compute again are fused, too, if that saves memory.
      EAGER: Only values whose fusion saves memory are fused.
    """

    NARROW = enum.auto()
    WIDE = enum.auto()
    MOST = enum.auto()
    EAGER = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Who reads each buffer of a program. The readers are the same for all choices of `Fusion`.

    Attributes:
      counts: Buffer -> number of equations that read it.
      matmuls: Buffer -> number of matmuls that read it.
      needed: Buffers that must be in memory: results, and operands of loops.
      stacked: Buffers that a loop writes to its stacked outputs (the `ys` of a scan).
      joined: Values whose uses are all in one kernel, see `_joined`.
      reach: Buffer -> position of the last equation that reads it, see `_reach`.
    """

    counts: Mapping[Buffer, int]
    matmuls: Mapping[Buffer, int]
    needed: frozenset[Buffer]
    stacked: frozenset[Buffer]
    joined: frozenset[Buffer]
    reach: Mapping[Buffer, int]


def find_reads(
    entries: Sequence[Entry], results: Iterable[Buffer], stacked: Iterable[Buffer]
) -> Reads:
    """Find who reads each buffer.

    Args:
      entries: The equations, in order.
      results: Buffers that are alive at the end.
      stacked: Buffers that a loop writes to its stacked outputs (the `ys` of a scan).
    """
    # A loop and a kernel read their operands from memory: XLA fuses nothing across their boundary.
    needed = frozenset(results).union(*(entry.uses for entry in entries if entry.loop))
    matmuls = (entry for entry in entries if entry.matmul)
    return Reads(
        # A set, because an equation that reads a value twice, as `x * x` does, is one use.
        counts=Counter(buffer for entry in entries for buffer in set(entry.uses)),
        matmuls=Counter(buffer for entry in matmuls for buffer in set(entry.uses)),
        needed=needed,
        stacked=frozenset(stacked),
        joined=frozenset(_joined(entries, needed)),
        reach=_reach(entries),
    )


def fused_buffers(
    entries: Sequence[Entry], reads: Reads, fusion: Fusion, *, join: bool = True
) -> set[Buffer]:
    """Return the buffers that are fused into their uses.

    Args:
      entries: The equations, in order.
      reads: Who reads each buffer.
      fusion: Which values are fused.
      join: Whether a value is fused if all equations that use it are in one kernel, see `_joined`.
        For `EAGER`, this is never a reason to fuse.
    """
    fused: set[Buffer] = set()
    for entry in entries:
        # Go in order, since a value is computed again from operands that may be fused themselves.
        for buffer in entry.births:
            # The stacked output is counted outside of the loop's body, so a value that is only
            # written to it needs no memory here.
            written = buffer in reads.stacked and not reads.counts.get(buffer)
            may_fuse = buffer.operands is not None and buffer not in reads.needed
            joins = join and fusion is not Fusion.EAGER and buffer in reads.joined
            if written or (may_fuse and (joins or _fuses(buffer, reads, fusion, fused))):
                fused.add(buffer)
    return fused


def _fuses(buffer: Buffer, reads: Reads, fusion: Fusion, fused: set[Buffer]) -> bool:
    # With one use, fusion does not repeat the computation.
    if fusion is not Fusion.EAGER and reads.counts.get(buffer, 0) <= 1:
        return True
    again = _is_repeated(buffer, reads, fusion, fused)
    if fusion is not Fusion.NARROW:
        return buffer.cheap or again
    return again or _is_copy(buffer, fused) or _is_at_hand(buffer, fused, reads.reach)


def _is_repeated(buffer: Buffer, reads: Reads, fusion: Fusion, fused: set[Buffer]) -> bool:
    """Tell whether a value with several uses is computed again for each of them."""
    # A compiler keeps the operands in memory and computes the value again for each use, if the
    # operands together take no more memory than the value.
    operands = {each for operand in buffer.operands or () for each in held(operand, fused)}
    if fusion is Fusion.NARROW and reads.matmuls.get(buffer, 0) > 1:
        # A slice that a loop reads in place takes no memory, but reading it takes time, so count it
        # as an operand. XLA computes the gradient of a gate from such slices, and does so only
        # once, although two matmuls use this gradient.
        operands |= {each for each in _closest(buffer, _is_start) if each.operands is not None}
    # `MOST` also fuses a value with a small operand, such as the mean of each row. `NARROW` and
    # `WIDE`, which give the upper end, do not fuse it. Otherwise the upper end would be 0.96 of the
    # peak for `unrolled_without_remat`, a program that was not used to fit the model.
    small = buffer.size // _SMALL if fusion is Fusion.MOST else 0
    if sum(each.size for each in operands if each.size > small) > buffer.size:
        return False
    if buffer.reduced:
        starts = roots(buffer)
        if any(start.turned for start in starts):
            # As measured for grouped queries: the scores are in memory, but no value of the
            # softmax.
            return True
        if buffer.costly and _in_one_kernel(buffer) and any(start.row for start in starts):
            # As measured for a softmax over scores of four dims, in each program and mesh: the
            # kernel of the scores also computes `scores - max`, which is in memory in float32.
            return False
        if fusion is Fusion.WIDE:
            # For a softmax over a vocabulary, the logits are in memory, and not their exponentials.
            return buffer.costly or _in_one_kernel(buffer, min_row_bytes=1)
    # Each matmul that reads an activation, such as `silu(h)`, computes it again, even if this takes
    # exponentials.
    if fusion is not Fusion.NARROW or not buffer.costly or not buffer.reduced:
        return True
    return reads.matmuls.get(buffer, 0) <= 1 and not _in_one_kernel(buffer)


def _joined(entries: Sequence[Entry], needed: Container[Buffer]) -> set[Buffer]:
    """Return the elementwise values whose uses are all in one kernel.

    XLA's instruction fusion visits users first. If all users of a value are already in one fusion,
    the value joins it, however often it is read there. The inner values of the derivative of a GELU
    are an example.
    """
    readers: dict[Buffer, set[int]] = {}
    joined = set[Buffer]()
    # Go from the end, so that the kernel of each user is known before the value that it reads.
    for at in range(len(entries) - 1, -1, -1):
        entry = entries[at]
        kernel = at
        if len(entry.births) == 1:
            (birth,) = entry.births
            if birth.operands is not None and birth not in needed:
                found = readers.get(birth, set())
                if len(found) == 1:
                    # The chain ends at the kernel of the users: a matmul, a reduction, or a value
                    # that other kernels read, too.
                    (kernel,) = found
                    joined.add(birth)
        for use in entry.uses:
            readers.setdefault(use, set()).add(kernel)
    return joined


def _reach(entries: Sequence[Entry]) -> dict[Buffer, int]:
    """Return, for each buffer, the position of the last equation that reads it.

    An equation that reads a value computed elementwise from the buffer counts as a reader, too.
    """
    reach: dict[Buffer, int] = {}
    for at in range(len(entries) - 1, -1, -1):
        births = entries[at].births
        later = [reach.get(birth, at) for birth in births if birth.operands is not None]
        for use in entries[at].uses:
            reach[use] = max(reach.get(use, 0), at, *later)
    return reach


def read_instead(
    entries: Sequence[Entry], fused: Container[Buffer]
) -> dict[Buffer, tuple[Buffer, ...]]:
    """Return, for each fused buffer, the buffers that its uses read in its place.

    Each equation comes after the equations that make its operands, so one pass is enough.

    Args:
      entries: The equations, in order.
      fused: Buffers that are fused into their uses.
    """
    found: dict[Buffer, tuple[Buffer, ...]] = {}
    makers = {birth: entry for entry in entries for birth in entry.births if birth in fused}
    for buffer, maker in makers.items():
        read: dict[Buffer, None] = {}
        # A matmul inside the kernel of another one has no `operands`.
        for operand in maker.uses if buffer.operands is None else buffer.operands:
            read.update(dict.fromkeys(found[operand] if operand in fused else (operand,)))
        found[buffer] = tuple(read)
    return found


def inside_kernels(
    entries: Sequence[Entry], fused: Mapping[Buffer, Sequence[Buffer]]
) -> set[Buffer]:
    """Return the matmuls whose results a compiler at its best never keeps in memory.

    Such a result has only one reader, which is one of:

    * An elementwise equation whose result is kept in memory. The kernel of the matmul computes this
      result too.
    * A second matmul. Its kernel computes the first matmul row by row. An example is the forward
      pass of a small feed-forward layer. See `nested_matmuls` for TPUs; elsewhere the weight of the
      first matmul must fit into the memory of a kernel.

    Args:
      entries: The equations, in order.
      fused: Buffer that is fused into its uses -> the buffers that its uses read instead.
    """
    inside = nested_matmuls(entries, fused)
    for buffer, reader in _only_readers(entries, fused).items():
        elementwise = any(birth.operands is not None for birth in reader.births)
        fits = not buffer.weight and 2 * buffer.row < _KERNEL
        if elementwise or (reader.matmul and not reader.parts and fits):
            inside.add(buffer)
    return inside


def nested_matmuls(
    entries: Sequence[Entry], fused: Mapping[Buffer, Sequence[Buffer]]
) -> set[Buffer]:
    """Return the matmuls that compilers for TPUs run inside the kernel of another matmul.

    The other matmul is the only reader, and its kernel has room for the weight of the first one. A
    collective matmul has no such room, since it is a loop over parts.

    Args:
      entries: The equations, in order.
      fused: Buffer that is fused into its uses -> the buffers that its uses read instead.
    """
    return {
        buffer
        for buffer, reader in _only_readers(entries, fused).items()
        if reader.matmul and not reader.parts and 0 < buffer.weight <= _NESTED
    }


def _only_readers(
    entries: Sequence[Entry], fused: Mapping[Buffer, Sequence[Buffer]]
) -> dict[Buffer, Entry]:
    """Return, for each result of a matmul that only one equation reads, this equation."""
    readers: dict[Buffer, list[Entry]] = {}
    for entry in entries:
        # An equation whose results are fused is a part of the equation that uses them. That
        # equation reads the operands of the fused one.
        if entry.births and all(birth in fused for birth in entry.births):
            continue
        for buffer in {each for use in entry.uses for each in fused.get(use, (use,))}:
            readers.setdefault(buffer, []).append(entry)
    matmuls = (birth for entry in entries if entry.matmul for birth in entry.births)
    return {each: readers[each][0] for each in matmuls if len(readers.get(each, ())) == 1}


def _is_copy(buffer: Buffer, fused: set[Buffer]) -> bool:
    """Tell whether a value is another form of a value in memory, such as a conversion."""
    while buffer.cheap and len(buffer.operands or ()) == 1:
        (buffer,) = buffer.operands or ()
        if buffer not in fused:
            return True
    # A value without operands is made of constants, or is a slice that a loop reads in place.
    return buffer.cheap and not buffer.operands


def _is_at_hand(buffer: Buffer, fused: set[Buffer], reach: Mapping[Buffer, int]) -> bool:
    """Tell whether a value is cheap to compute from a value that is in memory longer anyway."""
    small = buffer.size // _SMALL
    # XLA's `InstructionFusion` computes a value with at most one large operand again for each use:
    # this reads no more bytes than loading the value.
    large = [each for each in held(buffer, {*fused, buffer}) if each.size > small]
    if len(large) != 1 or (buffer.costly and not large[0].costly):
        return False
    return reach.get(large[0], 0) > reach.get(buffer, 0)


def _in_one_kernel(buffer: Buffer, *, min_row_bytes: int = 0) -> bool:
    """Tell whether a TPU may compute a value in the kernel of the matmul that the value reads.

    The kernel then has whole rows of the matmul's result, as a softmax needs. The kernel keeps two
    copies of the operand that every row needs, in order to read ahead.

    Args:
      buffer: The value.
      min_row_bytes: Fewest bytes of the operand that every row needs. With 0, the value need not
        be computed from a matmul.
    """
    starts = roots(buffer)
    return all(min_row_bytes <= 2 * each.row < _KERNEL and not each.turned for each in starts)


def roots(buffer: Buffer) -> list[Buffer]:
    """Return the closest buffers that a buffer is computed from and that cannot be fused."""
    return _closest(buffer, lambda each: each.operands is None)


def held(buffer: Buffer, fused: set[Buffer]) -> list[Buffer]:
    """Return what a use of a buffer reads: the buffer, or the operands of a fused buffer."""
    # A shortcut for most buffers: this function runs for every use, for each choice of `Fusion`.
    return _closest(buffer, lambda each: each not in fused) if buffer in fused else [buffer]


def _is_start(buffer: Buffer) -> bool:
    """Tell whether a buffer is computed from no other buffer, or cannot be fused."""
    return not buffer.operands


def _closest(buffer: Buffer, ends: Callable[[Buffer], bool]) -> list[Buffer]:
    """Go back through the operands of a buffer to the first buffers for which `ends` is true."""
    found: dict[Buffer, None] = {}
    # In a GELU, for example, several paths lead to one operand. Each operand is followed only once.
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
