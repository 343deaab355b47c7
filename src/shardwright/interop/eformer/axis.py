"""`PartitionAxis` as eformer has it: rules as attributes that can be read back, and axes registered for the whole process."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardwright.errors import StrategyError, UnknownAxisError, did_you_mean
from shardwright.interop.eformer import registry
from shardwright.interop.eformer.meshes import current_mesh
from shardwright.resolution import partition_axis, resolver
from shardwright.resolution.decisions import RuleRef
from shardwright.resolution.partition_axis import (
    ATTRIBUTES,
    DECODE_ATTRIBUTES,
    MESH_ATTRIBUTES,
    SEMANTIC_ATTRIBUTES,
    Attributes,
    default_of,
    flat_names,
)
from shardwright.resolution.rules import AxisRules, Policy, Rule, parse_rule
from shardwright.vocabulary.annotations import as_annotation
from shardwright.vocabulary.axes import (
    EMPTY,
    EMPTY_VAL,
    KNOWN_AXES,
    NOT_GIVEN,
    REPLICATED,
    STANDARD_MESH_AXES,
    axis_label,
    canonical_axis,
)
from shardwright.vocabulary.modes import GENERATION_MODES, MODES, parse_mode


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PartitionAxis(Attributes):
    """Rules as attributes, each readable as the mesh axes that it stands for.

    A value is a mesh axis, a tuple of them (one dim over several), a parallelism axis such as `TP`, a rule such as
    `"tp | -"`, or None: replicated, also for `decode_*`. `NOT_GIVEN` is the default; for a `decode_*` attribute the value of
    its base. The `decode_*` attributes serve insert too.

    >>> PartitionAxis(tensor_parallel_axis="model").head_axis
    'model'

    Raises:
      StrategyError: a value that is no rule; all of them at once.
    """

    _cache: dict[Any, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    _SEMANTIC_MAP: ClassVar[Mapping[str, str | None]] = MappingProxyType(
        {**SEMANTIC_ATTRIBUTES, EMPTY: None, **MESH_ATTRIBUTES}
    )
    _STANDARD_TO_GENERATION_ATTR_MAP: ClassVar[Mapping[str, str]] = MappingProxyType(
        {name: f"decode_{name}" for name in DECODE_ATTRIBUTES}
    )

    def __post_init__(self) -> None:
        for name in ATTRIBUTES:
            object.__setattr__(self, name, self._clean(getattr(self, name)))
        for name in ATTRIBUTES:
            if isinstance(getattr(self, name), EMPTY_VAL):
                object.__setattr__(self, name, self._default(name))
        self.compile(registered=())

    def _default(self, name: str) -> Any:
        base = name.removeprefix("decode_")
        if name != base:
            return getattr(self, base)
        default = default_of(self, name)
        return None if isinstance(default, EMPTY_VAL) else default

    def __hash__(self) -> int:
        # Of text: hash() of a str differs from process to process, and this one may be compared between hosts.
        text = repr([getattr(self, name) for name in ATTRIBUTES])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")

    def __reduce__(self) -> tuple[Any, ...]:
        return PartitionAxis, tuple(getattr(self, name) for name in ATTRIBUTES)

    def _clean(self, value: Any) -> Any:
        """Return a value with lists as tuples, parallelism axes as mesh axes, and every spelling of replicated as None."""
        if isinstance(value, (list, tuple)):
            return flat_names(tuple(self._clean(one) for one in value)) if value else value
        if not isinstance(value, str):
            return value
        if value in (EMPTY, REPLICATED):
            return None
        return getattr(self, MESH_ATTRIBUTES[value]) if value in MESH_ATTRIBUTES else value

    def replace(self, **changes: Any) -> PartitionAxis:
        """Return this with some attributes changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain data, such that `from_dict(to_dict(p)) == p`, through JSON too."""
        return {
            name: list(value) if isinstance(value := getattr(self, name), tuple) else value
            for name in ATTRIBUTES
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PartitionAxis:
        """Return what `to_dict` was called on.

        Raises:
          StrategyError: a key that is no attribute.
        """
        for name in data:
            if name not in ATTRIBUTES:
                raise StrategyError(
                    f"{name!r} is no attribute of PartitionAxis",
                    fix=did_you_mean(name, ATTRIBUTES) or "drop it",
                )
        return cls(**data)

    # Axes for the whole process.

    @classmethod
    def register(
        cls,
        semantic_axis: str,
        axis_rule: Any,
        *,
        generation_axis_rule: Any = NOT_GIVEN,
        override: bool = False,
    ) -> None:
        """Register an axis for every manager that is built from now on. A strategy's `[axes]` is the stricter way.

        Args:
          semantic_axis: its name.
          axis_rule: an attribute (`"head_axis"`) or an axis (`HEAD`): an alias of it, in every mode; a mesh axis; a tuple of
            those; or None: replicated.
          generation_axis_rule: likewise for decode and insert; absent: follows from `axis_rule`.
          override: replace the rule of an axis that exists.

        Raises:
          StrategyError: the name is empty or exists.
        """
        name = _name(semantic_axis)
        rules = [
            tuple(rule) if isinstance(rule, list) else rule
            for rule in (axis_rule, generation_axis_rule)
        ]
        axis = registry.RegisteredAxis(name=name, axis_rule=rules[0], generation_axis_rule=rules[1])
        registry.add(axis, taken=canonical_axis(name) in cls._SEMANTIC_MAP, override=override)

    @classmethod
    def unregister(cls, semantic_axis: str, *, missing_ok: bool = True) -> None:
        """Take a registered axis back.

        Raises:
          NotRegisteredError: it is not registered, and `missing_ok` is False.
        """
        registry.remove(_name(semantic_axis), missing_ok=missing_ok)

    @classmethod
    def clear_registered_axes(cls) -> None:
        """Take all registered axes back."""
        registry.clear()

    @classmethod
    def get_registered_axes(cls) -> dict[str, dict[str, Any]]:
        """Return what is registered now: `axis_rule` and `generation_axis_rule` by name.

        An alias of an attribute with a `decode_*` counterpart has that one for generation; otherwise what was not given is
        `NOT_GIVEN`.
        """
        decode = cls._STANDARD_TO_GENERATION_ATTR_MAP

        def generation(axis: registry.RegisteredAxis) -> Any:
            own, rule = axis.generation_axis_rule, axis.axis_rule
            return (
                decode.get(rule, own)
                if isinstance(own, EMPTY_VAL) and isinstance(rule, str)
                else own
            )

        return {
            axis.name: {"axis_rule": axis.axis_rule, "generation_axis_rule": generation(axis)}
            for axis in registry.registered_axes()
        }

    # Rules.

    def compile(
        self, *, policy: Policy | None = None, registered: registry.Registered | None = None
    ) -> AxisRules:
        """Return the frozen rules, with the axes that are registered now unless a snapshot of them is given.

        Raises:
          StrategyError: a value that is no rule, or registered aliases in a circle.
        """
        axes = registry.registered_axes() if registered is None else registered
        made: AxisRules | None = self._cache.get((policy, axes))
        if made is None:
            values = {name: getattr(self, name) for name in ATTRIBUTES}
            made = _with_registered(
                self, partition_axis.PartitionAxis(**values).compile(policy=policy), axes
            )
            self._cache[policy, axes] = made
        return made

    def spelled(self, axes: Sequence[Any], rules: AxisRules) -> tuple[Any, ...]:
        """Return a list of dims as an annotation: None as `EMPTY`, lists as tuples, mesh axes as parallelism axes.

        Raises:
          UnknownAxisError: a name that is neither; members of composites too.
        """
        named = {
            value: axis
            for axis, name in MESH_ATTRIBUTES.items()
            if isinstance(value := getattr(self, name), str)
        }

        def one(axis: Any) -> Any:
            found = (
                EMPTY if axis is None else named.get(axis, axis) if isinstance(axis, str) else axis
            )
            if (
                isinstance(found, str)
                and found != EMPTY
                and canonical_axis(found) not in rules.known_axes
            ):
                known = sorted({*map(axis_label, rules.known_axes)})
                raise UnknownAxisError(
                    f"Unknown semantic axis name: {found!r}",
                    axis=axis_label(found),
                    fix=f"{did_you_mean(axis_label(found), known)} an axis of your own is registered by PartitionAxis.register".strip(),
                )
            return found

        return tuple(
            tuple(map(one, dim)) if isinstance(dim, (list, tuple)) else one(dim) for dim in axes
        )

    def resolve_axis(self, axes: Sequence[Any], mode: str) -> list[Any]:
        """Return the mesh axes that each entry stands for, whatever mesh there is: None, a name, a tuple, or a list of a list.

        Raises:
          UnknownAxisError, StrategyError: an unknown axis or mode.
        """
        rules = self.compile()
        return [
            list(_names(entry)) if isinstance(axis, list) else entry
            for axis, entry in zip(
                axes, written(self.spelled(axes, rules), rules, mode), strict=True
            )
        ]

    def resolve_spec(self, axes: Sequence[Any], mode: str) -> PartitionSpec:
        """Return the spec that the rules write, one entry per axis, sizes and divisibility unseen.

        A mesh axis that two entries want stands in the first alone if the mesh at hand has it with size 1; without a mesh it
        stands in both, and a constraint is where that is judged.

        Raises:
          AxisConflictError: the mesh at hand has it with another size.
          UnknownAxisError, StrategyError: an unknown axis or mode.
        """
        rules = self.compile()
        return written_spec(self.spelled(axes, rules), rules, mode, current_mesh())


def written(annotation: Sequence[Any], rules: AxisRules, mode: str) -> list[Any]:
    """Return each dim's entry as its rule writes it, each by itself, as if the mesh had every mesh axis.

    The rules must be strict: a policy looks at sizes.
    """
    sizes = dict.fromkeys([*rules.named_mesh_axes(), *STANDARD_MESH_AXES], 2)
    mode = parse_mode(mode)
    return [
        resolver.resolve((dim,), rules, sizes, mode=mode).decisions[0].entry
        for dim in as_annotation(tuple(annotation))
    ]


def written_spec(
    annotation: Sequence[Any], rules: AxisRules, mode: str, mesh: Mesh | AbstractMesh | None
) -> PartitionSpec:
    """Return the entries of `written` as a spec; see `PartitionAxis.resolve_spec`."""
    entries = written(annotation, rules, mode)
    if mesh is None:
        return PartitionSpec(*entries)
    # The resolver judges who may hold which mesh axis; what is left out below has size 1 then.
    resolver.resolve(tuple(annotation), rules, mesh, mode=mode)
    return PartitionSpec(*without_repeats(entries))


def without_repeats(entries: Sequence[Any]) -> list[Any]:
    """Leave out of each entry the mesh axes that an earlier one holds."""
    held: set[str] = set()
    kept = []
    for entry in entries:
        names = tuple(name for name in _names(entry) if name not in held)
        held.update(names)
        kept.append(
            entry
            if entry is PartitionSpec.UNCONSTRAINED or names == _names(entry)
            else names or None
        )
    return kept


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _name(semantic_axis: str) -> str:
    name = str(semantic_axis).strip()
    if not name:
        raise StrategyError(
            "`semantic_axis` must be a non-empty string", fix="give the axis a name"
        )
    return name


def _with_registered(
    axis: PartitionAxis, base: AxisRules, registered: registry.Registered
) -> AxisRules:
    """Return rules with the registered axes; as parameters these keep their train rule in every mode."""
    if not registered:
        return base
    by_name = {canonical_axis(one.name): one for one in registered}
    texts = {
        generation: {
            name: _rule(one.name, _follow(axis, name, by_name, generation, ()))
            for name, one in by_name.items()
        }
        for generation in (False, True)
    }
    activations = [
        dict(table) | texts[mode in GENERATION_MODES]
        for mode, table in zip(MODES, base.activations, strict=True)
    ]
    params = [dict(table) | texts[False] for table in base.params]
    return AxisRules(
        activations=tuple(tuple(sorted(table.items())) for table in activations),
        params=tuple(tuple(sorted(table.items())) for table in params),
        user_axes=tuple(sorted(name for name in by_name if name not in KNOWN_AXES)),
        policy=base.policy,
    )


def _rule(name: str, value: Any) -> Rule:
    text = REPLICATED if value is None else "+".join(_names(value))
    return parse_rule(text, ref=RuleRef(key=name, text=text, source="PartitionAxis.register"))


def _follow(
    axis: PartitionAxis,
    value: Any,
    registered: Mapping[str, registry.RegisteredAxis],
    generation: bool,
    seen: Any,
) -> Any:
    """Return the mesh axes that a value stands for: an attribute, an axis, a registered axis, a mesh axis, or several."""
    if isinstance(value, tuple):
        return flat_names(tuple(_follow(axis, one, registered, generation, seen) for one in value))
    if not isinstance(value, str):
        return value
    # A mesh axis may be called like the short name of an axis ("tp"): that is no alias.
    name = (
        canonical_axis(value)
        if value.startswith("__") or value in {one.name for one in registered.values()}
        else ""
    )
    if name in registered:
        if name in seen:
            raise StrategyError(
                f"Cyclic semantic axis registration: {value!r} stands for itself",
                fix="let one of them name a mesh axis",
            )
        one = registered[name]
        own = generation and not isinstance(one.generation_axis_rule, EMPTY_VAL)
        return _follow(
            axis,
            one.generation_axis_rule if own else one.axis_rule,
            registered,
            generation,
            (*seen, name),
        )
    attribute = value if value in ATTRIBUTES else PartitionAxis._SEMANTIC_MAP.get(value)
    if attribute is None:
        return axis._clean(value)
    if generation and attribute in DECODE_ATTRIBUTES:
        attribute = f"decode_{attribute}"
    return getattr(axis, attribute)
