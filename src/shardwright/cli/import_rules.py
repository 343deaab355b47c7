"""`shardwright import`: write a strategy file from the rules of another library."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.cli.arguments import EXIT_CODES, add_output, make_parser
from shardwright.cli.show import print_json, print_lines, width_of
from shardwright.errors import StrategyError
from shardwright.mesh.text import parse_mesh
from shardwright.resolution.unknown_axes import check_axes
from shardwright.show.tables import wrap
from shardwright.strategy import files
from shardwright.vocabulary.axes import (
    EMPTY,
    canonical_axis,
    file_name,
)

if TYPE_CHECKING:
    from shardwright.interop.logical_rules import Imported

_SOURCES = ("maxtext", "maxdiffusion", "levanter", "rules")
_SEMANTICS = ("flax", "nnx", "strict")
_NAME = re.compile(r"([^=]+)=([A-Za-z_][A-Za-z0-9_]*)(?::(activation|param))?")
# By format: the Python function that imports, and the function that annotates a model.
_IN_PYTHON = {
    "maxtext": ("maxtext.to_strategy", "flax.annotate(variables, imported.names)"),
    "maxdiffusion": ("maxtext.to_strategy", "flax.annotate(variables, imported.names)"),
    "levanter": ("levanter.to_strategy", "haliax.annotate(model, imported.names)"),
    "rules": ("to_strategy", "flax.annotate(variables, imported.names)"),
}
_EPILOG = f"""\
FORMAT is maxtext, maxdiffusion or levanter (a YAML configuration), or rules (a YAML or JSON file
with a list of pairs, alone or under logical_axis_rules). OVERRIDE is key=value, and replaces a
value of a configuration. The strategy has the mesh of the file, and gives the same specs as the
other library. Every rule has a comment with the file and line that it comes from. Each name becomes
an axis of its own, unless --name or --vocabulary maps it. A key `replicated`, in the file or as an
override, lists names that no rule mentions.

examples:
  shardwright import maxtext base.yml ici_tensor_parallelism=4 -o strategy.toml
  shardwright import levanter gpt2.yaml trainer.model_axis_size=2 --vocabulary -o strategy.toml
  shardwright import rules rules.yml --mesh data:2,model:4 --name embed=EMBED:param

exit codes: 0 imported;
{EXIT_CODES}, a rule cannot be imported, or
the file to write exists."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    what = "Write a strategy from the rules of another library, which need not be installed."
    command = make_parser("import", what, epilog=_EPILOG)
    command.add_argument("format", choices=_SOURCES, help="kind of the file")
    command.add_argument("file", metavar="FILE", help="the file to import")
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="key=value, which overrides a configuration",
    )
    command.add_argument(
        "--mesh", metavar="MESH", help="if the format is rules: mesh axes, such as data:2,model:4"
    )
    command.add_argument(
        "--semantics",
        choices=_SEMANTICS,
        help="if the format is rules: how to read the list (default: flax)",
    )
    command.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="NAME=AXIS[:ROLE]",
        help="the axis that a name means, and optionally its role; repeat the option for more",
    )
    command.add_argument(
        "--own-axis",
        action="append",
        default=[],
        metavar="AXIS",
        help="an axis of your own that --name uses; repeat the option for more",
    )
    command.add_argument(
        "--vocabulary",
        action="store_true",
        help="map the names of the library's models to axes such as EMBED",
    )
    command.add_argument(
        "-o", "--out", metavar="FILE", help="write a .toml file (default: print it)"
    )
    command.add_argument("--force", action="store_true", help="replace an existing file")
    add_output(command)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Import, write or print, and return the exit code.

    Raises:
      ShardingError: The file cannot be read, or its rules cannot be imported.
    """
    _check_options(arguments)
    imported = _imported(arguments)
    text = commented(imported, os.path.basename(arguments.file))
    if arguments.out is not None:
        files.write_text(Path(arguments.out), text, overwrite=arguments.force)
    if arguments.json:
        names = {}
        for name, target in imported.names.items():
            role = None if isinstance(target, str) else target[1]
            names[name] = {"axis": file_name(_axis_of(target)), "role": role}
        notes, data = list(imported.notes), imported.strategy.to_data()
        file = {} if arguments.out is None else {"file": arguments.out}
        print_json({"names": names, "notes": notes, "strategy": data, **file})
    elif arguments.out is None:
        print_lines(text.rstrip("\n").split("\n"))
    else:
        width = width_of(arguments.width)
        lines = [line for text in str(imported).split("\n") for line in _filled(text, width)]
        steps = [line for text in _next_steps(imported, arguments) for line in _filled(text, width)]
        print_lines([*lines, f"written to {arguments.out}", *steps])
    return 0


def _next_steps(imported: Imported, arguments: argparse.Namespace) -> list[str]:
    """Return lines that show how a model uses the imported strategy and the imported axes."""
    call, annotate = _IN_PYTHON[arguments.format]
    steps = [
        f'next  pm = sw.PartitionManager(sw.Strategy.load("{arguments.out}"))',
        f"next  imported = {call}(...); --json prints its names",
        f"next  axes = {annotate}",
    ]
    own = [
        name
        for name, target in imported.names.items()
        # A name without an axis of the vocabulary maps to LOGICAL_NAME. Models must annotate with
        # this axis.
        if _axis_of(target) == canonical_axis(f"logical_{name}")
    ]
    if own:
        # One example is enough, and the shortest one is easiest to read.
        name = min(own, key=len)
        steps.append(f"next  or annotate by hand: {name} is LOGICAL_{name.upper()}")
    return steps


def _check_options(arguments: argparse.Namespace) -> None:
    """Check that the options fit the format.

    Raises:
      StrategyError: An option does not fit, or the format is `rules` and no mesh is given.
    """
    is_rules = arguments.format == "rules"
    unfit = {
        "--mesh": not is_rules and arguments.mesh is not None,
        "--semantics": not is_rules and arguments.semantics is not None,
        "--vocabulary": is_rules and arguments.vocabulary,
        "an override": is_rules and bool(arguments.overrides),
        "--force": arguments.out is None and arguments.force,
    }
    if options := [option for option, is_unfit in unfit.items() if is_unfit]:
        place = "without -o" if options == ["--force"] else arguments.format
        what = f"import {place} takes no {' or '.join(options).removeprefix('an ')}"
        raise StrategyError(what, fix="leave it out")
    if is_rules and arguments.mesh is None:
        what = "a list of rules does not state its mesh"
        raise StrategyError(what, fix="add --mesh, such as --mesh data:2,model:4")
    if arguments.out is not None and Path(arguments.out).suffix != ".toml":
        raise StrategyError(f"{arguments.out!r} is not a .toml file", fix="write -o strategy.toml")


def _imported(arguments: argparse.Namespace) -> Imported:
    # Import here, because no other command needs the bridges.
    from shardwright.interop import haliax, maxtext
    from shardwright.interop.logical_rules import read_rules, resized, to_strategy

    pairs = [*map(read_name, arguments.name)]
    names = dict(pairs)
    listed = [name for name, _ in pairs]
    if twice := [name for name in names if listed.count(name) > 1]:
        raise StrategyError(f"--name maps {twice[0]!r} twice", fix="map each name once")
    given = [(f"--name {name}", _axis_of(target)) for name, target in names.items()]
    declare = "declare an axis of your own with --own-axis"
    check_axes(given, arguments.own_axis, declare=declare)
    if arguments.format in ("maxtext", "maxdiffusion"):
        known = maxtext.NAMES if arguments.format == "maxtext" else maxtext.DIFFUSION_NAMES
        names = {**known, **names} if arguments.vocabulary else names
        return maxtext.to_strategy(
            arguments.file,
            overrides=dict(map(_override, arguments.overrides)),
            names=names,
            own_axes=arguments.own_axis,
        )
    if arguments.format == "levanter":
        listed_names = haliax.NAMES if arguments.vocabulary else {}
        # A name that stands for EMPTY is no axis, and needs no rule.
        own = {name: axis for name, axis in listed_names.items() if axis != EMPTY}
        axes = {name: target for name, target in names.items() if isinstance(target, str)}
        if roles := [name for name in names if name not in axes]:
            what = f"levanter has the same names in both roles: --name {roles[0]}=... takes no role"
            raise StrategyError(what, fix=f"write --name {roles[0]}=AXIS")
        return haliax.levanter.to_strategy(
            arguments.file,
            overrides=dict(map(_override, arguments.overrides)),
            names={**own, **axes},
            replicated=tuple(own),
            own_axes=arguments.own_axis,
        )
    rules, places = read_rules(Path(arguments.file))
    if not rules:
        what = f"{os.path.basename(arguments.file)} has no rules"
        raise StrategyError(what, fix="write [[embed, fsdp]], for instance")
    spec = parse_mesh(arguments.mesh)
    # The sizes of the mesh are set below, because one of them may be -1.
    imported = to_strategy(
        rules,
        mesh=dict.fromkeys(spec.names, 1),
        names=names,
        semantics=arguments.semantics or "flax",
        source=places,
        own_axes=arguments.own_axis,
    )
    return resized(imported, mesh=dict(zip(spec.names, spec.sizes, strict=True)))


def read_name(text: str) -> tuple[str, Any]:
    """Return the name and the target of `embed=EMBED:param`.

    Raises:
      StrategyError: The text has another form.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        what = f"--name {text!r} is not NAME=AXIS or NAME=AXIS:ROLE"
        raise StrategyError(what, fix="write --name embed=EMBED:param; roles: activation, param")
    axis = canonical_axis(match[2])
    return match[1], (axis, match[3]) if match[3] else axis


def _axis_of(target: Any) -> str:
    """Return the axis of a target. A target is an axis, or an axis with a role."""
    axis: str = target if isinstance(target, str) else target[0]
    return axis


def _override(text: str) -> tuple[str, Any]:
    """Return the key and the value of `ici_tensor_parallelism=4`. The value is read as YAML."""
    import yaml

    key, sign, value = text.partition("=")
    try:
        if key and sign:
            return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        what = f"the value of {text!r} is not YAML"
        raise StrategyError(what, fix="write ici_tensor_parallelism=4") from error
    raise StrategyError(f"{text!r} is not key=value", fix="write ici_tensor_parallelism=4")


def commented(imported: Imported, name: str) -> str:
    """Return the text of a strategy file, with notes on top. A comment behind each rule names the
    file and line that the rule comes from.
    """
    head = [f"Imported from {name}.", *(f"note: {note}" for note in imported.notes)]
    comments = [line for text in head for line in _filled(text, 96)]
    return "\n".join([*(f"# {line}" for line in comments), "", *_with_places(imported), ""])


def _with_places(imported: Imported) -> Iterator[str]:
    """Yield the lines of a strategy file. A comment names the source file and line of each rule."""
    section: tuple[str, ...] = ()
    counts: dict[str, int] = {}
    for line in imported.strategy.dumps().rstrip("\n").split("\n"):
        if line.startswith("[["):
            name = line.strip("[]")
            # In the key path of an entry of `[[tensors]]`, its number comes second: `tensors.0`.
            counts[name] = counts.get(name, -1) + 1
            section = (name, str(counts[name]))
        elif line.startswith("["):
            section = tuple(line.strip("[]").split("."))
        elif section[:1] in (("rules",), ("params",), ("modes",)) and " = " in line:
            key = line.partition(" = ")[0].strip('"')
            if place := imported.strategy.source(*section, key):
                yield f"{line}  # {place}"
                continue
        yield line


def _filled(text: str, width: int) -> list[str]:
    # The rest of a wrapped text is indented two columns more than its first line.
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return wrap(text, width, rest=indent)
