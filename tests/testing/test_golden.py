"""Golden files: what a test compares, what the messages say, and what a whole run reports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.testing.golden import Golden, GoldenError, difference, spec_table, write
from tests.raising import raises
from tests.testing.runs import run_pytest, said

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    return lambda files, *args, inline=True: run_pytest(
        pytester, monkeypatch, files, *args, inline=inline
    )


@pytest.fixture
def one(tmp_path: Path) -> Golden:
    return Golden(
        folder=tmp_path / "golden", test="it", command="pytest 'test_a.py::test_it' --update-golden"
    )


def updated(golden: Golden) -> Golden:
    return Golden(folder=golden.folder, test=golden.test, update=True, command=golden.command)


def test_missing_then_written_then_compared(one: Golden) -> None:
    with raises(GoldenError, "file", "it.txt", fix="test_a.py::test_it"):
        one("text")
    update = updated(one)
    update("text")
    assert update.written == ["it"]
    assert (one.folder / "it.txt").read_text() == "text\n"
    again = updated(one)
    again("text\n")
    assert again.written == []
    Golden(folder=one.folder, test="it")("text")


def test_outdated_file_shows_changes(one: Golden) -> None:
    updated(one)("a\nb\nc\nd\ne\nf\ng")
    with raises(GoldenError, "it.txt", 2, fix="test_a.py::test_it") as caught:
        one("a\nb\nc\nD\ne\nf\ng")
    path = one.folder / "it.txt"
    assert str(caught.value) == (
        f"{path} differs (- golden, + now)\n"
        f"  line 2\n"
        f"    b\n"
        f"    c\n"
        f"  - d\n"
        f"  + D\n"
        f"    e\n"
        f"    f\n"
        "  fix   if the new text is right, write it, read it, commit it: pytest "
        "'test_a.py::test_it' --update-golden"
    )


def test_moved_columns_do_not_hide_changes() -> None:
    before = "path  spec\na     P()\nb     P('tp')\n"
    after = "path    spec\na       P()\nb       P('dp')\nlonger  P()\n"
    assert difference(before, after).splitlines() == [
        *("  line 1", "    path    spec", "    a       P()"),
        *("  - b     P('tp')", "  + b       P('dp')", "  + longer  P()"),
    ]
    assert difference("a b\n", "a  b\n").splitlines() == ["  line 1", "  - a b", "  + a  b"]
    assert difference("a", "a\n") == "  only the end of the last line differs"


def test_names(one: Golden) -> None:
    update = updated(one)
    update("1")
    update("2", "second")
    with raises(GoldenError, "second", fix="golden"):
        update("3", "second")
    with raises(GoldenError, "file", fix="letters"):
        update("4", "../up")
    assert sorted(path.name for path in one.folder.iterdir()) == ["it.txt", "second.txt"]


@pytest.mark.parametrize(
    "text",
    ["a\r\nb\r\n", "a\rb\n", "a\x85b\n", "caf\xe9 \N{GRINNING FACE}\n"],
    ids=["crlf", "cr", "nel", "unicode"],
)
def test_bytes_are_written_and_compared_as_they_are(one: Golden, text: str) -> None:
    updated(one)(text)
    assert (one.folder / "it.txt").read_bytes() == text.encode()
    one(text)


def test_line_ends_and_bytes_that_differ_are_shown(one: Golden) -> None:
    updated(one)("a\r\nb\n")
    with raises(GoldenError, "it.txt", 1, "a\\r\\n", "a\\n", fix="test_a.py::test_it") as caught:
        one("a\nb\n")
    assert "  - 'a\\r\\n'\n  + 'a\\n'\n    'b\\n'\n" in str(caught.value)
    (one.folder / "it.txt").write_bytes(b"\xff\n")
    with raises(GoldenError, "it.txt", 1):
        Golden(folder=one.folder, test="it")("b")


def test_invalid_names_and_values(one: Golden) -> None:
    long = "n" * 300
    with raises(GoldenError, "golden", fix=251):
        updated(one)("text", long)
    updated(one)("text", long[:251])
    for call in (updated(one), one, lambda text: write(one.folder / "it.txt", text)):
        with raises(GoldenError, "udc80", 2, fix="backslashreplace"):
            call("fine\nbad \udc80")
    assert not (one.folder / "it.txt").exists()
    with raises(GoldenError, "bytes", "array", fix="decode"):
        updated(one)(b"x")
    with raises(GoldenError, "int", "array", fix="ShapeDtypeStructs"):
        updated(one)(3)
    with raises(GoldenError, "file", 3):
        updated(one)("text", 3)  # type: ignore[arg-type]


def test_file_at_another_path(one: Golden, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    updated(one).file(page, "text\n")
    one.file(page, "text\n")
    with raises(GoldenError, "page.md", 1, fix="test_a.py::test_it"):
        one.file(page, "other\n")


def test_write_is_atomic(tmp_path: Path) -> None:
    path, texts = tmp_path / "deep" / "file.txt", [letter * 20_000 for letter in "abcd"]
    write(path, texts[0])
    seen, stop = set(), threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=read)
    writers = [
        threading.Thread(target=lambda text=text: [write(path, text) for _ in range(30)])
        for text in texts
    ]
    reader.start()
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert seen <= set(texts)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.mesh("dp:2,tp:4,sp:1", axis_types=["auto", "explicit"])
def test_equal_shardings_have_equal_tables(mesh: Mesh) -> None:
    def placed(*spec: object) -> jax.Array:
        return jax.device_put(jnp.zeros((8, 4)), NamedSharding(mesh, P(*spec)))

    tree = {
        "spelled": placed(("dp",), None),
        "plain": placed("dp"),
        "one": placed("dp", "sp"),
        "both": placed(("dp", "sp", "tp")),
        "abstract": jax.ShapeDtypeStruct(
            (16,), jnp.bfloat16, sharding=NamedSharding(mesh, P("tp"))
        ),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
        "layers": [placed(None, "tp")],
    }
    assert spec_table(tree) == (
        "mesh dp=2 tp=4 sp=1\n\n"
        "path      shape  dtype     spec             per device\n"
        "abstract  16     bfloat16  P('tp')          4\n"
        "both      8 4    float32   P(('dp', 'tp'))  1 4\n"
        "layers/0  8 4    float32   P(None, 'tp')    8 1\n"
        "one       8 4    float32   P('dp')          4 4\n"
        "plain     8 4    float32   P('dp')          4 4\n"
        "spelled   8 4    float32   P('dp')          4 4\n"
        "step      ()     int32     no sharding\n"
    )


@pytest.mark.mesh("dp:2")
def test_other_leaves(mesh: Mesh) -> None:
    assert (
        spec_table({"a": P("dp", None), "b": P(("dp", "tp"))})
        == "path  spec\na     P('dp')\nb     P(('dp', 'tp'))\n"
    )
    assert spec_table([NamedSharding(mesh, P("dp"))]) == "mesh dp=2\n\npath  spec\n0     P('dp')\n"
    two = [NamedSharding(mesh, P("dp")), NamedSharding(sw.abstract_mesh("tp:4"), P())]
    assert spec_table(two) == "path  spec     mesh\n0     P('dp')  dp=2\n1     P()      tp=4\n"
    assert (
        spec_table({"host": np.zeros(3, np.int8)})
        == "path  shape  dtype  spec\nhost  3      int8   no sharding\n"
    )
    single = jax.device_put(jnp.zeros(3), jax.devices()[0])
    assert "SingleDeviceSharding  3" in spec_table({"x": single})
    pinned = NamedSharding(mesh, P("dp"), memory_kind="pinned_host")
    assert "P('dp') in pinned_host" in spec_table({"x": pinned})
    with raises(GoldenError, "tree"):
        spec_table({})
    with raises(GoldenError, "a/b", "str", fix="ShapeDtypeStructs"):
        spec_table({"a": {"b": "text"}})


@pytest.mark.mesh("dp:2,tp:4", strategy=["fsdp_tp", "ddp"])
def test_the_fixture_keeps_the_specs_of_a_tree(
    manager: sw.PartitionManager, golden: Golden
) -> None:
    params = {
        "up": sw.ArraySpec((8, 16), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE)),
        "norm": sw.ArraySpec((8,), jnp.float32, (sw.NORM,)),
    }
    golden(manager.abstract(params))


TESTS = """
import pytest

@pytest.mark.parametrize("name", ["a", "b c"])
def test_it(golden, name):
    golden(f"text of {name}")

def test_named(golden):
    golden("first", "one")
    golden("second", "two")

def test_plain(): ...
"""
SKIPS = TESTS + "\ndef test_skipped(golden):\n    pytest.skip()\n"
FILES = ["it-a.txt", "it-b-c.txt", "one.txt", "two.txt"]


def test_a_run_writes_compares_and_reports(run: Run, pytester: pytest.Pytester) -> None:
    folder = pytester.path / "golden" / "test_a"
    result = run({"test_a.py": TESTS})
    result.assert_outcomes(failed=3, passed=1)
    says = (
        "no golden file golden/test_a/it-b-c.txt\n"
        "E         fix   write it, read it, commit it: pytest 'test_a.py::test_it[b c]'"
    )
    assert says in said(result)
    assert "golden.py:" not in said(result), "a message needs no traceback through the library"
    result = run({}, "--update-golden")
    result.assert_outcomes(passed=4)
    assert sorted(line for line in result.outlines if line.startswith("written")) == [
        f"written: golden/test_a/{file}" for file in FILES
    ]
    assert sorted(path.name for path in folder.iterdir()) == FILES
    result = run({})
    assert result.ret == pytest.ExitCode.OK
    assert "golden files" not in said(result)
    (folder / "old.txt").write_text("nobody wants it\n")
    result = run({})
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=4)
    assert (
        "no test uses golden/test_a/old.txt; remove it, or run the module with --update-golden"
        in result.outlines
    )
    result = run({}, "--update-golden")
    assert "removed, since no test uses it: golden/test_a/old.txt" in result.outlines
    assert sorted(path.name for path in folder.iterdir()) == FILES


@pytest.mark.full
def test_xdist_workers_write(run: Run, pytester: pytest.Pytester) -> None:
    result = run(
        {"test_a.py": TESTS, "golden/test_a/old.txt": "nobody wants it\n"},
        "--update-golden",
        "-n",
        "2",
        inline=False,
    )
    result.assert_outcomes(passed=4)
    assert sorted(path.name for path in (pytester.path / "golden" / "test_a").iterdir()) == FILES
    assert "removed, since no test uses it: golden/test_a/old.txt" in result.outlines


@pytest.mark.parametrize(
    ("args", "files"),
    [
        (("-k", "named"), {}),
        (("test_a.py::test_named",), {}),
        (("--deselect", "test_a.py::test_named"), {}),
        ((), {"test_a.py": SKIPS}),
        (("--lf",), {"test_b.py": "def test_failing(): assert False\n"}),
    ],
    ids=["-k", "node id", "--deselect", "a skip", "--lf"],
)
@pytest.mark.full(but=["-k"])
@pytest.mark.ci
def test_partial_run_ignores_unused_files(
    run: Run, pytester: pytest.Pytester, args: tuple[str, ...], files: dict[str, str]
) -> None:
    run({"test_a.py": TESTS}, "--update-golden")
    (pytester.path / "golden" / "test_a" / "old.txt").write_text("not used\n")
    run(files)
    result = run(files, *args)
    assert "no test uses" not in said(result)
    run(files, *args, "--update-golden")
    assert (pytester.path / "golden" / "test_a" / "old.txt").exists()


CLASH = """
def test_a(golden): golden("one", "shared")
def test_b(golden): golden("two", "shared")
def test_c(golden): golden("one", "shared")
"""


def test_shared_files_and_removed_modules(run: Run, pytester: pytest.Pytester) -> None:
    gone = pytester.path / "golden" / "test_gone"
    gone.mkdir(parents=True)
    result = run({"test_it.py": CLASH}, "--update-golden")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert (
        "test_it.py::test_a and test_it.py::test_b share golden/test_it/shared.txt and expect "
        "different contents; give each a name of its own"
    ) in result.outlines
    assert "no module test_gone.py beside golden/test_gone; remove the folder" in result.outlines
    later = run({})
    assert later.ret == pytest.ExitCode.TESTS_FAILED
    assert (
        "test_it.py::test_a and test_it.py::test_b share golden/test_it/shared.txt and expect "
        "different"
    ) in said(later)


MESHES = """
import pytest

@pytest.mark.mesh("dp:2", "dp:4")
def test_it(mesh, golden):
    golden(str(dict(mesh.shape)), "named")
"""


def test_mesh_is_part_of_the_name(run: Run, pytester: pytest.Pytester) -> None:
    run({"test_a.py": MESHES}, "--update-golden").assert_outcomes(passed=2)
    folder = pytester.path / "golden" / "test_a"
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "named-dp2.txt": "{'dp': 2}\n",
        "named-dp4.txt": "{'dp': 4}\n",
    }
    run({}).assert_outcomes(passed=2)


CASES = """
import pytest

@pytest.mark.parametrize("word", ["a", "b"])
def test_it(golden, word):
    golden(word, "one")
"""


def test_failure_of_cases_that_share_a_file(run: Run) -> None:
    run({"test_a.py": CASES}, "--update-golden")
    result = run({}, "-x")
    result.assert_outcomes(failed=1)
    assert (
        "fix   the cases of this test share the file: if their texts differ, put [a] into the name"
    ) in said(result)


HIDDEN = """
import pytest

@pytest.fixture
def late(request):
    yield
    request.getfixturevalue("golden")("said at the end", "end")

def test_plain(golden):
    golden("plain")

def test_asked(request):
    request.getfixturevalue("golden")("asked")

def test_late(golden, late): ...
"""


@pytest.mark.parametrize(
    "workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.full)], ids=["one", "xdist"]
)
def test_files_used_by_fixtures_are_kept(
    run: Run, pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    old = {"test_a.py": HIDDEN, "golden/test_a/old.txt": "nobody wants it\n"}
    result = run(old, "--update-golden", *workers, inline=not workers)
    result.assert_outcomes(passed=3)
    assert sorted(path.name for path in (pytester.path / "golden" / "test_a").iterdir()) == [
        "asked.txt",
        "end.txt",
        "plain.txt",
    ]
    assert [line for line in result.outlines if line.startswith("removed")] == [
        "removed, since no test uses it: golden/test_a/old.txt"
    ]
    result = run({}, "--update-golden", "-k", "plain or late")
    assert (pytester.path / "golden" / "test_a" / "asked.txt").exists()


def test_failed_test_keeps_its_file(run: Run, pytester: pytest.Pytester) -> None:
    run({"test_a.py": HIDDEN}, "--update-golden")
    run(
        {"test_a.py": HIDDEN.replace("(request):", "(request):\n    pytest.skip()")},
        "--update-golden",
    )
    assert (pytester.path / "golden" / "test_a" / "asked.txt").exists()


AGAIN = """
import pytest
from _pytest.runner import runtestprotocol

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    for _ in range(2):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""


def test_rerun_starts_fresh(run: Run) -> None:
    files = {
        "conftest.py": AGAIN,
        "test_a.py": "def test_flaky(golden): golden('text')\n",
        "golden/test_a/old.txt": "\n",
    }
    result = run(files, "--update-golden")
    result.assert_outcomes(passed=1)
    assert "removed, since no test uses it: golden/test_a/old.txt" in result.outlines
    run({}).assert_outcomes(passed=1)


ALIKE = """
import pytest

class TestA:
    def test_x(self, golden): golden("a")
class TestB:
    def test_x(self, golden): golden("b")

@pytest.mark.parametrize("text", ["a/b", "a-b"])
def test_it(golden, text): golden("the same")

@pytest.mark.parametrize("text", ["a/b", "a-b"])
def test_named(golden, text): golden(text, f"named{len(text)}{text.count('/')}")
"""


def test_tests_with_one_file_name(run: Run, pytester: pytest.Pytester) -> None:
    result = run({"test_a.py": ALIKE}, "--update-golden")
    result.assert_outcomes(passed=4, failed=2)
    says = (
        "test_a.py::test_it[a/b] and test_a.py::test_it[a-b] would share golden 'it-a-b'\n"
        "E     fix   give each a name: golden("
    )
    assert said(result).count(says) == 2
    actual = sorted(path.name for path in (pytester.path / "golden" / "test_a").iterdir())
    assert actual == ["TestA-x.txt", "TestB-x.txt", "named30.txt", "named31.txt"]
