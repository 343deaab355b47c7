"""`eformer.escale.helpers.base`: no name is provided; the error names a replacement."""

from __future__ import annotations

from typing import NoReturn

from shardwright.interop.eformer.absent import refuse


def __getattr__(name: str) -> NoReturn:
    refuse(__name__, name)
