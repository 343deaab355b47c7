"""Plan programs of other authors, compile them, and compare the collectives of both.

    PYTHONPATH=src:. python tools/public_models.py CHECKOUTS [--tpu | --primitives] [NAME ...]

CHECKOUTS holds a working tree OWNER/NAME for each repository. Each program runs with the code of
its authors: weights are stored sharded, and gathered before use where the authors' own rules do not
place them. It is planned on two meshes, and compiled for eight CPU devices, or with --tpu for a
v5e:2x4, and a table is printed. With --primitives, nothing is compiled: the table has the
primitives of these programs and of those in tests/plan/foreign_programs.py, and says which
primitives a plan does not know. benchmarks/results/public_models.md has all tables, and the
commits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import jax
import jax.numpy as jnp
from foreign_code import (
    MESHES,
    TOKENS,
    WORDS,
    B,
    D,
    S,
    V,
    equinox,
    importing,
    leaves,
    linen,
    name_of,
    nnx_model,
    notebook,
    one_hot_loss,
    picked,
    without_init,
)

import shardwright as sw
from shardwright.testing import virtual_devices
from tests.plan.foreign_programs import PROGRAMS, Compared, Foreign, compare, jaxpr_of, plan
from tests.tpu_compile import SETTINGS

BUILDERS: dict[str, Callable[[Path], tuple[Any, ...]]] = {}


def model(repository: str) -> Callable[[Any], Any]:
    def register(build: Any) -> Any:
        build.repository = repository
        BUILDERS[build.__name__] = build
        return build

    return register


@model("google/flax")
def lm1b(at: Path) -> tuple[Any, ...]:
    with importing(at / "examples/lm1b", "models") as (models,):
        config = models.TransformerConfig(
            vocab_size=V, output_vocab_size=V, emb_dim=D, qkv_dim=D, mlp_dim=4 * D, num_layers=1
        )
        return linen(
            models.TransformerLM(config), lambda apply, x: one_hot_loss(apply(x), x), WORDS
        )


@model("google/flax")
def wmt(at: Path) -> tuple[Any, ...]:
    with importing(at / "examples/wmt", "models") as (models,):
        config = models.TransformerConfig(
            vocab_size=V,
            output_vocab_size=V,
            emb_dim=D,
            qkv_dim=D,
            mlp_dim=4 * D,
            num_layers=1,
            share_embeddings=True,
            deterministic=True,
            logits_via_embedding=True,
        )
        return linen(
            models.Transformer(config),
            lambda apply, x, y: one_hot_loss(apply(x, y), y),
            WORDS,
            WORDS,
        )


@model("google/flax")
def nlp_seq(at: Path) -> tuple[Any, ...]:
    with importing(at / "examples/nlp_seq", "models") as (models,):
        config = models.TransformerConfig(vocab_size=V, output_vocab_size=64, num_layers=1)
        return linen(
            models.Transformer(config),
            lambda apply, x, y: one_hot_loss(apply(inputs=x, train=False), y),
            WORDS,
            WORDS,
        )


@model("google/flax")
def seq2seq(at: Path) -> tuple[Any, ...]:
    with importing(at / "examples/seq2seq", "models") as (models,):
        module = models.Seq2seq(teacher_force=True, hidden_size=512, vocab_size=32, eos_id=1)
        one_hot = ((sw.BATCH, sw.EMPTY, sw.EMPTY), (64, 16, 32), jnp.float32)
        return linen(
            module, lambda apply, x, y: jnp.mean(apply(x, y)[0] * y[:, :-1]), one_hot, one_hot
        )


@model("google/flax")
def imagenet(at: Path) -> tuple[Any, ...]:
    with importing(at / "examples/imagenet", "models") as (models,):
        images = ((sw.BATCH, *[sw.EMPTY] * 3), (32, 64, 64, 3), jnp.float32)
        labels = ((sw.BATCH,), (32,), jnp.int32)
        return linen(
            models.ResNet18(num_classes=1000, dtype=jnp.float32),
            lambda apply, x, y: one_hot_loss(apply(x), y),
            images,
            labels,
            train=False,
        )


@model("google/flax")
def sst2(at: Path) -> tuple[Any, ...]:
    with importing(at / "examples/sst2", "models") as (models,):
        module = models.TextClassifier(
            embedding_size=300,
            hidden_size=256,
            vocab_size=V,
            output_size=1,
            dropout_rate=0.5,
            word_dropout_rate=0.1,
            unk_idx=1,
        )
        words = (TOKENS, (64, 64), jnp.int32)
        lengths = ((sw.BATCH,), (64,), jnp.int32)
        return linen(
            module,
            lambda apply, x, n: jnp.mean(apply(x, n) ** 2),
            words,
            lengths,
            deterministic=True,
        )


@model("google/flax")
def vae(at: Path) -> tuple[Any, ...]:
    with importing(at / "examples/vae", "models") as (models,):
        images = ((sw.BATCH, sw.EMPTY), (128, 784), jnp.float32)

        def loss(apply: Any, x: Any) -> Any:
            recon, mean, logvar = apply(x, jax.random.key(0))
            logs = jax.nn.log_sigmoid(recon)
            bce = -jnp.sum(x * logs + (1 - x) * jnp.log(-jnp.expm1(logs)), -1).mean()
            return bce - 0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar), -1).mean()

        return linen(models.model(20), loss, images)


@model("google-research/big_vision")
def big_vision_vit(at: Path) -> tuple[Any, ...]:
    with importing(at, "big_vision.models.vit") as (vit,):
        module = vit.Model(
            num_classes=1000,
            width=D,
            depth=1,
            mlp_dim=4 * D,
            num_heads=8,
            patch_size=(16, 16),
            pool_type="gap",
            head_zeroinit=False,
        )
        images = ((sw.BATCH, *[sw.EMPTY] * 3), (32, 64, 64, 3), jnp.float32)
        labels = ((sw.BATCH,), (32,), jnp.int32)
        return linen(module, lambda apply, x, y: one_hot_loss(apply(x)[0], y), images, labels)


@model("google-research/big_vision")
def big_vision_mixer(at: Path) -> tuple[Any, ...]:
    with importing(at, "big_vision.models.mlp_mixer") as (mixer,):
        module = mixer.MlpMixer(
            patch_size=(16, 16),
            num_classes=1000,
            num_blocks=1,
            hidden_dim=D,
            tokens_mlp_dim=256,
            channels_mlp_dim=2048,
            model_name=None,
        )
        images = ((sw.BATCH, *[sw.EMPTY] * 3), (32, 128, 128, 3), jnp.float32)
        labels = ((sw.BATCH,), (32,), jnp.int32)
        return linen(module, lambda apply, x, y: one_hot_loss(apply(x)[0], y), images, labels)


IMAGES: Final = ((sw.BATCH, *[sw.EMPTY] * 3), (64, 3, 32, 32), jnp.float32)
LABELS: Final = ((sw.BATCH,), (64,), jnp.int32)


@model("patrick-kidger/equinox")
def equinox_bert(at: Path) -> Any:
    scope = notebook(at / "docs/examples/bert.ipynb")
    config = {
        "vocab_size": V,
        "hidden_size": D,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "intermediate_size": 4 * D,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": S,
        "type_vocab_size": 2,
    }

    def loss(model: Any, words: Any, segments: Any, labels: Any) -> Any:
        keys = jax.random.split(jax.random.key(0), B)
        inputs = {"token_ids": words, "segment_ids": segments}
        return picked(jax.vmap(model, in_axes=(0, None, 0))(inputs, False, keys), labels)

    return equinox(
        lambda: scope["BertClassifier"](config, 2, key=jax.random.key(0)),
        loss,
        WORDS,
        WORDS,
        ((sw.BATCH,), (B,), jnp.int32),
    )


@model("patrick-kidger/equinox")
def equinox_vit(at: Path) -> Any:
    scope = notebook(at / "docs/examples/vision_transformer.ipynb")
    scope.update(patch_size=4, num_patches=64, channels=3)

    def loss(model: Any, images: Any, labels: Any) -> Any:
        keys = jax.random.split(jax.random.key(0), 64)
        return picked(jax.vmap(model, in_axes=(0, None, 0))(images, False, keys), labels)

    def build() -> Any:
        return scope["VisionTransformer"](
            embedding_dim=D,
            hidden_dim=1024,
            num_heads=8,
            num_layers=1,
            dropout_rate=0.1,
            patch_size=4,
            num_patches=64,
            num_classes=16,
            key=jax.random.PRNGKey(0),
        )

    return equinox(build, loss, IMAGES, LABELS)


@model("patrick-kidger/equinox")
def equinox_diffusion(at: Path) -> Any:
    scope = notebook(at / "docs/examples/score_based_diffusion.ipynb")

    def loss(model: Any, images: Any) -> Any:
        return scope["batch_loss_fn"](
            model, lambda t: 1 - jnp.exp(-t), lambda t: t, images, 10.0, jax.random.key(0)
        )

    def build() -> Any:
        return scope["Mixer2d"]((3, 32, 32), 4, 64, 512, 512, 1, 10.0, key=jax.random.key(0))

    return equinox(build, loss, IMAGES)


@model("patrick-kidger/equinox")
def equinox_rnn(at: Path) -> Any:
    scope = notebook(at / "docs/examples/train_rnn.ipynb")

    def loss(model: Any, x: Any, y: Any) -> Any:
        pred = jax.vmap(model)(x)
        return -jnp.mean(y * jnp.log(pred) + (1 - y) * jnp.log(1 - pred))

    return equinox(
        lambda: scope["RNN"](in_size=8, out_size=1, hidden_size=256, key=jax.random.PRNGKey(0)),
        loss,
        ((sw.BATCH, sw.EMPTY, sw.EMPTY), (64, 16, 8), jnp.float32),
        ((sw.BATCH, sw.EMPTY), (64, 1), jnp.float32),
    )


def levanter(at: Path, name: str, build: Callable[[Any], Any]) -> Any:
    """Return the training loss of a model of levanter, with the trainer's two mappings."""
    if "levanter" not in sys.modules:
        without_init("levanter", at / "src/levanter")
    import equinox as eqx
    import haliax as hax

    models = importlib.import_module(f"levanter.models.{name}")
    lm_model = importlib.import_module("levanter.models.lm_model")
    config, module = build(models)
    batch, words = hax.Axis("batch", B), hax.Axis("vocab", V)
    shapes = eqx.filter_eval_shape(lambda: module.init(words, config, key=jax.random.key(0)))
    arrays, rest = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    places = {"embed": sw.EMBED, "mlp": sw.MLP_INTERMEDIATE, "heads": sw.MLP_INTERMEDIATE}
    places |= {"kv_head": sw.MLP_INTERMEDIATE, "vocab": sw.EMPTY}
    specs = {}
    named, _ = jax.tree_util.tree_flatten_with_path(
        arrays, is_leaf=lambda x: isinstance(x, hax.NamedArray)
    )
    for path, x in named:
        key = name_of(path)
        array = x.array if isinstance(x, hax.NamedArray) else x
        axes = [places.get(axis.name, sw.EMPTY) for axis in x.axes] if array is not x else []
        axes += [sw.EMPTY] * (array.ndim - len(axes))
        specs[key] = sw.ArraySpec(array.shape, array.dtype, tuple(axes))

    def loss(w: Any, words: Any) -> Any:
        mapping = {"batch": "fsdp"}
        if "tp" in jax.sharding.get_abstract_mesh().shape:
            mapping |= dict.fromkeys(("mlp", "heads", "kv_head"), "tp")
        constants = mock.patch.object(jax, "ensure_compile_time_eval", contextlib.nullcontext)
        with hax.axis_mapping(mapping), constants:  # --tpu has no device to compute constants on
            tokens = hax.named(words, (batch, config.Pos))
            # JAX no longer takes a mean over the floating-point mask of the model.
            example = lm_model.LmExample(tokens=tokens, loss_mask=None)
            each = lm_model.compute_next_token_loss(eqx.combine(w, rest), example, reduction=None)
            return each.array.mean()

    flat, _ = jax.tree_util.tree_flatten_with_path(arrays)
    keys = [name_of(path) for path, _ in flat]
    specs = {key: specs.get(key) or specs[key.rpartition("/")[0]] for key in keys}
    return leaves(arrays, loss, WORDS, specs=specs)


@model("stanford-crfm/levanter")
def levanter_gpt2(at: Path) -> Any:
    return levanter(
        at,
        "gpt2",
        lambda m: (
            m.Gpt2Config(seq_len=S, hidden_dim=D, num_layers=1, num_heads=8),
            m.Gpt2LMHeadModel,
        ),
    )


@model("stanford-crfm/levanter")
def levanter_llama(at: Path) -> Any:
    return levanter(
        at,
        "llama",
        lambda m: (
            m.LlamaConfig(
                seq_len=S,
                hidden_dim=D,
                intermediate_dim=2048,
                num_layers=1,
                num_heads=8,
                num_kv_heads=4,
            ),
            m.LlamaLMHeadModel,
        ),
    )


def only_fsdp(spec: Any) -> Any:
    return jax.P(*[entry if entry == "fsdp" else None for entry in spec])


@model("google/flax")
def flax_gemma(at: Path, preset: str) -> Any:
    from flax import nnx

    with importing(at / "examples/gemma", "transformer_cfg", "transformer") as found:
        cfg, transformer = found
        kind = cfg.AttentionType
        own = cfg.ShardingConfig.fsdp_tp_sharding(tensor_parallel_axis_name="tp")
        if preset == "fsdp":
            fields = {f.name: getattr(own, f.name) for f in dataclasses.fields(own)}
            own = cfg.ShardingConfig(
                **{n: only_fsdp(x) for n, x in fields.items() if not isinstance(x, str)}
            )
        config = cfg.TransformerConfig.gemma3_1b(
            num_layers=1,
            num_embed=V,
            embed_dim=D,
            hidden_dim=2048,
            num_heads=4,
            num_kv_heads=2,
            head_dim=128,
            attention_types=(kind.LOCAL_SLIDING,),
            sliding_window_size=64,
            shd_config=own,
        )

        def loss(model: Any, words: Any) -> Any:
            valid = words > 0
            logits, _ = model(
                words,
                transformer.build_positions_from_mask(valid),
                None,
                transformer.make_causal_attn_mask(valid),
                rngs=nnx.Rngs(0),
            )
            return picked(logits[:, :-1], words[:, 1:])

        return nnx_model(lambda: transformer.Transformer(config, rngs=nnx.Rngs(0)), loss, WORDS)


@model("jax-ml/bonsai")
def bonsai_qwen3(at: Path, preset: str) -> Any:
    from flax import nnx

    without_init("bonsai.models", at / "bonsai/models")
    with importing(at, "bonsai.models.qwen3.modeling") as (qwen,):
        config = qwen.ModelConfig._from_param(
            use_fsdp=True,
            use_tp=preset == "fsdp_tp",
            num_layers=1,
            vocab_size=V,
            emb_dim=D,
            mlp_dim=2048,
            num_heads=8,
            head_dim=64,
            num_kv_heads=8,
            norm_eps=1e-6,
            rope_theta=1_000_000,
            rope_scaling_factor=8.0,
            local_rope_theta=1e4,
            tie_word_embeddings=False,
        )

        def prefill(model: Any, words: Any) -> Any:
            cache = qwen.init_cache(config, B, S, 0, jnp.float32)
            return model(words, cache=cache, segment_ids=1 * (words != 0))

        return nnx_model(lambda: qwen.Qwen3(config, rngs=nnx.Rngs(0)), prefill, WORDS, grad=False)


@model("jax-ml/bonsai")
def bonsai_mamba2(at: Path) -> Any:
    without_init("bonsai.models", at / "bonsai/models")
    with importing(at, "bonsai.models.mamba2.modeling") as (mamba,):
        from flax import nnx

        config = mamba.ModelConfig(
            vocab_size=V, hidden_size=D, state_size=64, chunk_size=64, num_hidden_layers=1
        )
        return nnx_model(
            lambda: mamba.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)),
            lambda model, words: model(words, labels=words)["loss"],
            WORDS,
        )


# The mesh axes and rules of jax-llm-examples.
LLM_RULES: Final = """
version = 1
name = "jax-llm-examples"
[mesh]
x = 2
y = 2
z = 2
[rules]
batch = "x"
head = "y+z"
kv_head = "y"
mlp_intermediate = "y+z"
vocab = "y+z"
"""
LLM_AXES: Final = {
    "batch": sw.BATCH,
    "q_heads": sw.HEAD,
    "o_heads": sw.HEAD,
    "kv_heads": sw.KV_HEAD,
    "ffw_up": sw.MLP_INTERMEDIATE,
    "ffw_down": sw.MLP_INTERMEDIATE,
    "vocab_out": sw.VOCAB,
}


def llama3(at: Path, preset: str, *, decode: bool) -> Any:
    with importing(at / "llama3", "llama3_jax.model") as (llama,):
        config = llama.Config(
            embed=D,
            ffw_size=2048,
            q_heads=8,
            kv_heads=4,
            num_layers=1,
            head_dim=64,
            vocab_size=V,
            max_seq_len=S,
            causal=True,
            use_prefill_attn_kernel=False,
            use_decode_attn_kernel=False,
            quant_layer=False,
            quant_cache=False,
        )

        def spec(info: Any) -> sw.ArraySpec:
            axes = tuple(LLM_AXES.get(name, sw.EMPTY) for name in info.logical_axes)
            return sw.ArraySpec(info.shape, info.dtype, axes)

        infos = [llama.Weights.abstract(config)]
        if decode:
            infos.append(llama.KVCache.abstract(config, B))
        flat, structure = jax.tree_util.tree_flatten_with_path(infos, is_leaf=llama.is_param)
        specs = {name_of(path): spec(info) for path, info in flat}
        tree = structure.unflatten(
            [jax.ShapeDtypeStruct(info.shape, info.dtype) for _, info in flat]
        )

        def run(tree: Any, words: Any) -> Any:
            weights, cache = (*tree, None)[:2]
            return llama.forward(words, 1 * (words != 0), weights, config, cache)

        words = (TOKENS, (B, 1 if decode else S), jnp.int32)
        # The presets stand for the two meshes.
        mesh = {"x": 2, "y": 2, "z": 2} if preset == "fsdp" else {"x": 1, "y": 4, "z": 2}
        rules = sw.Strategy.loads(LLM_RULES)
        return leaves(tree, run, words, specs=specs, grad=False, preset=rules, mesh=mesh)


@model("jax-ml/jax-llm-examples")
def llama3_prefill(at: Path, preset: str) -> Any:
    return llama3(at, preset, decode=False)


@model("jax-ml/jax-llm-examples")
def llama3_decode(at: Path, preset: str) -> Any:
    return llama3(at, preset, decode=True)


def programs(checkouts: Path, names: list[str]) -> Iterator[tuple[str, Foreign]]:
    """Yield the programs, each on two meshes."""
    for name in names or BUILDERS:
        build = BUILDERS[name]
        for preset, mesh in MESHES.items():
            at = checkouts / build.repository
            own = (preset,) if len(inspect.signature(build).parameters) > 1 else ()
            function, weights, inputs, *rest = build(at, *own)
            options = {"preset": preset, "mesh": mesh, **dict(*rest)}
            text = ",".join(f"{axis}:{size}" for axis, size in options["mesh"].items())
            yield (
                f"{name}@{text}",
                Foreign(function=function, weights=weights, inputs=inputs, **options),
            )


def verdict(compared: Compared) -> str:
    """Return `exact`, `marked` or `DIFFERENT`. A difference of less than 64 bytes does not count.

    A compiler computes a repeated subexpression once, but a plan counts each occurrence. So a plan
    may count the sum of a scalar several times.
    """
    differ = any(abs(planned - sent) >= 64 for planned, sent in compared.differences.values())
    if not differ:
        return "exact"
    return "marked" if compared.marks else "DIFFERENT"


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr, and those of the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def print_primitives(checkouts: Path, names: list[str]) -> None:
    """Print how often each primitive occurs, and in how many programs a plan does not know it."""
    public = {name.partition("@")[0]: case for name, case in programs(checkouts, names)}
    met: dict[str, Counter[str]] = {kind: Counter() for kind in ("public", "small", "all", "not")}
    for kind, cases in (("public", public), ("small", PROGRAMS)):
        for case in cases.values():
            counts = Counter(each.primitive.name for each in _equations(jaxpr_of(case)))
            met[kind].update(counts.keys())
            met["all"].update(counts)
            met["not"].update(plan(case, tpu=False).walked.unknown.keys())
    print(f"| primitive | of {len(public)} | of {len(PROGRAMS)} | equations | incomplete |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in sorted(met["all"].keys() | met["not"].keys(), key=lambda n: (-met["all"][n], n)):
        cells = [met[kind][name] or "" for kind in ("public", "small", "all", "not")]
        print(f"| {name} | {' | '.join(map(str, cells))} |")


def main() -> int:
    names = [each for each in sys.argv[2:] if not each.startswith("--")]
    tpu = "--tpu" in sys.argv
    if "--primitives" in sys.argv:
        print_primitives(Path(sys.argv[1]), names)
        return 0
    counts: Counter[str] = Counter()
    print("| program | mesh | marks | plan | planned and sent bytes that differ |")
    print("| --- | --- | --- | --- | --- |")
    for name, case in programs(Path(sys.argv[1]), names):
        compared = compare(name, case, tpu=tpu)
        counts[verdict(compared)] += 1
        counts["unmarked"] += not compared.marks
        print(row(compared), flush=True)
    print(", ".join(f"{count} {key}" for key, count in counts.items()))
    return 1 if counts["DIFFERENT"] else 0


def row(compared: Compared) -> str:
    name, _, mesh = compared.name.partition("@")
    differences = [f"{k}: {a:,} {b:,}" for k, (a, b) in compared.differences.items()]
    cells = (name, mesh, str(len(compared.marks)), verdict(compared), "; ".join(differences))
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    if "--tpu" in sys.argv:
        os.environ.update(SETTINGS)  # libtpu reads them when it is loaded
        jax.config.update("jax_platforms", SETTINGS["JAX_PLATFORMS"])
    else:
        virtual_devices(8)
    sys.exit(main())
