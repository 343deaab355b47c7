"""Tests of plans read lines of source out of compiled programs."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

KEY = "jax_compilation_cache_include_metadata_in_key"


@pytest.fixture(autouse=True, scope="package")
def own_lines() -> Iterator[None]:
    """Keep JAX's cache of compiled programs from returning an equal program with other lines."""
    before = getattr(jax.config, KEY)
    jax.config.update(KEY, True)
    yield
    jax.config.update(KEY, before)
