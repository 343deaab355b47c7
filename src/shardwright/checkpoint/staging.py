"""Write a directory so that it appears when it is complete, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator


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
        new = os.path.join(folder, name)
        yield new
        os.rename(new, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
