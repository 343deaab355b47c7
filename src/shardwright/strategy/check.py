"""Check the data of a strategy: names, patterns, user-defined axes and the mesh."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from shardwright.errors import (
    MissingMeshAxisError,
    Problem,
    Rename,
    ShardingError,
    StrategyError,
    UnknownAxisError,
    closest,
    did_you_mean,
    hint_text,
)
from shardwright.mesh.build import parse_mesh
from shardwright.resolution.patterns import compile_pattern
from shardwright.resolution.pipeline import STAGES
from shardwright.resolution.rules import foreign_mesh_axes
from shardwright.resolution.unknown_axes import axes_meant
from shardwright.strategy.limits import LONGEST_PATTERN
from shardwright.strategy.origin import KeyPath, KeySources, problem_at
from shardwright.strategy.tables import ParsedTables, at_path, parse_rules, rule_tables
from shardwright.vocabulary.axes import (
    KNOWN_AXES,
    LAYERS,
    PARALLELISM_AXES,
    STANDARD_MESH_AXES,
    axis_label,
    canonical_axis,
    file_name,
)

# A bare key of TOML, or the canonical spelling: `rotary_dim`, `__ROTARY_DIM__`.
_AXIS_NAME: Final = re.compile(
    r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?|__[A-Z]([A-Z0-9_]*[A-Z0-9])?__"
)


# Keys of [modes.M] and [[tensors]] that are not axes. All other keys of these tables are axes.
TABLE_KEYS: Final = ("params", "match", "memory")


def data_problems(data: Mapping[str, Any], origin: KeySources) -> Iterator[Problem]:
    """Yield every problem of a strategy's data that pydantic does not check.

    Data without `[mesh]` counts as an overlay, and may use names that the strategy below it
    declares. So only `compile` checks the names of such data.
    """
    parsed = parse_rules(data, origin)
    yield from parsed.problems
    if data.get("version") is True:  # True == 1 in Python, so pydantic accepts it
        what = "expected an integer, got True"
        yield problem_at(("version",), origin, what, "write version = 1")
    yield from _pattern_problems(data, origin)
    yield from _user_axis_problems(data, origin)
    if data.get("mesh"):
        yield from _mesh_problems(data, origin)
        yield from name_problems(data, parsed, origin=origin)
        yield from pipeline_problems(data, parsed, origin)


def pipeline_problems(
    data: Mapping[str, Any], parsed: ParsedTables, origin: KeySources
) -> Iterator[Problem]:
    """Yield every problem of `[pipeline]` and of the rule of LAYERS.

    Layers that are stored over pp need a schedule, and a schedule other than "none" needs such
    layers.
    """
    table, policy = (
        value if isinstance(value := data.get(name), Mapping) else {}
        for name in ("pipeline", "policy")
    )
    stored = {**parsed.tables.get(("rules",), {}), **parsed.tables.get(("params",), {})}
    rule, schedule = stored.get(LAYERS), table.get("schedule")
    if schedule is None:
        if rule is not None and STAGES in rule.mesh_axes:
            what = f"layers are stored over {STAGES}, and no [pipeline] says how they run"
            fix = 'write [pipeline] schedule = "gpipe" and microbatches = 8; schedule = "none" to '
            fix += 'gather the layers before they run; or layers = "-"'
            yield problem_at((rule.ref.table, "layers"), origin, what, fix, rule=rule.ref)
        elif table.get("microbatches") is not None or table.get("repeats", 1) != 1:
            what = "[pipeline] has no schedule"
            yield problem_at(("pipeline",), origin, what, 'write schedule = "gpipe"')
        return
    if schedule == "none":
        return
    at = ("pipeline", "schedule")
    if rule is None or rule.candidates != ((STAGES,),) or rule.fallback:
        what = f'schedule = "{schedule}" needs layers that are stored over {STAGES} only'
        fix = f'write layers = "{STAGES}" in [rules]'
        yield problem_at(at, origin, what, fix, rule="" if rule is None else rule.ref)
    if table.get("microbatches") is None:
        what, fix = "the number of microbatches is missing", "write microbatches = 8"
        yield problem_at(at, origin, what, fix)
    if schedule != "circular" and table.get("repeats", 1) != 1:
        what = f"repeats = {table['repeats']}, but a stage of {schedule} has one chunk of layers"
        fix = 'write schedule = "circular", or repeats = 1'
        yield problem_at(("pipeline", "repeats"), origin, what, fix)
    if policy.get("order") == "rules":
        # Inside a stage, pp is removed from the rules, which may drop candidates. The order of the
        # rules would still list them.
        what = 'a pipeline cannot run under order = "rules"'
        yield problem_at(("policy", "order"), origin, what, 'write order = "dims"')


def name_problems(
    data: Mapping[str, Any], parsed: ParsedTables, *, origin: KeySources
) -> Iterator[Problem]:
    """Yield a problem for each axis and each mesh axis that is used but not declared."""
    user_axes = data.get("axes")
    names = [*user_axes] if isinstance(user_axes, Mapping) else []
    known = KNOWN_AXES | {canonical_axis(name) for name in names if isinstance(name, str)}
    labels = [*sorted(file_name(axis) for axis in known), *PARALLELISM_AXES.values()]
    for path, table, _ in rule_tables(data):
        for key in table:
            # If the value is a table instead of a rule, skip it: pydantic reports its type.
            if not isinstance(key, str) or isinstance(table[key], Mapping):
                continue
            if canonical_axis(key) not in known:
                bare = axis_label(key).lower()
                meant = axes_meant(bare, labels)
                fix = hint = hint_text(meant)
                if bare == "empty" or not _AXIS_NAME.fullmatch(key):
                    fix = hint or "use the name of an axis, such as batch"
                # A name that differs from a known axis only in underscores or case is a misspelling
                # of that axis, so do not propose to declare it.
                elif canonical_axis(bare) not in known:
                    fix = f'{hint} declare an axis of your own with [axes] {key} = "what it is"'
                what = f"unknown axis {key!r}"
                where = (*path, key)
                edit = Rename(old=key, new=meant[0]) if len(meant) == 1 else None
                yield problem_at(
                    where, origin, what, fix.strip(), error=UnknownAxisError, edit=edit
                )
    yield from _mesh_name_problems(data, parsed, origin)


def _mesh_name_problems(
    data: Mapping[str, Any], parsed: ParsedTables, origin: KeySources
) -> Iterator[Problem]:
    mesh = tuple(data.get("mesh") or ()) if isinstance(data.get("mesh"), Mapping) else ()
    rules = [(path, rule) for path, table in parsed.tables.items() for rule in table.values()]
    policies = (parsed.gather, parsed.largest_dim, parsed.zero1)
    rules += [(("policy",), rule) for rule in policies if rule is not None]
    idle = [(("policy",), parsed.idle)] if parsed.idle is not None else []
    known = list(dict.fromkeys([*mesh, *STANDARD_MESH_AXES]))
    for path, rule in [*rules, *idle]:
        for name in foreign_mesh_axes(rule.mesh_axes, mesh):
            what = f"mesh axis {name!r} is neither in [mesh] nor a standard one "
            what += f"({', '.join(STANDARD_MESH_AXES)})"
            where, (fix, meant) = (*path, rule.ref.key), _fix_for_unknown(name, known)
            edit = Rename(old=name, new=meant) if meant else None
            error = MissingMeshAxisError
            yield problem_at(where, origin, what, fix, error=error, rule=rule.ref, edit=edit)
    for name in parsed.idle.mesh_axes if parsed.idle is not None else ():
        naming = next((rule for _, rule in rules if name in rule.mesh_axes), None)
        if naming is not None:
            fix = f"remove {name} from idle, or from the rule"
            what = f"{name!r} is declared idle, but a rule names it"
            yield problem_at(("policy", "idle"), origin, what, fix, rule=naming.ref)


def _fix_for_unknown(name: str, known: Sequence[str]) -> tuple[str, str]:
    """Return how to fix an unknown mesh axis, and the name that was meant ("" if none)."""
    if name.lower() in ("none", "null"):
        return 'to replicate the dim, write "-"', ""
    words = [word for word in re.split(r"\W+", name) if word]
    if len(words) > 1 and all(word in known for word in words):
        return f'mesh axes are joined by "+": did you mean "{"+".join(words)}"?', ""
    axis = canonical_axis(name.strip("_"))
    # Perhaps the user wrote an axis, such as `tensor_parallel` or `TP`, instead of its mesh axis
    # `tp`.
    meant = PARALLELISM_AXES.get(axis, "")
    if meant not in known:
        if axis in KNOWN_AXES and name.lower() not in map(str.lower, known):
            semantic = f"a rule names mesh axes, and {axis_label(axis)} is a semantic axis"
            return f"{semantic}: name one of {', '.join(known)}", ""
        meant = closest(axis_label(name).lower(), known)
    if not meant:
        return f"add {name} = 1 to [mesh], or name one of {', '.join(known)}", ""
    return hint_text([meant]), meant


def _pattern_problems(data: Mapping[str, Any], origin: KeySources) -> Iterator[Problem]:
    memory = data.get("memory")
    tables = {
        ("tensors",): (data.get("tensors"), 'embed = "-"'),
        ("memory", "tensors"): (
            memory.get("tensors") if isinstance(memory, Mapping) else None,
            'params = "host"',
        ),
    }
    for table, (entries, example) in tables.items():
        for at, entry in enumerate(entries if isinstance(entries, list) else ()):
            # pydantic reports entries that are not tables, and patterns that are not text.
            if isinstance(entry, Mapping) and isinstance(entry.get("match"), str):
                yield from _entry_problems((*table, str(at)), entry, origin, example)


def _entry_problems(
    table: KeyPath, entry: Mapping[str, Any], origin: KeySources, example: str
) -> Iterator[Problem]:
    pattern, path = entry["match"], (*table, "match")
    if len(pattern) > LONGEST_PATTERN:
        what = f"the pattern has {len(pattern)} characters, at most {LONGEST_PATTERN} are read"
        fix = f"split it into several [[{'.'.join(table[:-1])}]] entries"
        yield problem_at(path, origin, what, fix)
        return
    try:
        compile_pattern(pattern)
    except StrategyError as error:
        yield from (at_path(problem, path, origin) for problem in error.problems)
    if len(entry) == 1:
        yield problem_at(table, origin, "the entry has no rule", f"add one, such as {example}")


def _user_axis_problems(data: Mapping[str, Any], origin: KeySources) -> Iterator[Problem]:
    user_axes = data.get("axes")
    for name in user_axes if isinstance(user_axes, Mapping) else ():
        path = ("axes", str(name))
        if isinstance(name, str) and canonical_axis(name) in KNOWN_AXES:
            what = f"{name!r} is already an axis of the vocabulary"
            yield problem_at(path, origin, what, "drop the line, or choose another name")
        elif file_name(canonical_axis(str(name))) in TABLE_KEYS:
            what = (
                f"{name!r} cannot be the name of an axis: it is a key of [modes.M] or [[tensors]]"
            )
            yield problem_at(path, origin, what, f"rename the axis, for instance {name}_dim")
        elif not _AXIS_NAME.fullmatch(str(name)):
            what = f"{name!r} cannot be the name of an axis"
            yield problem_at(path, origin, what, "use letters, digits and _, such as rotary_dim")


def _mesh_problems(data: Mapping[str, Any], origin: KeySources) -> Iterator[Problem]:
    mesh, dcn, types = data.get("mesh"), data.get("dcn") or {}, data.get("axis_types")
    # pydantic reports sizes that are not integers. Compare by `type`, because True is an int too.
    for table in (mesh, dcn):
        if not isinstance(table, Mapping) or any(type(size) is not int for size in table.values()):
            return
    assert isinstance(mesh, Mapping)
    try:
        parse_mesh(dict(mesh), dcn=dict(dcn) or None)
    except ShardingError as error:
        yield from (at_path(problem, ("mesh",), origin) for problem in error.problems)
    for name in types if isinstance(types, Mapping) else ():
        if name not in mesh:
            what = f"mesh axis {name!r} is not in [mesh]"
            fix = did_you_mean(str(name), mesh) or "name mesh axes of [mesh]"
            path = ("axis_types", str(name))
            yield problem_at(path, origin, what, fix, error=MissingMeshAxisError)
