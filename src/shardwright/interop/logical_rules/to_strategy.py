"""Turn a list of rules into a strategy with the same specs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from jax.sharding import PartitionSpec

from shardwright.errors import (
    MissingMeshAxisError,
    Problem,
    ShardingError,
    StrategyError,
    raise_problems,
)
from shardwright.interop.logical_rules.names import (
    Imported,
    Modes,
    Names,
    Semantics,
    axis_in,
    plain_name,
    read_names,
)
from shardwright.mesh.build import abstract_mesh, mesh_sizes
from shardwright.resolution.partition_specs import entry_names
from shardwright.vocabulary.axes import (
    EMPTY,
    KNOWN_AXES,
    REPLICATED,
    STANDARD_MESH_AXES,
    UNCONSTRAINED,
    Role,
    canonical_axis,
    file_name,
)
from shardwright.vocabulary.modes import mode_name, parse_mode


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """One rule of a list. If `axes` is empty, `end` says what happens to the dim."""

    name: str
    axes: tuple[str, ...]
    source: str
    end: str = REPLICATED

    @property
    def text(self) -> str:
        return "+".join(self.axes) or self.end

    def __str__(self) -> str:
        return f'{self.name} = "{self.text}"   ({self.source})'


def to_strategy(
    rules: Sequence[tuple[str, Any]],
    *,
    mesh: Any,
    names: Names | None = None,
    semantics: Semantics = "flax",
    modes: Modes | None = None,
    source: str | Sequence[str] = "rules",
    own_axes: Iterable[str] = (),
) -> Imported:
    """Turn a list of rules into a strategy with the same specs.

    Args:
      rules: Pairs (name, mesh axes). The second value is a mesh axis, a tuple of mesh axes, None
        for replicated, or `PartitionSpec.UNCONSTRAINED` for a dim that is left to the compiler.
      mesh: A `Mesh`, an `AbstractMesh`, text such as `"data:2,model:4"`, or a mapping of mesh axis
        to size. Pairs (mesh axis, size) are possible too.
      names: Name in the list -> (axis, role), or an axis for both roles. A name that is not in
        `names` becomes a new axis: `embed` becomes `logical_embed`.
      semantics: "flax": rules apply in their order, and a rule is skipped if its mesh axis is
        already used. "nnx": the last rule of a name applies, a conflict is an error, and mesh axes
        may be used as names. "strict": each name has one rule, and a conflict is an error.
      modes: Names that are used in one mode only -> (the name that other modes use, mode). The rule
        of such a name becomes the rule of the other name in that mode.
      source: Where the rules are written: one text, or one for each rule. `explain` shows the text.
      own_axes: Axes of your own that `names` maps to. The strategy declares them.

    Raises:
      StrategyError: A rule is not a pair, a name has two rules under "strict", or two names that
        are mapped to one axis and role have different rules.
      UnknownAxisError: `names` maps to axes that are neither in the vocabulary nor in `own_axes`;
        all are reported at once.
      MeshSpecError: The mesh cannot be read.
      MissingMeshAxisError: Rules name mesh axes that the mesh lacks; all are reported at once.

    >>> rules = (("batch", "data"), ("embed", "model"), ("mlp", "model"))
    >>> imported = to_strategy(rules, mesh={"data": 2, "model": 4})
    >>> dict(imported.strategy.rules)
    {'logical_batch': 'data', 'logical_embed': 'model', 'logical_mlp': 'model'}
    """
    from shardwright.strategy.model import Strategy

    if semantics not in get_args(Semantics):
        fix = f"write one of {', '.join(get_args(Semantics))}"
        raise StrategyError(f"unknown semantics {semantics!r}", fix=fix)
    given = read_names(names, own_axes, are_imported=True)
    sizes = dict(mesh_sizes(abstract_mesh(mesh) if isinstance(mesh, str) else mesh))
    notes: list[str] = []
    pairs = _read(rules, sizes, source)
    empty = {name for name, target in given.items() if axis_in(target) == EMPTY}
    notes += [f"mapped to EMPTY, so never sharded: {pair}" for pair in pairs if pair.name in empty]
    pairs = [pair for pair in pairs if pair.name not in empty]
    if semantics == "flax":
        pairs = _until_replicated(pairs, notes)
    else:
        pairs = _one_each(pairs, semantics, notes)
    if semantics == "nnx":
        known = {pair.name for pair in pairs}
        if new := [axis for axis in sizes if axis not in known]:
            notes.append(f"mesh axes are names too: {', '.join(new)}")
        pairs += [_Pair(name=axis, axes=(axis,), source="mesh axis") for axis in new]
    replaced = _replaced(pairs, given, modes or {}, notes)
    common = [pair for pair in pairs if pair.name not in replaced]
    targets = _targets(common, given, notes)
    targets |= {name: targets[other] for name, (other, _) in replaced.items()}
    # Under "flax", the order of the rules matters: an earlier rule gets a mesh axis first.
    is_ordered = semantics == "flax"
    problems = _disagreements(common, targets, notes, is_ordered=is_ordered)
    tables: dict[_Path, list[tuple[str, _Pair]]] = {}
    tables["rules",] = _table(common, targets, Role.ACTIVATION)
    # A list whose rules are the same for weights and activations needs only one table.
    if (params := _table(common, targets, Role.PARAM)) != tables["rules",]:
        tables["params",] = params
    for mode in dict.fromkeys(mode for _, mode in replaced.values()):
        own = _in_mode(pairs, replaced, mode)
        problems += _disagreements(own, targets, [], is_ordered=is_ordered)
        tables["modes", mode] = _table(own, targets, Role.ACTIVATION)
    raise_problems(problems)
    # Under `order = "rules"`, a dim can also take a mesh axis of size 1, as in flax and JAX.
    policy = {"order": "rules"}
    if semantics == "flax":
        policy["conflict"] = "next"
    named = {axis for pair in pairs for axis in pair.axes} | {*STANDARD_MESH_AXES}
    idle = [axis for axis in sizes if axis not in named]
    if idle:
        policy["idle"] = "+".join(idle)
        notes.append(f"mesh axes that no rule names are idle: {', '.join(idle)}")
    # The strategy declares the axes that the vocabulary lacks. The description of an axis has the
    # first name that is mapped to it.
    own_names: dict[str, str] = {}
    for name, target in targets.items():
        if canonical_axis(axis_in(target)) not in {EMPTY, *KNOWN_AXES}:
            own_names.setdefault(file_name(axis_in(target)), f"{name} in the imported rules")
    other: dict[str, Any] = {"mesh": sizes, "axes": own_names, "policy": policy}
    data, origin = _written(tables, {key: value for key, value in other.items() if value})
    return Imported(strategy=Strategy._from_data(data, origin), names=targets, notes=tuple(notes))


_Path = tuple[str, ...]


def _written(
    tables: Mapping[_Path, Sequence[tuple[str, _Pair]]], other: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[_Path, str]]:
    """Return the data of a strategy, and the origin of each rule: where it was written."""
    data: dict[str, Any] = {"version": 1, **other}
    origin: dict[_Path, str] = {}
    for path, table in tables.items():
        if len(path) == 1:
            # Write a list of tables with one rule each, to keep the order of all rules.
            data[path[0]] = [{axis: pair.text} for axis, pair in table]
            for at, (axis, pair) in enumerate(table):
                origin[(*path, str(at), axis)] = pair.source
            continue
        chains: dict[str, list[_Pair]] = {}
        for axis, pair in table:
            chains.setdefault(axis, []).append(pair)
        data.setdefault("modes", {})[path[1]] = {
            axis: " | ".join(pair.text for pair in chain) for axis, chain in chains.items()
        }
        for axis, chain in chains.items():
            # Several rules became the candidates of one rule, so its origin names several places.
            origin[(*path, axis)] = ", ".join(pair.source for pair in chain)
    return data, origin


# No model has so many rules. The time to build a strategy grows with the square of their number.
_MOST_RULES = 10_000


def _read(rules: Any, sizes: Mapping[str, int], source: str | Sequence[str]) -> list[_Pair]:
    """Return checked rules.

    Raises:
      ShardingError: Rules cannot be read, or name absent mesh axes. The error lists all such rules.
    """
    if not isinstance(rules, (list, tuple)):
        what = f"rules is {type(rules).__name__}, not a list of pairs"
        raise StrategyError(what, fix='write [("embed", "fsdp"), ("mlp", "tp")]')
    if not isinstance(source, str) and len(source) != len(rules):
        what = f"source has {len(source)} places for {len(rules)} rules"
        raise StrategyError(what, fix="pass one text, or one place for each rule")
    if len(rules) > _MOST_RULES:
        what = f"there are {len(rules)} rules, and at most {_MOST_RULES} are read"
        raise StrategyError(what, fix="keep the rules of names that the model has")
    pairs, problems = [], []
    for at, rule in enumerate(rules):
        place = f"{source}[{at}]" if isinstance(source, str) else source[at]
        fault = _fault(rule, sizes)
        if fault is not None:
            problems.append(dataclasses.replace(fault, path=place))
            continue
        name, value = rule
        # A rule without mesh axes is the last of its name. It replicates the dim, or leaves it to
        # the compiler.
        end = UNCONSTRAINED if value is PartitionSpec.UNCONSTRAINED else REPLICATED
        pairs.append(_Pair(name=name, axes=entry_names(value), source=place, end=end))
    raise_problems(problems)
    return pairs


def _fault(rule: Any, sizes: Mapping[str, int]) -> Problem | None:
    what, fix = "", 'write ("embed", "fsdp"), ("embed", ("fsdp", "sp")) or ("embed", None)'
    error: type[ShardingError] = StrategyError
    if not isinstance(rule, (tuple, list)) or len(rule) != 2 or not isinstance(rule[0], str):
        what = f"the rule {rule!r} is not a pair of a name and mesh axes"
        return Problem(error=error, what=what, fix=fix)
    value = (rule[1],) if isinstance(rule[1], str) else rule[1]
    if value is None or value is PartitionSpec.UNCONSTRAINED:
        return None
    if not isinstance(value, (tuple, list)) or not all(isinstance(axis, str) for axis in value):
        what = f"the rule of {rule[0]!r} has {rule[1]!r} instead of mesh axes"
    elif absent := [axis for axis in value if axis not in sizes]:
        error = MissingMeshAxisError
        what = f"the rule of {rule[0]!r} names {', '.join(absent)}, which the mesh lacks"
        fix = f"add it to the mesh, with size 1 if need be; the mesh has {', '.join(sizes)}"
    elif len({*value}) < len(value):
        what, fix = f"the rule of {rule[0]!r} has a mesh axis twice", "name each mesh axis once"
    return Problem(error=error, what=what, fix=fix) if what else None


def _until_replicated(pairs: Sequence[_Pair], notes: list[str]) -> list[_Pair]:
    """Drop the rules of a name after a rule without mesh axes, because they never apply."""
    ended: dict[str, str] = {}
    kept = []
    for pair in pairs:
        if pair.name in ended:
            does = "replicates" if ended[pair.name] == REPLICATED else "leaves the dim to XLA"
            notes.append(f"never applies, since an earlier rule {does}: {pair}")
            continue
        kept.append(pair)
        # flax stops at the first rule that can be applied. A rule without mesh axes can always be
        # applied.
        if not pair.axes:
            ended[pair.name] = pair.end
    return kept


def _one_each(pairs: Sequence[_Pair], semantics: Semantics, notes: list[str]) -> list[_Pair]:
    """Return the last rule of each name; under "strict" a second rule is an error."""
    last: dict[str, _Pair] = {}
    problems = []
    for pair in pairs:
        earlier = last.get(pair.name)
        if earlier is not None and semantics == "strict":
            what = f"{pair.name!r} has a second rule; the first is {earlier.text!r}"
            fix = 'drop one, or pass semantics="flax" if the list is ordered'
            where = pair.source
            problems.append(Problem(error=StrategyError, what=what, path=where, fix=fix))
        elif earlier is not None:
            notes.append(f"replaced by a later rule of the name: {earlier}")
        last[pair.name] = pair
    raise_problems(problems)
    # nnx makes a dict of the rules (`flax.core.spmd`), so a later rule replaces an earlier one.
    return list(last.values())


def _replaced(
    pairs: Sequence[_Pair], names: Names, modes: Modes, notes: list[str]
) -> dict[str, tuple[str, str]]:
    """Return the names whose rules become rules of a mode: name -> (name in other modes, mode)."""
    known = {pair.name for pair in pairs}
    replaced: dict[str, tuple[str, str]] = {}
    for name, (other, mode) in modes.items():
        if name not in known or name in names:
            continue
        if other in names and names[other][1] is Role.PARAM:
            notes.append(f"{name} applies in all modes, because {other} is a name of weights")
            continue
        if other in known or other in names:
            replaced[name] = (other, mode_name(parse_mode(mode)))
        else:
            notes.append(f"{name} applies in all modes, because {other} has no rule")
    for mode in dict.fromkeys(mode for _, mode in replaced.values()):
        own = [name for name, (_, each) in replaced.items() if each == mode]
        texts = [f"{name} as {replaced[name][0]}" for name in own]
        # The table of a mode has one entry per name. Only [rules] and [params] may be lists of
        # tables, which keep the order of all rules.
        in_mode = _in_mode(pairs, replaced, mode)
        runs = [name for name, _ in itertools.groupby(pair.name for pair in in_mode)]
        if len({*runs}) < len(runs):
            replaced = {name: replaced[name] for name in replaced if name not in own}
            text = ", ".join(own)
            notes.append(f"other names have rules in between, so these apply in all modes: {text}")
        else:
            notes.append(f"rules of mode {mode}: {', '.join(texts)}")
    return replaced


def _in_mode(
    pairs: Sequence[_Pair], replaced: Mapping[str, tuple[str, str]], mode: str
) -> list[_Pair]:
    """Return the rules that apply in a mode."""
    absent = {other for other, each in replaced.values() if each == mode}
    absent |= {name for name, (_, each) in replaced.items() if each != mode}
    return [pair for pair in pairs if pair.name not in absent]


def _targets(
    pairs: Sequence[_Pair], names: Names, notes: list[str]
) -> dict[str, tuple[str, Role] | str]:
    """Return the axis and role of each name in the list."""
    targets: dict[str, Any] = {**names}
    ruled = dict.fromkeys(pair.name for pair in pairs)
    if unruled := [
        name for name, target in names.items() if name not in ruled and axis_in(target) != EMPTY
    ]:
        notes.append(f"names without a rule are replicated: {', '.join(unruled)}")
    taken = {file_name(axis_in(target)) for target in targets.values()}
    own = [name for name in ruled if name not in targets]
    for name in own:
        axis = f"logical_{plain_name(name)}"
        count = 2
        # Without the number, names that differ only in punctuation or case would become one axis.
        while axis.lower() in taken:
            axis = f"{axis.rstrip('0123456789_')}_{count}"
            count += 1
        taken.add(axis.lower())
        targets[name] = canonical_axis(axis)
    if own and names:
        notes.append(f"names that became axes of their own: {', '.join(own)}")
    return targets


def _disagreements(
    pairs: Sequence[_Pair], targets: Mapping[str, Any], notes: list[str], *, is_ordered: bool
) -> list[Problem]:
    """Return a problem for names that become one axis in one role, but have different rules.

    In ordered rules, two equal rules count as different if a rule between them uses one of their
    mesh axes.
    """
    chains: dict[str, list[_Pair]] = {}
    for pair in pairs:
        chains.setdefault(pair.name, []).append(pair)
    first: dict[Any, str] = {}
    problems = []
    for name, chain in chains.items():
        other = first.setdefault(targets[name], name)
        if other == name:
            continue
        texts = [" | ".join(pair.text for pair in chains[each]) for each in (other, name)]
        between = _between(pairs, chains[other], chain, targets) if is_ordered else None
        if texts[0] == texts[1] and between is None:
            notes.append(f"{name} has the rule of {other}, and became the same axis")
            continue
        place = chains[other][0].source
        what = (
            f'{name} = "{texts[1]}" and {other} = "{texts[0]}" ({place}) cannot be the same axis '
            "in one role"
        )
        if texts[0] == texts[1]:
            what += f", because {between} is between them"
        fix = "leave one of them out of names=, so that it becomes an axis of its own"
        place = chain[0].source
        problems.append(Problem(error=StrategyError, what=what, path=place, fix=fix))
    return problems


def _between(
    pairs: Sequence[_Pair],
    first: Sequence[_Pair],
    second: Sequence[_Pair],
    targets: Mapping[str, Any],
) -> _Pair | None:
    """Return a rule of another axis that stands between two rules and uses their mesh axes."""
    places = {id(pair): at for at, pair in enumerate(pairs)}
    for one, other in zip(first, second, strict=False):
        # Rules apply in the order of the list. So only rules that stand between these two rules can
        # take a mesh axis after the earlier rule and before the later rule.
        start, end = sorted((places[id(one)], places[id(other)]))
        for pair in pairs[start:end]:
            is_other = targets[pair.name] != targets[one.name]
            if is_other and not {*one.axes}.isdisjoint(pair.axes):
                return pair
    return None


def _table(
    pairs: Sequence[_Pair], targets: Mapping[str, Any], role: Role
) -> list[tuple[str, _Pair]]:
    """Return the rules of one role, in the order of the list.

    Rules of the other role are kept too, because the order of all rules matters. A name of the
    other role is left out only if its axis also has a name of this role.
    """
    own = {
        axis_in(target): name
        for name, target in targets.items()
        if isinstance(target, str) or target[1] is role
    }
    left_out: set[str] = set()
    first_names: dict[str, str] = {}
    table = []
    for pair in pairs:
        target = targets[pair.name]
        axis = axis_in(target)
        if not isinstance(target, str) and target[1] is not role and axis in own:
            left_out.add(axis)
            continue
        # Names with the same rule may have become one axis. The rules of the first name are used.
        if first_names.setdefault(axis, pair.name) == pair.name:
            table.append((file_name(axis), pair))
    # A name of this role without a rule is replicated, whatever the rule of the other role says.
    unruled = [axis for axis in own if axis in left_out and axis not in first_names]
    return table + [
        (file_name(axis), _Pair(name=own[axis], axes=(), source="no rule")) for axis in unruled
    ]
