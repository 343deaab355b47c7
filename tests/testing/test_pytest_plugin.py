"""The plugin as its users see it: pytest in a process of its own."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType, Mesh

import shardwright as sw
from shardwright.testing import pytest_plugin
from shardwright.testing.meshes import cpu_mesh, requested_devices
from shardwright_pytest import pytest_configure
from tests.testing.runs import SRC, run_pytest, said

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    return lambda files, *args, **settings: run_pytest(
        pytester, monkeypatch, files, *args, **settings
    )


MESHES = """
import jax, pytest
import shardwright as sw
from shardwright.manager import context

@pytest.mark.mesh("dp:2,tp:4", "dp:8", axis_types=["auto", "explicit"])
def test_several(mesh):
    types = {str(kind) for kind in mesh.axis_types}
    print("MESHES_SEEN", dict(mesh.shape), types, {d.platform for d in mesh.devices.flat})

@pytest.mark.mesh("dp:2,fsdp:-1", axis_types={"dp": "explicit"})
@pytest.mark.mesh("tp:4")
def test_stacked(mesh):
    print("MESHES_SEEN", dict(mesh.shape))

@pytest.mark.mesh("fsdp:2,tp:2", strategy=["fsdp_tp", "ddp | mine.toml"], mode="decode")
@pytest.mark.parametrize("size", [4, 8])
def test_manager(manager, mesh, size):
    assert sw.current_manager() is manager and manager.mesh is mesh
    assert jax.sharding.get_mesh() == mesh
    print("MESHES_SEEN", manager, manager.mesh_axes(sw.BATCH, size))

@pytest.mark.mesh(strategy="nested/own.toml")
def test_own_mesh(manager):
    print("MESHES_SEEN", manager)

@pytest.mark.mesh("dp:2")
class TestClass:
    @pytest.mark.mesh("dp:4")
    def test_nearest(self, mesh):
        print("MESHES_SEEN", dict(mesh.shape))

    def test_inherited(self, mesh):
        print("MESHES_SEEN", dict(mesh.shape))

    def test_without(self):
        assert context.current() is None and jax.sharding.get_mesh().empty

def test_plain():
    assert jax.sharding.get_abstract_mesh().empty
"""
MINE = '[mesh]\nfsdp = 2\ntp = 2\n[rules]\nbatch = "tp"\n'
IDS = [
    "test_several[dp2-tp4]",
    "test_several[dp2-tp4-explicit]",
    "test_several[dp8]",
    "test_several[dp8-explicit]",
    "test_stacked[dp2-fsdpN-explicit_dp]",
    "test_stacked[tp4]",
    "test_manager[fsdp2-tp2-fsdp_tp-decode-4]",
    "test_manager[fsdp2-tp2-fsdp_tp-decode-8]",
    "test_manager[fsdp2-tp2-ddp+mine-decode-4]",
    "test_manager[fsdp2-tp2-ddp+mine-decode-8]",
    "test_own_mesh[own]",
    "TestClass::test_nearest[dp4]",
    "TestClass::test_inherited[dp2]",
    "TestClass::test_without",
    "test_plain",
]
MESHES_SEEN = [
    "{'dp': 2, 'tp': 4} {'AxisType.Auto'} {'cpu'}",
    "{'dp': 2, 'tp': 4} {'AxisType.Explicit'} {'cpu'}",
    "{'dp': 8} {'AxisType.Auto'} {'cpu'}",
    "{'dp': 8} {'AxisType.Explicit'} {'cpu'}",
    "{'dp': 2, 'fsdp': 4}",
    "{'tp': 4}",
    "PartitionManager('fsdp_tp', mesh='fsdp:2,tp:2', mode='decode') ('fsdp',)",
    "PartitionManager('fsdp_tp', mesh='fsdp:2,tp:2', mode='decode') ('fsdp',)",
    "PartitionManager('ddp', mesh='fsdp:2,tp:2', mode='decode') ('tp',)",
    "PartitionManager('ddp', mesh='fsdp:2,tp:2', mode='decode') ('tp',)",
    "PartitionManager('rules', mesh='fsdp:2,tp:2')",
    "{'dp': 4}",
    "{'dp': 2}",
]
SET_FOR_LONGER = """
import unittest
import jax, pytest
import shardwright as sw

@pytest.fixture(scope="module", autouse=True)
def of_the_module():
    with jax.set_mesh(sw.create_mesh("dp:2")):
        yield

@pytest.fixture
def tidy():
    with jax.set_mesh(sw.create_mesh("dp:4")):
        yield

def test_first():
    assert jax.sharding.get_mesh().shape == {"dp": 2}

def test_inside(tidy):
    assert jax.sharding.get_mesh().shape == {"dp": 4}

@pytest.mark.mesh("tp:8")
def test_marked(mesh):
    assert jax.sharding.get_mesh().shape == {"dp": 2}

class TestOfUnittest(unittest.TestCase):
    def setUp(self):
        self.set = jax.set_mesh(sw.create_mesh("dp:8"))
        self.set.__enter__()

    def tearDown(self):
        self.set.__exit__(None, None, None)

    def test_it(self):
        assert jax.sharding.get_mesh().shape == {"dp": 8}
"""


def test_one_test_per_mesh(run: Run) -> None:
    """A mesh that a fixture sets for longer than a test is not an error of the test."""
    files = {"test_it.py": MESHES, "mine.toml": MINE, "nested/own.toml": MINE}
    result = run({**files, "test_longer.py": SET_FOR_LONGER}, "-v", "-s")
    result.assert_outcomes(passed=len(IDS) + 4)
    text = said(result)
    assert [
        line.split()[0].removeprefix("test_it.py::")
        for line in result.outlines
        if line.startswith("test_it.py::")
    ] == IDS
    assert [
        line.partition("MESHES_SEEN ")[2] for line in text.splitlines() if "MESHES_SEEN" in line
    ] == MESHES_SEEN


@pytest.mark.full
def test_a_test_is_selected_by_its_mesh(run: Run) -> None:
    result = run(
        {"test_it.py": MESHES, "mine.toml": MINE, "nested/own.toml": MINE},
        "-k",
        "dp2-tp4 and not explicit",
    )
    result.assert_outcomes(passed=1, deselected=len(IDS) - 1)


@pytest.mark.full
def test_xdist_gives_every_worker_its_devices(run: Run) -> None:
    result = run({"test_it.py": MESHES, "mine.toml": MINE, "nested/own.toml": MINE}, "-n", "2")
    result.assert_outcomes(passed=len(IDS))


REFUSED = """
import jax, pytest
import shardwright as sw
from shardwright.manager import context

def test_no_marker(mesh): ...

@pytest.mark.mesh("dp:2")
def test_no_strategy(manager): ...

@pytest.mark.mesh("dp:16")
def test_too_many(mesh): ...

@pytest.mark.mesh("dp:2", strategy="fdsp_tp")
def test_no_preset(manager): ...

@pytest.mark.mesh("model:2", strategy="ddp")
def test_misfit(manager): ...

@pytest.mark.mesh(strategy="missing.toml")
def test_no_file(manager): ...

@pytest.mark.mesh("dp:3,tp:-1")
def test_indivisible(mesh): ...

@pytest.mark.mesh("dp:2")
def test_leaves_a_mesh(mesh):
    jax.set_mesh(mesh)

@pytest.mark.mesh("dp:2", strategy="ddp")
def test_leaves_a_manager(manager):
    manager.for_mode("decode").__enter__()

@pytest.mark.mesh("dp:2", strategy="ddp")
def test_unsets_the_mesh(manager):
    jax.set_mesh(None)

def test_unmarked_leaves_a_mesh():
    jax.set_mesh(sw.create_mesh("tp:2"))

@pytest.fixture
def untidy():
    jax.set_mesh(sw.create_mesh("sp:2"))

@pytest.mark.parametrize("size", [1])
def test_a_fixture_leaves_a_mesh(untidy, size): ...

def test_leaves_a_legacy_mesh():
    sw.create_mesh("ep:2").__enter__()

def test_nothing_is_left():
    assert jax.sharding.get_abstract_mesh().empty
    assert context.current() is None and context.depth() == 0
    assert jax.jit(lambda x: x)(1.0).sharding.device_set == {jax.devices()[0]}
"""
SAYS = {
    "test_no_marker": (
        'no marker says which mesh: write @pytest.mark.mesh("dp:2,tp:4") above the test'
    ),
    "test_no_strategy[dp2]": (
        'the marker names no strategy for the manager: write @pytest.mark.mesh("dp:2,tp:4", '
        'strategy="fsdp_tp")'
    ),
    "test_too_many[dp16]": (
        "mesh dp:16 needs 16, but JAX runs with 8 CPU devices: set by XLA_FLAGS or a "
        "conftest.py, or the default of 8\n"
        "  fix   set virtual_devices = 16 for pytest (in pyproject.toml under "
        "[tool.pytest.ini_options]), "
        "or run pytest --virtual-devices 16"
    ),
    "test_no_preset[dp2-fdsp_tp]": "no preset 'fdsp_tp'\n  fix   did you mean 'fsdp_tp'?",
    "test_misfit[model2-ddp]": "the mesh axis model",
    "test_no_file[missing]": "/missing.toml'\n  fix   did you mean",
    "test_indivisible[dp3-tpN]": (
        "mesh axis tp = -1 has no size: 3 (dp=3) does not divide the number of devices, 8"
    ),
    "test_leaves_a_mesh[dp2]": (
        "left behind: the mesh dp:2 is set\n"
        "  fix   write `with jax.set_mesh(mesh):`; without `with` the mesh stays set"
    ),
    "test_leaves_a_manager[dp2-ddp]": (
        "left behind: PartitionManager('ddp', mesh='dp:2', mode='decode') is entered\n"
        "  fix   write `with manager:` around what needs it"
    ),
    "test_unmarked_leaves_a_mesh": (
        "left behind: the mesh tp:2 is set\n  fix   write `with jax.set_mesh(mesh):`"
    ),
    "test_a_fixture_leaves_a_mesh[1]": (
        "left behind: the mesh sp:2 is set\n  fix   write `with jax.set_mesh(mesh):`"
    ),
    "test_leaves_a_legacy_mesh": (
        "left behind: the mesh ep:2 is entered\n"
        "  fix   write `with jax.set_mesh(mesh):` around what needs it"
    ),
    "test_unsets_the_mesh[dp2-ddp]": (
        "left behind: the mesh is unset\n  fix   write `with jax.set_mesh(mesh):`"
    ),
}
IDLE = """
import pytest

@pytest.mark.mesh("dp:2,tp:2", "dp:4", axis_types="explicit")
def test_idle(): ...

@pytest.mark.mesh(strategy="fsdp_tp")
def test_idle_too(): ...

def test_other(): ...
"""


@pytest.mark.full
def test_failures_do_not_affect_later_tests(run: Run) -> None:
    """Also a marker that has no effect, which fails its own test and no other."""
    files = {"test_it.py": REFUSED, "test_other.py": IDLE}
    result = run(files, "-p", "no:randomly", "-W", "ignore::DeprecationWarning")
    result.assert_outcomes(errors=len(SAYS) + 2, passed=7 + 1)
    text = said(result)
    for test, words in SAYS.items():
        assert words in text.partition(f" of {test} ")[2], test
    assert "site-packages" not in text, "a message needs no traceback"
    assert "During handling" not in text
    assert "@pytest.mark.mesh(strategy='fsdp_tp') does nothing for a test" in text
    says = (
        '@pytest.mark.mesh("dp:2,tp:2", "dp:4", axis_types=\'explicit\') does nothing for a test '
        "that takes neither mesh nor manager"
    )
    assert f"{says}\n  fix   add the argument mesh" in text


MARKERS = {
    ('@pytest.mark.mesh("dp:2,tp:four")\ndef test_it(mesh): ...'): (
        "mesh axis 'tp': size 'four' is not an integer\n  dp:2,tp:four"
    ),
    ('@pytest.mark.mesh("dp:2", axis_type="auto")\ndef test_it(mesh): ...'): (
        "no argument 'axis_type'\n  fix   did you mean 'axis_types'?"
    ),
    (
        '@pytest.mark.mesh("dp:2", axis_types="exact")\ndef test_it(mesh): ...'
    ): "axis_types is 'exact', neither auto nor explicit",
    (
        '@pytest.mark.mesh("dp:2", axis_types={"tp": "auto"})\ndef test_it(mesh): ...'
    ): "axis_types names 'tp', which is not an axis of the mesh",
    (
        '@pytest.mark.mesh("dp:2", strategy="ddp", mode="serve")\ndef test_it(manager): ...'
    ): "unknown mode 'serve'",
    ("@pytest.mark.mesh()\ndef test_it(mesh): ..."): (
        "names neither a mesh nor a strategy\n  fix   write @pytest.mark.mesh"
    ),
    (
        '@pytest.mark.mesh(strategy="ddp", axis_types="auto")\ndef test_it(mesh): ...'
    ): "axis_types is given without a mesh",
}


@pytest.mark.full
def test_invalid_marker_fails_collection(run: Run) -> None:
    files = {f"test_{at}.py": f"import pytest\n\n{text}\n" for at, text in enumerate(MARKERS)}
    result = run(files)
    result.assert_outcomes(errors=len(MARKERS))
    for at, words in enumerate(MARKERS.values()):
        assert f"test_{at}.py::test_it: " in said(result)
        assert words in said(result)


EARLY = "import jax.numpy as jnp\nONES = jnp.ones(3)\n"
COUNT = """
import jax, os, pytest

@pytest.mark.mesh("dp:2")
def test_it(mesh):
    print("DEVICES", jax.device_count(), os.environ.get("JAX_NUM_CPU_DEVICES"))
"""
FLAGS = 'import os\nos.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count={}"\n'


def devices(result: pytest.RunResult) -> list[str]:
    return [line.partition("DEVICES ")[2] for line in result.outlines if "DEVICES" in line]


@pytest.mark.parametrize(
    ("conftest", "ini", "args", "count"),
    [
        ("", "virtual_devices = 4", (), 4),
        pytest.param(
            "", "virtual_devices = 4", ("--virtual-devices", "6"), 6, marks=pytest.mark.full
        ),
        (EARLY, "virtual_devices = 4", (), 4),
        (FLAGS.format(4), "", (), 4),
        pytest.param(FLAGS.format(4) + EARLY, "", (), 4, marks=pytest.mark.full),
        (FLAGS.format(16), "", (), 16),
        pytest.param(FLAGS.format(16), "virtual_devices = 4", (), 16, marks=pytest.mark.full),
        pytest.param(FLAGS.format(2), "virtual_devices = 4", (), 4, marks=pytest.mark.full),
        ("import jax\njax.config.update('jax_num_cpu_devices', 5)\n", "", (), 5),
        pytest.param(
            "from shardwright.testing import virtual_devices\nvirtual_devices(3)\n",
            "",
            (),
            3,
            marks=pytest.mark.full,
        ),
    ],
    ids=lambda value: "" if not isinstance(value, int) else str(value),
)
@pytest.mark.full
def test_the_number_of_devices(
    run: Run, conftest: str, ini: str, args: tuple[str, ...], count: int
) -> None:
    """The plugin's option counts first, then an existing one; no variable is left behind."""
    result = run({"conftest.py": conftest, "test_it.py": COUNT}, "-s", *args, ini=ini)
    result.assert_outcomes(passed=1)
    assert devices(result) == [f"{count} None"]


@pytest.mark.full
def test_too_few_devices_has_a_fix(run: Run) -> None:
    test = COUNT.replace("dp:2", "dp:8")
    result = run({"conftest.py": EARLY, "test_it.py": test})
    assert (
        "mesh dp:8 needs 8, but JAX runs with 1 CPU device: a module or a conftest.py used JAX "
        "while tests were collected\n"
        "  fix   set virtual_devices = 8 for pytest (in pyproject.toml under "
        "[tool.pytest.ini_options]), or run "
        "pytest --virtual-devices 8: both set the number before a module is imported; or move "
        "that use of JAX into a test or a fixture"
    ) in said(result)
    result = run({"conftest.py": "", "test_it.py": test}, ini="virtual_devices = 4")
    assert (
        "mesh dp:8 needs 8, but JAX runs with 4 CPU devices: virtual_devices = 4\n"
        "  fix   set virtual_devices = 8"
    ) in said(result)
    result = run(
        {"early.py": EARLY, "conftest.py": "", "test_it.py": test},
        ini="virtual_devices = 8\naddopts = -p early",
    )
    assert (
        "mesh dp:8 needs 8, but JAX runs with 1 CPU device: something used JAX before "
        "virtual_devices = 8 was read, such as another plugin\n"
        "  fix   start pytest with XLA_FLAGS=--xla_force_host_platform_device_count=8, or "
        "move that use of JAX into a fixture"
    ) in said(result)


@pytest.mark.full(but=["eight"])
@pytest.mark.parametrize("word", ["eight", "0", "-1", "2.5"])
@pytest.mark.ci
def test_invalid_device_count(run: Run, word: str) -> None:
    result = run({"test_it.py": "def test_it(): ..."}, ini=f"virtual_devices = {word}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert (
        f"virtual_devices is '{word}', not a positive integer; write virtual_devices = 8"
        in said(result)
    )


QUIET = """
import os, sys, pytest

def test_it():
    assert "shardwright_pytest" in sys.modules
    assert not {"jax", "numpy", "shardwright"} & set(sys.modules), sys.modules.keys()
    assert "JAX_NUM_CPU_DEVICES" not in os.environ

@pytest.fixture
def mesh():
    return "a mesh of triangles"

@pytest.mark.mesh("teapot.obj")
def test_another_mesh(mesh):
    assert mesh == "a mesh of triangles"

@pytest.mark.mesh
def test_a_marker_of_their_own(): ...
"""


def test_unused_plugin_is_light(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a project whose meshes are of triangles."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others do import JAX
    run({"test_it.py": QUIET}).assert_outcomes(passed=3)


def test_plugin_is_loaded_once() -> None:
    """`-p shardwright_pytest` and the entry point are then one plugin, not two."""
    project = tomllib.loads((SRC.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["entry-points"]["pytest11"] == {
        "shardwright_pytest": "shardwright_pytest"
    }
    assert (
        "src/shardwright_pytest.py"
        in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    )
    assert (
        Path(sys.modules[pytest_configure.__module__].__file__ or "").name
        == "shardwright_pytest.py"
    )


REAL = """
import jax, pytest
import jax.numpy as jnp

@pytest.mark.mesh("dp:2")
def test_it(mesh):
    print("DEVICES", mesh.devices.flat[0].platform, jax.config.jax_default_device)
"""


@pytest.mark.full
def test_real_devices_by_option(run: Run) -> None:
    result = run({"test_it.py": REAL}, "--mesh-backend", "tpu", inline=True)
    result.assert_outcomes(errors=1)
    assert "no tpu devices here: " in said(result)
    run({"test_it.py": REAL}, "--mesh-backend", "cpu").assert_outcomes(passed=1)


def test_cpu_meshes_on_an_accelerator_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Arrays that are not committed would land on the accelerator, away from the mesh."""
    (case,) = pytest_plugin.cases_of(pytest.mark.mesh("dp:2").mark)
    with pytest_plugin.placed(case, tmp_path):
        assert jax.config.jax_default_device is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest_plugin.placed(case, tmp_path) as mesh:
        assert jax.config.jax_default_device == mesh.devices.flat[0]
    assert jax.config.jax_default_device is None


def test_too_few_real_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (case,) = pytest_plugin.cases_of(pytest.mark.mesh("dp:2").mark)
    monkeypatch.setattr(jax, "local_devices", lambda backend: ["the only one"])
    says = (
        "mesh dp:2 needs 2, but JAX runs with 1 GPU device\n"
        "  fix   run without --mesh-backend for virtual CPU devices, or select"
    )
    with (
        pytest.raises(pytest.fail.Exception, match=says),
        pytest_plugin.placed(case, tmp_path, backend="gpu"),
    ):
        raise AssertionError("a mesh was made")


@pytest.mark.mesh("dp:2,tp:4", axis_types=["auto", "explicit"])
def test_this_project_uses_the_plugin(mesh: Mesh) -> None:
    assert mesh == cpu_mesh(
        "dp:2,tp:4", axis_types="explicit" if AxisType.Explicit in mesh.axis_types else "auto"
    )
    assert requested_devices() >= 8


@pytest.mark.mesh("dp:2,tp:4", strategy="fsdp_tp", mode="train")
def test_a_manager_is_entered(manager: sw.PartitionManager) -> None:
    assert sw.current_manager() is manager
    assert manager == sw.PartitionManager(
        sw.Strategy.preset("fsdp_tp"), mesh=cpu_mesh("dp:2,tp:4"), mode="train"
    )
