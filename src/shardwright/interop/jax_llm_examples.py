"""Models of jax-llm-examples: arrays described by `ArrayInfo`, and a dataclass of sharding rules.

The model's source does not change. jax-llm-examples need not be installed, because an `ArrayInfo`
and a `ShardingRules` are read by the names of their fields.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax

from shardwright.errors import (
    Problem,
    RankMismatchError,
    StrategyError,
    UnknownAxisError,
    raise_problems,
)
from shardwright.interop import logical_rules
from shardwright.interop.logical_rules import (
    Imported,
    Names,
    axis_of,
    by_name,
    check_names,
    one_rule_each,
    read_names,
)
from shardwright.trees.paths import path_text
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.axes import (
    BATCH,
    EMBED,
    EMPTY,
    EXPERT,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    LENGTH,
    MLP_INTERMEDIATE,
    VOCAB,
    Role,
)

if TYPE_CHECKING:
    from shardwright.manager.manager import PartitionManager

_WEIGHTS_OF_EMBED = (
    *("qkv_embed", "o_embed", "embed_up", "embed_down", "mlp_up_embed", "mlp_down_embed"),
    *("moe_e_up_embed", "moe_e_down_embed", "moe_s_up_embed", "moe_s_down_embed"),
    # The embed dim of the embedding table and of the output projection.
    "vocab_in",
)
_HIDDEN = (
    *("ffw_up", "ffw_down", "mlp_up_ffw", "mlp_down_ffw"),
    *("moe_e_up_ffw", "moe_e_down_ffw", "moe_s_up_ffw", "moe_s_down_ffw"),
)

# The axis and role of each name. Latent dims and the dims of Mamba have no axis.
NAMES: Names = MappingProxyType(
    {
        "batch": (BATCH, Role.ACTIVATION),
        "sequence": (LENGTH, Role.ACTIVATION),
        "act_embed": (EMBED, Role.ACTIVATION),
        "act_heads": (HEAD, Role.ACTIVATION),
        "head_dim": HEAD_DIM,
        "q_heads": (HEAD, Role.PARAM),
        "qkv_heads": (HEAD, Role.PARAM),
        "o_heads": (HEAD, Role.PARAM),
        "kv_heads": (KV_HEAD, Role.PARAM),
        "vocab_out": (VOCAB, Role.PARAM),
        "moe_e_experts": (EXPERT, Role.PARAM),
        **dict.fromkeys(_WEIGHTS_OF_EMBED, (EMBED, Role.PARAM)),
        **dict.fromkeys(_HIDDEN, (MLP_INTERMEDIATE, Role.PARAM)),
    }
)


def to_strategy(
    rules: Any, *, mesh: Any, names: Names | None = None, own_axes: Iterable[str] = ()
) -> Imported:
    """Turn sharding rules into a strategy that gives the same specs.

    Args:
      rules: A `ShardingRules`, or the class itself for its defaults.
      mesh: A `Mesh`, an `AbstractMesh`, or a mapping of mesh axis to size.
      names: Name of a field -> (axis, role), or an axis for both roles. A name that is not in
        `names` becomes a new axis: `qkv_embed` becomes `logical_qkv_embed`.
      own_axes: Axes of your own that `names` maps to. The strategy declares them.

    Raises:
      UnknownAxisError: `names` maps to axes that are neither in the vocabulary nor in `own_axes`;
        all are reported at once.
      StrategyError: `rules` is not a dataclass, or two names that are mapped to one axis and role
        have different mesh axes.
      MissingMeshAxisError: Rules name mesh axes that the mesh lacks; all are reported at once.
    """
    pairs = [(field.name, _value(rules, field)) for field in _fields(rules)]
    # If the class itself is given, the defaults of its fields are the rules.
    kind = rules if isinstance(rules, type) else type(rules)
    places = [f"{kind.__name__}.{name}" for name, _ in pairs]
    ruled = {name for name, _ in pairs}
    own_axes = tuple(own_axes)
    given = read_names(names, own_axes, are_imported=True)
    # Keep only the names that this model has: `NAMES` has the fields of all models.
    known = {name: target for name, target in given.items() if name in ruled}
    return logical_rules.to_strategy(
        pairs, mesh=mesh, names=known, semantics="strict", source=places, own_axes=own_axes
    )


def rules(
    pm: "PartitionManager",
    rules: type[Any],
    names: Names = NAMES,
    *,
    sizes: Mapping[str, int] | None = None,
) -> Any:
    """Return the sharding rules of a model, with the mesh axes that a manager gives each name.

    The model's own constraints then follow the strategy. A field of `ShardingRules` has the mesh
    axes of the first candidate of its rule that fits. A field has no fallback: a strategy would try
    the later candidates after a conflict, but the model does not.

    Args:
      pm: The manager.
      rules: The class `ShardingRules` of the model, or an instance of it.
      names: Name of a field -> (axis, role), or an axis that has one rule for both roles. Every
        field of the class must be in `names`.
      sizes: Name of a field -> size of the dims with this name, for rules that depend on the size.

    Raises:
      UnknownAxisError: The class has fields that are not in `names`. All are reported at once.
      ShapeRequiredError: A rule depends on a size that is not given.
    """
    check_names(names)
    if not isinstance(rules, type):
        rules = type(rules)
    problems: list[Problem] = []
    for field in _fields(rules):
        axis_of(field.name, names, rules.__name__, problems)
    raise_problems(by_name(problems))
    own = {field.name: names[field.name] for field in _fields(rules)}
    return rules(**one_rule_each(pm, own, sizes=sizes))


def annotate(tree: Any, names: Names = NAMES) -> Any:
    """Return a tree of `ArraySpec`s: shape, dtype, axes and initializer of each `ArrayInfo`.

    `pm.shardings`, `pm.abstract` and `pm.init` accept the result unchanged. As in JAX, the last
    dims are replicated if an array has too few names. If an array has one name twice, both dims are
    replicated, because JAX would refuse any other rule for that name.

    Args:
      tree: The result of a model's `abstract(cfg)`.
      names: Name -> (axis, role), or an axis. A dim with None in `logical_axes` is replicated.

    Raises:
      UnknownAxisError: Arrays have names that are not in `names`; all are reported at once.
      RankMismatchError: An array has more names than dims.
      StrategyError: A leaf is not an `ArrayInfo`.
    """
    check_names(names)
    problems: list[Problem] = []
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_info)
    specs = [_spec(path_text(path), leaf, names, problems) for path, leaf in leaves]
    raise_problems(by_name(problems))
    return jax.tree.unflatten(structure, specs)


def _spec(path: str, leaf: Any, names: Names, problems: list[Problem]) -> ArraySpec | None:
    if not _is_info(leaf):
        what = f"{type(leaf).__name__} is not an ArrayInfo"
        fix = "pass what `abstract(cfg)` returns"
        problems.append(Problem(error=StrategyError, what=what, path=path, fix=fix))
        return None
    before, own = len(problems), tuple(leaf.logical_axes)
    if len(own) > len(leaf.shape):
        what = f"{len(own)} names {own} for {len(leaf.shape)} dims"
        fix = "write one name per dim, or fewer"
        problems.append(Problem(error=RankMismatchError, what=what, path=path, fix=fix))
    axes = [axis_of(name, names, path, problems) for name in own]
    if len(problems) > before:
        return None
    axes = [EMPTY if own.count(name) > 1 else axis for name, axis in zip(own, axes, strict=True)]
    axes += [EMPTY] * (len(leaf.shape) - len(axes))
    return ArraySpec(leaf.shape, leaf.dtype, tuple(axes), leaf.initializer)


def _is_info(leaf: Any) -> bool:
    """Tell whether a leaf is an `ArrayInfo` of any model. Each model has a class of its own."""
    return type(leaf).__name__ == "ArrayInfo"


def _fields(rules: Any) -> tuple[Any, ...]:
    if not dataclasses.is_dataclass(rules):
        what = f"{type(rules).__name__} is not a dataclass of sharding rules"
        raise StrategyError(what, fix="pass ShardingRules of the model, or an instance of it")
    return dataclasses.fields(rules)


def _value(rules: Any, field: Any) -> Any:
    if not isinstance(rules, type):
        return getattr(rules, field.name)
    if field.default is dataclasses.MISSING:
        raise UnknownAxisError(
            f"the field {field.name!r} of {rules.__name__} has no default",
            fix=f"pass an instance: {rules.__name__}({field.name}=...)",
        )
    return field.default
