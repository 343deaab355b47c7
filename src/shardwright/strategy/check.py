"""What a strategy's names mean: every problem of its tables, their overlay, and the rules that they compile to."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from shardwright.errors import (
    MissingMeshAxisError,
    Problem,
    ShardingError,
    StrategyError,
    UnknownAxisError,
    did_you_mean,
    raise_problems,
)
from shardwright.mesh.build import parse_mesh
from shardwright.resolution.decisions import RuleRef
from shardwright.resolution.path_patterns import PathPattern
from shardwright.resolution.rules import (
    OWN_ATTENTION,
    POLICY_PRESETS,
    AxisRules,
    Conflict,
    Fallback,
    Indivisible,
    Missing,
    Policy,
    Rank,
    Rule,
    TensorRules,
    build_rules,
    foreign_mesh_axes,
    parse_rule,
)
from shardwright.strategy.limits import MOST_PROBLEMS, first_problems
from shardwright.strategy.origin import KeyPath, Origin, source_of, where
from shardwright.vocabulary.axes import (
    KNOWN_AXES,
    PARALLELISM_AXES,
    REPLICATED,
    STANDARD_MESH_AXES,
    UNCONSTRAINED,
    Role,
    axis_label,
    canonical_axis,
    file_name,
)

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


# Of all patterns of a strategy together: what a look-up by path costs at most for each character.
MOST_STEPS: Final = 20_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What the texts of a strategy's data say, parsed once.

    Attributes:
      tables: the rules of every table by key path and axis; those that do not parse are left out.
      gather: the rule of `policy.gather`, one candidate or "-"; None where it is no such rule.
      zero1: the rule of `policy.zero1`; None where it does not parse.
      idle: the rule of `policy.idle`, one candidate or "-"; None where it is no such rule.
      problems: what is wrong with them.
    """

    tables: dict[KeyPath, dict[str, Rule]]
    gather: Rule | None
    zero1: Rule | None
    idle: Rule | None
    problems: tuple[Problem, ...]


def rule_tables(data: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Mapping[str, Any], Role]]:
    """Yield the key path, the rules and the role of every table that holds rules; malformed ones are passed over."""
    for name, role in (("rules", Role.ACTIVATION), ("params", Role.PARAM)):
        if isinstance(data.get(name), Mapping):
            yield (name,), data[name], role
    modes = data.get("modes")
    for mode, table in modes.items() if isinstance(modes, Mapping) else ():
        if isinstance(table, Mapping):
            yield (
                ("modes", mode),
                {key: rule for key, rule in table.items() if key != "params"},
                Role.ACTIVATION,
            )
            if isinstance(table.get("params"), Mapping):
                yield ("modes", mode, "params"), table["params"], Role.PARAM
    tensors = data.get("tensors")
    for at, entry in enumerate(tensors if isinstance(tensors, list) else ()):
        if isinstance(entry, Mapping):
            yield (
                ("tensors", str(at)),
                {key: rule for key, rule in entry.items() if key != "match"},
                Role.PARAM,
            )


def data_problems(data: Mapping[str, Any], origin: Origin) -> Iterator[Problem]:
    """Yield every problem of a strategy's data that its types do not show.

    A fragment (no `[mesh]`) is meant to overlay another strategy, so names that the other may declare are left to `compile`.
    """
    written = parse_rules(data, origin)
    yield from written.problems
    if data.get("version") is True:  # which Python calls equal to 1
        path = where(("version",), origin)
        yield Problem(
            error=StrategyError,
            what="a whole number is wanted, not True",
            path=path,
            fix="write version = 1",
        )
    yield from _pattern_problems(data, origin)
    yield from _own_axis_problems(data, origin)
    if data.get("mesh"):
        yield from _mesh_problems(data, origin)
        yield from name_problems(data, written, origin=origin)


def name_problems(
    data: Mapping[str, Any], written: Written, *, origin: Origin
) -> Iterator[Problem]:
    """Yield the axes and the mesh axes that nothing declares."""
    own = data.get("axes")
    known = KNOWN_AXES | {
        canonical_axis(name)
        for name in (own if isinstance(own, Mapping) else ())
        if isinstance(name, str)
    }
    labels = [*sorted(file_name(axis) for axis in known), *PARALLELISM_AXES.values()]
    for path, table, _ in rule_tables(data):
        for key in table:
            # Where a table stands instead of a rule, its type is the problem.
            if (
                isinstance(key, str)
                and canonical_axis(key) not in known
                and not isinstance(table[key], Mapping)
            ):
                bare = axis_label(key).lower()
                hint = did_you_mean(bare, labels)
                declare = f'an axis of your own is declared by [axes] {key} = "what it is"'
                # Only the underscores or the case are wrong: it is no axis of the user's own.
                fix = hint if canonical_axis(bare) in known else f"{hint} {declare}".strip()
                yield Problem(
                    error=UnknownAxisError,
                    what=f"unknown axis {key!r}",
                    path=where((*path, key), origin),
                    fix=fix,
                )
    yield from _mesh_name_problems(data, written, origin)


def _mesh_name_problems(
    data: Mapping[str, Any], written: Written, origin: Origin
) -> Iterator[Problem]:
    mesh = tuple(data.get("mesh") or ()) if isinstance(data.get("mesh"), Mapping) else ()
    rules = [(path, rule) for path, table in written.tables.items() for rule in table.values()]
    rules += [(("policy",), rule) for rule in (written.gather, written.zero1) if rule is not None]
    idle = [(("policy",), written.idle)] if written.idle is not None else []
    for path, rule in [*rules, *idle]:
        for name in foreign_mesh_axes(rule.mesh_axes, mesh):
            known = [*mesh, *STANDARD_MESH_AXES]
            yield Problem(
                error=MissingMeshAxisError,
                what=f"mesh axis {name!r} is neither in [mesh] nor a standard one ({', '.join(STANDARD_MESH_AXES)})",
                path=where((*path, rule.ref.key), origin),
                rule=str(rule.ref),
                fix=_meant(name, list(dict.fromkeys(known))),
            )
    at = where(("policy", "idle"), origin)
    for name in written.idle.mesh_axes if written.idle is not None else ():
        namers = [rule for _, rule in rules if name in rule.mesh_axes]
        if namers:
            fix = f"take {name} out of idle, or out of the rule"
            what = f"{name!r} is idle, and a rule names it"
            yield Problem(error=StrategyError, what=what, path=at, rule=str(namers[0].ref), fix=fix)


def _meant(name: str, known: Sequence[str]) -> str:
    """Return how to fix a mesh axis that is none: what was probably meant."""
    if name.lower() in ("none", "null"):
        return 'for replicated write "-"'
    words = [word for word in re.split(r"\W+", name) if word]
    if len(words) > 1 and all(word in known for word in words):
        return f'mesh axes are joined by "+": did you mean "{"+".join(words)}"?'
    meant = PARALLELISM_AXES.get(name) or axis_label(name).lower()
    return (
        did_you_mean(meant, known)
        or f"add it to [mesh], {name} = 1, or name one of {', '.join(known)}"
    )


def parse_rules(data: Mapping[str, Any], origin: Origin) -> Written:
    """Return the rules of every table and those of the policy, with every problem of their texts."""
    tables: dict[KeyPath, dict[str, Rule]] = {}
    problems: list[Problem] = []
    for path, table, role in rule_tables(data):
        parsed = tables.setdefault(path, {})
        for key, text in table.items():
            if not (isinstance(key, str) and isinstance(text, str)):
                continue
            full = (*path, key)
            rule = _parsed(text, full, origin, problems, key=file_name(canonical_axis(key)))
            if rule is None:
                continue
            if role is Role.PARAM and rule.fallback is Fallback.UNCONSTRAINED:
                problems.append(
                    Problem(
                        error=StrategyError,
                        what='"?" is for activations: a parameter must lie somewhere',
                        path=where(full, origin),
                        rule=str(rule.ref),
                        fix='write "-" for replicated, or mesh axes',
                    )
                )
            parsed[canonical_axis(key)] = rule
    gather, zero1, idle = (
        _policy_rule(key, data, origin, problems) for key in ("gather", "zero1", "idle")
    )
    return Written(tables=tables, gather=gather, zero1=zero1, idle=idle, problems=tuple(problems))


def _parsed(
    text: str, path: KeyPath, origin: Origin, problems: list[Problem], *, key: str
) -> Rule | None:
    """Return the rule of a key, or None after its problems were added."""
    try:
        return parse_rule(
            text,
            ref=RuleRef(
                key=key, text=text, table=".".join(path[:-1]), source=source_of(path, origin)
            ),
        )
    except ShardingError as error:
        problems += [_at(problem, path, origin) for problem in error.problems]
        return None


def _policy_rule(
    key: str, data: Mapping[str, Any], origin: Origin, problems: list[Problem]
) -> Rule | None:
    """Return the rule of a key of `[policy]`, "-" where it has none, or None after its problems were added."""
    policy = data.get("policy")
    text = policy.get(key, REPLICATED) if isinstance(policy, Mapping) else REPLICATED
    path = ("policy", key)
    rule = _parsed(text if isinstance(text, str) else REPLICATED, path, origin, problems, key=key)
    if rule is None:
        return None
    what = fix = ""
    if key != "zero1" and (
        len(rule.candidates) + bool(rule.fallback) != 1 or rule.fallback is Fallback.UNCONSTRAINED
    ):
        what = f'"{text}" is not one set of mesh axes'
        fix = 'write "fsdp+sp", or "-" to gather nothing'
        if key == "idle":
            fix = 'write "replica", "replica+other" for several, or "-" for none'
    elif rule.fallback is Fallback.UNCONSTRAINED:
        what, fix = (
            '"?" is for activations: optimizer state must lie somewhere',
            'write "-", or mesh axes such as "dp | -"',
        )
    if what:
        problems.append(Problem(error=StrategyError, what=what, path=where(path, origin), fix=fix))
        return None
    return rule


def _pattern_problems(data: Mapping[str, Any], origin: Origin) -> list[Problem]:
    problems: list[Problem] = []
    steps = 0
    tensors = data.get("tensors")
    for at, entry in enumerate(tensors if isinstance(tensors, list) else ()):
        pattern = entry.get("match") if isinstance(entry, Mapping) else None
        try:
            steps += PathPattern(pattern if isinstance(pattern, str) else "").steps
        except StrategyError as error:
            problems += [
                _at(problem, ("tensors", str(at), "match"), origin) for problem in error.problems
            ]
        else:
            if isinstance(entry, Mapping) and isinstance(pattern, str) and len(entry) == 1:
                path = where(("tensors", str(at)), origin)
                problems.append(
                    Problem(
                        error=StrategyError,
                        what="the entry has no rule",
                        path=path,
                        fix='add one, such as embed = "-"',
                    )
                )
    return problems if steps <= MOST_STEPS else [*problems, _steps_problem(steps, origin)]


def _steps_problem(steps: int, origin: Origin) -> Problem:
    what = (
        f"the patterns have {steps} steps together, at most {MOST_STEPS} are searched for each path"
    )
    return Problem(
        error=StrategyError,
        what=what,
        path=where(("tensors",), origin),
        fix="use fewer entries, or shorter patterns",
    )


def _own_axis_problems(data: Mapping[str, Any], origin: Origin) -> list[Problem]:
    own = data.get("axes")
    problems = []
    for name in own if isinstance(own, Mapping) else ():
        path = where(("axes", str(name)), origin)
        if isinstance(name, str) and canonical_axis(name) in KNOWN_AXES:
            what = f"{name!r} is an axis of the vocabulary already"
            problems.append(
                Problem(
                    error=StrategyError,
                    what=what,
                    path=path,
                    fix="drop the line, or choose another name",
                )
            )
        elif not re.fullmatch(
            r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?|__[A-Z]([A-Z0-9_]*[A-Z0-9])?__", str(name)
        ) or name in (
            "params",
            "match",
        ):
            what = f"{name!r} cannot be the name of an axis"
            problems.append(
                Problem(
                    error=StrategyError,
                    what=what,
                    path=path,
                    fix="use letters, digits and _, for instance rotary_dim",
                )
            )
    return problems


def _mesh_problems(data: Mapping[str, Any], origin: Origin) -> list[Problem]:
    mesh, dcn, types = data.get("mesh"), data.get("dcn") or {}, data.get("axis_types")
    sizes_good = isinstance(mesh, Mapping) and all(type(size) is int for size in mesh.values())
    if not (
        sizes_good and isinstance(dcn, Mapping) and all(type(size) is int for size in dcn.values())
    ):
        return []
    problems = []
    try:
        parse_mesh(dict(mesh), dcn=dict(dcn) or None)  # type: ignore[arg-type]
    except ShardingError as error:
        problems += [_at(problem, ("mesh",), origin) for problem in error.problems]
    for name in types if isinstance(types, Mapping) else ():
        if name not in mesh:  # type: ignore[operator]
            path = where(("axis_types", str(name)), origin)
            hint = did_you_mean(str(name), mesh) or "name mesh axes of [mesh]"  # type: ignore[arg-type]
            problems.append(
                Problem(
                    error=MissingMeshAxisError,
                    what=f"mesh axis {name!r} is not in [mesh]",
                    path=path,
                    fix=hint,
                )
            )
    return problems


def compile_rules(data: Mapping[str, Any], origin: Origin, policy: Any) -> AxisRules:
    """Compile a strategy's data; raises every problem at once."""
    written = parse_rules(data, origin)
    raise_problems(
        first_problems(
            itertools.chain(written.problems, name_problems(data, written, origin=origin))
        )
    )
    tensors = [
        TensorRules(
            match=entry["match"], rules=tuple(sorted(written.tables["tensors", str(at)].items()))
        )
        for at, entry in enumerate(data.get("tensors", ()))
    ]
    layered = {
        ".".join(path): table for path, table in written.tables.items() if path[0] != "tensors"
    }
    own = sorted(canonical_axis(name) for name in data.get("axes", {}))
    return build_rules(
        layered,
        tensors=tensors,
        user_axes=own,
        policy=_policy(policy, written),
        attention={
            key: RuleRef(
                key=key, text=name, table="attention", source=source_of(("attention", key), origin)
            )
            for key, name in data.get("attention", {}).items()
        },
    )


def _policy(table: Any, written: Written) -> Policy:
    """Return what `[policy]` says: "-" gathers nothing, and shards no optimizer state."""
    base = POLICY_PRESETS[table.preset]
    return Policy(
        indivisible=Indivisible(table.indivisible or base.indivisible),
        conflict=Conflict(table.conflict or base.conflict),
        gather=written.gather.mesh_axes if written.gather is not None else (),
        idle=written.idle.mesh_axes if written.idle is not None else (),
        zero1=written.zero1 if written.zero1 is not None and written.zero1.candidates else None,
        missing=Missing(table.missing or base.missing),
        rank=Rank(table.rank or base.rank),
    )


def _at(problem: Problem, path: KeyPath, origin: Origin) -> Problem:
    return dataclasses.replace(problem, path=where(path, origin), axis="")


def overlay_problems(
    base: Mapping[str, Any], other: Mapping[str, Any], *, below: Origin, above: Origin
) -> list[Problem]:
    """Return what an overlay leaves open: whether one word for all mesh axes still holds for those that a table does not name."""
    low, high = base.get("axis_types"), other.get("axis_types")
    if low is None or high is None or isinstance(low, Mapping) == isinstance(high, Mapping):
        return []
    word = high if isinstance(low, Mapping) else low
    example = ", ".join(f'{name} = "{word}"' for name in merge(base, other).get("mesh") or ("dp",))
    source = source_of(("axis_types",), below)
    texts = [f'"{one}"' if isinstance(one, str) else "a table by mesh axis" for one in (high, low)]
    return [
        Problem(
            error=StrategyError,
            what=f"{texts[0]} over {texts[1]}{f' ({source})' if source else ''}: what holds for the axes that the table does not name?",
            path=where(("axis_types",), above),
            fix=f"write both the same way: as tables, axis_types = {{{example}}}, or each as one word for all mesh axes",
        )
    ]


def merge(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Overlay plain data, key by key; lists of `other` come first."""
    merged = dict(base)
    for key, value in other.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            merged[key] = [*value, *old]
        else:
            merged[key] = value
    return merged


def merge_origin(base: Origin, other: Origin, data: Mapping[str, Any]) -> Origin:
    """Overlay origins like `merge`, `data` being what the other sets: the base's `[[tensors]]` move back behind the other's.

    A key that the other sets without an origin has none, whatever the base's line was.
    """
    shift = len(data.get("tensors", ()))
    moved = {
        (path[0], str(int(path[1]) + shift), *path[2:])
        if path[:1] == ("tensors",) and len(path) > 1
        else path: source
        for path, source in base.items()
    }
    return {**moved, **dict.fromkeys(_key_paths(data, ()), ""), **other}


def _key_paths(data: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yield the key path of every value that is no table."""
    entries = (
        data.items()
        if isinstance(data, Mapping)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, value in entries:
        yield from _key_paths(value, (*path, str(key)))
    if not isinstance(data, (Mapping, list)):
        yield path


_TYPES = {
    "int_type": ("a whole number is wanted", "write a whole number"),
    "dict_type": ("a table is wanted", "write a table: [{table}] and a line for each key"),
    "model_type": ("a table is wanted", "write a table: [{table}] and a line for each key"),
    "list_type": ("entries are wanted", "write [[{table}]] with two brackets above each entry"),
}


def from_pydantic(error: ValidationError, model: type[BaseModel], origin: Origin) -> list[Problem]:
    """Return a pydantic error as problems with key path and fix."""
    problems: dict[Problem, None] = {}
    for entry in error.errors():
        if len(problems) > MOST_PROBLEMS:
            break
        if "constrained-str" in entry["loc"] or _other_half(entry):
            continue  # of a union, whose other half tells
        path = tuple(
            str(part)
            for part in entry["loc"]
            if not str(part).startswith(("literal[", "dict[", "function-after["))
        )
        what, fix = _explained(entry, path, model)
        if path and path[-1] == "[key]":
            path = path[:-1]
        problem = Problem(error=StrategyError, what=what, path=where(path, origin), fix=fix)
        problems.setdefault(problem)
    return list(problems)


def _other_half(entry: Any) -> bool:
    """Tell whether an entry judges `axis_types` as what it was not meant to be: one word for all, or a table."""
    if entry["loc"][:1] != ("axis_types",) or len(entry["loc"]) < 2:
        return False
    return (
        isinstance(entry["input"], Mapping)
        if str(entry["loc"][1]).startswith("literal[")
        else entry["type"] == "dict_type"
    )


def _explained(entry: Any, path: KeyPath, model: type[BaseModel]) -> tuple[str, str]:
    """Return what is wrong and how to fix it, in our words."""
    given, kind = entry["input"], entry["type"]
    if kind == "extra_forbidden":
        return "unknown key", did_you_mean(path[-1], _known_keys(model, path)) or "drop it"
    if kind == "missing":
        return "required key is missing", "add it"
    if kind == "value_error":
        return entry["msg"].removeprefix("Value error, "), "keep one of them"
    if kind == "string_type" and path[0] == "modes" and isinstance(given, Mapping):
        return (
            "a mode has no such table",
            f"write its rules right under [{'.'.join(path[:2])}], those of parameters under [{'.'.join(path[:2])}.params]",
        )
    if kind == "string_type":
        return f"text is wanted, not {given!r}", _as_text(given, path)
    if kind != "literal_error":
        wanted, fix = _TYPES.get(kind, (entry["msg"], ""))
        return f"{wanted}, not {given!r}", fix.format(
            table=".".join(part for part in path if not part.isdigit())
        )
    if path == ("version",):
        return (
            f"version {given!r} is not one that this shardwright reads",
            "write version = 1, or upgrade shardwright",
        )
    known = re.findall(r"'([^']*)'", entry["ctx"]["expected"])
    hint = did_you_mean(str(given), known)
    what = f"unknown mode {given!r}" if path[0] == "modes" else f"{given!r} is not a choice here"
    own = f", or {OWN_ATTENTION}NAME for one that you register" if path[0] == "attention" else ""
    return what, f"{hint} write one of {', '.join(known)}{own}".strip()


def _as_text(given: Any, path: KeyPath) -> str:
    """Return how to write as text what was given in its place: a list of mesh axes as the rules that it may mean."""
    gather = path in (("policy", "gather"), ("policy", "idle"))
    is_rule = (
        gather
        or path == ("policy", "zero1")
        or (path[0] in ("rules", "params", "modes", "tensors") and path[-1] != "match")
    )
    if not is_rule:
        return "write text in quotes"
    if (
        not isinstance(given, (list, tuple))
        or not given
        or not all(isinstance(one, str) for one in given)
    ):
        return 'write text, such as "fsdp+sp"' if gather else 'write text, such as "tp | -"'
    joined = (
        ""
        if {REPLICATED, UNCONSTRAINED} & {*given}
        else f'"{"+".join(given)}" for all of them at once'
    )
    either = "" if gather else f'"{" | ".join(given)}" for the first that fits'
    return f"write {', '.join(part for part in (joined, either) if part)}"


def _known_keys(model: type[BaseModel], path: KeyPath) -> list[str]:
    table = model.model_fields.get(path[0])
    if len(path) == 1 or table is None:
        return list(model.model_fields)
    return list(getattr(table.annotation, "model_fields", {}))
