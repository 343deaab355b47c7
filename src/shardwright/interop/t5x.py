"""Partitioners and models of T5X: their rules, mesh and axis names.

T5X need not be installed. `names` maps each logical name to an axis and a role, as in
`logical_rules`.
"""

import ast
import dataclasses
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from shardwright.errors import Problem, StrategyError, raise_problems
from shardwright.interop.logical_rules import (
    Imported,
    MeshAxes,
    Names,
    axis_of,
    by_name,
    check_names,
    check_used,
    from_logical_axis_rules,
    resized,
)
from shardwright.vocabulary.axes import EMPTY
from shardwright.vocabulary.integers import as_integer

Rules = Sequence[tuple[str, MeshAxes]]

# The rules of `embed` by activation and parameter dims, as in t5x/partitioning.py of T5X.
_EMBED: Mapping[tuple[int, int], Rules] = {
    (1, 1): (("embed", None),),
    (2, 1): (("embed", "model"),),
    (1, 2): (("embed", "data"),),
    (2, 2): (("embed", "model"), ("embed", "data")),
}
_SHARDED = {"batch": "data", **dict.fromkeys(("vocab", "mlp", "heads", "joined_kv"), "model")}
_REPLICATED = (
    "kv",
    "relpos_buckets",
    "abspos_buckets",
    "length",
    "layers",
    "stack",
    "mlp_activations",
)


def standard_rules(
    activation_partitioning_dims: int = 1,
    parameter_partitioning_dims: int = 1,
    additional_rules: Rules = (),
) -> tuple[tuple[str, MeshAxes], ...]:
    """Return the rules of T5X's `standard_logical_axis_rules` with these arguments.

    Raises:
      StrategyError: A number of dims is neither 1 nor 2.

    >>> standard_rules(2, 2)[-2:]
    (('stack', None), ('mlp_activations', None))
    """
    given = (activation_partitioning_dims, parameter_partitioning_dims)
    dims: Any = (as_integer(given[0]), as_integer(given[1]))
    if dims not in _EMBED:
        what = (
            f"activation and parameter partitioning dims are 1 or 2, got {given[0]} and {given[1]}"
        )
        raise StrategyError(what, fix="pass 1 or 2 for each")
    if not isinstance(additional_rules, (list, tuple)):
        what = f"additional_rules must be a list of pairs, got {additional_rules!r}"
        raise StrategyError(what, fix="write [('experts', 'data')]")
    replicated = tuple((name, None) for name in _REPLICATED)
    return (*_SHARDED.items(), *_EMBED[dims], *replicated, *additional_rules)


def from_partitioner(
    rules: Rules | None = None,
    *,
    num_partitions: int | None = None,
    model_parallel_submesh: Sequence[int] | None = None,
    ici_mesh_shape: Sequence[int] | None = None,
    dcn_mesh_shape: Sequence[int] | None = None,
    names: Names | None = None,
    source: str | Sequence[str] | None = None,
    own_axes: Iterable[str] = (),
) -> Imported:
    """Turn the arguments of T5X's `PjitPartitioner` into a strategy with the same specs.

    Args:
      rules: Its `logical_axis_rules`. Defaults to `standard_rules()`.
      num_partitions: Size of the mesh axis "model". Defaults to 1. "data" gets the other devices.
      model_parallel_submesh: Shape of a submesh, whose product is the size of "model".
        `num_partitions` is then ignored, as in T5X.
      ici_mesh_shape: Sizes of "replica", "data" and "model" inside a slice. The batch is then
        sharded over "replica" too, and the two arguments above are ignored.
      dcn_mesh_shape: Sizes of the same mesh axes across slices. Pass it with `ici_mesh_shape`.
      names: T5X's name -> (axis, role). A name that is not listed becomes an axis of its own.
      source: Where the rules are written: one text, or one for each rule. `explain` shows it.
      own_axes: Axes of your own that `names` maps to. The strategy declares them.

    Raises:
      StrategyError: Sizes are invalid, or a rule is not a pair.
      UnknownAxisError: `names` maps to axes that are neither in the vocabulary nor in `own_axes`;
        all are reported at once.
      MissingMeshAxisError: Rules name mesh axes that the mesh lacks; all are reported at once.

    >>> imported = from_partitioner(standard_rules(1, 2), num_partitions=2)
    >>> imported.strategy.mesh
    mappingproxy({'data': -1, 'model': 2})
    """
    if rules is None:
        rules = standard_rules()
        source = source or "standard_logical_axis_rules"
    shapes = {"ici_mesh_shape": ici_mesh_shape, "dcn_mesh_shape": dcn_mesh_shape}
    sized: dict[str, Any] = {}
    ignored = []
    if any(shape is not None for shape in shapes.values()):
        inside, across = _hybrid(shapes)
        sized["mesh"] = {axis: size * across[axis] for axis, size in inside.items()}
        if crossing := {axis: size for axis, size in across.items() if size > 1}:
            sized["dcn"] = crossing
        rules = [("batch", ("replica", "data")) if _is_of_batch(rule) else rule for rule in rules]
        used = "ici_mesh_shape"
        ignored += ["model_parallel_submesh"] if model_parallel_submesh is not None else []
    else:
        is_submesh = model_parallel_submesh is not None
        used = "model_parallel_submesh" if is_submesh else "num_partitions"
        listed = model_parallel_submesh if is_submesh else (num_partitions,)
        sized["mesh"] = {"data": -1, "model": _product(used, listed)}
    if num_partitions is not None and used != "num_partitions":
        ignored.append("num_partitions")
    notes = [f"ignored, because {used} is given: {', '.join(ignored)}"] if ignored else []
    # The rules do not depend on sizes, and -1 is not a size. `resized` sets the sizes.
    mesh = dict.fromkeys(sized["mesh"], 1)
    imported = from_logical_axis_rules(
        rules, mesh=mesh, names=names, source=source or "rules", own_axes=own_axes
    )
    imported = resized(imported, **sized)
    return dataclasses.replace(imported, notes=(*notes, *imported.notes))


def _hybrid(
    shapes: Mapping[str, Sequence[int] | None],
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of a mesh inside a slice and across slices."""
    problems = []
    for name, shape in shapes.items():
        sizes = [as_integer(size) for size in shape] if isinstance(shape, Sequence) else []
        if len(sizes) != 3 or any(size is None or size < 1 for size in sizes):
            what = f"{name} must be 3 positive integers, got {shape!r}"
            fix = f"write {name}=(1, 4, 2), the sizes of replica, data and model"
            problems.append(Problem(error=StrategyError, what=what, fix=fix))
    raise_problems(problems)
    inside, across = (
        {axis: int(size) for axis, size in zip(("replica", "data", "model"), shape, strict=True)}
        for shape in shapes.values()
        if shape is not None
    )
    return inside, across


def _is_of_batch(rule: Any) -> bool:
    """Tell whether a rule is one of the batch. `from_logical_axis_rules` refuses malformed ones."""
    return isinstance(rule, (tuple, list)) and len(rule) == 2 and rule[0] == "batch"


def _product(name: str, listed: Any) -> int:
    is_listed = isinstance(listed, (list, tuple))
    sizes = [1 if size is None else as_integer(size) for size in (listed if is_listed else [0])]
    if any(size is None or size < 1 for size in sizes):
        what = f"{name} must be positive integers, got {listed!r}"
        fix = "pass num_partitions=2, or model_parallel_submesh=(2, 1, 1, 1)"
        raise StrategyError(what, fix=fix)
    return math.prod(size for size in sizes if size is not None)


def annotations(variables: Mapping[str, Any], names: Names) -> tuple[dict[str, Any], Any]:
    """Return the collections of variables, and the annotation of each array.

    Collections of axes are left out.

    T5X's models write the names of `params` into the collection `params_axes`, as `AxisMetadata`.
    That collection may also have `PartitionSpec`s of names, as
    `flax.linen.partitioning.get_axis_names` returns them. As in T5X, a variable without names is
    replicated.

    Args:
      variables: What `model.init` returns, or its shapes by `jax.eval_shape`.
      names: T5X's name -> (axis, role), or an axis for both roles.

    Raises:
      UnknownAxisError: Variables have names that are not in `names`; all are reported at once.
      StrategyError: A variable has another number of names than dims, names cannot be read or
        belong to no variable, or there are names and no variable has any.
    """
    check_names(names)
    values = {name: tree for name, tree in variables.items() if not name.endswith("_axes")}
    problems: list[Problem] = []
    names_of = {
        name: _names_of(variables.get(f"{name}_axes", {}), f"{name}_axes", problems)
        for name in values
    }
    annotated = {
        name: _annotated(tree, names_of[name], name, names, problems)
        for name, tree in values.items()
    }
    raise_problems(by_name(problems))
    check_used(
        names,
        is_named=any(own is not None for each in names_of.values() for own in each.values()),
        has_dims=any(len(np.shape(leaf)) for leaf in jax.tree.leaves(values)),
        fix="pass all collections that model.init returns, params_axes too",
    )
    return values, annotated


def _annotated(
    tree: Any, names_of: Mapping[str, Any], where: str, names: Names, problems: list[Problem]
) -> Any:
    unused = {place: None for place, own in names_of.items() if own is not None}

    def annotation(path: Any, leaf: Any) -> tuple[str, ...]:
        place = "/".join(str(getattr(key, "key", key)) for key in path)
        own = names_of.get(place)
        unused.pop(place, None)
        rank = len(np.shape(leaf))
        if own is None:
            return (EMPTY,) * rank
        if len(own) != rank:
            what = f"{len(own)} names {tuple(own)} for {rank} dims"
            fix = "write one name for each dim"
            path_in_model = f"{where}/{place}"
            problems.append(Problem(error=StrategyError, what=what, path=path_in_model, fix=fix))
        return tuple(axis_of(name, names, f"{where}/{place}", problems) for name in own)

    axes = jax.tree_util.tree_map_with_path(annotation, tree)
    for place in unused:
        what, fix = "these axes belong to no variable", "remove them, or correct their path"
        where_written = f"{where}_axes/{place}_axes"
        problems.append(Problem(error=StrategyError, what=what, path=where_written, fix=fix))
    return axes


def _names_of(axes: Any, where: str, problems: list[Problem]) -> dict[str, Any]:
    """Return path -> names of a collection of axes; None for a variable without names."""

    def is_leaf(value: Any) -> bool:
        # AxisMetadata is a pytree node without leaves.
        return not isinstance(value, Mapping)

    leaves, _ = jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_leaf)
    named = {}
    for path, leaf in leaves:
        place = "/".join(str(getattr(key, "key", key)) for key in path)
        own = leaf if isinstance(leaf, (PartitionSpec, tuple, list)) else None
        own = getattr(leaf, "names", own)
        if own is None and leaf is not None:
            what = f"{leaf!r} is neither AxisMetadata nor a tuple of names"
            fix = 'write ("embed", "mlp")'
            path_in_axes = f"{where}/{place}"
            problems.append(Problem(error=StrategyError, what=what, path=path_in_axes, fix=fix))
        named[place.removesuffix("_axes")] = own
    return named


_PARTITIONER = ("num_partitions", "model_parallel_submesh", "ici_mesh_shape", "dcn_mesh_shape")
_STANDARD = ("activation_partitioning_dims", "parameter_partitioning_dims", "additional_rules")
_BINDING = re.compile(r"(?P<name>[\w./]+)\s*=\s*(?P<value>.+)", re.DOTALL)
# T5X's own function, with or without its module. A function of another module has other rules.
_STANDARD_CALL = re.compile(r"@(t5x\.)?(partitioning\.)?standard_logical_axis_rules\(\)|None")
_INCLUDE = re.compile(r"include\s+(['\"])(?P<name>.+)\1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Binding:
    """The text of a value in a gin file, and where it is written."""

    text: str
    place: str


def from_gin(
    path: str | os.PathLike[str],
    *,
    bindings: Sequence[str] = (),
    names: Names | None = None,
    own_axes: Iterable[str] = (),
) -> Imported:
    """Turn the partitioner of a gin file of T5X into a strategy with the same specs.

    The arguments of `PjitPartitioner` and `standard_logical_axis_rules` are read, also through
    macros and in included files. Included files are searched for beside the file and in the folders
    above.

    Args:
      path: The gin file.
      bindings: Lines that follow the file, such as "PjitPartitioner.num_partitions = 2".
      names: T5X's name -> (axis, role). A name that is not listed becomes an axis of its own.
      own_axes: Axes of your own that `names` maps to. The strategy declares them.

    Raises:
      StrategyError: The file cannot be read, a value that is needed is not a literal, or the
        partitioner is `MoePjitPartitioner`.
      UnknownAxisError: `names` maps to axes that are neither in the vocabulary nor in `own_axes`;
        all are reported at once.
    """
    gin = _Gin()
    gin.read(Path(path), ())
    gin.add("\n".join(bindings), "bindings", Path(path), ())
    for name, binding in gin.bindings.items():
        if "MoePjitPartitioner" in name or "MoePjitPartitioner" in binding.text:
            what = "MoePjitPartitioner has a mesh and rules that the file does not state"
            fix = "pass its rules and its mesh to from_logical_axis_rules"
            raise StrategyError(what, path=binding.place, fix=fix)
    sizes = {key: gin.value(f"PjitPartitioner.{key}") for key in _PARTITIONER}
    rules = gin.binding("PjitPartitioner.logical_axis_rules")
    if rules is None or _STANDARD_CALL.fullmatch(rules.text):
        arguments = {key: gin.value(f"standard_logical_axis_rules.{key}") for key in _STANDARD}
        arguments = {key: value for key, value in arguments.items() if value is not None}
        listed: Any = standard_rules(**arguments)
        bound = [gin.binding(f"standard_logical_axis_rules.{key}") for key in arguments]
        places = ", ".join(each.place for each in bound if each is not None) or Path(path).name
        source = [f"standard_logical_axis_rules ({places})"] * len(listed)
    else:
        listed = gin.value("PjitPartitioner.logical_axis_rules")
        if not isinstance(listed, (list, tuple)):
            what = f"logical_axis_rules must be a list of pairs, got {listed!r}"
            raise StrategyError(what, path=rules.place, fix="write [('embed', 'model')]")
        source = [f"{rules.place}[{at}]" for at in range(len(listed))]
    imported = from_partitioner(listed, **sizes, names=names, source=source, own_axes=own_axes)
    if not any(name.rpartition("/")[2].startswith("PjitPartitioner.") for name in gin.bindings):
        gin.notes.append(
            f"{Path(path).name} does not bind PjitPartitioner: T5X's defaults are used"
        )
    return dataclasses.replace(imported, notes=(*dict.fromkeys(gin.notes), *imported.notes))


class _Gin:
    """The bindings of gin files by `scope/function.argument`. A later one replaces an earlier one.

    The module of a function is left out: `partitioning.PjitPartitioner.x` is `PjitPartitioner.x`.
    """

    def __init__(self) -> None:
        self.bindings: dict[str, _Binding] = {}
        self.notes: list[str] = []

    def read(self, path: Path, above: tuple[Path, ...]) -> None:
        """Read a file, and what it includes."""
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            fix = "check the path and its permissions"
            raise StrategyError(f"cannot read {str(path)!r}: {reason.lower()}", fix=fix) from error
        resolved = path.resolve()
        if resolved in above:
            chain = " -> ".join(each.name for each in (*above, resolved))
            raise StrategyError(f"the files include each other: {chain}", fix="remove one include")
        self.add(text, path.name, path, (*above, resolved))

    def add(self, text: str, source: str, path: Path, above: tuple[Path, ...]) -> None:
        """Read lines. Included files are searched for beside a file and in the folders above."""
        for name, binding in _statements(text, source):
            if name != "include":
                self.bindings[name] = binding
                continue
            folders = [path.parent, *path.resolve().parents]
            places = [folder / binding.text for folder in folders]
            included = next((place for place in places if place.is_file()), None)
            if included is None:
                self.notes.append(f"not found, and not imported: {binding.text}")
            else:
                self.read(included, above)

    def binding(self, name: str) -> _Binding | None:
        """Return the binding of a name without a scope, or else the one that all scopes share.

        Raises:
          StrategyError: Only bindings in scopes exist, and they differ.
        """
        scoped = {
            key: binding
            for key, binding in self.bindings.items()
            if "/" in key and key.rpartition("/")[2] == name
        }
        plain = self.bindings.get(name)
        if plain is None and len({binding.text for binding in scoped.values()}) > 1:
            listed = ", ".join(
                f"{key} = {binding.text} ({binding.place})" for key, binding in scoped.items()
            )
            fix = f"pass the one to import in bindings=, such as {name} = 1"
            raise StrategyError(f"the scopes differ: {listed}", fix=fix)
        if plain is None:
            return next(iter(scoped.values()), None)
        self.notes += [
            f"not imported, because it applies in its scope only: {key} = {binding.text} "
            f"({binding.place})"
            for key, binding in scoped.items()
            if binding.text != plain.text
        ]
        return plain

    def value(self, name: str) -> Any:
        """Return the value of a binding; None if the name is not bound.

        Raises:
          StrategyError: The value is not a literal.
        """
        binding, seen = self.binding(name), {name}
        while binding is not None and binding.text.startswith("%") and binding.text not in seen:
            seen.add(binding.text)
            macro = binding.text[1:]
            own = self.bindings.get(macro)
            binding = own or self.binding(macro.rpartition("/")[2]) or binding
        if binding is None:
            return None
        try:
            return ast.literal_eval(binding.text)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            what = f"the value of {name} is not a literal: {binding.text}"
            fix = "write the value there, or pass it to from_partitioner"
            raise StrategyError(what, path=binding.place, fix=fix) from error


def _statements(text: str, source: str) -> Iterator[tuple[str, _Binding]]:
    """Yield the bindings of a file in order, with the name `include` for included files."""
    block = ""
    for number, line in _logical_lines(text):
        place = f"{source}:{number}"
        if include := _INCLUDE.fullmatch(line.strip()):
            yield "include", _Binding(text=include["name"], place=place)
        elif line.rstrip().endswith(":") and not line.startswith((" ", "\t")):
            block = line.strip()[:-1]
        elif binding := _BINDING.fullmatch(line.strip()):
            is_inside = line.startswith((" ", "\t")) and block
            name = f"{block}.{binding['name']}" if is_inside else binding["name"]
            scope, slash, own = name.rpartition("/")
            own = ".".join(own.split(".")[-2:])
            yield f"{scope}{slash}{own}", _Binding(text=binding["value"].strip(), place=place)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers, without comments.

    After a backslash, and inside of brackets, a line continues on the next one.
    """
    start, pending, depth = 0, "", 0
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r"#(?=(?:[^'\"]|'[^']*'|\"[^\"]*\")*$).*", "", line).rstrip()
        is_open = code.endswith("\\")
        code = code.removesuffix("\\")
        start = start if pending else number
        pending += f"\n{code}" if pending else code
        bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", code)
        depth += sum(map(bare.count, "([{")) - sum(map(bare.count, ")]}"))
        if is_open or depth > 0 or not pending:
            continue
        yield start, pending
        pending, depth = "", 0
    if pending:
        yield start, pending
