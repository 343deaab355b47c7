"""Save a cache and restore it, possibly on another mesh: its arrays and its spec, with orbax."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding

from shardwright.caches.base import KVCache
from shardwright.caches.kinds import KINDS
from shardwright.caches.sharding import CacheSharding, read_mode
from shardwright.caches.spec import CacheSpec, Overflow, RowOrder
from shardwright.checkpoint import files
from shardwright.checkpoint.files import check_outside_of_trace, fix_of_write, import_orbax, staged
from shardwright.errors import CacheError
from shardwright.manager import constraint, context
from shardwright.manager.manager import PartitionManager
from shardwright.vocabulary.read import refuse

# Increase this number if an older version could not read what this version writes.
_FORMAT = 1
_WHAT = "saving and restoring caches"
_BROKEN = "restore another cache: this one was changed or damaged later, as the error above shows"
_CLASSES: Mapping[str, Any] = MappingProxyType(
    {kind.cache.__name__: kind.cache for kind in KINDS.values()}
)


def save(cache: KVCache, path: str | os.PathLike[str]) -> None:
    """Write a cache to a new directory. The directory appears when it is complete, or not at all.

    Args:
      cache: A cache of any kind, outside of `jit`.
      path: Path of the directory, which must not exist.

    Raises:
      CacheError: The path exists, or cannot be written; the call is inside a trace; the class of
        the cache is unknown; its arrays are deleted; or orbax is not installed.
    """
    orbax, directory = import_orbax(_WHAT, CacheError), files.directory(path, CacheError)
    arrays = _check_saveable(cache)
    if os.path.exists(directory):
        raise CacheError(
            f"{directory} exists",
            path="path",
            fix="save to a new path, for instance one per step, then delete the old one",
        )
    description = {
        "format": _FORMAT,
        # Save the name of the class. The kinds "dense" and "sliding" have the same class, and their
        # specs tell them apart.
        "kind": type(cache).__name__,
        "spec": dataclasses.asdict(cache.spec),
        # `restore` needs the shapes first: orbax reads arrays into targets that have shapes and
        # shardings.
        "arrays": {name: [list(x.shape), str(x.dtype)] for name, x in arrays.items()},
    }
    items = {"cache": orbax.args.JsonSave(description), "arrays": orbax.args.PyTreeSave(arrays)}
    # Several processes must write to the same path, and storage buckets have no rename. In both
    # cases, orbax itself stages the files in the directory.
    whole = "://" in directory or jax.process_count() > 1
    try:
        with (
            contextlib.nullcontext(directory) if whole else staged(directory) as folder,
            orbax.Checkpointer(orbax.CompositeCheckpointHandler()) as checkpointer,
        ):
            checkpointer.save(folder, args=orbax.args.Composite(**items))
    except (OSError, ValueError) as error:  # TensorStore raises a ValueError
        size = sum(x.nbytes for x in arrays.values())
        fix = fix_of_write(error, f"the cache takes {size} bytes")
        if fix is None:
            raise
        what = f"the cache could not be written to {directory}: {error}"
        raise CacheError(what, path="path", fix=fix) from error


def _check_saveable(cache: KVCache) -> dict[str, Any]:
    """Check that a cache can be saved, and return its arrays."""
    check_outside_of_trace("a cache can be saved", CacheError)
    if type(cache).__name__ not in _CLASSES:
        raise CacheError(
            f"{type(cache).__name__} is not a cache that can be restored",
            path="cache",
            fix=f"save one of {', '.join(_CLASSES)}, or save the arrays of this one yourself",
        )
    arrays = cache.arrays
    if any(not isinstance(array, jax.Array) or array.is_deleted() for array in arrays.values()):
        raise CacheError(
            "some of its arrays are deleted, or are only shapes",
            path="cache",
            fix="save the cache that the last operation returned, not one that was donated, and "
            "not its shapes",
        )
    return arrays


def restore(
    path: str | os.PathLike[str],
    *,
    like: KVCache | None = None,
    manager: PartitionManager | None = None,
    mode: str | None = None,
) -> Any:
    """Return a saved cache. Every device reads its own shards.

    Args:
      path: The path that `save` wrote.
      like: A cache of the same kind and sizes, of arrays or of `jax.ShapeDtypeStruct`s with
        shardings. Its shardings and its mode are used.
      manager: Manager whose rules and mesh are used if `like` is None. Defaults to the ambient
        manager. Without any manager the cache is not sharded.
      mode: Runtime mode. Defaults to the manager's, then to that of the saved cache.

    Raises:
      CacheError: There is no cache at the path, or it cannot be read; the saved cache differs from
        `like` in kind, sizes or policy; `like` has no shardings; the call is inside a trace; or
        orbax is not installed.
      ShardingError: The rules do not fit the sizes.
    """
    if like is not None and (manager is not None or mode is not None):
        raise CacheError(
            "like, and manager or mode, both decide how the cache is sharded",
            path="like",
            fix="pass either like, or manager and mode",
        )
    check_outside_of_trace("a cache can be restored", CacheError)
    orbax, directory = import_orbax(_WHAT, CacheError), files.directory(path, CacheError)
    with orbax.Checkpointer(orbax.CompositeCheckpointHandler()) as checkpointer:
        description = _read_description(orbax, checkpointer, directory)
        cls, saved = _CLASSES[description["kind"]], description["spec"]
        with _readable(f"the spec of the cache saved at {directory} cannot be read", _BROKEN):
            overflow, order = Overflow(saved["overflow"]), RowOrder(**saved["order"])
            spec = CacheSpec(**{**saved, "overflow": overflow, "order": order})
        shapes = {
            name: jax.ShapeDtypeStruct(shape, dtype)
            for name, (shape, dtype) in description["arrays"].items()
        }
        if like is not None:
            _check_like(like, cls, spec, shapes)
            spec = like.spec
            shardings = {name: x.sharding for name, x in like.arrays.items()}
        else:
            manager = context.current() if manager is None else manager
            spec = dataclasses.replace(spec, mode=read_mode(mode, manager, spec.mode))
            shardings = _shardings(_assemble(cls, spec, shapes), manager)
        targets = {
            name: jax.ShapeDtypeStruct(shapes[name].shape, shapes[name].dtype, sharding=sharding)
            for name, sharding in shardings.items()
        }
        request = orbax.args.PyTreeRestore(
            item=targets,
            restore_args=orbax.checkpoint_utils.construct_restore_args(targets),
        )
        with _readable(f"the arrays saved at {directory} cannot be read", _BROKEN):
            read = checkpointer.restore(directory, args=orbax.args.Composite(arrays=request))
            return _assemble(cls, spec, read["arrays"])


def _assemble(cls: Any, spec: CacheSpec, arrays: Mapping[str, Any]) -> Any:
    # Only a ring has `start`, so the saved arrays may lack this field.
    absent = {field.name: None for field in dataclasses.fields(cls)}
    return cls(**{**absent, "spec": spec, **arrays})


@contextlib.contextmanager
def _readable(what: str, fix: str) -> Iterator[None]:
    """Turn errors of orbax and Python about an unreadable file into a CacheError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, OSError) as err:
        raise CacheError(what, path="path", fix=fix) from err


def _read_description(orbax: Any, checkpointer: Any, directory: str) -> dict[str, Any]:
    fix = "pass the path given to caches.save; a save that did not complete leaves nothing"
    with _readable(f"there is no saved cache at {directory}", fix):
        description = checkpointer.restore(
            directory, args=orbax.args.Composite(cache=orbax.args.JsonRestore())
        )["cache"]
    content = "other data"
    if isinstance(description, dict):
        number, kind = description.get("format"), description.get("kind")
        if number == _FORMAT and kind in _CLASSES:
            return description
        content = f"format {number}, kind {kind}"
    raise CacheError(
        f"{directory} holds {content}, and this version reads format {_FORMAT} of "
        f"{', '.join(_CLASSES)}",
        path="path",
        fix="restore the cache with the version of shardwright that wrote it",
    )


def _check_like(
    like: KVCache, cls: type, spec: CacheSpec, shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> None:
    if type(like) is not cls:
        raise CacheError(
            f"a {cls.__name__} was saved, and like is a {type(like).__name__}",
            path="like",
            fix="create like with the saved kind; for another kind, insert the restored cache into "
            "a cache of that kind",
        )
    # The mode decides only the sharding, and the sharding comes from `like`.
    names = [each.name for each in dataclasses.fields(CacheSpec) if each.name != "mode"]
    rows = [(name, getattr(spec, name), getattr(like.spec, name)) for name in names]
    fix = "create like with {}={}"
    if spec == dataclasses.replace(like.spec, mode=spec.mode):
        # Options of the kind, such as `page_size`, can only be seen in the arrays.
        fix = "create like with the same options of the kind"
        rows = [
            (name, f"{x.dtype}{list(x.shape)}", f"{own.dtype}{list(own.shape)}")
            for name, own in like.arrays.items()
            for x in (shapes[name],)
        ]
    refuse(
        CacheError,
        *(
            (
                saved != own,
                "like",
                f"{name} was saved as {_text(saved)}, and like has {_text(own)}",
                fix.format(name, _text(saved)),
            )
            for name, saved, own in rows
        ),
    )
    if any(getattr(x, "sharding", None) is None for x in like.arrays.values()):
        raise CacheError(
            "the arrays of like have no shardings: jax.eval_shape does not keep them",
            path="like",
            fix="pass manager= and mode= instead of like, or pass a cache of arrays as like",
        )


def _text(value: Any) -> str:
    return repr(str(value)) if isinstance(value, str) else repr(value)


def _shardings(cache: KVCache, manager: PartitionManager | None) -> dict[str, Any]:
    """Return the shardings of a cache's arrays under a manager. The arrays may be shapes."""
    if manager is None:
        return dict.fromkeys(cache.array_axes, SingleDeviceSharding(jax.devices()[0]))
    if isinstance(manager.mesh, AbstractMesh):
        raise constraint.no_devices()
    sharding = CacheSharding(manager=manager, mode=cache.spec.mode)
    shardings = {}
    with manager:  # the manager of the cache may differ from the ambient manager
        for name, axes in cache.array_axes.items():
            shape = getattr(cache, name).shape
            sharding.check_order(cache.spec.order, axes, shape)
            shardings[name] = NamedSharding(manager.mesh, sharding.spec(axes, shape))
    return shardings
