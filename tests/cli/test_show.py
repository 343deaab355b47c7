"""Output on terminals: width, colors, closed pipes, and no rich."""

from __future__ import annotations

import os
import pty
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.cli import show
from shardwright.cli.main import COMMANDS
from shardwright.vocabulary.shown import WIDTH
from tests.cli.cases import FILES

SRC = Path(__file__).resolve().parents[2] / "src"
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
CHECK = ["check", "odd.toml"]
DIFF = ["diff", "fsdp", "fsdp_tp", "--tensors", "tensors.toml", "--mesh", "fsdp:2,tp:2"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "XLA_FLAGS"}
    }
    return {
        **kept,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(SRC),
        "TERM": "xterm-256color",
        **more,
    }


def on_terminal(
    words: list[str], folder: Path, *, columns: int = 80, code: str = "", **more: str
) -> str:
    """What a terminal of so many columns gets."""
    import fcntl
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    start = ["-c", code] if code else ["-m", "shardwright"]
    process = subprocess.Popen(
        [sys.executable, *start, *words],
        cwd=folder,
        env=environment(**more),
        stdout=slave,
        stderr=subprocess.STDOUT,
    )
    os.close(slave)
    read = b""
    try:
        while block := os.read(master, 65536):
            read += block
    except OSError:  # Linux says so where the other side has closed
        pass
    finally:
        os.close(master)
    assert process.wait(timeout=600) in (0, 1)
    return read.decode().replace("\r\n", "\n")


# Runs several commands, each with variables of its own before it, such as `TERM=dumb check`.
# COLUMNS changes the size of the terminal itself, and the variable stays unset.
SESSION = """
import fcntl, os, struct, sys, termios
from shardwright.cli.main import main
before = dict(os.environ)
for line in sys.argv[1:]:
    words = line.split()
    variables = dict(word.split("=") for word in words if "=" in word)
    size = struct.pack("HHHH", 50, int(variables.pop("COLUMNS", 80)), 0, 0)
    fcntl.ioctl(1, termios.TIOCSWINSZ, size)
    os.environ.update(variables)
    main([word for word in words if "=" not in word])
    print("end of", line, flush=True)
    for name in variables:
        del os.environ[name]
    os.environ.update(before)
"""
CHECKED = " ".join(CHECK)
BACK = ["diff", "fsdp_tp", "fsdp", *DIFF[3:]]
TABLES = [
    CHECKED,
    " ".join(DIFF),
    "presets list",
    "explain BATCH EMBED --strategy ddp --devices 8",
]
LINES = [
    *TABLES,
    *(f"COLUMNS=60 {line}" for line in TABLES),
    " ".join(BACK),
    f"NO_COLOR=1 {CHECKED}",
    f"TERM=dumb {CHECKED}",
]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each of LINES prints on a terminal, all from one process."""
    folder = tmp_path_factory.mktemp("session")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    rest = on_terminal(LINES, folder, code=SESSION)
    shown = {}
    for line in LINES:
        shown[line], mark, rest = rest.partition(f"end of {line}\n")
        assert mark, rest
    assert rest == ""
    return shown


@pytest.mark.parametrize("columns", [80, 60])
def test_lines_fit_the_terminal(session: dict[str, str], columns: int) -> None:
    prefix = "" if columns == 80 else f"COLUMNS={columns} "
    lines = ESCAPE.sub("", "".join(session[prefix + line] for line in TABLES)).splitlines()
    # Single words are never broken: two tables have columns that need more than 60.
    assert [line for line in lines if len(line) > max(columns, 76)] == []
    assert any(line.startswith("fsdp_tp ") for line in lines)


def test_the_width_is_that_of_the_terminal(session: dict[str, str]) -> None:
    assert any(session[line] != session[f"COLUMNS=60 {line}"] for line in TABLES)


def test_colors_need_a_color_terminal(session: dict[str, str]) -> None:
    colored = session[CHECKED]
    assert "\x1b[33mwarning\x1b[0m unreachable_candidate" in colored
    assert session[f"NO_COLOR=1 {CHECKED}"] == ESCAPE.sub("", colored)
    assert session[f"TERM=dumb {CHECKED}"] == ESCAPE.sub("", colored)


def test_saved_bytes_are_green(session: dict[str, str]) -> None:
    assert "\x1b[32m-262,668,288\x1b[0m" in session[" ".join(DIFF)] + session[" ".join(BACK)]
    assert "\x1b[31m+262,668,288\x1b[0m" in session[" ".join(DIFF)] + session[" ".join(BACK)]


WITHOUT_RICH = (
    "import sys; sys.modules['rich'] = None; sys.modules['rich.console'] = None; "
    "from shardwright.cli.main import main; sys.exit(main())"
)


@pytest.mark.full
def test_without_rich_text_has_no_color(folder: Path) -> None:
    plain = on_terminal(CHECK, folder, code=WITHOUT_RICH)
    assert plain.endswith("4 warnings\n")
    assert "\x1b" not in plain


@pytest.mark.full
@pytest.mark.parametrize(
    "words", [DIFF, pytest.param(["schema"], marks=pytest.mark.full)], ids=["diff", "schema"]
)
def test_reader_may_close_the_pipe(words: list[str], folder: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "shardwright", *words],
            cwd=folder,
            env=environment(),
            stdout=write,
            stderr=subprocess.PIPE,
            timeout=600,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.full
def test_commands_start_no_backend(folder: Path) -> None:
    (folder / "weights.json").write_text(
        '{"w": {"axes": "EMBED VOCAB", "shape": [8, 8], "dtype": "bfloat16"}}', encoding="utf-8"
    )
    weights = ["--tensors", "weights.json"]
    code = (
        "import sys, jax\nfrom shardwright.cli.main import main\n"
        "for line in sys.argv[1:]:\n    print('status', main(line.split()))\n"
        "jax.config.update('jax_num_cpu_devices', 3)\nassert len(jax.devices()) == 3\n"
        "assert 'rich' not in sys.modules\n"
    )
    lines = [
        " ".join(words)
        for words in (
            CHECK,
            [*CHECK, "--tensors", "tensors.toml"],
            DIFF,
            ["presets", "list"],
            ["schema"],
            ["explain", *weights, "--strategy", "fsdp_tp", "--mesh", "fsdp:2048,tp:8"],
        )
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *lines],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    *_, explained, end = done.stdout.split("status 0\n")
    assert "16384 devices" in explained
    assert "-, tp" in explained
    assert end == ""


def test_default_width(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert show.width_of(77) == 77
    assert show.width_of(None) == WIDTH


def test_every_command_is_tested() -> None:
    tests = Path(__file__).parents[1]
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (*tests.glob("cli/*.py"), *tests.glob("plan/*.py"), *tests.glob("show/*.py"))
    )
    assert [name for name in COMMANDS if not re.search(rf'"{name}[ "]', text)] == []


def test_progress_without_a_terminal_is_a_line_per_interval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log of CI gets nothing from a short command, and a line every ten seconds from others."""
    now = [100.0]
    monkeypatch.setattr("shardwright.cli.show.time.monotonic", lambda: now[0])
    progress = show.ProgressLine()
    for second in range(25):
        now[0] = 100.0 + second
        progress(f"judged {second}")
    progress.close()
    assert capsys.readouterr().err == "judged 10, 10 s\njudged 20, 20 s\n"
