"""The settings of a search: pins and alternatives as text, and the strategies that they make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from shardwright.errors import StrategyError
from shardwright.vocabulary.axes import canonical_axis, file_name
from shardwright.vocabulary.modes import MODE_INSERT, mode_name

if TYPE_CHECKING:
    from shardwright.strategy.model import Strategy

# A key such as `head` or `params.embed` -> the text of its rule.
Settings = Mapping[str, str]
MESH: Final = "mesh."
_EXAMPLES: Final = (
    "head, params.embed, modes.decode.head, policy.zero1, memory.state, pipeline.microbatches or "
    "mesh.tp"
)


def parse_setting(text: str) -> tuple[str, str]:
    """Return key and value of text such as `head = tp`, `params.embed = "fsdp"` or `mesh.tp = 4`.

    Different spellings of a key, such as `HEAD` and `rules.head`, give the same key.

    Raises:
      StrategyError: The text has no key or no value, or strategy files have no such key.

    >>> parse_setting('params.embed = "fsdp+sp"')
    ('params.embed', 'fsdp+sp')
    """
    key, equals, value = text.partition("=")
    # Quotes may be written as in a strategy file, or left out.
    key, value = key.strip(), value.strip().strip("\"'").strip()
    if not equals or not key or not value:
        raise StrategyError(
            f"{text!r:.80} is not a setting", fix="write KEY = RULE, such as head = tp"
        )
    return _checked_key(key), value


def parse_alternatives(text: str) -> tuple[str, tuple[str | None, ...]]:
    """Return key and alternatives of text such as `head = tp, -`.

    A key without alternatives has two: the strategy's own setting, and `-`.

    Raises:
      StrategyError: The text has no key or an empty alternative, or strategy files have no such
        key.

    >>> parse_alternatives("head = tp, -"), parse_alternatives("vocab")
    (('head', ('tp', '-')), ('vocab', (None, '-')))
    """
    if "=" not in text and text.strip():
        return _checked_key(text.strip()), (None, "-")
    key, values = parse_setting(text)
    return key, tuple(parse_setting(f"{key} = {value}")[1] for value in values.split(","))


def read_pins(texts: Iterable[str]) -> dict[str, str]:
    """Return the value of each key that texts pin.

    Raises:
      StrategyError: A text is not a setting, or two of them give one key different values.
    """
    pins: dict[str, str] = {}
    for key, value in map(parse_setting, texts):
        if pins.setdefault(key, value) != value:
            raise StrategyError(
                f"two pins give {key} different values: {pins[key]!r} and {value!r}",
                fix=f'keep one of the values, or compare both: vary "{key} = {pins[key]}, {value}"',
            )
    return pins


def read_vary(
    alternatives: Iterable[tuple[str, Sequence[str | None]]],
) -> dict[str, tuple[str | None, ...]]:
    """Return the alternatives of each key. Different spellings of a key give the same key.

    Raises:
      StrategyError: Two entries name one key, an entry varies the mesh, or strategy files have no
        such key.
    """
    vary: dict[str, tuple[str | None, ...]] = {}
    for text, values in alternatives:
        key = _checked_key(text)
        if key in vary:
            raise StrategyError(
                f"{key} is varied twice", fix=f'write all alternatives at once: "{key} = A, B"'
            )
        if key.startswith(MESH):
            raise StrategyError(
                f"{key} is varied, but a search tries every mesh",
                fix=f"leave {key} out: axes= names the mesh axes that may vary, and a pin fixes "
                "the size of one",
            )
        vary[key] = tuple(values)
    return vary


def _checked_key(text: str) -> str:
    """Return a key in its usual spelling: an axis as in files, a rule without `rules.`.

    Raises:
      StrategyError: No key of a strategy file has this form.
    """
    *tables, name = [part.strip() for part in text.split(".")]
    match tables:
        case [] | ["rules"]:
            tables, name = [], file_name(canonical_axis(name))
        case ["params"] | ["modes", _] | ["modes", _, "params"]:
            name = file_name(canonical_axis(name))
        case ["policy"] | ["mesh"] | ["pipeline"] | ["memory"] | ["memory", "saved"]:
            pass
        case ["modes", _, "memory"]:
            pass
        case _:
            raise StrategyError(f"{text!r:.80} is not a setting", fix=f"name {_EXAMPLES}")
    return ".".join((*tables, name))


def with_settings(base: Strategy, settings: Settings) -> Strategy:
    """Return a strategy with settings.

    Raises:
      ShardingError: A setting is invalid, or does not fit the strategy.
    """
    data: dict[str, Any] = {}
    for key, text in settings.items():
        *tables, name = key.split(".")
        table = data
        # A key without a table is a rule.
        for part in tables or ["rules"]:
            table = table.setdefault(part, {})
        # These settings are numbers, like the sizes of the mesh.
        is_number = tables == ["pipeline"] or name == "largest_dim_min_size"
        table[name] = int(text) if is_number and text.isdecimal() else text
    return base | type(base)(**data) if settings else base


def check_overrides(
    label: str, strategy: Strategy, settings: Settings, modes: Iterable[str]
) -> None:
    """Raise an error if a setting for all modes does not apply in a mode with a rule of its own.

    Args:
      label: Name of the strategy in messages.
      strategy: The strategy with the settings.
      settings: The settings. Those that name a mode, and those that are not rules, always apply.
      modes: Modes of the programs.

    Raises:
      StrategyError: A mode has a rule of its own for a setting, and the rule differs.
    """
    for key, text in settings.items():
        *tables, axis = key.split(".")
        if tables not in ([], ["params"]):
            continue
        inner = "params." if tables else ""
        own = dict(filter(None, (_own_rule(strategy, mode, inner, axis) for mode in modes)))
        own = {
            table: rule
            for table, rule in own.items()
            # A setting that names the mode is meant to replace the mode's own rule.
            if _words(rule) != _words(text) and f"modes.{table}.{inner}{axis}" not in settings
        }
        if own:
            rules = ", ".join(
                f'[modes.{table}] has {inner}{axis} = "{own[table]}"' for table in own
            )
            keys = " and ".join(f'"modes.{table}.{inner}{axis} = {text}"' for table in own)
            raise StrategyError(
                f'{key} = "{text}" does not hold in every mode: in strategy {label}, {rules}',
                fix=f"name each mode, as in {keys}",
            )


def _own_rule(strategy: Strategy, mode: str, inner: str, axis: str) -> tuple[str, str] | None:
    """Return the table and the rule of a mode for an axis, or None.

    The mode insert inherits the rules of the mode decode.
    """
    names = ("insert", "decode") if mode == MODE_INSERT else (mode_name(mode),)
    for name in names:
        table: Any = strategy.modes.get(name)  # type: ignore[call-overload]
        if table is None:
            continue
        rules = table.params if inner else table.rules
        if axis in rules:
            return name, rules[axis]
    return None


def _words(rule: str) -> str:
    """Return a rule without its spaces."""
    return "".join(rule.split())
