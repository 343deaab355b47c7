"""Exported files hold what the library `safetensors` reads, bit for bit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright import checkpoint
from shardwright.checkpoint import files as checkpoint_files
from shardwright.errors import CheckpointError
from shardwright.testing.meshes import cpu_mesh
from tests.raising import facts, raises

safetensors = pytest.importorskip("safetensors")


def params() -> dict[str, Any]:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=cpu_mesh("fsdp:2,tp:4"))
    up = jnp.arange(8 * 24, dtype=jnp.float32).reshape(8, 24)
    return {
        "layers": [{"up": pm.shard(up, sw.ColumnWise), "scale": jnp.ones(3, jnp.bfloat16)}],
        "scalar": jnp.float16(3),
        "empty": jnp.zeros((0, 4)),
        "eight": jnp.arange(5).astype(jnp.float8_e4m3fn),
        "host": np.arange(3, dtype=np.int64),
        "flag": jnp.array([True, False]),
    }


def tensors(tree: Any) -> dict[str, np.ndarray[Any, Any]]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(value)
        for path, value in pairs
    }


def read(path: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor, as the library reads them."""
    return {
        name: bytes(tensor["data"]) for name, tensor in safetensors.deserialize(path.read_bytes())
    }


def test_one_file(tmp_path: Path) -> None:
    tree = params()
    files = checkpoint.export_safetensors(tmp_path / "out", tree, metadata={"format": "np"})
    assert {*files.values()} == {"model.safetensors"}
    (file,) = (tmp_path / "out").iterdir()
    expected = tensors(tree)
    assert read(file) == {name: value.tobytes() for name, value in expected.items()}
    with safetensors.safe_open(file, "np") as opened:
        assert opened.metadata() == {"format": "np"}
        for name in ("layers.0.up", "scalar", "empty", "host", "flag"):
            np.testing.assert_array_equal(opened.get_tensor(name), expected[name], strict=True)
    (tmp_path / "other").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_several_files(tmp_path: Path) -> None:
    tree = {f"w{number}": jnp.full((10,), number, jnp.float32) for number in range(5)}
    files = checkpoint.export_safetensors(tmp_path / "out", tree, most=80)
    assert files["w0"] == files["w1"] == "model-00001-of-00003.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 200}, "weight_map": files}
    merged: dict[str, bytes] = {}
    for file in sorted({*files.values()}):
        merged |= read(tmp_path / "out" / file)
    assert merged == {name: value.tobytes() for name, value in tensors(tree).items()}


def test_padding_is_left_out(tmp_path: Path) -> None:
    """Of a dim whose size is whole, everything is written."""
    padded = np.arange(24, dtype=np.float32).reshape(6, 4)
    checkpoint.export_safetensors(tmp_path / "out", {"a": padded}, shapes={"a": (5, 4)})
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "np") as opened:
        np.testing.assert_array_equal(opened.get_tensor("a"), padded[:5])


def test_invalid_exports(tmp_path: Path) -> None:
    deleted = jnp.ones(3)
    deleted.delete()
    bad = {"a": deleted, "b": 3, "c": jax.random.key(0)}
    with pytest.raises(CheckpointError) as error:
        checkpoint.export_safetensors(tmp_path / "out", bad)
    text = str(error.value)
    assert "1. a: the array is deleted" in text
    assert "2. b: int is not an array" in text
    assert "3. c: the safetensors format has no dtype key<fry>" in text
    for call, says in {
        lambda: checkpoint.export_safetensors(tmp_path, {"a": jnp.ones(3)}): facts(
            "test_invalid_exports0", path="folder"
        ),
        lambda: checkpoint.export_safetensors(tmp_path / "o", {}): facts("parameters", "export"),
        lambda: checkpoint.export_safetensors(
            tmp_path / "o", {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}
        ): facts("tensors"),
    }.items():
        with raises(CheckpointError, says):
            call()
    assert list(tmp_path.iterdir()) == []


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("module", "name"), [(os, "posix_fallocate"), (np, "memmap")])
def test_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    """The space is taken before the file is mapped: a full disk would end the process later."""
    monkeypatch.setattr(module, name, no_space)
    # No thread writes there any more, so there is nothing to wait for.
    monkeypatch.setattr(checkpoint_files, "_remove", shutil.rmtree)
    with raises(CheckpointError, "could", "written", path="folder") as caught:
        checkpoint.export_safetensors(tmp_path / "out", {"a": jnp.ones(3)})
    assert "the export takes 12 bytes" in caught.value.fix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EDQUOT, "the export takes 12 bytes; make room for it"),
        (errno.EACCES, "check the path and its permissions"),
        (errno.EROFS, "check the path and its permissions"),
    ],
)
def test_fix_of_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fix: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(np, "memmap", refuse)
    monkeypatch.setattr(checkpoint_files, "_remove", shutil.rmtree)
    with raises(CheckpointError, os.strerror(number), path="folder") as caught:
        checkpoint.export_safetensors(tmp_path / "out", {"a": jnp.ones(3)})
    assert caught.value.fix.startswith(fix)


def test_disks_that_cannot_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    tree = {"a": np.arange(2**18 + 5, dtype=np.float32), "b": np.zeros((0, 3))}
    checkpoint.export_safetensors(tmp_path / "reserved", tree)
    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    checkpoint.export_safetensors(tmp_path / "written", tree)
    written, reserved = (tmp_path / name / "model.safetensors" for name in ("written", "reserved"))
    assert written.read_bytes() == reserved.read_bytes()


FULL = """
import sys
import numpy as np
from shardwright import checkpoint
from shardwright.errors import CheckpointError
checkpoint.export_safetensors(sys.argv[1] + "/old", {"w": np.ones((512, 1024), np.float32)})
try:
    checkpoint.export_safetensors(sys.argv[1] + "/new", {"w": np.ones((4096, 1024), np.float32)})
except CheckpointError as error:
    print(error)
"""


@pytest.mark.full
def test_full_disk(tmp_path: Path) -> None:
    """In a mount namespace of its own, so that nothing stays mounted."""
    script = 'mount -t tmpfs -o size=8m tmpfs "$1" && "$2" -c "$3" "$1" && ls "$1"'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh"]
    try:
        subprocess.run([*command, str(tmp_path), "true", ""], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine mounts no disks in a namespace")
    command += [str(tmp_path), sys.executable, FULL]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "new could not be written: No space left on device" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "old"
