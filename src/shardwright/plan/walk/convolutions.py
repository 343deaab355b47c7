"""The rule of `conv_general_dilated`: a matmul over features, whose spatial dims are whole."""

from __future__ import annotations

from typing import Any

from shardwright.plan.walk.matmuls import Labels, follow_matmul
from shardwright.plan.walk.step import PlanStep
from shardwright.plan.walk.values import ShardedValue


def convolution(step: PlanStep) -> list[ShardedValue]:
    """Follow a convolution. A sharded spatial dim, or one of several groups, is gathered first.

    Compilers may exchange the edges of shards instead, so such a dim is a doubt.
    """
    labels = _labels(step)
    whole = [step.whole(0), step.whole(1)]
    values = [
        value.with_dims(
            () if label.startswith("s") else axes
            for label, axes in zip(names, value.dims, strict=True)
        )
        for value, names in zip(whole, labels.operands, strict=True)
    ]
    unsharded = {
        axis
        for before, after in zip(whole, values, strict=True)
        for axis in before.mesh_axes - after.mesh_axes
    }
    channels = whole[1].dims[step.parameters["dimension_numbers"].rhs_spec[0]]
    windowed = _windowed(step, whole[0])
    if channels and windowed:
        # XLA multiplies the result by the number of channel shards, or its gradient is wrong: on
        # CPUs with JAX 0.10.2 and 0.12. A kernel that is whole, or a window of 1, is right.
        step.doubt(
            windowed,
            f"store the kernel whole over {'+'.join(channels)}: where the image is sharded along "
            f"the window over {'+'.join(sorted(windowed))} and the kernel's channels over "
            f"{'+'.join(channels)}, XLA may compute this convolution or its gradient wrongly "
            "(spatial_and_channel)",
        )
        unsharded -= windowed
    if unsharded:
        step.doubt(unsharded, "gather the dim with shard(...) before this convolution")
    results = follow_matmul(step, values, labels)
    step.ledger.doubt_kernel(results[0].owed, step.location)
    return results


def _windowed(step: PlanStep, image: ShardedValue) -> frozenset[str]:
    """Return the mesh axes of the spatial dims along which the window has several elements."""
    numbers, kernel = step.parameters["dimension_numbers"], step.avals[1].shape
    pairs = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)
    return frozenset(axis for at, of in pairs if kernel[of] > 1 for axis in image.dims[at])


def _labels(step: PlanStep) -> Labels:
    """Label the dims as those of a matmul. Labels with `s` are for dims that must be whole."""
    numbers = step.parameters["dimension_numbers"]
    left, right, result = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    groups = step.parameters["feature_group_count"] > 1
    batch_groups = step.parameters["batch_group_count"] > 1
    batch = ("s-examples", "s-batch") if batch_groups else ("l0", "l0")
    inner = ("s-features", "s-inner") if groups else ("c0", "c0")
    outer = ("s-kernels", "s-outer") if groups or batch_groups else ("r0", "r0")
    operands = (
        _placed(left, (batch[0], inner[0]), "s-image"),
        _placed(right, (outer[0], inner[1]), "s-kernel"),
    )
    of_result = _placed(result, (batch[1], outer[1]), "s-result")
    # Of the operands, the operations depend on the dims of the kernel that the result lacks.
    sizes = dict(zip(operands[1], step.avals[1].shape, strict=True))
    sizes.pop(outer[0])
    sizes |= dict(zip(of_result, step.results[0].shape, strict=True))
    # Of a dilated image, one of so many elements is not zero.
    for at, dilation in enumerate(step.parameters["lhs_dilation"]):
        sizes[f"s-result{at}"] = -(-sizes[f"s-result{at}"] // dilation)
    return Labels(operands=operands, result=of_result, sizes=sizes)


def _placed(spec: Any, first: tuple[str, str], rest: str) -> tuple[str, ...]:
    """Return a label for each dim: `spec` lists the dims as two special ones, then spatial ones."""
    names = [*first, *(f"{rest}{at}" for at in range(len(spec) - len(first)))]
    return tuple(name for _, name in sorted(zip(spec, names, strict=True)))
