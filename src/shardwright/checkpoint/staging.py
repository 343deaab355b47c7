"""Write a directory so that it appears when it is complete, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Final

# How TensorStore, with which orbax writes, tells the number of an error of the operating system.
_NUMBER: Final = re.compile(r"os_error_code='(\d+)'")


@contextlib.contextmanager
def staged(path: str) -> Iterator[str]:
    """Yield the path of a directory to create, and rename it to `path` at the end.

    The yielded path is beside `path`, so that both are on one disk. It is new in each call, because
    an earlier call that failed may still be writing to its own path.
    """
    parent, name = os.path.split(path)
    os.makedirs(parent or ".", exist_ok=True)
    folder = tempfile.mkdtemp(prefix=f"{name}.saving-", dir=parent or ".")
    try:
        # Inside of the new folder, because writers such as orbax create their folder themselves.
        new = os.path.join(folder, name)
        yield new
        # The operating system refuses to replace a folder with files, so one that appeared since
        # stays.
        os.rename(new, path)
    except BaseException:
        _remove(folder)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: str) -> None:
    """Remove the folder of a write that failed, until it stays away for a second.

    Threads of the write may still add files to it. TensorStore creates the folder again for them,
    and nothing tells when its threads have ended.
    """
    absent = 0
    for _ in range(40):
        shutil.rmtree(folder, ignore_errors=True)
        absent = 0 if os.path.exists(folder) else absent + 1
        if absent == 10:
            return
        time.sleep(0.1)


def fix_of_write(error: Exception, takes: str) -> str | None:
    """Return what to do about an error of a write. None if the operating system did not refuse it.

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
