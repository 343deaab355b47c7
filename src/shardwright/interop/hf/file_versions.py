"""Notice files that change between reading their header and reading their tensors."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from shardwright.errors import CheckpointError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileVersion:
    """A file as it was at one time.

    Attributes:
      path: The file.
      state: Its device, inode, size and time of the last change.
    """

    path: Path
    state: tuple[int, ...]

    @classmethod
    def of(cls, path: Path, *, fix: str) -> FileVersion:
        """Return the present version of a file.

        Raises:
          CheckpointError: It does not exist, or cannot be read.
        """
        try:
            return cls(path=path, state=_state(path))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} does not exist", fix=fix) from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}", fix=fix) from error

    def check(self) -> None:
        """Check that the file is still this version. A process that reads past its end is killed.

        Raises:
          CheckpointError: The file was replaced, changed or removed.
        """
        try:
            is_same = _state(self.path) == self.state
        except OSError:
            is_same = False
        if not is_same:
            what = f"{self.path} has changed since its header was read"
            raise CheckpointError(what, fix="wait until no one writes it, and call hf.read again")


def _state(path: Path) -> tuple[int, ...]:
    found = os.stat(path)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
