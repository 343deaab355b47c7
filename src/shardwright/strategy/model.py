"""The strategy file as a pydantic model: its shape, its types, its JSON Schema. What the names mean is `check.py`'s."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
)

from shardwright.errors import Problem, StrategyError, raise_problems
from shardwright.mesh.build import create_mesh
from shardwright.resolution.rules import OWN_ATTENTION, AxisRules, Rule
from shardwright.strategy import check, files
from shardwright.strategy.limits import check_entries, first_problems
from shardwright.strategy.origin import KeyPath, Origin, source_of
from shardwright.strategy.read_only import ReadOnlyDict, ReadOnlyList
from shardwright.vocabulary.axes import Mesh, canonical_axis, file_name
from shardwright.vocabulary.integers import as_integer

RULE = 'Candidates of mesh axes in order: "dp+fsdp | dp | -". "+" joins mesh axes, "-" replicated, "?" unconstrained.'
AxisTypeName = Literal["auto", "explicit"]
# Frozen all the way down. Who writes a Strategy in Python gives plain dicts and lists.
_T = TypeVar("_T")
Table = Annotated[dict[str, _T], AfterValidator(ReadOnlyDict)]
Rules = Table[str]


def _python_integers(sizes: Mapping[Any, Any]) -> dict[Any, Any]:
    """Replace NumPy integers, which pydantic refuses, by Python's."""
    return {
        name: size if (integer := as_integer(size)) is None else integer
        for name, size in sizes.items()
    }


def _lower_keys(table: Any) -> Any:
    """Spell every axis the way files do, so that `batch`, `BATCH` and `__BATCH__` are one key."""
    if not isinstance(table, Mapping):
        return table
    spelled: dict[Any, Any] = {}
    for key, value in table.items():
        name = (
            file_name(canonical_axis(key))
            if isinstance(key, str) and key not in ("params", "match")
            else key
        )
        if name in spelled:
            raise ValueError(f"{name!r} stands twice, spelled in two ways")
        spelled[name] = value
    return spelled


class _Table(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    __pydantic_extra__: dict[str, str]

    @property
    def rules(self) -> Rules:
        """The table's rules by axis."""
        return dict(self.__pydantic_extra__ or {})


class ModeTable(_Table):
    """What differs in one mode: rules of activations and caches, and under `params` those of parameters."""

    params: Rules = Field(
        default_factory=ReadOnlyDict, description="What differs for parameters in this mode."
    )

    _lower = field_validator("params", mode="before")(_lower_keys)


class TensorTable(_Table):
    """Rules for the parameters whose path a pattern matches (`re.search`); the first entry naming an axis wins."""

    match: str = Field(
        description="Regular expression searched in the '/'-joined path; one whose search takes linear time."
    )


class PolicyTable(BaseModel):
    """What is done where a rule cannot be followed to the letter."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    preset: Literal["strict", "eformer"] = Field(
        default="strict", description="Where the other settings start from."
    )
    indivisible: Literal["error", "prefix", "replicate", "drop"] | None = Field(
        default=None, description="A size that does not divide."
    )
    conflict: Literal["error", "first_dim"] | None = Field(
        default=None, description="Two dims that want one mesh axis."
    )
    gather: str = Field(
        default="-",
        description='Mesh axes over which a weight is gathered where it is used, "fsdp+sp".',
    )
    zero1: str = Field(
        default="-",
        description='Mesh axes that optimizer state is sharded over beyond its parameter, "dp | -".',
    )
    idle: str = Field(
        default="-", description='Mesh axes that no rule names, on purpose, "replica+other".'
    )
    missing: Literal["skip", "replicate"] | None = Field(
        default=None, description="A standard mesh axis that the mesh lacks."
    )
    rank: Literal["error", "fit"] | None = Field(
        default=None, description="An annotation of another rank than the array."
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
    "ulysses",
    "vanilla",
]
Own = Annotated[str, Field(pattern=rf"^{OWN_ATTENTION}[A-Za-z_][A-Za-z0-9_-]*$")]
AttentionName = Shipped | Own


class AttentionTable(BaseModel):
    """Which implementation of attention serves each mode; insert attends to nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    default: AttentionName = Field(default="auto", description="In the modes that are not named.")
    train: AttentionName | None = Field(default=None, description="In training.")
    prefill: AttentionName | None = Field(default=None, description="In prefill.")
    decode: AttentionName | None = Field(default=None, description="In decode.")


class Strategy(BaseModel):
    """A mesh, rules and a policy as data: `load` it, start from a `preset`, overlay with `|`, `compile` it.

    Raises:
      StrategyError: (or the class of the first problem) every problem at once, with file, key path and a fix.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Literal[1] = Field(default=1, description="Version of this format.")
    name: str = Field(default="", description="Name shown in reports.")
    axis_types: AxisTypeName | Table[AxisTypeName] = Field(
        default="auto", description="Axis type of all mesh axes, or by mesh axis."
    )
    mesh: Table[int] = Field(
        default_factory=ReadOnlyDict,
        description="Mesh axes, slowest first: total sizes, slices included; one may be -1.",
    )
    dcn: Table[int] = Field(
        default_factory=ReadOnlyDict, description="The part of a total that crosses slices."
    )
    axes: Table[str] = Field(
        default_factory=ReadOnlyDict,
        description="Axes of your own, each with a line that says what it is.",
    )
    rules: Rules = Field(default_factory=ReadOnlyDict, description=f"Rule of each axis. {RULE}")
    params: Rules = Field(
        default_factory=ReadOnlyDict, description="What differs for parameters, as they are stored."
    )
    modes: Annotated[
        dict[Literal["train", "prefill", "decode", "insert"], ModeTable],
        AfterValidator(ReadOnlyDict),
    ] = Field(
        default_factory=ReadOnlyDict,
        description="What differs in a mode; insert inherits from decode.",
    )
    policy: PolicyTable = Field(default_factory=PolicyTable)
    attention: AttentionTable = Field(default_factory=AttentionTable)
    tensors: Annotated[list[TensorTable], AfterValidator(ReadOnlyList)] = Field(
        default_factory=ReadOnlyList, description="Exceptions by path, for stored and used weights."
    )

    _origin: Origin = PrivateAttr(default_factory=dict)

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
                data[table] = _python_integers(data[table])
        self._build(data, {})

    def _build(self, data: Mapping[str, Any], origin: Origin) -> None:
        check_entries(data, origin)
        problems: list[Problem] = []
        try:
            super().__init__(**data)
        except ValidationError as error:
            problems = check.from_pydantic(error, type(self), origin)
        raise_problems(first_problems(itertools.chain(problems, check.data_problems(data, origin))))
        self._origin = origin

    @classmethod
    def _made(cls, data: Mapping[str, Any], origin: Origin) -> Strategy:
        made = cls.__new__(cls)
        made._build(data, origin)
        return made

    @classmethod
    def load(cls, path: str | Path) -> Strategy:
        """Read a `.toml` or `.json` file.

        Raises:
          StrategyError: the file does not exist, does not parse, or says something wrong.
        """
        return cls._made(*files.read(Path(path)))

    @classmethod
    def loads(
        cls, text: str, *, format: Literal["toml", "json"] = "toml", source: str = ""
    ) -> Strategy:
        """Read a strategy from text; `source` is the name that messages use."""
        return cls._made(*files.parse_strategy(text, format=format, source=source or f"<{format}>"))

    @classmethod
    def preset(cls, name: str) -> Strategy:
        """Return one of the strategies that come with the package; `presets()` lists them."""
        return cls._made(*files.read_preset(name))

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Return the names of the presets."""
        return files.preset_names()

    def to_data(self) -> dict[str, Any]:
        """Return what was set, as plain data; what was not set stays inherited."""
        return self.model_dump(exclude_unset=True)

    def dumps(self, *, format: Literal["toml", "json"] = "toml") -> str:
        """Return the text of the file, such that `Strategy.loads(s.dumps()) == s`."""
        return files.render(self.to_data(), format=format)

    def dump(self, path: str | Path) -> Path:
        """Write a `.toml` or `.json` file, whole or not at all, and return its path: `load(dump(path)) == self`.

        A file that is overwritten keeps its permissions.

        Raises:
          StrategyError: another ending, no such folder, or what has the name is no file.
        """
        return files.write(Path(path), self.to_data())

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON Schema of the file format, for editors and other tools."""
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **cls.model_json_schema(),
        }

    def __or__(self, other: Strategy) -> Strategy:
        """Overlay: what `other` sets wins, key by key; its `[[tensors]]` come first.

        Raises:
          StrategyError: (or the class of the first problem) what the two do not say together; `axis_types` as one word over or
            under a table of them, which leaves open what holds for the mesh axes that it does not name.
        """
        if not isinstance(other, Strategy):
            return NotImplemented
        base, over = self.to_data(), other.to_data()
        raise_problems(check.overlay_problems(base, over, below=self._origin, above=other._origin))
        return type(self)._made(
            check.merge(base, over), check.merge_origin(self._origin, other._origin, over)
        )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy.

        Raises:
          StrategyError: an `update`, which pydantic would take unchecked.
        """
        if update:
            raise StrategyError(
                f"model_copy(update=...) would put {', '.join(map(str, update))} in without a check",
                fix="lay the change over it, strategy | Strategy(rules={...}), which checks the whole",
            )
        return super().model_copy(deep=deep)

    def _identity(self) -> tuple[str, tuple[str, ...]]:
        """What equality and hash cover: everything said or defaulted; the order of mesh axes, because it is that of devices."""
        return json.dumps(self.model_dump(), sort_keys=True), tuple(self.mesh)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strategy) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def compile(self) -> AxisRules:
        """Return the frozen, hashable rules.

        Raises:
          StrategyError, UnknownAxisError, MissingMeshAxisError: every problem at once.
        """
        return check.compile_rules(self.to_data(), self._origin, self.policy)

    def tables(self) -> dict[KeyPath, dict[str, Rule]]:
        """Return the rules of every table as they are written, by key path, such as `("modes", "decode")`, and axis."""
        return check.parse_rules(self.to_data(), self._origin).tables

    def source(self, *path: str) -> str:
        """Return the `file:line` of a key, or of the nearest table that holds it, or an empty string."""
        return source_of(path, self._origin)

    def make_mesh(self, *, devices: Sequence[Any] | None = None) -> Mesh:
        """Build the strategy's mesh; starts the backend.

        Raises:
          StrategyError: the strategy has no `[mesh]`.
          MeshSpecError: the devices do not fit it.
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
