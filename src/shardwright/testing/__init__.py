"""Test sharded code without accelerators.

This package has meshes of virtual CPU devices, assertions about shardings and collectives, golden
files, and what the pytest plugin uses. Functions that a program calls at run time belong in
`manager/` or `plan/`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwright.testing.meshes import cpu_mesh as cpu_mesh
from shardwright.testing.meshes import virtual_devices as virtual_devices

if TYPE_CHECKING:
    from shardwright.testing.assertions import assert_collectives as assert_collectives
    from shardwright.testing.assertions import assert_max_replicated as assert_max_replicated
    from shardwright.testing.assertions import assert_no_collectives as assert_no_collectives
    from shardwright.testing.assertions import assert_sharding as assert_sharding
    from shardwright.testing.assertions import assert_spec as assert_spec
    from shardwright.testing.attention_conformance import (
        AttentionConformance as AttentionConformance,
    )
    from shardwright.testing.equality import assert_same_as_unsharded as assert_same_as_unsharded
    from shardwright.testing.golden import Golden as Golden
    from shardwright.testing.golden import GoldenError as GoldenError
    from shardwright.testing.golden import spec_table as spec_table
    from shardwright.testing.retracing import assert_no_retrace as assert_no_retrace

# Imported on first use, so that building a mesh does not import the reader of programs.
_LATER = {
    "AttentionConformance": "attention_conformance",
    "Golden": "golden",
    "GoldenError": "golden",
    "assert_collectives": "assertions",
    "assert_max_replicated": "assertions",
    "assert_no_collectives": "assertions",
    "assert_no_retrace": "retracing",
    "assert_same_as_unsharded": "equality",
    "assert_sharding": "assertions",
    "assert_spec": "assertions",
    "spec_table": "golden",
}


if not TYPE_CHECKING:  # a type checker must report names that do not exist

    def __getattr__(name: str) -> Any:
        if name in _LATER:
            return getattr(importlib.import_module(f"shardwright.testing.{_LATER[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATER])
