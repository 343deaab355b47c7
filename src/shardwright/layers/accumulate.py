"""Gradient accumulation: several microbatches per step, and one sum over devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from shardwright import _jax
from shardwright.errors import IndivisibleError, LayerError
from shardwright.layers.closures import closed_over_keys
from shardwright.layers.inputs import read_key
from shardwright.layers.placement import is_shard
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.manager.memory import in_host_memory
from shardwright.manager.shard_map import inputs_of
from shardwright.manager.shards import place_for_shard_map
from shardwright.resolution.partition_specs import canonical_spec, entry_names, entry_of, spec_of
from shardwright.trees.annotated import annotated_leaves
from shardwright.trees.paths import path_text
from shardwright.vocabulary.axes import BATCH, QUERY_LENGTH
from shardwright.vocabulary.integers import read_integer
from shardwright.vocabulary.lowering import lower
from shardwright.vocabulary.read import one_of, read_all


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Weighted:
    """A sum of losses and the sum of their weights. The loss is `total / weight`.

    Microbatches and devices may have different weights, such as numbers of tokens. So totals and
    weights are summed separately. At the end, the sum of the totals is divided by the sum of the
    weights. Means are not averaged.

    Attributes:
      total: Sum of the losses, a scalar.
      weight: Sum of the weights of these losses, a scalar. This sum is not differentiated.
    """

    total: Any
    weight: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """The result of a step of several microbatches.

    Attributes:
      value: The loss: sum of the totals / sum of the weights, in float32 at least. 0 if all weights
        are 0.
      weight: Sum of the weights.
      grads: Sum of the gradients of the totals / sum of the weights, sharded like the stored
        parameters, in the dtype of the parameters.
      sent: The gradient of the totals with respect to `channel`, with one entry per microbatch in
        dim 0; None without a channel.
      seen: The second result of the loss function, with one entry per microbatch in dim 0.
    """

    value: Any
    weight: Any
    grads: Any
    sent: Any
    seen: Any


def accumulate(
    loss: Callable[..., Any],
    n: int,
    *,
    specs: Any,
    mean_over: Literal["examples"] | None = None,
    gather: Literal["each", "once"] = "each",
    trainable: Callable[[str], bool] | None = None,
) -> Callable[..., Accumulated]:
    """Return a function of (params, batch, channel, *, key) that runs a loss on n microbatches.

    Each device sums the gradients of its microbatches, in float32 at least. If a weight is
    replicated over the mesh axes of BATCH, its gradients are summed over these axes once, after the
    last microbatch. If FSDP stores a weight of W bytes over F devices, the weight is gathered and
    its gradient is scattered. The bytes sent and the memory of a device depend on `gather`:

    - With "each", the device sends about 3 n W bytes. It keeps W / F bytes of weights in memory,
      and one gradient sum per element of these weights. Each weight is gathered where the loss uses
      it.
    - With "once", the device sends about 2 W bytes. It keeps W bytes of weights in memory, and one
      gradient sum per element of these weights. All weights are gathered before the first
      microbatch.

    Mesh axes that do not shard BATCH, such as tp and sp, work as they do without accumulation: the
    gradients of each microbatch are summed over sp. If all mesh axes are Explicit, and weights are
    gathered once or not stored in shards, the sum over sp is also deferred: it comes once, after
    the last microbatch. The weights are then `reduced` in their JAX types. JAX accepts such weights
    in matmuls, and the layers of this package accept them too. The loss then sees each microbatch
    as global arrays, and gets one key per microbatch. Microbatch i consists of the i-th part of the
    examples of each device.

    Args:
      loss: Function of (params, batch, channel) that returns (`Weighted(total, weight)`, seen) for
        the examples in `batch`, such as `(cross_entropy(...).weighted, None)`. It runs inside a
        `shard_map` over the mesh axes of BATCH. If a key is given, the loss is called with `key=`
        too. It may not close over a key, because all microbatches would then use the same key.
      n: Number of microbatches. It must divide the number of examples of a device.
      specs: The `ArraySpec`s of the parameters.
      mean_over: "examples" if the loss returns (mean, seen), where the mean is a scalar in which
        every example has the same weight. By default, the loss returns a `Weighted`.
      gather: When to gather the weights that FSDP shards. "each": in each microbatch, where the
        loss gathers them. "once": before the first microbatch.
      trainable: Function that tells from the path of a parameter whether to train it, such as
        `lambda path: "lora" in path`. The other parameters are not differentiated, and their
        gradients are None. By default, all are trained.

    Returns:
      Function of (params, batch, channel, *, key). `params` are the parameters as stored. `batch`
      is a tree of arrays whose dim 0 is BATCH. `channel` is None, or the result of
      `fp8.new_channel(scaling, uses=n)`. `key` is None or a JAX key. If it is a key, each
      microbatch of each device gets its own key, derived from `key`. The leaves of `sent` and
      `seen` are maxima over all devices, not sums. With delayed scaling, pass both to `fp8.update`.

    Raises:
      IndivisibleError: n does not divide the examples of a device.
      LayerError: n is not a positive integer, a surrounding `shard_map` has split the batch, or
        parameters are in host memory. Or the arrays of `batch` differ in dim 0, or `channel` does
        not have n uses. Or the loss function does not accept these arguments, closes over a key, or
        does not return what `mean_over` says. Or JAX refuses an operation on a weight that is
        `reduced`.
    """
    read_integer("n", n, error=LayerError, fix="pass the number of microbatches, such as n=4")
    words: list[Any] = [("gather", gather, one_of(("each", "once")))]
    if mean_over is not None:
        words.append(("mean_over", mean_over, one_of(("examples",))))
    read_all(words, error=LayerError)

    def run(params: Any, batch: Any, channel: Any = None, *, key: Any = None) -> Accumulated:
        size = _batch_size(batch)
        if is_shard((size,), (BATCH,)):
            raise LayerError(
                "accumulate is called inside a shard_map that splits the batch",
                fix="call accumulate outside of that shard_map: it runs one of its own over the "
                "mesh axes of BATCH",
            )
        if wrong := [leaf for leaf in jax.tree.leaves(channel) if np.shape(leaf)[:1] != (n,)]:
            raise LayerError(
                f"a leaf of the channel has shape {np.shape(wrong[0])}, and there are {n} "
                "microbatches",
                path="channel",
                fix=f"pass fp8.new_channel(scaling, uses={n})",
            )
        _check_loss(loss, with_key=key is not None)
        if key is not None:
            key = read_key("key", key, fix="pass key=jax.random.key(0), another one for each step")
        manager: PartitionManager | None = context.current()
        axes: dict[str, int] = {}
        if manager is not None:
            sharded = manager.mesh_axes(BATCH, size)
            axes = {axis: manager.sizes[axis] for axis in sharded if manager.sizes[axis] > 1}
        shards = math.prod(axes.values())
        if size % (shards * n):
            raise IndivisibleError(
                f"n={n} does not divide the {size // shards} examples of a device",
                path="n",
                fix="choose a divisor",
            )
        pairs, _ = jax.tree_util.tree_flatten_with_path(params)
        paths = [path_text(path) for path, _ in pairs]
        for path, (_, leaf) in zip(paths, pairs, strict=True):
            # Gradients of a host parameter arrive on the host, where they cannot be added.
            if in_host_memory(leaf):
                raise LayerError(
                    "the parameter is in host memory, and gradients are accumulated on the device",
                    path=path,
                    fix='write params = "device" in [memory]; optimizer state may be on the host',
                )
        step = _AccumulationStep(
            loss=loss,
            n=n,
            axes=tuple(axes),
            manager=manager,
            specs=specs,
            examples=size // (shards * n),
            is_mean=mean_over is not None,
            once=gather == "once" and manager is not None,
            trained=tuple(trainable is None or trainable(path) for path in paths),
            paths=tuple(paths),
        )
        return step.run(params, batch, channel, key)

    return run


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _AccumulationStep:
    """A step of several microbatches.

    Attributes:
      loss: The argument of `accumulate`.
      n: Number of microbatches.
      axes: Mesh axes that shard the examples; none without a manager.
      manager: The ambient manager, or None.
      specs: The argument of `accumulate`.
      examples: Number of examples of a microbatch on a device.
      is_mean: Whether the loss returns a mean over the examples of a microbatch on a device.
      once: Whether all weights are gathered before the first microbatch.
      trained: For each leaf of the parameters, whether it has a gradient.
      paths: Path of each leaf of the parameters.
      deferred: Mesh axes over which trained weights are `reduced` in their JAX types.
      only: Path of the only weight that is `reduced`; "" if no weight is. None: all trained weights
        are.
    """

    loss: Callable[..., Any]
    n: int
    axes: tuple[str, ...]
    manager: PartitionManager | None
    specs: Any
    examples: int
    is_mean: bool
    once: bool
    trained: tuple[bool, ...]
    paths: tuple[str, ...]
    deferred: frozenset[str] = frozenset()
    only: str | None = None

    def run(self, params: Any, batch: Any, channel: Any, key: Any) -> Accumulated:
        """Return the loss and the gradients of all microbatches of all devices."""
        if self.manager is not None and (deferred := self._deferrable(self.manager, params)):
            step = dataclasses.replace(self, deferred=deferred)
            sums, (sent, seen) = step._by_types(self.manager, params, batch, channel, key)
        elif self.manager is not None and self.axes:
            sums, (sent, seen) = self._on_shards(self.manager, params, batch, channel, key)
        else:
            sums, (sent, seen) = self._scan(params, batch, channel, key)
        loss, grads = sums
        # If all weights are 0, the total and its gradients are 0 too. Divide them by 1, not by 0.
        divisor = jnp.where(loss.weight == 0, 1, loss.weight)
        leaves, structure = jax.tree.flatten(params)
        given = iter(grads)
        means = [
            (next(given) / divisor).astype(leaf.dtype) if trained else None
            for leaf, trained in zip(leaves, self.trained, strict=True)
        ]
        return Accumulated(
            value=loss.total / divisor,
            weight=loss.weight,
            grads=jax.tree.unflatten(structure, means),
            sent=sent,
            seen=seen,
        )

    def _deferrable(self, manager: PartitionManager, params: Any) -> frozenset[str]:
        """Return the mesh axes over which `reduced` weights can defer the sums of gradients.

        These are the mesh axes of the tokens. If LENGTH is not sharded, or if the sums cannot be
        deferred, there are none.
        """
        # Refuse Manual axes: in a `shard_map`, JAX cannot transpose a scan over reduced weights.
        mesh = _jax.ambient_mesh() or manager.mesh
        if set(mesh.axis_types) != {AxisType.Explicit}:
            return frozenset()
        # A dim of size `mesh.size` divides over all mesh axes, so only the rule of QUERY_LENGTH
        # decides.
        found = manager.explain(QUERY_LENGTH, shape=(mesh.size,)).decisions
        length = [axis for decision in found for axis in decision.mesh_axes]
        tokens = {axis for axis in (*self.axes, *length) if manager.sizes[axis] > 1}
        stored = jax.tree.leaves(manager.shardings(params, self.specs))
        # If the loss gathers a weight, each microbatch scatters the gradient of this weight, so no
        # sum can be deferred.
        whole = self.once or not any(_part(each.spec, tokens).partitions for each in stored)
        return frozenset(tokens if whole and not tokens.issubset(self.axes) else ())

    def _by_types(
        self, manager: PartitionManager, params: Any, batch: Any, channel: Any, key: Any
    ) -> Any:
        """Run `_scan` on global arrays: the types of the weights defer the sums."""
        shards = math.prod(manager.sizes[axis] for axis in self.axes)
        step = dataclasses.replace(self, axes=(), examples=self.examples * shards)
        params = manager.shard(params, self.specs, role="param")
        batch = _by_examples(batch, self.axes, manager)
        given, refusals = (params, batch, channel, key), []
        # JAX refuses to defer sums over the mesh axes of LENGTH if no array of the loss has LENGTH.
        # Then defer only the sums over the mesh axes of BATCH.
        for deferred in (self.deferred, self.deferred.intersection(self.axes)):
            try:
                return dataclasses.replace(step, deferred=deferred)._scan(*given)
            except _jax.refusals() as error:
                if not _jax.refuses_shardings(error):
                    raise
                refusals.append(error)
        if path := step._refused(*given):
            raise _refused_weight(path, self.deferred) from refusals[0]
        raise refusals[0]

    def _refused(self, *given: Any) -> str | None:
        """Return the path of a weight that JAX refuses when its type is `reduced`, or None."""
        paths = [path for path, trained in zip(self.paths, self.trained, strict=True) if trained]
        for path in ("", *paths):  # "" means that no weight is `reduced`
            step = dataclasses.replace(self, only=path)
            try:
                jax.eval_shape(step._scan, *given)
            except _jax.refusals() as error:
                return path if _jax.refuses_shardings(error) else None
        return None

    def _on_shards(
        self, manager: PartitionManager, params: Any, batch: Any, channel: Any, key: Any
    ) -> Any:
        """Run `_scan` on the shards of the examples, and sum over the shards once."""
        specs = [each.spec for each in jax.tree.leaves(manager.shardings(params, self.specs))]
        stored = [_part(spec, self.axes) for spec in specs]
        grads = [spec for spec, trained in zip(stored, self.trained, strict=True) if trained]
        leaves, structure = jax.tree.flatten(manager.shard(params, self.specs, role="param"))
        dims = [
            lower(leaf.annotation, np.shape(leaf.value)).dims
            for leaf in annotated_leaves(params, self.specs)
        ]
        rows, whole = spec_of(self.axes), PartitionSpec()
        # Over Explicit axes, `shard_map` refuses a batch that is not sharded as `in_specs` says.
        batch = _by_examples(batch, self.axes, manager)

        def on_shard(leaves: Any, batch: Any, channel: Any, key: Any) -> Any:
            # Let the weights vary over devices: JAX then does not sum their gradients here.
            params = jax.tree.unflatten(structure, _jax.vary_together(leaves, over=self.axes))
            # Under `largest_dim`, only the global shape tells along which dim a shard was cut.
            with context.INPUTS(inputs_of(dims, leaves, stored)), contextlib.ExitStack() as stack:
                if not self.once and any(spec.partitions for spec in stored):
                    stack.push(_note_shards)
                (loss, sums), others = self._scan(params, batch, channel, key)
            sums = [
                jax.lax.psum(total, axes) if (axes := _missing(self.axes, spec)) else total
                for total, spec in zip(sums, grads, strict=True)
            ]
            loss = jax.lax.psum(loss, self.axes)
            return (loss, sums), jax.tree.map(_over_devices, others)

        ambient = _jax.ambient_mesh() or manager.mesh
        kinds = zip(ambient.axis_names, ambient.axis_types, strict=True)
        explicit = tuple(axis for axis, kind in kinds if kind is AxisType.Explicit)
        rest = tuple(axis for axis in explicit if axis not in self.axes)
        f: Any = on_shard
        if rest:
            # If a mesh axis is Explicit and not in `axis_names`, JAX 0.10 gathers the arguments and
            # results of a `shard_map` over this axis. So make the axes in `rest` Auto around the
            # `shard_map`, and Explicit inside.
            own = jax.tree.map(lambda leaf: _part(jax.typeof(leaf).sharding.spec, rest), batch)
            kept = [_part(spec, rest) for spec in specs]
            f = jax.sharding.explicit_axes(f, axes=rest, in_sharding=(kept, own, whole, whole))
        # Each result is a sum or a maximum over the devices, or a shard of a sum. So `out_specs`
        # have only the mesh axes of stored weights.
        f = jax.shard_map(
            f,
            # A nested `shard_map` takes the mesh of the surrounding one.
            mesh=None if rest or AxisType.Manual in ambient.axis_types else manager.mesh,
            in_specs=(stored, rows, whole, whole),
            out_specs=((whole, grads), whole),
            axis_names=set(self.axes),
        )
        if rest:
            sums = [
                _part(spec, explicit)
                for spec, trained in zip(specs, self.trained, strict=True)
                if trained
            ]
            f = jax.sharding.auto_axes(f, axes=explicit, out_sharding=((whole, sums), whole))
        return f(leaves, batch, channel, key)

    def _scan(self, params: Any, batch: Any, channel: Any, key: Any) -> tuple[Any, Any]:
        """Return the sums of a device, and (sent, seen) of each microbatch.

        The sums are a `Weighted`, and one gradient sum for each parameter that is trained.
        """
        weights, inner = params, self.manager
        if self.once and self.manager is not None:
            weights = self.manager.gather(params, self.specs, path="")
            # The loss gets weights that are already gathered, so resolve parameters by the rules of
            # activations, without FSDP.
            rules = self.manager.rules
            policy = dataclasses.replace(rules.policy, gather=(), largest_dim=None)
            used = dataclasses.replace(rules, params=rules.activations, policy=policy)
            inner = self.manager.having(rules=used)
        if self.deferred:
            leaves, structure = jax.tree.flatten(weights)
            leaves = list(map(self._reduced, leaves, self.paths, self.trained))
            weights = jax.tree.unflatten(structure, leaves)
        zero = _jax.vary_together(jnp.zeros(()), over=self.axes)
        start = Weighted(zero, zero), [_zeros(leaf) for leaf in self._pick(weights)]
        # Cut the microbatches from the examples of each device, so that no example is sent.
        parts = jax.tree.map(self._cut, batch)
        with contextlib.nullcontext() if inner is None else inner:
            (loss, sums), others = jax.lax.scan(
                functools.partial(self._add, weights), start, (parts, channel, self._keys(key))
            )
        if self.deferred:
            return (loss, list(map(_reduce, sums, self._pick(params)))), others
        return (loss, self._scatter(params, sums)), others

    def _reduced(self, weight: Any, path: str, trained: bool) -> Any:
        """Return a weight whose gradient stays unreduced over the mesh axes of the tokens."""
        if not trained or self.only not in (None, path):
            return weight
        spec = jax.typeof(weight).sharding.spec
        reduced = frozenset(_missing(tuple(self.deferred), spec))
        return jax.reshard(weight, PartitionSpec(*spec.partitions, reduced=reduced))

    def _cut(self, leaf: Any) -> Any:
        """Return the examples as `[n, examples of a microbatch, ...]`."""

        def local(leaf: Any) -> Any:
            return leaf.reshape(self.n, -1, *leaf.shape[1:])

        if not self.deferred:
            return local(leaf)
        spec = jax.typeof(leaf).sharding.spec
        out = PartitionSpec(None, *spec.partitions)
        return jax.shard_map(local, in_specs=spec, out_specs=out)(leaf)

    def _scatter(self, params: Any, sums: list[Any]) -> list[Any]:
        """Return the gradient sums, sharded like the stored weights.

        If the weights were not gathered once, the sums have this sharding already.
        """
        if not self.once or self.manager is None:
            return sums
        manager, trained = self.manager, self._pick(params)
        like = [leaf.astype(total.dtype) for leaf, total in zip(trained, sums, strict=True)]

        def gather(trained: list[Any]) -> list[Any]:
            return self._pick(manager.gather(self._join(params, trained), self.specs, path=""))

        # The transpose of the gather is the reduce-scatter. `jax.vjp` also runs the gather itself;
        # XLA removes it, because its result is not used.
        return list(jax.vjp(gather, like)[1](sums)[0])

    def _pick(self, tree: Any) -> list[Any]:
        """Return the leaves that are trained."""
        pairs = zip(jax.tree.leaves(tree), self.trained, strict=True)
        return [leaf for leaf, trained in pairs if trained]

    def _join(self, tree: Any, values: Iterable[Any]) -> Any:
        """Return a tree in which `values` replace the leaves that are trained."""
        leaves, structure = jax.tree.flatten(tree)
        given = iter(values)
        pairs = zip(leaves, self.trained, strict=True)
        joined = [next(given) if trained else leaf for leaf, trained in pairs]
        return jax.tree.unflatten(structure, joined)

    def _keys(self, key: Any) -> Any:
        """Return a key for each microbatch of this device."""
        if key is None:
            return None
        # Device d folds in the numbers from d * n to d * n + n - 1, so no two microbatches of a
        # step have the same key.
        first = jax.lax.axis_index(self.axes) * self.n if self.axes else 0
        return jax.vmap(functools.partial(jax.random.fold_in, key))(first + jnp.arange(self.n))

    def _add(self, weights: Any, sums: Any, microbatch: Any) -> tuple[Any, Any]:
        """Add the loss and the gradients of one microbatch."""
        # Differentiate the sum of the losses, not their mean: the divisor is known only after the
        # last microbatch. So the gradients and the fp8 scales do not depend on the mesh or on n.
        differentiated = jax.value_and_grad(self._total, (0, 3), has_aux=True)
        if not self.once and not self.deferred:
            # Without this barrier, XLA gathers all weights before the loop, and keeps all of them
            # in memory.
            part, *rest = microbatch
            weights, part = jax.lax.optimization_barrier((weights, part))
            microbatch = part, *rest
        (total, (weight, seen)), (grads, sent) = differentiated(
            self._pick(weights), weights, *microbatch
        )
        return jax.tree.map(jnp.add, sums, (Weighted(total, weight), grads)), (sent, seen)

    def _total(self, trained: Any, weights: Any, part: Any, channel: Any, key: Any) -> Any:
        """Return (total, (weight, second result of the loss)) of one microbatch."""
        given = {} if key is None else {"key": key}
        result = self.loss(self._join(weights, trained), part, channel, **given)
        loss: Any = result[0] if isinstance(result, tuple) and len(result) == 2 else None
        if self.is_mean and _jax.is_array(loss) and np.shape(loss) == ():
            loss = Weighted(loss * self.examples, self.examples)
        elif self.is_mean or not isinstance(loss, Weighted):
            raise _wrong_result(result, is_mean=self.is_mean)
        for name in ("total", "weight"):
            if np.shape(getattr(loss, name)) != ():
                raise LayerError(
                    f"the {name} is {_shape_text(getattr(loss, name))}, not a scalar",
                    path="loss",
                    fix="return sums over all tokens of the microbatch",
                )
        return loss.total, (jnp.asarray(loss.weight), result[1])


def _wrong_result(result: Any, *, is_mean: bool) -> LayerError:
    parts = result if isinstance(result, tuple) else (result,)
    text = ", ".join(map(_shape_text, parts))
    if is_mean:
        wanted, fix = "(mean, seen)", "return a scalar mean and None; leave mean_over out for sums"
    else:
        wanted = "(Weighted, seen)"
        fix = (
            "return (loss.cross_entropy(...).weighted, None), or (Weighted(total, weight), None); "
            'for a mean that counts every example the same, pass mean_over="examples"'
        )
    returned = f"({text})" if isinstance(result, tuple) else text
    return LayerError(f"it returned {returned}, not {wanted}", path="loss", fix=fix)


def _shape_text(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"an array of shape {shape}"


def _zeros(weight: Any) -> Any:
    """Return zeros, in float32 at least, to which gradients are added.

    A bfloat16 sum would lose the later microbatches.
    """
    # `zeros_like` makes the zeros vary over the same mesh axes as the weight. The carry of a scan
    # cannot change its type.
    zeros = jnp.zeros_like(weight, dtype=jnp.promote_types(weight.dtype, jnp.float32))
    spec = jax.typeof(weight).sharding.spec
    if not spec.reduced:
        return zeros
    return jax.reshard(zeros, PartitionSpec(*spec.partitions, unreduced=spec.reduced))


def _reduce(total: Any, stored: Any) -> Any:
    """Reduce an unreduced sum over devices, into the shards of a stored weight."""
    spec, owed = jax.typeof(stored).sharding.spec, jax.typeof(total).sharding.spec.unreduced
    rest = frozenset(_missing(tuple(owed), spec))
    # A single reshard would make XLA add whole sums over all mesh axes, and then cut them. So
    # reduce to the shards of FSDP first: then only these shards are added over the other mesh axes.
    return jax.reshard(jax.reshard(total, PartitionSpec(*spec.partitions, unreduced=rest)), spec)


def _by_examples(batch: Any, axes: tuple[str, ...], manager: PartitionManager) -> Any:
    """Shard dim 0 of a batch over Explicit mesh axes.

    The sharding of other dims does not change.
    """
    rest, rows = PartitionSpec.UNCONSTRAINED, spec_of(axes).partitions
    specs = jax.tree.map(lambda leaf: PartitionSpec(*rows, *[rest] * (np.ndim(leaf) - 1)), batch)
    return place_for_shard_map([batch], [specs], mesh=manager.mesh)[0]


def _note_shards(_: object, error: BaseException | None, trace: object) -> None:
    """Add a note to an error about shapes or sizes: the loss gets shards of the weights."""
    if error is not None and any(word in str(error).lower() for word in ("shape", "size")):
        error.add_note(
            "accumulate passes the shards of weights to the loss, as FSDP stores them.\n"
            '  fix   call sw.gather(params, specs) in the loss, or pass gather="once"'
        )


def _refused_weight(path: str, axes: Iterable[str]) -> LayerError:
    return LayerError(
        f"JAX refuses an operation on this weight, which is reduced over {'+'.join(sorted(axes))}: "
        "its gradient is summed after the last microbatch only",
        path=path,
        fix='use the weight in matmuls, such as sw.einsum("bse,e->bse", x, scale, out=...) for x '
        "* scale; "
        'or sum gradients in each microbatch (fp8 needs this): pass gather="each" if FSDP shards '
        "the weights, else use Auto mesh axes",
    )


def _batch_size(batch: Any) -> int:
    """Return the size of dim 0, which is equal for all arrays of the batch.

    Raises:
      LayerError: The sizes differ, an array has no dims, or the batch is empty.
    """
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    shapes = {path_text(path): np.shape(leaf) for path, leaf in leaves}
    sizes = [shape[0] if shape else None for shape in shapes.values()]
    if len(set(sizes)) > 1 or None in sizes:
        each = ", ".join(f"{path or 'batch'} has shape {shape}" for path, shape in shapes.items())
        raise LayerError(
            f"the arrays differ in dim 0, which is BATCH: {each}",
            path="batch",
            fix="if an array does not have one entry per example, leave it out of the batch: let "
            "the loss close over it",
        )
    size: int = sizes[0] if sizes and sizes[0] else 0
    if not size:
        raise LayerError("the batch has no examples", path="batch", fix="pass arrays [batch, ...]")
    return size


def _check_loss(loss: Callable[..., Any], *, with_key: bool) -> None:
    signature = inspect.signature(loss)
    try:
        signature.bind(None, None, None, **({"key": None} if with_key else {}))
    except TypeError as error:
        arguments = "params, batch, channel, *, key" if with_key else "params, batch, channel"
        raise LayerError(
            f"the loss is called with ({arguments}): {error}",
            path="loss",
            fix=f"write def loss({arguments}); without delayed scaling, the loss ignores channel",
        ) from None
    if names := closed_over_keys(loss):
        raise LayerError(
            f"the loss closes over the key {names[0]}, so all microbatches and all devices would "
            "drop the same elements",
            path="loss",
            fix="pass key= to the function that accumulate returns, and take key= in the loss",
        )


def _part(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Return a spec with only the mesh axes that are in `axes`."""
    entries = [entry_names(entry) for entry in spec.partitions]
    return canonical_spec([entry_of(tuple(a for a in entry if a in axes)) for entry in entries])


def _missing(axes: tuple[str, ...], spec: PartitionSpec) -> tuple[str, ...]:
    """Return the mesh axes that are not in a spec."""
    own = [axis for entry in spec.partitions for axis in entry_names(entry)]
    return tuple(axis for axis in axes if axis not in own)


def _over_devices(leaf: Any) -> Any:
    """Return the maximum over the mesh axes that a value varies over."""
    axes = tuple(sorted(_jax.varying_axes(leaf)))
    return jax.lax.pmax(leaf, axes) if axes else leaf
