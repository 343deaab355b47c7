"""Save a training state with orbax, and restore it under other shardings."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import sys
import threading
from typing import Any

import jax

from shardwright.checkpoint import chunks, leaves
from shardwright.checkpoint.files import (
    check_outside_of_trace,
    directory,
    fix_of_write,
    import_orbax,
)
from shardwright.checkpoint.leaves import SavedLeaf
from shardwright.errors import CheckpointError
from shardwright.vocabulary.integers import read_integer

_FORMAT = 1
_WHAT = "saving and restoring a state"
# Old checkpoints are moved to this folder before they are deleted. If a program is killed while it
# deletes a checkpoint, the remaining files are not mistaken for a complete checkpoint.
_DELETED = ".deleted"


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Saving:
    """A checkpoint that orbax writes.

    The next training step may donate the arrays of the state, because orbax has copied them.

    Attributes:
      step: Number of the checkpoint.
      folder: The folder of all checkpoints.
      bytes: Number of bytes of the arrays.
    """

    step: int
    folder: str
    bytes: int
    _manager: Any = dataclasses.field(repr=False)
    _error: CheckpointError | None = dataclasses.field(default=None, repr=False)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False)

    @property
    def done(self) -> bool:
        """Whether the save has ended. If it has failed, `wait` raises the error."""
        return self._manager is None or not self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Wait until the checkpoint is complete.

        Raises:
          CheckpointError: The checkpoint could not be written. Older checkpoints stay as they are.
        """
        with self._lock:
            # If two threads call `wait`, the first one takes orbax's manager and waits. The second
            # one then raises the error of the first one.
            manager, self._manager = self._manager, None
            if manager is None:
                if self._error is not None:
                    raise self._error
                return
            try:
                manager.wait_until_finished()
            except Exception as error:
                self._error = _failed(error, self.folder, self.step, self.bytes)
                raise self._error from error
            finally:
                manager.close()
                _delete_old(self.folder)
                if _PENDING.get(self.folder) is self:
                    del _PENDING[self.folder]


# Folder -> its last save for which `wait` was not called.
_PENDING: dict[str, Saving] = {}


# Cached by the process id, so that a forked process registers a function of its own.
@functools.cache
def _wait_at_exit(process: int) -> None:
    """Wait for background saves before Python exits, also after an exception.

    `atexit` is too late: by then, Python has stopped the thread pools that orbax writes with, so
    orbax loses the checkpoint or waits forever. Python calls the functions that are registered in
    `threading` in reverse order, so this function must be registered after the function of the
    thread pools.
    """
    import concurrent.futures.thread  # noqa: F401

    threading._register_atexit(_wait_for_all, process)  # type: ignore[attr-defined]


def _wait_for_all(process: int) -> None:
    if os.getpid() != process:
        return  # a forked process does not have the threads that write
    for saving in list(_PENDING.values()):
        try:
            saving.wait()
        except CheckpointError as error:
            sys.stderr.write(f"{error.__cause__!r}\nshardwright.checkpoint: {error}\n")


def save(
    folder: str | os.PathLike[str],
    state: Any,
    *,
    step: int,
    keep: int | None = None,
    wait: bool = True,
) -> Saving:
    """Write a state as checkpoint number `step` of a folder.

    The checkpoint appears when it is complete, or not at all. If a program is killed during a save,
    temporary directories remain. The next save to the folder removes them, so only one program may
    save to a folder at a time. All processes of a `jax.distributed` run are one program: each of
    them calls `save`.

    Args:
      folder: Folder of the checkpoints. It is created if necessary, and gets one directory per
        step.
      state: Tree of arrays, NumPy arrays, typed PRNG keys and numbers, for instance
        `{"params": ..., "moments": ..., "step": 20, "key": key}`.
      step: Number of the checkpoint. It must be new.
      keep: How many checkpoints to keep. When the new one is complete, older ones are deleted.
        Defaults to all.
      wait: Whether to return when the checkpoint is complete. If false, return when the arrays are
        copied to the host, and write in the background. The program waits for the save before it
        exits, also after an exception. If a save fails, `wait()` of the result and the next save to
        the folder raise its error. If neither is called, the error is printed at exit.

    Returns:
      The save, with its step and its number of bytes.

    Raises:
      CheckpointError: A leaf cannot be saved (all such leaves are named). Or the step exists, the
        call is inside a trace, or orbax is not installed. Or files cannot be written: those of this
        save, or of an earlier save that nobody waited for.
    """
    orbax, path = import_orbax(_WHAT, CheckpointError), directory(folder, CheckpointError, "folder")
    check_outside_of_trace("a state can be saved", CheckpointError)
    step = read_integer("step", step, error=CheckpointError, least=0)
    if keep is not None:
        keep = read_integer("keep", keep, error=CheckpointError)
    pairs, _ = leaves.flatten(state)
    saved, arrays = leaves.written(pairs)
    # The save before this one may still write in the background. Its orbax manager must be closed
    # before the next manager is created.
    if path in _PENDING:
        _PENDING[path].wait()
    _delete_old(path)
    manager = _manager(orbax, path, keep=keep, writes=True)
    if step in manager.all_steps():
        manager.close()
        raise CheckpointError(
            f"{path} has a checkpoint of step {step}",
            path="step",
            fix="pass the number of a new step, or delete the directory of the old checkpoint",
        )
    about = {"format": _FORMAT, "leaves": [leaf.to_json() for leaf in saved]}
    items = {"about": orbax.args.JsonSave(about)}
    if arrays:
        items["state"] = chunks.write_request(orbax, arrays)
    size = sum(array.nbytes for array in jax.tree.leaves(arrays))
    try:
        # Without `force`, orbax skips a step that is not above the newest one.
        manager.save(step, args=orbax.args.Composite(**items), force=True)
    except Exception as error:
        manager.close()
        raise _failed(error, path, step, size) from error
    _wait_at_exit(os.getpid())
    saving = _PENDING[path] = Saving(step=step, folder=path, bytes=size, _manager=manager)
    if wait:
        saving.wait()
    return saving


def restore(
    folder: str | os.PathLike[str],
    target: Any,
    *,
    step: int | None = None,
    partial: bool = False,
    recut: bool = False,
) -> Any:
    """Return the state of a checkpoint. Each process reads the shards of its own devices.

    In addition to the restored arrays, reading takes at most 192 MiB of host memory. Arrays above
    32 MiB are read in pieces, if their sharding is a `NamedSharding` in device memory. Other arrays
    are read shard by shard. If twice the largest of these shards is more than 192 MiB, reading
    takes that much.

    Args:
      folder: The folder that was given to `save`.
      target: Tree with the structure of the state: arrays or `jax.ShapeDtypeStruct`s with the
        shardings to restore to, such as `pm.abstract(specs)`, and numbers. NumPy arrays are
        restored as NumPy arrays. Scalars and keys need no sharding. Without a sharding, JAX places
        them like new arrays.
      step: Number of the checkpoint. Defaults to the newest.
      partial: Whether the target may leave out saved leaves. A server, for example, needs no
        moments.
      recut: Whether a stack of layers may have another shape in the file than in the target. A
        stack is `[layers, ...]`, or `[repeats, layers / repeats, ...]` for a circular pipeline. The
        order of the layers is the same in all these shapes.

    Raises:
      CheckpointError: There is no such checkpoint, or it cannot be read. Leaves of the target do
        not fit the saved leaves; the error lists all of them. The call is inside a trace, or orbax
        is not installed.
    """
    orbax, path = import_orbax(_WHAT, CheckpointError), directory(folder, CheckpointError, "folder")
    check_outside_of_trace("a state can be restored", CheckpointError)
    pairs, structure = leaves.flatten(target)
    number = _existing_step(path, step)
    manager = _manager(orbax, path)
    try:
        saved = _read_description(orbax, manager, path, number)
    finally:
        manager.close()
    matched = leaves.matched(saved, pairs, partial=partial, recut=recut)
    try:
        arrays = chunks.read(orbax, os.path.join(path, str(number), "state"), matched)
    except (KeyError, ValueError, OSError) as error:
        why = "they were changed or damaged after they were saved"
        others = ", ".join(str(known) for known in steps(path) if known != number)
        fix = f"pass another step: {others}" if others else "save it again"
        # If the file system refuses a read, TensorStore raises a ValueError with this text.
        if isinstance(error, PermissionError) or "PERMISSION_DENIED" in str(error):
            why = "this program may not read the files"
            fix = "change their permissions, or restore as a user who may read them"
        what = f"the arrays of step {number} in {path} cannot be read: {why}"
        raise CheckpointError(what, path="folder", fix=fix) from error
    values = [
        leaf.restored(leaves.get(arrays, leaf.saved.path) if leaf.saved.is_stored else None)
        for leaf in matched
    ]
    return jax.tree.unflatten(structure, values)


def steps(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return the numbers of the complete checkpoints of a folder, in order.

    If there is no such folder, the result is empty.

    Raises:
      CheckpointError: orbax is not installed.
    """
    orbax, path = import_orbax(_WHAT, CheckpointError), directory(folder, CheckpointError, "folder")
    # Do not create orbax's manager here, because it waits until every process creates one.
    found = orbax.utils.checkpoint_steps_paths(path)
    return tuple(sorted(int(step.name) for step in found if step.name.isdecimal()))


def _manager(orbax: Any, path: str, *, keep: int | None = None, writes: bool = False) -> Any:
    # A reader must not remove temporary directories, because a running save may still write to
    # them.
    options = orbax.CheckpointManagerOptions(
        max_to_keep=keep,
        cleanup_tmp_directories=writes,
        create=writes,
        todelete_subdir=_DELETED if writes and _is_local(path) else None,
    )
    return orbax.CheckpointManager(path, options=options)


def _delete_old(path: str) -> None:
    """Delete the old checkpoints that were moved away, also those of a program that was killed."""
    if _is_local(path) and jax.process_index() == 0:
        shutil.rmtree(os.path.join(path, _DELETED), ignore_errors=True)


def _is_local(path: str) -> bool:
    return "://" not in path


def _existing_step(path: str, step: int | None) -> int:
    """Return the number of the checkpoint to read."""
    if path in _PENDING:
        _PENDING[path].wait()
    known = steps(path)
    if not known:
        raise CheckpointError(
            f"there is no checkpoint in {path}",
            path="folder",
            fix="pass the folder that was given to save; a save that did not complete leaves none",
        )
    if step is None:
        return known[-1]
    number = read_integer("step", step, error=CheckpointError, least=0)
    if number not in known:
        raise CheckpointError(
            f"{path} has no checkpoint of step {number}",
            path="step",
            fix=f"steps are {', '.join(map(str, known))}",
        )
    return number


def _read_description(orbax: Any, manager: Any, path: str, step: int) -> list[SavedLeaf]:
    try:
        about = manager.restore(step, args=orbax.args.Composite(about=orbax.args.JsonRestore()))
        description = about["about"]
        if description["format"] == _FORMAT:
            return [leaves.parse_leaf(leaf) for leaf in description["leaves"]]
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise CheckpointError(
            f"step {step} in {path} is not a checkpoint of shardwright.checkpoint",
            path="folder",
            fix="restore the step with the program that saved it",
        ) from error
    raise CheckpointError(
        f"step {step} in {path} has format {description['format']}, and this version reads "
        f"{_FORMAT}",
        path="folder",
        fix="restore the step with the version of shardwright that wrote it",
    )


def _failed(error: Exception, path: str, step: int, size: int) -> CheckpointError:
    return CheckpointError(
        f"step {step} could not be written to {path}: {error}\nolder checkpoints are unchanged",
        path="folder",
        fix=fix_of_write(error, f"the checkpoint takes {size} bytes")
        or "correct what the error says, and save the step again",
    )
