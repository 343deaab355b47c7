"""Strategy files as a pydantic model: their keys, their types and their JSON Schema.

`check` checks the names in the data, and `compile` turns the data into rules.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    WrapSerializer,
    WrapValidator,
    field_validator,
)

from shardwright.errors import StrategyError, raise_problems
from shardwright.mesh.build import AxisTypeName, create_mesh
from shardwright.resolution.rules import OWN_ATTENTION, AxisRules, Rule
from shardwright.strategy import check, files, overlay
from shardwright.strategy.chains import SCHEMA, InterleavedRules, normalized
from shardwright.strategy.compile import compile_rules
from shardwright.strategy.limits import check_entries, first_problems
from shardwright.strategy.origin import KeyPath, KeySources, source_of, where
from shardwright.strategy.pydantic_errors import problems_of
from shardwright.strategy.tables import parse_rules, rule_tables
from shardwright.vocabulary.axes import Mesh, canonical_axis, file_name
from shardwright.vocabulary.integers import as_integer

RULE = (
    'Candidates of mesh axes in order: "dp+fsdp | dp | -". '
    '"+" joins mesh axes, "-" replicates, "?" leaves the dim to the compiler.'
)
_T = TypeVar("_T")
# pydantic freezes the attributes of a model, but not the dicts and lists in them. The hash of a
# strategy covers their content, so validation turns them into read-only views, and dumping turns
# them back into plain dicts and lists.
_ReadOnly = AfterValidator(MappingProxyType)
_AsDict = WrapSerializer(lambda table, dump: dump(dict(table)))
Table = Annotated[dict[str, _T], _ReadOnly, _AsDict]
Rules = Table[str]


def _read_chains(value: Any, validate: Any) -> Any:
    if isinstance(value, list):  # `chains.normalized` has checked it
        return InterleavedRules(value)
    return MappingProxyType(validate(value))


def _write_chains(table: Any, serialize: Any) -> Any:
    if isinstance(table, InterleavedRules):
        return [dict(part) for part in table.tables]
    return serialize(dict(table))


# A table of rules, or an array of tables whose chains interleave.
ChainedRules = Annotated[
    dict[str, str],
    WrapValidator(_read_chains),
    WrapSerializer(_write_chains),
    WithJsonSchema(SCHEMA),
]


# Entries of an array of tables.
Entries = Annotated[
    list[_T],
    AfterValidator(tuple),
    WrapSerializer(lambda entries, dump: dump(list(entries))),
]


def _empty_table() -> Any:
    return MappingProxyType({})


def _lower_keys(table: Any) -> Any:
    """Replace each axis by its name in files: `batch`, `BATCH` and `__BATCH__` are one key."""
    if not isinstance(table, Mapping):
        return table
    spelled: dict[Any, Any] = {}
    for key, value in table.items():
        name = (
            file_name(canonical_axis(key))
            if isinstance(key, str) and key not in check.TABLE_KEYS
            else key
        )
        if name in spelled:
            raise ValueError(f"{name!r} is written twice, in two spellings")
        spelled[name] = value
    return spelled


MemoryName = Literal["device", "host"]


class _TableModel(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    # pydantic checks that the value of each key that is not a field has this type. Here each of
    # these keys is an axis, and its value is a rule.
    __pydantic_extra__: dict[str, str]

    @property
    def rules(self) -> Rules:
        """The rules of the table, by axis."""
        return dict(self.__pydantic_extra__ or {})


class ModeMemoryTable(BaseModel):
    """Where parameters live in one mode."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    # With None, the table [memory] decides. With "device", [memory] does not apply.
    params: MemoryName | None = Field(default=None, description="Where stored parameters live.")


class ModeTable(_TableModel):
    """Rules of one mode: for activations and caches, and under `params` for parameters."""

    params: Rules = Field(
        default_factory=_empty_table, description="Rules of parameters in this mode."
    )
    memory: ModeMemoryTable = Field(default_factory=ModeMemoryTable)

    _lower = field_validator("params", mode="before")(_lower_keys)


class TensorTable(_TableModel):
    """Rules for the parameters whose path matches a pattern.

    Several entries may match a path. Of those that name an axis, the first one decides that axis.
    """

    match: str = Field(
        description="Regular expression of Python's `re`, searched in the '/'-joined path."
    )


class MemoryTensorTable(BaseModel):
    """Where parameters and their optimizer state live, if the path matches a pattern."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    match: str = Field(
        description="Regular expression of Python's `re`, searched in the path of the parameter."
    )
    params: MemoryName | None = Field(default=None, description="Where the parameters live.")
    state: MemoryName | None = Field(default=None, description="Where their state lives.")


class MemoryTable(BaseModel):
    """Which arrays live in the memory of the host. Scalars always live on the device."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    params: MemoryName = Field(default="device", description="Where stored parameters live.")
    state: MemoryName = Field(default="device", description="Where optimizer state lives.")
    activations: MemoryName = Field(
        default="device",
        description="Where rematerialization keeps the values that it saves for the backward pass.",
    )
    saved: Table[MemoryName] = Field(
        default_factory=_empty_table,
        description="For each name of `checkpoint_name`, where its values are saved.",
    )
    tensors: Entries[MemoryTensorTable] = Field(
        default_factory=tuple,  # type: ignore[arg-type]  # a tuple, as after validation
        description="Exceptions by the path of the parameter; the first match applies.",
    )


class PolicyTable(BaseModel):
    """What to do if a rule cannot be applied."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    preset: Literal["strict", "eformer"] = Field(
        default="strict", description="Defaults of the other settings."
    )
    indivisible: Literal["error", "prefix", "replicate", "drop"] | None = Field(
        default=None, description="If a size does not divide."
    )
    conflict: Literal["error", "first_dim", "next"] | None = Field(
        default=None, description="If two dims claim the same mesh axis."
    )
    order: Literal["dims", "rules"] | None = Field(
        default=None, description="What is decided first: the earlier dim, or the earlier rule."
    )
    gather: str = Field(
        default="-",
        description='Mesh axes over which a weight is gathered before use, "fsdp+sp".',
    )
    largest_dim: str = Field(
        default="-",
        description="Mesh axes that shard each stored weight along its largest free dim that "
        'divides, "fsdp | -".',
    )
    largest_dim_min_size: int = Field(
        default=0,
        ge=0,
        description="Number of elements below which `largest_dim` leaves a weight alone.",
    )
    zero1: str = Field(
        default="-",
        description="Mesh axes that shard optimizer state in addition to those of its parameter, "
        '"dp | -".',
    )
    idle: str = Field(
        default="-", description='Mesh axes that no rule uses, on purpose, "replica+other".'
    )
    missing: Literal["skip", "replicate"] | None = Field(
        default=None, description="If the mesh lacks a standard mesh axis."
    )
    rank: Literal["error", "fit"] | None = Field(
        default=None, description="If annotation and array differ in rank."
    )


Shipped = Literal[
    "auto",
    "allgather_kv",
    "blockwise",
    "cudnn",
    "flash_decode",
    "ring",
    "sdpa",
    "splash",
    "triton_decode",
    "ulysses",
    "vanilla",
]
Own = Annotated[str, Field(pattern=rf"^{OWN_ATTENTION}[A-Za-z_][A-Za-z0-9_-]*$")]
AttentionName = Shipped | Own


class AttentionTable(BaseModel):
    """The attention implementation of each mode. Insert has none: it only writes to the cache."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    default: AttentionName = Field(
        default="auto", description="For modes without a key of their own."
    )
    train: AttentionName | None = Field(default=None, description="In training.")
    prefill: AttentionName | None = Field(default=None, description="In prefill.")
    decode: AttentionName | None = Field(default=None, description="In decode.")


class PipelineTable(BaseModel):
    """How the layers of a stack run over the mesh axis pp."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    schedule: Literal["none", "gpipe", "circular", "1f1b"] | None = Field(
        default=None, description='Order of the microbatches; "none" gathers layers over pp.'
    )
    microbatches: int | None = Field(
        default=None, gt=0, description="Number of microbatches of a batch."
    )
    repeats: int = Field(
        default=1, gt=0, description="Number of chunks that a stage has, in a circular schedule."
    )
    gather: Literal["tick", "once"] = Field(
        default="tick", description="Whether FSDP gathers weights in each tick, or once per step."
    )


class Strategy(BaseModel):
    r"""A mesh, rules and a policy as data.

    Read a file with `load`, or start from a `preset`. Overlay strategies with `|`. `compile`
    returns the rules.

    Raises:
      ShardingError: All problems at once. The class of the first problem (mostly StrategyError) is
        the class of the error. Each problem has the file, the key path and a fix.

    >>> strategy = Strategy.preset("fsdp_tp") | Strategy.loads("[mesh]\ntp = 8")
    >>> strategy.mesh["tp"]
    8
    """

    # Without `strict`, pydantic would read the text "4" as the size 4.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Literal[1] = Field(default=1, description="Version of this format.")
    name: str = Field(default="", description="Name shown in reports.")
    axis_types: AxisTypeName | Table[AxisTypeName] = Field(
        default="auto", description="Axis type of all mesh axes, or by mesh axis."
    )
    mesh: Table[int] = Field(
        default_factory=_empty_table,
        description="Total size of each mesh axis, slowest first; one may be -1.",
    )
    dcn: Table[int] = Field(
        default_factory=_empty_table, description="Part of a total size that crosses slices."
    )
    axes: Table[str] = Field(
        default_factory=_empty_table,
        description="Axes of your own, each with a one-line description.",
    )
    rules: ChainedRules = Field(
        default_factory=_empty_table, description=f"Rule of each axis. {RULE}"
    )
    params: ChainedRules = Field(
        default_factory=_empty_table, description="Rules of stored parameters, where they differ."
    )
    modes: Annotated[
        dict[Literal["train", "prefill", "decode", "insert"], ModeTable], _ReadOnly, _AsDict
    ] = Field(
        default_factory=_empty_table,
        description="Rules that differ in a mode; insert inherits from decode.",
    )
    policy: PolicyTable = Field(default_factory=PolicyTable)
    attention: AttentionTable = Field(default_factory=AttentionTable)
    memory: MemoryTable = Field(default_factory=MemoryTable)
    pipeline: PipelineTable = Field(default_factory=PipelineTable)
    tensors: Entries[TensorTable] = Field(
        default_factory=tuple,  # type: ignore[arg-type]  # a tuple, as after validation
        description="Exceptions by path, for stored and used weights.",
    )

    _origin: KeySources = PrivateAttr(default_factory=dict)

    _lower = field_validator("axes", "rules", "params", mode="before")(_lower_keys)

    @field_validator("modes", mode="before")
    @classmethod
    def _lower_modes(cls, modes: Any) -> Any:
        return (
            {mode: _lower_keys(table) for mode, table in modes.items()}
            if isinstance(modes, Mapping)
            else modes
        )

    @field_validator("tensors", mode="before")
    @classmethod
    def _lower_tensors(cls, tensors: Any) -> Any:
        return (
            [_lower_keys(entry) for entry in tensors] if isinstance(tensors, Sequence) else tensors
        )

    def __init__(self, **data: Any) -> None:
        for table in ("mesh", "dcn"):
            if isinstance(data.get(table), Mapping):
                # pydantic refuses the integers of NumPy.
                data[table] = {
                    name: size if (integer := as_integer(size)) is None else integer
                    for name, size in data[table].items()
                }
        self._build(data, {})

    def _build(
        self, data: Mapping[str, Any], origin: KeySources, *, is_overlay: bool = False
    ) -> None:
        # Check this first, because the time of all later steps grows with the number of entries.
        check_entries(data, origin)
        data, origin, problems = normalized(data, origin)
        try:
            super().__init__(**data)
        except ValidationError as error:
            problems += problems_of(error, type(self), origin)
        # The base may declare names that an overlay uses, so check the combined strategy instead.
        found = () if is_overlay else check.data_problems(data, origin)
        raise_problems(first_problems(itertools.chain(problems, found)))
        self._origin = origin

    @classmethod
    def _from_data(
        cls, data: Mapping[str, Any], origin: KeySources, *, is_overlay: bool = False
    ) -> Strategy:
        strategy = cls.__new__(cls)
        strategy._build(data, origin, is_overlay=is_overlay)
        return strategy

    @classmethod
    def load(cls, path: str | Path) -> Strategy:
        """Read a `.toml` or `.json` file.

        If the file has the key `base`, it is an overlay on the strategy that `base` names.

        Raises:
          ShardingError: The file does not exist, does not parse, or has problems.
        """
        return cls._load(Path(path), ())

    @classmethod
    def _load(cls, path: Path, inside: tuple[Path, ...], **options: str) -> Strategy:
        """Read a file. `inside` has the files whose `base` leads here."""
        data, origin = files.read(path, **options)
        inside = (*inside, Path(os.path.realpath(path)))
        if "base" in data:
            data.setdefault("name", path.stem)  # reports must not show the name of the base
        return cls._on_base(data, origin, path.parent, inside)

    @classmethod
    def _on_base(
        cls, data: dict[str, Any], origin: KeySources, root: Path, inside: tuple[Path, ...] = ()
    ) -> Strategy:
        base = data.pop("base", "")
        own_origin = {key: at for key, at in origin.items() if key != ("base",)}
        if base == "":
            return cls._from_data(data, own_origin)
        if not isinstance(base, str):
            raise StrategyError(
                f"base must be text, got {base!r:.80}",
                path=where(("base",), origin),
                fix='write base = "fsdp_tp", or the name of a file beside this one',
            )
        try:
            below = cls._read(base, root, inside)
        except StrategyError as error:
            line = where(("base",), origin)
            # Problems inside the file of the base already have the name and line of that file.
            raise StrategyError(
                problems=[
                    problem if problem.path else dataclasses.replace(problem, path=line)
                    for problem in error.problems
                ]
            ) from error
        return below | cls._from_data(data, own_origin, is_overlay=True)

    @classmethod
    def read(cls, text: str | Path, *, root: str | Path = "") -> Strategy:
        """Read a preset, a file, or an overlay of several, as the command line does.

        Args:
          text: `fsdp_tp`, `mine.toml`, or `fsdp_tp | mine.toml`.
          root: Folder of relative paths. Defaults to the working directory.

        Raises:
          ShardingError: A strategy does not exist, does not parse, or has problems.
        """
        return cls._read(text, Path(root), ())

    @classmethod
    def _read(cls, text: str | Path, root: Path, inside: tuple[Path, ...]) -> Strategy:
        parts = []
        for name in files.strategy_names(text, root):
            path = root / name
            if not files.is_file_name(name):
                parts.append(cls.preset(name))
            elif Path(os.path.realpath(path)) in inside:
                raise StrategyError(
                    f"base leads back to this file: "
                    f"{' -> '.join(each.name for each in (*inside, path))}",
                    path=path.name,
                    fix="remove one base",
                )
            else:
                parts.append(cls._load(path, inside, preset="write {}"))
        return functools.reduce(operator.or_, parts)

    @classmethod
    def loads(
        cls,
        text: str,
        *,
        format: Literal["toml", "json"] = "toml",
        source: str = "",
        root: str | Path = "",
    ) -> Strategy:
        """Read a strategy from text.

        Args:
          text: Text of a strategy file. A file that it names as `base` is read.
          format: "toml" or "json".
          source: Name of the text in messages. Defaults to `<toml>` or `<json>`.
          root: Folder of a relative `base`. Defaults to the working directory.

        Raises:
          ShardingError: The text does not parse, or has problems.
        """
        parsed = files.parse_strategy(text, format=format, source=source or f"<{format}>")
        return cls._on_base(*parsed, Path(root))

    @classmethod
    def preset(cls, name: str) -> Strategy:
        """Return a strategy that the package contains.

        Raises:
          StrategyError: No preset has this name; `presets()` lists them.
        """
        return _preset(name, files.preset_text(name))

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Return the names of the presets."""
        return files.preset_names()

    def __repr__(self) -> str:
        # All keys would fill a screen, so only `str` shows them.
        rules = sum(len(table) for _, table, _ in rule_tables(self.to_data()))
        mesh = ",".join(f"{axis}:{size}" for axis, size in self.mesh.items())
        return (
            f"<Strategy {self.name!r} from {self.source() or 'data'}, mesh {mesh or 'none'}, "
            f"{rules} rules; print it to see all>"
        )

    def __str__(self) -> str:
        return self.dumps().rstrip("\n")

    def to_data(self) -> dict[str, Any]:
        """Return the keys that were set, as plain data."""
        # Leave out defaults, because in an overlay a default would override the strategy below.
        return self.model_dump(exclude_unset=True)

    def dumps(self, *, format: Literal["toml", "json"] = "toml") -> str:
        """Return the text of a strategy file: `Strategy.loads(s.dumps()) == s`."""
        return files.render(self.to_data(), format=format)

    def dump(self, path: str | Path) -> Path:
        """Write a `.toml` or `.json` file and return its path: `Strategy.load(s.dump(path)) == s`.

        The write is atomic. An overwritten file keeps its permissions.

        Raises:
          StrategyError: The path ends in neither `.toml` nor `.json`, its folder does not exist, or
            it is not a regular file.
        """
        return files.write(Path(path), self.to_data())

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON Schema of the file format, for editors and other tools."""
        schema = cls.model_json_schema()
        base = {
            "type": "string",
            "title": "Base",
            "default": "",
            "description": "Strategy below this one: a preset, or a file beside this one.",
        }
        schema["properties"] = {"base": base, **schema["properties"]}
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}

    def __or__(self, other: Strategy) -> Strategy:
        """Overlay `other` on this strategy. The keys of `other` take precedence, and its
        `[[tensors]]` come first.

        Raises:
          ShardingError: The result has problems, or `axis_types` is a word in one strategy and a
            table in the other.
        """
        if not isinstance(other, Strategy):
            return NotImplemented
        base, over = self.to_data(), other.to_data()
        raise_problems(
            overlay.overlay_problems(base, over, below=self._origin, above=other._origin)
        )
        return type(self)._from_data(
            *overlay.overlay(base, over, below=self._origin, above=other._origin)
        )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy.

        Raises:
          StrategyError: `update` is given, which pydantic would not validate.
        """
        if update:
            raise StrategyError(
                f"model_copy(update=...) would not check {', '.join(map(str, update))}",
                fix="overlay the change: strategy | Strategy(rules={...}) checks the result",
            )
        return super().model_copy(deep=deep)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        # Tables are read-only views, so nothing in a strategy can change.
        return self

    def __reduce__(self) -> Any:
        return Strategy._from_data, (self.to_data(), self._origin)

    def _identity(self) -> tuple[Any, ...]:
        """Return the value that equality and hash compare: every key and the order of mesh axes.

        The order of the mesh axes decides where each device is. Under `order = "rules"` the order
        of the rules is part of the value too.
        """
        # If chains of candidates interleave (`strategy.chains`), `dict(self.rules)` joins the parts
        # of each chain. How the tables divide a chain matters only under `order = "rules"`.
        keys = self.model_dump() | {"rules": dict(self.rules), "params": dict(self.params)}
        order: tuple[Any, ...] = ()
        if self.policy.order == "rules":
            tables = rule_tables(self.to_data())
            order = tuple((path, tuple(table.items())) for path, table, _ in tables)
        return json.dumps(keys, sort_keys=True), tuple(self.mesh), order

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strategy) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def compile(self) -> AxisRules:
        """Return the frozen, hashable rules.

        Raises:
          ShardingError: All problems at once. The class of the first problem is the class of the
            error.
        """
        return compile_rules(self.to_data(), self._origin, self.policy)

    def tables(self) -> dict[KeyPath, dict[str, Rule]]:
        """Return the rules as written, by key path (`("modes", "decode")`) and axis."""
        return parse_rules(self.to_data(), self._origin).tables

    def source(self, *path: str) -> str:
        """Return `file:line` of a key, or of its nearest enclosing table with a known line.

        Return an empty string if no line is known.
        """
        return source_of(path, self._origin)

    def make_mesh(self, *, devices: Sequence[Any] | None = None) -> Mesh:
        """Build the mesh of the strategy. This starts the JAX backend.

        Raises:
          StrategyError: The strategy has no `[mesh]`.
          MeshSpecError: The devices do not fit the mesh.
        """
        if not self.mesh:
            raise StrategyError(
                f"strategy {self.name!r} has no [mesh]",
                path=self._origin.get((), ""),
                fix='add [mesh], or pass mesh=create_mesh("dp:2,tp:4")',
            )
        return create_mesh(
            dict(self.mesh), devices=devices, axis_types=self.axis_types, dcn=dict(self.dcn) or None
        )


@functools.cache
def _preset(name: str, text: str) -> Strategy:
    return Strategy._from_data(*files.parse(text, format="toml", source=f"{name}.toml"))
