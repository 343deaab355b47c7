"""What a strategy's names mean: every problem of its tables, their overlay, and the rules that they compile to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardwright.axes import KNOWN_AXES, STANDARD_MESH_AXES, Role, canonical_axis, file_name
from shardwright.errors import (
    MissingMeshAxisError,
    Problem,
    ShardingError,
    StrategyError,
    UnknownAxisError,
    did_you_mean,
    raise_problems,
)
from shardwright.mesh import parse_mesh
from shardwright.provenance import RuleRef
from shardwright.rules import (
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
    check_mesh_axes,
    parse_rule,
)

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

Origin = dict[tuple[str, ...], str]
KeyPath = tuple[str, ...]


def rule_tables(data: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Mapping[str, Any], Role]]:
    """Yield the key path, the rules and the role of every table that holds rules; malformed ones are passed over."""
    for name, role in (("rules", Role.ACTIVATION), ("params", Role.PARAM)):
        if isinstance(data.get(name), Mapping):
            yield (name,), data[name], role
    modes = data.get("modes")
    for mode, table in modes.items() if isinstance(modes, Mapping) else ():
        if isinstance(table, Mapping):
            yield ("modes", mode), {key: rule for key, rule in table.items() if key != "params"}, Role.ACTIVATION
            if isinstance(table.get("params"), Mapping):
                yield ("modes", mode, "params"), table["params"], Role.PARAM
    tensors = data.get("tensors")
    for at, entry in enumerate(tensors if isinstance(tensors, list) else ()):
        if isinstance(entry, Mapping):
            yield ("tensors", str(at)), {key: rule for key, rule in entry.items() if key != "match"}, Role.PARAM


def check_data(data: Mapping[str, Any], origin: Origin) -> list[Problem]:
    """Return every problem of a strategy's data that its types do not show.

    A fragment (no `[mesh]`) is meant to overlay another strategy, so names that the other may declare are left to `compile`.
    """
    _, problems = _parse_tables(data, origin)
    if data.get("version") is True:  # which Python calls equal to 1
        problems.append(
            Problem(
                error=StrategyError, what="a whole number is wanted, not True", path=where(("version",), origin), fix="write version = 1"
            )
        )
    problems += _check_patterns(data, origin)
    problems += _check_own_axes(data, origin)
    if data.get("mesh"):
        problems += _check_mesh(data, origin)
        problems += check_names(data, origin)
    return problems


def check_names(data: Mapping[str, Any], origin: Origin) -> list[Problem]:
    """Return the axes and the mesh axes that nothing declares."""
    problems: list[Problem] = []
    own = data.get("axes")
    known = KNOWN_AXES | {canonical_axis(name) for name in (own if isinstance(own, Mapping) else ()) if isinstance(name, str)}
    labels = sorted(file_name(axis) for axis in known)
    for path, table, _ in rule_tables(data):
        for key in table:
            # Where a table stands instead of a rule, its type is the problem.
            if isinstance(key, str) and canonical_axis(key) not in known and not isinstance(table[key], Mapping):
                hint = did_you_mean(key.lower(), labels)
                problems.append(
                    Problem(
                        error=UnknownAxisError,
                        what=f"unknown axis {key!r}",
                        path=where((*path, key), origin),
                        fix=f'{hint + " " if hint else ""}an axis of your own is declared by [axes] {key} = "what it is"',
                    )
                )
    return problems + _check_mesh_names(data, origin)


def _check_mesh_names(data: Mapping[str, Any], origin: Origin) -> list[Problem]:
    mesh = tuple(data.get("mesh") or ()) if isinstance(data.get("mesh"), Mapping) else ()
    tables, _ = _parse_tables(data, origin)
    named = [(path, rule.ref, rule.mesh_axes) for path, table in tables.items() for rule in table.values()]
    named.append((("policy",), RuleRef(key="gather", text=_policy_text(data, "gather"), table="policy"), _gather(data, origin)[0]))
    zero1, _ = _zero1(data, origin)
    named += [] if zero1 is None else [(("policy",), zero1.ref, zero1.mesh_axes)]
    problems = []
    for path, ref, names in named:
        for name in check_mesh_axes(names, mesh):
            known = [*mesh, *STANDARD_MESH_AXES]
            problems.append(
                Problem(
                    error=MissingMeshAxisError,
                    what=f"mesh axis {name!r} is neither in [mesh] nor a standard one ({', '.join(STANDARD_MESH_AXES)})",
                    path=where((*path, ref.key), origin),
                    rule=str(ref),
                    fix='for replicated write "-"'
                    if name.lower() in ("none", "null")
                    else did_you_mean(name, known) or f"add it to [mesh], {name} = 1, or name one of {', '.join(dict.fromkeys(known))}",
                )
            )
    return problems


def parse_tables(data: Mapping[str, Any], origin: Origin) -> dict[KeyPath, dict[str, Rule]]:
    """Return the rules of every table as they are written, by key path and axis; those that do not parse are left out."""
    return _parse_tables(data, origin)[0]


def _parse_tables(data: Mapping[str, Any], origin: Origin) -> tuple[dict[KeyPath, dict[str, Rule]], list[Problem]]:
    tables: dict[KeyPath, dict[str, Rule]] = {}
    problems: list[Problem] = []
    for path, table, role in rule_tables(data):
        parsed = tables.setdefault(path, {})
        for key, text in table.items():
            if not (isinstance(key, str) and isinstance(text, str)):
                continue
            full = (*path, key)
            ref = RuleRef(key=file_name(canonical_axis(key)), text=text, table=".".join(path), source=source_of(full, origin))
            try:
                rule = parse_rule(text, ref=ref)
            except ShardingError as error:
                problems += [_at(problem, full, origin) for problem in error.problems]
                continue
            if role is Role.PARAM and rule.fallback is Fallback.UNCONSTRAINED:
                problems.append(
                    Problem(
                        error=StrategyError,
                        what='"?" is for activations: a parameter must lie somewhere',
                        path=where(full, origin),
                        rule=str(ref),
                        fix='write "-" for replicated, or mesh axes',
                    )
                )
            parsed[canonical_axis(key)] = rule
    _, gather_problems = _gather(data, origin)
    return tables, problems + gather_problems + _zero1(data, origin)[1]


def _policy_text(data: Mapping[str, Any], key: str) -> str:
    policy = data.get("policy")
    text = policy.get(key, "-") if isinstance(policy, Mapping) else "-"
    return text if isinstance(text, str) else "-"


def _gather(data: Mapping[str, Any], origin: Origin) -> tuple[tuple[str, ...], list[Problem]]:
    """Return the mesh axes of `policy.gather`: one candidate, or "-" for none."""
    text, path = _policy_text(data, "gather"), ("policy", "gather")
    try:
        rule = parse_rule(text, ref=RuleRef(key="gather", text=text, table="policy", source=source_of(path, origin)))
    except ShardingError as error:
        return (), [_at(problem, path, origin) for problem in error.problems]
    if len(rule.candidates) + bool(rule.fallback) != 1 or rule.fallback is Fallback.UNCONSTRAINED:
        what = f'"{text}" is not one set of mesh axes'
        return (), [Problem(error=StrategyError, what=what, path=where(path, origin), fix='write "fsdp+sp", or "-" to gather nothing')]
    return rule.mesh_axes, []


def _zero1(data: Mapping[str, Any], origin: Origin) -> tuple[Rule | None, list[Problem]]:
    """Return the rule of `policy.zero1`, or None for "-" alone."""
    text, path = _policy_text(data, "zero1"), ("policy", "zero1")
    try:
        rule = parse_rule(text, ref=RuleRef(key="zero1", text=text, table="policy", source=source_of(path, origin)))
    except ShardingError as error:
        return None, [_at(problem, path, origin) for problem in error.problems]
    if rule.fallback is Fallback.UNCONSTRAINED:
        what = '"?" is for activations: optimizer state must lie somewhere'
        return None, [Problem(error=StrategyError, what=what, path=where(path, origin), fix='write "-", or mesh axes such as "dp | -"')]
    return rule if rule.candidates else None, []


def _check_patterns(data: Mapping[str, Any], origin: Origin) -> list[Problem]:
    problems = []
    tensors = data.get("tensors")
    for at, entry in enumerate(tensors if isinstance(tensors, list) else ()):
        pattern = entry.get("match") if isinstance(entry, Mapping) else None
        try:
            re.compile(pattern if isinstance(pattern, str) else "")
        except (re.error, OverflowError, RecursionError) as error:
            path = where(("tensors", str(at), "match"), origin)
            at_fault = (error.pos or 0) if isinstance(error, re.error) else 0
            snippet = f"{pattern}\n{' ' * at_fault}^"
            said = error.msg if isinstance(error, re.error) else str(error)
            problems.append(
                Problem(error=StrategyError, what=f"not a regular expression: {said}", path=path, snippet=snippet, fix="see Python's re")
            )
        else:
            if isinstance(entry, Mapping) and isinstance(pattern, str) and len(entry) == 1:
                path = where(("tensors", str(at)), origin)
                problems.append(Problem(error=StrategyError, what="the entry has no rule", path=path, fix='add one, such as embed = "-"'))
    return problems


def _check_own_axes(data: Mapping[str, Any], origin: Origin) -> list[Problem]:
    own = data.get("axes")
    problems = []
    for name in own if isinstance(own, Mapping) else ():
        path = where(("axes", str(name)), origin)
        if isinstance(name, str) and canonical_axis(name) in KNOWN_AXES:
            what = f"{name!r} is an axis of the vocabulary already"
            problems.append(Problem(error=StrategyError, what=what, path=path, fix="drop the line, or choose another name"))
        elif not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?|__[A-Z]([A-Z0-9_]*[A-Z0-9])?__", str(name)) or name in (
            "params",
            "match",
        ):
            what = f"{name!r} cannot be the name of an axis"
            problems.append(Problem(error=StrategyError, what=what, path=path, fix="use letters, digits and _, for instance rotary_dim"))
    return problems


def _check_mesh(data: Mapping[str, Any], origin: Origin) -> list[Problem]:
    mesh, dcn, types = data.get("mesh"), data.get("dcn") or {}, data.get("axis_types")
    sizes_good = isinstance(mesh, Mapping) and all(type(size) is int for size in mesh.values())
    if not (sizes_good and isinstance(dcn, Mapping) and all(type(size) is int for size in dcn.values())):
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
            problems.append(Problem(error=MissingMeshAxisError, what=f"mesh axis {name!r} is not in [mesh]", path=path, fix=hint))
    return problems


def compile_rules(data: Mapping[str, Any], origin: Origin, policy: Any) -> AxisRules:
    """Compile a strategy's data; raises every problem at once."""
    tables, problems = _parse_tables(data, origin)
    raise_problems([*problems, *check_names(data, origin)])
    tensors = [
        TensorRules(match=entry["match"], rules=tuple(sorted(tables["tensors", str(at)].items())))
        for at, entry in enumerate(data.get("tensors", ()))
    ]
    layered = {".".join(path): table for path, table in tables.items() if path[0] != "tensors"}
    own = sorted(canonical_axis(name) for name in data.get("axes", {}))
    return build_rules(
        layered,
        tensors=tensors,
        user_axes=own,
        policy=_policy(policy, _gather(data, origin)[0], _zero1(data, origin)[0]),
        attention={
            key: RuleRef(key=key, text=name, table="attention", source=source_of(("attention", key), origin))
            for key, name in data.get("attention", {}).items()
        },
    )


def _policy(table: Any, gather: tuple[str, ...], zero1: Rule | None) -> Policy:
    base = POLICY_PRESETS[table.preset]
    return Policy(
        indivisible=Indivisible(table.indivisible or base.indivisible),
        conflict=Conflict(table.conflict or base.conflict),
        gather=gather,
        zero1=zero1,
        missing=Missing(table.missing or base.missing),
        rank=Rank(table.rank or base.rank),
    )


def where(path: KeyPath, origin: Origin) -> str:
    """Return `file:line key.path`, as far as they are known."""
    return f"{source_of(path, origin)} {'.'.join(path)}".strip()


def source_of(path: KeyPath, origin: Origin) -> str:
    """Return the `file:line` of a key, or of the nearest table that holds it, or an empty string."""
    return next((origin[path[:end]] for end in range(len(path), -1, -1) if path[:end] in origin), "")


def _at(problem: Problem, path: KeyPath, origin: Origin) -> Problem:
    import dataclasses

    return dataclasses.replace(problem, path=where(path, origin), axis="")


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
        (path[0], str(int(path[1]) + shift), *path[2:]) if path[:1] == ("tensors",) and len(path) > 1 else path: source
        for path, source in base.items()
    }
    return {**moved, **dict.fromkeys(_key_paths(data, ()), ""), **other}


def _key_paths(data: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yield the key path of every value that is no table."""
    entries = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list) else ()
    for key, value in entries:
        yield from _key_paths(value, (*path, str(key)))
    if not isinstance(data, (Mapping, list)):
        yield path


_TYPES = {
    "string_type": ("text is wanted", 'write text, such as "tp | -"'),
    "int_type": ("a whole number is wanted", "write a whole number"),
    "dict_type": ("a table is wanted", "write a table: [{table}] and a line for each key"),
    "model_type": ("a table is wanted", "write a table: [{table}] and a line for each key"),
    "list_type": ("entries are wanted", "write [[{table}]] with two brackets above each entry"),
}


def from_pydantic(error: ValidationError, model: type[BaseModel], origin: Origin) -> list[Problem]:
    """Return a pydantic error as problems with key path and fix."""
    problems: list[Problem] = []
    for entry in error.errors():
        if "constrained-str" in entry["loc"]:
            continue  # the other half of a union, whose first half tells
        path = tuple(str(part) for part in entry["loc"] if not str(part).startswith(("literal[", "dict[")))
        what, fix = _explained(entry, path, model)
        if path and path[-1] == "[key]":
            path = path[:-1]
        problem = Problem(error=StrategyError, what=what, path=where(path, origin), fix=fix)
        if problem not in problems:
            problems.append(problem)
    return problems


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
    if kind != "literal_error":
        wanted, fix = _TYPES.get(kind, (entry["msg"], ""))
        return f"{wanted}, not {given!r}", fix.format(table=".".join(part for part in path if not part.isdigit()))
    if path == ("version",):
        return f"version {given!r} is not one that this shardwright reads", "write version = 1, or upgrade shardwright"
    known = re.findall(r"'([^']*)'", entry["ctx"]["expected"])
    hint = did_you_mean(str(given), known)
    what = f"unknown mode {given!r}" if path[0] == "modes" else f"{given!r} is not a choice here"
    own = f", or {OWN_ATTENTION}NAME for one that you register" if path[0] == "attention" else ""
    return what, f"{hint} write one of {', '.join(known)}{own}".strip()


def _known_keys(model: type[BaseModel], path: KeyPath) -> list[str]:
    table = model.model_fields.get(path[0])
    if len(path) == 1 or table is None:
        return list(model.model_fields)
    return list(getattr(table.annotation, "model_fields", {}))
