"""Files of rules: YAML and JSON, with the line of each rule."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.errors import StrategyError
from shardwright.strategy.foreign_files import read_json, read_text
from shardwright.strategy.limits import LONGEST_FILE

RULES = "logical_axis_rules"
REPLICATED_NAMES = "replicated"
# Keys that are nested deeper than this are listed without a line.
_DEEPEST = 4
_MOST_VALUES = 1_000_000


def read_rules(path: Path) -> tuple[list[Any], list[str]]:
    """Read a file of rules, and return the rules and the place of each rule.

    A file is a list of pairs, or has such a list under `logical_axis_rules`. Names that the file
    lists under `replicated` are appended, as rules without mesh axes.

    Raises:
      StrategyError: The file cannot be read, is neither YAML nor JSON, or has no list of rules.
    """
    if path.suffix == ".json":
        values = read_json(path)
        lines: list[int] = []
    elif path.suffix in (".yml", ".yaml"):
        values, lines = read_yaml(path, RULES)
    else:
        what = f"{path.name!r} is neither a .json nor a .yml file"
        raise StrategyError(what, fix="give the file the ending .json, .yml or .yaml")
    rules = values.get(RULES) if isinstance(values, dict) else values
    if not isinstance(rules, list):
        what = f"the file is not a list of rules, and has none under {RULES}"
        raise StrategyError(what, path=path.name, fix=f"write {RULES}: [[embed, fsdp]]")
    # JSON is read without line numbers, so the place of a rule is its number in the list.
    places = [f"{path.name}[{at}]" for at in range(len(rules))]
    if len(lines) == len(rules):
        places = [f"{path.name}:{line}" for line in lines]
    more = read_replicated(values, rules, path.name) if isinstance(values, dict) else []
    return [*rules, *more], [*places, *[f"{path.name} {REPLICATED_NAMES}"] * len(more)]


def read_replicated(values: Mapping[str, Any], rules: Sequence[Any], place: str) -> list[Any]:
    """Return a rule without mesh axes for each name under `replicated`.

    A model may have names that no rule mentions. Libraries that use flax replicate the dims of such
    a name. A misspelled name looks the same, so the file must list the names that are replicated on
    purpose.

    Raises:
      StrategyError: The value is not a list of names, or one of them has a rule.
    """
    names = values.get(REPLICATED_NAMES) or []
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        what, fix = "is not a list of names", f"write {REPLICATED_NAMES}: [height, width]"
        raise StrategyError(f"{REPLICATED_NAMES} {what}", path=place, fix=fix)
    # A malformed rule is reported when the rules are read.
    ruled = {rule[0] for rule in rules if isinstance(rule, (list, tuple)) and rule}
    if twice := [name for name in names if name in ruled]:
        what = f"{', '.join(twice)} under {REPLICATED_NAMES} has a rule too"
        raise StrategyError(what, path=place, fix="remove the name, or remove its rule")
    return [[name, None] for name in names]


def read_yaml(path: Path, key: str) -> tuple[Any, list[int]]:
    """Read a YAML file, and return its value and the line of each entry of one list in it.

    Args:
      path: The file.
      key: Key of the list. If the file itself is a list, the lines of its entries are returned.

    Raises:
      StrategyError: The file cannot be read, or is not YAML.
    """
    # The loader in C is much faster, but not every build of PyYAML has it.
    root, value = _parsed(path, getattr(_yaml(), "CSafeLoader", _yaml().SafeLoader))
    if isinstance(value, list):
        return value, [entry.start_mark.line + 1 for entry in root.value]
    if not isinstance(value, dict) or root is None:
        return value, []
    sequence = _yaml().SequenceNode
    lists = [node for name, node in root.value if name.value == key]
    # If a key occurs several times, PyYAML keeps the last value.
    entries = lists[-1].value if lists and isinstance(lists[-1], sequence) else []
    return value, [entry.start_mark.line + 1 for entry in entries]


def read_yaml_tree(path: Path) -> tuple[Any, dict[tuple[str, ...], int]]:
    """Read a YAML file, and return its value, and the line of each key by the path of the key.

    A value with a custom tag, such as `!include`, is None.

    Raises:
      StrategyError: The file cannot be read, or is not YAML.
    """
    yaml = _yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined, misc]
        """A loader that ignores tags. Loaders of other code do not change."""

    # None stands for every tag that has no constructor.
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
    """Return the root node of a YAML file (None if the file is empty), and the file's value."""
    yaml = _yaml()
    text = read_text(path, most=LONGEST_FILE)
    loader = None
    try:
        loader = loader_type(text)
        # Read the nodes first: they have the lines, and the number of values with aliases expanded.
        root = loader.get_single_node()
        is_small = root is None or _size(root) <= _MOST_VALUES
        value = loader.construct_document(root) if root is not None and is_small else {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = path.name if mark is None else f"{path.name}:{mark.line + 1}"
        what = f"the file is not YAML: {getattr(error, 'problem', None) or error}"
        raise StrategyError(what, path=place, fix="correct the syntax of the file") from error
    finally:
        if loader is not None:
            loader.dispose()
    if not is_small:
        what = (
            f"its aliases expand to more than {_MOST_VALUES:,} values, or a value contains itself"
        )
        raise StrategyError(what, path=path.name, fix="write the values without aliases")
    return root, value


def _size(root: Any) -> int:
    """Return the number of values of a YAML document if each alias is replaced by its values.

    300 bytes of aliases of aliases can expand to 9^9 values. In memory, aliased values are shared,
    but a print of the document writes all of them. If a value contains itself, the result is a
    number above the limit.
    """
    sizes: dict[int, int] = {}

    def size_of(node: Any) -> int:
        key = id(node)
        if key not in sizes:
            sizes[key] = _MOST_VALUES + 1  # read below only if the node contains itself
            inner = node.value if isinstance(node.value, list) else ()
            # The entries of a mapping are pairs of nodes.
            pairs = (entry if isinstance(entry, tuple) else (entry,) for entry in inner)
            parts = itertools.chain.from_iterable(pairs)
            sizes[key] = 1 + sum(map(size_of, parts))
        return sizes[key]

    return size_of(root)


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        what = "reading YAML needs PyYAML: python -m pip install pyyaml"
        raise ImportError(what) from error
    return yaml
