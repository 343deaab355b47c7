"""States of training runs survive a change of strategy, mesh and axis types, bit for bit."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright import checkpoint
from shardwright.checkpoint import chunks, leaves
from shardwright.checkpoint import state as state_module
from shardwright.checkpoint.chunks import StoredArray
from shardwright.errors import CheckpointError
from shardwright.testing.meshes import cpu_mesh
from tests.raising import facts, raises

pytest.importorskip("orbax.checkpoint")
optax = pytest.importorskip("optax")

SPECS = {
    "embed": sw.ArraySpec((16, 8), jnp.bfloat16, (sw.VOCAB, sw.EMBED), jax.nn.initializers.ones),
    "layers": [
        sw.ArraySpec((8, 24), jnp.float32, sw.ColumnWise, jax.nn.initializers.normal(1.0)),
        sw.ArraySpec((24, 8), jnp.float32, sw.RowWise, jax.nn.initializers.normal(1.0)),
    ],
    "odd": sw.ArraySpec((5,), jnp.float32, (sw.NORM,), jax.nn.initializers.normal(1.0)),
}
OPTIMIZER = optax.adamw(1e-2)


def manager(preset: str, sizes: str, axis_types: str = "auto") -> sw.PartitionManager:
    return sw.PartitionManager(
        sw.Strategy.preset(preset), mesh=cpu_mesh(sizes, axis_types=axis_types), mode="train"
    )


def state_of(pm: sw.PartitionManager) -> dict[str, Any]:
    params = pm.init(SPECS, jax.random.key(3))
    gradients = jax.tree.map(lambda x: (x * 0.5).astype(x.dtype), params)
    moments = pm.init_state(OPTIMIZER, params, SPECS)
    _, moments = jax.jit(OPTIMIZER.update)(gradients, moments, params)
    return {
        "params": params,
        "moments": moments,
        "step": 20,
        "rate": 0.1,
        "done": False,
        "key": jax.random.key(7, impl="rbg"),
        "keys": jax.random.split(jax.random.key(8), 4),
        "count": jnp.int32(5),
        "rows": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "none": None,
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "a.b/c": jnp.ones(3),
    }


def target_of(pm: sw.PartitionManager) -> dict[str, Any]:
    return {
        "params": pm.abstract(SPECS),
        "moments": pm.abstract_state(OPTIMIZER, SPECS),
        "step": 0,
        "rate": 0.0,
        "done": True,
        "key": jax.random.key(0, impl="rbg"),
        "keys": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4)),
        "count": jax.ShapeDtypeStruct((), jnp.int32),
        "rows": np.zeros((2, 3), np.uint16),
        "none": None,
        "empty": jnp.ones((0, 3), jnp.bfloat16),
        "a.b/c": jnp.zeros(3),
    }


def as_bits(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return (type(leaf).__name__, str(np.asarray(leaf).dtype), np.asarray(leaf).tobytes())


def assert_equal_bits(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert jax.tree.map(as_bits, a) == jax.tree.map(as_bits, b)


@pytest.mark.parametrize(
    ("preset", "sizes", "axis_types"),
    [
        ("fsdp_tp", "fsdp:2,tp:4", "auto"),
        ("fsdp", "fsdp:8", "explicit"),
        ("ddp", "dp:4", "auto"),
        ("tensor", "tp:2", "explicit"),
    ],
)
@pytest.mark.full(but=["fsdp_tp-fsdp:2,tp:4-auto"])
def test_restore_under_other_strategies(
    tmp_path: Path, preset: str, sizes: str, axis_types: str
) -> None:
    state = state_of(manager("fsdp_tp", "fsdp:4,tp:2"))
    checkpoint.save(tmp_path / "run", state, step=20)
    pm = manager(preset, sizes, axis_types)
    target = target_of(pm)
    restored = checkpoint.restore(tmp_path / "run", target)
    assert_equal_bits(restored, state)
    for part in ("params", "moments"):
        jax.tree.map(check_sharding, restored[part], target[part])
    assert isinstance(restored["rows"], np.ndarray)
    assert restored["step"] == 20
    assert type(restored["step"]) is int
    # Scalars and keys are not committed, so a step on any mesh takes them.
    with pm:
        jax.jit(lambda x, count, key: (x + count, key))(
            restored["params"]["layers"][0], restored["count"], restored["key"]
        )


def check_sharding(restored: jax.Array, target: jax.ShapeDtypeStruct) -> None:
    assert restored.sharding == target.sharding


@pytest.mark.parametrize(
    ("preset", "sizes"), [("serve_tp", "dp:2,tp:2"), ("fsdp", "fsdp:4"), ("ddp", "dp:3")]
)
@pytest.mark.full
def test_leaves_are_read_in_pieces(
    tmp_path: Path, preset: str, sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row of 16 elements is a chunk, and a piece is one row of each shard."""
    monkeypatch.setattr(chunks, "CHUNK", 64)
    monkeypatch.setattr(chunks, "PIECE", 128)
    axes = {"x": (sw.EMBED, sw.MLP_INTERMEDIATE), "narrow": (sw.EMBED,), "bits": (sw.VOCAB,)}
    state = {
        "x": jnp.arange(12 * 16.0).reshape(12, 16),
        "narrow": jnp.arange(192, dtype=jnp.bfloat16).at[5].set(jnp.nan),
        "bits": (jnp.arange(512) % 7 - 3).astype(jnp.int4),
    }
    checkpoint.save(tmp_path, manager("fsdp_tp", "fsdp:4,tp:2").shard(state, axes), step=1)
    pm = manager(preset, sizes)
    target = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        pm.shardings(state, axes),
    )
    ticks: list[int] = []
    original = chunks.move_leaf

    def count_pieces(file: Any, sharding: Any, route: Any, **options: Any) -> jax.Array:
        ticks.append(route.pieces.count)
        return original(file, sharding, route, **options)

    monkeypatch.setattr(chunks, "move_leaf", count_pieces)
    restored = checkpoint.restore(tmp_path, target)
    assert_equal_bits(restored, state)
    jax.tree.map(check_sharding, restored, target)
    assert len(ticks) == 3
    assert min(ticks) > 1


def test_a_read_above_the_usual_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """orbax refuses a read that is larger than its limit, so a large read raises the limit."""
    monkeypatch.setattr(chunks, "AT_ONCE", 16)
    pm = manager("fsdp", "fsdp:4")
    state = {"x": pm.shard(jnp.arange(64.0).reshape(8, 8), sw.EMBED, sw.VOCAB)}
    checkpoint.save(tmp_path, state, step=1)
    assert_equal_bits(checkpoint.restore(tmp_path, state), state)


def test_parts_that_fill_a_box_are_one_read() -> None:
    file = FakeFile(np.arange(24).reshape(4, 6))
    array = StoredArray(file)
    columns = [(slice(1, 3), slice(low, low + 2)) for low in (2, 4, 0, 4)]
    apart = [(slice(0, 1), slice(None)), (slice(2, 3), slice(None))]
    for boxes, reads in ((columns, 1), (apart, 2), (apart[:1] * 3, 1)):
        file.reads = 0
        for box, part in zip(boxes, array.read(boxes), strict=True):
            np.testing.assert_array_equal(part, file.values[box])
        assert file.reads == reads


class FakeFile:
    """A TensorStore that counts its reads."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape, self.reads = values, values.shape, 0

    def __getitem__(self, box: Any) -> Any:
        self.reads += 1
        done = SimpleNamespace(result=lambda: self.values[box])
        return SimpleNamespace(read=lambda: done)


@pytest.mark.parametrize("value", [jnp.arange(3.0), 7, True, float("nan"), 2 + 1j, np.float16(2)])
def test_state_of_one_leaf(tmp_path: Path, value: Any) -> None:
    checkpoint.save(tmp_path, value, step=0)
    restored = checkpoint.restore(tmp_path, value)
    assert as_bits(restored) == as_bits(value)


def test_empty_state(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"none": None}, step=0)
    assert checkpoint.restore(tmp_path, {"none": None}) == {"none": None}


def test_newest_and_kept_steps(tmp_path: Path) -> None:
    assert checkpoint.steps(tmp_path / "run") == ()
    for step in (5, 20, 100):
        saving = checkpoint.save(tmp_path / "run", {"x": jnp.full(4, step)}, step=step, keep=2)
        assert (saving.step, saving.bytes, saving.done) == (step, 16, True)
    assert checkpoint.steps(tmp_path / "run") == (20, 100)
    target = {"x": jnp.zeros(4, jnp.int32)}
    assert checkpoint.restore(tmp_path / "run", target)["x"].tolist() == [100] * 4
    assert checkpoint.restore(tmp_path / "run", target, step=20)["x"].tolist() == [20] * 4


def test_partial_restore(tmp_path: Path) -> None:
    state = state_of(manager("fsdp_tp", "fsdp:4,tp:2"))
    checkpoint.save(tmp_path, state, step=1)
    server = manager("serve_tp", "dp:2,tp:4")
    target = {"params": server.abstract(SPECS)}
    restored = checkpoint.restore(tmp_path, target, partial=True)
    assert_equal_bits(restored, {"params": state["params"]})


def test_donated_while_it_is_written(tmp_path: Path) -> None:
    pm = manager("fsdp", "fsdp:8")
    x = jax.device_put(np.arange(1 << 16, dtype=np.float32), pm.sharding(sw.EMBED))
    before = np.asarray(x).copy()
    first = checkpoint.save(tmp_path, {"x": x}, step=1, wait=False)
    y = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert x.is_deleted()
    second = checkpoint.save(tmp_path, {"x": y}, step=2, wait=False)  # waits for the first
    assert first.done
    restored = checkpoint.restore(tmp_path, {"x": y})["x"]  # waits for the second
    assert second.done
    np.testing.assert_array_equal(restored, before + 1)
    np.testing.assert_array_equal(checkpoint.restore(tmp_path, {"x": y}, step=1)["x"], before)
    second.wait()


UNFINISHED = """
import sys
import jax.numpy as jnp
from shardwright import checkpoint
checkpoint.save(sys.argv[1], {"w": jnp.ones((2048, 2048))}, step=1, wait=False)
if sys.argv[2] == "raise":
    raise RuntimeError("the data ended")
if sys.argv[2] == "exit":
    sys.exit(3)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("raise", 1),
        pytest.param("exit", 3, marks=pytest.mark.full),
        pytest.param("end", 0, marks=pytest.mark.full),
    ],
)
def test_exit_waits_for_a_save(tmp_path: Path, how: str, code: int) -> None:
    command = [sys.executable, "-c", UNFINISHED, str(tmp_path), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == code, ended.stderr
    assert "cannot schedule" not in ended.stderr
    restored = checkpoint.restore(tmp_path, {"w": np.zeros((2048, 2048), np.float32)})
    assert (restored["w"] == 1).all()


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "the disk is full")


def failing_save(folder: Path) -> checkpoint.Saving:
    """Return a save that fails in the background."""
    orbax = SimpleNamespace(wait_until_finished=full_disk, close=lambda: None)
    saving = checkpoint.Saving(step=2, folder=str(folder), bytes=0, _manager=orbax)
    state_module._PENDING[str(folder)] = saving
    return saving


def test_failed_save_is_told_every_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saving = failing_save(tmp_path)
    with raises(CheckpointError, 2, "test_failed_save_is_told_every0", 28, path="folder") as caught:
        checkpoint.save(tmp_path, {"x": jnp.ones(3)}, step=3)
    assert "the disk is full" in repr(caught.value.__cause__)
    assert caught.value.fix.startswith("the checkpoint takes 0 bytes; make room for it")
    with raises(CheckpointError, 2, "test_failed_save_is_told_every0", 28, path="folder"):
        saving.wait()
    checkpoint.save(tmp_path, {"x": jnp.ones(3)}, step=3)
    failing_save(tmp_path)
    state_module._wait_for_all(os.getpid() + 1)  # in a forked process
    assert not capsys.readouterr().err
    state_module._wait_for_all(os.getpid())
    told = capsys.readouterr().err
    assert "the disk is full" in told
    assert "step 2 could not be written" in told
    assert not state_module._PENDING


def test_save_removes_leftovers(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"x": jnp.ones(3)}, step=1)
    leftover = tmp_path / "2.orbax-checkpoint-tmp-99"
    leftover.mkdir()
    (tmp_path / "notes").mkdir()
    assert checkpoint.steps(tmp_path) == (1,)
    assert leftover.exists()  # reading removes nothing
    checkpoint.save(tmp_path, {"x": jnp.ones(3)}, step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "notes"]


def test_restore_leaves_a_running_save_alone(tmp_path: Path) -> None:
    """A server reads the newest checkpoint while the training run writes the next one."""
    checkpoint.save(tmp_path, {"x": jnp.ones(3)}, step=1)
    running = tmp_path / "2.orbax-checkpoint-tmp-99"
    running.mkdir()
    checkpoint.restore(tmp_path, {"x": jnp.ones(3)})
    checkpoint.restore(tmp_path, {"x": jnp.ones(3)}, step=1, partial=True)
    assert running.exists()


def test_names_that_look_escaped(tmp_path: Path) -> None:
    state = {"a%2Eb": jnp.ones(2), "a.b": jnp.zeros(2), "a%252Eb": jnp.full(2, 3.0)}
    state["a"] = {"b": jnp.full(2, 4.0)}
    state["%"] = {"": jnp.full(2, 5.0)}
    checkpoint.save(tmp_path, state, step=1)
    assert_equal_bits(checkpoint.restore(tmp_path, state), state)


def test_old_steps_are_not_deleted_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that is killed while it deletes leaves no part of a checkpoint."""
    with monkeypatch.context() as patch:
        patch.setattr(state_module.shutil, "rmtree", lambda *_, **__: None)
        for step in (1, 2):
            checkpoint.save(tmp_path, {"x": jnp.ones(3)}, step=step, keep=1)
    assert checkpoint.steps(tmp_path) == (2,)
    assert [path.name for path in (tmp_path / ".deleted").iterdir()] == ["1"]
    checkpoint.save(tmp_path, {"x": jnp.ones(3)}, step=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_damaged_arrays(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, {"x": jnp.arange(1000.0)}, step=step)
    for file in (tmp_path / "2" / "state").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(b"")
    with raises(CheckpointError, 2, "test_damaged_arrays0", path="folder", fix="1"):
        checkpoint.restore(tmp_path, {"x": jnp.zeros(1000)})
    assert checkpoint.restore(tmp_path, {"x": jnp.zeros(1000)}, step=1)["x"][999] == 999


class Twice:
    """A node of a tree that gives two leaves one name."""


jax.tree_util.register_pytree_with_keys(
    Twice,
    lambda _: (((jax.tree_util.DictKey("a"), 1), (jax.tree_util.DictKey("a"), 2)), None),
    lambda _, leaves: Twice(),
)


def failure(call: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        call()
    return str(error.value)


def test_invalid_saves(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    deleted = jnp.ones(3)
    deleted.delete()
    text = failure(
        lambda: checkpoint.save(
            folder,
            {
                "a": deleted,
                "b": "text",
                "c": jax.ShapeDtypeStruct((3,), jnp.float32),
                "d": np.array(["x"]),
            },
            step=1,
        )
    )
    assert text == (
        "4 problems\n"
        " 1. a: the array is deleted: it was donated\n"
        "      fix   save the state that the last step returned\n"
        " 2. b: str cannot be saved\n"
        "      fix   save arrays, numbers and PRNG keys; write anything else to a file of its own\n"
        " 3. c: ShapeDtypeStruct has no values\n"
        "      fix   save arrays; restore takes such descriptions of arrays\n"
        " 4. d: the dtype <U1 cannot be saved\n"
        "      fix   save numbers, bools and PRNG keys"
    )
    assert not folder.exists()
    x = {"x": jnp.ones(3)}
    checkpoint.save(folder, x, step=1)
    for call, says in {
        lambda: checkpoint.save(folder, x, step=1): "has a checkpoint of step 1",
        lambda: checkpoint.save(folder, x, step=-1): "step must be a non-negative integer, got -1",
        lambda: checkpoint.save(folder, x, step=2.5): "step must be a non-negative integer",
        lambda: checkpoint.save(folder, x, step=2, keep=0): "keep must be a positive integer",
        lambda: checkpoint.save(3, x, step=2): "folder is int",
        lambda: jax.jit(lambda x: checkpoint.save(folder, x, step=2))(x): "only outside of jit",
        lambda: checkpoint.save(folder, Twice(), step=2): "a: two leaves have this path",
    }.items():
        assert says in failure(call)
    assert checkpoint.steps(folder) == (1,)


def test_invalid_restores(tmp_path: Path) -> None:
    state = {"w": jnp.ones((4, 2)), "step": 3, "key": jax.random.key(0), "b": jnp.ones(2)}
    checkpoint.save(tmp_path, state, step=1)
    target = {
        "w": jax.ShapeDtypeStruct((4, 2), jnp.bfloat16),
        "step": 3.0,
        "key": jnp.zeros(2, jnp.uint32),
        "c": jnp.ones(2),
    }
    text = failure(lambda: checkpoint.restore(tmp_path, target))
    assert text == (
        "5 problems\n"
        " 1. c: the checkpoint has no leaf at this path\n"
        "      fix   restore the structure that was saved\n"
        " 2. key: saved as keys key<fry>[], and the target is uint32[2]\n"
        "      fix   restore it as it was saved, then convert it\n"
        " 3. step: saved as a number of type int, and the target is 3.0\n"
        "      fix   restore it as it was saved\n"
        " 4. w: saved as float32[4, 2], and the target is bfloat16[4, 2]\n"
        "      fix   restore it as it was saved, then convert it\n"
        " 5. b: it was saved, but the target has no leaf at this path\n"
        "      fix   add it to the target, or pass partial=True to leave it in the file"
    )
    unsharded = {"w": jax.ShapeDtypeStruct((4, 2), jnp.float32)}
    for call, says in {
        lambda: checkpoint.restore(tmp_path / "no", state): "there is no checkpoint in",
        lambda: checkpoint.restore(tmp_path, state, step=7): "no checkpoint of step 7",
        lambda: checkpoint.restore(tmp_path, {"w": "x"}, partial=True): "w: the target is str",
        lambda: checkpoint.restore(tmp_path, unsharded, partial=True): "w: the target has no shard",
        jax.jit(lambda: checkpoint.restore(tmp_path, state)): "restored only outside of jit",
    }.items():
        assert says in failure(call)


def test_directory_of_another_program(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(tmp_path) as other:
        other.save(4, args=ocp.args.StandardSave({"x": np.ones(3)}))
    text = failure(lambda: checkpoint.restore(tmp_path, {"x": np.ones(3)}))
    assert "step 4 in" in text
    assert "is not a checkpoint of shardwright.checkpoint" in text


def test_error_without_orbax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith("orbax"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "orbax", None)
    text = failure(lambda: checkpoint.save(tmp_path, {}, step=1))
    assert text.startswith("saving and restoring a state needs orbax, which is not installed")


KILLED = """
import os, random, sys, threading
import jax, jax.numpy as jnp
from shardwright import checkpoint
folder, first, delay = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
state = lambda step: {"w": jnp.full((512, 512), step, jnp.float32), "step": step}
checkpoint.save(folder, state(first), step=first)
print("ready", flush=True)
threading.Timer(delay, os._exit, (9,)).start()
for step in range(first + 1, first + 400):
    checkpoint.save(folder, state(step), step=step, keep=3, wait=step % 2 == 0)
"""


@pytest.mark.full
def test_killed_by_a_signal(tmp_path: Path) -> None:
    """The operating system gives the program no chance to clean up."""
    command = [sys.executable, "-c", KILLED, str(tmp_path), "0", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGKILL)
    newest = checkpoint.steps(tmp_path)[-1]
    restored = checkpoint.restore(tmp_path, {"w": np.zeros((512, 512), np.float32), "step": 0})
    assert restored["step"] == newest
    checkpoint.save(tmp_path, {"w": jnp.ones(1), "step": 0}, step=newest + 1)
    assert all(path.name.isdigit() for path in tmp_path.iterdir())


def test_reads_of_a_leaf_are_whole_chunks() -> None:
    """orbax refuses a read that is larger than the limit, so the limit counts as orbax does."""
    shape, dtype = (10, 16), jnp.float32
    saved = leaves.SavedLeaf(path=("x",), kind=leaves.LeafKind.ARRAY, shape=shape, dtype="float32")
    for spec, expected in ((P("dp"), 2 * 4 * 16), (P(None, "dp"), 3 * 4 * 16), (P(), 3 * 4 * 16)):
        sharding = NamedSharding(cpu_mesh("dp:2"), spec)
        target = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        stored = {"x": SimpleNamespace(storage=SimpleNamespace(chunk_shape=(4, 16)))}
        leaf = leaves.TargetLeaf(saved=saved, target=target)
        assert set(chunks._reads(leaf, stored)) == {4 * expected}


def test_64_bits_are_not_cut_to_32(tmp_path: Path) -> None:
    """Without jax_enable_x64, JAX would make an int32 of the position in the data."""
    state = {"position": np.int64(2**40 + 7), "rows": np.arange(8) + 2**40}
    checkpoint.save(tmp_path, state, step=1)
    rows = NamedSharding(cpu_mesh("dp:8"), P("dp"))
    target = {
        "position": jax.ShapeDtypeStruct((), np.int64),
        "rows": jax.ShapeDtypeStruct((8,), np.int64, sharding=rows),
    }
    with raises(
        CheckpointError,
        facts("int64", "JAX", 64, 32, path="position", fix="NumPy"),
        facts("int64[8]", "JAX", 64, 32, path="rows", fix="NumPy"),
    ) as caught:
        checkpoint.restore(tmp_path, target)
    assert [problem.path for problem in caught.value.problems] == ["position", "rows"]
    restored = checkpoint.restore(tmp_path, state)
    assert restored["position"] == 2**40 + 7
    np.testing.assert_array_equal(restored["rows"], state["rows"])


@pytest.mark.parametrize("dtype", ["uint2", "uint4"])
def test_types_that_cannot_be_written_are_refused(tmp_path: Path, dtype: str) -> None:
    with raises(CheckpointError, dtype, "dtype", "saved", path="x", fix="PRNG"):
        checkpoint.save(tmp_path, {"x": jnp.ones(8, dtype)}, step=1)
    assert not any(tmp_path.iterdir())
