"""Every test here must leave the process-wide registry unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardwright.interop.eformer import PartitionAxis


@pytest.fixture(autouse=True)
def empty_registry() -> Iterator[None]:
    assert PartitionAxis.get_registered_axes() == {}
    yield
    PartitionAxis.clear_registered_axes()
