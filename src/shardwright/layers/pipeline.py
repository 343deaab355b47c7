"""A stack of equal layers: as one scan, or over the stages of a pipeline, as the strategy says.

A stage holds `layers / pp` layers. In each tick, every stage runs a chunk of them on one microbatch
and sends the result to the next stage. The batch is sharded over pp outside of the stack, and no
microbatch is sent to a stage as a whole beforehand: in each tick the stages also pass their
microbatches on towards stage 0, and results come back in the places that this frees.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from shardwright import _jax
from shardwright.errors import LayerError, Problem, RankMismatchError, raise_problems
from shardwright.layers.microbatches import Microbatches, microbatches_of
from shardwright.layers.placement import is_inside_shard_map
from shardwright.manager import constraint, context
from shardwright.manager.manager import PartitionManager
from shardwright.manager.shards import place_for_shard_map
from shardwright.resolution.partition_specs import UNCONSTRAINED
from shardwright.resolution.pipeline import STAGES, Pipeline
from shardwright.resolution.request import ShardingRequest
from shardwright.resolution.rules import without_mesh_axis
from shardwright.trees.paths import is_array_spec, path_text
from shardwright.vocabulary.axes import LAYERS, Role


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """What a layer reads beside its parameters and x.

    Attributes:
      number: Number of the layer, int32. Fold it into a key: layers would drop the same elements.
      keys: `keys` of the call. In a pipeline, each is folded with the number of the microbatch.
      rows: `rows` of the call; in a pipeline, those of the microbatch.
      streamed: `streamed` of the call; in a pipeline, that of the microbatch.
      per_layer: `per_layer` of the call, of this layer.
    """

    number: Any
    keys: Any
    rows: Any
    streamed: Any
    per_layer: Any


Layer = Callable[[Any, Any, LayerInputs], tuple[Any, Any]]


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
) -> tuple[Any, Any]:
    """Run a stack of equal layers; return (x, outputs), as `jax.lax.scan` does.

    Without a manager, or if its strategy has no `[pipeline]`, this is `jax.lax.scan` over the
    layers. With `[pipeline]`, the batch is cut into m microbatches. The result is that scan, run
    once for each microbatch, whatever the size of pp. So what a layer computes from several rows,
    such as dropout masks, the capacity of experts and fp8 scales, is that of a microbatch. Over pp
    only results of layers are sent, once per tick, and the microbatches themselves.

    The backward pass computes each stage again: it keeps the input of a stage in each tick.

    Args:
      layer: Function of (params, x, inputs) that returns (x, output), where inputs is a
        `LayerInputs`. Inside of a stage it runs under the rules of the strategy without pp.
      params: Tree of arrays of all layers, as stored.
      x: What layers change, such as the residual: a tree of arrays `[batch, ...]`.
      specs: Their `ArraySpec`s, of `stack_specs(..., repeats=)`.
      keys: JAX keys, or None.
      rows: Tree of arrays `[batch, ...]` that layers read, such as positions and segment ids. Each
        stage holds all of them.
      streamed: Tree of larger arrays `[batch, ...]` that layers read, such as the output of an
        encoder. They are sent from stage to stage together with x.
      per_layer: Tree of arrays `[layers, ...]` of which a layer reads its own part.

    Returns:
      (x, outputs). The outputs have leading dims `[microbatches, layers]`; without `[pipeline]`,
      there is one microbatch.

    Raises:
      IndivisibleError: The layers do not divide over pp, or the rows over the microbatches.
      RankMismatchError: In a pipeline, an array does not have a first dim of the batch's rows, or
        one in `per_layer` of the layers.
      LayerError: The leading dims of parameters do not count the layers, or a `shard_map` surrounds
        the call of a pipeline.
    """
    manager: PartitionManager | None = context.current()
    settings = None if manager is None else manager.rules.pipeline
    runs = settings is not None and settings.runs
    lead = _lead(params, specs, settings.repeats if settings is not None and runs else 1)
    inputs = LayerInputs(number=None, keys=keys, rows=rows, streamed=streamed, per_layer=per_layer)
    if manager is None:
        return _one_scan(layer, params, x, inputs, lead)
    # It is recorded, so that a plan of this program is not taken for that of another strategy.
    stored = manager.answer(ShardingRequest((LAYERS,), lead[-1:], None, Role.PARAM))
    stored.require()
    if settings is None or not runs:
        if settings is not None and stored.decisions[0].mesh_axes:
            params = _gathered(manager, params)
        return _one_scan(layer, params, x, inputs, lead)
    if is_inside_shard_map():
        raise LayerError(
            "a pipeline is called inside a shard_map",
            fix='call it outside; instead of accumulating, write more microbatches; or schedule = "'
            'none" under [pipeline]',
        )
    batch = jax.tree.leaves(x)[0].shape[0]
    _check_sizes({"x": x, "rows": rows, "streamed": streamed}, batch, "rows")
    _check_sizes({"per_layer": per_layer}, math.prod(lead), "layers")
    cut = microbatches_of(manager, batch)
    stack = _Stack(layer=layer, settings=settings, cut=cut, lead=lead)

    # JAX runs a `shard_map` over some of the mesh axes only inside of a `jit`.
    @jax.jit
    def run(params: Any, x: Any, keys: Any, rows: Any, streamed: Any, per_layer: Any) -> Any:
        parts = jax.tree.map(cut.split, (x, streamed, rows))
        inputs = LayerInputs(number=None, keys=keys, rows=None, streamed=None, per_layer=per_layer)
        each = stack.one_after_another if cut.stages == 1 else stack.over_stages
        results, outputs = each(params, inputs, parts)
        return jax.tree.map(cut.join, results), outputs

    x, outputs = run(params, x, keys, rows, streamed, per_layer)
    return x, outputs


def ambient_pipeline() -> Pipeline | None:
    """Return `[pipeline]` of the ambient manager's strategy, if it runs microbatches in stages."""
    manager: PartitionManager | None = context.current()
    settings = None if manager is None else manager.rules.pipeline
    return settings if settings is not None and settings.runs else None


def _lead(params: Any, specs: Any, repeats: int) -> tuple[int, ...]:
    """Return the leading dims that count layers.

    Raises:
      LayerError: They differ from array to array, or from those of the specs.
    """
    depth = 1 if repeats == 1 else 2
    structure: Any
    leaves, structure = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_array_spec)
    arrays = structure.flatten_up_to(params)
    first = leaves[0][1].shape[:depth]
    fix = "create the parameters by stack_specs(specs, layers"
    fix += ")" if repeats == 1 else f", repeats={repeats}), which the strategy asks for"
    raise_problems(
        [
            Problem(
                error=LayerError,
                what=f"the array has shape {np.shape(array)}, its spec {spec.shape}, and all begin "
                f"with {first}",
                path=path_text(path),
                fix=fix,
            )
            for (path, spec), array in zip(leaves, arrays, strict=True)
            # Inside of a `shard_map`, the other dims are those of a shard.
            if np.shape(array)[:depth] != first
            or spec.shape[:depth] != first
            or (depth == 2 and first[0] != repeats)
        ]
    )
    return tuple(first)


def _check_sizes(trees: dict[str, Any], size: int, what: str) -> None:
    """Raise RankMismatchError unless the first dim of each array counts rows, or layers."""
    raise_problems(
        [
            Problem(
                error=RankMismatchError,
                what=f"the array has shape {np.shape(leaf)}, and a pipeline of {size} {what} needs "
                f"[{size}, ...]",
                path=path_text(path),
                fix=f"pass an array whose first dim counts the {what}",
            )
            for path, leaf in jax.tree_util.tree_flatten_with_path(trees)[0]
            if np.shape(leaf)[:1] != (size,)
        ]
    )


def _one_scan(
    layer: Layer, params: Any, x: Any, inputs: LayerInputs, lead: tuple[int, ...]
) -> tuple[Any, Any]:
    x, outputs = _scan(layer, (params, inputs.per_layer, jnp.arange(lead[0])), x, inputs)
    return x, jax.tree.map(lambda leaf: leaf[None], outputs)


def _scan(layer: Layer, stack: Any, x: Any, inputs: LayerInputs) -> tuple[Any, Any]:
    """Scan over a stack of (parameters, inputs per layer, numbers of layers)."""

    def body(x: Any, each: Any) -> tuple[Any, Any]:
        params, per_layer, number = each
        return layer(params, x, dataclasses.replace(inputs, number=number, per_layer=per_layer))

    final, outputs = jax.lax.scan(body, x, stack)
    return final, outputs


def _gathered(manager: PartitionManager, params: Any) -> Any:
    """Gather the layers over pp. A scan over a dim that is sharded would gather it in each trip."""

    def gather(leaf: Any) -> Any:
        spec = PartitionSpec(None, *[UNCONSTRAINED] * (leaf.ndim - 1))
        ambient = _jax.ambient_mesh()
        return constraint.place(leaf, constraint.make_placement(spec, manager.mesh, ambient))

    return jax.tree.map(gather, params)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stack:
    """A stack of layers that runs on microbatches.

    Attributes:
      layer: The argument of `pipeline`.
      settings: `[pipeline]` of the strategy.
      cut: The microbatches.
      lead: Leading dims of the parameters: (layers,), or (repeats, layers / repeats).
    """

    layer: Layer
    settings: Pipeline
    cut: Microbatches
    lead: tuple[int, ...]

    @property
    def repeats(self) -> int:
        """Chunks of layers of a stage."""
        return self.settings.repeats

    def one_after_another(self, params: Any, inputs: LayerInputs, parts: Any) -> tuple[Any, Any]:
        """Run all layers on each microbatch, without stages.

        Args:
          params: All layers.
          inputs: What layers read; its rows and what is streamed are in `parts`.
          parts: (x, streamed, rows), each `[1, microbatches, rows, ...]`.

        Returns:
          x as in `parts`, and the outputs.
        """
        layers, depth = math.prod(self.lead), len(self.lead)
        params = jax.tree.map(lambda leaf: leaf.reshape(layers, *leaf.shape[depth:]), params)
        stack = (params, inputs.per_layer, jnp.arange(layers))

        def run(_: None, each: Any) -> tuple[None, Any]:
            (x, streamed, rows), number = each
            own = dataclasses.replace(
                inputs, keys=_folded(inputs.keys, number), rows=rows, streamed=streamed
            )
            return None, _scan(self.layer, stack, x, own)

        parts = jax.tree.map(lambda leaf: leaf[0], parts)
        _, (x, outputs) = jax.lax.scan(run, None, (parts, jnp.arange(self.cut.count)))
        return jax.tree.map(lambda leaf: leaf[None], x), outputs

    def over_stages(self, params: Any, inputs: LayerInputs, parts: Any) -> tuple[Any, Any]:
        """Run the stages; the arguments and results are those of `one_after_another`."""
        manager = self.cut.manager
        per_layer, numbers = jax.tree.map(
            lambda leaf: leaf.reshape(*self.lead, *leaf.shape[1:]),
            (inputs.per_layer, jnp.arange(math.prod(self.lead))),
        )
        x, streamed, rows = parts
        of_layers = (STAGES,) if len(self.lead) == 1 else (None, STAGES)
        given = ((params, per_layer, numbers), (x, streamed), rows)
        leading = (of_layers, (STAGES,), (None, None))
        open_specs = [
            jax.tree.map(functools.partial(_open_spec, entries), tree)
            for tree, entries in zip(given, leading, strict=True)
        ]
        given = place_for_shard_map(given, open_specs, mesh=manager.mesh)
        ambient = _jax.ambient_mesh() or manager.mesh
        kinds = dict(zip(ambient.axis_names, ambient.axis_types, strict=True))
        rest = tuple(
            axis for axis, kind in kinds.items() if kind is AxisType.Explicit and axis != STAGES
        )
        stacked, on_stage = PartitionSpec(*of_layers), PartitionSpec(STAGES)
        of_outputs = PartitionSpec(None, *of_layers)
        mesh = constraint.mesh_here(manager.mesh, _jax.ambient_mesh())
        f: Any = jax.shard_map(
            self._ticks,
            # Under `auto_axes`, the ambient mesh has other axis types.
            mesh=None if rest else mesh,
            in_specs=(stacked, on_stage, PartitionSpec(), PartitionSpec()),
            out_specs=(on_stage, of_outputs),
            axis_names={STAGES},
            # With it on, a nested `shard_map` fails in the verifier of JAX 0.12.
            check_vma=False,
        )
        if rest:
            # JAX 0.10 gathers what enters and leaves a `shard_map` over its other mesh axes if
            # these are Explicit. So they are Auto around it.
            specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, given[1][0])
            if kinds[STAGES] is not AxisType.Explicit:
                of_outputs = PartitionSpec()
            f = jax.sharding.auto_axes(f, axes=rest, out_sharding=(specs, of_outputs))
        x, outputs = f(*given, inputs.keys)
        return x, jax.tree.map(self._flat, outputs)

    def _flat(self, output: Any) -> Any:
        """Return an output with one dim of layers."""
        if len(self.lead) == 1:
            return output
        spec = _open_spec((None, None, None), output)
        ambient = _jax.ambient_mesh()
        placement = constraint.make_placement(spec, self.cut.manager.mesh, ambient)
        # The chunks of a stage are apart, so the dims cannot become one where they are.
        whole = constraint.place(output, placement)
        return whole.reshape(whole.shape[0], -1, *whole.shape[3:])

    def _ticks(self, stack: Any, stream: Any, rows: Any, keys: Any) -> tuple[Any, Any]:
        """Run the ticks of one stage. All arrays are local over pp.

        Microbatch s q + j starts at stage s in place j of the stream, for q microbatches of a
        stage. In tick t, all stages pass on what is in place t modulo q to the stage before. So
        microbatch t is at stage 0 in tick t. The last stage puts its results in the same place,
        from which they come to their stage.
        """
        count, stages, repeats = self.cut.count, self.cut.stages, self.repeats
        stream = jax.tree.map(lambda leaf: leaf[0], stream)
        rows = jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), rows)
        me, own = jax.lax.axis_index(STAGES), count // stages
        # A microbatch comes back to stage 0 after S ticks, and runs there again after m.
        waits = count - stages + 1
        back = [(stage, stage - 1) for stage in range(1, stages)]
        on = [(stage, stage + 1) for stage in range(stages - 1)]
        if repeats > 1:
            on.append((stages - 1, 0))
        # Only what a stage reads is kept for the backward pass. Everything else here is linear.
        run = jax.checkpoint(self._chunk, prevent_cse=False)

        def tick(carry: Any, number: Any) -> tuple[Any, Any]:
            held, stream, waiting = carry
            place = number % own
            head = fresh = _at(stream, place)
            if repeats > 1:
                waiting = _put(waiting, held, number % waits)
                again = _at(waiting, (number + 1) % waits)
                fresh = _select(number < count, head, again)
            # Outside of 0 <= turn < m R the stage has nothing to do. It then runs a microbatch that
            # is real, because zeros may have no finite gradient, and the result is not used.
            turn = number - me
            chunk = jnp.clip(turn // count, 0, repeats - 1)
            x, streamed = _select(me == 0, fresh, held)
            y, outputs = run(stack, rows, keys, chunk, turn % count, x, streamed)
            passed = _send(head, back)
            stream = _put(stream, _select(me == stages - 1, (y, streamed), passed), place)
            return (_send((y, streamed), on), stream, waiting), outputs

        held = jax.lax.stop_gradient(_at(stream, 0))
        waiting = jax.tree.map(lambda leaf: jnp.zeros((waits, *leaf.shape[1:]), leaf.dtype), stream)
        carry = (held, stream, waiting if repeats > 1 else None)
        ticks = jnp.arange(count * repeats + stages - 1)
        (_, (x, _), _), outputs = jax.lax.scan(tick, carry, ticks)

        def in_order(leaf: Any) -> Any:
            # [ticks, layers] of which stage s has worked from tick s on.
            worked = jax.lax.dynamic_slice_in_dim(leaf, me, count * repeats)
            if repeats == 1:
                return worked
            return jnp.moveaxis(worked.reshape(repeats, count, *leaf.shape[1:]), 0, 1)

        # The last stage ends microbatch 0 in tick S - 1, or one that is a multiple of q later.
        turned = jax.tree.map(lambda leaf: jnp.roll(leaf, -((stages - 1) % own), 0)[None], x)
        return turned, jax.tree.map(in_order, outputs)

    def _chunk(
        self, stack: Any, rows: Any, keys: Any, chunk: Any, microbatch: Any, x: Any, streamed: Any
    ) -> tuple[Any, Any]:
        """Run a chunk of the layers of a stage on one microbatch."""
        # Otherwise XLA gathers the weights before the first tick, and holds all of them.
        stack, x = jax.lax.optimization_barrier((stack, x))
        if self.repeats > 1:
            stack = _at(stack, chunk)
        inputs = LayerInputs(
            number=None,
            keys=_folded(keys, microbatch),
            rows=_at(rows, microbatch),
            streamed=streamed,
            per_layer=None,
        )
        with _inside_stage(self.cut.manager):
            return _scan(self.layer, stack, x, inputs)


def _inside_stage(manager: PartitionManager) -> PartitionManager:
    """Return the manager of a stage: pp shards no array there."""
    # Remembered, because what layers keep with a manager is for that one alone.
    stage: PartitionManager = manager.remember(
        ("pipeline",), lambda: manager.having(rules=without_mesh_axis(manager.rules, STAGES))
    )
    return stage


def _open_spec(entries: Sequence[Any], leaf: Any) -> PartitionSpec:
    """Return a spec of the leading dims that leaves the others as they are."""
    return PartitionSpec(*entries, *[UNCONSTRAINED] * (np.ndim(leaf) - len(entries)))


def _folded(keys: Any, microbatch: Any) -> Any:
    return jax.tree.map(lambda key: jax.random.fold_in(key, microbatch), keys)


def _at(tree: Any, place: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), tree
    )


def _put(tree: Any, values: Any, place: Any) -> Any:
    return jax.tree.map(
        lambda leaf, value: jax.lax.dynamic_update_index_in_dim(leaf, value, place, 0),
        tree,
        values,
    )


def _select(condition: Any, yes: Any, no: Any) -> Any:
    # Not `jnp.where`, which would keep the condition for each element for the backward pass.
    return jax.tree.map(functools.partial(jax.lax.select, condition), yes, no)


def _send(tree: Any, pairs: Sequence[tuple[int, int]]) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, STAGES, pairs), tree)
