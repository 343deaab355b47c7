"""The options of `--verify`, and the compilation that it runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    """Add the flag `--verify`, and the options that say how it compiles."""
    command.add_argument(
        "--verify",
        action="store_true",
        help="compile the program without the target's devices, and compare it with the plan; "
        "compiling for TPUs needs the extra tpu-aot",
    )
    add_compiler_options(command)


def add_compiler_options(command: argparse.ArgumentParser) -> None:
    """Add the options that say how `--verify` compiles."""
    command.add_argument(
        "--compiler",
        choices=("tpu", "gpu", "cpu"),
        help="with --verify: the target (default: that of --topology, else cpu, which only shows "
        "the sharding)",
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
        help="with --verify: stop a compile that takes longer (default: 600)",
    )
    command.add_argument(
        "--verify-cache",
        metavar="DIR",
        help="with --verify: folder of compiled results (default: ~/.cache/shardwright)",
    )


def check_verify_options(arguments: argparse.Namespace, topology: Topology | None) -> None:
    """Check that the options fit each other and that the compiler is installed.

    Raises:
      StrategyError: The options do not fit each other, or the compiler is not installed.
    """
    if arguments.verify:
        prepare_compiler(topology, arguments.compiler)
        return
    for option in _OPTIONS:
        if getattr(arguments, option) is not None:
            raise StrategyError(
                f"--{option.replace('_', '-')} is used with --verify, which is not given",
                fix="add --verify",
            )


def prepare_compiler(topology: Topology | None, platform: Any = None) -> None:
    """Check, before anything is traced, that the compiler is installed. Let JAX export on the CPU.

    Raises:
      StrategyError: The compiler is not installed.
    """
    make_target(topology, platform=platform)
    # Exporting starts the backend of the default device. Use the CPU, so that accelerators stay
    # free for programs that run.
    if not jax.config.jax_platforms:  # type: ignore[attr-defined]
        jax.config.update("jax_platforms", "cpu")


def verify_programs(
    arguments: argparse.Namespace,
    setting: Setting,
    topology: Topology | None,
    programs: Mapping[str, Program],
) -> tuple[dict[str, Verification], list[str]]:
    """Compile each program. Return the verifications by mode, and a text for each failure.

    Each program is compiled in a process of its own. If such a process dies, only its program is
    not verified, and all plans are still shown.
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
    """Return the folder of compiled results. Defaults to a folder in the user's cache."""
    if name is not None:
        return Path(name)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "shardwright"
