"""A stack of equal layers, run as one scan, or in pipeline stages if the strategy has them."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardwright import _jax
from shardwright.errors import LayerError, Problem, RankMismatchError, raise_problems
from shardwright.layers.fp8.state import split_uses
from shardwright.layers.microbatches import Microbatches, microbatches_of
from shardwright.layers.placement import is_inside_shard_map, path_of
from shardwright.layers.stages import Layer, LayerInputs, Stages, scan_layers
from shardwright.manager import constraint, context
from shardwright.manager.manager import PartitionManager
from shardwright.resolution.partition_specs import UNCONSTRAINED
from shardwright.resolution.pipeline import GatherWeights, Pipeline, Schedule
from shardwright.resolution.request import ShardingRequest
from shardwright.trees.paths import is_array_spec, path_text
from shardwright.vocabulary.axes import LAYERS, Role


def pipeline(
    layer: Layer,
    params: Any,
    x: Any,
    *,
    specs: Any,
    keys: Any = None,
    rows: Any = None,
    streamed: Any = None,
    per_layer: Any = None,
    path: str | None = None,
    by_row: bool = False,
) -> tuple[Any, Any]:
    """Run a stack of equal layers; return (x, outputs), as `jax.lax.scan` does.

    Without a manager, or if its strategy has no `[pipeline]`, this is `jax.lax.scan` over the
    layers. With `[pipeline]`, the batch is cut into m microbatches. For any size of pp, the result
    is that of the scan, run separately on each microbatch. So each microbatch has its own dropout
    masks, expert capacity and fp8 scales. In a tick, each stage runs its layers on one microbatch.
    Over pp, the devices send only the microbatches and, once per tick, the results of layers.

    For the backward pass, each stage keeps only its input of each tick. The backward pass computes
    the layers of the stage again.

    Args:
      layer: Function of (params, x, inputs) that returns (x, output), where inputs is a
        `LayerInputs`. Inside of a stage it runs under the rules of the strategy without pp.
      params: Tree of arrays of all layers, as stored.
      x: The input of the first layer, such as the residual: a tree of arrays `[batch, ...]`. Each
        layer returns a new x.
      specs: `ArraySpec`s of the parameters, from `stack_specs(..., repeats=)`.
      keys: JAX keys, or None.
      rows: Tree of arrays `[batch, ...]` that layers read, such as positions and segment ids. If
        all rows have equal values, an array may be `[1, ...]`. Each stage holds the whole arrays.
      streamed: Tree of larger arrays `[batch, ...]` that layers read, such as the output of an
        encoder. These arrays are sent from stage to stage together with x.
      per_layer: Tree of arrays `[layers, ...]`. Layer i reads entry i of each array. The gradient
        of an fp8 `Channel` in the tree is the maximum over microbatches.
      path: Path of `params` in the model, required for `gather = "once"` and `by_row` under a
        strategy with `[[tensors]]` entries.
      by_row: True says that a layer computes each row of x from the same row of its inputs, without
        random numbers, and that its second result does not depend on the rows. Then each shard of a
        microbatch adds up its own gradients of weights, and these sums are reduced over the shards
        once, after the last tick.

    Returns:
      (x, outputs). The outputs have leading dims `[microbatches, layers]`; without `[pipeline]`,
      there is one microbatch.

    Raises:
      IndivisibleError: The layers do not divide over pp, or the rows over the microbatches.
      RankMismatchError: In a pipeline, the size of the first dim of an array is not the number of
        rows of the batch.
      LayerError: The leading dims of parameters differ, or are not those of `specs`. Or a
        `shard_map` surrounds the call of a pipeline. Or the schedule is "1f1b", which needs
        `pipeline_loss`.
    """
    inputs = LayerInputs(number=None, keys=keys, rows=rows, streamed=streamed, per_layer=per_layer)
    given = (layer, params, x, inputs)
    params, lead, stages = read_stack(*given, specs=specs, path=path, by_row=by_row)
    if stages is None:
        return one_scan(layer, params, x, inputs, lead)
    settings = ambient_pipeline()
    if settings is not None and settings.schedule is Schedule.ONE_F_ONE_B:
        raise LayerError(
            'schedule = "1f1b" runs the backward pass of a microbatch before the forward pass of '
            "the last microbatch, so it needs the loss",
            fix="call sw.pipeline_loss, which takes the head of the model, or "
            'transformer_block.loss; or write schedule = "gpipe" under [pipeline]',
        )
    cut = stages.cut

    # A `shard_map` over only a part of the mesh axes needs a `jit` around it.
    @jax.jit
    def run(params: Any, x: Any, inputs: tuple[Any, ...]) -> Any:
        keys, rows, streamed, per_layer = inputs
        per_layer = split_uses(per_layer, cut.count)
        parts = jax.tree.map(cut.split, (x, streamed, rows))
        given = LayerInputs(number=None, keys=keys, rows=None, streamed=None, per_layer=per_layer)
        each = stages.one_after_another if cut.stages == 1 else stages.over_stages
        results, outputs = each(params, given, parts)
        return jax.tree.map(cut.join, results), outputs

    x, outputs = run(params, x, (keys, rows, streamed, per_layer))
    return x, outputs


def read_stack(
    layer: Layer,
    params: Any,
    x: Any,
    inputs: LayerInputs,
    *,
    specs: Any,
    path: str | None,
    by_row: bool,
) -> tuple[Any, tuple[int, ...], Stages | None]:
    """Check the arguments of a pipeline.

    Returns:
      The parameters, gathered if `[pipeline]` says "once"; their leading dims, (layers,) or
      (repeats, layers / repeats); and the stages, or None if the layers run as one scan.

    Raises:
      ShardingError: As `pipeline` raises it.
    """
    manager: PartitionManager | None = context.current()
    settings = ambient_pipeline()
    lead = _lead(params, specs, 1 if settings is None else settings.repeats)
    if manager is None:
        return params, lead, None
    # A plan records this request, so its trace is not reused for a strategy that shards the layers
    # in another way.
    stored = manager.answer(ShardingRequest((LAYERS,), lead[-1:], None, Role.PARAM))
    stored.require()
    if settings is None:
        # With schedule = "none", layers are stored over pp, so gather them here.
        if manager.rules.pipeline is not None and stored.decisions[0].mesh_axes:
            params = _gathered(manager, params)
        return params, lead, None
    if is_inside_shard_map():
        raise LayerError(
            "a pipeline is called inside a shard_map",
            fix="call the pipeline outside; to accumulate gradients, write more microbatches "
            "instead, "
            'or write schedule = "none" under [pipeline]',
        )
    batch = jax.tree.leaves(x)[0].shape[0]
    check_rows({"x": x, "streamed": inputs.streamed}, batch)
    check_rows({"rows": inputs.rows}, batch, may_be_one=True)
    cut = microbatches_of(manager, batch)
    once = settings.gather is GatherWeights.ONCE
    apart = _shards_apart(manager, cut, specs, path, once=once) if by_row else ()
    if once:
        # Gather all weights once. `gather` in a layer then finds its weight whole. If `apart` does
        # not have the mesh axes of FSDP, `gather` in a layer still scatters the weight's gradient,
        # so the stage adds gradients that are sharded like stored weights. Over Explicit mesh axes,
        # their sum has the type of the gathered weights, so the sum is gathered once too.
        params = manager.gather(params, specs, path=path)
    return params, lead, Stages(layer=layer, cut=cut, lead=lead, apart=apart)


def _shards_apart(
    manager: PartitionManager, cut: Microbatches, specs: Any, path: str | None, *, once: bool
) -> tuple[str, ...]:
    """Return the mesh axes of BATCH before the first one that shards a weight during the ticks.

    Over these mesh axes, each shard holds whole weights. They are the first mesh axes of BATCH, so
    no row has to be sent.
    """
    role, sharded = Role.USE if once else Role.PARAM, set[str]()
    for at, spec in jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_array_spec)[0]:
        own = path_of(path, path_text(at))
        found = manager.answer(ShardingRequest(spec.axes, spec.shape, None, role, own))
        sharded.update(axis for decision in found.decisions for axis in decision.mesh_axes)
    rows = cut.before + cut.after
    return tuple(itertools.takewhile(lambda axis: axis not in sharded, rows))


def ambient_pipeline() -> Pipeline | None:
    """Return `[pipeline]` of the ambient manager's strategy, if it runs microbatches in stages."""
    manager: PartitionManager | None = context.current()
    settings = None if manager is None else manager.rules.pipeline
    return settings if settings is not None and settings.runs else None


def _lead(params: Any, specs: Any, repeats: int) -> tuple[int, ...]:
    """Return the leading dims of the parameters: (layers,), or (repeats, layers / repeats).

    Raises:
      LayerError: The leading dims differ between arrays, or are not those of the specs.
    """
    depth = 1 if repeats == 1 else 2
    structure: Any
    leaves, structure = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_array_spec)
    arrays = structure.flatten_up_to(params)
    first = leaves[0][1].shape[:depth]
    begin = f"({repeats}, ...)" if depth == 2 and first[0] != repeats else first
    fix = "create the parameters by stack_specs(specs, layers"
    fix += ")" if repeats == 1 else f", repeats={repeats}), which the strategy asks for"
    raise_problems(
        [
            Problem(
                error=LayerError,
                what=f"the array has shape {np.shape(array)}, its spec {spec.shape}, and both must "
                f"begin with {begin}",
                path=path_text(path),
                fix=fix,
            )
            for (path, spec), array in zip(leaves, arrays, strict=True)
            # Compare leading dims only: in a `shard_map`, other dims have the size of a shard.
            if np.shape(array)[:depth] != first
            or spec.shape[:depth] != first
            or (depth == 2 and first[0] != repeats)
        ]
    )
    return tuple(first)


def check_rows(trees: dict[str, Any], batch: int, *, may_be_one: bool = False) -> None:
    """Check that the size of the first dim of each array is `batch`, the number of rows.

    Otherwise `Microbatches.split` would give the whole array to each microbatch.

    Raises:
      RankMismatchError: The first dim has another size. With `may_be_one`, it may be 1 or missing.
    """
    allowed = ((batch,), (1,), ()) if may_be_one else ((batch,),)
    raise_problems(
        [
            Problem(
                error=RankMismatchError,
                what=f"the array has shape {np.shape(leaf)}, and a pipeline of {batch} rows needs "
                f"[{batch}, ...]",
                path=path_text(path),
                fix="pass an array with one entry per row in dim 0"
                + (", or with one entry if all rows are equal" if may_be_one else ""),
            )
            for path, leaf in jax.tree_util.tree_flatten_with_path(trees)[0]
            if np.shape(leaf)[:1] not in allowed
        ]
    )


def one_scan(
    layer: Layer, params: Any, x: Any, inputs: LayerInputs, lead: tuple[int, ...]
) -> tuple[Any, Any]:
    """Run the layers on the whole batch, as one microbatch: outputs get a leading dim of size 1."""
    x, outputs = scan_layers(layer, (params, inputs.per_layer, jnp.arange(lead[0])), x, inputs)
    return x, jax.tree.map(lambda leaf: leaf[None], outputs)


def _gathered(manager: PartitionManager, params: Any) -> Any:
    """Gather the layers over pp, because a scan over a sharded dim would gather in each trip."""

    def gather(leaf: Any) -> Any:
        spec = PartitionSpec(None, *[UNCONSTRAINED] * (leaf.ndim - 1))
        ambient = _jax.ambient_mesh()
        return constraint.place(leaf, constraint.make_placement(spec, manager.mesh, ambient))

    return jax.tree.map(gather, params)
