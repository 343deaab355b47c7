"""The batch script of the page on many hosts, under a Slurm of one node that the test starts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("slurmctld", "slurmd", "munged", "sbatch")
pytestmark = [
    pytest.mark.product,
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        not all(map(shutil.which, TOOLS)) or os.geteuid() != 0,
        reason="needs root, and Debian's slurm-wlm and munge",
    ),
]
CONFIG = """
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
SlurmdPort={other}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SchedulerType=sched/builtin
SelectType=select/cons_tres
# A job that is queued again waits this long before it may begin.
KillWait=5
MinJobAge=300
NodeName={host} CPUs=4 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment variables of a running Slurm."""
    host = socket.gethostname().split(".")[0]
    with socket.socket() as first, socket.socket() as second:
        first.bind(("", 0))
        second.bind(("", 0))
        port, other = first.getsockname()[1], second.getsockname()[1]
    file = tmp_path / "slurm.conf"
    file.write_text(CONFIG.format(host=host, port=port, other=other, folder=tmp_path))
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    (tmp_path / "munge.key").write_bytes(os.urandom(128))
    (tmp_path / "munge.key").chmod(0o600)
    environment = os.environ | {"SLURM_CONF": str(file)}
    munge = [
        "munged", "--foreground", "--force", f"--socket={tmp_path}/munge.socket",
        f"--key-file={tmp_path}/munge.key", f"--log-file={tmp_path}/munge.log",
        f"--pid-file={tmp_path}/munge.pid", f"--seed-file={tmp_path}/munge.seed",
    ]  # fmt: skip
    daemons = []
    try:
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D"]):
            with (tmp_path / f"{command[0]}.out").open("w") as output:
                daemons.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=output)
                )
            time.sleep(2)
        yield environment
    finally:
        # Tasks of a job outlive slurmd.
        subprocess.run(["scancel", "--user=root", "--signal=KILL"], env=environment, check=False)
        time.sleep(2)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def wait_for(is_true: Callable[[], bool], output: Path, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        text = output.read_text() if output.exists() else "no output"
        assert time.monotonic() < end, text
        time.sleep(0.5)


def test_lost_task_is_queued_again_and_continues(slurm: dict[str, str], tmp_path: Path) -> None:
    output, saved = tmp_path / "train.log", tmp_path / "checkpoints"
    source = os.pathsep.join([str(ROOT / "src"), slurm.get("PYTHONPATH", "")])
    cpus = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    environment = slurm | cpus | {"PYTHONPATH": source, "PYTHON": sys.executable}
    command = [
        "sbatch", "--parsable", "--nodes=1", "--ntasks-per-node=4", "--overcommit",
        f"--output={output}", "examples/many_hosts/train.slurm", str(saved),
        "--steps=16", "--every=4",
    ]  # fmt: skip
    queued = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert queued.returncode == 0, queued.stderr
    job = queued.stdout.strip()

    wait_for(lambda: output.exists() and "step 5 loss" in output.read_text(), output)
    tasks = subprocess.run(
        ["pgrep", "-f", f"train.py {saved}"], capture_output=True, text=True, check=True
    ).stdout.split()
    pythons = [int(task) for task in tasks if "srun" not in Path(f"/proc/{task}/comm").read_text()]
    os.kill(max(pythons), signal.SIGKILL)

    def has_ended() -> bool:
        state = subprocess.run(
            ["scontrol", "show", "job", job],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        return "JobState=COMPLETED" in state

    # Slurm lets a job that is queued again wait for two minutes.
    subprocess.run(
        ["scontrol", "update", "JobId=" + job, "StartTime=now"], env=environment, check=False
    )
    wait_for(has_ended, output)
    text = output.read_text()
    steps = [int(step) for step in re.findall(r"step (\d+) loss", text)]
    again = next(at for at, step in enumerate(steps) if at and step <= steps[at - 1])
    assert steps[again] % 4 == 0, text  # it began at a checkpoint, and not at step 0
    assert steps[again] >= 4, text
    assert steps[again:] == list(range(steps[again], 16)), text
    losses = dict(
        re.findall(r"step (\d+) loss ([\d.]+)", "\n".join(text.splitlines()[: again + 1]))
    )
    for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", text):
        assert abs(float(loss) - float(losses.get(step, loss))) < 1e-4, text
