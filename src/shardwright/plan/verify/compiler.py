"""Compile a program in a worker process, and keep the result on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from shardwright.errors import ProgramError, StrategyError
from shardwright.plan.collectives.collective import Collective
from shardwright.plan.hardware import Topology
from shardwright.plan.verify.export import DEVICES, Exported
from shardwright.plan.verify.gpus import GPUS, cuda_plugin
from shardwright.vocabulary.shown import data_of

Platform = Literal["tpu", "gpu", "cpu"]
Effort = Literal["low", "full"]

_ON_CPUS: Final = (
    "compile for CPUs, to check the sharding only: plan with --compiler cpu, prove without "
    "--topology"
)
TIMEOUT: Final = 600.0  # seconds; compiling an 8B training step takes 40 to 200
# With these settings, libtpu prints no warnings on a machine without TPUs, and several processes
# may load it at the same time.
_TPU_SETTINGS: Final = {
    "JAX_PLATFORMS": "cpu",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Without a GPU, JAX must not look for CUDA's libraries, and XLA cannot autotune its kernels.
_GPU_SETTINGS: Final = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_shard_autotuning=false",
}
_SETTINGS: Final = {"tpu": _TPU_SETTINGS, "gpu": _GPU_SETTINGS, "cpu": {"JAX_PLATFORMS": "cpu"}}
# Without this option, libtpu counts the two cores of a v4 chip as two devices.
_TPU_OPTIONS: Final = {"v4": {"chip_config_name": "megacore"}}
# libtpu refuses a program with one of two messages: "Used 17.5G of 15.75G hbm", or "memory required
# for HLO temporaries (18.25G) exceeds available HBM".
_USED = re.compile(
    r"(?:[Uu]sed |memory required for HLO temporaries \()([0-9.]+)([KMGT]?)"
    r"(?: of |\) exceeds available HBM \()[0-9.]+[KMGT]?"
)
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_FORMAT: Final = 3  # version of the results on disk; results of other versions are not used


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The devices to compile for, and how much to optimize.

    Attributes:
      platform: `tpu`, `gpu`, or `cpu` to check the sharding only.
      topology: One slice or domain, or "" for CPUs.
      effort: `full` or `low`. With `low`, the compile is four times as fast, and the program sends
        the same bytes within 1%.
      slices: Number of slices or domains.
      dcn: The part of each mesh axis that crosses slices, if there are several slices.
    """

    platform: Platform
    topology: str = ""
    effort: Effort = "low"
    slices: int = 1
    dcn: tuple[int, ...] = ()

    @property
    def chip(self) -> str:
        """Name of the chip, or "" for CPUs."""
        return self.topology.partition(":")[0]

    @property
    def distribution(self) -> str:
        """Name of the installed distribution that has the compiler."""
        names = {"tpu": "libtpu", "gpu": cuda_plugin() or ""}
        return names.get(self.platform, "jaxlib")

    @property
    def compiler(self) -> str:
        """Name and version of the compiler."""
        words = f"{self.distribution} {importlib.metadata.version(self.distribution)}"
        count = "" if self.slices == 1 else f"{self.slices}x"
        return f"{words} for {count}{self.topology}" if self.topology else f"{words} for CPUs"

    def to_json(self) -> dict[str, Any]:
        """Return the target as plain data, without `slices` and `dcn` if there is one slice."""
        data = dataclasses.asdict(self)
        if self.slices == 1:
            del data["slices"], data["dcn"]
        return data


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The result of compiling a program.

    Attributes:
      target: The target that it was compiled for.
      collectives: Collectives of the compiled program.
      memory: Bytes on one device by name: `argument_size`, `output_size`, `alias_size`,
        `temp_size`, `peak_memory`, `host_argument_size`, `host_temp_size`. Empty if the compiler
        refused the program.
      seconds: Seconds that the compile took.
      refused: The compiler's message if the program needs more memory than the chip has, or "".
      hlo: Text of the compiled program if it was asked for, else "".
      placed: Two hashes, one for the arguments and one for the results, if `hlo` was asked for.
        Each hash covers which device has which part of each array.
      cached: Whether the result was on disk.
    """

    target: Target
    collectives: tuple[Collective, ...] = ()
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    refused: str = ""
    hlo: str = ""
    placed: tuple[str, ...] = ()
    cached: bool = False

    @property
    def peak(self) -> int | None:
        """Most bytes that the program needs on one device at one time, or None if unknown.

        The compiler reports no peak if the program has temporary arrays on the host.
        """
        if self.refused:
            match = _USED.search(self.refused)
            return None if match is None else int(float(match[1]) * _UNITS[match[2]])
        if self.memory.get("host_temp_size"):
            return None
        if self.target.platform == "gpu":
            # XLA for GPUs allocates all temporary arrays at once, in one buffer.
            parts = ("argument_size", "output_size", "temp_size")
            return sum(self.memory[part] for part in parts) - self.memory["alias_size"]
        # XLA for CPUs leaves temporary arrays out of the peak (measured with JAX 0.10.2).
        if self.target.platform == "cpu":
            return None
        # The peak of libtpu counts arguments on the host. The peak without them equals, to four
        # digits, the total that libtpu reports when it refuses the program for a smaller chip.
        return self.memory["peak_memory"] - self.memory.get("host_argument_size", 0)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return data_of(self)


def make_target(
    topology: Topology | None, *, platform: Platform | None = None, effort: Effort = "low"
) -> Target:
    """Return a target, after a check that its compiler is installed.

    Args:
      topology: The slices or domains, or None.
      platform: Defaults to the platform of the topology, else to `cpu`.
      effort: `full` or `low`, see `Target`.

    Raises:
      StrategyError: There is no compiler for the target, or it is not installed.
    """
    # `jax.export` writes programs with flatbuffers.
    if importlib.util.find_spec("flatbuffers") is None:
        raise StrategyError(
            "compiling a program needs flatbuffers, which is not installed",
            fix="run python -m pip install flatbuffers",
        )
    if platform == "cpu" or (platform is None and topology is None):
        return Target(platform="cpu", effort=effort)
    if topology is None:
        raise StrategyError(
            f"compiling for {(platform or '').upper()}s needs a topology, and none is given",
            fix=f"pass --topology v5p:4x4x4 or 16xh100:8, or {_ON_CPUS}",
        )
    known = GPUS if topology.platform == "gpu" else DEVICES
    if topology.chip.name not in known:
        raise StrategyError(
            f"there is no compiler for the chip {topology.chip.name}",
            fix=f"use one of {', '.join(known)}, or {_ON_CPUS}",
        )
    if platform not in (None, topology.platform):
        raise StrategyError(
            f"{topology} has no {platform.upper()}s", fix=f"pass --compiler {topology.platform}"
        )
    if topology.platform == "gpu" and cuda_plugin() is None:
        raise StrategyError(
            f"compiling for {topology} needs a CUDA plugin of JAX, which is not installed",
            fix="run make test-gpu in a clone of shardwright, and use the Python of .venv-gpu; or "
            f"{_ON_CPUS}",
        )
    if topology.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise StrategyError(
            f"compiling for {topology} needs libtpu, which is not installed",
            fix='run python -m pip install -e ".[tpu-aot]" in a clone of shardwright, or '
            f"{_ON_CPUS}",
        )
    one = dataclasses.replace(topology, slices=1)
    return Target(
        platform="gpu" if topology.platform == "gpu" else "tpu",
        topology=str(one),
        effort=effort,
        slices=topology.slices,
    )


def compile_exported(
    exported: Exported,
    target: Target,
    *,
    timeout: float = TIMEOUT,
    cache: Path | None = None,
    lines: Sequence[str] = (),
    hlo: bool = False,
) -> Compiled:
    """Compile a program in a worker process, or return the result that is on disk.

    Args:
      exported: The program.
      target: The target to compile for.
      timeout: Seconds after which the worker is killed.
      cache: Folder of results. Defaults to none.
      lines: Source lines that the result names. If they change, the program is compiled again.
      hlo: Whether to fill in the fields `hlo` and `placed` of the result.

    Raises:
      ProgramError: The worker died or ran out of time, or the compiler cannot compile the program.
      StrategyError: The folder cannot be written.
    """
    request = {
        **target.to_json(),
        "options": _options(target, exported.mesh),
        "mesh": exported.mesh,
        "donated": list(exported.donated),
        "specs": exported.specs,
        **({"hlo": True} if hlo else {}),
    }
    file = None
    if cache is not None:
        # A result on disk is used again for the same program, target and compiler versions.
        names = dict.fromkeys(("jax", "jaxlib", target.distribution))
        versions = {name: importlib.metadata.version(name) for name in names}
        text = json.dumps([_FORMAT, request, versions, lines, exported.text], sort_keys=True)
        file = cache / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    known = None if file is None else _read_result(file)
    result = known or _compile(exported.program, request, target, timeout)
    if file is not None and known is None:
        _write_result(file, result)
    return Compiled(
        target=target,
        collectives=tuple(Collective.from_json(data) for data in result.get("collectives", ())),
        memory=result.get("memory", {}),
        seconds=result.get("seconds", 0.0),
        refused=result.get("refused", ""),
        hlo=result.get("hlo", ""),
        placed=tuple(result.get("placed", ())),
        cached=known is not None,
    )


def _options(target: Target, mesh: Mapping[str, int]) -> Mapping[str, Any]:
    """Return the options, besides the name, that describe the topology to JAX."""
    if target.platform != "gpu":
        return _TPU_OPTIONS.get(target.chip, {})
    model, devices = GPUS[target.chip], math.prod(mesh.values())
    per_host = math.gcd(devices, model.per_host)
    # numbers of slices, hosts per slice, and GPUs per host
    shape = f"1x{devices // per_host}x{per_host}"
    return {"topology": shape, "target_config": model.target_config()}


def _read_result(file: Path) -> dict[str, Any] | None:
    """Return a result from disk, or None if there is no complete one."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _write_result(file: Path, result: Mapping[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Another process may write the same result, so the file is replaced in one step.
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, delete=False, encoding="utf-8"
        ) as temporary:
            json.dump(result, temporary)
        os.replace(temporary.name, file)
    except OSError as error:
        raise StrategyError(
            f"cannot write {str(file.parent)!r}: {(error.strerror or str(error)).lower()}",
            fix="name another folder: --verify-cache DIR",
        ) from error


def _compile(
    program: bytes, request: Mapping[str, Any], target: Target, timeout: float
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="shardwright-") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        (folder / "program.bin").write_bytes(program)
        # The output goes to a file: a worker that writes much would block on a pipe that nobody
        # reads.
        with (folder / "messages").open("w+", encoding="utf-8", errors="replace") as messages:
            code = _run_worker(folder, messages, target, timeout)
            messages.seek(0)
            last = messages.read().strip().rpartition("\n")[2]
        result = _read_result(folder / "result.json")
    if result is None:
        # `subprocess` returns the number of a signal as a negative status.
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            fix = "the machine may be out of memory: free some memory, or scan over layers"
        else:
            how = f"ended with status {code}: {last:.300}"
            fix = "check that the environment of this Python can compile for the target"
        raise ProgramError(f"the process of {target.compiler} {how}", fix=fix)
    if "error" in result:
        raise ProgramError(
            f"{target.compiler} cannot compile the program: {result['error']:.500}",
            fix=f"read the compiler's message, or {_ON_CPUS}",
        )
    return result


def _run_worker(folder: Path, messages: Any, target: Target, timeout: float) -> int:
    """Run the worker and return its exit status. The worker is killed if it runs out of time."""
    # The worker imports this shardwright, even if it is not installed.
    paths = os.pathsep.join(filter(None, sys.path))
    settings = _SETTINGS[target.platform]
    # The request has the number of devices, so the worker must not take it from XLA_FLAGS.
    unset = ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    # Without this variable, JAX's cache of compiled programs may return an equal program with other
    # source lines, such as this program before its file was edited.
    environment["JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY"] = "true"
    worker = subprocess.Popen(
        [sys.executable, "-m", "shardwright.plan.verify.worker", str(folder)],
        env={**environment, **settings, "PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
        stdout=messages,
        stderr=messages,
        # The worker has its own process group, so that `killpg` also ends the compiler's children.
        start_new_session=True,
    )
    try:
        return worker.wait(timeout)
    except subprocess.TimeoutExpired as error:
        raise ProgramError(
            f"{target.compiler} did not finish within {timeout:g} seconds, and was stopped",
            fix="allow more seconds with --verify-timeout, or scan over layers, so that the "
            "program is smaller",
        ) from error
    finally:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
