"""flax nnx: create models sharded, or read the logical names of their variables.

The model's source does not change. `names` maps each logical name of the model to an axis and a
role, as in `logical_rules`. flax is imported on the first call. `nnx.layers` has the blocks of
`shardwright.layers` as modules. `nnx.layers` imports flax, so it is not imported with this package:
import it explicitly.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax

from shardwright._jax import duplicate_spec_errors
from shardwright.errors import Problem, RankMismatchError, StrategyError
from shardwright.interop import logical_rules
from shardwright.interop.logical_rules import (
    Names,
    annotate_boxes,
    checked,
    entry_of,
    library,
    names_of_metadata,
    one_rule_each,
)
from shardwright.trees.optimizer_state import annotations_by_path, changes_dims
from shardwright.vocabulary.axes import EMPTY

if TYPE_CHECKING:
    from shardwright.manager.manager import PartitionManager

_CREATE = "place(optimizer, pm, names, params=model)"


@contextlib.contextmanager
def bound(
    pm: "PartitionManager", names: Names, *, sizes: Mapping[str, int] | None = None
) -> Iterator[None]:
    """Enter a manager, and let nnx create variables in the sharding of its strategy.

    nnx shards a variable when it is created, eagerly or in jit, and maps names by one table without
    fallbacks. Inside `bound`, this table gives each name the first candidate of its rule that fits
    the size. If two dims of a variable then have one mesh axis in common, JAX raises an error. A
    note on this error lists the mesh axes of each name. The manager and the rules are part of JAX's
    cache keys.

    Without `bound`, nnx silently replicates a dim that does not divide, in jit and `nnx.vmap`. To
    check every variable, the first call of `bound` wraps the function of flax that shards
    variables. The check is inactive outside `bound`.

    Args:
      pm: The manager.
      names: Name in the model -> (axis, role), or an axis for both roles.
      sizes: Name -> size of its dims, for rules that depend on the size.

    Raises:
      ShapeRequiredError: A rule depends on a size that is not given.
      IndivisibleError: A dim of a variable does not divide over the mesh axes of its name.
      UnknownAxisError: A variable has a name that is neither in `names` nor a mesh axis.
      StrategyError: The mesh has both Auto and Explicit axes, which nnx does not support. Or a dim
        has another size than `sizes` says, and its rule shards the two sizes over different mesh
        axes.
    """
    spmd, nnx = library("flax.core.spmd"), library("flax.nnx")
    table = one_rule_each(pm, names, sizes=sizes)
    if len({*pm.mesh.axis_types}) > 1:
        what = "nnx needs mesh axes of one type, but the mesh has several types"
        raise StrategyError(what, fix='use axis_types = "auto" or "explicit"')
    try:
        with (
            checked("nnx", table.items(), pm, names, sizes),
            spmd.logical_axis_rules((*table.items(),)),
            # Without eager sharding, nnx does not read the rules.
            nnx.use_eager_sharding(True),
        ):
            yield
    except duplicate_spec_errors() as error:
        texts = ", ".join(f"{name} = {axes}" for name, axes in table.items() if axes)
        # JAX shows the spec with the repeated mesh axis, but not the names that caused it.
        error.add_note(
            f"nnx has one rule for each name, and no fallbacks: {texts}. Map one of the names of "
            "this variable to sw.EMPTY, or change the strategy."
        )
        raise


def annotate(model: Any, names: Names, *, params: Any = None) -> Any:
    """Return a tree with the annotation of each array of `arrays(model)`.

    Names come from `nnx.with_partitioning` and from the metadata of variables. `nnx.vmap` and
    `nnx.scan` add one name to a variable if their caller gives one. A variable without names is
    replicated. The modules of `layers` have axes instead of names.

    Args:
      model: A module, an optimizer or their `nnx.State`; or the result of `nnx.eval_shape` for one
        of these.
      names: Name in the model -> (axis, role), or an axis for both roles.
      params: The model that an optimizer updates. An optimizer with factored moments, such as
        `optax.adafactor`, needs it, because each moment has only some dims of its parameter.

    Raises:
      UnknownAxisError: Variables have names that are not in `names`; all are reported at once.
      RankMismatchError: Variables have another number of names than dims.
      StrategyError: `names` is not empty, but no variable has names. Or the model is an optimizer
        with factored moments, and `params` is not given.

    >>> import shardwright as sw
    >>> from flax import nnx
    >>> init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))
    >>> with nnx.use_eager_sharding(False):
    ...     model = nnx.Linear(4, 8, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0))
    >>> names = {"embed": (sw.EMBED, "param"), "mlp": (sw.MLP_INTERMEDIATE, "param")}
    >>> annotate(model, names)["kernel"]
    ('__EMBED__', '__MLP_INTERMEDIATE__')
    """

    def axes_of(leaf: Any, path: str, problems: list[Problem], shape: tuple[int, ...]) -> Any:
        metadata = leaf.get_metadata() if _is_variable(leaf) else {}
        if "axes" in metadata:
            # A parameter of `layers`, or optimizer state with the metadata of such a parameter. If
            # that state is a scalar, such as a count, it has no axes.
            return metadata["axes"] if shape else ()
        own = names_of_metadata(metadata)
        if own and len(own) != len(shape):
            fix = "give the variable one name per dim, None for a dim that is not sharded\nor "
            if len(own) < len(shape):
                fix += "pass a name to nnx.vmap or nnx.scan: "
                fix += 'transform_metadata={nnx.PARTITION_NAME: "layers"}'
            else:
                fix += f"if it is a factored moment of an optimizer: {_CREATE}"
            what = f"the variable has the names {own} for {len(shape)} dims"
            problems.append(Problem(error=RankMismatchError, what=what, path=path, fix=fix))
            own = ()
        axes = tuple(entry_of(name, names, path, problems) for name in own)
        return axes or (EMPTY,) * len(shape)

    def is_named(leaf: Any) -> bool:
        metadata = leaf.get_metadata() if _is_variable(leaf) else {}
        return "axes" in metadata or bool(names_of_metadata(metadata))

    return annotate_boxes(
        _state(model),
        names,
        is_box=_is_variable,
        value_of=_value,
        axes_of=axes_of,
        is_named=is_named,
        moments=_factored_moments(model, names, params),
        fix="annotate the model with nnx.with_partitioning\n"
        "or let sw.infer_axes find the axes of a model without names",
    )


def arrays(model: Any) -> Any:
    """Return the state of a model without metadata, as `nnx.update` takes it.

    Args:
      model: A module, an optimizer or their `nnx.State`; or the result of `nnx.eval_shape` for one
        of these.
    """
    return jax.tree.map(_value, _state(model), is_leaf=_is_variable)


def _state(model: Any) -> Any:
    nnx = library("flax.nnx")
    return model if isinstance(model, nnx.State) else nnx.state(model)


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, library("flax.nnx").Variable)


def _value(leaf: Any) -> Any:
    return leaf.get_value() if _is_variable(leaf) else leaf


def _factored_moments(model: Any, names: Names, params: Any) -> Mapping[str, Any]:
    """Return the annotations of an optimizer's state by path; none without factored moments.

    nnx gives a factored moment the names of its parameter, which has more dims. So the names of
    factored moments cannot be used.
    """
    state = (
        None if isinstance(model, library("flax.nnx").State) else getattr(model, "opt_state", None)
    )
    if state is None or not changes_dims(state):
        return {}
    if params is None:
        what = "the optimizer has factored moments: each has only some dims of its parameter"
        raise StrategyError(what, fix=f"pass the model too: {_CREATE}")
    nnx = library("flax.nnx")
    # `wrt` selects the variables that an `nnx.Optimizer` updates. The moments of the optimizer
    # belong to these variables.
    own = nnx.state(params, getattr(model, "wrt", nnx.Param))
    values = jax.tree.map(_value, state, is_leaf=_is_variable)
    found = annotations_by_path(values, arrays(own), annotate(own, names))
    return {f"opt_state/{path}": entry for path, entry in found.items()}


def place(model: Any, pm: "PartitionManager", names: Names, *, params: Any = None) -> Any:
    """Place the arrays of an existing model or optimizer as parameters.

    Args:
      model: A module or an optimizer. Its variables are updated.
      pm: The manager.
      names: Name in the model -> (axis, role), or an axis for both roles.
      params: The model that an optimizer updates, if it has factored moments.

    Returns:
      The same model.

    Raises:
      UnknownAxisError: Variables have names that are not in `names`; all are reported at once.
    """
    placed = logical_rules.place(arrays(model), pm, annotate(model, names, params=params))
    library("flax.nnx").update(model, placed)
    return model
