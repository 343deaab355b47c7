"""Models of flax linen: read the logical names of variables, and resolve constraints by a strategy.

The model's source does not change. `names` maps each logical name of the model to an axis and a
role, as in `logical_rules`. flax is imported on the first call.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax

from shardwright.errors import Problem, RankMismatchError, StrategyError
from shardwright.interop import logical_rules
from shardwright.interop.logical_rules import (
    Names,
    annotate_boxes,
    checked,
    entry_of,
    library,
    names_of_metadata,
    to_logical_axis_rules,
)
from shardwright.trees.optimizer_state import annotations_by_path, changes_dims
from shardwright.vocabulary.axes import EMPTY

if TYPE_CHECKING:
    from shardwright.manager.manager import PartitionManager


def annotate(variables: Any, names: Names) -> Any:
    """Return a tree with the annotation of each array of `arrays(variables)`.

    Names come from the boxes that flax puts around arrays: those of `with_logical_partitioning` and
    `with_partitioning`, and those of nnx modules inside `nnx.bridge.to_linen`. `nn.scan` and
    `nn.vmap` add names to these boxes. As in flax, the last dims are replicated if a box has too
    few names. A dim whose name is None or UNCONSTRAINED is replicated, and so is a variable without
    a box. Factored moments in `opt_state`, such as those of `optax.adafactor`, get the axes of
    their parameters in `params`.

    Args:
      variables: What `model.init` returns, or a `TrainState`. Shapes from `jax.eval_shape` are
        enough.
      names: Name in the model -> (axis, role), or an axis for both roles.

    Raises:
      UnknownAxisError: Boxes have names that are not in `names`; all are reported at once.
      RankMismatchError: A box has more names than dims.
      StrategyError: `names` is not empty, but no variable has a box; or a box cannot be read.

    >>> import flax.linen as nn, jax, shardwright as sw
    >>> init = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))
    >>> model = nn.Dense(8, use_bias=False, kernel_init=init)
    >>> shapes = jax.eval_shape(model.init, jax.random.key(0), jax.numpy.ones((1, 4)))
    >>> names = {"embed": (sw.EMBED, "param"), "mlp": (sw.MLP_INTERMEDIATE, "param")}
    >>> annotate(shapes, names)
    {'params': {'kernel': ('__EMBED__', '__MLP_INTERMEDIATE__')}}
    """
    meta = library("flax.core.meta")

    def axes_of(leaf: Any, path: str, problems: list[Problem], shape: tuple[int, ...]) -> Any:
        own = _names_of(leaf, path, len(shape), problems) if is_box(leaf) else ()
        axes = [entry_of(name, names, path, problems) for name in own]
        return (*axes, *(EMPTY,) * (len(shape) - len(axes)))

    def is_box(leaf: Any) -> bool:
        return isinstance(leaf, meta.AxisMetadata)

    return annotate_boxes(
        variables,
        names,
        is_box=is_box,
        value_of=functools.partial(_unboxed, meta=meta),
        axes_of=axes_of,
        is_named=is_box,
        moments=_factored_moments(variables, names),
        fix="pass what model.init returns, without nn.unbox\n"
        "or let sw.infer_axes find the axes of a model without names",
    )


def place(variables: Any, pm: "PartitionManager", names: Names) -> Any:
    """Return variables without boxes, placed as parameters.

    If one device cannot hold all variables, create them sharded instead: call `jax.jit` with
    `out_shardings=pm.shardings(arrays(shapes), annotate(shapes, names))`.

    Args:
      variables: What `model.init` returns, or a `TrainState`.
      pm: The manager.
      names: Name in the model -> (axis, role), or an axis for both roles.

    Raises:
      UnknownAxisError: Boxes have names that are not in `names`; all are reported at once.
    """
    return logical_rules.place(arrays(variables), pm, annotate(variables, names))


def _factored_moments(variables: Any, names: Names) -> Mapping[str, Any]:
    """Return the annotations of `opt_state` by path; none if it has no factored moments.

    flax gives a factored moment the box of its parameter, which has more dims. So the boxes of
    factored moments cannot be used.
    """
    params, state = (
        variables.get(name) if isinstance(variables, Mapping) else getattr(variables, name, None)
        for name in ("params", "opt_state")
    )
    if params is None or state is None or not changes_dims(state):
        return {}
    found = annotations_by_path(arrays(state), arrays(params), annotate(params, names))
    return {f"opt_state/{path}": entry for path, entry in found.items()}


def arrays(tree: Any) -> Any:
    """Return a tree without boxes, and without the constraint that flax puts on unboxed arrays.

    Inside `rules`, `nn.unbox` constrains each value by the names of its box. But in the state of an
    optimizer, a moment may have fewer dims than its parameter and still have the box of the
    parameter, whose names do not fit the moment. So call `arrays` in the jitted function whose
    `out_shardings` place the state.

    Args:
      tree: What `model.init` returns, a `TrainState`, or any other tree.
    """
    meta = library("flax.core.meta")
    return jax.tree.map(
        functools.partial(_unboxed, meta=meta),
        tree,
        is_leaf=lambda leaf: isinstance(leaf, meta.AxisMetadata),
    )


def _names_of(box: Any, place: str, rank: int, problems: list[Problem]) -> tuple[Any, ...]:
    """Return the names of a box. A box that does not fit becomes a problem."""
    from flax.core.meta import Partitioned
    from flax.nnx.bridge.variables import NNXMeta

    is_nnx = isinstance(box, NNXMeta)
    if not is_nnx and not isinstance(box, Partitioned):
        what = f"the names in a box of {type(box).__name__} cannot be read"
        fix = "remove the box, and annotate the variable by its path"
        problems.append(Problem(error=StrategyError, what=what, path=place, fix=fix))
        return ()
    names = names_of_metadata(box.metadata) if is_nnx else tuple(box.names)
    # `nn.scan` adds no name to a box of nnx. So if there are fewer names than dims, nobody knows
    # which dims have these names.
    if len(names) > rank or (is_nnx and names and len(names) < rank):
        what = f"the box has {len(names)} names {names} for {rank} dims"
        fix = (
            "give the parameter one name per dim\n"
            "or pass a TrainState with params and opt_state, if the array is a factored moment"
        )
        problems.append(Problem(error=RankMismatchError, what=what, path=place, fix=fix))
        return ()
    return names


def _unboxed(leaf: Any, meta: Any) -> Any:
    """Remove all boxes around a value, without applying flax's constraint."""
    while isinstance(leaf, meta.AxisMetadata):
        # Only `Partitioned.unbox` has the option `apply_constraint`.
        is_named = isinstance(leaf, meta.Partitioned)
        leaf = leaf.unbox(apply_constraint=False) if is_named else leaf.unbox()
    return leaf


@contextlib.contextmanager
def rules(
    pm: "PartitionManager", names: Names, *, sizes: Mapping[str, int] | None = None
) -> Iterator[None]:
    """Enter a manager. `nn.with_logical_constraint` in a model then uses the manager's rules.

    The manager and the rules are part of jit's cache key, so a jitted function is traced again
    under another strategy or other names. flax's own rules are not part of that key.

    Under `jax.set_mesh` and without `rules`, flax cannot initialize or apply an `nn.DenseGeneral`
    whose kernel has more than two names, because flax constrains the flattened kernel. Inside
    `rules`, flax constrains the full kernel instead.

    Without `rules`, flax replicates a dim whose name has no rule, and an array whose size does not
    divide. To check each array, the first call of `rules` wraps the function of flax that places a
    constraint. The check is inactive outside `rules`.

    Args:
      pm: The manager.
      names: Name in the model -> (axis, role), or an axis for both roles.
      sizes: Name -> size of its dims, for rules that depend on the size.

    Raises:
      UnknownAxisError: A constraint has a name that is not in `names`.
      IndivisibleError: A size does not divide over the mesh axes of its name.
      RankMismatchError: A constraint has more names than the array has dims.
      StrategyError: The mesh has Explicit axes, which flax does not support. Or a dim has another
        size than `sizes` says, and its rule shards the two sizes over different mesh axes.
    """
    import flax.linen as nn

    # Import here: `dense_general` needs flax, but this file can be imported without flax.
    from shardwright.interop.flax.dense_general import kernels_unflattened

    exported = to_logical_axis_rules(pm, names, sizes=sizes)
    with (
        checked("flax", exported, pm, names, sizes),
        nn.logical_axis_rules(exported),
        kernels_unflattened(),
    ):
        yield
