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
from shardwright.resolution.tables import WIDTH
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
    assert process.wait(timeout=120) in (0, 1)
    return read.decode().replace("\r\n", "\n")


EVERY = (
    "import sys; from shardwright.cli.main import main; "
    "[main(line.split()) for line in sys.argv[1:]]"
)


def test_lines_fit_the_terminal(folder: Path) -> None:
    commands = [
        CHECK,
        DIFF,
        ["presets", "list"],
        ["explain", "BATCH", "EMBED", "--strategy", "ddp", "--devices", "8"],
    ]
    for columns in (80, 60):
        lines = ESCAPE.sub(
            "",
            on_terminal(
                [" ".join(words) for words in commands], folder, columns=columns, code=EVERY
            ),
        ).splitlines()
        # Single words are never broken: two tables have columns that need more than 60.
        assert [line for line in lines if len(line) > max(columns, 76)] == []
        assert any(line.startswith("fsdp_tp ") for line in lines)


NO_COLORS = """
import os, sys
from shardwright.cli.main import main
os.environ["NO_COLOR"] = "1"
main(sys.argv[1:])
del os.environ["NO_COLOR"]
os.environ["TERM"] = "dumb"
main(sys.argv[1:])
"""


def test_colors_need_a_color_terminal(folder: Path) -> None:
    colored = on_terminal(CHECK, folder)
    assert "\x1b[33mwarning\x1b[0m unreachable_candidate" in colored
    assert on_terminal(CHECK, folder, code=NO_COLORS) == ESCAPE.sub("", colored) * 2


def test_saved_bytes_are_green(folder: Path) -> None:
    back = ["diff", "fsdp_tp", "fsdp", *DIFF[3:]]
    shown = on_terminal([" ".join(DIFF), " ".join(back)], folder, code=EVERY)
    assert "\x1b[32m-262,668,288\x1b[0m" in shown
    assert "\x1b[31m+262,668,288\x1b[0m" in shown


WITHOUT_RICH = (
    "import sys; sys.modules['rich'] = None; sys.modules['rich.console'] = None; "
    "from shardwright.cli.main import main; sys.exit(main())"
)


def test_without_rich_text_has_no_color(folder: Path) -> None:
    plain = on_terminal(CHECK, folder, code=WITHOUT_RICH)
    assert plain.endswith("4 warnings\n")
    assert "\x1b" not in plain


@pytest.mark.parametrize("words", [DIFF, ["schema"]], ids=["diff", "schema"])
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
            timeout=120,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_commands_start_no_backend(folder: Path) -> None:
    code = (
        "import sys, jax\nfrom shardwright.cli.main import main\n"
        "for line in sys.argv[1:]:\n    main(line.split())\n"
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
        )
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *lines],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout


def test_default_width(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert show.width_of(77) == 77
    assert show.width_of(None) == WIDTH


def test_every_command_is_tested() -> None:
    text = "\n".join(
        path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py")
    )
    assert [name for name in COMMANDS if f'"{name} ' not in text] == []
