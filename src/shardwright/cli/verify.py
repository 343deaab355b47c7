"""Options of `shardwright plan --verify`, and the compile that they ask for."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

import jax

from shardwright.cli.inputs import Setting, read_count
from shardwright.errors import ProgramError, StrategyError
from shardwright.plan.hardware import Topology
from shardwright.plan.planner import Program
from shardwright.plan.verify.compiler import make_target
from shardwright.plan.verify.run import Verification, verify_plan
from shardwright.vocabulary.modes import mode_name

_OPTIONS = ("compiler", "effort", "verify_timeout", "verify_cache")


def add_verify_options(command: argparse.ArgumentParser) -> None:
    """Add the options of a command that plans."""
    command.add_argument(
        "--verify",
        action="store_true",
        help="compile for the target, without its devices, and compare; TPUs need the extra "
        "tpu-aot",
    )
    add_compiler_options(command)


def add_compiler_options(command: argparse.ArgumentParser) -> None:
    """Add the options that say how `--verify` compiles."""
    command.add_argument(
        "--compiler",
        choices=("tpu", "cpu"),
        help="with --verify (default: tpu with --topology, else cpu, which shows sharding only)",
    )
    command.add_argument(
        "--effort",
        choices=("low", "full"),
        help="with --verify: how much the compiler optimizes (default: low, which is faster)",
    )
    command.add_argument(
        "--verify-timeout",
        type=read_count,
        metavar="SECONDS",
        help="with --verify: stop a compile after so many seconds (default: 600)",
    )
    command.add_argument(
        "--verify-cache",
        metavar="DIR",
        help="with --verify: folder of compiled results (default: ~/.cache/shardwright)",
    )


def check_verify_options(arguments: argparse.Namespace, topology: Topology | None) -> None:
    """Check that options fit each other and that the compiler is installed.

    Raises:
      StrategyError: They do not fit, or it is not.
    """
    if arguments.verify:
        make_target(topology, platform=arguments.compiler)
        # Exporting asks for the default device. Leave accelerators to those who run programs.
        if not jax.config.jax_platforms:  # type: ignore[attr-defined]
            jax.config.update("jax_platforms", "cpu")
        return
    for option in _OPTIONS:
        if getattr(arguments, option) is not None:
            raise StrategyError(
                f"--{option.replace('_', '-')} is for --verify, which is not given",
                fix="add --verify",
            )


def verify_programs(
    arguments: argparse.Namespace,
    setting: Setting,
    topology: Topology | None,
    programs: Mapping[str, Program],
) -> tuple[dict[str, Verification], list[str]]:
    """Compile each program; return what was verified by mode, and what could not be, as text.

    A worker that dies is bad news about one program. The plans of all are still shown.
    """
    verified: dict[str, Verification] = {}
    failures = []
    for mode, program in programs.items():
        try:
            verified[mode] = verify_plan(
                setting.manager.for_mode(mode),
                program,
                topology=topology,
                platform=arguments.compiler,
                effort=arguments.effort or "low",
                timeout=arguments.verify_timeout or 600,
                cache=cache_folder(arguments.verify_cache),
            )
        except ProgramError as error:
            failures.append(f"mode {mode_name(mode)} is not verified: {error}")
    return verified, failures


def cache_folder(name: str | None) -> Path:
    """Return the folder of compiled results: as given, else in the user's cache."""
    if name is not None:
        return Path(name)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "shardwright"
