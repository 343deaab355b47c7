"""The action and the hooks, as the repository of a user runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from shardwright.testing import Golden
from tools import addresses

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
import jax
import jax.numpy as jnp
import shardwright as sw
from shardwright.plan import Program


def step(params, x):
    return sw.shard(sw.shard(x, sw.BATCH, sw.EMBED) @ params["w"], sw.BATCH, sw.MLP_INTERMEDIATE)


def programs():
    specs = {"w": sw.ArraySpec((64, 256), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))}
    params = {"w": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    return Program(step, (params, x), (specs, (sw.BATCH, sw.EMBED)))
"""


def git(folder: Path, *arguments: str) -> str:
    who = (
        "-c",
        "user.name=user",
        "-c",
        "user.email=user@example.org",
        "-c",
        "commit.gpgsign=false",
    )
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def act(folder: Path, **variables: str) -> tuple[int, str]:
    """Run the script of the action, and return its exit code and the comment or its output."""
    # `shardwright` as a command, of the interpreter that runs the tests.
    command = folder.parent / "bin" / "shardwright"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m shardwright "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PATH": path, "PYTHONPATH": source, "COLUMNS": "90"} | variables
    ran = subprocess.run(
        ["sh", str(ROOT / "tools/action.sh")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.full
def test_action_compares_a_pull_request_with_its_base(tmp_path: Path, golden: Golden) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "mine.toml").write_text('version = 1\nbase = "fsdp"\n[rules]\nvocab = "fsdp"\n')
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "strategy")
    empty = git(folder, "rev-parse", "HEAD")
    (folder / "model.py").write_text(MODEL)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "model")
    base = git(folder, "rev-parse", "HEAD")
    (folder / "model.py").write_text(MODEL.replace("256", "512"))
    options = {"PROGRAM": "model.py:programs", "OPTIONS": "--strategy mine.toml --mesh fsdp:4"}

    code, comment = act(folder, STRATEGIES="mine.toml", BASE=base, **options)
    assert code == 0, comment
    golden(comment, "comment")
    output = tmp_path / "output"
    code, nothing = act(
        folder, BASE=base, GITHUB_OUTPUT=str(output), RUNNER_TEMP=str(tmp_path), **options
    )
    assert (code, nothing) == (0, "")
    assert output.read_text() == f"comment={tmp_path}/shardwright-comment.md\n"
    assert (tmp_path / "shardwright-comment.md").read_text() in comment

    # A program that does not fit has a plan, which is compared; then the job fails.
    small = options | {"OPTIONS": "--strategy mine.toml --mesh fsdp:4 --max-hbm 1KiB"}
    code, comment = act(folder, BASE=base, **small)
    assert code == 1, comment
    assert "### Plan of train" in comment
    code, comment = act(
        folder, BASE=base, **options | {"PROGRAM": str(folder / "model.py:programs")}
    )
    assert code == 2, comment
    code, comment = act(folder, BASE=empty, **options)
    assert code == 0, comment
    assert "The base has no plan to compare with" in comment
    assert "model.py" in comment
    inner = folder / "inner"  # which the base does not have
    inner.mkdir()
    (inner / "model.py").write_text(MODEL)
    code, comment = act(
        inner, BASE=base, **options | {"OPTIONS": "--strategy ../mine.toml --mesh fsdp:4"}
    )
    assert code == 0, comment
    assert "The base has no plan to compare with" in comment
    assert "inner" in comment
    code, comment = act(folder, **options)
    assert code != 0
    assert "name the commit to compare with" in comment
    (folder / "mine.toml").write_text('version = 1\n[rules]\nvocabulary = "fsdp"\n')
    code, comment = act(folder, STRATEGIES="mine.toml", BASE=base, **options)
    assert code == 1, comment
    assert git(folder, "worktree", "list").count("\n") == 0


def test_page_uses_inputs_of_the_action() -> None:
    page = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```text\n(- uses: .*?)```", page, re.DOTALL)
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    used = yaml.safe_load(block)[1]["with"]
    assert used.keys() <= action["inputs"].keys()
    steps = yaml.dump(action["runs"])
    assert all(f"inputs.{name}" in steps for name in action["inputs"])


@pytest.mark.parametrize("name", ["strategy.toml", "conf/strategies_v2.toml", "strategies/a.toml"])
def test_hook_takes_strategy_files(name: str) -> None:
    hooks = (ROOT / ".pre-commit-hooks.yaml").read_text()
    files = next(line for line in hooks.splitlines() if line.strip().startswith("files:"))
    pattern = files.split(":", 1)[1].strip()
    assert re.search(pattern, name) is not None
    assert re.search(pattern, "pyproject.toml") is None


def test_addresses_have_one_source(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    files = ("zensical.toml", "pyproject.toml", "CITATION.cff", "README.md", addresses.NOTEBOOK)
    for name in files:
        (tmp_path / name).write_text((ROOT / name).read_text())
    for _ in range(2):  # a second run does nothing
        addresses.write("https://github.com/Owner/shardwright", tmp_path)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    site = tomllib.loads((tmp_path / "zensical.toml").read_text())["project"]
    assert project["urls"]["Source"] == site["repo_url"] == "https://github.com/Owner/shardwright"
    assert site["site_url"] == project["urls"]["Documentation"]
    assert site["site_url"] == "https://owner.github.io/shardwright/"
    assert project["optional-dependencies"]
    assert (tmp_path / "CITATION.cff").read_text().count("repository-code:") == 1
    colab = "https://colab.research.google.com/github/Owner/shardwright/blob/main/"
    link = f"]({colab}{addresses.NOTEBOOK})"
    assert (tmp_path / "README.md").read_text().count(link) == 1
    head, install = json.loads((tmp_path / addresses.NOTEBOOK).read_text())["cells"][:2]
    assert head["source"][0].endswith(f"{link}\n")
    assert head["source"][2] == "# shardwright in five minutes\n"
    assert (
        "    %pip install --quiet git+https://github.com/Owner/shardwright\n" in install["source"]
    )
    with pytest.raises(SystemExit, match="is not https"):
        addresses.write("shardwright", tmp_path)
    with pytest.raises(SystemExit, match="another address"):
        addresses.write("https://github.com/other/shardwright", tmp_path)


def test_versions_agree() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
