"""Leaves, targets and folders that were restored wrongly, or refused for a wrong reason."""

from __future__ import annotations

import contextlib
import enum
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright import checkpoint
from shardwright.checkpoint import chunks
from shardwright.errors import CheckpointError
from shardwright.testing.meshes import cpu_mesh
from tests.raising import Facts, facts, raises

pytest.importorskip("orbax.checkpoint")


class Phase(enum.IntEnum):
    WARMUP = 1
    MAIN = 3


class Later(enum.IntEnum):
    WARMUP = 1


def test_members_of_an_enum(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"phase": Phase.MAIN, "done": True}, step=1)
    restored = checkpoint.restore(tmp_path, {"phase": Phase.WARMUP, "done": False})
    assert restored["phase"] is Phase.MAIN
    number = checkpoint.restore(tmp_path, {"phase": 0, "done": False})["phase"]
    assert (number, type(number)) == (3, int)
    with raises(CheckpointError, 3, path="phase"):
        checkpoint.restore(tmp_path, {"phase": Later.WARMUP, "done": False})


def test_numbers_that_a_move_made_arrays(tmp_path: Path) -> None:
    """`pm.reshard` makes arrays of numbers, and the state is restored into the target as before."""
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=cpu_mesh("fsdp:2,tp:4"))
    state = {"step": 2**30 + 1, "rate": 0.5, "done": True, "x": jnp.ones(3)}
    moved = pm.reshard(state, dict.fromkeys(state, pm.sharding()))
    assert moved["step"].dtype == jnp.int32
    checkpoint.save(tmp_path, moved, step=1)
    restored = checkpoint.restore(tmp_path, {**state, "step": 0, "rate": 0.0, "done": False})
    assert [restored[name] for name in ("step", "rate", "done")] == [2**30 + 1, 0.5, True]
    assert [type(restored[name]) for name in ("step", "rate", "done")] == [int, float, bool]
    for target in (0.0, False, Phase.MAIN):
        with raises(CheckpointError, "int32", path="step"):
            checkpoint.restore(tmp_path, {"step": target}, partial=True)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_without_elements(tmp_path: Path, impl: str) -> None:
    keys = jax.random.split(jax.random.key(0, impl=impl), 8)[:0]
    checkpoint.save(tmp_path, {"keys": keys, "x": jnp.ones(3)}, step=1)
    sharding = NamedSharding(cpu_mesh("dp:2"), P())
    for target in (keys, jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=sharding)):
        restored = checkpoint.restore(tmp_path, {"keys": target, "x": jnp.ones(3)})["keys"]
        assert (restored.shape, restored.dtype) == ((0,), keys.dtype)
    assert restored.sharding.is_equivalent_to(sharding, 1)


def test_targets_without_shardings(tmp_path: Path) -> None:
    """Such a target would be restored whole to one device, and float64 cut to float32."""
    checkpoint.save(tmp_path, {"x": np.ones((4, 8)), "y": np.ones((4, 8), np.float32)}, step=1)
    specs = {
        "x": sw.ArraySpec((4, 8), np.float64, (sw.EMBED, sw.VOCAB)),
        "y": sw.ArraySpec((4, 8), np.float32, (sw.EMBED, sw.VOCAB)),
    }
    manager = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=cpu_mesh("fsdp:4"))
    for scope in (contextlib.nullcontext(), manager):
        with scope, pytest.raises(CheckpointError) as caught:
            checkpoint.restore(tmp_path, specs)
        paths = [problem.path for problem in caught.value.problems]
        assert paths == ["x", "y"]
        assert "the target is ArraySpec" in str(caught.value)
        assert "pm.abstract(specs)" in caught.value.problems[0].fix
    for target in (jax.typeof(jnp.ones((4, 8))), jax.ShapeDtypeStruct((4, 8), jnp.float32)):
        with raises(CheckpointError, "target", path="y", fix="pm.abstract"):
            checkpoint.restore(tmp_path, {"y": target}, partial=True)
    target = manager.abstract({"y": specs["y"]})
    restored = checkpoint.restore(tmp_path, target, partial=True)["y"]
    assert restored.sharding == target["y"].sharding


def test_sharding_that_does_not_fit(tmp_path: Path) -> None:
    """The checkpoint is fine, so the error is about the target."""
    checkpoint.save(tmp_path, {"x": jnp.arange(5.0), "y": jnp.zeros((0, 5))}, step=1)
    mesh = cpu_mesh("dp:2")

    def targets(sharding: Any) -> dict[str, Any]:
        struct = jax.ShapeDtypeStruct
        return {
            "x": struct((5,), jnp.float32, sharding=NamedSharding(sharding, P("dp"))),
            "y": struct((0, 5), jnp.float32, sharding=NamedSharding(sharding, P(None, "dp"))),
        }

    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path, targets(mesh))
    text = str(caught.value)
    assert "1. x: it has the shape [5], and NamedSharding" in text
    assert "2. y: it has the shape [0, 5], and NamedSharding" in text
    assert "does not divide it" in text
    assert "damaged" not in text
    with raises(CheckpointError, "sharding", "abstract", path="x"):
        checkpoint.restore(tmp_path, targets(sw.abstract_mesh("dp:2")))
    restored = checkpoint.restore(tmp_path, {"x": np.zeros(5, np.float32), "y": jnp.zeros((0, 5))})
    np.testing.assert_array_equal(restored["x"], np.arange(5))


@pytest.mark.parametrize(
    "error", [PermissionError(13, "no"), ValueError("PERMISSION_DENIED: Error opening")]
)
def test_files_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    checkpoint.save(tmp_path, {"x": jnp.ones(3)}, step=1)

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(chunks, "read", fail)
    with raises(CheckpointError, "step", 1, path="folder"):
        checkpoint.restore(tmp_path, {"x": jnp.ones(3)})


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_wide_floats_are_refused(tmp_path: Path, dtype: Any) -> None:
    with raises(CheckpointError, np.dtype(dtype), "dtype", path="x", fix="PRNG"):
        checkpoint.save(tmp_path / "run", {"x": np.ones(3, dtype)}, step=1)
    assert not any(tmp_path.iterdir())


def test_file_in_place_of_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    for call in (
        lambda: checkpoint.save(file, {"x": 1}, step=1),
        lambda: checkpoint.restore(file, {"x": 1}),
        lambda: checkpoint.steps(file),
        lambda: checkpoint.export_safetensors(file, {"x": jnp.ones(3)}),
    ):
        with raises(CheckpointError, "file", path="folder") as caught:
            call()
        assert "fix   pass the path of a directory" in str(caught.value)
    assert file.read_text() == "text"


@pytest.mark.parametrize(
    ("tree", "options", "message"),
    [
        (
            {"__metadata__": np.ones(2), "a": np.ones(2)},
            {},
            facts("safetensors", "reserves", path="__metadata__"),
        ),
        (
            {"a": np.ones(2)},
            {"metadata": {"a": 1}},
            facts("entry", "a", path="metadata", fix="format"),
        ),
        (
            {"a": np.ones(2)},
            {"metadata": {1: "a"}},
            facts("entry", 1, path="metadata", fix="format"),
        ),
        ({"a": np.ones(2)}, {"metadata": "x"}, facts("str", path="metadata", fix="format")),
        ({"a": np.ones(2)}, {"most": 0}, facts(0, "bytes", path="most", fix="64MiB")),
    ],
)
def test_exports_that_no_reader_accepts(
    tmp_path: Path, tree: Any, options: Any, message: Facts
) -> None:
    with raises(CheckpointError, message) as caught:
        checkpoint.export_safetensors(tmp_path / "out", tree, **options)
    assert "fix   " in str(caught.value)
    with raises(CheckpointError, "safetensors", "written", path="folder"):
        checkpoint.export_safetensors("gs://bucket/out", {"a": np.ones(2)})
    with raises(CheckpointError, "NoneType", path="folder"):
        checkpoint.export_safetensors(None, {"a": np.ones(2)})  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())
