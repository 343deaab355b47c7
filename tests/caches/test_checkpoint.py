"""Caches are saved completely or not at all, and restored on any mesh and in any mode."""

from __future__ import annotations

import builtins
import dataclasses
import errno
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from shardwright import caches
from shardwright.caches import restore, save
from shardwright.checkpoint import files
from shardwright.errors import CacheError, IndivisibleError
from shardwright.testing import assert_spec
from tests.caches.test_relayout import filled, make, manager_of
from tests.raising import facts, raises

pytest.importorskip("orbax.checkpoint")

KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "sliding": {"window": 8, "capacity": 16},
    "quantized": {"stored": "float8_e4m3fn"},
    "paged": {"page_size": 4},
}


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    assert dataclasses.replace(a.spec, mode=None) == dataclasses.replace(b.spec, mode=None)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full(but=["dense"])
def test_restore_on_another_mesh_and_mode(kind: str, tmp_path: Path) -> None:
    with manager_of():
        cache = filled(kind, **KINDS[kind])
    save(cache, tmp_path / "cache")
    alone = restore(tmp_path / "cache")
    assert_same(alone, cache)
    assert alone.spec.mode is None
    other = manager_of(mesh="dp:1,tp:2")
    actual = restore(tmp_path / "cache", manager=other, mode="decode")
    assert_same(actual, cache)
    assert_spec(actual, actual.axes(), manager=other, mode="decode")
    with other.for_mode("decode"):
        assert_same(restore(tmp_path / "cache"), cache)
        shapes = jax.eval_shape(lambda: make(kind, **KINDS[kind]))
        with raises(CacheError, "jax.eval_shape", path="like"):
            restore(tmp_path / "cache", like=shapes)
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), actual
        )
        assert_spec(restore(tmp_path / "cache", like=like), actual.axes())
        placed = restore(tmp_path / "cache", like=actual)
        assert_spec(placed, placed.axes())
        assert actual.append(
            np.ones((8, 1, 4, 4), np.float32), np.ones((8, 1, 4, 4), np.float32)
        ).ok.all()


def test_restore_refuses_different_cache(tmp_path: Path) -> None:
    save(filled(), tmp_path / "cache")
    with raises(CacheError, "DenseCache", "QuantizedCache", path="like"):
        restore(tmp_path / "cache", like=make("quantized"))
    with raises(
        CacheError,
        facts(16, 32, path="like", fix="create like with capacity=16"),
        facts("report", "ring", path="like", fix="report"),
    ):
        restore(tmp_path / "cache", like=make(capacity=32, overflow="ring"))
    with raises(CacheError, "manager", "mode", path="like"):
        restore(tmp_path / "cache", like=make(), mode="decode")
    save(filled("quantized"), tmp_path / "eight")
    arrays = "create like with the same options of the kind"
    with raises(CacheError, "int8", "[8, 16, 4, 4]", "float8_e5m2", path="like", fix=arrays):
        restore(tmp_path / "eight", like=make("quantized", stored="float8_e5m2"))
    with raises(IndivisibleError, "dp=3", size=8, fix="dp | -"):
        restore(tmp_path / "cache", manager=manager_of(batch="dp", length="-", mesh="dp:3,tp:1"))


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_save_is_atomic_and_never_overwrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import orbax.checkpoint as orbax

    with monkeypatch.context() as patch:

        def fail(*args: Any, **kwargs: Any) -> None:
            raise OSError("disk full")

        patch.setattr(orbax.JsonCheckpointHandler, "save", fail, raising=True)
        patch.setattr(orbax.JsonCheckpointHandler, "async_save", fail, raising=False)
        with raises(CacheError, "cache", path="path") as caught:
            save(filled(), tmp_path / "cache")
        assert "disk full" in str(caught.value.__cause__)
    assert not (tmp_path / "cache").exists()
    with raises(CacheError, "cache", path="path", fix="caches.save"):
        restore(tmp_path / "cache")
    # To another path, because the failed save may still be writing to its own.
    save(filled(), tmp_path / "whole")
    with raises(CacheError, "exists", path="path"):
        save(make(), tmp_path / "whole")
    assert restore(tmp_path / "whole").length.tolist() == [1, 2, 3, 4, 5, 5, 5, 5]


# TensorStore writes the number of an error of the operating system into the text.
STORE = "RESOURCE_EXHAUSTED: Failed to write 11337728 bytes to file 7: {} [os_error_code='{}']"


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (ValueError(STORE.format("No space left on device", errno.ENOSPC)), "; make room for it"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "; make room for it"),
        (ValueError(STORE.format("Permission denied", errno.EACCES)), "check the path"),
        (OSError(errno.EROFS, "Read-only file system"), "check the path and its permissions"),
        (ValueError("not of the disk"), None),
    ],
)
def test_fix_of_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, fix: str | None
) -> None:
    import orbax.checkpoint as orbax

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(orbax.Checkpointer, "save", fail)
    # No thread of orbax writes there, so there is nothing to wait for.
    monkeypatch.setattr(files, "_remove", shutil.rmtree)
    cache = filled()
    with pytest.raises(CacheError if fix else ValueError, match=re.escape(str(error))) as caught:
        save(cache, tmp_path / "cache")
    if fix is None:
        assert caught.value is error
        return
    assert fix in caught.value.fix
    if "room" in fix:
        size = sum(getattr(cache, name).nbytes for name in cache.array_axes)
        assert caught.value.fix.startswith(f"the cache takes {size} bytes")


FULL = """
import sys
import jax.numpy as jnp
import numpy as np
from shardwright import caches
from shardwright.errors import CacheError
cache = caches.init("dense", batch=2, capacity=4096, kv_heads=8, head_dim=64, dtype="float32")
k = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4096, 8, 64)), jnp.float32)
try:
    caches.save(cache.append(k, k).require(), sys.argv[1] + "/new")
except CacheError as error:
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
    assert "the cache could not be written" in ended.stdout
    assert "No space left on device" in ended.stdout
    assert "bytes; make room for it" in ended.stdout
    assert not ended.stdout.splitlines()[-1].startswith("new")


def test_invalid_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    with raises(CacheError, "cache", path="path", fix="caches.save"):
        restore(tmp_path / "empty")
    with raises(CacheError, "jit"):
        jax.jit(lambda cache: save(cache, tmp_path / "traced"))(make())
    rows: Any = caches.QuantizedRows(values=make().k, scale=make().k)
    with raises(CacheError, "restored", path="cache", fix="DenseCache"):
        save(rows, tmp_path / "other")
    load = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("orbax"):
            raise ImportError(name)
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with raises(CacheError, "orbax"):
        save(make(), tmp_path / "cache")
