"""Files of rules: YAML and JSON, with the line of each rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwright.errors import StrategyError

RULES = "logical_axis_rules"
# Keys below this depth have no line of their own.
_DEEPEST = 4


def read_rules(path: Path) -> tuple[list[Any], list[str]]:
    """Read a file of rules, and return them with the place of each.

    A file is a list of pairs, or has one under `logical_axis_rules`.

    Raises:
      StrategyError: The file cannot be read, is neither YAML nor JSON, or has no list of rules.
    """
    if path.suffix == ".json":
        try:
            values = json.loads(_text(path))
        except (json.JSONDecodeError, RecursionError) as error:
            what = f"the file is not JSON: {error}"
            raise StrategyError(what, path=path.name, fix="correct the syntax there") from error
        lines: list[int] = []
    elif path.suffix in (".yml", ".yaml"):
        values, lines = read_yaml(path, RULES)
    else:
        what = f"{path.name!r} is neither a .json nor a .yml file"
        raise StrategyError(what, fix="give the file one of these endings")
    rules = values.get(RULES) if isinstance(values, dict) else values
    if not isinstance(rules, list):
        what = f"the file is not a list of rules, and has none under {RULES}"
        raise StrategyError(what, path=path.name, fix=f"write {RULES}: [[embed, fsdp]]")
    if len(lines) == len(rules):
        return rules, [f"{path.name}:{line}" for line in lines]
    return rules, [f"{path.name}[{at}]" for at in range(len(rules))]


def read_yaml(path: Path, key: str) -> tuple[Any, list[int]]:
    """Read a YAML file, and return its value and the lines of the entries of a list.

    Args:
      path: The file.
      key: Key of the list. If the file itself is a list, the lines are those of its entries.

    Raises:
      StrategyError: The file cannot be read, or is not YAML.
    """
    root, value = _parsed(path, getattr(_yaml(), "CSafeLoader", _yaml().SafeLoader))
    if isinstance(value, list):
        return value, [entry.start_mark.line + 1 for entry in root.value]
    if not isinstance(value, dict) or root is None:
        return value, []
    sequence = _yaml().SequenceNode
    lists = [node for name, node in root.value if name.value == key]
    entries = lists[-1].value if lists and isinstance(lists[-1], sequence) else []
    return value, [entry.start_mark.line + 1 for entry in entries]


def read_yaml_tree(path: Path) -> tuple[Any, dict[tuple[str, ...], int]]:
    """Read a YAML file, and return its value and the line of each key, by its path of keys.

    A value with a tag of its own, such as `!include`, is None.

    Raises:
      StrategyError: The file cannot be read, or is not YAML.
    """
    yaml = _yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined, misc]
        """Ignore tags, without changing the loader of others."""

    Loader.add_constructor(None, lambda loader, node: None)
    root, value = _parsed(path, Loader)
    lines: dict[tuple[str, ...], int] = {}
    todo: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while todo:
        above, node = todo.pop()
        if isinstance(node, yaml.MappingNode) and len(above) < _DEEPEST:
            for key, entry in node.value:
                keys = (*above, str(key.value))
                lines[keys] = key.start_mark.line + 1
                todo.append((keys, entry))
    return value, lines


def _parsed(path: Path, loader_type: Any) -> tuple[Any, Any]:
    """Return the root node of a YAML file, None if it is empty, and its value."""
    yaml = _yaml()
    loader = loader_type(_text(path))
    try:
        root = loader.get_single_node()
        return root, {} if root is None else loader.construct_document(root)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = path.name if mark is None else f"{path.name}:{mark.line + 1}"
        what = f"the file is not YAML: {getattr(error, 'problem', None) or error}"
        raise StrategyError(what, path=place, fix="correct the syntax there") from error
    finally:
        loader.dispose()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fix = "check the path and its permissions"
        raise StrategyError(f"cannot read {str(path)!r}: {reason.lower()}", fix=fix) from error


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        what = "reading YAML needs PyYAML: python -m pip install pyyaml"
        raise ImportError(what) from error
    return yaml
