"""eformer's `PartitionAxis`: rules as readable attributes, and axes registered per process."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardwright.errors import StrategyError, UnknownAxisError, did_you_mean
from shardwright.interop.eformer.errors import NotRegisteredError
from shardwright.manager.ambient import current_mesh
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
    joined_names,
)
from shardwright.resolution.partition_specs import entry_names
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredAxis:
    """One registered axis.

    Attributes:
      name: The name as registered, not its canonical form.
      axis_rule: An attribute of `PartitionAxis`, another axis (the new axis is then an alias of
        it), a mesh axis, a tuple of these, or None to replicate.
      generation_axis_rule: The rule for decode and insert. `NOT_GIVEN` derives it from `axis_rule`.
    """

    name: str
    axis_rule: Any
    generation_axis_rule: Any = NOT_GIVEN


Registered = tuple[RegisteredAxis, ...]


class _Process:
    """The registered axes by canonical name. The dict is replaced, never changed in place."""

    lock = threading.Lock()
    axes: ClassVar[dict[str, RegisteredAxis]] = {}


def registered_axes() -> Registered:
    """Return the axes that are registered now.

    A manager takes this snapshot when it is built, and keeps it.
    """
    return tuple(_Process.axes.values())


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PartitionAxis(Attributes):
    """Rules as attributes. Reading an attribute returns its mesh axes.

    A value is a mesh axis, a tuple of mesh axes (one dim over several), a parallelism axis such as
    `TP`, or a rule such as `"tp | -"`. None replicates. A `decode_*` attribute has the same kinds
    of values. If it is not given, it has the value of the attribute without `decode_`. The
    `decode_*` attributes also apply to insert.

    >>> PartitionAxis(tensor_parallel_axis="model").head_axis
    'model'

    Raises:
      StrategyError: A value is not a rule. The error lists all such values.
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
        # Compile now, so that a value that is not a rule raises an error here, and not where the
        # axis is first used.
        self.compile(registered=())

    def _default(self, name: str) -> Any:
        base = name.removeprefix("decode_")
        if name != base:
            return getattr(self, base)
        default = default_of(self, name)
        return None if isinstance(default, EMPTY_VAL) else default

    def __hash__(self) -> int:
        # Hash the text with blake2b, because hash() of a str differs between processes, and hosts
        # may compare this hash.
        text = repr([getattr(self, name) for name in ATTRIBUTES])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")

    def __reduce__(self) -> tuple[Any, ...]:
        # Leave out the cache: it holds managers, and their meshes hold devices.
        return PartitionAxis, tuple(getattr(self, name) for name in ATTRIBUTES)

    def _clean(self, value: Any) -> Any:
        """Normalize a value: lists to tuples, parallelism axes to mesh axes, replicated to None."""
        if isinstance(value, (list, tuple)):
            return joined_names(value, self._clean) if value else value
        if not isinstance(value, str):
            return value
        if value in (EMPTY, REPLICATED):
            return None
        return getattr(self, MESH_ATTRIBUTES[value]) if value in MESH_ATTRIBUTES else value

    def replace(self, **changes: Any) -> PartitionAxis:
        """Return a copy with some attributes changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain data: `from_dict(to_dict(p)) == p`, also through JSON."""
        return {
            name: list(value) if isinstance(value := getattr(self, name), tuple) else value
            for name in ATTRIBUTES
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PartitionAxis:
        """Return the `PartitionAxis` whose `to_dict` is this data.

        Raises:
          StrategyError: A key is not an attribute.
        """
        for name in data:
            if name not in ATTRIBUTES:
                raise StrategyError(
                    f"{name!r} is not an attribute of PartitionAxis",
                    fix=did_you_mean(name, ATTRIBUTES) or f"leave {name} out",
                )
        return cls(**data)

    @classmethod
    def register(
        cls,
        semantic_axis: str,
        axis_rule: Any,
        *,
        generation_axis_rule: Any = NOT_GIVEN,
        override: bool = False,
    ) -> None:
        """Register an axis for every manager that is built later.

        In contrast, `[axes]` in a strategy file declares axes for this file only.

        Args:
          semantic_axis: Name of the axis.
          axis_rule: An attribute (`"head_axis"`), an axis (`HEAD`), a mesh axis, a tuple of these,
            or None to replicate. For an attribute or an axis, the new axis is an alias in every
            mode.
          generation_axis_rule: The rule for decode and insert. By default it is derived from
            `axis_rule`.
          override: Whether to replace the rule of an existing axis.

        Raises:
          StrategyError: The name is empty. Or the axis exists, and `override` is False.
        """
        name = _name(semantic_axis)
        rules = [
            tuple(rule) if isinstance(rule, list) else rule
            for rule in (axis_rule, generation_axis_rule)
        ]
        axis = RegisteredAxis(name=name, axis_rule=rules[0], generation_axis_rule=rules[1])
        key = canonical_axis(name)
        with _Process.lock:
            if not override and (key in cls._SEMANTIC_MAP or key in _Process.axes):
                raise StrategyError(
                    f"Semantic axis {name!r} already exists",
                    fix="pass override=True to replace its rule",
                )
            # A new dict, because readers do not take the lock.
            _Process.axes = {**_Process.axes, key: axis}

    @classmethod
    def unregister(cls, semantic_axis: str, *, missing_ok: bool = True) -> None:
        """Unregister an axis.

        Raises:
          NotRegisteredError: The axis is not registered, and `missing_ok` is False.
        """
        key = canonical_axis(_name(semantic_axis))
        with _Process.lock:
            if key not in _Process.axes and not missing_ok:
                raise NotRegisteredError(
                    f"Semantic axis {semantic_axis!r} is not registered", fix="pass missing_ok=True"
                )
            _Process.axes = {other: axis for other, axis in _Process.axes.items() if other != key}

    @classmethod
    def clear_registered_axes(cls) -> None:
        """Unregister all axes."""
        with _Process.lock:
            _Process.axes = {}

    @classmethod
    def get_registered_axes(cls) -> dict[str, dict[str, Any]]:
        """Return the `axis_rule` and `generation_axis_rule` of each registered axis by name.

        If an alias of an attribute was registered without a generation rule, its generation rule is
        the `decode_*` attribute, if there is one. Any other rule that was not given is `NOT_GIVEN`.
        """
        axes = {}
        for axis in registered_axes():
            rule, generation = axis.axis_rule, axis.generation_axis_rule
            if isinstance(generation, EMPTY_VAL) and isinstance(rule, str):
                generation = cls._STANDARD_TO_GENERATION_ATTR_MAP.get(rule, generation)
            axes[axis.name] = {"axis_rule": rule, "generation_axis_rule": generation}
        return axes

    def compile(
        self, *, policy: Policy | None = None, registered: Registered | None = None
    ) -> AxisRules:
        """Return the frozen rules of the attributes and of the registered axes.

        `registered` defaults to the axes that are registered now.

        Raises:
          StrategyError: A value is not a rule, or registered aliases form a cycle.
        """
        axes = registered_axes() if registered is None else registered
        rules: AxisRules | None = self._cache.get((policy, axes))
        if rules is None:
            values = {name: getattr(self, name) for name in ATTRIBUTES}
            rules = _with_registered(
                self, partition_axis.PartitionAxis(**values).compile(policy=policy), axes
            )
            self._cache[policy, axes] = rules
        return rules

    def spelled(self, axes: Sequence[Any], rules: AxisRules) -> tuple[Any, ...]:
        """Return dims as an annotation.

        None becomes `EMPTY`, a list becomes a tuple, and a mesh axis becomes its parallelism axis.

        Raises:
          UnknownAxisError: A name or a member of a composite is neither an axis nor a mesh axis.
        """
        named = {
            value: axis
            for axis, name in MESH_ATTRIBUTES.items()
            if isinstance(value := getattr(self, name), str)
        }

        def spell(axis: Any) -> Any:
            if axis is None:
                return EMPTY
            name = named.get(axis, axis) if isinstance(axis, str) else axis
            is_named = isinstance(name, str) and name != EMPTY
            if is_named and canonical_axis(name) not in rules.known_axes:
                known = sorted({*map(axis_label, rules.known_axes)})
                hint = did_you_mean(axis_label(name), known)
                raise UnknownAxisError(
                    f"Unknown semantic axis name: {name!r}",
                    axis=axis_label(name),
                    fix=f"{hint} register your own axis with PartitionAxis.register".strip(),
                )
            return name

        return tuple(
            tuple(map(spell, dim)) if isinstance(dim, (list, tuple)) else spell(dim) for dim in axes
        )

    def resolve_axis(self, axes: Sequence[Any], mode: str) -> list[Any]:
        """Return the mesh axes that the rules give each entry of `axes`. No mesh is needed.

        For a list of axes, the mesh axes are a list. For any other entry, they are None, a name or
        a tuple.

        Raises:
          UnknownAxisError, StrategyError: An axis or the mode is unknown.
        """
        rules = self.compile()
        return [
            list(entry_names(entry)) if isinstance(axis, list) else entry
            for axis, entry in zip(
                axes, written(self.spelled(axes, rules), rules, mode), strict=True
            )
        ]

    def resolve_spec(self, axes: Sequence[Any], mode: str) -> PartitionSpec:
        """Return the spec that the rules give, with one entry per dim. Sizes are not checked.

        If two entries have one mesh axis in common, and this mesh axis has size 1 in the current
        mesh, only the first entry keeps it. Without a mesh, both entries keep it, and a later
        constraint checks the spec.

        Raises:
          AxisConflictError: Two entries share a mesh axis whose size is above 1.
          UnknownAxisError, StrategyError: An axis or the mode is unknown.
        """
        rules = self.compile()
        return written_spec(self.spelled(axes, rules), rules, mode, current_mesh())


def written(annotation: Sequence[Any], rules: AxisRules, mode: str) -> list[Any]:
    """Return the spec entry that each dim has by its rule, on a mesh that has every mesh axis.

    The rules must be strict, because a lenient policy depends on sizes.
    """
    # Use any size above 1, because the resolver leaves out mesh axes of size 1.
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
    # `resolve` raises an error for a conflict. So the repeated mesh axes that are removed below
    # have size 1.
    resolver.resolve(tuple(annotation), rules, mesh, mode=mode)
    return PartitionSpec(*without_repeats(entries))


def without_repeats(entries: Sequence[Any]) -> list[Any]:
    """Remove from each entry the mesh axes of earlier entries."""
    used: set[str] = set()
    remaining = []
    for entry in entries:
        names = tuple(name for name in entry_names(entry) if name not in used)
        used.update(names)
        # An entry that keeps all names stays as written, because "tp" and ("tp",) are different
        # entries.
        remaining.append(entry if names == entry_names(entry) else names or None)
    return remaining


def _name(semantic_axis: str) -> str:
    name = str(semantic_axis).strip()
    if not name:
        raise StrategyError(
            "`semantic_axis` must be a non-empty string", fix="give the axis a name"
        )
    return name


def _with_registered(axis: PartitionAxis, base: AxisRules, registered: Registered) -> AxisRules:
    """Return rules with the registered axes. Parameters use the train rule in every mode."""
    if not registered:
        return base
    by_name = {canonical_axis(entry.name): entry for entry in registered}
    texts: dict[bool, dict[str, Rule]] = {False: {}, True: {}}
    for generation, rules in texts.items():
        for name, entry in by_name.items():
            value = _follow(axis, name, by_name, generation, ())
            text = REPLICATED if value is None else "+".join(entry_names(value))
            ref = RuleRef(key=entry.name, text=text, source="PartitionAxis.register")
            rules[name] = parse_rule(text, ref=ref)
    # `activations` has one table for each mode, in the order of `MODES`.
    activations = [
        dict(table) | texts[mode in GENERATION_MODES]
        for mode, table in zip(MODES, base.activations, strict=True)
    ]
    params = [dict(table) | texts[False] for table in base.params]
    return AxisRules(
        # Sorted, so that equal rules are equal values in every process.
        activations=tuple(tuple(sorted(table.items())) for table in activations),
        params=tuple(tuple(sorted(table.items())) for table in params),
        user_axes=tuple(sorted(name for name in by_name if name not in KNOWN_AXES)),
        policy=base.policy,
    )


def _follow(
    axis: PartitionAxis,
    value: Any,
    registered: Mapping[str, RegisteredAxis],
    generation: bool,
    seen: Any,
) -> Any:
    """Return the mesh axes of an attribute, an axis, a registered axis, a mesh axis, or a tuple."""
    if isinstance(value, tuple):
        return flat_names(
            tuple(_follow(axis, member, registered, generation, seen) for member in value)
        )
    if not isinstance(value, str):
        return value
    # A mesh axis may have the short name of an axis ("tp"). Such a name means the mesh axis.
    name = (
        canonical_axis(value)
        if value.startswith("__") or value in {entry.name for entry in registered.values()}
        else ""
    )
    if name in registered:
        if name in seen:
            raise StrategyError(
                f"Cyclic semantic axis registration: {value!r} refers to itself",
                fix="let one of the aliases name a mesh axis",
            )
        entry = registered[name]
        # An alias with its own rule for generation uses this rule instead of the `decode_*` value.
        own = generation and not isinstance(entry.generation_axis_rule, EMPTY_VAL)
        return _follow(
            axis,
            entry.generation_axis_rule if own else entry.axis_rule,
            registered,
            generation,
            (*seen, name),
        )
    attribute = value if value in ATTRIBUTES else PartitionAxis._SEMANTIC_MAP.get(value)
    if attribute is None:
        return axis._clean(value)
    # As in eformer's `resolve_axis`, an alias of an attribute uses the `decode_*` value of that
    # attribute.
    if generation and attribute in DECODE_ATTRIBUTES:
        attribute = f"decode_{attribute}"
    return getattr(axis, attribute)
