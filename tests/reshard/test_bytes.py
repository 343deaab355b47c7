"""A move sends the bytes that its plan says, between all presets, meshes and sets of devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.reshard.move import move_tree
from shardwright.reshard.tree import plan_moves_of
from shardwright.testing import cpu_mesh
from tests.reshard.programs import Watched, watch

# The two mesh axes that each preset uses most.
AXES = {
    "single": ("dp", "tp"),
    "ddp": ("dp", "tp"),
    "fsdp": ("fsdp", "dp"),
    "tensor": ("dp", "tp"),
    "fsdp_tp": ("fsdp", "tp"),
    "sequence": ("fsdp", "sp"),
    "moe_ep": ("fsdp", "ep"),
    "serve_tp": ("dp", "tp"),
    "serve_long_context": ("sp", "tp"),
}
SHAPES = ((2, 4), (4, 2), (8, 1))
HALVES = ((2, 2), (4, 1), (1, 4))  # meshes of four devices
SPECS = {
    "embed": (sw.VOCAB, sw.EMBED),
    "q": (sw.LAYERS, sw.EMBED, sw.HEAD, sw.HEAD_DIM),
    "up": (sw.LAYERS, sw.EMBED, sw.MLP_INTERMEDIATE),
    "experts": (sw.EXPERT, sw.EMBED, sw.MLP_INTERMEDIATE),
    "norm": (sw.NORM,),
}
SIZES = {"embed": (32, 16), "q": (3, 16, 8, 4), "up": (3, 16, 32), "experts": (8, 16, 8)}
TREE = {
    name: np.random.default_rng(0).normal(size=SIZES.get(name, (16,))).astype(np.float32)
    for name in SPECS
}


def manager(preset: str, shape: tuple[int, int], first: int = 0) -> sw.PartitionManager:
    """Return a manager of a mesh of the devices from number `first` on."""
    devices = cpu_mesh("a:8").devices[first : first + math.prod(shape)].reshape(shape)
    return sw.PartitionManager(sw.Strategy.preset(preset), mesh=Mesh(devices, AXES[preset]))


def problems(
    tree: Any, targets: Any, wanted: Any, watched: Watched, where: str, **options: Any
) -> Iterable[str]:
    """Move a tree, and say what is not as planned."""
    plan = plan_moves_of(tree, targets, **options)
    before = watched.sent
    moved = move_tree(tree, targets, **options)
    if watched.sent - before != plan.bytes_sent:
        yield f"{where}: sent {watched.sent - before}, planned {plan.bytes_sent}\n{plan}"
    if 2 * plan.bytes_sent > 3 * plan.least_bytes:
        yield f"{where}: {plan.bytes_sent} bytes, at least {plan.least_bytes}\n{plan}"
    for leaf, x, target, value in zip(
        plan.leaves, *map(jax.tree.leaves, (moved, targets, wanted)), strict=True
    ):
        if not np.array_equal(np.asarray(x), value) or x.sharding != target:
            yield f"{where}: {leaf.path} has other values or another sharding"


def check_presets(
    pairs: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any, *, first: int = 0
) -> None:
    """Move between pairs of presets. The targets are on the devices from number `first` on."""
    found: list[str] = []
    with watch(monkeypatch) as watched:
        for (a, before), (b, after) in pairs:
            source = manager(a, before).reshard(TREE, SPECS)
            targets = manager(b, after, first).shardings(TREE, SPECS)
            where = f"{a} {before} -> {b} {after}"
            found += problems(source, targets, TREE, watched, where)
    assert not found, "\n".join(found)
    assert "rematerialization" not in capfd.readouterr().err


def test_planned_bytes_are_compiled_bytes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    check_presets(
        [
            (("fsdp_tp", (4, 2)), ("serve_tp", (4, 2))),
            (("fsdp", (8, 1)), ("fsdp_tp", (2, 4))),
            (("moe_ep", (2, 4)), ("serve_long_context", (4, 2))),
        ],
        monkeypatch,
        capfd,
    )


@pytest.mark.full
@pytest.mark.parametrize("preset", AXES)
def test_planned_bytes_between_all_presets(
    preset: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    same = [((preset, shape), (other, shape)) for other in AXES for shape in SHAPES]
    number = list(AXES).index(preset)
    other_mesh = [
        ((preset, SHAPES[number % 3]), (other, SHAPES[(number + 1 + at % 2) % 3]))
        for at, other in enumerate(AXES)
    ]
    check_presets([*same, *other_mesh], monkeypatch, capfd)


@pytest.mark.product
@pytest.mark.parametrize("before", SHAPES, ids=str)
@pytest.mark.parametrize("preset", AXES)
def test_planned_bytes_of_all_pairs(
    preset: str,
    before: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pairs = [((preset, before), (other, after)) for other in AXES for after in SHAPES]
    check_presets(pairs, monkeypatch, capfd)


@pytest.mark.parametrize("before", HALVES, ids=str)
@pytest.mark.parametrize("preset", AXES)
@pytest.mark.product(but=["single-(2, 2)", "fsdp_tp-(4, 1)", "serve_long_context-(1, 4)"])
@pytest.mark.full
def test_planned_bytes_between_halves(
    preset: str,
    before: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """From the first four devices to the last four: what is planned passes the one transfer."""
    pairs = [((preset, before), (other, after)) for other in AXES for after in HALVES]
    check_presets(pairs, monkeypatch, capfd, first=4)


def meshes() -> dict[str, Mesh]:
    devices = np.array(cpu_mesh("a:8").devices.flat)
    shuffled = np.random.default_rng(0).permutation(devices)
    return {
        "2x4": Mesh(devices.reshape(2, 4), ("a", "b")),
        "transposed": Mesh(devices.reshape(4, 2).T, ("a", "b")),
        "shuffled": Mesh(shuffled.reshape(4, 2), ("a", "b")),
        "first four": Mesh(devices[:4].reshape(2, 2), ("a", "b")),
        "last four": Mesh(devices[4:].reshape(2, 2), ("a", "b")),
        "six": Mesh(devices[2:].reshape(2, 3), ("a", "b")),
    }


ONE_DIM_SPECS = (P(), P("a"), P("a", "b"), P("b", "a"), P(("b", "a")), P(None, ("a", "b")))


def check_meshes(seed: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(seed)
    x = random.normal(size=(12, 24)).astype(np.float32)
    by_name = meshes()
    pairs = list(itertools.product(by_name, repeat=2))
    found: list[str] = []
    with watch(monkeypatch) as watched:
        for number, at in enumerate(random.permutation(len(pairs))[:count]):
            a, b = pairs[at]
            before, after = (ONE_DIM_SPECS[spec] for spec in random.integers(0, 6, 2))
            if number % 3 == 0:
                before, after = P("a", "b"), P("b", "a")
            try:
                source = jax.device_put(x, NamedSharding(by_name[a], before))
                target = NamedSharding(by_name[b], after)
                target.shard_shape(x.shape)
            except ValueError:
                continue  # the shape does not divide over six devices
            dtype = "bfloat16" if number % 4 == 0 else None
            wanted = np.asarray(x.astype(dtype or x.dtype))
            found += problems(
                source, target, wanted, watched, f"{a} {before} -> {b} {after}",
                piece=int(random.choice([256, 2**20])), dtype=dtype,
            )  # fmt: skip
    assert not found, "\n".join(found)


@pytest.mark.full
@pytest.mark.ci
def test_planned_bytes_between_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    check_meshes(0, 6, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 3))
def test_planned_bytes_between_many_meshes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_meshes(seed, 18, monkeypatch)
