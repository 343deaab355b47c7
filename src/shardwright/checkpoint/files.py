"""Write directories whole or not at all, and import orbax, which writes into them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Final

from shardwright import _jax
from shardwright.errors import ShardingError

# How TensorStore, which orbax uses, writes an error number of the operating system.
_NUMBER: Final = re.compile(r"os_error_code='(\d+)'")


def import_orbax(what: str, error: type[ShardingError]) -> Any:
    """Return `orbax.checkpoint`.

    Args:
      what: Subject of the message, such as "saving and restoring caches".
      error: Class of the error.

    Raises:
      ShardingError: orbax is not installed.
    """
    try:
        import orbax.checkpoint as orbax
    except ImportError as err:
        raise error(
            f"{what} needs orbax, which is not installed",
            fix='pip install orbax-checkpoint, or python -m pip install -e ".[checkpoint]" in a '
            "clone of shardwright",
        ) from err
    return orbax


def check_outside_of_trace(what: str, error: type[ShardingError]) -> None:
    """Refuse a call inside a trace. `what` is a text such as "a cache can be saved"."""
    if _jax.in_trace():
        raise error(
            f"{what} only outside of jit",
            fix="call this function before the compiled function, or on the results that the "
            "compiled function returns",
        )


def directory(path: str | os.PathLike[str], error: type[ShardingError], name: str = "path") -> str:
    """Return the absolute path of a directory as text.

    An address with `://`, such as that of a bucket, is returned unchanged.

    Raises:
      ShardingError: The value is not a path, or there is a file at this path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise error(
            f"{name} is {type(path).__name__}", path=name, fix="pass the path of a directory"
        )
    text = os.fspath(path)
    if "://" in text:
        return text
    text = os.path.abspath(text)
    if os.path.exists(text) and not os.path.isdir(text):
        raise error(f"{text} is a file", path=name, fix="pass the path of a directory")
    return text


@contextlib.contextmanager
def staged(path: str) -> Iterator[str]:
    """Yield the path of a directory to create, and rename that directory to `path` at the end.

    The yielded path is beside `path`, so that both are on one disk. The yielded path is new in each
    call, because an earlier call that failed may still be writing to its own path.
    """
    parent, name = os.path.split(path)
    os.makedirs(parent or ".", exist_ok=True)
    folder = tempfile.mkdtemp(prefix=f"{name}.saving-", dir=parent or ".")
    try:
        # Yield a path that does not exist yet, because orbax creates the directory that it writes.
        new = os.path.join(folder, name)
        yield new
        # If another process has created `path` meanwhile, the operating system refuses to replace a
        # folder that has files.
        os.rename(new, path)
    except BaseException:
        _remove(folder)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: str) -> None:
    """Remove the folder of a failed write again and again, until it stays removed for a second.

    Threads of the write may still add files to the folder. TensorStore then creates the folder
    again, and does not tell when its threads have ended.
    """
    absent = 0
    for _ in range(40):
        shutil.rmtree(folder, ignore_errors=True)
        absent = 0 if os.path.exists(folder) else absent + 1
        if absent == 10:
            return
        time.sleep(0.1)


def fix_of_write(error: Exception, takes: str) -> str | None:
    """Return the fix for a failed write. None if the operating system did not refuse the write.

    Args:
      error: Error of Python, or of TensorStore.
      takes: What is written, and its size, such as "the cache takes 12 bytes".
    """
    found = _NUMBER.search(str(error))
    number = int(found[1]) if found else getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"{takes}; make room for it, or write to another disk"
    if found or isinstance(error, OSError):
        return "check the path and its permissions"
    return None
