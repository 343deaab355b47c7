"""Equations that read or write at indices."""

from __future__ import annotations

import dataclasses

from shardwright.dims.table import correspondence
from shardwright.inference import elementwise
from shardwright.inference.atoms import AtomDims, finest, new_dims
from shardwright.inference.facts import TableLookup, Use
from shardwright.inference.step import ArrayFacts, InferenceStep


def gather(step: InferenceStep) -> list[ArrayFacts]:
    """Keep the dims of the table that are read whole. The other dims come from the indices."""
    table, index = step.values[:2]
    numbers, sizes = step.parameters["dimension_numbers"], step.parameters["slice_sizes"]
    known = correspondence(step.equation)
    assert known is not None
    (dims,) = step.aligned(known)
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    row = [
        dim
        for at, dim in enumerate(table.dims)
        if at not in gone and sizes[at] == step.operand_shapes[0][at]
    ]
    _record_lookup(step, tuple(row))
    # Rows that the inputs select are not an elementwise function of the table, so they get a new
    # origin.
    origin = step.new_origin() if index.data else None
    return [step.result(dims, origin=origin)]


def _record_lookup(step: InferenceStep, row: AtomDims) -> None:
    table, index = step.values[:2]
    numbers, sizes = step.parameters["dimension_numbers"], step.parameters["slice_sizes"]
    # A lookup selects single elements along a dim. Along a dim of size 1, nothing is selected.
    keys = [at for at in numbers.start_index_map if sizes[at] == 1 < step.operand_shapes[0][at]]
    if len(keys) != 1 or not table.learned:
        return
    # A constant index in the model, as in `w[0]`, is not a lookup.
    if not index.data and not any(map(finest, index.dims)):
        step.facts.rows.append(Use(dim=table.dims[keys[0]], location=step.location))
        return
    depends_on = "neither"
    if index.data:
        depends_on = "both" if index.learned else "inputs"
    step.facts.lookups.append(
        TableLookup(
            key=table.dims[keys[0]],
            row=row,
            index=index.dims,
            depends_on=depends_on,
            of_data=table.data,
            inputs=index.inputs,
            location=step.location,
        )
    )


def scatter(step: InferenceStep) -> list[ArrayFacts]:
    """Align each dim of the updates with a dim of the operand or of the indices.

    Dims that are written whole are dims of the operand. The other dims come from the indices.
    """
    old, index, _ = step.values
    numbers, known = step.parameters["dimension_numbers"], correspondence(step.equation)
    assert known is not None
    step.aligned(known)
    if index.data and index.learned:
        # Activations choose the index along these dims, such as the dim of experts.
        for at in numbers.scatter_dims_to_operand_dims:
            for atom in finest(old.dims[at]):
                atom.routed = True
    return [step.result(old.dims)]


def update_slice(step: InferenceStep) -> list[ArrayFacts]:
    """Align the dims that are written whole, as in a cache."""
    known = correspondence(step.equation)
    assert known is not None
    step.aligned(known)
    return [step.result(step.values[0].dims)]


def top_k(step: InferenceStep) -> list[ArrayFacts]:
    """Keep all dims except the searched dim, and record the searched dim."""
    dims, known = step.values[0].dims, correspondence(step.equation)
    assert known is not None
    step.facts.top_k.append(Use(dim=dims[step.parameters.get("axis", -1)], location=step.location))
    values, indices = map(step.result, step.aligned(known))
    return [values, dataclasses.replace(indices, loops=frozenset())]


def arg_reduction(step: InferenceStep) -> list[ArrayFacts]:
    """Drop the searched dim."""
    axes, dims = step.parameters["axes"], step.values[0].dims
    step.facts.largest += [Use(dim=dims[axis], location=step.location) for axis in axes]
    (result,) = elementwise.reduction(step)
    # An index does not count as made from the carry of a scan. Otherwise each codebook of a
    # residual quantizer, which chooses an index by a matmul, would count as a layer.
    return [dataclasses.replace(result, loops=frozenset())]


def random(step: InferenceStep) -> list[ArrayFacts]:
    """Return new dims: random bits say nothing about their shape."""
    return [ArrayFacts(dims=new_dims(shape)) for shape in step.shapes]
