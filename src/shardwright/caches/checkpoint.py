"""Save a cache and restore it, on another mesh too: its arrays and its spec, by orbax."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding

from shardwright import _jax
from shardwright.caches.base import CacheSpec, KVCache, Overflow
from shardwright.caches.dense import DenseCache
from shardwright.caches.paged.cache import PagedCache
from shardwright.caches.quantized import QuantizedCache
from shardwright.caches.row_order import RowOrder
from shardwright.caches.sharding import Shards
from shardwright.errors import CacheError, Problem, raise_problems
from shardwright.manager import constraint, context
from shardwright.manager.manager import PartitionManager
from shardwright.vocabulary.modes import parse_mode

_FORMAT = 1
_BROKEN = (
    "it was changed or damaged after it was saved: the error above says where; restore another one"
)
_CLASSES: Mapping[str, Any] = MappingProxyType(
    {cls.__name__: cls for cls in (DenseCache, QuantizedCache, PagedCache)}
)


def save(cache: KVCache, path: str | os.PathLike[str]) -> None:
    """Write a cache to a directory that does not exist yet. It appears when all is written, or not at all.

    Args:
      cache: of any kind, outside of `jit`.
      path: of the directory.

    Raises:
      CacheError: the path exists, something traces, the cache is of no kind that is known here, its arrays are gone, or orbax is not
        installed.
    """
    orbax, place = _orbax(), _path(path)
    if _jax.in_trace():
        raise CacheError(
            "a cache is saved outside of jit",
            path="cache",
            fix="return it from the compiled step, then save it",
        )
    if type(cache).__name__ not in _CLASSES:
        fix = f"kinds are {', '.join(_CLASSES)}; save the arrays of another one yourself"
        raise CacheError(
            f"{type(cache).__name__} is no kind of cache that can be restored",
            path="cache",
            fix=fix,
        )
    if any(
        not isinstance(array, jax.Array) or array.is_deleted() for array in _arrays(cache).values()
    ):
        fix = "save the cache that the last operation returned, not one that was donated, and not its shapes"
        raise CacheError("it has arrays that hold nothing", path="cache", fix=fix)
    if os.path.exists(place):
        raise CacheError(
            f"{place} exists",
            path="path",
            fix="save to a new path, for instance one per step, then delete the old one",
        )
    arrays = _arrays(cache)
    about = {
        "format": _FORMAT,
        "kind": type(cache).__name__,
        "spec": dataclasses.asdict(cache.spec),
        "arrays": {name: [list(x.shape), str(x.dtype)] for name, x in arrays.items()},
    }
    with (
        _beside(place) as staged,
        orbax.Checkpointer(orbax.CompositeCheckpointHandler()) as checkpointer,
    ):
        # Into a directory beside it, which is then renamed.
        checkpointer.save(
            staged,
            args=orbax.args.Composite(
                cache=orbax.args.JsonSave(about), arrays=orbax.args.PyTreeSave(arrays)
            ),
        )


def restore(
    path: str | os.PathLike[str],
    *,
    like: KVCache | None = None,
    manager: PartitionManager | None = None,
    mode: str | None = None,
) -> Any:
    """Return a saved cache, its arrays read into their shards.

    Args:
      path: that it was saved to.
      like: a cache of the same kind and sizes, of arrays or `jax.ShapeDtypeStruct`s, in whose place and mode it is restored.
      manager: whose rules and mesh, in place of `like`; absent: the ambient one, and without one it is not sharded.
      mode: runtime mode; absent: the manager's, else that in which the cache lay.

    Raises:
      CacheError: no cache was saved there, one that cannot be read, or one of another kind, sizes or policy than `like`; something
        traces; or orbax is not installed.
      ShardingError: what the rules say does not fit the sizes.
    """
    if like is not None and (manager is not None or mode is not None):
        raise CacheError(
            "like says where the cache shall lie, and so do manager and mode",
            path="like",
            fix="pass one or the other",
        )
    if _jax.in_trace():
        raise CacheError(
            "a cache is restored outside of jit",
            path="path",
            fix="restore it, then pass it to the compiled step",
        )
    orbax, place = _orbax(), _path(path)
    with orbax.Checkpointer(orbax.CompositeCheckpointHandler()) as checkpointer:
        about = _read_about(orbax, checkpointer, place)
        kind, spec = _CLASSES[about["kind"]], _spec(about["spec"], place)
        shapes = {
            name: jax.ShapeDtypeStruct(shape, dtype)
            for name, (shape, dtype) in about["arrays"].items()
        }
        empty = {field.name: None for field in dataclasses.fields(kind)}
        if like is not None:
            _check_like(like, kind, spec, shapes)
            spec = like.spec
            wanted = {
                name: _struct(shapes[name], getattr(x, "sharding", None))
                for name, x in _arrays(like).items()
            }
        else:
            manager = context.current() if manager is None else manager
            spec = dataclasses.replace(spec, mode=_mode(spec, manager, mode))
            axes = kind(**{**empty, "spec": spec, **shapes}).axes()
            with (
                contextlib.nullcontext() if manager is None else manager
            ):  # which need not be the ambient one
                wanted = {
                    name: _struct(
                        x, _sharding(manager, spec.mode, getattr(axes, name), x, spec.order)
                    )
                    for name, x in shapes.items()
                }
        how = orbax.checkpoint_utils.construct_restore_args(wanted)
        try:
            read = checkpointer.restore(
                place,
                args=orbax.args.Composite(
                    arrays=orbax.args.PyTreeRestore(item=wanted, restore_args=how)
                ),
            )
        except (KeyError, ValueError, OSError) as err:
            raise CacheError(
                f"the arrays saved at {place} cannot be read", path="path", fix=_BROKEN
            ) from err
    return kind(**{**empty, "spec": spec, **read["arrays"]})


def _orbax() -> Any:
    try:
        import orbax.checkpoint as orbax
    except ImportError as err:
        fix = 'pip install orbax-checkpoint, or python -m pip install -e ".[checkpoint]" in a clone of shardwright'
        raise CacheError(
            "caches are saved and restored with orbax, which is not installed", fix=fix
        ) from err
    return orbax


def _path(path: str | os.PathLike[str]) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise CacheError(
            f"path is {type(path).__name__}", path="path", fix="pass the path of a directory"
        )
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)


@contextlib.contextmanager
def _beside(place: str) -> Iterator[str]:
    """Give a path that no earlier save knows: what is left of one that failed may still be writing. Rename it at the end.

    Several processes have to write to one path, and a bucket has no renaming: there it is orbax that writes beside it and moves.
    """
    if "://" in place or jax.process_count() > 1:
        yield place
        return
    os.makedirs(os.path.dirname(place), exist_ok=True)
    folder = tempfile.mkdtemp(
        prefix=f"{os.path.basename(place)}.saving-", dir=os.path.dirname(place)
    )
    try:
        yield os.path.join(folder, "cache")
        os.rename(os.path.join(folder, "cache"), place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _arrays(cache: Any) -> dict[str, Any]:
    fields = (field for field in dataclasses.fields(cache) if not field.metadata.get("static"))
    return {
        field.name: value for field in fields if (value := getattr(cache, field.name)) is not None
    }


def _read_about(orbax: Any, checkpointer: Any, place: str) -> dict[str, Any]:
    try:
        about = checkpointer.restore(
            place, args=orbax.args.Composite(cache=orbax.args.JsonRestore())
        )["cache"]
    except (FileNotFoundError, ValueError, KeyError) as err:
        fix = "pass the path that caches.save wrote; what was not written to its end is not there"
        raise CacheError(f"no cache is saved at {place}", path="path", fix=fix) from err
    if (
        not isinstance(about, dict)
        or about.get("format") != _FORMAT
        or about.get("kind") not in _CLASSES
    ):
        found = (
            f"format {about.get('format')}, kind {about.get('kind')}"
            if isinstance(about, dict)
            else "something else"
        )
        what = f"{place} holds {found}, and this version reads format {_FORMAT} of {', '.join(_CLASSES)}"
        raise CacheError(what, path="path", fix="restore it with the version that wrote it")
    return about


def _spec(saved: Mapping[str, Any], place: str) -> CacheSpec:
    try:
        return CacheSpec(
            **{
                **saved,
                "overflow": Overflow(saved["overflow"]),
                "order": RowOrder(**saved["order"]),
            }
        )
    except (KeyError, TypeError, ValueError) as err:
        raise CacheError(
            f"what {place} says of its cache cannot be read", path="path", fix=_BROKEN
        ) from err


def _check_like(
    like: KVCache, kind: type, spec: CacheSpec, shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> None:
    if type(like) is not kind:
        what = f"a {kind.__name__} was saved, and like is a {type(like).__name__}"
        raise CacheError(
            what,
            path="like",
            fix="make like with the kind that was saved; then insert it into one of another kind",
        )
    problems = []
    for field in dataclasses.fields(CacheSpec):
        saved, given = getattr(spec, field.name), getattr(like.spec, field.name)
        if saved != given and field.name != "mode":
            what, fix = (
                f"{field.name} was saved as {_text(saved)}, and like has {_text(given)}",
                f"make like with {field.name}={_text(saved)}",
            )
            problems.append(Problem(error=CacheError, what=what, path="like", fix=fix))
    raise_problems(problems)
    for name, x in _arrays(like).items():
        saved = shapes[name]
        if (tuple(x.shape), str(x.dtype)) != (saved.shape, str(saved.dtype)):
            what = f"{name} was saved as {saved.dtype}{list(saved.shape)}, and like has {x.dtype}{list(x.shape)}"
            problems.append(
                Problem(
                    error=CacheError,
                    what=what,
                    path="like",
                    fix="make like with the same options of the kind",
                )
            )
    raise_problems(problems)


def _text(value: Any) -> str:
    return repr(str(value)) if isinstance(value, str) else repr(value)


def _mode(spec: CacheSpec, manager: PartitionManager | None, mode: str | None) -> str | None:
    if manager is None:
        if mode is not None:
            parse_mode(mode)
        return None
    said = mode or manager.mode or spec.mode
    if said is None:
        what = (
            "a cache lies as a mode says, and neither the call, the manager nor the cache names one"
        )
        raise CacheError(what, path="mode", fix='pass mode="decode"')
    return parse_mode(said)


def _sharding(
    manager: PartitionManager | None,
    mode: str | None,
    axes: Any,
    x: jax.ShapeDtypeStruct,
    order: RowOrder,
) -> Any:
    if manager is None:
        return None
    if isinstance(manager.mesh, AbstractMesh):
        raise constraint.no_devices()
    shards = Shards(manager=manager, mode=mode)
    shards.check_order(order, axes, x.shape)
    return NamedSharding(manager.mesh, shards.spec(axes, x.shape))


def _struct(x: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    where = SingleDeviceSharding(jax.devices()[0]) if sharding is None else sharding
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
