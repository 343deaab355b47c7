"""Meshes under borrowed names: `get_jax_mesh`, `get_ranks_and_size`, a positional backend."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from shardwright.errors import MeshMismatchError, MeshSpecError
from shardwright.mesh.build import abstract_mesh, create_mesh, get_jax_mesh, get_ranks_and_size
from shardwright.testing import cpu_mesh
from tests.raising import Facts, facts, raises


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("2,-1,2", ("dp", "fsdp", "tp"), {"dp": 2, "fsdp": 2, "tp": 2}),
        ("2,4", None, {"x": 2, "y": 4, "z": 1}),
        ("-1", ("dp", "fsdp"), {"dp": 8, "fsdp": 1}),
        ("tp:4,dp:-1", ("dp", "tp"), {"tp": 4, "dp": 2}),
        ("!2,4", ("dp", "tp"), {"dp": 2, "tp": 4}),
        ("!dp:2,tp:4", ["tp", "dp"], {"dp": 2, "tp": 4}),
    ],
)
def test_a_mesh_from_text(text: str, names: Any, expected: dict[str, int]) -> None:
    mesh = get_jax_mesh(text) if names is None else get_jax_mesh(text, names)
    assert list(mesh.shape.items()) == list(expected.items())
    assert mesh == create_mesh(expected)


@pytest.mark.parametrize(
    ("text", "names", "says"),
    [
        ("2,2,2,1", ("x", "y", "z"), facts(4, 3, "axis names", fix="dp:2,tp:4")),
        (
            "dp:2,tp:4",
            ("dp", "fsdp", "tp"),
            facts("dp", "tp", "fsdp", fix="exactly"),
        ),
        ("dp:2,dp:4", ("dp", "tp"), facts("mesh", "axis", "dp")),
        ("dp:8", ("dp", "dp"), facts("dp")),
        ("2,four", ("dp", "tp"), facts("four", fix="dp:2")),
        (
            "3,-1",
            ("dp", "tp"),
            facts("tp", -1, 8, "dp=3", fix="abstract_mesh"),
        ),
        ((2, 4), ("dp", "tp"), facts("axis_dims", "(2, 4)", fix="2,-1,4")),
    ],
)
def test_invalid_mesh_text(text: Any, names: Any, says: Facts) -> None:
    with raises(MeshSpecError, says):
        get_jax_mesh(text, names)


def test_the_backend_may_come_third() -> None:
    assert create_mesh((2, -1), ("dp", "tp"), "cpu") == create_mesh(
        (2, -1), ("dp", "tp"), backend="cpu"
    )
    with raises(MeshSpecError, "devices", "backend", "nonesuch", fix="cpu"):
        create_mesh((2, -1), ("dp", "tp"), "nonesuch")


def processes(monkeypatch: pytest.MonkeyPatch, *, count: int, index: int, local: int) -> None:
    monkeypatch.setattr(jax, "process_count", lambda backend=None: count)
    monkeypatch.setattr(jax, "process_index", lambda backend=None: index)
    monkeypatch.setattr(jax, "local_device_count", lambda backend=None: local)


@pytest.mark.parametrize(
    ("sizes", "count", "local", "index", "expected"),
    [
        # A model within a process: every process is a copy.
        (
            "dp:4,fsdp:2,tp:4,sp:1",
            4,
            8,
            3,
            {"mp_node_size": 1, "dp_node_size": 4, "dp_node_rank": 3, "mp_node_rank": 0},
        ),
        # A model over two processes: ranks 0 and 1 are its halves.
        (
            "dp:2,tp:4,sp:4",
            4,
            8,
            3,
            {"mp_node_size": 2, "dp_node_size": 2, "dp_node_rank": 1, "mp_node_rank": 1},
        ),
        (
            "dp:2,tp:4,sp:4",
            4,
            8,
            2,
            {"mp_node_size": 2, "dp_node_size": 2, "dp_node_rank": 1, "mp_node_rank": 0},
        ),
        # One model over all of them.
        (
            "dp:1,tp:16",
            4,
            4,
            1,
            {"mp_node_size": 4, "dp_node_size": 1, "dp_node_rank": 0, "mp_node_rank": 1},
        ),
        (
            "dp:4,fsdp:8",
            4,
            8,
            2,
            {"mp_node_size": 1, "dp_node_size": 4, "dp_node_rank": 2, "mp_node_rank": 0},
        ),
    ],
)
def test_ranks_follow_from_how_a_model_is_split(
    sizes: str,
    count: int,
    local: int,
    index: int,
    expected: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes(monkeypatch, count=count, index=index, local=local)
    mesh = abstract_mesh(sizes)
    assert get_ranks_and_size(mesh) == {"mesh": mesh, **expected}


def test_one_process_is_the_only_rank() -> None:
    mesh = cpu_mesh("dp:1,tp:3")
    assert get_ranks_and_size(mesh) == {
        "mesh": mesh,
        "mp_node_size": 1,
        "dp_node_size": 1,
        "dp_node_rank": 0,
        "mp_node_rank": 0,
    }


@pytest.mark.parametrize(
    ("sizes", "count", "local"), [("dp:8,tp:3", 3, 8), ("dp:1,tp:12", 2, 8), ("dp:1,tp:16", 3, 8)]
)
def test_model_on_a_part_of_a_process(
    sizes: str, count: int, local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes(monkeypatch, count=count, index=0, local=local)
    with raises(MeshMismatchError, count, local, "tp", "sp", fix="tp"):
        get_ranks_and_size(abstract_mesh(sizes))
