"""Reference decoders of Hugging Face configurations: sizes, results and plans."""

from __future__ import annotations

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import shardwright as sw
from shardwright.errors import CheckpointError, StrategyError
from shardwright.interop import hf
from shardwright.interop.hf import programs, read_config
from shardwright.interop.hf.config import DEFAULTS
from shardwright.interop.hf.families import FAMILIES
from shardwright.interop.hf.model.decoder import decoder_specs
from shardwright.plan.collectives import Kind, read_collectives
from shardwright.plan.walk.ledger import LAYOUT_FIXES
from shardwright.testing import cpu_mesh
from tests.raising import Facts, facts, raises

CONFIGS = Path(__file__).parent / "configs"
DECODERS = {name for name, family in FAMILIES.items() if family.read}
FILES = sorted(CONFIGS.glob("*.json"))

# Parameters that the published checkpoints have, and how many the reference decoder has more. Each
# difference is one that `notes` names.
PUBLISHED = {
    "deepseek-v2-lite": (15_706_484_224, 0),
    "deepseek-v3": (671_026_419_200, 0),
    "gemma-2-9b": (9_241_705_984, 0),
    "gemma-3-1b": (999_885_952, 0),
    "gemma-7b": (8_537_680_896, 0),
    # Biases of the experts and the router.
    "gpt-oss-20b": (20_914_757_184, -24 * (32 * (3 * 2880) + 32)),
    "llama-3-8b": (8_030_261_248, 0),
    "mistral-7b": (7_241_732_096, 0),
    "mixtral-8x7b": (46_702_792_704, 0),
    # A bias of the output projection more, and a gate of the shared experts less.
    "qwen1.5-moe-a2.7b": (14_315_784_192, 24 * (2048 - 2048)),
    "qwen2.5-7b": (7_615_616_512, 28 * 3584),
    "qwen3-30b-a3b": (30_532_122_624, 0),
    "qwen3-8b": (8_190_735_360, 0),
}


def count(specs: Any) -> int:
    leaves = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, sw.ArraySpec))
    return sum(math.prod(leaf.shape) for leaf in leaves)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_parameters_are_those_published(file: Path) -> None:
    sizes = read_config(str(file))
    published, more = PUBLISHED[file.stem]
    assert count(decoder_specs(sizes, stacked=True)) == published + more
    assert count(decoder_specs(sizes, stacked=False)) == published + more
    assert bool(sizes.notes) or more == 0


def test_every_family_has_a_file() -> None:
    families = {json.loads(file.read_text())["model_type"] for file in FILES}
    same = {"gemma3_text": "gemma3"}  # the decoder of a model of text and images
    assert families | {same[name] for name in families if name in same} == DECODERS


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "torch_dtype": "float32",
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
}


def small_config(file: Path, folder: Path, **changes: Any) -> str:
    """Write a configuration of the same family with small sizes."""
    values = json.loads(file.read_text())
    small = {key: value for key, value in SMALL.items() if values.get(key) is not None}
    path = folder / "config.json"
    path.write_text(json.dumps({**values, **small, "torch_dtype": "float32", **changes}))
    return str(path)


def unstacked(params: Any, sizes: Any) -> Any:
    trees, layers = iter(params["layers"]), []
    for stack in sizes.stacks:
        trips, rest = divmod(stack.layers, stack.period)
        pattern = [next(trees) for _ in range(stack.period if trips else 0)]
        layers += [
            jax.tree.map(lambda leaf, at=at: leaf[at], tree)
            for at in range(trips)
            for tree in pattern
        ]
        layers += [next(trees) for _ in range(rest)]
    return {**params, "layers": layers}


def draw(specs: Any) -> Any:
    """Return parameters: ones for norms, and a normal distribution for others."""
    leaves, structure = jax.tree.flatten(specs, is_leaf=lambda leaf: isinstance(leaf, sw.ArraySpec))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return structure.unflatten(
        jnp.ones(spec.shape, spec.dtype)
        if "NORM" in str(spec.axes)
        else 0.2 * jax.random.normal(key, spec.shape, spec.dtype)
        for key, spec in zip(keys, leaves, strict=True)
    )


def logits_of(sizes: Any, params: Any, x: Any) -> Any:
    logits = x @ (params["embedding"].T if sizes.tied else params["head"])
    cap = sizes.softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.full
def test_prefill_gives_the_logits_of_training(file: Path, tmp_path: Path) -> None:
    """Scanned layers without caches, and sharded single layers with caches, agree.

    For latent attention these are two orders of the same products.
    """
    sizes = read_config(small_config(file, tmp_path), capacity=4.0)
    made = programs(sizes, batch=4, length=8)
    params = draw(decoder_specs(sizes, stacked=True))
    tokens = jax.random.randint(jax.random.key(1), (4, 8), 0, sizes.vocab)
    model = made["train"].function.__self__  # type: ignore[attr-defined]
    with sw.PartitionManager(sw.Strategy.preset("single"), mode="train", mesh=one_device()):
        x = model.end(params, model.scanned(params["layers"], model.start(params, tokens)))
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=four_devices(), mode="prefill")
    caches = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), made["prefill"].shapes[1])
    with pm:
        logits, written = jax.jit(made["prefill"].function)(
            unstacked(params, sizes), caches, tokens
        )
    np.testing.assert_allclose(
        logits[:, 0], logits_of(sizes, params, x[:, -1]), rtol=2e-4, atol=2e-4
    )
    assert len(written) == 2


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma-2-9b", "gpt-oss-20b", "mistral-7b"])
def test_ring_of_a_window_gives_the_logits_of_training(name: str, tmp_path: Path) -> None:
    """Prompts of 8 tokens pass through rings of 4 rows."""
    config = small_config(CONFIGS / f"{name}.json", tmp_path, sliding_window=4)
    sizes = read_config(config, capacity=4.0)
    assert sizes.stacks[0].attention_of(0).window == (3, 0)  # type: ignore[union-attr]
    made = programs(sizes, batch=4, length=8)
    params = draw(decoder_specs(sizes, stacked=True))
    tokens = jax.random.randint(jax.random.key(1), (4, 8), 0, sizes.vocab)
    model = made["train"].function.__self__  # type: ignore[attr-defined]
    x = model.end(params, model.scanned(params["layers"], model.start(params, tokens)))
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=four_devices(), mode="prefill")
    caches = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), made["prefill"].shapes[1])
    assert caches[0].k.shape[1] == 4
    with pm:
        logits, _ = jax.jit(made["prefill"].function)(unstacked(params, sizes), caches, tokens)
    np.testing.assert_allclose(
        logits[:, 0], logits_of(sizes, params, x[:, -1]), rtol=2e-4, atol=2e-4
    )


# The window of each layer, as the models' own code assigns them.
WINDOWS = {
    "gemma-2-9b": [4096, None] * 21,
    "gemma-3-1b": [*[512] * 5, None] * 4 + [512] * 2,
    "gpt-oss-20b": [128, None] * 12,
    "mistral-7b": [4096] * 32,
    "qwen2.5-7b": [None] * 28,
    "llama-3-8b": [None] * 32,
}


@pytest.mark.full(but=["gemma-3-1b", "gpt-oss-20b", "mistral-7b"])
@pytest.mark.parametrize("name", WINDOWS)
def test_caches_of_layers_with_a_window_are_rings(name: str) -> None:
    sizes = read_config(str(CONFIGS / f"{name}.json"))
    caches = programs(sizes, batch=2, length=65536)["decode"].shapes[1]
    rows = [cache.k.shape[1] for cache in caches]
    assert rows == [window or 65536 for window in WINDOWS[name]]
    # A window that is longer than the cache needs no ring.
    short = programs(sizes, batch=2, length=64)["decode"].shapes[1]
    assert {cache.k.shape[1] for cache in short} == {64}


def test_layer_types_decide_which_layers_have_a_window(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention"]
    source = CONFIGS / "gpt-oss-20b.json"

    def layers(given: list[str]) -> list[Any]:
        changes = {"layer_types": given, "num_hidden_layers": len(given), "sliding_window": 4}
        sizes = read_config(small_config(source, tmp_path, **changes))
        return [
            (stack.layers, stack.period, [stack.attention_of(at).window for at in range(2)])
            for stack in sizes.stacks
        ]

    assert layers(types * 2) == [(4, 2, [None, (3, 0)])]
    assert layers(["full_attention"] * 2) == [(2, 1, [None, None])]
    # Few long runs are not a pattern.
    runs = ["full_attention"] * 9 + ["sliding_attention"]
    assert layers(runs) == [(9, 1, [None, None]), (1, 1, [(3, 0), (3, 0)])]
    with raises(StrategyError, "config.json", "layer_types", 2, fix="sliding_attention"):
        read_config(small_config(source, tmp_path, layer_types=types[:1]))


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("llama-3-8b", {}, [None, None]),
        ("gemma-7b", {}, [None, None]),
        ("qwen3-8b", {"max_window_layers": 1}, [None, 3]),
        ("qwen1.5-moe-a2.7b", {"max_window_layers": 1}, [3, None]),
        ("qwen3-30b-a3b", {"max_window_layers": None}, [3, 3]),
        # Unknown frequencies leave the windows as they are.
        ("mistral-7b", {"rope_scaling": {"rope_type": "other", "factor": 2.0}}, [3, 3]),
    ],
)
def test_windows_are_those_that_the_family_reads(
    name: str, changes: dict[str, Any], windows: list[int | None], tmp_path: Path
) -> None:
    given = {"sliding_window": 4, "use_sliding_window": True, **changes}
    sizes = read_config(small_config(CONFIGS / f"{name}.json", tmp_path, **given))
    attention: list[Any] = [
        stack.attention_of(at) for stack in sizes.stacks for at in range(stack.layers)
    ]
    assert [each.window and each.window[0] for each in attention] == windows
    assert any("rope_type='other'" in why for why in sizes.differs) == ("rope_scaling" in changes)


LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("name", "changes", "local", "whole"),
    [
        ("llama-3-8b", {"rope_parameters": LINEAR, "rope_theta": 1e6}, None, (1e6, 8)),
        ("llama-3-8b", {"rope_parameters": {**LINEAR, "rope_theta": 1e6}}, None, (1e6, 8)),
        ("llama-3-8b", {"rope_parameters": {"full_attention": LINEAR}}, None, (5e5, 8)),
        ("gemma-3-1b", {"rope_scaling": LINEAR, "rope_theta": 1e5}, (1e4, 1), (1e5, 8)),
        (
            "gemma-3-1b",
            {"rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 1e5}}},
            *((1e4, 1), (1e5, 8)),
        ),
    ],
)
def test_rope_parameters_are_those_of_transformers(
    name: str, changes: dict[str, Any], local: Any, whole: Any, tmp_path: Path
) -> None:
    given = {"num_hidden_layers": 6, "rope_scaling": None, **changes}
    sizes = read_config(small_config(CONFIGS / f"{name}.json", tmp_path, **given))
    attention: list[Any] = [
        stack.attention_of(at) for stack in sizes.stacks for at in range(stack.layers)
    ]
    for own, (theta, factor) in ((attention[0], local or whole), (attention[-1], whole)):
        if factor == 1:
            assert own.rope_theta == theta
        else:
            powers = np.arange(own.size // 2) / (own.size // 2)
            np.testing.assert_allclose(own.rope_theta.values, theta**-powers / factor, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("gemma-3-1b", {"use_bidirectional_attention": True}, "sees later positions"),
        ("mistral-7b", {"layer_types": ["chunked_attention"] * 2}, "chunked attention"),
    ],
)
def test_other_masks_differ(name: str, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    sizes = read_config(small_config(CONFIGS / f"{name}.json", tmp_path, **changes))
    assert any(says in why for why in sizes.differs)


def one_device() -> jax.sharding.Mesh:
    return sw.create_mesh("dp:1", devices=jax.devices()[:1])


def four_devices() -> jax.sharding.Mesh:
    return sw.create_mesh("fsdp:2,tp:2", devices=jax.devices()[:4])


@pytest.mark.full
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_mode_is_planned(file: Path, tmp_path: Path) -> None:
    path = small_config(file, tmp_path, torch_dtype="bfloat16")
    sizes = read_config(path, param="float32")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("fsdp:4,tp:2"))
    for mode, program in programs(sizes, batch=8, length=16).items():
        report = pm.for_mode(mode).plan(
            program.function,
            *program.shapes,
            specs=program.specs,
            outputs=program.outputs,
            holds=program.holds,
            donated=program.donated,
            topology="v5e:2x4",
        )
        assert report.walked.complete, (mode, report.walked.unknown)
        # Small sizes do not fill whole tiles of a TPU.
        assert {choice.fix for choice in report.walked.choices} <= LAYOUT_FIXES, mode
        lines = {event.source.partition(":")[0] for event in report.events}
        assert lines <= {"decoder.py", "latent.py"}
        total = count(decoder_specs(sizes, stacked=mode == "train"))
        assert report.state.of("parameters").total == 4 * total  # float32


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "has no model_type"),
        ('{"model_type": "lama"}', "the family 'lama' is unknown"),
        ('{"model_type": "mamba"}', "families are llama, mistral, qwen2"),
        ('{"model_type": "llama"}', "lacks num_attention_heads"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "a positive integer, got 0"),
        ('{"model_type": 3}', "config.json: model_type must be a text, got 3"),
        (
            '{"model_type": "gemma3", "text_config": {"model_type": [1]}}',
            "config.json: text_config.model_type must be a text, got [1]",
        ),
        (
            '{"model_type": "gemma3", "text_config": [1]}',
            "config.json: text_config must be a JSON object, got [1]",
        ),
    ],
)
def test_bad_config_has_message_and_fix(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(StrategyError) as error:
        read_config(str(path))
    assert says in str(error.value)
    assert "fix" in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("qwen3-30b-a3b", {"mlp_only_layers": [0]}, facts("config.json", "MLP", fix="model")),
        (
            "qwen1.5-moe-a2.7b",
            {"shared_expert_intermediate_size": 33},
            facts("config.json", "shared_expert_intermediate_size", 33, 16, fix="model"),
        ),
        (
            "deepseek-v3",
            {"first_k_dense_replace": 9},
            facts("config.json", "experts", "layer", fix="model"),
        ),
        (
            "llama-3-8b",
            {"head_dim": -1},
            facts("config.json", "head_dim", "positive integer, or 0 for none", fix="head_dim"),
        ),
        *(
            (
                "llama-3-8b",
                {"hidden_act": value},
                facts("config.json", "hidden_act", "text", fix="hidden_act"),
            )
            for value in (["silu"], {"a": 1})
        ),
        (
            "llama-3-8b",
            {"rms_norm_eps": "x"},
            facts("config.json", "rms_norm_eps", "positive number", fix="rms_norm_eps"),
        ),
        ("llama-3-8b", {"torch_dtype": "int8"}, facts("config.json", "int8", fix="param")),
        (
            "llama-3-8b",
            {"rope_scaling": "linear"},
            facts("config.json", "rope_scaling", "linear", "JSON", fix="rope_scaling"),
        ),
        (
            "llama-3-8b",
            {"rope_parameters": [1]},
            facts("config.json", "rope_parameters", "[1]", "JSON", fix="rope_parameters"),
        ),
        (
            "llama-3-8b",
            {"rope_theta": "x"},
            facts("config.json", "rope_theta", "x", fix="rope_theta"),
        ),
        (
            "llama-3-8b",
            {"quantization_config": ["x"]},
            facts("config.json", "quantization_config", "x", "JSON", fix="quantization_config"),
        ),
        (
            "gemma-2-9b",
            {"query_pre_attn_scalar": 0},
            facts("config.json", "query_pre_attn_scalar", 0, fix="query_pre_attn_scalar"),
        ),
        (
            "gemma-2-9b",
            {"query_pre_attn_scalar": "a"},
            facts("config.json", "query_pre_attn_scalar", "a", fix="query_pre_attn_scalar"),
        ),
        (
            "gemma-2-9b",
            {"final_logit_softcapping": "x"},
            facts("config.json", "final_logit_softcapping", "x", fix="final_logit_softcapping"),
        ),
    ],
)
def test_what_the_decoder_lacks_is_an_error(
    name: str, changes: dict[str, Any], says: Facts, tmp_path: Path
) -> None:
    path = small_config(CONFIGS / f"{name}.json", tmp_path, **changes)
    with raises(StrategyError, says):
        read_config(path)


def test_class_defaults_are_those_of_transformers() -> None:
    golden = json.loads((CONFIGS.parents[1] / "golden" / "hf_class_defaults.json").read_text())
    wanted = golden["defaults"]
    assert {*wanted, "gemma3"} == set(DEFAULTS) == DECODERS
    read = {*itertools.chain(*DEFAULTS.values())}
    for family, values in wanted.items():
        own = {key: value for key, value in DEFAULTS[family].items() if value is not None}
        assert own.pop("scoring_func", "sigmoid") == "sigmoid"  # of the model, not of its class
        assert own == {key: value for key, value in values.items() if key in read and value}, family


def nested(folder: Path, text: dict[str, Any], **outer: Any) -> Any:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text, **outer}))
    return read_config(str(path))


def test_text_of_images_and_text(tmp_path: Path) -> None:
    """Gemma 3 4B and 12B and LLaVA 1.5 as published; `transformers` has these parameters."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"model_type": "gemma3_text", "sliding_window": 1024}
    sizes = nested(tmp_path, text, torch_dtype="float32")
    assert count(decoder_specs(sizes, stacked=True)) == 3_880_263_168
    assert [(stack.layers, stack.period) for stack in sizes.stacks] == [(34, 6)]
    assert (sizes.family, sizes.longest, sizes.tied) == ("gemma3_text", 131072, True)
    assert sizes.dtypes.param == jnp.float32
    assert any("only the text decoder" in note for note in sizes.notes)
    assert any("vocab_size 262208, num_attention_heads 8" in note for note in sizes.notes)
    text |= {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48}
    text |= {"num_attention_heads": 16, "num_key_value_heads": 8}
    sizes = nested(tmp_path, text)
    assert sizes.stacks[0].attention.head_dim == 256
    assert count(decoder_specs(sizes, stacked=True)) == 11_766_034_176
    llava = {"model_type": "llama", "vocab_size": 32064, "torch_dtype": "float16"}
    sizes = nested(tmp_path, llava, torch_dtype="float32", vocab_size=32000)
    assert (sizes.vocab, sizes.dtypes.param) == (32064, jnp.float16)
    assert count(decoder_specs(sizes, stacked=True)) == 6_738_939_904


def test_outer_keys_fill_what_text_config_lacks(tmp_path: Path) -> None:
    text = {"model_type": "mistral", "num_attention_heads": 4, "torch_dtype": None}
    outer = {"hidden_size": 64, "torch_dtype": "float32", "tie_word_embeddings": True}
    sizes = nested(tmp_path, text, **outer, quantization_config={"quant_method": "fp8"})
    assert (sizes.dtypes.param, sizes.tied, sizes.embed) == (jnp.float32, True, 64)
    assert any("unquantized; the model's are fp8" in note for note in sizes.notes)
    assert any("hidden_size 64: not in text_config, but outside" in note for note in sizes.notes)
    inside = {"tie_word_embeddings": False, "dtype": "float16", "hidden_size": 128}
    sizes = nested(tmp_path, text | inside, **outer)
    assert (sizes.dtypes.param, sizes.tied, sizes.embed) == (jnp.float16, False, 128)


def test_absent_kv_heads_are_those_of_the_class(tmp_path: Path) -> None:
    """Also where nothing is nested: `transformers` gives a Mistral without them 8, not 32."""
    values = json.loads((CONFIGS / "mistral-7b.json").read_text())
    path = tmp_path / "config.json"
    for absent, kv_heads in (({}, 8), ({"num_key_value_heads": None}, 32)):
        given = {key: value for key, value in values.items() if key != "num_key_value_heads"}
        path.write_text(json.dumps({**given, **absent}))
        assert read_config(str(path)).stacks[0].attention.kv_heads == kv_heads


@pytest.mark.parametrize("other", ["llama4", "gemma4", "qwen3_next", "ministral", "gemma3n"])
def test_no_hint_names_another_family(other: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for kind, hinted in ((other, False), ("Llama", True), ("gpt-oss", True)):
        path.write_text(json.dumps({"model_type": kind}))
        with raises(StrategyError, kind, "config.json", fix="qwen2") as decoder:
            read_config(str(path))
        with raises(CheckpointError, kind, "config.json", "model_type", fix="smollm3") as loaded:
            hf.annotate({}, {"model_type": kind})
        for caught in (decoder, loaded):
            assert ("did you mean" in str(caught.value)) == hinted


def test_weights_of_images_and_text_are_refused(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 64}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 32}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"vision_tower.weight": np.zeros((2, 2))}, tmp_path / "model.safetensors")
    with raises(
        CheckpointError,
        "config.json",
        "model",
        "text_config",
        "vision_config",
        fix="AutoModelForImageTextToText.from_pretrained",
    ) as caught:
        hf.read(tmp_path)
    assert "AutoModelForCausalLM.from_config(whole.config.text_config)" in caught.value.fix


def in_stages(schedule: str, repeats: int, *, mode: str) -> sw.PartitionManager:
    table = {"schedule": schedule, "microbatches": 4, "repeats": repeats}
    strategy = sw.Strategy.preset("fsdp_pp") | sw.Strategy(pipeline=table)
    return sw.PartitionManager(strategy, mesh=cpu_mesh("pp:2,fsdp:2"), mode=mode)


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "repeats"), [("gpipe", 1), ("circular", 2)])
def test_layers_run_in_the_stages_of_a_pipeline(
    schedule: str, repeats: int, tmp_path: Path
) -> None:
    changes = {"num_hidden_layers": 4 * repeats, "sliding_window": 4}
    sizes = read_config(small_config(CONFIGS / "gemma-2-9b.json", tmp_path, **changes))
    both = [programs(sizes, batch=16, length=8, repeats=each)["train"] for each in (repeats, 1)]
    made, plain = (each.function.__self__ for each in both)  # type: ignore[attr-defined]
    specs = decoder_specs(sizes, stacked=True, repeats=repeats)
    params = draw(decoder_specs(sizes, stacked=True))
    tokens = jax.random.randint(jax.random.key(1), (16, 8), 0, sizes.vocab)

    def total(params: Any, tokens: Any, model: Any = made) -> Any:
        y = model.end(params, model.scanned(params["layers"], model.start(params, tokens)))
        return jnp.sum(jnp.sin(y) * jnp.arange(y.shape[-1]))

    step = jax.jit(jax.value_and_grad(total))
    wanted = jax.jit(jax.value_and_grad(functools.partial(total, model=plain)))(params, tokens)
    params = jax.tree.map(lambda leaf, spec: leaf.reshape(spec.shape), params, specs)
    with in_stages(schedule, repeats, mode="train") as pm:
        stored = pm.shard(params, specs, role="param")
        program = step.lower(stored, pm.shard(tokens, sw.BATCH, sw.QUERY_LENGTH)).compile()
        got = program(stored, pm.shard(tokens, sw.BATCH, sw.QUERY_LENGTH))
    for own, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        values = np.reshape(own, other.shape)
        np.testing.assert_allclose(values, other, rtol=1e-4, atol=1e-4 * float(np.abs(other).max()))
    kinds = {each.kind for each in read_collectives(program, pm.mesh) if "pp" in each.mesh_axes}
    assert Kind.PERMUTE in kinds


def test_stages_send_their_results(tmp_path: Path) -> None:
    sizes = read_config(small_config(CONFIGS / "llama-3-8b.json", tmp_path, num_hidden_layers=4))
    train = programs(sizes, batch=16, length=8)["train"]
    with in_stages("gpipe", 1, mode="train"):
        assert "ppermute" in str(jax.make_jaxpr(train.function)(*train.shapes))


def test_what_no_stage_runs_is_refused(tmp_path: Path) -> None:
    sizes = read_config(small_config(CONFIGS / "llama-3-8b.json", tmp_path, num_hidden_layers=4))
    made = programs(sizes, batch=16, length=8)
    line = "fsdp_pp.toml:34"
    with (
        in_stages("circular", 2, mode="train"),
        raises(sw.LayerError, "repeats = 2", path="layers", rule=line, fix="repeats=2"),
    ):
        jax.eval_shape(made["train"].function, *made["train"].shapes)
    for mode in ("prefill", "decode"):
        with (
            in_stages("gpipe", 1, mode=mode),
            raises(sw.LayerError, "gpipe", path="layers", rule=line, fix='schedule = "none"'),
        ):
            jax.eval_shape(made[mode].function, *made[mode].shapes)
        with in_stages("none", 1, mode=mode):
            jax.eval_shape(made[mode].function, *made[mode].shapes)
