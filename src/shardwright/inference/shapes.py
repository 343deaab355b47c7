"""Equations that move, cut, join or repeat dims."""

from __future__ import annotations

import itertools

from shardwright.dims.table import correspondence
from shardwright.inference.atoms import Atom, AtomDim, finest, new_dim, regroup, size_of
from shardwright.inference.facts import DimSlice, Use
from shardwright.inference.step import ArrayFacts, InferenceStep


def transpose(step: InferenceStep) -> list[ArrayFacts]:
    """Permute the dims."""
    known = correspondence(step.equation)
    assert known is not None
    return [step.result(dims) for dims in step.aligned(known)]


def reshape(step: InferenceStep) -> list[ArrayFacts]:
    """Regroup the factors of all dims."""
    return [step.result(regroup(step.values[0].dims, step.shapes[0]), step.values[0].one_hot)]


def broadcast(step: InferenceStep) -> list[ArrayFacts]:
    """Keep the dims whose size does not change. Other dims are new."""
    known = correspondence(step.equation)
    assert known is not None
    return [step.result(step.aligned(known)[0], step.values[0].one_hot)]


def iota(step: InferenceStep) -> list[ArrayFacts]:
    """Mark the dim along which the numbers of the iota increase."""
    # An iota that is compared with indices gives one-hot rows. An iota that is used as an index
    # gives positions.
    at = step.parameters["dimension"]
    return [
        step.result([(Atom(size, counts=at == axis),) for axis, size in enumerate(step.shapes[0])])
    ]


def cut(step: InferenceStep) -> list[ArrayFacts]:
    """Keep the dims that are not cut. A shorter dim is a slice of the old one."""
    known, parameters, value = correspondence(step.equation), step.parameters, step.values[0]
    assert known is not None
    rank = range(len(value.dims))
    # A dynamic slice has no `start_indices`: its starts are not known.
    starts = parameters.get("start_indices", (None,) * len(rank))
    strides = parameters.get("strides") or (1,) * len(rank)
    # Each part of a split starts where the part before it ends.
    offsets = [0, *itertools.accumulate(parameters.get("sizes", ()))]
    results = []
    for shape, side, offset in zip(step.shapes, known.results, offsets, strict=False):
        begins = (int(offset),) * len(rank) if "sizes" in parameters else starts
        dims = list(value.dims)
        for at in (at for at in rank if side[at] != known.operands[0][at]):
            dims[at] = (
                dim_slice(step, dims[at], shape[at], begins[at])
                if strides[at] == 1
                else _every(step, dims[at], shape[at], strides[at])
            )
        results.append(step.result(dims))
    return results


def _every(step: InferenceStep, whole: AtomDim, size: int, stride: int) -> AtomDim:
    """Return the dim of a strided slice.

    If the stride divides the dim, the result is the major factor of the dim.
    """
    if size * stride != size_of(finest(whole)):
        return dim_slice(step, whole, size)
    # If the gate and up projections of an MLP are interleaved, their dim is (elements, 2). A slice
    # with a stride of 2 takes one of the two projections.
    major, minor = regroup([whole], [size, stride])
    step.facts.rows.append(Use(dim=minor, location=step.location))
    return major


def unstack(step: InferenceStep) -> list[ArrayFacts]:
    """Drop the dim along which the array is unstacked."""
    axis, dims = step.parameters["axis"], step.values[0].dims
    step.facts.rows.append(Use(dim=dims[axis], location=step.location))
    others = [dim for at, dim in enumerate(dims) if at != axis]
    return [step.result(others)] * len(step.shapes)


def dim_slice(step: InferenceStep, whole: AtomDim, size: int, start: int | None = None) -> AtomDim:
    """Return a dim that is a slice of another dim.

    Args:
      step: The equation that cuts the dim.
      whole: The dim that is cut.
      size: Size of the slice.
      start: First element of the slice, or None if it is not known.
    """
    if size >= size_of(finest(whole)):
        return new_dim(size)  # padding, not a slice
    # If the program takes single elements along a dim of a parameter, `names.name_rows` names the
    # dim EMPTY.
    if size == 1:
        step.facts.rows.append(Use(dim=whole, location=step.location))
    atoms = finest(whole)
    # A slice has an atom of its own, because dims are united only if their sizes are equal.
    is_learned, is_data = any(atom.learned for atom in atoms), step.values[0].data
    dim = (Atom(size, whole=whole, learned=is_learned, resized=is_data),)
    # Only slices with known starts can be joined to a whole, as in `slices._covering`.
    if start is not None:
        step.facts.slices.append(
            DimSlice(whole=whole, start=start, dim=dim, location=step.location)
        )
    return dim


def stack(step: InferenceStep) -> list[ArrayFacts]:
    """Align the dims of all operands, and insert a new dim at `axis`."""
    axis, known = step.parameters["axis"] % len(step.shapes[0]), correspondence(step.equation)
    assert known is not None
    (dims,) = step.aligned(known)
    is_learned = any(value.learned for value in step.values)
    stacked = (Atom(step.shapes[0][axis], learned=is_learned),)
    return [step.result([*dims[:axis], stacked, *dims[axis + 1 :]])]


def pad(step: InferenceStep) -> list[ArrayFacts]:
    """Keep the dims whose size does not change. Other dims are new."""
    pairs = zip(step.values[0].dims, step.operand_shapes[0], step.shapes[0], strict=True)
    is_data = step.values[0].data
    padded = [dim if new == old else (Atom(new, resized=is_data),) for dim, old, new in pairs]
    return [step.result(padded)]


def pool(step: InferenceStep) -> list[ArrayFacts]:
    """Keep the dims whose size does not change, such as batch. See `windowed` for the others."""
    pairs = zip(step.values[0].dims, step.shapes[0], strict=True)
    return [step.result([windowed(step, dim, size) for dim, size in pairs])] * len(step.shapes)


def windowed(step: InferenceStep, dim: AtomDim, size: int) -> AtomDim:
    """Return the dim of the windows along a dim.

    If the size changes, only a name from a seed stays. For example, the rows of an image keep their
    name and their mesh axis after a stride. Other names are not known yet: the rules find them
    later.
    """
    atoms = finest(dim)
    if size == size_of(atoms):
        return dim
    names = {atom.name for atom in atoms}
    atom = Atom(size, resized=step.values[0].data)
    if len(names) == 1 and size > 1:
        atom.name, atom.evidence = atoms[0].name, atoms[0].evidence
    return (atom,)


def concatenate(step: InferenceStep) -> list[ArrayFacts]:
    """Align the dims that are not joined.

    If all slices of a dim are joined, the result is that dim.
    """
    axis, size = step.parameters["dimension"], step.shapes[0][step.parameters["dimension"]]
    known = correspondence(step.equation)
    assert known is not None
    (dims,) = step.aligned(known)
    joined = _joined(step, [value.dims[axis] for value in step.values], size)
    return [step.result([*dims[:axis], joined, *dims[axis + 1 :]])]


def _joined(step: InferenceStep, parts: list[AtomDim], size: int) -> AtomDim:
    atoms = [atom for part in parts for atom in finest(part)]
    wholes = [atom.whole for atom in atoms]
    if (
        wholes
        and len(parts) > 1
        and all(whole is not None and size_of(finest(whole)) == size for whole in wholes)
    ):
        # Rotary embeddings cut the head dim in halves and join the halves again.
        first = wholes[0]
        assert first is not None
        for other in wholes[1:]:
            assert other is not None
            step.same(first, other)
        return first
    # Parts of size 1 have no factors: this is a stack, written as a concatenation.
    is_stack = not atoms and any(value.learned for value in step.values)
    is_learned = is_stack or any(atom.learned for atom in atoms)
    is_data = any(value.data for value in step.values)
    joined = (Atom(size, learned=is_learned, resized=is_data),)
    start = 0
    for part, shape in zip(parts, step.operand_shapes, strict=True):
        step.facts.slices.append(
            DimSlice(whole=joined, start=start, dim=part, location=step.location)
        )
        start += shape[step.parameters["dimension"]]
    return joined
