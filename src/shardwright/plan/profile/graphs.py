"""Name the kernels of CUDA graphs.

XLA for GPUs runs most operations as nodes of CUDA graphs, its "command buffers". In a profile, all
kernels of a graph have the operation name of the graph, such as `command_buffer_1`, and equal
fusions share a kernel. So neither the operation name nor the name of the kernel says which
operation ran. The number of the node does: XLA makes a node per operation, in the order of the
schedule. The kernels of a library, such as cuBLAS for a matmul, are a graph inside a node. They are
numbered after all nodes of XLA.
"""

from __future__ import annotations

import bisect
import difflib
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from shardwright.plan.collectives.hlo import Instruction, Module
from shardwright.plan.profile.recording import TimedOp

_GRAPH: Final = re.compile(r"command_buffer[\d_.]*")
# Opcodes that have no node in a CUDA graph, because they run nothing.
_NO_NODE: Final = frozenset(
    ("get-tuple-element", "bitcast", "parameter", "tuple", "constant", "after-all", "opt-barrier")
)
_CALL: Final = "custom-call"
_NUMBER: Final = re.compile(r"(_(\d+|clone|remat\d*))+$")


def named_kernels(operations: Sequence[TimedOp], module: Module) -> list[TimedOp]:
    """Return the operations of a device. Each kernel of a CUDA graph gets its operation's name.

    A kernel whose operation is not found keeps the name of the graph.
    """
    graphs: dict[str, dict[int, list[TimedOp]]] = defaultdict(lambda: defaultdict(list))
    for each in operations:
        if each.node >= 0 and _GRAPH.fullmatch(each.op):
            graphs[each.op][each.launch].append(each)
    # A profile may lack a part of the first or last launch of a graph, so take the launch with the
    # most kernels.
    names = {
        graph: _names(max(launches.values(), key=len), module) for graph, launches in graphs.items()
    }
    return [
        each._replace(op=names[each.op].get(each.node, each.op)) if each.op in names else each
        for each in operations
    ]


def _names(kernels: Sequence[TimedOp], module: Module) -> dict[int, str]:
    """Return the operation of each node of a graph, from one launch."""
    parts = [
        [each for each in computation.instructions.values() if each.opcode not in _NO_NODE]
        for computation in module.computations.values()
    ]
    stems = {_stem(each.name) for part in parts for each in part if each.opcode == "fusion"}
    nodes = {each.node: _stem(each.kernel) for each in kernels}
    last = max((node for node, stem in nodes.items() if stem in stems), default=-1)
    inner = [each for each in kernels if each.node > last]
    # A node of XLA without a kernel of its own contains the graph of a library.
    count = min((each.node for each in inner), default=last + 1)
    kinds = [nodes.get(node, _CALL) for node in range(count)]
    # The nodes of a graph come from one computation: the entry, or the body of a loop.
    aligned = max((_aligned(kinds, part) for part in parts), key=len)
    if len(aligned) < 0.9 * count:
        return {}
    names = {node: each.name for node, each in aligned.items()}
    own = sorted((each.start, each.node) for each in kernels if each.node < count)
    inside: dict[int, list[TimedOp]] = defaultdict(list)
    for each in sorted(inner, key=lambda kernel: kernel.node):
        at = bisect.bisect_right(own, (each.start, count)) - 1
        inside[own[at][1] if at >= 0 else -1].append(each)
    for before, launched in inside.items():
        calls = itertools.takewhile(lambda node: node not in nodes, range(before + 1, count))
        names |= dict(_shared([aligned[node] for node in calls if node in aligned], launched))
    return names


def _stem(name: str) -> str:
    """Return the name of an instruction or a kernel without its number.

    The operation `loop_add_fusion.3` runs the kernel `loop_add_fusion_3`, or the kernel of an equal
    fusion.
    """
    if name.lower().startswith("memcpy"):
        return "copy"
    return _NUMBER.sub("", name.replace(".", "_").replace("-", "_"))


def _aligned(kinds: Sequence[str], part: Sequence[Instruction]) -> dict[int, Instruction]:
    """Return the instruction of each node. Nodes and instructions are aligned by their kinds."""
    own = [_CALL if each.opcode == _CALL else _stem(each.name) for each in part]
    # Some fusions have two nodes, such as one that sets memory to 0 first.
    blocks = difflib.SequenceMatcher(None, kinds, own, autojunk=False).get_matching_blocks()
    return {block.a + at: part[block.b + at] for block in blocks for at in range(block.size)}


def _shared(calls: Sequence[Instruction], kernels: Sequence[TimedOp]) -> Iterator[tuple[int, str]]:
    """Yield (node of a kernel, name of the call that launched it), for consecutive calls."""
    if not calls:
        return
    # A matmul runs one kernel, maybe after a kernel that sets memory to 0. Attention may run
    # several kernels.
    count = sum(not _sets_memory(each) for each in kernels)
    several = next((at for at, each in enumerate(calls) if "__cublas" not in each.rest), -1)
    shares = [1] * len(calls)
    shares[several] += max(0, count - len(calls))
    owners = [each.name for each, share in zip(calls, shares, strict=True) for _ in range(share)]
    at = 0
    for each in kernels:
        yield each.node, owners[min(at, len(owners) - 1)]
        at += not _sets_memory(each)


def _sets_memory(kernel: TimedOp) -> bool:
    return kernel.kernel.lower().startswith("memset")
