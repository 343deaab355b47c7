"""Compiled rules: frozen, hashable tuples. A strategy file or a `PartitionAxis` compiles to them.

The grammar, where "-" and "?" may only come last:

    rule      := candidate ("|" candidate)*
    candidate := "-" | "?" | name ("+" name)*
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

from shardwright.errors import StrategyError
from shardwright.mesh.check import name_fault
from shardwright.resolution.decisions import RuleRef
from shardwright.resolution.patterns import compile_pattern
from shardwright.resolution.pipeline import Pipeline
from shardwright.resolution.recent import Recent
from shardwright.vocabulary.axes import (
    KNOWN_AXES,
    PARALLELISM_AXES,
    REPLICATED,
    STANDARD_MESH_AXES,
    UNCONSTRAINED,
    Memory,
    Role,
    file_name,
)
from shardwright.vocabulary.integers import quoted
from shardwright.vocabulary.modes import MODE_NAMES, MODES, parse_mode
from shardwright.vocabulary.read import (
    Faults,
    FieldKind,
    choice,
    integer,
    passes,
    read_fields,
)


class Fallback(enum.StrEnum):
    """The end of a rule, which applies if no candidate fits."""

    # The empty text is false, so `if rule.fallback` tells whether a rule states one.
    NONE = ""
    REPLICATED = REPLICATED
    UNCONSTRAINED = UNCONSTRAINED


class Attention(enum.StrEnum):
    """The implementations of attention that a strategy may name, in addition to `own:NAME`.

    AUTO chooses an implementation for each call.
    """

    AUTO = "auto"
    ALLGATHER_KV = "allgather_kv"
    BLOCKWISE = "blockwise"
    CUDNN = "cudnn"
    FLASH_DECODE = "flash_decode"
    RING = "ring"
    SDPA = "sdpa"
    SPLASH = "splash"
    TRITON_DECODE = "triton_decode"
    ULYSSES = "ulysses"
    VANILLA = "vanilla"


OWN_ATTENTION: Final = "own:"
MOST_CANDIDATES: Final = 64


class Indivisible(enum.StrEnum):
    """What happens to a dim whose size does not divide."""

    ERROR = "error"
    PREFIX = "prefix"
    REPLICATE = "replicate"
    DROP = "drop"


class Conflict(enum.StrEnum):
    """What happens if two dims want the same mesh axis."""

    ERROR = "error"
    FIRST_DIM = "first_dim"
    NEXT = "next"


class Order(enum.StrEnum):
    """Which dim is decided first if two dims want the same mesh axis."""

    DIMS = "dims"
    RULES = "rules"


class Missing(enum.StrEnum):
    """What happens to a candidate with a mesh axis that the mesh does not have."""

    SKIP = "skip"
    REPLICATE = "replicate"


class Rank(enum.StrEnum):
    """What happens if an annotation and an array differ in rank."""

    ERROR = "error"
    FIT = "fit"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Ordered candidates of mesh axes for one axis, and what to do when none fits.

    Attributes:
      candidates: Mesh axes, in the order in which they are tried.
      fallback: The fallback that applies if no candidate fits.
      ref: Where the rule is written.
      refs: Where each candidate is written, if the candidates are on different lines.
      of_one: The rule for a dim of size 1. None means that `candidates` apply to every size.
    """

    candidates: tuple[tuple[str, ...], ...]
    fallback: Fallback = Fallback.NONE
    # Rules that are equal except for their lines or files must be one key of JAX's caches. So
    # equality and `AxisRules.fingerprint`, which reads the `repr`, leave out lines and files.
    ref: RuleRef = dataclasses.field(compare=False, repr=False)
    refs: tuple[RuleRef, ...] = dataclasses.field(default=(), compare=False, repr=False)
    of_one: Rule | None = None

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Every mesh axis that the rule names, in order, once."""
        return tuple(dict.fromkeys(axis for candidate in self.candidates for axis in candidate))


_MESH_AXES: Final = passes(
    lambda value: (
        isinstance(value, tuple)
        and not any(map(name_fault, value))
        and len(set(value)) == len(value)
    ),
    "is not a tuple of different mesh axes",
    fix='write each name by itself, ("fsdp", "sp"), or () for no mesh axes',
)


def _read_added_rule(name: str, value: Any) -> tuple[Any, Faults]:
    if value is not None and not isinstance(value, Rule):
        fix = 'write shardwright.resolution.rules.parse_rule("dp | -"), or None for no mesh axes'
        return value, [(f"{name}={quoted(value)} is not a Rule", fix)]
    if value is not None and value.fallback is Fallback.UNCONSTRAINED:
        what = f'{name} is "{value.ref.text}", and "?" is for activations only: '
        return value, [(what + "what is stored needs a sharding", 'end the rule in "-"')]
    return value, []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What to do if a rule cannot be applied exactly.

    Every choice except an error is recorded in the `Resolution`.

    Attributes:
      indivisible: For a size that does not divide: raise an error; take the longest prefix that
        divides; replicate the dim; or drop the dim, which replicates it before it can conflict with
        another dim.
      conflict: For a mesh axis that another dim already holds: raise an error; leave the mesh axis
        to that dim; or try the next candidate. Under "next", a size that does not divide never
        leads to the next candidate: `indivisible` applies.
      order: Decide dims from left to right, or try rules in the order in which they are written,
        whatever their dim.
      gather: Mesh axes over which a weight is gathered where it is used.
      missing: For an absent mesh axis: drop it from its candidate, or replicate the whole dim.
      rank: For an annotation of another rank than the array: raise an error, or cut or pad the
        annotation.
      largest_dim: Candidates of mesh axes, or None. The first candidate that fits shards a stored
        weight along its largest free dim that divides.
      largest_dim_min_size: `largest_dim` does not change a weight that has fewer elements than
        this. For a stack of weights, only the elements of one layer are counted.
      zero1: Candidates of mesh axes that shard optimizer state in addition to its parameter, or
        None.
      idle: Mesh axes that no rule names, on purpose: everything is replicated over them.

    Raises:
      StrategyError: A choice does not exist; a name in `gather` or `idle` occurs twice or cannot
        name a mesh axis; `zero1` or `largest_dim` is not a rule, or ends in "?"; or the minimum
        size is not a number of elements.
    """

    indivisible: Annotated[Indivisible, choice(Indivisible)] = Indivisible.ERROR
    conflict: Annotated[Conflict, choice(Conflict)] = Conflict.ERROR
    order: Annotated[Order, choice(Order)] = Order.DIMS
    gather: Annotated[tuple[str, ...], _MESH_AXES] = ()
    missing: Annotated[Missing, choice(Missing)] = Missing.SKIP
    rank: Annotated[Rank, choice(Rank)] = Rank.ERROR
    largest_dim: Annotated[Rule | None, FieldKind(_read_added_rule)] = None
    largest_dim_min_size: Annotated[int, integer(0)] = 0
    zero1: Annotated[Rule | None, FieldKind(_read_added_rule)] = None
    idle: Annotated[tuple[str, ...], _MESH_AXES] = ()

    def __post_init__(self) -> None:
        read_fields(self, error=StrategyError)

    @property
    def added_mesh_axes(self) -> tuple[str, ...]:
        """Every mesh axis that `largest_dim` and `zero1` name."""
        rules = (self.largest_dim, self.zero1)
        return tuple(axis for rule in rules if rule is not None for axis in rule.mesh_axes)


POLICY_PRESETS: dict[str, Policy] = {
    "strict": Policy(),
    "eformer": Policy(indivisible=Indivisible.DROP, missing=Missing.REPLICATE, rank=Rank.FIT),
}


def parse_rule(text: str, *, ref: RuleRef | None = None) -> Rule:
    """Parse the text of a rule, such as `"dp+fsdp | dp | -"`.

    Args:
      text: The rule.
      ref: Where the rule is written, for messages.

    Raises:
      StrategyError: The text is not a rule. A caret marks the fault.

    >>> parse_rule("dp+fsdp | -").candidates
    (('dp', 'fsdp'),)
    """
    ref = ref or RuleRef(key="rule", text=text)
    candidates: list[tuple[str, ...]] = []
    fallback = Fallback.NONE
    if (count := text.count("|") + 1) > MOST_CANDIDATES:
        what = f"the rule has {count} candidates, at most {MOST_CANDIDATES} are read"
        fix = "keep the candidates that can apply: the first that fits is chosen"
        raise StrategyError(what, axis=ref.key, rule=str(ref), fix=fix)
    for start, part in _split(text, "|", 0):
        word = part.strip()
        at = start + len(part) - len(part.lstrip())
        if fallback:
            raise _grammar(text, at, f'nothing may follow "{fallback}", which always fits', ref)
        if word in (REPLICATED, UNCONSTRAINED):
            fallback = Fallback(word)
        else:
            candidates.append(_parse_candidate(text, part, start, ref))
    return Rule(candidates=tuple(candidates), fallback=fallback, ref=ref)


def _parse_candidate(text: str, part: str, start: int, ref: RuleRef) -> tuple[str, ...]:
    names: list[str] = []
    for at, piece in _split(part, "+", start):
        name, column = piece.strip(), at + len(piece) - len(piece.lstrip())
        if not name:
            raise _grammar(text, min(column, len(text)), "a mesh axis is missing here", ref)
        if name in (REPLICATED, UNCONSTRAINED):
            raise _grammar(text, column, f'"{name}" cannot be joined with "+": write it alone', ref)
        if fault := name_fault(name):
            what = f"{name!r} is not the name of a mesh axis: it {fault}"
            raise _grammar(text, column, what, ref)
        if name in names:
            raise _grammar(text, column, f"{name!r} occurs twice in one candidate", ref)
        names.append(name)
    return tuple(names)


def _split(text: str, mark: str, offset: int) -> Iterable[tuple[int, str]]:
    for part in text.split(mark):
        yield offset, part
        offset += len(part) + 1


def _grammar(text: str, column: int, what: str, ref: RuleRef) -> StrategyError:
    snippet = f"{text}\n{' ' * column}^"
    fix = 'a rule lists candidates in order, such as "dp+fsdp | dp | -": "+" joins mesh axes, '
    fix += '"-" means replicated, "?" unconstrained'
    return StrategyError(what, axis=ref.key, snippet=snippet, rule=str(ref), fix=fix)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorRules:
    """Rules for the tensors whose path a pattern matches.

    Raises:
      StrategyError: The pattern is not a regular expression.
    """

    match: str
    rules: tuple[tuple[str, Rule], ...]
    _pattern: re.Pattern[str] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_pattern", compile_pattern(self.match))

    def matches(self, path: str) -> bool:
        """Tell whether the pattern is found in a path."""
        return self._pattern.search(path) is not None

    def find(self, axis: str, path: str) -> Rule | None:
        """Return the entry's rule for an axis; None if there is none or the path does not match."""
        rule = next((rule for name, rule in self.rules if name == axis), None)
        return rule if rule is not None and self.matches(path) else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRule:
    """Where stored parameters, or optimizer state, live.

    Attributes:
      role: param or state.
      memory: Device or host.
      modes: Modes in which the rule applies.
      match: Pattern of the parameter's path, also for its state. None matches every path.
      ref: Where the rule is written.

    Raises:
      StrategyError: The pattern is not a regular expression.
    """

    role: Role
    memory: Memory
    modes: tuple[str, ...] = MODES
    match: str | None = None
    ref: RuleRef = dataclasses.field(compare=False, repr=False)
    _pattern: re.Pattern[str] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_pattern", compile_pattern(self.match or ""))

    def applies(self, *, role: Role, mode: str, path: str | None) -> bool:
        """Tell whether the rule decides where an array lives."""
        if role is not self.role or mode not in self.modes:
            return False
        return self.match is None or (path is not None and self.matches(path))

    def matches(self, path: str) -> bool:
        """Tell whether the pattern is found in a path."""
        return self._pattern.search(path) is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedActivations:
    """Where rematerialization keeps the values that it saves for the backward pass.

    Attributes:
      memory: Device or host, for values whose name is not in `names`.
      names: Pairs of a name of `checkpoint_name` and the memory of its values, sorted.
      ref: A line that puts values on the host, or None.
    """

    memory: Memory = Memory.DEVICE
    names: tuple[tuple[str, Memory], ...] = ()
    ref: RuleRef | None = dataclasses.field(default=None, compare=False, repr=False)

    def of(self, name: str) -> Memory:
        """Return where the values of a name live."""
        return dict(self.names).get(name, self.memory)


RuleTable = tuple[tuple[str, Rule], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AxisRules:
    """All rules of a strategy. Equality and hash cover the rules and the policy, but not the places
    where these are written.

    Attributes:
      activations: For each of `MODES`, the table that applies, sorted by axis.
      params: For each of `MODES`, the table that applies to stored weights.
      tensors: `[[tensors]]` entries, which are exceptions by path; the first match applies.
      user_axes: Axes that the strategy declares.
      policy: What to do if a rule cannot be applied exactly.
      attention: Pairs of a mode and the line that names its implementation of attention, sorted.
      pipeline: How the layers of a stack run over pp, or None if the strategy does not say.
      order: Under `policy.order = "rules"`, the axis of every candidate, in the order of the
        attempts. One tuple for the activations of each of `MODES`, then one for the parameters of
        each. Empty under another order.
      memory: Where parameters and optimizer state live; the first rule that applies decides.
      saved: Values that rematerialization saves, and where.
      known_axes: Every axis that an annotation may use.
    """

    activations: tuple[RuleTable, ...]
    params: tuple[RuleTable, ...]
    tensors: tuple[TensorRules, ...] = ()
    user_axes: tuple[str, ...] = ()
    policy: Policy = Policy()
    attention: tuple[tuple[str, RuleRef], ...] = ()
    pipeline: Pipeline | None = None
    order: tuple[tuple[str, ...], ...] = ()
    memory: tuple[MemoryRule, ...] = ()
    saved: SavedActivations = SavedActivations()
    known_axes: frozenset[str] = dataclasses.field(init=False, repr=False)
    _tables: dict[tuple[str, Role], dict[str, Rule]] = dataclasses.field(init=False, repr=False)
    _values: tuple[Any, ...] = dataclasses.field(init=False, repr=False)
    _hash: int = dataclasses.field(init=False, repr=False)
    _cache: Recent = dataclasses.field(init=False, repr=False)
    _fingerprint: bytes = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.policy.order is Order.RULES and not self.order:
            what = 'policy order = "rules", but the rules have no order'
            raise StrategyError(what, fix="compile a Strategy, or call build_rules")
        tables = {
            (mode, Role.ACTIVATION): dict(table)
            for mode, table in zip(MODES, self.activations, strict=True)
        }
        for mode, table in zip(MODES, self.params, strict=True):
            # All roles of a weight share one table. The roles differ only after the dims are
            # decided: `use` drops the gathered mesh axes, and `state` adds those of zero1. All
            # roles add those of largest_dim.
            tables[mode, Role.PARAM] = tables[mode, Role.USE] = tables[mode, Role.STATE] = dict(
                table
            )
        object.__setattr__(self, "known_axes", KNOWN_AXES | frozenset(self.user_axes))
        object.__setattr__(self, "_tables", tables)
        # Leave out the file and line of each rule, because equality ignores them.
        named = tuple((mode, line.text) for mode, line in self.attention)
        object.__setattr__(
            self,
            "_values",
            (
                self.activations,
                self.params,
                self.tensors,
                self.user_axes,
                self.policy,
                self.order,
                named,
                self.memory,
                self.saved,
                self.pipeline,
            ),
        )
        object.__setattr__(self, "_hash", hash(self._values))
        object.__setattr__(self, "_cache", Recent())
        object.__setattr__(self, "_fingerprint", b"")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, AxisRules) or self._hash != other._hash:
            return False
        if self._values is other._values:
            return True
        if self._values != other._values:
            return False
        # The rules are equal: share the values, so that the next comparison is an identity check.
        object.__setattr__(self, "_values", other._values)
        return True

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        fields = [field.name for field in dataclasses.fields(self) if field.init]
        return functools.partial(AxisRules, **{name: getattr(self, name) for name in fields}), ()

    def fingerprint(self) -> bytes:
        """Return 32 bytes that are equal for equal rules. A cache may keep these bytes without
        keeping the rules alive.
        """
        if not self._fingerprint:
            # Tables share rules, and the `repr` of a rule is slow. So compute one `repr` per rule.
            tables = (*self.activations, *self.params)
            rules = {id(rule): rule for table in tables for _, rule in table}
            texts = {key: repr(rule) for key, rule in rules.items()}
            named = [[(axis, texts[id(rule)]) for axis, rule in table] for table in tables]
            text = repr((named, self._values[2:]))
            digest = hashlib.blake2b(text.encode(), digest_size=32).digest()
            object.__setattr__(self, "_fingerprint", digest)
        return self._fingerprint

    def stated(self, axis: str, *, mode: str, role: Role, path: str | None) -> Rule | None:
        """Return the rule that the strategy states for an axis, or None.

        For weights, `[[tensors]]` entries come before tables.
        """
        # Test `self.tensors` first: most strategies have no exceptions by path, and a model asks
        # for thousands of rules.
        rule = self.tensor_rule(axis, role=role, path=path) if self.tensors else None
        return rule or self._tables[mode, role].get(axis)

    def tensor_rule(self, axis: str, *, role: Role, path: str | None) -> Rule | None:
        """Return the rule of the first `[[tensors]]` entry that matches the path and names the
        axis, or None.
        """
        if path is None or role is Role.ACTIVATION:
            return None
        return next(
            (rule for entry in self.tensors if (rule := entry.find(axis, path)) is not None), None
        )

    def memory_rule(self, *, role: Role, mode: str, path: str | None) -> MemoryRule | None:
        """Return the first rule that says where an array lives. None means device memory."""
        each = (rule for rule in self.memory if rule.applies(role=role, mode=mode, path=path))
        return next(each, None)

    @property
    def reads_paths(self) -> bool:
        """Whether a rule, of sharding or of memory, applies to some paths only."""
        return bool(self.tensors) or any(rule.match is not None for rule in self.memory)

    def attention_in(self, mode: str) -> RuleRef | None:
        """Return the line that names a mode's implementation of attention, or None for AUTO."""
        return dict(self.attention).get(mode)

    def named_mesh_axes(self) -> tuple[str, ...]:
        """Every mesh axis that any rule names, in order, once."""
        tables = [*self.activations, *self.params, *(entry.rules for entry in self.tensors)]
        # The tables of the modes share most of their rules, so read each rule once.
        rules = {id(rule): rule for table in tables for _, rule in table}
        named = [axis for rule in rules.values() for axis in rule.mesh_axes]
        return tuple(dict.fromkeys([*named, *self.policy.gather, *self.policy.added_mesh_axes]))


def without_mesh_axis(rules: AxisRules, mesh_axis: str) -> AxisRules:
    """Return the rules without a mesh axis, for arrays that are not sharded over this mesh axis.

    A candidate with only this mesh axis becomes the end of its rule: the dim is replicated. The
    rules also have no `[pipeline]`.
    """

    def rest(rule: Rule) -> Rule:
        candidates: list[tuple[str, ...]] = []
        for candidate in rule.candidates:
            names = tuple(name for name in candidate if name != mesh_axis)
            if not names:
                return dataclasses.replace(
                    rule, candidates=tuple(candidates), fallback=Fallback.REPLICATED, refs=()
                )
            candidates.append(names)
        return dataclasses.replace(rule, candidates=tuple(candidates))

    def table(entries: RuleTable) -> RuleTable:
        return tuple((axis, rest(rule)) for axis, rule in entries)

    def added(rule: Rule | None) -> Rule | None:
        # A rule without candidates adds no mesh axes.
        own = None if rule is None else rest(rule)
        return own if own is not None and own.candidates else None

    policy = rules.policy
    return dataclasses.replace(
        rules,
        activations=tuple(map(table, rules.activations)),
        params=tuple(map(table, rules.params)),
        tensors=tuple(
            dataclasses.replace(entry, rules=table(entry.rules)) for entry in rules.tensors
        ),
        policy=dataclasses.replace(
            policy,
            gather=tuple(name for name in policy.gather if name != mesh_axis),
            largest_dim=added(policy.largest_dim),
            zero1=added(policy.zero1),
        ),
        pipeline=None,
    )


def default_rule(axis: str) -> Rule | None:
    """Return the default rule of a parallelism axis: its own mesh axis. None for other axes."""
    name = PARALLELISM_AXES.get(axis)
    if name is None:
        return None
    return Rule(
        candidates=((name,),), ref=RuleRef(key=file_name(axis), text=name, source="default")
    )


def build_rules(
    tables: Mapping[str, Mapping[str, Rule]],
    *,
    tensors: Iterable[TensorRules] = (),
    user_axes: Iterable[str] = (),
    policy: Policy | None = None,
    attention: Mapping[str, RuleRef] | None = None,
    pipeline: Pipeline | None = None,
    orders: Mapping[str, Sequence[str]] | None = None,
    memory: Iterable[MemoryRule] = (),
    saved: SavedActivations | None = None,
) -> AxisRules:
    """Build the rules: merge the tables into one effective table per mode and role.

    Insert inherits from decode. `[modes.M]` never affects a parameter.

    Args:
      tables: Tables of axis -> rule, by name: `rules`, `params`, `modes.<m>` and
        `modes.<m>.params`.
      tensors: `[[tensors]]` entries, which are exceptions by path.
      user_axes: Axes that the strategy declares.
      policy: What to do if a rule cannot be applied exactly. Defaults to raising errors.
      attention: Mode -> the line that names its implementation of attention; `default` is for the
        other modes.
      pipeline: `[pipeline]`, or None.
      orders: Name of a table -> the axes of its candidates, in the order in which these are
        written. Defaults to the order of the table. Only `policy.order = "rules"` needs it.
      memory: Where parameters and optimizer state live; the first rule that applies decides.
      saved: Values that rematerialization saves, and where. By default, all values that it saves
        stay on the device.
    """

    def layer(*names: str) -> RuleTable:
        effective: dict[str, Rule] = {}
        for name in names:
            effective.update(tables.get(name, {}))
        # Sorted, so that rules in another order are equal. The order as written is in `order`.
        return tuple(sorted(effective.items()))

    # In `layer`, the last table wins. In `_rank_orders`, the first table wins, so it gets the
    # tables in reverse.
    chains = {mode: ("decode", "insert") if mode == "insert" else (mode,) for mode in MODE_NAMES}
    activations = tuple(
        layer("rules", *(f"modes.{mode}" for mode in chains[name])) for name in MODE_NAMES
    )
    params = tuple(
        layer("rules", "params", *(f"modes.{mode}.params" for mode in chains[name]))
        for name in MODE_NAMES
    )
    policy = policy or Policy()
    return AxisRules(
        activations=activations,
        params=params,
        tensors=tuple(tensors),
        user_axes=tuple(user_axes),
        policy=policy,
        order=_rank_orders(tables, orders or {}) if policy.order is Order.RULES else (),
        attention=_attention_by_mode(attention or {}),
        memory=tuple(memory),
        saved=saved or SavedActivations(),
        pipeline=pipeline,
    )


def _rank_orders(
    tables: Mapping[str, Mapping[str, Rule]], written: Mapping[str, Sequence[str]]
) -> tuple[tuple[str, ...], ...]:
    """Return the axes of all candidates that apply, in rank order.

    The axis of a rule "-" is in the order once, although the rule has no candidates: a composite is
    tried at the place of the first rule of its members.

    The result has one tuple for the activations of each of `MODES`, then one for the parameters of
    each. Candidates rank by table, in the order in which tables are looked up, then by position in
    the table.

    Args:
      tables: Tables of axis -> rule, by name.
      written: Name of a table -> the axis of each of its candidates, in the order written. Defaults
        to the order of the table.
    """

    def ranked(*names: str) -> tuple[str, ...]:
        order: list[str] = []
        known: set[str] = set()
        for name in names:
            table = tables.get(name, {})
            axes = [axis for axis, rule in table.items() for _ in rule.candidates or [None]]
            # If an earlier table has an axis, the rules of this axis in later tables are not read.
            order += [axis for axis in written.get(name, axes) if axis not in known]
            known.update(table)
        return tuple(order)

    chains = {mode: ("insert", "decode") if mode == "insert" else (mode,) for mode in MODE_NAMES}
    own = {name: [f"modes.{mode}" for mode in chains[name]] for name in MODE_NAMES}
    activations = [ranked(*own[name], "rules") for name in MODE_NAMES]
    params = [
        ranked(*(f"{mode}.params" for mode in own[name]), "params", "rules") for name in MODE_NAMES
    ]
    return (*activations, *params)


def _attention_by_mode(named: Mapping[str, RuleRef]) -> tuple[tuple[str, RuleRef], ...]:
    """Return pairs of a mode that runs attention and the line that names its implementation.

    Modes without such a line are left out. The modes are canonical and sorted.
    """
    lines = {
        parse_mode(name): named.get(name, named.get("default"))
        for name in ("train", "prefill", "decode")
    }
    return tuple(
        (mode, line)
        for mode, line in sorted(lines.items(), key=lambda item: item[0])
        # AUTO is the default. Rules that name AUTO equal rules without a name.
        if line is not None and line.text != Attention.AUTO
    )


def unnamed_mesh_axes(rules: AxisRules, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes of more than one device that no rule names, and that are neither
    standard nor idle.
    """
    known = {*rules.named_mesh_axes(), *rules.policy.idle, *STANDARD_MESH_AXES}
    return tuple(name for name, size in sizes.items() if size > 1 and name not in known)


def foreign_mesh_axes(named: Iterable[str], mesh_axes: Iterable[str]) -> tuple[str, ...]:
    """Return the names that are neither mesh axes of this mesh nor standard mesh axes."""
    known = {*mesh_axes, *STANDARD_MESH_AXES}
    return tuple(name for name in named if name not in known)
