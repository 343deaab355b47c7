"""The names of `eformer.escale.partition.auto_spec`: none is provided, and the error says what to use instead."""

from __future__ import annotations

from typing import NoReturn

from shardwright.interop.eformer.absent import refuse


def __getattr__(name: str) -> NoReturn:
    refuse(__name__, name)
