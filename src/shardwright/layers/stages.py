"""The stages of a pipeline: each runs chunks of layers on one microbatch after another.

A stage holds `layers / pp` layers. In each tick, every stage runs a chunk of its layers on one
microbatch and sends the result to the next stage. Outside the stack, the batch is sharded over pp.
The microbatches are not all sent to stage 0 before the first tick. Instead, in each tick the stages
also pass their microbatches on towards stage 0. The last stage puts its results into the places
that become empty, and later ticks move each result to the stage that its microbatch came from.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from shardwright import _jax
from shardwright.layers.fp8.state import use_of
from shardwright.layers.microbatches import Microbatches
from shardwright.manager import constraint
from shardwright.manager.manager import PartitionManager
from shardwright.manager.shards import place_for_shard_map
from shardwright.resolution.partition_specs import UNCONSTRAINED
from shardwright.resolution.pipeline import STAGES
from shardwright.resolution.rules import without_mesh_axis


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """What a layer reads beside its parameters and x.

    Attributes:
      number: Index of the layer, int32. Fold this index into a dropout key; otherwise all layers
        would drop the same elements.
      keys: `keys` of the call. In a pipeline, the index of the microbatch is folded into each key.
      rows: `rows` of the call; in a pipeline, the rows of the microbatch.
      streamed: `streamed` of the call; in a pipeline, the part for the microbatch.
      per_layer: The part of the call's `per_layer` for this layer.
    """

    number: Any
    keys: Any
    rows: Any
    streamed: Any
    per_layer: Any


Layer = Callable[[Any, Any, LayerInputs], tuple[Any, Any]]


def scan_layers(layer: Layer, stack: Any, x: Any, inputs: LayerInputs) -> tuple[Any, Any]:
    """Scan over a stack of (parameters, inputs per layer, indices of layers)."""

    def body(x: Any, each: Any) -> tuple[Any, Any]:
        params, per_layer, number = each
        return layer(params, x, dataclasses.replace(inputs, number=number, per_layer=per_layer))

    final, outputs = jax.lax.scan(body, x, stack)
    return final, outputs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stages:
    """A stack of layers that runs on microbatches.

    Attributes:
      layer: The argument of `pipeline`.
      cut: The microbatches.
      lead: Leading dims of the parameters: (layers,), or (repeats, layers / repeats).
      apart: Mesh axes of BATCH. Each shard over these axes runs the layers independently of the
        other shards.
    """

    layer: Layer
    cut: Microbatches
    lead: tuple[int, ...]
    apart: tuple[str, ...]

    @property
    def repeats(self) -> int:
        """Number of chunks of layers per stage."""
        return 1 if len(self.lead) == 1 else self.lead[0]

    @property
    def of_layers(self) -> tuple[str | None, ...]:
        """Entries of a spec for the dims in `lead`."""
        return (STAGES,) if len(self.lead) == 1 else (None, STAGES)

    def one_after_another(self, params: Any, inputs: LayerInputs, parts: Any) -> tuple[Any, Any]:
        """Run all layers on each microbatch, without stages.

        Args:
          params: All layers.
          inputs: The inputs of the layers. Rows and streamed arrays of the microbatches are in
            `parts`.
          parts: (x, streamed, rows), each `[1, microbatches, rows, ...]`.

        Returns:
          x as in `parts`, and the outputs.
        """
        run = self.on_microbatch(params, inputs)
        parts = jax.tree.map(lambda leaf: leaf[0], parts)
        numbers = jnp.arange(self.cut.count)
        _, (x, outputs) = jax.lax.scan(lambda _, each: (None, run(*each)), None, (parts, numbers))
        return jax.tree.map(lambda leaf: leaf[None], x), outputs

    def on_microbatch(self, params: Any, inputs: LayerInputs) -> Callable[..., tuple[Any, Any]]:
        """Return a function of ((x, streamed, rows), number) that runs a microbatch."""
        layers, depth = math.prod(self.lead), len(self.lead)
        params = jax.tree.map(lambda leaf: leaf.reshape(layers, *leaf.shape[depth:]), params)
        stack = (params, inputs.per_layer, jnp.arange(layers))

        def run(parts: Any, number: Any) -> tuple[Any, Any]:
            x, streamed, rows = parts
            keys = folded(inputs.keys, number)
            own = dataclasses.replace(inputs, keys=keys, rows=rows, streamed=streamed)
            return scan_layers(self.layer, use_of(stack, number), x, own)

        return run

    def over_stages(self, params: Any, inputs: LayerInputs, parts: Any) -> tuple[Any, Any]:
        """Run the stages. Arguments and results are as in `one_after_another`."""
        given, entries = self.operands(params, inputs, parts)
        x, outputs = self.call(
            self._ticks,
            (*given, inputs.keys),
            (*entries, ()),
            out_specs=(PartitionSpec(STAGES), PartitionSpec(None, *self.of_layers)),
            like=(given[1][0], None),
        )
        return x, jax.tree.map(self._flat, outputs)

    def operands(self, params: Any, inputs: LayerInputs, parts: Any) -> tuple[Any, Any]:
        """Return (stack, stream, rows) for the stages, and the first entries of their specs.

        The stack is (params, inputs per layer, indices of layers). The stream is (x, streamed).
        """
        per_layer, numbers = jax.tree.map(
            lambda leaf: leaf.reshape(*self.lead, *leaf.shape[1:]),
            (inputs.per_layer, jnp.arange(math.prod(self.lead))),
        )
        x, streamed, rows = parts
        given = ((params, per_layer, numbers), (x, streamed), rows)
        entries = (self.of_layers, (STAGES,), (None, None))
        return self.placed(given, entries), entries

    def placed(self, given: Any, entries: Any) -> tuple[Any, ...]:
        """Reshard trees over Explicit mesh axes as `call` needs them."""
        specs = [
            jax.tree.map(functools.partial(_open_spec, first), tree)
            for tree, first in zip(given, entries, strict=True)
        ]
        return place_for_shard_map(given, specs, mesh=self.cut.manager.mesh)

    def call(
        self, f: Callable[..., Any], given: Any, entries: Any, *, out_specs: Any, like: Any
    ) -> Any:
        """Call a function in a `shard_map` over pp. Other mesh axes are Auto in it.

        Args:
          f: Function of the trees in `given`. Inside of it, their arrays are local over pp.
          given: The trees, as `placed` returns them.
          entries: For each tree, the first entries of the spec of its leaves.
          out_specs: Specs of the results over pp.
          like: For each result, arrays with the shardings that the result gets over the other mesh
            axes. None if the other mesh axes do not shard the result.
        """
        ambient = _jax.ambient_mesh() or self.cut.manager.mesh
        kinds = dict(zip(ambient.axis_names, ambient.axis_types, strict=True))
        rest = tuple(
            axis for axis, kind in kinds.items() if kind is AxisType.Explicit and axis != STAGES
        )
        # The gradient of an argument that all stages read is a sum over pp, which XLA's CPU backend
        # cannot compute in 16 bits: its pass "all-reduce promotion" aborts. So pass these arguments
        # in float32.
        wide = [STAGES not in first for first in entries]
        dtypes = [jax.tree.map(lambda leaf: leaf.dtype, tree) for tree in given]

        def on_stage(*local: Any) -> Any:
            return f(
                *(
                    jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), tree, own)
                    for tree, own in zip(local, dtypes, strict=True)
                )
            )

        given = [
            jax.tree.map(_widened, tree) if is_wide else tree
            for tree, is_wide in zip(given, wide, strict=True)
        ]
        run: Any = jax.shard_map(
            on_stage,
            # Pass no mesh under `auto_axes`, where the ambient mesh has other axis types.
            mesh=None if rest else constraint.mesh_here(self.cut.manager.mesh, _jax.ambient_mesh()),
            in_specs=tuple(PartitionSpec(*first) for first in entries),
            out_specs=out_specs,
            axis_names={STAGES},
            # With check_vma on, a nested `shard_map` fails in the verifier of JAX 0.12.
            check_vma=False,
        )
        if rest:
            # If a mesh axis is Explicit and not in `axis_names`, JAX 0.10 gathers the arguments and
            # results of the `shard_map` over it. So make such mesh axes Auto around the
            # `shard_map`.
            is_explicit = kinds[STAGES] is AxisType.Explicit
            out_sharding = [spec if is_explicit else PartitionSpec() for spec in out_specs]
            for at_result, arrays in enumerate(like):
                if arrays is not None:
                    specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, arrays)
                    out_sharding[at_result] = specs
            run = jax.sharding.auto_axes(run, axes=rest, out_sharding=tuple(out_sharding))
        return run(*given)

    def _flat(self, output: Any) -> Any:
        """Return an output with its dims of repeats and of layers joined into one dim."""
        if len(self.lead) == 1:
            return output
        spec = _open_spec((None, None, None), output)
        ambient = _jax.ambient_mesh()
        placement = constraint.make_placement(spec, self.cut.manager.mesh, ambient)
        # The chunks of a stage are not adjacent layers, so gather the output before joining the two
        # dims.
        whole = constraint.place(output, placement)
        return whole.reshape(whole.shape[0], -1, *whole.shape[3:])

    def _ticks(self, stack: Any, stream: Any, rows: Any, keys: Any) -> tuple[Any, Any]:
        """Run the ticks of one stage. All arrays are local over pp.

        At the start, each stage holds q microbatches: microbatch `s * q + j` is at stage s, in
        place j of the stream. In tick t, each stage passes the content of place t modulo q to the
        previous stage. So microbatch t is at stage 0 in tick t. The last stage puts its results in
        the same place, and later ticks move each result to the stage that its microbatch came from.
        """
        count, stages, repeats = self.cut.count, self.cut.stages, self.repeats
        stack = self.copied(stack)
        stream = jax.tree.map(lambda leaf: leaf[0], stream)
        rows = jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), rows)
        me, own = jax.lax.axis_index(STAGES), count // stages
        # A microbatch runs on stage 0 again `count` ticks after its last run there. It is back
        # there after `stages` ticks, so it has to wait.
        waits = count - stages + 1
        back = [(stage, stage - 1) for stage in range(1, stages)]
        on = [(stage, stage + 1) for stage in range(stages - 1)]
        if repeats > 1:
            on.append((stages - 1, 0))
        # For the backward pass, keep only the inputs of each chunk. The other operations here are
        # linear, so they need no values.
        run = jax.checkpoint(self.chunk, prevent_cse=False)

        def tick(carry: Any, number: Any) -> tuple[Any, Any]:
            held, stream, waiting = carry
            place = number % own
            head = fresh = at(stream, place)
            if repeats > 1:
                waiting = put(waiting, held, number % waits)
                again = at(waiting, (number + 1) % waits)
                fresh = select(number < count, head, again)
            # Outside of 0 <= turn < count * repeats the stage has nothing to do. It then runs a
            # real microbatch and drops the result, because zeros may have no finite gradient.
            turn = number - me
            x, streamed = select(me == 0, fresh, held)
            y, outputs = run(stack, rows, keys, turn, x, streamed)
            passed = send(head, back)
            stream = put(stream, select(me == stages - 1, (y, streamed), passed), place)
            return (send((y, streamed), on), stream, waiting), outputs

        held = jax.lax.stop_gradient(at(stream, 0))
        waiting = jax.tree.map(lambda leaf: jnp.zeros((waits, *leaf.shape[1:]), leaf.dtype), stream)
        carry = (held, stream, waiting if repeats > 1 else None)
        ticks = jnp.arange(count * repeats + stages - 1)
        (_, (x, _), _), outputs = jax.lax.scan(tick, carry, ticks)

        def in_order(leaf: Any) -> Any:
            # `leaf` is [ticks, layers]; stage s has worked from tick s on.
            worked = jax.lax.dynamic_slice_in_dim(leaf, me, count * repeats)
            if repeats == 1:
                return worked
            return jnp.moveaxis(worked.reshape(repeats, count, *leaf.shape[1:]), 0, 1)

        # The last stage finishes microbatch 0 in tick `stages` - 1, or a multiple of `own` ticks
        # later. So the result of microbatch 0 is in place (`stages` - 1) modulo `own`.
        turned = jax.tree.map(lambda leaf: jnp.roll(leaf, -((stages - 1) % own), 0)[None], x)
        return turned, jax.tree.map(in_order, outputs)

    def chunk(
        self, stack: Any, rows: Any, keys: Any, turn: Any, x: Any, streamed: Any
    ) -> tuple[Any, Any]:
        """Run a chunk of a stage's layers on one microbatch.

        `turn` is the number of chunks that the stage has run before. It selects the chunk and the
        microbatch.
        """
        count, repeats = self.cut.count, self.repeats
        chunk, microbatch = jnp.clip(turn // count, 0, repeats - 1), turn % count
        stack = use_of(stack, microbatch, (turn >= 0) & (turn < count * repeats))
        # Without this barrier, XLA gathers all weights before the first tick, and keeps all of them
        # in memory.
        stack, x = jax.lax.optimization_barrier((stack, x))
        manager = inside_stage(self.cut.manager, self.apart)

        def run(stack: Any, chunk: Any, keys: Any, rows: Any, x: Any, streamed: Any) -> Any:
            if self.apart:
                stack = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[1:]), stack)
            if self.repeats > 1:
                stack = at(stack, chunk)
            inputs = LayerInputs(
                number=None, keys=keys, rows=rows, streamed=streamed, per_layer=None
            )
            with manager:
                return scan_layers(self.layer, stack, x, inputs)

        rows, keys = at(rows, microbatch), folded(keys, microbatch)
        if self.apart:
            size, own = jax.tree.leaves(x)[0].shape[:1], PartitionSpec(self.apart)
            each = jax.tree.map(lambda leaf: own if leaf.shape[:1] == size else _WHOLE, rows)
            run = jax.shard_map(
                run,
                in_specs=(own, _WHOLE, _WHOLE, each, own, own),
                out_specs=(own, _WHOLE),
                axis_names={*self.apart},
                check_vma=False,
            )
        result: tuple[Any, Any] = run(stack, chunk, keys, rows, x, streamed)
        return result

    def copied(self, stack: Any) -> Any:
        """Return the stack with one copy for each shard over `apart`, in a leading dim.

        In each tick, a shard adds the gradient of its own copy to those of earlier ticks. The
        gradients of all copies are summed once, after the last tick.
        """
        shards = math.prod(self.cut.manager.sizes[axis] for axis in self.apart)

        def copy(leaf: Any) -> Any:
            copies = jnp.broadcast_to(leaf, (shards, *leaf.shape))
            return jax.lax.with_sharding_constraint(copies, _open_spec((self.apart,), copies))

        return jax.tree.map(copy, stack) if self.apart else stack


_WHOLE: Final = PartitionSpec()


def inside_stage(manager: PartitionManager, apart: tuple[str, ...] = ()) -> PartitionManager:
    """Return the manager of a stage: pp shards no array there, nor do the mesh axes in `apart`."""

    def make() -> PartitionManager:
        rules = functools.reduce(without_mesh_axis, (STAGES, *apart), manager.rules)
        return manager.having(rules=rules)

    # Remember the manager of the stage, because layers cache values per manager.
    stage: PartitionManager = manager.remember(("pipeline", apart), make)
    return stage


def _open_spec(entries: Sequence[Any], leaf: Any) -> PartitionSpec:
    """Return a spec that shards the leading dims and leaves the other dims to the compiler."""
    return PartitionSpec(*entries, *[UNCONSTRAINED] * (np.ndim(leaf) - len(entries)))


def _widened(leaf: Any) -> Any:
    is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
    return leaf.astype(jnp.float32) if is_narrow else leaf


def folded(keys: Any, microbatch: Any) -> Any:
    """Return the keys of a microbatch."""
    return jax.tree.map(lambda key: jax.random.fold_in(key, microbatch), keys)


def at(tree: Any, place: Any) -> Any:
    """Return `leaf[place]` of each array."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), tree
    )


def put(tree: Any, values: Any, place: Any) -> Any:
    """Return the tree with a value written to `leaf[place]` of each array."""
    return jax.tree.map(
        lambda leaf, value: jax.lax.dynamic_update_index_in_dim(leaf, value, place, 0),
        tree,
        values,
    )


def select(condition: Any, yes: Any, no: Any) -> Any:
    """Return one of two trees, chosen by a traced scalar."""
    # Do not use `jnp.where`: it broadcasts the scalar to the shape of each leaf, and would keep
    # these arrays for the backward pass.
    return jax.tree.map(functools.partial(jax.lax.select, condition), yes, no)


def send(tree: Any, pairs: Sequence[tuple[int, int]]) -> Any:
    """Send arrays from stage to stage."""
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, STAGES, pairs), tree)
