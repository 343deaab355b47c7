"""The hooks of the pytest plugin: options, markers and fixtures.

pytest loads this module in every run where shardwright is installed. So it imports neither JAX nor
shardwright: the rest is in `shardwright.testing.pytest_plugin`, imported when a test uses it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

_MARKER = (
    "mesh(*meshes, axis_types='auto', strategy=None, mode=None): run the test once on each "
    "mesh of virtual CPU devices, such as "
    "'dp:2,tp:4'; the fixtures mesh and manager give it to the test (shardwright)"
)
_WATCH = "_nothing_left"
_COUNT = "JAX_NUM_CPU_DEVICES"
_BEFORE = pytest.StashKey[str | None]()
_ATTACH = pytest.StashKey[Callable[[pytest.Item, pytest.TestReport], None]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("shardwright", "shardwright: tests on meshes, golden files")
    group.addoption(
        "--virtual-devices",
        type=int,
        metavar="N",
        help="number of virtual CPU devices (default: 8 if a test needs a mesh)",
    )
    group.addoption(
        "--mesh-backend",
        default="cpu",
        metavar="NAME",
        help="build the meshes of tests from real devices: gpu or tpu",
    )
    group.addoption(
        "--update-golden",
        action="store_true",
        help="write golden files anew, and remove those that no test uses",
    )
    parser.addini(
        "virtual_devices", "virtual CPU devices, set before any conftest.py is read", default=""
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Request the virtual devices before a conftest.py can start JAX."""
    if count := configured_devices(early_config):
        _ask_for(early_config, count)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and reject an invalid number of devices before any test runs."""
    config.addinivalue_line("markers", _MARKER)
    config.pluginmanager.register(_GoldenReports(config), "shardwright_golden_reports")
    configured_devices(config)


def configured_devices(config: pytest.Config) -> int | None:
    """Return the number of virtual devices in the option or the ini file, or None."""
    option = getattr(config.known_args_namespace, "virtual_devices", None)
    text = str(config.getini("virtual_devices") if option is None else option)
    if text and (not text.isdecimal() or int(text) < 1):
        raise pytest.UsageError(
            f"virtual_devices is {text!r}, not a positive integer; write virtual_devices = 8"
        )
    return int(text) if text else None


def _ask_for(config: pytest.Config, count: int) -> None:
    # Do not import JAX here: a conftest.py may still set variables that JAX reads at import.
    jax = sys.modules.get("jax")
    if jax is None:
        config.stash[_BEFORE] = os.environ.get(_COUNT)
        os.environ[_COUNT] = str(max(count, int(os.environ.get(_COUNT, "-1"))))
    elif jax.config.jax_num_cpu_devices < count:
        # If a backend already runs, the first test that needs more devices fails with the reason.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)


def _restore(config: pytest.Config) -> None:
    """Restore JAX_NUM_CPU_DEVICES after JAX has read it.

    Otherwise, processes that tests start would inherit the changed value.
    """
    if _BEFORE not in config.stash:
        return
    before = config.stash[_BEFORE]
    del config.stash[_BEFORE]
    if before is None:
        os.environ.pop(_COUNT, None)
    else:
        os.environ[_COUNT] = before


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test per mesh."""
    if "_mesh_case" in metafunc.fixturenames:
        from shardwright.testing import pytest_plugin

        pytest_plugin.generate(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test whose marker has no effect.

    Fail at setup, because an error at collection would keep the whole module from running.
    """
    if "mesh" in getattr(item, "fixturenames", ("mesh",)):
        return
    for marker in filter(_is_ours, item.own_markers):
        words = [
            *(f'"{mesh}"' for mesh in marker.args),
            *(f"{name}={value!r}" for name, value in marker.kwargs.items()),
        ]
        what = (
            f"@pytest.mark.mesh({', '.join(words)}) does nothing for a test that takes neither "
            f"mesh nor manager"
        )
        pytest.fail(f"{what}\n  fix   add the argument mesh", pytrace=False)


def _is_ours(marker: pytest.Mark) -> bool:
    """Tell whether a marker `mesh` is ours, and not a marker `mesh` of another project."""
    ours = any(isinstance(mesh, str) and ":" in mesh for mesh in marker.args) or (
        not marker.args and "strategy" in marker.kwargs
    )
    return marker.name == "mesh" and ours


def pytest_collection_finish(session: pytest.Session) -> None:
    """Request the virtual devices if a test needs a mesh.

    This hook runs after collection, which may set XLA_FLAGS or import JAX.
    """
    if any("_mesh_case" in getattr(item, "fixturenames", ()) for item in session.items):
        from shardwright.testing import pytest_plugin

        pytest_plugin.prepare(configured_devices(session.config))
    else:
        _watch_nothing(session.items)
    if "jax" in sys.modules:
        _restore(session.config)


def _watch_nothing(items: Sequence[pytest.Item]) -> None:
    """In a run without meshes, remove the fixture that checks the ambient mesh.

    Parametrized cases of one test function share one list `fixturenames`, so the name may already
    be removed.
    """
    for item in items:
        if _WATCH in (names := getattr(item, "fixturenames", [])):
            names.remove(_WATCH)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Restore the environment."""
    _restore(config)


@pytest.fixture
def _mesh_case(request: pytest.FixtureRequest) -> Any:
    if hasattr(request, "param"):
        return request.param
    pytest.fail(
        'no marker says which mesh: write @pytest.mark.mesh("dp:2,tp:4") above the test',
        pytrace=False,
    )


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Reset a mesh or a manager that a test leaves set, and fail that test.

    Otherwise the next test would run under that mesh or manager.
    """
    from shardwright.testing import pytest_plugin

    with pytest_plugin.nothing_left():
        yield


@pytest.fixture
def mesh(_mesh_case: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The `jax.sharding.Mesh` of `@pytest.mark.mesh("dp:2,tp:4")`."""
    from shardwright.testing import pytest_plugin

    config = request.config
    backend = config.getoption("mesh_backend")
    with pytest_plugin.placed(
        _mesh_case, config.rootpath, requested=configured_devices(config), backend=backend
    ) as mesh_of_case:
        yield mesh_of_case


@pytest.fixture
def manager(_mesh_case: Any, mesh: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The entered `PartitionManager` of `@pytest.mark.mesh("dp:2,tp:4", strategy="fsdp_tp")`."""
    from shardwright.testing import pytest_plugin

    with pytest_plugin.managed(_mesh_case, mesh, root=request.config.rootpath) as entered:
        yield entered


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Any:
    """Compare text, or the shardings of a tree, with a golden file.

    See `shardwright.testing.golden`.
    """
    from shardwright.testing import golden_report

    request.node.stash[_ATTACH] = golden_report.attach
    return golden_report.golden_of(request.node)


def _may_use_golden(item: pytest.Item) -> bool:
    """Tell whether a test may use golden files.

    A test may also get the fixture by `request.getfixturevalue`, and a doctest by `getfixture`.
    """
    return not isinstance(item, pytest.Function) or not {"golden", "request"}.isdisjoint(
        item.fixturenames
    )


class _GoldenReports:
    """The golden files that the tests of a run used, in all processes."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.users: dict[str, list[pytest.Item]] = {}
        self.partial: set[str] = set()
        self.phases: dict[str, dict[str, set[str]]] = {}
        self.uses: list[dict[str, Any]] = []
        self.lines: list[str] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Any:
        # Read the items before another hook deselects some.
        for item in filter(_may_use_golden, items):
            self.users.setdefault(str(item.path), []).append(item)
        return (yield)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.partial |= {str(item.path) for item in filter(_may_use_golden, items)}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        """Attach the golden files of a test to its report, so that xdist workers send them."""
        report = yield
        if _may_use_golden(item):
            report.golden_user = str(item.path)
        if attach := item.stash.get(_ATTACH, None):
            attach(item, report)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if module := getattr(report, "golden_user", ""):
            phases = self.phases.setdefault(module, {}).setdefault(report.nodeid, set())
            if report.when == "setup":  # if a test runs again, its last run counts
                phases.clear()
            phases.add(str(report.when) if report.passed else "failed")
        if use := getattr(report, "golden_use", None):
            self.uses.append(use)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.uses and not hasattr(self.config, "workerinput"):
            from shardwright.testing import golden_report

            self.lines = golden_report.judge(self.uses, self.phases, session)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.lines:
            terminalreporter.section("golden files")
            for line in self.lines:
                terminalreporter.line(line)
