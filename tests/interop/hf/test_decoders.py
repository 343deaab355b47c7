"""Small checkpoints of several families: loaded into shards, they give the logits of transformers.

`tools/hf_decoders.py` writes the golden files.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import shardwright as sw
from shardwright import caches, serving
from shardwright.errors import CheckpointError, StrategyError
from shardwright.interop import hf
from shardwright.interop.hf.decoders import arrange
from tests.interop.hf import small_decoders
from tests.raising import Facts, facts, raises

GOLDEN = Path(__file__).parents[1] / "golden"


@functools.cache
def golden() -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    shapes = json.loads((GOLDEN / "hf_decoders.json").read_text(encoding="utf-8"))
    with np.load(GOLDEN / "hf_decoders.npz") as arrays:
        return shapes, dict(arrays)


def write(folder: Path, name: str, **changes: Any) -> Path:
    config = {**small_decoders.config_of(name), **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    values = small_decoders.values_of(golden()[0][name], config["model_type"])
    save_file(values, folder / "model.safetensors")
    return folder


def manager(preset: str, mesh: str, mode: str = "prefill") -> sw.PartitionManager:
    count = int(np.prod([int(each.split(":")[1]) for each in mesh.split(",")]))
    devices = sw.create_mesh(mesh, devices=jax.devices()[:count])
    return sw.PartitionManager(sw.Strategy.preset(preset), mesh=devices, mode=mode)


def logits_of(decoder: hf.LoadedDecoder, pm: sw.PartitionManager, name: str) -> Any:
    shape = decoder.cache_shape
    params = decoder.load(pm)
    tokens = jnp.asarray(small_decoders.tokens(name))
    with pm:
        empty = [
            caches.init(
                "dense",
                batch=2,
                capacity=32,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                dtype=shape.dtype,
            )
            for _ in range(shape.layers)
        ]
        logits, _ = jax.jit(decoder)(params, tokens, empty, jnp.ones(tokens.shape, bool))
    return logits


# `make test` asks one with experts.
@pytest.mark.full(but=["mixtral"])
@pytest.mark.parametrize("name", small_decoders.CONFIGS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    decoder = hf.decoder(write(tmp_path, name))
    logits = logits_of(decoder, manager("fsdp_tp", "fsdp:2,tp:2"), name)
    np.testing.assert_allclose(logits, golden()[1][name], rtol=2e-5, atol=2e-5)


@pytest.mark.full
def test_an_engine_writes_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Gemma 3 has windows, frequencies of two kinds, and layers after the last whole pattern."""
    name = "gemma3_text"
    decoder = hf.decoder(write(tmp_path, name))
    pm = manager("serve_tp", "dp:2,tp:2")
    engine = serving.Engine(
        decoder,
        decoder.load(pm),
        manager=pm,
        shape=decoder.cache_shape,
        slots=2,
        capacity=32,
        prefill_chunk=4,
    )
    # The prompts begin with the first tokens, so transformers gives the next token of each.
    tokens, logits = small_decoders.tokens(name), golden()[1][name]
    prompts = [tokens[row, :length].tolist() for row in range(2) for length in (3, 11, 16)]
    done = engine.run([serving.Request(prompt=each, max_new_tokens=1) for each in prompts])
    wanted = [int(logits[row, length - 1].argmax()) for row in range(2) for length in (3, 11, 16)]
    assert [each.tokens[0] for each in done] == wanted


@pytest.mark.full
@pytest.mark.parametrize("kinds", [["sliding", "paged"], ["dense", "sliding"]])
def test_windows_give_the_same_tokens_with_each_kind_of_cache(
    kinds: list[str], tmp_path: Path
) -> None:
    decoder = hf.decoder(write(tmp_path, "mistral", sliding_window=6))
    assert decoder.cache_shape.window == 6
    pm = manager("serve_tp", "dp:1,tp:1")
    params = decoder.load(pm)
    written = []
    for cache in kinds:
        engine = serving.Engine(
            decoder,
            params,
            manager=pm,
            shape=decoder.cache_shape,
            slots=1,
            capacity=6 if cache == "sliding" else 32,
            prefill_chunk=2,
            cache=cache,
            cache_options={"page_size": 2, "pages": 16} if cache == "paged" else {},
        )
        prompt = small_decoders.tokens("mistral")[0, :9].tolist()
        (done,) = engine.run([serving.Request(prompt=prompt, max_new_tokens=12)])
        written.append(done.tokens)
    assert written[0] == written[1]


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def deepseek(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Write a DeepSeek with a dense layer, one with experts, and one that predicts further."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (64, 32)}
    shapes |= {"model.norm.weight": (32,), "lm_head.weight": (64, 32)}
    mlp = {"gate_proj": (0, 1), "up_proj": (0, 1), "down_proj": (1, 0)}

    def gated(start: str, hidden: int) -> dict[str, tuple[int, ...]]:
        sizes = (hidden, 32)
        return {f"{start}.{name}.weight": (sizes[a], sizes[b]) for name, (a, b) in mlp.items()}

    for layer in range(3):
        start = f"model.layers.{layer}"
        shapes |= {
            f"{start}.input_layernorm.weight": (32,),
            f"{start}.post_attention_layernorm.weight": (32,),
            f"{start}.self_attn.q_a_proj.weight": (24, 32),
            f"{start}.self_attn.q_a_layernorm.weight": (24,),
            f"{start}.self_attn.q_b_proj.weight": (48, 24),
            f"{start}.self_attn.kv_a_proj_with_mqa.weight": (20, 32),
            f"{start}.self_attn.kv_a_layernorm.weight": (16,),
            f"{start}.self_attn.kv_b_proj.weight": (80, 16),
            f"{start}.self_attn.o_proj.weight": (32, 48),
        }
        if layer == 0:
            shapes |= gated(f"{start}.mlp", 48)
            continue
        shapes[f"{start}.mlp.gate.weight"] = (4, 32)
        shapes[f"{start}.mlp.gate.e_score_correction_bias"] = (4,)
        for expert in range(4):
            shapes |= gated(f"{start}.mlp.experts.{expert}", 16)
        shapes |= gated(f"{start}.mlp.shared_experts", 16)
    shapes["model.layers.2.eh_proj.weight"] = (32, 64)
    values = small_decoders.values_of(shapes, "deepseek")
    (folder / "config.json").write_text(json.dumps(DEEPSEEK), encoding="utf-8")
    save_file(values, folder / "model.safetensors")
    return values


def test_a_latent_decoder_is_loaded_and_not_served(tmp_path: Path) -> None:
    values = deepseek(tmp_path)
    decoder = hf.decoder(tmp_path)
    params = decoder.load(manager("fsdp_tp", "fsdp:2,tp:2"))
    first, second = (layer["attention"] for layer in params["layers"])
    assert second["key"].sharding.spec == jax.P(None, "tp")
    start = "model.layers.1.self_attn"
    both = values[f"{start}.kv_b_proj.weight"].reshape(4, 8 + 12, 16).transpose(2, 0, 1)
    np.testing.assert_array_equal(second["key"], both[..., :8])
    np.testing.assert_array_equal(second["value"], both[..., 8:])
    query = values["model.layers.0.self_attn.q_b_proj.weight"].reshape(4, 12, 24)
    np.testing.assert_array_equal(first["query"], query.transpose(2, 0, 1))
    bias = values["model.layers.1.mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(params["layers"][1]["router_bias"], bias)
    nothing: Any = None
    for use in (lambda: decoder.cache_shape, lambda: decoder({}, nothing, [], nothing)):
        with raises(StrategyError, "deepseek_v3", "cache") as refused:
            use()
        assert "write the forward pass yourself" in refused.value.fix


SPLIT_HEADS = """
version = 1

[rules]
embed = "-"
norm = "-"
vocab = "fsdp"
head = "fsdp"
head_dim = "tp"
kv_head = "-"
kv_head_dim = "tp"
mlp_intermediate = "fsdp+tp"
"""


def test_each_shard_has_its_part_of_every_tensor(tmp_path: Path) -> None:
    """Head dims are cut too, so rows of a head are read and cut."""
    decoder = hf.decoder(write(tmp_path, "qwen2"))
    values = load_file(tmp_path / "model.safetensors")
    strategy = sw.Strategy.loads(SPLIT_HEADS)
    mesh = sw.create_mesh("fsdp:2,tp:2", devices=jax.devices()[:4])
    params = decoder.load(sw.PartitionManager(strategy, mesh=mesh, mode="train"))
    layer, start = params["layers"][1], "model.layers.1"
    own = layer["attention"]["query"]
    assert own["kernel"].sharding.spec == jax.P(None, "fsdp", "tp")
    weight = values[f"{start}.self_attn.q_proj.weight"].reshape(4, 8, 32).transpose(2, 0, 1)
    np.testing.assert_array_equal(own["kernel"], weight)
    np.testing.assert_array_equal(own["bias"].ravel(), values[f"{start}.self_attn.q_proj.bias"])
    gate, up = (values[f"{start}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    np.testing.assert_array_equal(layer["mlp"]["up"]["kernel"], np.stack([gate, up], 1))
    out = values[f"{start}.self_attn.o_proj.weight"].T.reshape(4, 8, 32)
    np.testing.assert_array_equal(layer["attention"]["out"]["kernel"], out)
    assert not np.any(layer["attention"]["out"]["bias"])


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        (
            "llama",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            facts("model", "rope_type", "dynamic"),
        ),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, facts("qwen3", "model", "fp8")),
    ],
)
def test_other_logits_are_refused(
    name: str, changes: dict[str, Any], says: Facts, tmp_path: Path
) -> None:
    decoder = hf.decoder(write(tmp_path, name, **changes))
    assert any(says.what[-1] in note for note in decoder.notes)
    with raises(StrategyError, says):
        _ = decoder.cache_shape


def test_every_tensor_has_a_parameter(tmp_path: Path) -> None:
    folder = write(tmp_path, "llama")
    values = load_file(folder / "model.safetensors")
    bias = {"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}
    bias |= {f"model.layers.{at}.self_attn.q_proj.bias": np.ones(64, np.float32) for at in (1, 2)}
    save_file(values | bias, folder / "model.safetensors")
    with raises(
        CheckpointError,
        facts("tensor", path="model.layers.0.self_attn.q_proj.bias", fix="hf.load"),
        facts("tensor", path="model.layers.1.self_attn.q_proj.bias", fix="hf.load"),
        facts("tensor", path="model.layers.2.self_attn.q_proj.bias", fix="hf.load"),
    ) as unused:
        hf.decoder(folder)
    assert len(unused.value.problems) == 3
    folder = write(tmp_path, "llama", tie_word_embeddings=None)
    with raises(
        CheckpointError, "checkpoint", "lm_head.weight", path="head", fix="config.json"
    ) as untied:
        hf.decoder(folder)
    assert '"tie_word_embeddings": true' in untied.value.fix
    # A parameter without a tensor: the checkpoint has no norms of heads.
    folder = write(tmp_path, "llama", model_type="qwen3")
    with raises(
        CheckpointError, "checkpoint", path="layers/0/attention/query_norm/scale", fix="config.json"
    ):
        hf.decoder(folder)
    with raises(StrategyError, "config.json", "relu", fix="gelu_pytorch_tanh"):
        hf.decoder(write(tmp_path, "llama", hidden_act="relu"))


def changed(folder: Path, **tensors: Any) -> None:
    """Change tensors of a checkpoint; None removes one."""
    file = folder / "model.safetensors"
    values = {**load_file(file), **tensors}
    save_file({name: value for name, value in values.items() if value is not None}, file)


def test_absent_sizes_are_those_of_the_class(tmp_path: Path) -> None:
    """A Mistral without `num_key_value_heads` has 8, and a Qwen 3 heads of 128."""
    for name, key, changes in (
        ("mistral", "num_key_value_heads", {"num_attention_heads": 16, "head_dim": 4}),
        ("qwen3", "head_dim", {}),
    ):
        folder = write(tmp_path, name, **changes)
        config = json.loads((folder / "config.json").read_text())
        del config[key]
        (folder / "config.json").write_text(json.dumps(config))
        if name == "mistral":
            sizes = {"q": 64, "k": 64, "v": 64}
            layers = {
                f"model.layers.{at}.self_attn.{part}_proj.weight": np.ones((size, 32), np.float32)
                for at in range(3)
                for part, size in sizes.items()
            }
            changed(folder, **layers)
        with raises(
            CheckpointError,
            facts(
                "config.json",
                "(32, 32)",
                path="model.layers.0.self_attn.k_proj.weight",
                fix="config.json",
            ),
            facts(
                "config.json",
                "(32, 32)",
                path="model.layers.1.self_attn.k_proj.weight",
                fix="config.json",
            ),
            facts(
                "config.json",
                "(32, 32)",
                path="model.layers.2.self_attn.k_proj.weight",
                fix="config.json",
            ),
        ):
            hf.decoder(folder)


def test_a_parameter_has_the_size_of_its_tensor(tmp_path: Path) -> None:
    folder = write(tmp_path, "llama")
    specs = {"embedding": sw.ArraySpec((60, 32), "float32", (sw.VOCAB, sw.EMBED))}
    sizes = hf.decoder(folder).config
    with raises(
        CheckpointError, "tensor", "(64, 32)", "(60, 32)", path="embedding", fix="config.json"
    ):
        arrange(hf.read(folder), sizes, specs)


def test_a_tied_head_equals_the_embedding(tmp_path: Path) -> None:
    folder = write(tmp_path, "llama")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    changed(folder, **{"lm_head.weight": embedding})
    assert hf.decoder(folder).config.tied
    changed(folder, **{"lm_head.weight": embedding + 1})
    with raises(
        CheckpointError,
        "tie_word_embeddings",
        "embedding",
        path="lm_head.weight",
        fix="tie_word_embeddings",
    ) as refused:
        hf.decoder(folder)
    assert '"tie_word_embeddings": false' in refused.value.fix


def test_only_qwen_2_lacks_a_bias(tmp_path: Path) -> None:
    folder = write(tmp_path, "llama", attention_bias=True)
    biases = {
        f"model.layers.{at}.self_attn.{part}_proj.bias": np.ones(size, np.float32)
        for at in range(3)
        for part, size in (("q", 64), ("k", 32), ("v", 32))
    }
    changed(folder, **biases)
    with raises(CheckpointError, "lacks", path="layers/0/attention/out/bias", fix="config.json"):
        hf.decoder(folder)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantized_weights_are_refused(dtype: str, tmp_path: Path) -> None:
    folder = write(tmp_path, "llama")
    name = "model.layers.1.mlp.up_proj.weight"
    weight = np.ones((48, 32), np.float32).astype(jnp.dtype(dtype))
    changed(folder, **{name: weight})
    with raises(
        CheckpointError, dtype, "weights", path="model.layers.1.mlp.up_proj.weight", fix="hf.load"
    ) as refused:
        hf.decoder(folder)
    assert [problem.path for problem in refused.value.problems] == [name]
