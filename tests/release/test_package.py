"""The wheel and the sdist, installed in environments outside of the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A program for each extra that a user installs. The others are for development.
USES = {
    "optax": """
import optax, shardwright as sw
with sw.PartitionManager(sw.Strategy.preset("ddp"), mesh=sw.create_mesh("dp:1")) as pm:
    print(pm.init_state(optax.adam(1e-3), {"w": jax.numpy.ones(8)}, {"w": (sw.EMBED,)}))
""",
    "cli": "import rich; from shardwright.cli.main import main; main(['presets', 'list'])",
    "fix": """
import pathlib
from shardwright.cli.main import main
pathlib.Path("mine.toml").write_text("[mesh]\\nfsdp = -1\\ntp = 4  # heads\\n")
main(["check", "mine.toml", "--devices", "6", "--fix"])
assert "tp = 2  # heads" in pathlib.Path("mine.toml").read_text()
""",
    "pytest": "import pytest; pytest.main(['--help'])",
    "checkpoint": """
import shardwright.checkpoint as checkpoint
checkpoint.save("state", {"w": jax.numpy.ones(8)}, step=1)
print(checkpoint.restore("state", {"w": jax.numpy.zeros(8)}))
""",
    "flax": "import flax; from shardwright.interop import flax, nnx",
    "equinox": "import equinox; from shardwright.interop import equinox",
    "maxtext": "import yaml; from shardwright.interop import maxtext",
    "hf": """
from shardwright import checkpoint
checkpoint.export_safetensors("out", {"w": jax.numpy.ones(8)})
""",
}
DEVELOPMENT = {"demo", "test", "docs", "dev", "tpu-aot", "peers"}


def run(*command: object, cwd: Path) -> str:
    """Run a command without this checkout on its path, and return what it prints."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    ran = subprocess.run(
        [*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def environment(folder: Path, *requirements: object, below: Path | None = None) -> Path:
    """Make an environment that sees the packages of another one, and return its interpreter."""
    venv.create(folder, with_pip=below is None)
    python = folder / "bin" / "python"
    pip = (python if below is None else below / "bin" / "python", "-m", "pip", "--quiet")
    if below is not None:
        purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
        place = run(python, "-c", purelib, cwd=folder).strip()
        other = run(below / "bin" / "python", "-c", purelib, cwd=folder)
        (Path(place) / "below.pth").write_text(other)
        pip += ("--python", python)
    run(*pip, "--disable-pip-version-check", "install", *requirements, cwd=folder)
    return python


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("built")
    python = environment(folder / "build", "build", "twine")
    run(python, "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
    run(python, "-m", "twine", "check", "--strict", *(folder / "dist").iterdir(), cwd=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel and its core packages."""
    folder = tmp_path_factory.mktemp("installed") / "environment"
    environment(folder, next(built.glob("*.whl")))
    return folder


def test_each_extra_has_a_use() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert set(extras) == {*USES, *DEVELOPMENT}
    assert not re.search(r"[\d.](dev|a|b|rc)\d", str(extras))


@pytest.mark.full
def test_wheel_runs_the_first_program(installed: Path, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    program, printed = re.findall(r"```(?:python|text)\n(.*?)```", readme, re.DOTALL)[:2]
    python = installed / "bin" / "python"
    assert run(python, "-c", program, cwd=tmp_path) == printed
    assert "usage: shardwright" in run(installed / "bin" / "shardwright", "--help", cwd=tmp_path)
    where = run(python, "-c", "import shardwright; print(shardwright.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed)
    top = {path.name for path in Path(where.strip()).parents[1].iterdir()}
    assert not top & {"tests", "examples", "benchmarks", "tools", "docs"}


@pytest.mark.full
@pytest.mark.parametrize("extra", USES)
def test_each_extra_alone(extra: str, built: Path, installed: Path, tmp_path: Path) -> None:
    wheel = next(built.glob("*.whl"))
    python = environment(tmp_path / "environment", f"{wheel}[{extra}]", below=installed)
    run(python, "-c", f"import jax\n{USES[extra]}", cwd=tmp_path)


@pytest.mark.full
def test_sdist_has_what_its_tests_import(built: Path, installed: Path, tmp_path: Path) -> None:
    sdist = next(built.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / sdist.name.removesuffix(".tar.gz")
    names = ("pytest", "hypothesis")
    python = environment(tmp_path / "environment", *names, "jsonschema", below=installed)
    printed = run(python, "-m", "pytest", "-q", "-x", "tests/resolution", cwd=folder)
    assert re.search(r"\d+ passed", printed), printed
    assert "failed" not in printed


@pytest.mark.full
def test_hook_checks_strategies(tmp_path: Path) -> None:
    environment(tmp_path / "environment", "pre-commit")
    tool = tmp_path / "environment" / "bin" / "pre-commit"
    folder = tmp_path / "repository"
    folder.mkdir()
    run("git", "init", "--quiet", cwd=folder)
    (folder / "strategy.toml").write_text('version = 1\n[rules]\nembed = "fsdp"\n')
    run("git", "add", ".", cwd=folder)
    store = f"PRE_COMMIT_HOME={tmp_path / 'store'}"
    hook = ("env", store, tool, "try-repo", ROOT, "shardwright-check", "--all-files", "--verbose")
    assert "no findings" in run(*hook, cwd=folder)
    (folder / "strategy.toml").write_text('version = 1\n[rules]\nembd = "fsdp"\n')
    with pytest.raises(AssertionError, match="did you mean 'embed'"):
        run(*hook, cwd=folder)
