"""Models of haliax: annotate by named axes, and convert between axis mappings and strategies.

The model's source does not change. `names` maps each axis name of the model to an axis, as in
`logical_rules`. `NAMES` has the axis names of the models in levanter.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardwright.errors import Problem, RankMismatchError, StrategyError, raise_problems
from shardwright.interop import logical_rules
from shardwright.interop.logical_rules import (
    Imported,
    Names,
    axis_of,
    by_name,
    check_names,
    check_used,
    checked,
    library,
    one_rule_each,
    plain_name,
    read_names,
)
from shardwright.trees.factored_weights import annotate_parts
from shardwright.trees.paths import path_text
from shardwright.vocabulary.axes import (
    BATCH,
    EMBED,
    EMPTY,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_LENGTH,
    LAYERS,
    LENGTH,
    MLP_INTERMEDIATE,
    VOCAB,
    Role,
)

if TYPE_CHECKING:
    from shardwright.manager.manager import PartitionManager

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "batch": BATCH,
        "position": LENGTH,
        "key_position": KV_LENGTH,
        "embed": EMBED,
        "heads": HEAD,
        "kv_head": KV_HEAD,
        # Not sharded: the heads of one group share a kv head, and `kv_head` is sharded.
        "q_heads_per_group": EMPTY,
        "head_size": HEAD_DIM,
        "head_dim": HEAD_DIM,
        "mlp": MLP_INTERMEDIATE,
        "vocab": VOCAB,
        "layers": LAYERS,
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mappings:
    """The two axis mappings of a program of haliax: axis name -> mesh axes.

    Attributes:
      compute: For activations: `axis_resources` in levanter.
      parameter: For parameters and optimizer state: `parameter_axis_resources` in levanter.
    """

    compute: Mapping[str, str | tuple[str, ...]]
    parameter: Mapping[str, str | tuple[str, ...]]


def annotate(model: Any, names: Names = NAMES) -> Any:
    """Return a tree with the annotation of each array of `arrays(model)`.

    The axes of an array are those of its `NamedArray`, or the `axis_names` in the metadata of its
    field. As in haliax, an array without names is replicated.

    Args:
      model: A model with `NamedArray`s, or its shapes from `equinox.filter_eval_shape`.
      names: Axis name in the model -> axis.

    Raises:
      UnknownAxisError: Arrays have names that are not in `names`; all are reported at once.
      RankMismatchError: The number of `axis_names` of a field is not the rank of its array.
      StrategyError: `names` is not empty, but no array of the model has axis names.

    >>> import haliax as hax, jax, shardwright as sw
    >>> axes = hax.make_axes(embed=4, mlp=8)
    >>> linear = hax.nn.Linear.init(*axes, key=jax.random.key(0), use_bias=False)
    >>> annotate(linear).weight.array
    ('__MLP_INTERMEDIATE__', '__EMBED__')
    """
    check_names(names)
    values = arrays(model)
    problems: list[Problem] = []
    leaves = [*_leaves(values, ())]
    axes = [entry for leaf in leaves for entry in _axes_of(leaf, names, problems)]
    raise_problems(by_name(problems))
    check_used(
        names,
        is_named=any(leaf.names is not None for leaf in leaves),
        arrays=values,
        fix="pass a model with NamedArrays\n"
        "or let interop.equinox.infer find the axes of a model without names",
    )
    # `_leaves` has the order of JAX's leaves, so the axes fit the structure of the arrays.
    return jax.tree.unflatten(jax.tree.structure(values), axes)


def arrays(model: Any) -> Any:
    """Return a model with None for each leaf that is neither an array nor a ShapeDtypeStruct."""
    import equinox

    kinds = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    return equinox.filter(model, lambda leaf: isinstance(leaf, kinds))


def place(model: Any, pm: "PartitionManager", names: Names = NAMES) -> Any:
    """Return a model with its arrays placed as parameters.

    Leaves that are not arrays are not changed.

    Args:
      model: A tree with `NamedArray`s.
      pm: The manager.
      names: Axis name in the model -> axis.

    Raises:
      UnknownAxisError: Arrays have names that are not in `names`; all are reported at once.
    """
    import equinox

    return equinox.combine(logical_rules.place(arrays(model), pm, annotate(model, names)), model)


def sizes_of(model: Any) -> dict[str, int]:
    """Return the size of each axis name in a model, for rules that depend on the size.

    Raises:
      StrategyError: Axes of one name have different sizes.
    """
    sizes: dict[str, int] = {}
    for leaf in _leaves(model, ()):
        for name, size in zip(leaf.names or (), np.shape(leaf.value), strict=False):
            if sizes.setdefault(name, size) != size:
                what = f"the axis {name!r} has the sizes {sizes[name]} and {size}"
                raise StrategyError(what, path=leaf.path, fix="write the sizes by hand")
    return sizes


def mappings(
    pm: "PartitionManager", names: Names = NAMES, *, sizes: Mapping[str, int] | None = None
) -> Mappings:
    """Return the rules of a manager as axis mappings.

    A mapping has one entry per name, the first candidate of the name's rule that fits, and no
    fallbacks. So if two dims of an array have one mesh axis in common, haliax raises an error.

    Args:
      pm: The manager.
      names: Axis name in the model -> axis, or (axis, role) if only the mapping of this role gets
        the name.
      sizes: Axis name -> size, for rules that depend on the size; `sizes_of(model)` has them.

    Raises:
      ShapeRequiredError: A rule depends on a size that is not given.
    """
    compute, parameter = (
        _mapping(pm, names, role, sizes) for role in (Role.ACTIVATION, Role.PARAM)
    )
    return Mappings(compute=compute, parameter=parameter)


@contextlib.contextmanager
def rules(
    pm: "PartitionManager", names: Names = NAMES, *, sizes: Mapping[str, int] | None = None
) -> Iterator[None]:
    """Enter a manager. `hax.shard` and `hax.auto_sharded` in a model then use the manager's rules.

    The manager and the mapping are part of jit's cache key, so a jitted function is traced again
    under another strategy or other names. haliax's own mapping is not part of that key.

    Without `rules`, haliax replicates a dim whose name has no rule, even if the name is misspelled.
    To check each array, the first call of `rules` wraps the function of haliax that returns the
    spec of an array. The check is inactive outside `rules`, and for a mapping that the model itself
    enters.

    Args:
      pm: The manager.
      names: Axis name in the model -> axis.
      sizes: Axis name -> size, for rules that depend on the size; `sizes_of(model)` has them.

    Raises:
      ShapeRequiredError: A rule depends on a size that is not given.
      UnknownAxisError: An array has a name that is not in `names`.
      IndivisibleError: A size does not divide over the mesh axes of its name.
      StrategyError: The mesh has Explicit axes, which haliax does not support. Or a dim has another
        size than `sizes` says, and its rule shards the two sizes over different mesh axes.
    """
    compute = mappings(pm, names, sizes=sizes).compute
    with (
        checked("haliax", compute.items(), pm, names, sizes),
        library("haliax.partitioning").axis_mapping(compute),
    ):
        yield


def to_strategy(
    compute: Mapping[str, Any],
    parameter: Mapping[str, Any] | None = None,
    *,
    mesh: Any,
    names: Mapping[str, str] | None = None,
    replicated: Sequence[str] = (),
    source: Callable[[Role, str], str] | None = None,
    own_axes: Iterable[str] = (),
) -> Imported:
    """Turn axis mappings into a strategy with the same specs.

    haliax replicates a dim whose name is in no mapping, even if the name is misspelled. A strategy
    raises an error for such a name, unless the name is in `replicated`.

    Args:
      compute: Axis name -> mesh axes, for activations.
      parameter: Axis name -> mesh axes, for parameters. Defaults to `compute`.
      mesh: A `Mesh`, an `AbstractMesh`, or a mapping of mesh axis to size.
      names: Axis name -> axis. A name that is not in `names` becomes a new axis: `embed` becomes
        `logical_embed`.
      replicated: Axis names that no mapping has.
      source: Function of a role and a name. It returns the place of the rule, which `explain`
        shows. The default gives places such as `compute['mlp']`.
      own_axes: Axes of your own that `names` maps to. The strategy declares them.

    Returns:
      The strategy, and the axis of each name.

    Raises:
      StrategyError: A mapping cannot be read, or two names that are mapped to one axis have
        different mesh axes.
      UnknownAxisError: `names` maps to axes that are neither in the vocabulary nor in `own_axes`;
        all are reported at once.
      MissingMeshAxisError: A mapping names mesh axes that the mesh lacks; all are reported at once.

    >>> imported = to_strategy({"batch": "data"}, {"embed": "data"}, mesh={"data": 8})
    >>> dict(imported.strategy.params)
    {'logical_batch': '-', 'logical_embed': 'data'}
    """
    tables = {Role.ACTIVATION: compute, Role.PARAM: compute if parameter is None else parameter}
    for role, table in tables.items():
        if not isinstance(table, Mapping):
            what = f"the mapping of {role}s is {type(table).__name__}, not a mapping"
            raise StrategyError(what, fix='write {"embed": "data"}')
    every = dict.fromkeys(name for table in tables.values() for name in table)
    # A dict and not a set, so that every process builds the same strategy.
    every |= dict.fromkeys(replicated)
    own_axes = tuple(own_axes)
    given = read_names(names, own_axes, are_imported=True)
    if roles := [name for name, target in given.items() if not isinstance(target, str)]:
        what = f"haliax uses a name in both roles, so {roles[0]!r} cannot have only one role"
        raise StrategyError(what, fix=f"write {roles[0]!r}: sw.EMBED")
    axes = {name: given.get(name, f"logical_{plain_name(name)}") for name in every}
    pairs, targets, places = [], {}, []
    for role, table in tables.items():
        for name in every:
            # The mapping of parameters comes second. Its names must differ from those of the first
            # mapping.
            entry = name if role is Role.ACTIVATION else f"{name} as param"
            # If a mapping lacks the name, the name is replicated in the role of that mapping.
            pairs.append((entry, table.get(name)))
            targets[entry] = (axes[name], role)
            table_name = "compute" if role is Role.ACTIVATION else "parameter"
            places.append(source(role, name) if source else f"{table_name}[{name!r}]")
    imported = logical_rules.to_strategy(
        pairs,
        mesh=mesh,
        names=targets,
        # As in JAX, it is an error if two dims of an array have the same mesh axis.
        semantics="strict",
        source=places,
        own_axes=[*own_axes, *axes.values()],
    )
    own = [name for name in every if name not in given]
    notes = [*imported.notes]
    if own and given:
        notes.append(f"names that became axes of their own: {', '.join(own)}")
    by_name = {name: imported.names[name][0] for name in every}
    return dataclasses.replace(imported, names=by_name, notes=tuple(notes))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _NamedLeaf:
    """An array of a model, or the tree in a `NamedArray`. If it has no names, `names` is None."""

    path: str
    value: Any
    names: tuple[str, ...] | None


def _leaves(node: Any, path: tuple[Any, ...]) -> Iterator[_NamedLeaf]:
    """Yield the arrays below a node, in the order in which JAX flattens them."""
    import equinox

    named = library("haliax").NamedArray

    # Only a module knows the metadata of its fields, so the walk goes module by module.
    def stops(child: Any) -> bool:
        return child is not node and isinstance(child, (named, equinox.Module))

    is_module = isinstance(node, equinox.Module)
    fields = {field.name: field for field in dataclasses.fields(node)} if is_module else {}
    # In the state of an optimizer, the array of a `NamedArray` may be a tree.
    if isinstance(node, named):
        names = tuple(axis.name for axis in node.axes)
        yield _NamedLeaf(path=path_text(path), value=node.array, names=names)
        return
    for keys, child in jax.tree_util.tree_flatten_with_path(node, is_leaf=stops)[0]:
        if stops(child):
            yield from _leaves(child, (*path, *keys))
            continue
        field = fields.get(getattr(keys[0], "name", "")) if keys else None
        own = None if field is None else field.metadata.get("axis_names")
        # `axis_names` of a field may have `Axis` values or names.
        text = None if own is None else tuple(getattr(name, "name", name) for name in own)
        yield _NamedLeaf(path=path_text((*path, *keys)), value=child, names=text)


def _axes_of(leaf: _NamedLeaf, names: Names, problems: list[Problem]) -> list[Any]:
    def axes_of(shape: tuple[int, ...]) -> tuple[str, ...]:
        if leaf.names is None:
            return (EMPTY,) * len(shape)
        if len(leaf.names) != len(shape):
            what = f"axis_names has {len(leaf.names)} names, and the array has {len(shape)} dims"
            fix = "write one name per dim in the field"
            problems.append(Problem(error=RankMismatchError, what=what, path=leaf.path, fix=fix))
            return (EMPTY,) * len(shape)
        return tuple(axis_of(name, names, leaf.path, problems) for name in leaf.names)

    return annotate_parts(leaf.value, axes_of, leaf.path, problems)


def _mapping(
    pm: "PartitionManager", names: Names, role: Role, sizes: Mapping[str, int] | None
) -> dict[str, str | tuple[str, ...]]:
    """Return the mapping of one role. It has no entry for a name that is replicated."""
    check_names(names)
    targets: dict[str, tuple[str, Role]] = {}
    for name, target in names.items():
        axis, own = (target, role) if isinstance(target, str) else target
        # haliax replicates a name without an entry, as EMPTY requires.
        if own == role and axis != EMPTY:
            targets[name] = (axis, role)
    rules = one_rule_each(pm, targets, sizes=sizes)
    return {name: axes for name, axes in rules.items() if axes}
