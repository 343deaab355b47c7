"""`offloaded`: an optimizer that brings its state from the host one layer at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.dims.bodies import Runs, bodies
from shardwright.errors import Problem, StrategyError, raise_problems
from shardwright.manager import context, trees
from shardwright.manager.core import Manager
from shardwright.manager.memory import OffloadedState, in_host_memory, to_device, to_host
from shardwright.trees.annotated import Leaf, annotated_leaves
from shardwright.trees.optimizer_state import annotate_state
from shardwright.trees.paths import path_text
from shardwright.vocabulary.annotations import PartOf
from shardwright.vocabulary.axes import LAYERS, Role
from shardwright.vocabulary.lowering import lower


@dataclasses.dataclass(frozen=True, slots=True)
class Offloaded:
    """An optimizer that updates stacked parameters one layer at a time, as `offloaded` says.

    Attributes:
      optimizer: An optax transformation, or any object with `init` and `update` like it.
      specs: Annotations of the parameters.
    """

    optimizer: Any
    specs: Any

    def init(self, params: Any) -> OffloadedState:
        """Return the state of the optimizer. `pm.jit_step` leaves this state in host memory."""
        return OffloadedState(self.optimizer.init(params))

    def update(self, grads: Any, state: OffloadedState, params: Any = None) -> tuple[Any, Any]:
        """Return the updates of the parameters and the new state, as in optax.

        Raises:
          StrategyError: The parameters or the gradients are in host memory. Or the optimizer does
            not work leaf by leaf; or its state is factored, or has random keys.
          NoManagerError: No manager is ambient.
        """
        for path, leaf in jax.tree_util.tree_leaves_with_path((grads, params)):
            if in_host_memory(leaf):
                raise StrategyError(
                    "the array is in host memory, where updates cannot be added to parameters",
                    path=path_text(path[1:]),
                    fix="params, state = optimizer.apply_gradients(grads, state, params)",
                )
        return _LayerUpdate(self, grads, state, params, apply=False).run()

    def apply_gradients(
        self, grads: Any, state: OffloadedState, params: Any
    ) -> tuple[Any, OffloadedState]:
        """Return the new parameters and the new state, each in the memory that it had.

        This does the work of `update` and `optax.apply_updates` in one pass over the layers.

        Raises:
          StrategyError, NoManagerError: See `update`.
        """
        return _LayerUpdate(self, grads, state, params, apply=True).run()


def offloaded(optimizer: Any, specs: Any) -> Offloaded:
    """Return an optimizer that brings its state from the host one layer at a time.

    If the whole state moves, the device needs memory for all of it. In a stack of layers (a
    parameter whose first axis is `LAYERS`), the update of a layer needs only the state of this
    layer. So the update is a `jax.lax.scan` over the layers, whose carry is the arrays in host
    memory. Other parameters move as a whole, and so does a stack that is sharded over its layers.
    If no array is on the host, the program is the same and moves nothing.

    The optimizer must work leaf by leaf. It treats each layer of a stack as a separate parameter,
    as if the layers were not stacked. To clip by the global norm, clip first:
    `optax.chain(optax.clip_by_global_norm(1.0), sw.offloaded(optax.adam(1e-3), specs))`.

    Args:
      optimizer: An optax transformation, or any object with `init` and `update` like it.
      specs: `ArraySpec`s or annotations of the parameters.

    Returns:
      An object with `init` and `update` as in optax, and with `apply_gradients`, which also adds
      the updates to parameters that are in host memory.

    >>> import optax
    >>> import shardwright as sw
    >>> specs = sw.stack_specs({"up": sw.ArraySpec((8, 16), "float32", (sw.EMBED, sw.EMPTY))}, 4)
    >>> optimizer = offloaded(optax.adam(1e-3), specs)
    >>> sorted(type(optimizer).__slots__)
    ['optimizer', 'specs']
    """
    for name in ("init", "update"):
        if not callable(getattr(optimizer, name, None)):
            what = f"the optimizer is a {type(optimizer).__name__} without {name}"
            raise StrategyError(what, fix="pass an optax transformation")
    return Offloaded(optimizer, specs)


class _LayerUpdate:
    """One update of a tree: its leaves, and the parameter of each array of the state.

    `grads`, `params` and the state are lists of leaves. A group is a list of indices of parameters
    that are updated together: either all parameters that are stacked over the same number of
    layers, or all that are not stacked.
    """

    def __init__(
        self, owner: Offloaded, grads: Any, state: OffloadedState, params: Any, *, apply: bool
    ) -> None:
        manager: Manager = context.require("offloaded", method=False)
        self.update, self.apply = owner.optimizer.update, apply
        self.named = annotated_leaves(grads, owner.specs)
        self.structure: Any
        self.state_structure: Any
        self.grads: list[Any]
        self.params: list[Any] | None
        self.grads, self.structure = jax.tree.flatten(grads)
        self.params = None if params is None else self.structure.flatten_up_to(params)
        self.state, self.state_structure = jax.tree.flatten(state.inner)
        annotations = annotate_state(state.inner, grads, owner.specs, by_path=True)
        flat = self.state_structure.flatten_up_to(annotations)
        numbers = {leaf.path: number for number, leaf in enumerate(self.named)}
        self.owners = [numbers[a.path] if isinstance(a, PartOf) else None for a in flat]
        paths = [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.inner)]
        raise_problems(
            [
                problem
                for path, leaf, annotation in zip(paths, self.state, flat, strict=True)
                if (problem := _unfit(path, leaf, annotation)) is not None
            ]
        )
        self.dtypes = self._check_leaf_by_leaf(paths)
        self.shardings = jax.tree.leaves(trees.shardings(manager, grads, owner.specs))
        self.state_shardings = jax.tree.leaves(
            trees.shardings(manager, state.inner, annotations, role=Role.STATE)
        )

    def run(self) -> tuple[Any, OffloadedState]:
        """Return the results (new parameters, or updates) and the new state."""
        groups: dict[int | None, list[int]] = {}
        for number, leaf in enumerate(self.named):
            groups.setdefault(self._layers(number, leaf), []).append(number)
        results: dict[int, Any] = {}
        state: dict[int, Any] = {}
        for layers, members in groups.items():
            own = [at for at, owner in enumerate(self.owners) if owner in members]
            step = self._whole if layers is None else self._scanned
            some, new = step(members, own)
            results.update(some)
            state.update(new)
        return (
            _filled(self.structure, results),
            OffloadedState(_filled(self.state_structure, state)),
        )

    def _layers(self, number: int, leaf: Leaf) -> int | None:
        """Return the number of layers of a stack, or None for a parameter that is updated whole."""
        shape = np.shape(leaf.value)
        if not shape or lower(leaf.annotation, shape).dims[0].axes != (LAYERS,):
            return None
        own = [at for at, owner in enumerate(self.owners) if owner == number]
        shardings = [self.shardings[number], *(self.state_shardings[at] for at in own)]
        # A slice of a sharded dim is on some devices only, so XLA would gather the stack.
        is_sharded = any(each.spec.partitions[:1] not in ((), (None,)) for each in shardings)
        return None if is_sharded else shape[0]

    def _whole(self, members: list[int], own: list[int]) -> tuple[dict[int, Any], dict[int, Any]]:
        grads = {at: _on_device(self.grads[at], self.shardings[at]) for at in members}
        moments = {at: _on_device(self.state[at], self.state_shardings[at]) for at in own}
        params = self._params(members, _on_device)
        results, new = self._call(grads, moments, params)
        targets = self._targets()
        return (
            {at: _back(targets[at], x, self.shardings[at]) for at, x in results.items()},
            {at: _back(self.state[at], x, self.state_shardings[at]) for at, x in new.items()},
        )

    def _scanned(self, members: list[int], own: list[int]) -> tuple[dict[int, Any], dict[int, Any]]:
        targets = self._targets()
        # If the dtypes agree, the update of a layer overwrites the gradient of this layer. XLA
        # updates a carry in place, so no second array of the size of the parameters exists.
        buffers = {
            at: targets[at] for at in members if self.apply or self.dtypes[at] == targets[at].dtype
        }
        moments = {at: self.state[at] for at in own}

        def body(carry: Any, layer: Any) -> Any:
            buffers, moments = carry

            def pick(x: Any, sharding: NamedSharding) -> Any:
                part = lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)
                return _on_device(part, _without_layers(sharding))

            def put(x: Any, new: Any, sharding: NamedSharding) -> Any:
                part = _back(x, new, _without_layers(sharding))
                return lax.dynamic_update_index_in_dim(x, part, layer, 0)

            grads = self.grads if self.apply else {**dict(enumerate(self.grads)), **buffers}
            stored = buffers if self.apply else None
            results, new = self._call(
                {at: pick(grads[at], self.shardings[at]) for at in members},
                {at: pick(x, self.state_shardings[at]) for at, x in moments.items()},
                self._params(members, pick, stored),
            )
            written = {at: put(x, results.pop(at), self.shardings[at]) for at, x in buffers.items()}
            kept = {at: put(x, new.pop(at), self.state_shardings[at]) for at, x in moments.items()}
            return (written, kept), (results, new)

        count = jnp.arange(np.shape(self.named[members[0]].value)[0])
        (buffers, moments), (results, shared) = lax.scan(body, (buffers, moments), count)
        # The scalars, such as the count of steps, are equal in all layers: take the first.
        return {**buffers, **results}, {**moments, **{at: x[0] for at, x in shared.items()}}

    def _params(
        self, members: list[int], pick: Any, stored: Mapping[int, Any] | None = None
    ) -> dict[int, Any] | None:
        if self.params is None:
            return None
        params = self.params if stored is None else stored
        return {at: pick(params[at], self.shardings[at]) for at in members}

    def _targets(self) -> list[Any]:
        """Return the arrays that the results replace: parameters or, for updates, gradients."""
        if not self.apply:
            return self.grads
        assert self.params is not None
        return self.params

    def _call(
        self, grads: dict[int, Any], moments: dict[int, Any], params: dict[int, Any] | None
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        """Call the optimizer on some parameters, with None in place of the other parameters.

        Return two dicts: index of a parameter -> its result, and index of a leaf of the state ->
        its new value. The second dict includes scalars.
        """
        shared = {at: x for at, x in enumerate(self.state) if self.owners[at] is None}
        state = {**moments, **shared}
        updates, new = self.update(
            _filled(self.structure, grads),
            _filled(self.state_structure, state),
            None if params is None else _filled(self.structure, params),
        )
        results = dict(zip(sorted(grads), jax.tree.leaves(updates), strict=True))
        if self.apply:
            assert params is not None
            # As `optax.apply_updates` does.
            results = {at: (params[at] + x).astype(params[at].dtype) for at, x in results.items()}
        return results, dict(zip(sorted(state), jax.tree.leaves(new), strict=True))

    def _check_leaf_by_leaf(self, state_paths: Sequence[str]) -> list[Any]:
        """Check that the update of each parameter reads no other parameter's arrays.

        The check follows the trace of an update of the whole tree, so it works for any optimizer.
        It assumes that each result of a loop or a branch depends on all operands.

        Returns:
          The dtype of each update.
        """
        leaves = [*self.grads, *self.state, *(self.params or ())]
        shapes = [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in leaves]
        count, held = len(self.grads), len(self.state)

        def update(*flat: Any) -> Any:
            params = flat[count + held :]
            return self.update(
                jax.tree.unflatten(self.structure, flat[:count]),
                jax.tree.unflatten(self.state_structure, flat[count : count + held]),
                jax.tree.unflatten(self.structure, params) if params else None,
            )

        jaxpr = jax.make_jaxpr(update)(*shapes).jaxpr
        owners: list[int | None] = [*range(count), *self.owners]
        inputs = [*owners, *range(len(leaves) - count - held)]
        read = _read_by_results(
            jaxpr, [frozenset() if owner is None else frozenset({owner}) for owner in inputs]
        )
        paths = [leaf.path for leaf in self.named]
        for found, owner, path in zip(read, owners, [*paths, *state_paths], strict=True):
            if others := sorted(found - {owner}):
                what = f"the update reads {paths[others[0]] or 'the parameter'} too, so it cannot "
                what += "run one layer at a time"
                fix = "run this part of the optimizer before: optax.chain("
                fix += "optax.clip_by_global_norm(1.0), sw.offloaded(optax.adam(1e-3), specs))"
                raise StrategyError(what, path=path, fix=fix)
        return [variable.aval.dtype for variable in jaxpr.outvars[:count]]


def _read_by_results(jaxpr: Any, inputs: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """Return, for each result of a jaxpr, the parameters whose arrays the result depends on."""
    read: dict[Any, frozenset[int]] = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(variable: Any) -> frozenset[int]:
        return frozenset() if isinstance(variable, Literal) else read.get(variable, frozenset())

    for equation in jaxpr.eqns:
        operands = list(map(of, equation.invars))
        results = [frozenset[int]().union(*operands)] * len(equation.outvars)
        # optax jits functions of whole trees, so look inside these. Loops and branches count as a
        # whole.
        inner = bodies(equation)
        if len(inner) == 1 and inner[0].runs is Runs.ONCE:
            results = _read_by_results(inner[0].jaxpr, inner[0].of_operands(operands))
        read.update(zip(equation.outvars, results, strict=True))
    return list(map(of, jaxpr.outvars))


def _unfit(path: str, leaf: Any, annotation: Any) -> Problem | None:
    """Return the problem of an array of the state that has no slice per layer, or None."""
    if isinstance(annotation, PartOf):
        if annotation.dims == tuple(range(len(annotation.shape))):
            return None
        what = f"state of shape {np.shape(leaf)} is not shaped like its parameter, of shape "
        what += f"{annotation.shape}"
        fix = "use an optimizer without factored moments or histories, such as optax.adam"
    else:
        # All layers share a scalar. Refuse a random key: every layer would draw the same noise.
        if np.shape(leaf) == () and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return None
        what = f"state of shape {np.shape(leaf)} and dtype {leaf.dtype} belongs to no parameter"
        fix = "run this part of the optimizer outside, in optax.chain"
    return Problem(error=StrategyError, what=what, path=path, fix=fix)


def _filled(structure: Any, leaves: Mapping[int, Any]) -> Any:
    """Return a tree with None in place of the leaves that are not given."""
    return jax.tree.unflatten(structure, [leaves.get(at) for at in range(structure.num_leaves)])


def _on_device(x: Any, sharding: NamedSharding) -> Any:
    return to_device(x, sharding) if in_host_memory(x) else x


def _back(old: Any, new: Any, sharding: NamedSharding) -> Any:
    """Move a new value to the memory of the old value."""
    return to_host(new, sharding) if in_host_memory(old) else new


def _without_layers(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec.partitions[1:]))
