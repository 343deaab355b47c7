"""The state of delayed scaling: histories and scales, what a step reports, and the update.

    scaling = block.init_scaling(config)  # scales and histories
    channel = fp8.new_channel(scaling)  # zeros, one leaf per use

    def loss(params, channel, x):
        y, seen = block.apply(config, params, x, state=fp8.uses(scaling, channel))
        return ..., seen

    (_, seen), (grads, sent) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, channel, x)
    scaling = fp8.update(config.recipe, scaling, seen, sent)

The forward pass returns the largest values of activations and kernels as `seen`. The largest value
of a gradient is known only in the backward pass, and a backward pass can return only gradients. So
the gradient of the channel holds this value, and a counter of 1.

JAX sums gradients. If several uses share one leaf of the channel, the gradient of the leaf is a sum
of largest values, which has no meaning. Then the sum of the counters is not 1, and the update
refuses the gradient. So each use (trip of a scan, microbatch, example of a `vmap`, call) has a leaf
of its own: the channel has leading dims, as `seen` has. The update takes the maximum over these
dims, then updates each history and scale once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.errors import LayerError, Problem, raise_problems
from shardwright.layers.fp8.quantize import explicit_entries, scale_of
from shardwright.layers.fp8.recipe import DelayedScaling
from shardwright.trees.paths import path_text
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.axes import EMPTY

USES_FIX: Final = (
    "pass fp8.uses(scaling, channel), with the scaling of the last update; before the first "
    "one, scaling = init_scaling(config)"
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorScaling:
    """The scale of a tensor, and the largest values of earlier updates.

    Attributes:
      scale: float32, `[]`, or `[layers]` for stacked layers.
      history: float32, `[..., history]`. Entry 0 is empty: the next update writes it.
    """

    scale: Any
    history: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseScaling:
    """The scaling of the matmuls that share one input. Matmuls are named after their kernels.

    Attributes:
      x: Scaling of the input.
      kernels: Scaling of each kernel.
      grads: Scaling of the gradient of each result.
      counts: For each matmul, 1 if the last update was valid, else its counter.
    """

    x: TensorScaling
    kernels: dict[str, TensorScaling]
    grads: dict[str, TensorScaling]
    counts: dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """The values that the backward pass of one matmul reports, as a gradient.

    Attributes:
      amax: Largest absolute value of the gradient of the result, float32.
      count: Counter, float32. Each use adds 1.
    """

    amax: Any
    count: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseUse:
    """The values that one use of the matmuls reads: scales, and the use's leaves of the channel.

    Attributes:
      x: Scale of the input.
      kernels: Scale of each kernel.
      grads: Scale of the gradient of each result.
      channel: One `Channel` per matmul.
    """

    x: Any
    kernels: dict[str, Any]
    grads: dict[str, Any]
    channel: dict[str, Channel]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseSeen:
    """The amaxes that the forward pass of the matmuls reports: largest absolute values, float32.

    Attributes:
      x: Largest value of the input.
      kernels: Largest value of each kernel.
    """

    x: Any
    kernels: dict[str, Any]


def init(recipe: Any, names: Iterable[str], *, layers: int | None = None) -> DenseScaling | None:
    """Return the first state of matmuls that share one input: scales of 1, histories of 0.

    Args:
      recipe: The recipe. Only delayed scaling has a state; for another recipe, the result is None.
      names: Names of the kernels.
      layers: Size of a leading dim, for stacked layers. Defaults to none.
    """
    if not isinstance(recipe, DelayedScaling):
        return None
    shape = () if layers is None else (layers,)

    def tensor() -> TensorScaling:
        return TensorScaling(
            # Start with scale 1, as TransformerEngine does: step 1 clips values that are too large
            # for fp8.
            scale=jnp.ones(shape, jnp.float32),
            history=jnp.zeros((*shape, recipe.history), jnp.float32),
        )

    names = tuple(names)
    return DenseScaling(
        x=tensor(),
        kernels={name: tensor() for name in names},
        grads={name: tensor() for name in names},
        counts={name: jnp.ones(shape, jnp.float32) for name in names},
    )


def specs(scaling: Any) -> Any:
    """Return `ArraySpec`s that replicate a state, for `pm.abstract`, `pm.shard` and `pm.jit_step`.

    Args:
      scaling: A tree of `DenseScaling`s, or its `jax.eval_shape`.
    """
    return jax.tree.map(
        lambda leaf: ArraySpec(leaf.shape, leaf.dtype, (EMPTY,) * leaf.ndim), scaling
    )


def new_channel(scaling: Any, *, uses: Sequence[int] | int = ()) -> Any:
    """Return a `Channel` of zeros per matmul, with respect to which a step differentiates the loss.

    Args:
      scaling: A tree of `DenseScaling`s.
      uses: Leading dims of the channel, such as (microbatches,), if the state is used more than
        once per update. `jax.tree.map(lambda leaf: leaf[i], channel)` is the channel of use i.
    """
    sizes = (uses,) if isinstance(uses, int) else tuple(uses)

    def of(state: DenseScaling) -> dict[str, Channel]:
        zeros = {
            name: jnp.zeros((*sizes, *np.shape(tensor.scale)), jnp.float32)
            for name, tensor in state.grads.items()
        }
        return {name: Channel(amax=zero, count=zero) for name, zero in zeros.items()}

    return _map(of, scaling)


def uses(scaling: Any, channel: Any = None) -> Any:
    """Return the argument `state` of the blocks: the scales, and the channel of one use.

    Args:
      scaling: A tree of `DenseScaling`s.
      channel: The channel of this use, without the leading dims `uses` of `new_channel`. Defaults
        to zeros, for inference.

    Raises:
      LayerError: The last update was not valid, see `check`.
    """
    check(scaling, traced=True)
    sent = new_channel(scaling) if channel is None else channel

    def of(state: DenseScaling, own: dict[str, Channel]) -> DenseUse:
        return DenseUse(
            x=state.x.scale,
            kernels={name: tensor.scale for name, tensor in state.kernels.items()},
            grads={name: tensor.scale for name, tensor in state.grads.items()},
            channel=own,
        )

    return _map(of, scaling, sent)


def split_uses(tree: Any, count: int) -> Any:
    """Give each `Channel` in a tree a last dim of uses, such as the microbatches of a pipeline.

    The gradient of a channel is then the maximum over its uses, not their sum.
    """

    @jax.custom_vjp
    def split(channel: Channel) -> Channel:
        parts: Channel = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf[..., None], (*leaf.shape, count)), channel
        )
        return parts

    def forward(channel: Channel) -> tuple[Channel, None]:
        return split(channel), None

    def backward(_: None, sent: Channel) -> tuple[Channel]:
        counts = jnp.moveaxis(sent.count, -1, 0)
        return (Channel(amax=sent.amax.max(-1), count=_worst(counts, counts[0])),)

    split.defvjp(forward, backward)
    return map_channels(split, tree)


def use_of(tree: Any, number: Any, runs: Any = True) -> Any:
    """Take the channels of one use from a tree that `split_uses` returned.

    Args:
      tree: The tree.
      number: Number of the use.
      runs: Whether to count the use. If False, its backward pass runs, but adds 0 to the gradients
        of the channels.
    """

    def own(leaf: Any) -> Any:
        value = jax.lax.dynamic_index_in_dim(leaf, number, -1, keepdims=False)
        return jnp.where(runs, value, 0)

    return map_channels(lambda channel: jax.tree.map(own, channel), tree)


def map_channels(
    f: Callable[[Channel], Any], tree: Any, rest: Callable[[Any], Any] = lambda leaf: leaf
) -> Any:
    """Apply a function to each `Channel` in a tree, and another function to all other leaves."""

    def is_channel(node: Any) -> bool:
        return isinstance(node, Channel)

    return jax.tree.map(
        lambda node: f(node) if is_channel(node) else rest(node), tree, is_leaf=is_channel
    )


def stack(*reports: Any) -> Any:
    """Stack the reports of several calls. The result can be `seen` or `sent` of `update`."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *reports)


def update(recipe: DelayedScaling, scaling: Any, seen: Any, sent: Any) -> Any:
    """Update each history and scale once, from the reports of all uses since the last update.

    A matmul without a backward pass has a counter of 0: its layer is frozen, or was skipped. Then
    the scale and the history of its gradient do not change. Without a forward pass, the scales and
    histories of its input and kernel do not change either.

    Args:
      recipe: The recipe.
      scaling: A tree of `DenseScaling`s.
      seen: The largest values (`DenseSeen`) that the blocks returned. Those of several uses are
        stacked in leading dims.
      sent: Gradient of the channel. Gradients of several uses are stacked in the same way.

    Returns:
      The new tree. Inside `jit` no error can be raised. So a matmul whose counter is not valid gets
      scales of NaN: every later result is NaN, and `check` names the matmul.

    Raises:
      LayerError: A counter is neither 0 nor 1, and the error names the matmul. Or all counters are
        0.
    """

    def counters(state: DenseScaling, sent: dict[str, Channel]) -> dict[str, Any]:
        return {name: _worst(own.count, state.counts[name]) for name, own in sent.items()}

    leaves = jax.tree.leaves(_map(counters, scaling, sent))
    # If all counters are 0, the caller did not differentiate with respect to the channel. The
    # counters then stay 0, and `check` refuses them.
    trained = jnp.stack([jnp.max(count) for count in leaves]).max() > 0 if leaves else True

    def of(state: DenseScaling, seen: DenseSeen, sent: dict[str, Channel]) -> DenseScaling:
        counts = counters(state, sent)
        # The matmuls of one input have one backward pass, so their counters are equal.
        unused = jnp.stack([count == 0 for count in counts.values()]).all(axis=0)
        counts = {
            name: jnp.where((count == 0) & trained, 1.0, count) for name, count in counts.items()
        }
        # The kernels share the scale of their input, so a wrong counter of one kernel makes all
        # scales invalid.
        valid = jnp.stack([count == 1 for count in counts.values()]).all(axis=0)

        def tensor(old: TensorScaling, amax: Any, dtype: str) -> TensorScaling:
            # Take the maximum of all uses: one scale must fit each microbatch and each example.
            amax = _over_uses(jnp.max, amax, old.scale)
            if any(explicit_entries(amax) or ()):
                # Each stage of a pipeline reports only its own layers, but every device has all
                # scales. So replicate the amaxes.
                mesh = jax.typeof(amax).sharding.mesh
                amax = jax.reshard(amax, NamedSharding(mesh, PartitionSpec()))
            stays = unused & (amax == 0)
            new = step(recipe, old, amax, dtype)
            scale = jnp.where(stays, old.scale, new.scale)
            return TensorScaling(
                scale=jnp.where(valid, scale, jnp.nan),
                history=jnp.where(stays[..., None], old.history, new.history),
            )

        return DenseScaling(
            x=tensor(state.x, seen.x, recipe.forward),
            kernels={
                name: tensor(old, seen.kernels[name], recipe.forward)
                for name, old in state.kernels.items()
            },
            grads={
                name: tensor(old, sent[name].amax, recipe.backward)
                for name, old in state.grads.items()
            },
            counts=counts,
        )

    new = _map(of, scaling, seen, sent)
    check(new, traced=True)
    return new


def step(recipe: DelayedScaling, state: TensorScaling, amax: Any, dtype: Any) -> TensorScaling:
    """Update the scaling of one tensor.

    `amax` is written to entry 0 of the history, and the new scale is computed from the history.
    Then the history rolls by one, and entry 0 becomes 0. If the amax of the history is 0 or not
    finite, the scale does not change.

    Args:
      recipe: The recipe.
      state: `scale [...]`, `history [..., history]`.
      amax: `[...]`.
      dtype: The fp8 format of the tensor, whose largest value the scale depends on.
    """
    history = state.history.at[..., 0].set(amax)
    remembered = history[..., 0] if recipe.algorithm == "most_recent" else jnp.max(history, axis=-1)
    scale = scale_of(remembered, dtype, margin=recipe.margin, old=state.scale)
    return TensorScaling(scale=scale, history=jnp.roll(history, -1, axis=-1).at[..., 0].set(0.0))


def check(scaling: Any, *, traced: bool = False) -> None:
    """Check that the last update of every matmul was valid.

    Args:
      scaling: A tree of `DenseScaling`s.
      traced: Whether traced counters, which have no values yet, are accepted without a check.

    Raises:
      LayerError: A counter is not 1. The error names all such matmuls.
    """
    problems = []
    nodes = jax.tree_util.tree_flatten_with_path(scaling, is_leaf=_is_scaling)[0]
    for path, state in nodes:
        for name, count in state.counts.items():
            # A tracer has no value to compare. The state keeps the counter for a check outside
            # of `jit`.
            if traced and isinstance(count, jax.core.Tracer):
                continue
            wrong = np.asarray(count)[np.asarray(count) != 1]
            if wrong.size:
                problems.append(_problem("/".join(filter(None, (path_text(path), name))), wrong[0]))
    raise_problems(problems)


def _problem(path: str, count: float) -> Problem:
    if count == 0:
        what = "took part in no backward pass, nor did any other matmul"
        fix = (
            "differentiate with respect to the channel, and pass uses(scaling, channel) to the "
            "blocks; "
            "a step that trains no layer with a recipe needs no update"
        )
    else:
        what = f"took part in {count:g} backward passes with one leaf, and JAX added their reports"
        fix = (
            "give each use a leaf of its own: fp8.new_channel(scaling, uses=n), "
            "and a slice of it per scan step, microbatch or example"
        )
    return Problem(
        error=LayerError, what=f"the counter is {count:g}: the matmul {what}", path=path, fix=fix
    )


def _is_scaling(node: Any) -> bool:
    return isinstance(node, DenseScaling)


def _map(f: Callable[..., Any], scaling: Any, *others: Any) -> Any:
    return jax.tree.map(f, scaling, *others, is_leaf=_is_scaling)


def _over_uses(reduce: Callable[..., Any], values: Any, like: Any) -> Any:
    """Reduce over the leading dims, in which the uses are stacked."""
    extra = np.ndim(values) - np.ndim(like)
    return reduce(values, axis=tuple(range(extra))) if extra else values


def _worst(counts: Any, like: Any) -> Any:
    """Return one counter for all uses: 0 or 1, or the largest invalid counter."""
    # A maximum alone would hide a counter of 1/2, the result of averaged gradients, behind the 1 of
    # another use.
    wrong = jnp.where((counts != 0) & (counts != 1), counts, 0.0)
    worst = _over_uses(jnp.max, wrong, like)
    return jnp.where(worst > 0, worst, _over_uses(jnp.max, counts, like))
