"""Writing strategy files: atomic, with the right permissions, and without leftovers."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright.strategy import files
from tests.raising import raises

SMALL = sw.Strategy(version=1, mesh={"dp": 2, "tp": -1}, rules={"batch": "dp"})


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("call", "overwrite"), [("replace", True), ("chmod", True), ("link", False)]
)
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt("stopped")]
)
def test_failed_write_keeps_the_old_file(
    call: str,
    overwrite: bool,
    error: BaseException,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = SMALL.dump(tmp_path / "old.toml").read_bytes()
    path = tmp_path / ("old.toml" if overwrite else "new.toml")

    def broken(*args: Any) -> None:
        raise error

    monkeypatch.setattr(files.os, call, broken)
    refused = sw.StrategyError if isinstance(error, OSError) else type(error)
    with pytest.raises(refused, match=f"(?i){error.args[-1]}"):
        files.write_text(path, "text", overwrite=overwrite)
    assert (tmp_path / "old.toml").read_bytes() == old
    assert os.listdir(tmp_path) == ["old.toml"]


@pytest.mark.parametrize("overwrite", [True, False])
def test_unwritable_text_leaves_nothing(overwrite: bool, tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        files.write_text(tmp_path / "s.toml", "a" * 100_000 + "\ud800", overwrite=overwrite)
    assert os.listdir(tmp_path) == []


def test_unknown_ending_is_refused(tmp_path: Path) -> None:
    with raises(sw.StrategyError, "s.yaml", fix=".toml") as caught:
        SMALL.dump(tmp_path / "s.yaml")
    assert "format=" not in caught.value.fix
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("overwrite", [True, False])
def test_new_file_follows_the_umask(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(mask: int) -> int:
        raise AssertionError(
            "the umask is the whole process's: another thread may be making a file"
        )

    old = os.umask(0o027)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "umask", changed)
            path = files.write_text(tmp_path / "s.toml", SMALL.dumps(), overwrite=overwrite)
    finally:
        os.umask(old)
    assert mode_of(path) == 0o640


@pytest.mark.parametrize("mode", [0o600, 0o444, 0o664])
def test_overwritten_file_keeps_permissions(mode: int, tmp_path: Path) -> None:
    path = SMALL.dump(tmp_path / "s.toml")
    path.chmod(mode)
    (tmp_path / "link.toml").symlink_to("s.toml")
    sw.Strategy.preset("fsdp").dump(path)
    assert (mode_of(path), sw.Strategy.load(path)) == (mode, sw.Strategy.preset("fsdp"))
    sw.Strategy.preset("ddp").dump(tmp_path / "link.toml")
    assert (mode_of(path), sw.Strategy.load(path)) == (mode, sw.Strategy.preset("ddp"))


@pytest.mark.parametrize("overwrite", [True, False])
def test_folder_cannot_be_written(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "s.toml").mkdir()
    with raises(sw.StrategyError, "s.toml"):
        files.write_text(tmp_path / "s.toml", "text", overwrite=overwrite)
    assert os.listdir(tmp_path) == ["s.toml"]
    assert os.listdir(tmp_path / "s.toml") == []


def test_link_into_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "link.toml").symlink_to("nowhere/s.toml")
    with raises(sw.StrategyError, "link.toml", fix="folder"):
        SMALL.dump(tmp_path / "link.toml")


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = SMALL.dump(tmp_path / "s.toml")
    with raises(sw.StrategyError, "s.toml", fix="--force"):
        files.write_text(path, "text", overwrite=False)
    assert sw.Strategy.load(path) == SMALL
    assert os.listdir(tmp_path) == ["s.toml"]


def test_longest_file_name(tmp_path: Path) -> None:
    path = SMALL.dump(tmp_path / ("s" * 250 + ".toml"))
    assert sw.Strategy.load(path) == SMALL
