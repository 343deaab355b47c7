"""Read GGUF files that the package gguf wrote, and compare with what it reads."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.errors import CheckpointError
from shardwright.interop import hf
from shardwright.interop.hf import checkpoint as checkpoint_module
from shardwright.interop.hf import pieces
from shardwright.interop.hf.gguf_header import read_header
from tests.interop.hf import files, models

gguf = pytest.importorskip("gguf", reason="the extra hf installs it")

EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, LAYERS = 96, 6, 3, 32, 192, 66, 2


def shapes() -> dict[str, tuple[int, ...]]:
    whole = {"token_embd.weight": (VOCAB, EMBED), "output_norm.weight": (EMBED,)}
    for layer in range(LAYERS):
        start = f"blk.{layer}"
        whole |= {
            f"{start}.attn_q.weight": (HEADS * HEAD_DIM, EMBED),
            f"{start}.attn_k.weight": (KV_HEADS * HEAD_DIM, EMBED),
            f"{start}.attn_v.weight": (KV_HEADS * HEAD_DIM, EMBED),
            f"{start}.attn_output.weight": (EMBED, HEADS * HEAD_DIM),
            f"{start}.ffn_gate.weight": (MLP, EMBED),
            f"{start}.ffn_up.weight": (MLP, EMBED),
            f"{start}.ffn_down.weight": (EMBED, MLP),
            f"{start}.attn_norm.weight": (EMBED,),
            f"{start}.ffn_norm.weight": (EMBED,),
        }
    return whole


def values() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes().items()}


def write(
    path: Path,
    kind: str = "F32",
    arch: str = "llama",
    keys: dict[str, int] | None = None,
    more: dict[str, np.ndarray[Any, Any]] | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """Write a small model. Weights have a type; norms are F32."""
    quantization = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(EMBED)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "bc", "def"])
    writer.add_token_types([1, 1, 3])
    for key, value in (keys or {}).items():
        writer.add_uint32(key, value)
    tensors = {**values(), **(more or {})}
    for name, value in tensors.items():
        if value.ndim == 1 or kind == "F32":
            writer.add_tensor(name, value)
        else:
            packed = gguf.quants.quantize(value, quantization)
            writer.add_tensor(name, packed, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def manager(mesh: str = "fsdp:2,tp:3") -> sw.PartitionManager:
    strategy = sw.Strategy.preset("fsdp_tp")
    return sw.PartitionManager(strategy, mesh=sw.create_mesh(mesh, devices=_devices(mesh)))


def _devices(mesh: str) -> list[Any]:
    return jax.devices()[: int(np.prod([int(each.split(":")[1]) for each in mesh.split(",")]))]


def in_pairs(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Order the rows of a head as llama.cpp does: one of each half, by turns."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)


KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_equal_the_whole(kind: str, tmp_path: Path) -> None:
    """The package gguf dequantizes whole tensors. Rows of q and k have another order."""
    path = tmp_path / "model.gguf"
    write(path, kind)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    params, specs = hf.load(path, manager())
    for layer in range(LAYERS):
        for ours, theirs in (
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("mlp.down_proj", "ffn_down"),
            ("mlp.up_proj", "ffn_up"),
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
        ):
            tensor = tensors[f"blk.{layer}.{theirs}.weight"]
            whole = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            loaded = np.asarray(params[f"model.layers.{layer}.{ours}.weight"], np.float32)
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(theirs)
            got = in_pairs(loaded, heads) if heads else loaded
            np.testing.assert_array_equal(got, whole.astype(np.float32))
    weight = "model.layers.0.mlp.down_proj.weight"
    assert params[weight].sharding.spec == P("fsdp", "tp")
    dtypes = {"F16": jnp.float16, "BF16": jnp.bfloat16}
    assert specs[weight].dtype == dtypes.get(kind, jnp.float32)


@pytest.mark.parametrize("mesh", ["dp:8", "fsdp:8", "fsdp:2,tp:3"])
def test_blocks_are_cut_where_shards_are(mesh: str, tmp_path: Path) -> None:
    """Shards of 12 columns of blocks of 32."""
    write(tmp_path / "model.gguf", "Q8_0")
    expected, _ = hf.load(tmp_path, manager("dp:1"))
    params, _ = hf.load(tmp_path, manager(mesh))
    for name, value in params.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(expected[name]))


def test_a_file_that_is_truncated_after_its_header(tmp_path: Path) -> None:
    """To read past the end of a mapped file would kill the process."""
    path = tmp_path / "model.gguf"
    write(path)
    checkpoint = hf.read(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="has changed since its header was read"):
        checkpoint.load(manager())


def test_only_llama_has_pairs_of_rows(tmp_path: Path) -> None:
    tensors = write(tmp_path / "model.gguf", arch="qwen2")
    params, _ = hf.load(tmp_path, manager())
    loaded = params["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(np.asarray(loaded), tensors["blk.1.attn_q.weight"])


@pytest.mark.full
def test_sharded_model_equals_unsharded(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf")
    checkpoint = hf.read(tmp_path)
    tokens = np.arange(8, dtype=np.int32)[None]
    run = jax.jit(lambda params, x: models.llama(params, checkpoint.config, x))
    sharded, alone = (
        np.asarray(run(checkpoint.load(manager(mesh)), tokens)) for mesh in ("fsdp:2,tp:3", "dp:1")
    )
    assert np.abs(sharded - alone).max() <= 1e-5 * np.abs(alone).max()


def test_header_equals_that_of_the_package(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "Q4_1")
    header, reader = read_header(path), gguf.GGUFReader(path)
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        content = field.contents()
        expected = f"an array of {len(content)}" if isinstance(content, list) else content
        assert header.keys[key] == expected
    assert [(each.name, each.offset, each.shape[::-1]) for each in header.tensors] == [
        (each.name, each.data_offset, tuple(each.shape)) for each in reader.tensors
    ]


def test_configuration(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf")
    assert {**hf.read(tmp_path).config, "rms_norm_eps": 1e-5} == {
        "model_type": "llama",
        "hidden_size": EMBED,
        "num_hidden_layers": LAYERS,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
    }


def test_factors_of_the_rotary_embedding(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", more={"rope_freqs.weight": np.ones(16, np.float32)})
    params, _ = hf.load(tmp_path, manager())
    assert params["rope_freqs.weight"].sharding.is_fully_replicated


def test_memory_of_dequantizing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "put", files.put_uncounted)
    monkeypatch.setattr("tests.interop.hf.test_gguf.VOCAB", 12_000)
    write(tmp_path / "model.gguf", "Q4_1")
    pm = manager("fsdp:2,tp:3")
    hf.load(tmp_path, pm)
    tracemalloc.start()
    try:
        params, _ = hf.load(tmp_path, pm)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    embedding = params["model.embed_tokens.weight"]
    piece = embedding.addressable_shards[0].data.nbytes
    # The library's copies of what is dequantized at once, and names and specs.
    assert peak <= piece + 3 * (1 << 20) < embedding.nbytes + piece


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(*arguments: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(checkpoint_module, "place", place)


@pytest.mark.usefixtures("unread")
def test_truncated_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "Q8_0")
    content = path.read_bytes()
    for keep in [*range(0, 1200, 37), len(content) // 2, len(content) - 100]:
        path.write_bytes(content[:keep])
        with pytest.raises(CheckpointError, match=r"is truncated|is not a GGUF file"):
            hf.load(path, manager())


@pytest.mark.usefixtures("unread")
def test_damaged_headers(tmp_path: Path) -> None:
    """Whatever bytes the header has, the error is ours."""
    path = tmp_path / "model.gguf"
    write(path)
    content = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    for at in rng.integers(4, 1500, size=40):
        damaged = content.copy()
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        with pytest.raises((CheckpointError, AssertionError)) as caught:
            hf.load(path, manager())
        assert isinstance(caught.value, CheckpointError) or "was read" in str(caught.value)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arch": "mamba"}, "the architecture 'mamba' is not supported in GGUF"),
        ({"keys": {"llama.expert_count": 8}}, "ffn_|mlp.*no tensor of mixtral has this name"),
        ({"keys": {"split.count": 3}}, r"model\.gguf is one of 3 files"),
        ({"more": {"x.y": np.ones(3, np.float32)}}, "x.y: no tensor of llama has this name"),
    ],
)
def test_unsupported_files(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", **settings)
    with pytest.raises(CheckpointError, match=message):
        hf.load(tmp_path, manager())


def test_other_versions_and_types(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path)
    content = bytearray(path.read_bytes())
    content[4:8] = struct.pack("<I", 1)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="version 1 of GGUF is not supported"):
        hf.read(path)
    path.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        hf.read(path)


def test_several_files(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf")
    write(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match="has 2 GGUF files"):
        hf.read(tmp_path)
    assert hf.read(tmp_path / "b.gguf").config["model_type"] == "llama"
