"""Turn pydantic's errors into problems with a key path and a fix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from shardwright.errors import Problem, did_you_mean
from shardwright.resolution.rules import OWN_ATTENTION
from shardwright.strategy.limits import MOST_PROBLEMS
from shardwright.strategy.origin import KeyPath, KeySources, problem_at
from shardwright.vocabulary.axes import REPLICATED, UNCONSTRAINED

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

# Pydantic's type of error -> what was expected, and the fix.
_EXPECTED = {
    "int_type": ("expected an integer", "write an integer"),
    "greater_than": ("expected a positive integer", "write 1, or a larger integer"),
    "greater_than_equal": ("expected 0 or more", "write 0, or a larger integer"),
    "dict_type": ("expected a table", "write a table: [{table}] and a line for each key"),
    "model_type": ("expected a table", "write a table: [{table}] and a line for each key"),
    "list_type": ("expected entries", "write [[{table}]] with two brackets above each entry"),
}
# Keys of [policy] whose value is one set of mesh axes, without fallbacks.
_AXIS_SETS = (("policy", "gather"), ("policy", "idle"))
# Words of other tables and libraries -> the key of a strategy file.
_OTHER_NAMES = {"optimizer": "state", "weights": "params"}
# Keys of [policy] whose value is a rule.
_ADDED = (("policy", "largest_dim"), ("policy", "zero1"))


def problems_of(
    error: ValidationError, model: type[BaseModel], origin: KeySources
) -> list[Problem]:
    """Return the problems of a pydantic error, each with a key path and a fix."""
    problems: dict[Problem, None] = {}
    for entry in error.errors():
        if len(problems) > MOST_PROBLEMS:
            break
        # If a value may have several forms, pydantic reports an error for each form. Skip the
        # errors of the forms that the user did not write.
        if "constrained-str" in entry["loc"] or _is_other_form(entry):
            continue
        path = tuple(
            str(part)
            for part in entry["loc"]
            if not str(part).startswith(("literal[", "dict[", "function-after["))
        )
        what, fix = _explain(entry, path, model)
        if path and path[-1] == "[key]":
            path = path[:-1]
        problems.setdefault(problem_at(path, origin, what, fix))
    return list(problems)


def _is_other_form(entry: Any) -> bool:
    """Tell whether an error is about the form of `axis_types` that the strategy does not use.

    `axis_types` is either a word or a table, and pydantic reports the errors of both.
    """
    if entry["loc"][:1] != ("axis_types",) or len(entry["loc"]) < 2:
        return False
    if str(entry["loc"][1]).startswith("literal["):
        return isinstance(entry["input"], Mapping)
    return bool(entry["type"] == "dict_type")


def _explain(entry: Any, path: KeyPath, model: type[BaseModel]) -> tuple[str, str]:
    """Return what is wrong and how to fix it, in the terms of strategy files."""
    value, kind = entry["input"], entry["type"]
    if kind == "extra_forbidden":
        known = _known_keys(model, path)
        hint = did_you_mean(_OTHER_NAMES.get(path[-1], path[-1]), known)
        keys = f", or write one of {', '.join(known)}" if known else ""
        return "unknown key", hint or f"remove it{keys}"
    if kind == "missing":
        return "required key is missing", "add it"
    if kind == "value_error":
        return entry["msg"].removeprefix("Value error, "), "keep one of them"
    if kind == "string_type" and path[0] == "modes" and isinstance(value, Mapping):
        table = ".".join(path[:2])
        return (
            "a mode has no such table",
            f"write its rules under [{table}], and those of parameters under [{table}.params]",
        )
    if kind == "string_type":
        return f"expected text, got {value!r}", _fix_for_text(value, path)
    if kind == "literal_error":
        return _explain_choice(entry, path)
    expected, fix = _EXPECTED.get(kind, (entry["msg"], ""))
    table = ".".join(part for part in path if not part.isdigit())
    return f"{expected}, got {value!r}", fix.format(table=table)


def _explain_choice(entry: Any, path: KeyPath) -> tuple[str, str]:
    """Return what is wrong with a value outside of a fixed set, and how to fix it."""
    value = entry["input"]
    if path == ("version",):
        return (
            f"this release of shardwright cannot read version {value!r}",
            "write version = 1, or upgrade shardwright",
        )
    known = re.findall(r"'([^']*)'", entry["ctx"]["expected"])
    hint = did_you_mean(str(value), known)
    what = f"unknown {'mode' if path[-1] == '[key]' else 'value'} {value!r}"
    registered = ""
    if path[0] == "attention":
        registered = f", or {OWN_ATTENTION}NAME for one that you register"
    return what, f"{hint} write one of {', '.join(known)}{registered}".strip()


def _fix_for_text(value: Any, path: KeyPath) -> str:
    """Return the fix of a value that must be text.

    For a list of mesh axes, show the rules that the user may have meant.
    """
    is_set = path in _AXIS_SETS
    in_table = path[0] in ("rules", "params", "modes", "tensors") and path[-1] != "match"
    if not (is_set or in_table or path in _ADDED):
        return "write text in quotes"
    is_names = isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)
    if not is_names or not value:
        return 'write text, such as "fsdp+sp"' if is_set else 'write text, such as "tp | -"'
    readings = []
    if not {REPLICATED, UNCONSTRAINED} & {*value}:
        readings.append(f'"{"+".join(value)}" for all of them at once')
    if not is_set:
        readings.append(f'"{" | ".join(value)}" for the first that fits')
    return f"write {', '.join(readings)}"


def _known_keys(model: type[BaseModel], path: KeyPath) -> list[str]:
    """Return the known keys of the innermost table on a path."""
    table: Any = model
    for part in path[:-1]:
        field = table.model_fields.get(part)
        if field is None:  # the index of an entry, or the name of a mode
            continue
        forms = (field.annotation, *get_args(field.annotation))
        table = next((form for form in forms if hasattr(form, "model_fields")), None)
        if table is None:
            return []
    return list(table.model_fields)
