"""The best files of searches for an 8B decoder, on small meshes: they train and serve the demo."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from decoder.config import DecoderConfig
from decoder.serve import generate, make_server
from decoder.text import stdlib_text, text_batches
from decoder.train import Trained, make_trainer, train

import shardwright as sw
from shardwright.testing.meshes import cpu_mesh
from tests.plan.decoder import Decoder

pytestmark = pytest.mark.full

CONFIG = DecoderConfig(layers=1, embed=32, heads=8, kv_heads=8, head_dim=8, mlp=64)
PROMPTS = (b"def f(x):", b"import")
TOPOLOGY = "v5p:4x4x4"
# Of training: strategies and alternatives. Each search has its own best files.
SEARCHES: dict[str, dict[str, Any]] = {
    "meshes": {"presets": ("fsdp", "fsdp_tp"), "axes": ("dp", "fsdp", "tp")},
    "sequence": {"presets": ("fsdp_tp_sp",), "axes": ("fsdp", "tp")},
    "rules": {
        "presets": ("fsdp_tp",),
        "axes": ("fsdp", "tp"),
        "vary": {"params.embed": (None, "-"), "vocab": (None, "-"), "policy.zero1": (None, "fsdp")},
    },
    "tensor": {"presets": ("fsdp_tp",), "axes": ("fsdp", "tp"), "pins": ["mesh.tp = 8"]},
}


def best_files(mode: str, folder: Path, **options: Any) -> list[Path]:
    """Search, and write the rows of the table."""
    strategies = {name: sw.Strategy.preset(name) for name in options.pop("presets")}
    program = Decoder().program(mode)
    found = sw.search(program, strategies, topology=TOPOLOGY, mode=mode, **options)
    return [
        candidate.strategy.dump(folder / f"{mode}-{number}.toml")
        for number, candidate in enumerate(found.front)
    ]


def on_eight(strategy: sw.Strategy) -> Any:
    """The strategy's mesh with its longest axis halved until it has 8 devices."""
    sizes = dict(strategy.mesh)
    while math.prod(sizes.values()) > 8:
        longest = max(sizes, key=lambda axis: sizes[axis])
        sizes[longest] //= 2
    return cpu_mesh(",".join(f"{axis}:{size}" for axis, size in sizes.items()))


def trained(strategy: sw.Strategy, mesh: Any = None) -> Trained:
    trainer = make_trainer(strategy, CONFIG, optax.adamw(1e-2, eps=1e-4), mesh=mesh)
    batches = text_batches(stdlib_text(50_000), batch=8, length=32, seed=1)
    return train(trainer, trainer.init(7), itertools.islice(batches, 3), on_step=lambda loss: None)


@pytest.fixture(scope="module")
def reference() -> Trained:
    return trained(sw.Strategy.preset("single"))


@pytest.mark.parametrize("name", SEARCHES)
def test_best_files_train_to_the_reference_losses(
    name: str, reference: Trained, tmp_path: Path
) -> None:
    files = best_files("train", tmp_path, **SEARCHES[name])
    assert files
    for file in files:
        strategy = sw.Strategy.load(file)
        losses = trained(strategy, on_eight(strategy)).losses
        np.testing.assert_allclose(losses, reference.losses, rtol=5e-6, err_msg=file.read_text())
    assert reference.losses[-1] < reference.losses[0] - 0.1


def test_best_files_serve_the_reference_text(reference: Trained, tmp_path: Path) -> None:
    options = {"slots": 8, "capacity": 48, "prompt_length": 24}
    params = reference.state["params"]

    def written(strategy: sw.Strategy, mesh: Any = None) -> list[bytes]:
        server = make_server(strategy, CONFIG, mesh=mesh, **options)
        return generate(server, params, PROMPTS, new_bytes=8, on_step=lambda step: None)

    expected = written(sw.Strategy.preset("single"))
    files = best_files("decode", tmp_path, presets=("serve_tp", "tensor"), axes=("dp", "tp"))
    assert files
    for file in files:
        strategy = sw.Strategy.load(file)
        assert written(strategy, on_eight(strategy)) == expected
