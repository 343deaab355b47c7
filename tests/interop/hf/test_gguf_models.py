"""GGUF of models with experts, and in several files; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.errors import CheckpointError
from shardwright.interop import hf
from shardwright.vocabulary.lowering import describe

gguf = pytest.importorskip("gguf", reason="the extra hf installs it")

EMBED, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, MLP, SHARED, VOCAB, LAYERS = (
    64,
    4,
    2,
    32,
    4,
    96,
    128,
    66,
    2,
)
Arrays = dict[str, np.ndarray[Any, Any]]


def attention(start: str, *, biases: bool) -> dict[str, tuple[int, ...]]:
    sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in sizes.items():
        shapes[f"{start}.attn_{name}.weight"] = (size, EMBED)
        if biases:
            shapes[f"{start}.attn_{name}.bias"] = (size,)
    shapes[f"{start}.attn_output.weight"] = (EMBED, HEADS * HEAD_DIM)
    return shapes


def experts(start: str, *, biases: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{start}.ffn_gate_inp.weight": (EXPERTS, EMBED)}
    for name in ("gate", "up", "down"):
        size = (EMBED, MLP) if name == "down" else (MLP, EMBED)
        shapes[f"{start}.ffn_{name}_exps.weight"] = (EXPERTS, *size)
        if biases:
            shapes[f"{start}.ffn_{name}_exps.bias"] = (EXPERTS, size[0])
    return shapes


def shapes_of(arch: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, EMBED),
        "output_norm.weight": (EMBED,),
        "output.weight": (VOCAB, EMBED),
    }
    for layer in range(LAYERS):
        start = f"blk.{layer}"
        is_oss = arch == "gpt-oss"
        shapes |= attention(start, biases=is_oss or arch == "qwen2moe")
        shapes |= experts(start, biases=is_oss)
        shapes[f"{start}.attn_norm.weight"] = (EMBED,)
        shapes[f"{start}.{'post_attention' if is_oss else 'ffn'}_norm.weight"] = (EMBED,)
        if is_oss:
            shapes[f"{start}.attn_output.bias"] = (EMBED,)
            shapes[f"{start}.attn_sinks.weight"] = (HEADS,)
            shapes[f"{start}.ffn_gate_inp.bias"] = (EXPERTS,)
        if arch == "qwen3moe":
            shapes |= {f"{start}.attn_{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
        if arch == "qwen2moe":
            # The gate of the shared experts is [1, embed] in transformers.
            shapes[f"{start}.ffn_gate_inp_shexp.weight"] = (EMBED,)
            shapes |= {
                f"{start}.ffn_{name}_shexp.weight": (SHARED, EMBED) for name in ("gate", "up")
            }
            shapes[f"{start}.ffn_down_shexp.weight"] = (EMBED, SHARED)
    return shapes


def write(
    path: Path, arch: str, *, kind: str = "Q8_0", split: int = 0, keys: dict[str, Any] | None = None
) -> Arrays:
    """Write a small model of an architecture; with `split`, in files of so many tensors."""
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(EMBED)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    if arch != "llama":
        writer.add_expert_feed_forward_length(MLP)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(SHARED)
    for key, value in (keys or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    rng = np.random.default_rng(0)
    values: Arrays = {}
    quantized = gguf.GGMLQuantizationType[kind]
    for name, shape in shapes_of(arch).items():
        values[name] = rng.normal(size=shape).astype(np.float32)
        if len(shape) < 2 or name.endswith(".bias"):
            writer.add_tensor(name, values[name])
            continue
        packed = gguf.quants.quantize(values[name], quantized)
        values[name] = gguf.quants.dequantize(packed, quantized).reshape(shape)
        writer.add_tensor(name, packed, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def manager(mesh: str = "ep:2,fsdp:2,tp:2") -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset("moe_ep"), mesh=sw.create_mesh(mesh))


BLOCK = "block_sparse_moe"
# Architecture -> the model of transformers, and some names in both.
MODELS = {
    "llama": (
        "mixtral",
        {"ffn_gate_exps": f"{BLOCK}.experts.w1", "ffn_down_exps": f"{BLOCK}.experts.w2"},
    ),
    "qwen2moe": (
        "qwen2_moe",
        {"ffn_up_exps": "mlp.experts.up_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj"},
    ),
    "qwen3moe": (
        "qwen3_moe",
        {"ffn_up_exps": "mlp.experts.up_proj", "attn_q_norm": "self_attn.q_norm"},
    ),
    "gpt-oss": (
        "gpt_oss",
        {"ffn_down_exps": "mlp.experts.down_proj", "ffn_gate_inp": "mlp.router"},
    ),
}


@pytest.mark.parametrize("kind", ["Q8_0", pytest.param("MXFP4", marks=pytest.mark.full)])
@pytest.mark.parametrize("arch", MODELS)
def test_models_with_experts(arch: str, kind: str, tmp_path: Path) -> None:
    values = write(tmp_path / "model.gguf", arch, kind=kind)
    checkpoint = hf.read(tmp_path)
    model, names = MODELS[arch]
    assert checkpoint.config["model_type"] == model
    params = checkpoint.load(manager())
    assert len(params) == len(values)
    for theirs, ours in names.items():
        for layer in range(LAYERS):
            got = params[f"model.layers.{layer}.{ours}.weight"]
            np.testing.assert_array_equal(np.asarray(got), values[f"blk.{layer}.{theirs}.weight"])
    stack = next(name for name in params if "experts" in name and name.endswith("weight"))
    assert describe(checkpoint.specs[stack].axes)[:8] == "(EXPERT,"
    assert params[stack].sharding.spec[0] == "ep"
    sums = sorted(float(np.abs(np.asarray(value)).sum()) for value in params.values())
    expected = sorted(float(np.abs(value).sum()) for value in values.values())
    np.testing.assert_allclose(sums, expected, rtol=1e-5)


def test_gate_of_shared_experts_and_sinks(tmp_path: Path) -> None:
    values = write(tmp_path / "a.gguf", "qwen2moe")
    gate = hf.read(tmp_path / "a.gguf").load(manager())[
        "model.layers.1.mlp.shared_expert_gate.weight"
    ]
    np.testing.assert_array_equal(np.asarray(gate)[0], values["blk.1.ffn_gate_inp_shexp.weight"])
    values = write(tmp_path / "b.gguf", "gpt-oss")
    sinks = hf.read(tmp_path / "b.gguf").load(manager())["model.layers.1.self_attn.sinks"]
    np.testing.assert_array_equal(np.asarray(sinks), values["blk.1.attn_sinks.weight"])


def split(folder: Path, count: int = 7) -> list[Path]:
    write(folder / "model.gguf", "qwen3moe", split=count)
    return sorted(folder.glob("model-*.gguf"))


def test_several_files_equal_one(tmp_path: Path) -> None:
    write(tmp_path / "whole.gguf", "qwen3moe")
    (tmp_path / "parts").mkdir()
    files = split(tmp_path / "parts")
    assert len(files) > 2
    pm = manager()
    expected, _ = hf.load(tmp_path / "whole.gguf", pm)
    for path in (tmp_path / "parts", files[0], files[1]):
        params, _ = hf.load(path, pm)
        assert params.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(np.asarray(params[name]), np.asarray(value))


def test_files_that_are_absent_truncated_or_of_another_checkpoint(tmp_path: Path) -> None:
    files = split(tmp_path)
    files[1].write_bytes(files[1].read_bytes()[:40])
    files[2].write_bytes(files[0].read_bytes())
    files[3].unlink()
    with pytest.raises(CheckpointError, match="3 problems") as caught:
        hf.read(files[0])
    text = str(caught.value)
    assert f"{files[1].name} is truncated or damaged" in text
    assert f"{files[2].name} says that it is part 0 (from 0) of {len(files)}" in text
    assert f"{files[3].name} does not exist" in text
    other = files[0].rename(tmp_path / "first.gguf")
    with pytest.raises(CheckpointError, match="its name does not say so"):
        hf.read(other)


def test_a_tensor_that_is_in_two_files(tmp_path: Path) -> None:
    files = split(tmp_path)
    content = files[-1].read_bytes()
    files[-1].write_bytes(content.replace(b"blk.1.", b"blk.0."))
    with pytest.raises(CheckpointError, match=rf"{files[-1].name} has this tensor, and so has"):
        hf.read(files[0])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"qwen3moe.block_count": "x"}, "qwen3moe.block_count must be a positive integer, got 'x'"),
        ({"qwen3moe.block_count": 2**31 - 1}, "has 2147483647 layers and 27 tensors"),
        ({"qwen3moe.embedding_length": -1}, "embedding_length must be a positive integer, got -1"),
        ({"qwen3moe.expert_count": [4, 4]}, "expert_count must be a positive integer, got 'an arr"),
        ({"qwen3moe.attention.head_count": 0}, "head_count must be a positive integer, got 0"),
        ({"qwen3moe.expert_count": 3}, r"and the header of model.gguf says \(3, 64\)"),
        ({"general.architecture": "bloom"}, "the architecture 'bloom' is not supported in GGUF"),
    ],
)
def test_keys_that_are_no_sizes(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    # The writer refuses a key that exists. The last one of a name counts.
    write(path, "qwen3moe", keys={f"{key[:-1]}~": value for key, value in keys.items()})
    content = path.read_bytes()
    for key in keys:
        content = content.replace(f"{key[:-1]}~".encode(), key.encode())
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        hf.read(path)


def test_spec_of_a_quantized_expert(tmp_path: Path) -> None:
    """Shards of 48 columns of blocks of 32."""
    values = write(tmp_path / "model.gguf", "qwen3moe")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    params, _ = hf.load(tmp_path, pm)
    down = params["model.layers.0.mlp.experts.down_proj.weight"]
    assert down.sharding.spec == P(None, "fsdp", "tp")
    np.testing.assert_array_equal(np.asarray(down), values["blk.0.ffn_down_exps.weight"])
