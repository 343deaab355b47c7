"""`shardwright presets`: list the strategies of the package, show one, or copy one."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from shardwright.cli.arguments import EXIT_CODES, add_output, make_parser
from shardwright.cli.show import print_json, print_lines, width_of
from shardwright.errors import StrategyError
from shardwright.show.tables import remarked_table
from shardwright.strategy import files

_ACTIONS = ("list", "show", "copy")
_EPILOG = f"""\
examples:
  shardwright presets
  shardwright presets show fsdp_tp
  shardwright presets copy fsdp_tp mine.toml

exit codes: 0 done;
{EXIT_CODES}, or the file exists."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    command = make_parser(
        "presets",
        "List the strategies of the package, show one, or copy one to a file that you then change.",
        epilog=_EPILOG,
    )
    actions = "list them (default); show the file of one; copy one to a file"
    command.add_argument("action", nargs="?", choices=_ACTIONS, default="list", help=actions)
    command.add_argument("preset", nargs="?", metavar="PRESET", help="preset to show or copy")
    command.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="file to write (default: PRESET.toml)",
    )
    command.add_argument(
        "--name", metavar="NAME", help="copy: name of the new strategy (default: the file's name)"
    )
    command.add_argument("--force", action="store_true", help="copy: replace an existing file")
    add_output(command)
    return command


def run(arguments: argparse.Namespace) -> int:
    """List, show or copy, and return the exit code.

    Raises:
      StrategyError: The preset does not exist, arguments do not fit the action, or the file exists
        or cannot be written.
    """
    action, preset, file = arguments.action, arguments.preset, arguments.file
    if arguments.name is not None and action != "copy":
        raise StrategyError(f"presets {action} takes no --name", fix="leave it out")
    # Only `list` takes no preset, and only `copy` takes a file.
    if (preset is not None) != (action != "list") or (file is not None and action != "copy"):
        fix = {
            "list": "shardwright presets list",
            "show": "shardwright presets show fsdp_tp",
            "copy": "shardwright presets copy fsdp_tp mine.toml",
        }
        raise StrategyError(
            f"presets {action} {'takes no preset' if action == 'list' else 'takes a preset'}",
            fix=f"write {fix[action]}",
        )
    if action == "list":
        _list(arguments)
    elif action == "show" and arguments.json:
        from shardwright.strategy.model import Strategy

        print_json(Strategy.preset(preset).to_data())
    elif action == "show":
        print_lines(files.preset_text(preset).rstrip("\n").split("\n"))
    else:
        path = Path(file or f"{preset}.toml")
        path = _copy(preset, path, name=arguments.name, force=arguments.force)
        if arguments.json:
            print_json({"preset": preset, "file": os.fspath(path)})
        else:
            print_lines([f"{preset} copied to {path}"])
    return 0


def _list(arguments: argparse.Namespace) -> None:
    from shardwright.strategy.model import Strategy

    presets = [(name, Strategy.preset(name)) for name in files.preset_names()]
    if arguments.json:
        print_json(
            {
                "presets": [
                    {"name": name, "mesh": dict(strategy.mesh), "what": _what(name)}
                    for name, strategy in presets
                ]
            }
        )
        return
    rows = [("preset", "mesh", "what")]
    for name, strategy in presets:
        mesh = ",".join(f"{axis}:{size}" for axis, size in strategy.mesh.items())
        rows.append((name, mesh, _what(name)))
    print_lines(remarked_table(rows, width=width_of(arguments.width)))


def _what(name: str) -> str:
    """Return the first sentence of the file of a preset, which says what the preset is for."""
    # The first line names the schema for editors. The comment after it says what the preset is for.
    _, *lines = files.preset_text(name).splitlines()
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    # The whole comment is one text: a sentence may go over several lines.
    return " ".join(comment).partition(". ")[0].rstrip(".")


def _copy(preset: str, path: Path, *, name: str | None, force: bool) -> Path:
    """Copy a preset to a file, or into a folder as `PRESET.toml`, and return the path.

    The copy gets the name of its file, because errors and reports show the name of a strategy.
    """
    if path.is_dir():
        path = path / f"{preset}.toml"
    # A file name may have bytes that are not UTF-8, but a strategy file must be UTF-8.
    name = (path.stem if name is None else name).encode(errors="replace").decode()
    # If the copy is TOML too, copy the text of the preset, to keep its comments.
    if path.suffix == ".toml":
        # Render the line, because a name may have quotes or backslashes.
        line = files.render({"name": name}, format="toml").rstrip("\n")
        text = files.preset_text(preset)
        # Pass a function, because `sub` would interpret the backslashes of a replacement text.
        text = re.sub(r"^name = .*$", lambda _: line, text, count=1, flags=re.MULTILINE)
        return files.write_text(path, text, overwrite=force)
    from shardwright.strategy.model import Strategy

    data = {**Strategy.preset(preset).to_data(), "name": name}
    return files.write(path, data, overwrite=force)
