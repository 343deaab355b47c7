"""The page on many hosts shows the files of the example."""

from __future__ import annotations

import re
import subprocess

import yaml

from tests.docs.snippets import ROOT

PAGE = (ROOT / "docs/many-hosts.md").read_text(encoding="utf-8")


def block(title: str) -> str:
    (text,) = re.findall(rf'```text title="{title}"\n(.*?)```', PAGE, re.DOTALL)
    return str(text)


def test_batch_script_is_that_of_the_example() -> None:
    script = ROOT / "examples/many_hosts/train.slurm"
    assert block("train.slurm") == script.read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_manifest_runs_the_example_on_as_many_hosts_as_it_says() -> None:
    (job,) = yaml.safe_load(block("train.yaml"))["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    # JAX takes `parallelism` for the number of processes.
    assert spec["parallelism"] == spec["completions"]
    (container,) = spec["template"]["spec"]["containers"]
    assert (ROOT / container["command"][1]).exists()
