"""Layers and experts as one array each, from files that have them one by one."""

from __future__ import annotations

import json
import re
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
from shardwright.errors import CheckpointError
from shardwright.interop import hf
from shardwright.interop.hf import source
from shardwright.vocabulary.lowering import describe
from tests.interop.hf import files, models
from tests.raising import facts, raises

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="the extra hf installs it")

# Their first layer has a dense feed-forward block.
MIXED = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "qwen2_moe")


def manager(mesh: str = "fsdp:4,tp:2", preset: str = "fsdp_tp") -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset(preset), mesh=sw.create_mesh(mesh))


def whole(name: str) -> str:
    return re.sub(r"\b(layers?|experts)\.\d+\.", r"\1.", name)


@pytest.mark.full(but=["llama", "llama_tied", "smollm3", "gemma", "mixtral"])
@pytest.mark.parametrize("case", [case for case in files.TREES if case not in MIXED])
def test_every_family_stacks(case: str, tmp_path: Path) -> None:
    values = files.write(tmp_path, case)
    checkpoint = hf.read(tmp_path, stack_layers=True)
    assert {*checkpoint.specs} == {whole(name) for name in values}
    params = checkpoint.load(manager())
    for name, value in values.items():
        at = tuple(int(number) for number in re.findall(r"(?<=\.)\d+(?=\.)", name))
        np.testing.assert_array_equal(np.asarray(params[whole(name)])[at], value, err_msg=name)
    # The tree alone has the same axes.
    axes = hf.annotate(params, checkpoint.config)
    assert axes == {name: spec.axes for name, spec in checkpoint.specs.items()}


def test_load_takes_the_options_of_read(tmp_path: Path) -> None:
    files.write(tmp_path, "mixtral")
    options = {"stack_experts": False, "stack_layers": True}
    params, specs = hf.load(tmp_path, manager(), mode="decode", **options)
    checkpoint = hf.read(tmp_path, **options)
    assert specs == checkpoint.specs
    expected = checkpoint.load(manager(), mode="decode")
    assert {name: each.sharding for name, each in params.items()} == {
        name: each.sharding for name, each in expected.items()
    }


def test_a_strategy_is_no_manager(tmp_path: Path) -> None:
    files.write(tmp_path, "llama")
    for wrong in ("fsdp_tp", sw.Strategy.preset("fsdp_tp")):
        says = facts("PartitionManager", path=..., fix="sw.PartitionManager")
        with raises(sw.StrategyError, says):
            hf.load(tmp_path, wrong)  # type: ignore[arg-type]
        with raises(sw.StrategyError, says):
            hf.read(tmp_path).explain(wrong)  # type: ignore[arg-type]


def test_axes_and_specs(tmp_path: Path) -> None:
    files.write(tmp_path, "mixtral")
    checkpoint = hf.read(tmp_path, stack_layers=True)
    params = checkpoint.load(manager("ep:2,fsdp:2,tp:2", "moe_ep"))
    up = "model.layers.block_sparse_moe.experts.w3.weight"
    assert describe(checkpoint.specs[up].axes) == "(LAYERS, EXPERT, MLP_INTERMEDIATE, EMBED)"
    assert params[up].shape == (2, 4, 96, 48)
    assert params[up].sharding.spec == P(None, "ep", "tp", "fsdp")
    query = "model.layers.self_attn.q_proj.weight"
    assert describe(checkpoint.specs[query].axes) == "(LAYERS, HEAD*HEAD_DIM, EMBED)"
    assert checkpoint.notes[-1] == "20 tensors of layers became 10 stacks"


def test_experts_may_stay_apart(tmp_path: Path) -> None:
    values = files.write(tmp_path, "mixtral")
    checkpoint = hf.read(tmp_path, stack_experts=False, stack_layers=True)
    name = "model.layers.block_sparse_moe.experts.3.w1.weight"
    parts = [values[name.replace("layers", f"layers.{layer}")] for layer in range(2)]
    np.testing.assert_array_equal(np.asarray(checkpoint.load(manager())[name]), np.stack(parts))
    assert describe(checkpoint.specs[name].axes) == "(LAYERS, MLP_INTERMEDIATE, EMBED)"


def test_scales_follow_the_stack(tmp_path: Path) -> None:
    values = files.values_of("llama")
    for layer in range(2):
        weight = f"model.layers.{layer}.self_attn.q_proj.weight"
        values[weight] = values[weight].astype(ml_dtypes.float8_e4m3fn)
        values[f"{weight}_scale_inv"] = np.arange(12, dtype=np.float32).reshape(6, 2) + layer
    config: dict[str, Any] = {"quantization_config": {"weight_block_size": [16, 24]}}
    files.write_config(tmp_path, "llama", **config)
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    checkpoint = hf.read(tmp_path, stack_layers=True)
    stack = "model.layers.self_attn.q_proj.weight"
    axes = checkpoint.specs[f"{stack}_scale_inv"].axes
    assert (axes.path, axes.shape, axes.dims) == (stack, (2, 96, 48), (0, 1, 2))
    params = checkpoint.load(manager("fsdp:2,tp:2"))
    assert params[f"{stack}_scale_inv"].sharding.spec == P(None, "tp", "fsdp")
    np.testing.assert_array_equal(np.asarray(params[f"{stack}_scale_inv"])[1, 0], [1, 2])


def test_axes_of_the_user_name_one_layer(tmp_path: Path) -> None:
    values = files.values_of("llama")
    for layer in range(2):
        values[f"model.layers.{layer}.extra"] = np.ones((48, 3), np.float32)
    files.write_config(tmp_path, "llama")
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    axes = {r"layers\.\d+\.extra$": (sw.EMBED, sw.EMPTY)}
    checkpoint = hf.read(tmp_path, stack_layers=True, axes=axes)
    assert checkpoint.specs["model.layers.extra"].axes == (sw.LAYERS, sw.EMBED, sw.EMPTY)


def scanned(params: Any, config: Any, tokens: Any) -> Any:
    """The Llama of these tests, with one `jax.lax.scan` over its layers."""
    start = "model.layers."
    layers = {name: value for name, value in params.items() if name.startswith(start)}
    others = {name: value for name, value in params.items() if name not in layers}
    one = {**config, "num_hidden_layers": 1}

    def step(x: Any, layer: Any) -> Any:
        named = {f"{start}0.{name.removeprefix(start)}": value for name, value in layer.items()}
        return models.llama_layers(named, one, x), None

    x = others["model.embed_tokens.weight"][tokens]
    x, _ = jax.lax.scan(step, x, layers)
    return models.llama_head(others, config, x)


@pytest.mark.full
def test_a_scan_over_layers_equals_the_layers_one_by_one(tmp_path: Path) -> None:
    files.write(tmp_path, "llama", rms_norm_eps=1e-5, rope_theta=1e4)
    pm = manager("fsdp:2,tp:2")
    apart, stacked = hf.read(tmp_path), hf.read(tmp_path, stack_layers=True)
    tokens = jnp.arange(10)[None]
    expected = jax.jit(lambda p: models.llama(p, apart.config, tokens))(apart.load(pm))
    actual = jax.jit(lambda p: scanned(p, apart.config, tokens))(stacked.load(pm))
    assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()


def test_memory_of_a_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece of all layers, and the part of one layer that is read into it."""
    monkeypatch.setattr(source, "put", files.put_uncounted)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 4}
    config = {**files.TREES["llama_tied"]["config"], **sizes, "head_dim": 64}
    shapes = {"model.embed_tokens.weight": (64, 256), "model.norm.weight": (256,)}
    for layer in range(4):
        start = f"model.layers.{layer}."
        shapes |= {f"{start}self_attn.{name}_proj.weight": (384, 256) for name in "q"}
        shapes |= {f"{start}self_attn.{name}_proj.weight": (128, 256) for name in "kv"}
        shapes |= {f"{start}self_attn.o_proj.weight": (256, 384)}
        shapes |= {f"{start}mlp.{name}_proj.weight": (4096, 256) for name in ("gate", "up")}
        shapes |= {f"{start}mlp.down_proj.weight": (256, 4096)}
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{start}{name}.weight"] = (256,)
    values = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    del values
    checkpoint, pm = hf.read(tmp_path, stack_layers=True), manager("fsdp:4,tp:2")
    checkpoint.load(pm)
    tracemalloc.start()
    try:
        params = checkpoint.load(pm)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    stack = params["model.layers.mlp.down_proj.weight"]
    piece = stack.addressable_shards[0].data.nbytes
    # The rest are Python objects: names, specs, shardings.
    assert peak <= piece + piece // 4 + (1 << 19) < stack.nbytes


@pytest.mark.parametrize("case", MIXED)
def test_layers_that_differ_are_refused(case: str, tmp_path: Path) -> None:
    files.write(tmp_path, case)
    with raises(
        CheckpointError,
        1,
        2,
        "tensor",
        path="model.layers.mlp.down_proj.weight",
        fix="stack_layers",
    ) as caught:
        hf.read(tmp_path, stack_layers=True)
    assert "leave out stack_layers=True" in str(caught.value)


def test_layers_of_other_dtypes_are_refused(tmp_path: Path) -> None:
    values = files.values_of("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    values[name] = values[name].astype(np.float16)
    files.write_config(tmp_path, "llama")
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    with raises(
        CheckpointError,
        "float16",
        "[96, 48]",
        "MLP_INTERMEDIATE",
        "EMBED",
        path="model.layers.mlp.up_proj.weight",
        fix="stack_layers",
    ):
        hf.read(tmp_path, stack_layers=True)
    assert hf.read(tmp_path, stack_layers=True, dtype="bfloat16").specs


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_each_layer_is_cast_by_itself(stored: Any, tmp_path: Path) -> None:
    """The layers were read into the stored dtype of the first one."""
    values = files.values_of("llama")
    first, second = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(2))
    values[first], values[second] = values[first].astype(stored), values[second] * 1e5
    files.write_config(tmp_path, "llama")
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    pm = manager()
    params, _ = hf.load(tmp_path, pm, dtype="float32", stack_layers=True)
    apart, _ = hf.load(tmp_path, pm, dtype="float32")
    stack = np.asarray(params["model.layers.mlp.up_proj.weight"])
    np.testing.assert_array_equal(stack, np.stack([apart[first], apart[second]]))
    np.testing.assert_array_equal(stack[1], values[second])
    with raises(CheckpointError, "2.828e+05", "float16", path=second, fix="dtype"):
        hf.load(tmp_path, pm, dtype="float16", stack_layers=True)


@pytest.mark.parametrize("name", ["experts.0001.w1.weight", "experts.w1.weight"])
def test_two_names_of_one_expert_are_refused(name: str, tmp_path: Path) -> None:
    values = files.values_of("mixtral")
    start = "model.layers.0.block_sparse_moe."
    values[f"{start}{name}"] = values[f"{start}experts.1.w1.weight"]
    files.write_config(tmp_path, "mixtral")
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    with raises(CheckpointError, "tensor", path=...):
        hf.read(tmp_path)


def test_absurd_numbers_are_refused_at_once(tmp_path: Path) -> None:
    values = files.values_of("mixtral")
    extra = "model.layers.0.block_sparse_moe.experts.99999999999.w1.weight"
    values[extra] = np.ones(3, np.float32)
    files.write_config(tmp_path, "mixtral")
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    with raises(
        CheckpointError,
        4,
        5,
        6,
        7,
        8,
        path="model.layers.0.block_sparse_moe.experts.w1.weight",
        fix="stack_experts",
    ):
        hf.read(tmp_path)
    del values[extra]
    files.write_config(tmp_path, "mixtral", num_hidden_layers=10**15)
    safetensors_numpy.save_file(values, tmp_path / "model.safetensors")
    with raises(CheckpointError, "config.json", 1000000000000000, 23, fix="config.json"):
        hf.read(tmp_path)
