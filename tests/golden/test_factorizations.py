"""Every preset places its golden tensors on every factorization of 8 devices, or refuses them for a
reason listed here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest

import shardwright as sw
from shardwright.resolution.decisions import Resolution
from shardwright.vocabulary.modes import mode_name
from tests.golden import layer

PRESETS = sw.Strategy.presets()
SERVING = ("serve_long_context", "serve_tp")
MESH_AXES = ("dp", "fsdp", "sp", "ep", "tp")
FACTORIZATIONS = [
    sizes for sizes in itertools.product((1, 2, 4, 8), repeat=5) if math.prod(sizes) == 8
]
BATCH_AXES = {
    "single": (),
    "moe_ep": ("dp", "fsdp", "ep"),
    **dict.fromkeys(SERVING, ("dp", "fsdp", "ep")),
}


def questions(pm: sw.PartitionManager) -> Iterator[tuple[layer.Tensor, str, Resolution]]:
    """Yield how every tensor resolves: a use has the problems of the stored weight, and no preset
    moves weights in prefill.
    """
    of_weights = itertools.product(("train", "decode"), ("use",), layer.WEIGHTS)
    of_others = itertools.product(
        ("train", "prefill", "decode", "insert"), ("activation",), layer.ACTIVATIONS
    )
    for mode, role, tensor in itertools.chain(of_weights, of_others):
        yield tensor, mode, pm.explain(tensor.axes, mode=mode, role=role, shape=tensor.shape(mode))


def refused_by_name(preset: str, sizes: dict[str, int], tensor: layer.Tensor, mode: str) -> str:
    """Return the error that the page on strategies promises for a tensor, or nothing."""
    generates = preset in SERVING and mode != "train"
    over = [name for name in BATCH_AXES.get(preset, ("dp", "fsdp")) if sizes[name] > 1]
    if "one prompt" in tensor.name and over and not generates:
        return "IndivisibleError"  # a batch of one, and a preset whose batch never falls back
    reads_cache = tensor.name in ("cached k, v", "cached k, v, 2 heads", "scores", "bias", "mask")
    if preset == "serve_long_context" and mode in ("decode", "insert") and reads_cache:
        # The batch has dp and fsdp, and there is no sp for the cache.
        return "AxisConflictError" if sizes["sp"] == 1 and sizes["dp"] * sizes["fsdp"] > 1 else ""
    return ""


def test_there_are_35_factorizations() -> None:
    assert len(FACTORIZATIONS) == 35


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.full(but=["sequence"])
@pytest.mark.ci
def test_goldens_are_placed_on_every_mesh(preset: str) -> None:
    strategy = sw.Strategy.preset(preset)
    wrong = []
    for factors in FACTORIZATIONS:
        sizes = dict(zip(MESH_AXES, factors, strict=True))
        pm = sw.PartitionManager(strategy, mesh=sw.abstract_mesh(sizes))
        for tensor, mode, case in questions(pm):
            wanted = refused_by_name(preset, sizes, tensor, mode)
            actual = case.problems[0].error.__name__ if case.problems else ""
            if actual != wanted:
                wrong.append(
                    (sizes, tensor.name, mode_name(case.mode), str(case.role), actual, wanted)
                )
    assert wrong == []
