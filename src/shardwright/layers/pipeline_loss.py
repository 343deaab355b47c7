"""The loss of a model whose layers run in a pipeline, and its gradients.

Under 1f1b, a stage alternates forward and backward passes: a microbatch runs backward as soon as
its loss is known. So gradients are computed together with the loss. With S stages, a stage keeps
the inputs of at most 2 S - 1 microbatches, however many microbatches the batch has.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardwright.errors import LayerError
from shardwright.layers.fp8.state import map_channels, split_uses
from shardwright.layers.pipeline import ambient_pipeline, check_rows, one_scan, read_stack
from shardwright.layers.stages import (
    Layer,
    LayerInputs,
    Stages,
    at,
    inside_stage,
    put,
    select,
    send,
)
from shardwright.resolution.pipeline import STAGES, Schedule, most_inputs, schedule_table

Head = Callable[[Any, Any, Any], Any]


def pipeline_loss(
    layer: Layer,
    params: Any,
    x: Any,
    head: Head,
    head_params: Any,
    head_inputs: Any,
    *,
    specs: Any,
    keys: Any = None,
    rows: Any = None,
    streamed: Any = None,
    per_layer: Any = None,
    path: str | None = None,
    aux: Callable[[Any], Any] | None = None,
    by_row: bool = False,
) -> tuple[Any, Any]:
    """Run a stack of equal layers and a head; return (loss, outputs of the layers).

    The loss is the sum of `head(head_params, y, inputs)` over microbatches, plus the sum of `aux`
    over layers and microbatches. This function works for every schedule, and "1f1b" needs it.
    Without `[pipeline]`, the whole batch is one microbatch. For a mean over tokens, pass the number
    of tokens in `head_inputs`, and divide by it in the head.

    The loss has gradients with respect to `params`, `x`, `head_params`, `streamed` and `per_layer`.
    `rows`, `head_inputs` and the outputs are treated as constants. Under "1f1b", gradients are
    computed in the forward pass, and summed over microbatches in float32 at least. The layer and
    the head may not close over an array that needs a gradient.

    Args:
      layer: As in `pipeline`.
      params: As in `pipeline`.
      x: As in `pipeline`.
      head: Function of (head_params, y, inputs) that returns a scalar. y is the result of the
        layers for one microbatch, and inputs is the part of `head_inputs` for this microbatch.
        Inside of a stage, the head runs under the rules of the strategy without pp.
      head_params: Tree of arrays, as stored.
      head_inputs: Tree of arrays `[batch, ...]`, such as labels, or scalars, such as a divisor.
        Under "1f1b", each stage holds the whole arrays.
      specs: As in `pipeline`.
      keys: As in `pipeline`.
      rows: As in `pipeline`.
      streamed: As in `pipeline`.
      per_layer: As in `pipeline`.
      path: As in `pipeline`.
      aux: Function of the output of one layer that returns its auxiliary loss. Defaults to none.
      by_row: As in `pipeline`, for the layers only: the head may combine rows.

    Raises:
      IndivisibleError: As in `pipeline`.
      RankMismatchError: As in `pipeline`, also for an array of `head_inputs`.
      LayerError: As in `pipeline`, or the head does not return one scalar.

    >>> import jax, jax.numpy as jnp
    >>> from shardwright.vocabulary.annotations import ArraySpec
    >>> specs = ArraySpec((3, 4), jnp.float32, ("layers", "embed"))
    >>> def layer(w, x, inputs):
    ...     return x * w, None
    >>> def head(w, y, labels):
    ...     return jnp.sum((y @ w - labels) ** 2)
    >>> given = jnp.ones((3, 4)), jnp.ones((2, 4)), head, jnp.ones(4), jnp.zeros(2)
    >>> float(pipeline_loss(layer, *given, specs=specs)[0])
    32.0
    """
    rows, head_inputs = jax.lax.stop_gradient((rows, head_inputs))
    inputs = LayerInputs(number=None, keys=keys, rows=rows, streamed=streamed, per_layer=per_layer)

    def run_layer(params: Any, x: Any, inputs: LayerInputs) -> tuple[Any, Any]:
        x, output = layer(params, x, inputs)
        loss = jnp.float32(0) if aux is None else jnp.asarray(aux(output), jnp.float32)
        return x, (loss, jax.lax.stop_gradient(output))

    def run_head(*given: Any) -> Any:
        loss = head(*given)
        if not jax.tree_util.all_leaves([loss]) or np.shape(loss):
            shapes = jax.tree.map(np.shape, loss)
            raise LayerError(
                f"the head must return one scalar, got results of the shapes {shapes}",
                fix="return only the sum of the losses of all rows",
            )
        return loss

    given = (run_layer, params, x, inputs)
    params, lead, stages = read_stack(*given, specs=specs, path=path, by_row=by_row)
    if stages is None:
        x, (losses, outputs) = one_scan(run_layer, params, x, inputs, lead)
        return run_head(head_params, x, head_inputs) + losses.sum(), outputs
    cut = stages.cut
    check_rows({"head_inputs": head_inputs}, cut.batch, may_be_one=True)
    settings = ambient_pipeline()
    assert settings is not None
    if cut.stages == 1:
        run = functools.partial(_one_after_another, stages, run_head)
    elif settings.schedule is Schedule.ONE_F_ONE_B:
        run = functools.partial(_in_forward_rule, stages, run_head)
    else:
        run = functools.partial(_all_layers_first, stages, run_head)

    # A `shard_map` over only a part of the mesh axes needs a `jit` around it.
    @jax.jit
    def run_all(params: Any, x: Any, head_params: Any, inputs: Any, head_inputs: Any) -> Any:
        keys, rows, streamed, per_layer = inputs
        per_layer = split_uses(per_layer, cut.count)
        *parts, head_parts = jax.tree.map(cut.split, (x, streamed, rows, head_inputs))
        given = LayerInputs(number=None, keys=keys, rows=None, streamed=None, per_layer=per_layer)
        return run(params, given, parts, head_params, head_parts)

    arrays = (keys, rows, streamed, per_layer)
    loss, outputs = run_all(params, x, head_params, arrays, head_inputs)
    return loss, outputs


def _one_after_another(
    stages: Stages, head: Head, params: Any, inputs: LayerInputs, parts: Any, *of_head: Any
) -> tuple[Any, Any]:
    """Run all layers and the head on each microbatch, without stages."""
    head_params, head_parts = of_head
    layers = stages.on_microbatch(params, inputs)

    # For the backward pass, keep only the inputs of each microbatch.
    @jax.checkpoint
    def run(total: Any, each: Any) -> tuple[Any, Any]:
        parts, labels, number = each
        y, (losses, outputs) = layers(parts, number)
        return total + head(head_params, y, labels) + losses.sum(), outputs

    parts = jax.tree.map(lambda leaf: leaf[0], (*parts, head_parts))
    each = (parts[:-1], parts[-1], jnp.arange(stages.cut.count))
    total, outputs = jax.lax.scan(run, jnp.float32(0), each)
    return total, outputs


def _all_layers_first(
    stages: Stages, head: Head, params: Any, inputs: LayerInputs, parts: Any, *of_head: Any
) -> tuple[Any, Any]:
    """Run the layers on all microbatches, then the head on the results that each stage has."""
    y, (losses, outputs) = stages.over_stages(params, inputs, parts)
    entries = ((), (STAGES,), (STAGES,))
    head_params, head_parts = of_head

    def sums(head_params: Any, y: Any, labels: Any) -> tuple[Any]:
        @jax.checkpoint
        def add(total: Any, each: Any) -> tuple[Any, None]:
            with inside_stage(stages.cut.manager):
                return total + head(head_params, *each), None

        own = jax.tree.map(lambda leaf: leaf[0], (y, labels))
        return (jax.lax.scan(add, jnp.float32(0), own)[0][None],)

    given = stages.placed((head_params, y, head_parts), entries)
    (totals,) = stages.call(sums, given, entries, out_specs=(PartitionSpec(STAGES),), like=(None,))
    return totals.sum() + losses.sum(), outputs


def _in_forward_rule(
    stages: Stages, head: Head, params: Any, inputs: LayerInputs, parts: Any, *of_head: Any
) -> tuple[Any, Any]:
    """Compute the loss. If the loss is differentiated, compute its gradients in the same pass."""
    (x, streamed, rows), (head_params, head_parts) = parts, of_head
    # Gradients get the types of their primals, so place `per_layer` as the stages read it.
    (per_layer,) = stages.placed((inputs.per_layer,), (stages.of_layers,))
    floats, others, join = _split((params, per_layer, (x, streamed), head_params))
    constants = (others, rows, inputs.keys, head_parts)

    def arguments(floats: Any, constants: Any) -> tuple[Any, ...]:
        others, rows, keys, head_parts = constants
        params, per_layer, (x, streamed), head_params = join(floats, others)
        given = LayerInputs(number=None, keys=keys, rows=None, streamed=None, per_layer=per_layer)
        return params, given, (x, streamed, rows), head_params, head_parts

    @jax.custom_vjp
    def run(floats: Any, constants: Any) -> tuple[Any, Any]:
        return _all_layers_first(stages, head, *arguments(floats, constants))

    def forward(floats: Any, constants: Any) -> tuple[Any, Any]:
        loss, outputs, gradients = _one_f_one_b(stages, head, *arguments(floats, constants))
        return (loss, outputs), gradients

    def backward(gradients: Any, cotangents: Any) -> tuple[Any, None]:
        factor, _ = cotangents

        def scaled(gradient: Any) -> Any:
            return (gradient * factor).astype(gradient.dtype)

        # The gradient of a channel holds amaxes of quantized gradients, so do not scale it.
        tree = map_channels(lambda channel: channel, join(gradients, [None] * len(others)), scaled)
        return jax.tree.leaves(tree), None

    run.defvjp(forward, backward)
    loss, outputs = run(floats, constants)
    return loss, outputs


def _one_f_one_b(
    stages: Stages, head: Head, params: Any, inputs: LayerInputs, parts: Any, *of_head: Any
) -> tuple[Any, Any, list[Any]]:
    """Return the loss, the outputs, and the gradients of all leaves that are floats.

    These are the leaves of (params, inputs per layer, x and streamed, head_params), in order.
    """
    given, entries = stages.operands(params, inputs, parts)
    of_head = stages.placed(of_head, ((), (None, None)))

    def on_stage(*local: Any) -> tuple[Any, ...]:
        return _OneFOneB(stages, head, *local).run()

    own, whole = PartitionSpec(STAGES), PartitionSpec()
    totals, outputs, *gradients = stages.call(
        on_stage,
        (*given, *of_head, inputs.keys),
        (*entries, (), (None, None), ()),
        out_specs=(own, PartitionSpec(None, STAGES), own, own, whole),
        like=(None, None, *(_split(tree)[0] for tree in (*given[:2], of_head[0]))),
    )
    return totals.sum(), outputs, list(itertools.chain(*gradients))


class _OneFOneB:
    """The ticks of one stage under 1f1b. All arrays are local over pp.

    Microbatches come to stage 0 as in `Stages`, and gradients take the places that become empty.
    There are m microbatches, S stages, and q = m / S places on each stage. A gradient moves from
    stage 0 to the last stage, and from there back towards stage 0, by one stage in q ticks. The
    gradient of microbatch s q + j starts at stage 0 in tick s q + j + 2 S - 2. So after the last
    tick, the gradient has moved S - s times, and is at stage s, where its microbatch came from.

    Every stage runs every collective in every tick. Results that a stage does not need are dropped
    by a select, because a product with 0 would keep NaN. In a bubble, a stage runs a real
    microbatch, because zeros may have no finite gradient.
    """

    def __init__(
        self,
        stages: Stages,
        head: Head,
        stack: Any,
        stream: Any,
        rows: Any,
        head_params: Any,
        head_rows: Any,
        keys: Any,
    ) -> None:
        self.stages, self.head, self.keys = stages, head, keys
        settings = stages.cut.manager.rules.pipeline
        assert settings is not None
        self.table = schedule_table(settings, stages.cut.stages)
        self.places = max(most_inputs(self.table))
        self.stream = jax.tree.map(lambda leaf: leaf[0], stream)
        self.rows, self.head_rows = jax.tree.map(
            lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (rows, head_rows)
        )
        self.weights, self._fixed, self._join = _split(stages.copied(stack))
        self.of_head, self._fixed_head, self._join_head = _split(head_params)
        self.me = jax.lax.axis_index(STAGES)

    def run(self) -> tuple[Any, ...]:
        """Return the stage's loss and outputs, and gradients of the stack, stream and head."""
        count, stages = self.stages.cut.count, self.stages.cut.stages
        held = at(self.stream, 0)
        carry = (
            held,
            _split(held)[0],
            self.stream,
            jax.tree.map(lambda leaf: jnp.zeros((self.places, *leaf.shape), leaf.dtype), held),
            (_zeros(self.weights), _zeros(self.of_head)),
            jnp.float32(0),
        )
        # Both arrays are indexed by [tick, stage], and hold the index of a microbatch, or -1 for
        # none.
        ahead, behind = (
            np.array([[-1 if each is None else each for each in row] for row in numbers])
            for numbers in (
                [[work.forward for work in row] for row in self.table],
                [[work.backward for work in row] for row in self.table],
            )
        )
        runs = [(each >= 0).any(1).tolist() for each in (ahead, behind)]
        kinds = [*zip(*runs, strict=True)]
        of_scans = []
        for (forward, backward), group in itertools.groupby(range(len(kinds)), kinds.__getitem__):
            ticks = np.array([*group])
            tick = functools.partial(self._tick, forward=forward, backward=backward)
            carry, outputs = jax.lax.scan(tick, carry, (ticks, ahead[ticks], behind[ticks]))
            if forward:
                of_scans.append(outputs)
        _, _, stream, _, (by_weights, by_head), total = carry
        # The gradient of microbatch 0 starts in tick 2 S - 2, so it is in place (2 S - 2) modulo q.
        first = (2 * stages - 2) % (count // stages)
        turned = [jnp.roll(leaf, -first, 0)[None] for leaf in _split(stream)[0]]
        outputs = jax.tree.map(
            # Stage s runs its first microbatch in tick s, so its outputs begin there.
            lambda *parts: jax.lax.dynamic_slice_in_dim(jnp.concatenate(parts), self.me, count),
            *of_scans,
        )
        if self.stages.apart:
            by_weights = [leaf.sum(0) for leaf in by_weights]
        by_head = _as([jax.lax.psum(leaf, STAGES) for leaf in by_head], self.of_head)
        return total[None], outputs, _as(by_weights, self.weights), turned, by_head

    def _tick(self, carry: Any, row: Any, *, forward: bool, backward: bool) -> tuple[Any, Any]:
        stages, me = self.stages.cut.stages, self.me
        on = [(stage, stage + 1) for stage in range(stages - 1)]
        back = [(stage, stage - 1) for stage in range(1, stages)]
        held, gradients, stream, kept, sums, total = carry
        tick, ahead, behind = row
        place = tick % (self.stages.cut.count // stages)
        fresh = passed = at(stream, place)
        outputs = result = None
        if forward:
            runs, number = ahead[me] >= 0, jnp.maximum(ahead[me], 0)
            given = select(me == 0, fresh, held)
            before = at(kept, number % self.places)
            kept = put(kept, select(runs, given, before), number % self.places)
            result, loss, outputs = self._chunk(self.weights, given, number)
            total = total + jnp.where(runs, loss, 0)
            held = send(result, on)
        if backward:
            runs, number = behind[me] >= 0, jnp.maximum(behind[me], 0)
            if result is not None:
                # The last stage has just run this microbatch forward.
                counts = runs & (me == stages - 1)
                loss, by_head, of_result = self._gradients_of_head(result, number)
                gradients = select(me == stages - 1, of_result, gradients)
                total = total + jnp.where(counts, loss, 0)
                sums = (sums[0], _add_if(counts, sums[1], by_head))
            given, others, join = _split(at(kept, number % self.places))

            def again(weights: Any, floats: Any) -> tuple[Any, Any]:
                result, loss, _ = self._chunk(weights, join(floats, others), number)
                return _split(result)[0], loss

            _, transposed = jax.vjp(again, self.weights, given)
            by_weights, gradients = transposed((gradients, jnp.float32(1)))
            sums = (_add_if(runs, sums[0], by_weights), sums[1])
            passed = select(me == 0, join(gradients, _split(fresh)[1]), fresh)
            gradients = send(gradients, back)
        stream = put(stream, send(passed, [*back, (0, stages - 1)]), place)
        return (held, gradients, stream, kept, sums, total), outputs

    def _chunk(self, weights: Any, given: Any, number: Any) -> tuple[Any, Any, Any]:
        """Run the stage's layers; return (x, streamed), the sum of the losses, and the outputs."""
        stack = self._join(weights, self._fixed)
        x, (losses, outputs) = self.stages.chunk(stack, self.rows, self.keys, number, *given)
        return (x, given[1]), losses.sum(), outputs

    def _gradients_of_head(self, result: Any, number: Any) -> tuple[Any, list[Any], list[Any]]:
        """Return the loss of the head, and its gradients for the head's parameters and for `y`."""
        floats, others, join = _split(result)

        def loss(of_head: Any, floats: Any) -> Any:
            y, _ = join(floats, others)
            with inside_stage(self.stages.cut.manager):
                head_params = self._join_head(of_head, self._fixed_head)
                return self.head(head_params, y, at(self.head_rows, number))

        value, (by_head, of_result) = jax.value_and_grad(loss, (0, 1))(self.of_head, floats)
        return value, by_head, of_result


def _split(tree: Any) -> tuple[list[Any], list[Any], Callable[[list[Any], list[Any]], Any]]:
    """Return the leaves that are floats, the other leaves, and a function that joins them."""
    structure: Any
    leaves, structure = jax.tree.flatten(tree)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    def join(floats: list[Any], others: list[Any]) -> Any:
        own, rest = iter(floats), iter(others)
        return structure.unflatten([next(own if each else rest) for each in is_float])

    floats, others = (
        [leaf for leaf, each in zip(leaves, is_float, strict=True) if each is wanted]
        for wanted in (True, False)
    )
    return floats, others, join


def _zeros(leaves: list[Any]) -> list[Any]:
    return [jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in leaves]


def _as(sums: list[Any], leaves: list[Any]) -> list[Any]:
    return [total.astype(leaf.dtype) for total, leaf in zip(sums, leaves, strict=True)]


def _add_if(condition: Any, sums: list[Any], gradients: list[Any]) -> Any:
    return select(condition, jax.tree.map(jnp.add, sums, gradients), sums)
