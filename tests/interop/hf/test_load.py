"""Read safetensors into shards, and refuse files that are damaged."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.checkpoint import export_safetensors
from shardwright.errors import CheckpointError
from shardwright.interop import hf
from shardwright.interop.hf import checkpoint as checkpoint_module
from shardwright.interop.hf import source
from tests.interop.hf import files
from tests.raising import facts, raises

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="the extra hf installs it")


def manager(mesh: str = "fsdp:4,tp:2", preset: str = "fsdp_tp") -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset(preset), mesh=sw.create_mesh(mesh))


def assert_equal(params: dict[str, jax.Array], values: dict[str, np.ndarray[Any, Any]]) -> None:
    assert params.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(np.asarray(params[name]), value, err_msg=name)
        assert params[name].dtype == value.dtype, name


@pytest.mark.parametrize(
    ("mesh", "preset"),
    [("fsdp:8", "fsdp"), ("fsdp:4,tp:2", "fsdp_tp"), ("dp:4,tp:2", "fsdp_tp"), ("dp:8", "ddp")],
)
def test_values_and_shardings(mesh: str, preset: str, tmp_path: Path) -> None:
    values = files.write(tmp_path, "llama_bias")
    pm = manager(mesh, preset)
    params, specs = hf.load(tmp_path, pm)
    assert_equal(params, values)
    shardings = pm.shardings(specs)
    assert all(params[name].sharding == shardings[name] for name in params)


@pytest.mark.full(but=["llama", "smollm3", "qwen3_moe", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("case", files.TREES)
def test_every_family_loads(case: str, tmp_path: Path) -> None:
    values = files.write(tmp_path, case)
    loaded = hf.read(tmp_path, stack_experts=False).load(manager())
    assert_equal(loaded, values)


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_loads_under_an_ambient_mesh(axis_types: Any, tmp_path: Path) -> None:
    values = files.write(tmp_path, "llama")
    mesh = sw.create_mesh("fsdp:4,tp:2", axis_types=axis_types)
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh)
    with pm, jax.set_mesh(mesh):
        params, _ = hf.load(tmp_path, pm)
    assert_equal(params, values)


def test_weights_are_sharded_as_the_strategy_says(tmp_path: Path) -> None:
    files.write(tmp_path, "llama")
    params, _ = hf.load(tmp_path, manager())
    layer = "model.layers.0"
    assert params[f"{layer}.self_attn.q_proj.weight"].sharding.spec == P("tp", "fsdp")
    assert params[f"{layer}.self_attn.o_proj.weight"].sharding.spec == P("fsdp", "tp")
    assert params[f"{layer}.mlp.down_proj.weight"].sharding.spec == P("fsdp", "tp")
    part = params[f"{layer}.mlp.down_proj.weight"].addressable_shards[0].data
    assert part.shape == (12, 48)


def test_files_with_an_index(tmp_path: Path) -> None:
    values = files.values_of("qwen2")
    files.write_shards(tmp_path, "qwen2", values)
    params, _ = hf.load(tmp_path, manager())
    assert_equal(params, values)


@pytest.mark.parametrize("case", ["llama", "qwen3_moe"])
def test_exported_parameters_load_again(case: str, tmp_path: Path) -> None:
    """Stacked experts stay stacked, under the names without numbers."""
    files.write(tmp_path, case)
    params, _ = hf.load(tmp_path, manager())
    exported = tmp_path / "exported"
    export_safetensors(exported, params)
    files.write_config(exported, case)
    again, _ = hf.load(exported, manager("fsdp:2,tp:2", "fsdp_tp"))
    assert_equal(again, {name: np.asarray(value) for name, value in params.items()})


def test_one_file_by_its_path(tmp_path: Path) -> None:
    values = files.write(tmp_path, "gemma")
    params, _ = hf.load(str(tmp_path / "model.safetensors"), manager())
    assert_equal(params, values)


def test_bfloat16_is_sliced(tmp_path: Path) -> None:
    values = files.values_of("llama", ml_dtypes.bfloat16)
    files.write_config(tmp_path, "llama")
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    params, _ = hf.load(tmp_path, manager())
    assert_equal(params, values)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_floats_of_8_bits_are_read_by_offset(kind: str, tmp_path: Path) -> None:
    values = files.values_of("llama")
    weight = "model.layers.1.self_attn.q_proj.weight"
    values[weight] = np.abs(values[weight]).astype(getattr(ml_dtypes, kind))
    values[f"{weight}_scale_inv"] = np.arange(12, dtype=np.float32).reshape(6, 2)
    config = {"quantization_config": {"weight_block_size": [16, 24]}}
    files.write_config(tmp_path, "llama", **config)
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    pm = manager("fsdp:2,tp:2")
    params, _ = hf.load(tmp_path, pm, dtype=jnp.bfloat16)
    assert_equal({weight: params[weight]}, {weight: values[weight]})
    assert params[weight].sharding.spec == P("tp", "fsdp")
    # A scale keeps its dtype, and each device has the scales of its blocks.
    scale = params[f"{weight}_scale_inv"]
    assert (scale.dtype, scale.sharding.spec) == (jnp.float32, P("tp", "fsdp"))
    assert params["model.norm.weight"].dtype == jnp.bfloat16


def test_values_that_do_not_fit_a_dtype(tmp_path: Path) -> None:
    values = files.values_of("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    values[name][3, 5] = -1e5
    values["model.norm.weight"][2] = np.inf  # it is infinite in every dtype
    files.write_config(tmp_path, "llama")
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    with raises(CheckpointError, "1e+05", "float16", path=name, fix="dtype"):
        hf.load(tmp_path, manager(), dtype="float16")
    params, _ = hf.load(tmp_path, manager(), dtype="bfloat16")
    assert np.isinf(params["model.norm.weight"][2])


@pytest.mark.parametrize("change", ["replaced", "truncated", "removed", "written"])
def test_files_that_change_after_their_header(change: str, tmp_path: Path) -> None:
    """Weights of 8 bits were read from the new file at the offsets of the old one."""
    values = files.values_of("llama")
    weight = "model.layers.1.self_attn.q_proj.weight"
    values[weight] = values[weight].astype(ml_dtypes.float8_e4m3fn)
    files.write_config(tmp_path, "llama")
    path, other = tmp_path / "model.safetensors", tmp_path / "new"
    safetensors_numpy.save_file(values, path)
    checkpoint = hf.read(tmp_path)
    if change == "replaced":
        safetensors_numpy.save_file(values, other, metadata={"format": "np" * 99})
        other.replace(path)
    elif change == "removed":
        path.unlink()
    else:
        with path.open("r+b") as file:
            if change == "truncated":
                file.truncate(path.stat().st_size // 2)
            else:
                file.seek(-9, 2)
                file.write(b"other")
    with raises(CheckpointError, "model.safetensors", fix="hf.read"):
        checkpoint.load(manager())


@pytest.mark.parametrize("other", ["model.fp16.safetensors", "adapter_model.safetensors"])
def test_variants_beside_the_file(other: str, tmp_path: Path) -> None:
    values = files.write(tmp_path, "llama")
    safetensors_numpy.save_file({"other": np.ones(3)}, tmp_path / other)
    checkpoint = hf.read(tmp_path)
    assert checkpoint.notes == (f"not read: {other}",)
    assert_equal(checkpoint.load(manager()), values)


def test_scales_follow_the_axes_of_the_user(tmp_path: Path) -> None:
    """A scale followed the weight's axes of the family."""
    values = files.values_of("llama")
    weight, extra = "model.layers.0.mlp.up_proj.weight", "extra.weight"
    for name in (weight, extra):
        values[name] = np.ones((96, 48), ml_dtypes.float8_e4m3fn)
        values[f"{name}_scale_inv"] = np.ones((8, 4), np.float32)
    config = {"quantization_config": {"weight_block_size": [12, 12]}}
    files.write_config(tmp_path, "llama", **config)
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    axes = {r"layers\.0\.mlp\.up_proj\.weight$|^extra\.weight$": (sw.EMPTY, sw.EMBED)}
    params, _ = hf.load(tmp_path, manager(), axes=axes)
    for name in (weight, extra):
        for suffix in ("", "_scale_inv"):
            assert params[f"{name}{suffix}"].sharding.spec == P(None, "fsdp"), name + suffix


def test_patterns_that_match_nothing(tmp_path: Path) -> None:
    files.write(tmp_path, "llama")
    with raises(sw.StrategyError, "tensor", "zzz"):
        hf.read(
            tmp_path, axes={"zzz": (sw.EMBED,), "norm": (sw.EMBED,), r"model\.norm": (sw.NORM,)}
        )


def test_absent_experts_that_stay_apart(tmp_path: Path) -> None:
    values = files.values_of("qwen3_moe")
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    del values[name]
    files.write_config(tmp_path, "qwen3_moe")
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    with raises(CheckpointError, 3, path="model.layers.0.mlp.experts.up_proj.weight"):
        hf.read(tmp_path, stack_experts=False)


def test_experts_are_stacked(tmp_path: Path) -> None:
    values = files.write(tmp_path, "mixtral")
    pm = manager("ep:2,fsdp:2,tp:2", "moe_ep")
    params, specs = hf.load(tmp_path, pm)
    start = "model.layers.1.block_sparse_moe.experts."
    stacked = params[f"{start}w1.weight"]
    parts = [values[f"{start}{number}.w1.weight"] for number in range(4)]
    np.testing.assert_array_equal(np.asarray(stacked), np.stack(parts))
    assert specs[f"{start}w1.weight"].axes == (sw.EXPERT, sw.MLP_INTERMEDIATE, sw.EMBED)
    assert stacked.sharding.spec[0] == "ep"
    assert not [name for name in params if f"{start}0" in name]


def test_integers_of_64_bits(tmp_path: Path) -> None:
    values = files.values_of("bert")
    values["embeddings.position_ids"] = np.arange(64, dtype=np.int64)[None]
    files.write_config(tmp_path, "bert")
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    checkpoint = hf.read(tmp_path)
    assert "embeddings.position_ids is int32, because JAX is not in 64-bit mode" in str(checkpoint)
    loaded = checkpoint.load(manager())["embeddings.position_ids"]
    np.testing.assert_array_equal(np.asarray(loaded), values["embeddings.position_ids"])
    values["embeddings.position_ids"] += 2**40
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    with raises(
        CheckpointError,
        1099511627776,
        1099511627839,
        "int32",
        path="embeddings.position_ids",
        fix="jax.config.update",
    ):
        hf.load(tmp_path, manager())


def test_floats_of_64_bits_need_a_dtype(tmp_path: Path) -> None:
    values = files.values_of("llama", np.float64)
    files.write_config(tmp_path, "llama")
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    with raises(CheckpointError, "float64", "JAX", 64, path="lm_head.weight", fix="dtype"):
        hf.load(tmp_path, manager())
    params, _ = hf.load(tmp_path, manager(), dtype=jnp.float32)
    wanted = {name: value.astype(np.float32) for name, value in values.items()}
    assert_equal(params, wanted)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "no-such-dtype"])
def test_invalid_dtypes(dtype: str, tmp_path: Path) -> None:
    files.write(tmp_path, "llama")
    with raises(sw.StrategyError, "dtype", fix="jnp.bfloat16"):
        hf.read(tmp_path, dtype=dtype)


@pytest.mark.parametrize(
    ("mesh", "preset"),
    [("fsdp:8", "fsdp"), pytest.param("dp:8", "ddp", marks=pytest.mark.full)],
)
def test_one_piece_is_in_memory_at_a_time(
    mesh: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device buffers are not counted. On a CPU they are memory of the host too."""
    monkeypatch.setattr(source, "put", files.put_uncounted)
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4096}
    shapes = {
        "model.embed_tokens.weight": (4096, 512),
        "model.norm.weight": (512,),
        "model.layers.0.input_layernorm.weight": (512,),
        "model.layers.0.post_attention_layernorm.weight": (512,),
        **{f"model.layers.0.self_attn.{x}_proj.weight": (512, 512) for x in "qkvo"},
        **{f"model.layers.0.mlp.{x}_proj.weight": (2048, 512) for x in ("gate", "up")},
        "model.layers.0.mlp.down_proj.weight": (512, 2048),
    }
    values = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    sizes |= {"num_hidden_layers": 1, "tie_word_embeddings": True}
    files.write_config(tmp_path, "llama", **sizes, **heads)
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    largest = max(value.nbytes for value in values.values())
    del values
    pm = manager(mesh, preset)
    # JAX and shardwright keep objects for later calls.
    hf.load(tmp_path, pm)
    tracemalloc.start()
    try:
        params, specs = hf.load(tmp_path, pm)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    held = [
        params[name].addressable_shards[0].data.nbytes for name, spec in specs.items() if spec.shape
    ]
    # The rest of the peak are Python objects: names, specs, shardings.
    slack = 1 << 19
    assert peak <= max(held) + slack < largest + max(held)


def test_explain_has_a_row_per_kind_of_tensor(tmp_path: Path) -> None:
    files.write(tmp_path, "llama")
    text = hf.read(tmp_path).explain(manager())
    lines = text.splitlines()
    at = next(at for at, line in enumerate(lines) if "down_proj" in line)
    row = ["model.layers.*.mlp.down_proj.weight", "2", "48,96", "fsdp,", "tp", "2.2", "KiB"]
    assert lines[at].split() == row
    assert lines[at + 1].split() == ["(EMBED,", "MLP_INTERMEDIATE)"]
    assert text.endswith("per device: 29.4 KiB of 228.9 KiB")


# What is refused. Nothing is loaded: the shards of no tensor have been read.


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(*arguments: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(checkpoint_module, "place", place)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("keep", [-4, 1000, 4, 0])
def test_truncated_files(keep: int, tmp_path: Path) -> None:
    files.write(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with raises(CheckpointError, "model.safetensors", "file"):
        hf.load(tmp_path, manager())


@pytest.mark.usefixtures("unread")
def test_one_truncated_file_of_several(tmp_path: Path) -> None:
    files.write_shards(tmp_path, "llama", files.values_of("llama"))
    path = tmp_path / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with raises(CheckpointError, "model", "00003"):
        hf.load(tmp_path, manager())


@pytest.mark.usefixtures("unread")
def test_index_and_files_that_differ(tmp_path: Path) -> None:
    values = files.values_of("llama")
    weights = files.write_shards(tmp_path, "llama", values)
    lost = weights.pop("model.norm.weight")
    weights["model.layers.9.mlp.up_proj.weight"] = lost
    weights["x"] = "absent.safetensors"
    weights |= {"y": "../model.safetensors", "z": "..", "": ""}
    files.write_index(tmp_path, weights)
    with pytest.raises(CheckpointError) as caught:
        hf.load(tmp_path, manager())
    text = str(caught.value)
    assert "6 problems" in text
    for file in ("../model.safetensors", "..", ""):
        assert f"names {file!r}, which is not the name of a file" in text
    assert "absent.safetensors does not exist" in text
    assert f"model.layers.9.mlp.up_proj.weight: {lost} lacks this tensor" in text
    assert f"model.norm.weight: {lost} has this tensor, but" in text


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"x": 1}}'])
def test_invalid_index(text: str, tmp_path: Path) -> None:
    files.write_config(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with raises(
        CheckpointError, "model.safetensors.index.json", fix="model.safetensors.index.json"
    ):
        hf.load(tmp_path, manager())


@pytest.mark.usefixtures("unread")
def test_tensors_that_are_absent(tmp_path: Path) -> None:
    values = files.values_of("llama")
    del values["model.layers.1.mlp.up_proj.weight"], values["model.embed_tokens.weight"]
    files.write_config(tmp_path, "llama", num_hidden_layers=2)
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    with raises(
        CheckpointError, "tensor", path="model.embed_tokens.weight", fix="config.json", count=2
    ) as caught:
        hf.load(tmp_path, manager())
    assert "model.layers.1.mlp.up_proj.weight: the tensor is absent" in str(caught.value)


@pytest.mark.usefixtures("unread")
def test_experts_that_are_absent_or_differ(tmp_path: Path) -> None:
    values = files.values_of("mixtral")
    start = "model.layers.0.block_sparse_moe.experts."
    del values[f"{start}1.w1.weight"]
    values[f"{start}2.w3.weight"] = values[f"{start}2.w3.weight"].astype(np.float16)
    files.write_config(tmp_path, "mixtral")
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        hf.load(tmp_path, manager())
    text = str(caught.value)
    assert "experts.w1.weight: the experts 1 are absent" in text
    assert "experts.w3.weight: the experts differ: float16[96, 48], float32[96, 48]" in text


@pytest.mark.usefixtures("unread")
def test_a_shape_that_the_configuration_does_not_say(tmp_path: Path) -> None:
    files.write(tmp_path, "llama", intermediate_size=128)
    with raises(
        CheckpointError,
        facts(
            "(96, 48)",
            "config.json",
            "(128, 48)",
            path="model.layers.0.mlp.gate_proj.weight",
            fix="config.json",
        ),
        facts(
            "(96, 48)",
            "config.json",
            "(128, 48)",
            path="model.layers.0.mlp.up_proj.weight",
            fix="config.json",
        ),
        facts(
            "(96, 48)",
            "config.json",
            "(128, 48)",
            path="model.layers.1.mlp.gate_proj.weight",
            fix="config.json",
        ),
        facts(
            "(96, 48)",
            "config.json",
            "(128, 48)",
            path="model.layers.1.mlp.up_proj.weight",
            fix="config.json",
        ),
    ):
        hf.load(tmp_path, manager())


@pytest.mark.usefixtures("unread")
def test_sizes_that_do_not_divide(tmp_path: Path) -> None:
    files.write(tmp_path, "llama")
    strategy = sw.Strategy.preset("fsdp_tp")
    pm = sw.PartitionManager(strategy, mesh=sw.create_mesh("fsdp:1,tp:4"))
    with raises(
        sw.IndivisibleError,
        facts(
            "HEAD",
            "tp=4",
            path="model.layers.0.self_attn.q_proj.weight",
            dim=0,
            size=6,
            fix="tp | -",
        ),
        facts(
            "HEAD",
            "tp=4",
            path="model.layers.1.self_attn.q_proj.weight",
            dim=0,
            size=6,
            fix="tp | -",
        ),
    ) as caught:
        hf.load(tmp_path, pm)
    assert "pass axes= to hf.read or hf.load" in caught.value.__notes__[0]


def test_dtypes_that_cannot_be_read(tmp_path: Path) -> None:
    files.write_config(tmp_path, "llama")
    entry = {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}
    header = json.dumps({"model.norm.weight": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + b"ab"
    (tmp_path / "model.safetensors").write_bytes(content)
    with raises(CheckpointError, "model.safetensors", "F4", path="model.norm.weight", fix="F64"):
        hf.load(tmp_path, manager())


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    with raises(CheckpointError, "absent", "exist", fix="config.json"):
        hf.read(tmp_path / "absent")
    with raises(CheckpointError, "config.json", "file", fix="config.json"):
        hf.read(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with raises(CheckpointError, "config.json", "JSON", 1, 2, fix="config.json"):
        hf.read(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with raises(CheckpointError, "config.json", "JSON", fix="config.json"):
        hf.read(tmp_path)
    files.write_config(tmp_path, "llama")
    with raises(CheckpointError, "test_folders_without_a_checkpo0", "file", fix="config.json"):
        hf.read(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with raises(CheckpointError, "test_folders_without_a_checkpo0", fix="safe_serialization=True"):
        hf.read(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").touch()
    with raises(
        CheckpointError,
        "test_folders_without_a_checkpo0",
        2,
        "model.safetensors.index.json",
        fix="model.safetensors.index.json",
    ):
        hf.read(tmp_path)


def test_an_abstract_mesh_has_no_devices(tmp_path: Path) -> None:
    files.write(tmp_path, "llama")
    mesh = sw.abstract_mesh("fsdp:4,tp:2")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh)
    assert "fsdp, tp" in hf.read(tmp_path).explain(pm)
    with raises(sw.MeshSpecError, "abstract", "mesh", fix="mesh"):
        hf.load(tmp_path, pm)


@pytest.mark.parametrize("case", ["llama_bias", "bert"])
def test_vocabulary_is_padded_and_exported_without(case: str, tmp_path: Path) -> None:
    """The padded rows are zeros, sharded over tp, and the export lacks them."""
    (tmp_path / "in").mkdir()
    values = files.write(tmp_path / "in", case)
    pm = manager()
    checkpoint = hf.read(tmp_path / "in", pad_vocab=22)
    more = 66 - 64  # rows of the vocabulary
    assert any(f"padded by {more} rows" in note for note in checkpoint.notes)
    assert {len(shape) for shape in checkpoint.unpadded.values()} <= {1, 2}
    params, specs = hf.load(tmp_path / "in", pm, pad_vocab=22)
    assert params.keys() == values.keys() == specs.keys()
    for name, value in values.items():
        array = np.asarray(params[name])
        padded = name in checkpoint.unpadded
        assert array.shape == specs[name].shape == checkpoint.specs[name].shape
        assert array.shape[0] == len(value) + padded * more
        np.testing.assert_array_equal(array[: len(value)], value)
        assert not array[len(value) :].any()
        if padded:
            assert params[name].sharding.spec[0] == "tp"
    export_safetensors(tmp_path / "out", params, shapes=checkpoint.unpadded, most=10_000)
    (tmp_path / "out" / "config.json").write_text((tmp_path / "in" / "config.json").read_text())
    assert_equal(hf.load(tmp_path / "out", manager())[0], values)


def test_padding_that_is_not_needed_or_not_valid(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    files.write(tmp_path / "in", "llama_bias")
    assert not hf.read(tmp_path / "in", pad_vocab=1).unpadded
    for wrong in (0, 1.5, True):
        with raises(CheckpointError, "pad_vocab", fix="pad_vocab"):
            hf.read(tmp_path / "in", pad_vocab=wrong)  # type: ignore[arg-type]
    params = {"table": jnp.ones((4, 2))}
    for shapes, message in (
        ({"tabel": (3, 2)}, facts("shapes", "tensor", path="tabel", fix="hf.read")),
        ({"table": (5, 2)}, facts("(5, 2)", "tensor", "(4, 2)", path="table", fix="hf.read")),
        ({"table": (4,)}, facts("(4,)", "tensor", "(4, 2)", path="table", fix="hf.read")),
    ):
        with raises(CheckpointError, message):
            export_safetensors(tmp_path / "out", params, shapes=shapes)
    assert not (tmp_path / "out").exists()
