"""Thirty small programs in the styles of other authors, planned and compiled.

    python -m tests.plan.foreign_programs [--cpu] [name ...]

prints one line per program: whether the plan is marked, what it states and what the compiler sends.
Programs are compiled for a v5e:2x4, which needs libtpu (the extra `tpu-aot`). With `--cpu`, they
are compiled for eight CPU devices. `tpu_memory` compares their memory.
"""

from __future__ import annotations

import os
import sys

from tests.tpu_compile import SETTINGS, TOPOLOGY, tell, tpu_mesh

if __name__ == "__main__" and "--cpu" not in sys.argv:
    os.environ.update(SETTINGS)  # libtpu reads them when it is loaded

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.plan.collectives.read import read_collectives
from shardwright.plan.planner import PlanReport
from shardwright.show.plan import unsure_lines

F32, I32 = jnp.float32, jnp.int32
# CPUs send bfloat16 as float32.
BF16 = F32 if "--cpu" in sys.argv else jnp.bfloat16
B, S, D, F, H, K, V = 16, 512, 1024, 4096, 8, 128, 8192
HID = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
INNER = (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
HEADS = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)
KEYS = (sw.BATCH, sw.KV_LENGTH, sw.HEAD, sw.HEAD_DIM)
LOGITS = (sw.BATCH, sw.QUERY_LENGTH, sw.VOCAB)
TOKENS = (sw.BATCH, sw.QUERY_LENGTH)

FSDP, TP, TENSOR = {"fsdp": 8}, {"fsdp": 4, "tp": 2}, {"tp": 8}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A program, and how it runs.

    Attributes:
      function: `(weights, *arrays) -> result`. If `grad`, the result is a loss.
      weights: A tree of specs.
      inputs: Annotation, shape and dtype of each array.
      preset: Name of a preset, or a strategy.
      mesh: Sizes of the mesh axes.
      grad: Whether its gradient runs.
    """

    function: Callable[..., Any]
    weights: Any
    inputs: tuple[tuple[Any, tuple[int, ...], Any], ...]
    preset: str | sw.Strategy = "fsdp"
    mesh: Mapping[str, int] = dataclasses.field(default_factory=lambda: FSDP)
    grad: bool = True


PROGRAMS: dict[str, Foreign] = {}
WORDS: Final = ((TOKENS, (B, S), I32),)
STATES: Final = ((HID, (B, S, D), BF16),)


def program(weights: Mapping[str, Any], *, inputs: Any = STATES, **options: Any) -> Any:
    """Register a function as a program, once for each of the `meshes`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        PROGRAMS[name] = Foreign(function=function, weights=weights, inputs=inputs, **options)
        return function

    return register


def spec(*sizes: int, axes: Any, dtype: Any = BF16) -> sw.ArraySpec:
    return sw.ArraySpec(sizes, dtype, axes)


UP = spec(D, F, axes=(sw.EMBED, sw.MLP_INTERMEDIATE))
DOWN = spec(F, D, axes=(sw.MLP_INTERMEDIATE, sw.EMBED))
TABLE = spec(V, D, axes=(sw.VOCAB, sw.EMBED))
HEAD = spec(D, V, axes=(sw.EMBED, sw.VOCAB))
PROJ = spec(D, H, K, axes=(sw.EMBED, sw.HEAD, sw.HEAD_DIM))
OUT = spec(H, K, D, axes=(sw.HEAD, sw.HEAD_DIM, sw.EMBED))
SCALE = spec(D, axes=(sw.NORM,), dtype=F32)


def loss_of(x: Any) -> Any:
    return jnp.mean(jnp.square(x.astype(F32)))


def cross_entropy(logits: Any, labels: Any) -> Any:
    logits = logits.astype(F32)
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


def rms(x: Any, scale: Any) -> Any:
    wide = x.astype(F32)
    norm = lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * norm * scale).astype(x.dtype)


def attend(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(F32) * K**-0.5
    mask = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30)).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


# 1 to 6: feed-forward layers.
@program({"up": UP, "down": DOWN})
def gelu_mlp(w: Any, x: Any) -> Any:
    """GPT-2, in equinox' style: weights are used as they are."""
    w = sw.gather(w, {"up": UP, "down": DOWN})
    return loss_of(x + jax.nn.gelu(x @ w["up"]) @ w["down"])


@program({"up": UP, "down": DOWN}, preset="fsdp_tp", mesh=TP)
def squared_relu(w: Any, x: Any) -> Any:
    w = sw.gather(w, {"up": UP, "down": DOWN})
    h = sw.shard(jnp.square(jax.nn.relu(sw.shard(x, HID) @ w["up"])), INNER)
    return loss_of(sw.shard(h @ w["down"], HID))


GLU = spec(D, 2, F, axes=(sw.EMBED, sw.EMPTY, sw.MLP_INTERMEDIATE))


@program({"both": GLU, "down": DOWN}, preset="fsdp_tp", mesh=TP)
def fused_gate(w: Any, x: Any) -> Any:
    """Gemma in flax: gate and up in one weight."""
    w = sw.gather(w, {"both": GLU, "down": DOWN})
    both = jnp.einsum("bsd,dcf->cbsf", sw.shard(x, HID), w["both"])
    both = sw.shard(both, sw.EMPTY, *INNER)
    return loss_of(sw.shard((jax.nn.gelu(both[0]) * both[1]) @ w["down"], HID))


@program({"gate": UP, "up": UP, "down": DOWN})
def two_matmuls_of_one_input(w: Any, x: Any) -> Any:
    w = sw.gather(w, {"gate": UP, "up": UP, "down": DOWN})
    x = sw.shard(x, HID)
    return loss_of((jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"])


@program({"up": UP, "down": DOWN}, inputs=STATES * 2, preset="fsdp_tp", mesh=TP)
def two_inputs_of_one_matmul(w: Any, x: Any, y: Any) -> Any:
    w = sw.gather(w, {"up": UP, "down": DOWN})
    a, b = (sw.shard(jnp.tanh(sw.shard(each, HID) @ w["up"]), INNER) for each in (x, y))
    return loss_of(sw.shard((a * b) @ w["down"], HID))


@program({"up": UP, "down": DOWN}, preset="tensor", mesh=TENSOR, grad=False)
def megatron_forward(w: Any, x: Any) -> Any:
    h = sw.shard(jax.nn.gelu(sw.shard(x, HID) @ w["up"]), INNER)
    return sw.shard(h @ w["down"], HID)


# 7 to 14: attention.
QKV = spec(D, 3, H, K, axes=(sw.EMBED, sw.EMPTY, sw.HEAD, sw.HEAD_DIM))


@program({"qkv": QKV, "o": OUT}, preset="fsdp_tp", mesh=TP)
def fused_qkv(w: Any, x: Any) -> Any:
    w = sw.gather(w, {"qkv": QKV, "o": OUT})
    qkv = jnp.einsum("bsd,dchk->cbshk", sw.shard(x, HID), w["qkv"])
    q, k, v = sw.shard(qkv, sw.EMPTY, *HEADS)
    mixed = sw.shard(attend(q, k, v), HEADS)
    return loss_of(sw.shard(jnp.einsum("bshk,hkd->bsd", mixed, w["o"]), HID))


FLAT = spec(D, 3 * H * K, axes=(sw.EMBED, sw.HEAD))


@program({"qkv": FLAT, "o": OUT})
def fused_flat_qkv(w: Any, x: Any) -> Any:
    """MiniGPT: one matrix, split after the matmul."""
    w = sw.gather(w, {"qkv": FLAT, "o": OUT})
    q, k, v = (a.reshape(B, S, H, K) for a in jnp.split(x @ w["qkv"], 3, -1))
    return loss_of(x + jnp.einsum("bshk,hkd->bsd", attend(q, k, v), w["o"]))


ATTENTION = {"q": PROJ, "k": PROJ, "v": PROJ, "o": OUT}


def heads_of(w: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[n]) for n in "qkv")
    q, k, v = sw.shard(q, HEADS), sw.shard(k, KEYS), sw.shard(v, KEYS)
    return jnp.einsum("bshk,hkd->bsd", sw.shard(attend(q, k, v), HEADS), w["o"])


BLOCK = {**ATTENTION, "gate": UP, "up": UP, "down": DOWN}


@program(BLOCK, preset="fsdp_tp", mesh=TP)
def parallel_block(w: Any, x: Any) -> Any:
    """PaLM and GPT-J: attention and feed-forward read one input."""
    w, x = sw.gather(w, BLOCK), sw.shard(x, HID)
    inner = sw.shard(jax.nn.silu(x @ w["gate"]) * (x @ w["up"]), INNER)
    return loss_of(sw.shard(x + heads_of(w, x) + inner @ w["down"], HID))


NORMED = {**BLOCK, "first": SCALE, "second": SCALE}


def llama_layer(w: Any, x: Any) -> Any:
    x = sw.shard(x + heads_of(w, rms(x, w["first"])), HID)
    h = rms(x, w["second"])
    inner = sw.shard(jax.nn.silu(h @ w["gate"]), INNER) * sw.shard(h @ w["up"], INNER)
    return sw.shard(x + inner @ w["down"], HID)


@program(NORMED, preset="fsdp_tp", mesh=TP)
def llama_block(w: Any, x: Any) -> Any:
    return loss_of(llama_layer(sw.gather(w, NORMED), sw.shard(x, HID)))


@program(NORMED)
def llama_block_with_remat(w: Any, x: Any) -> Any:
    return loss_of(jax.checkpoint(lambda w, x: llama_layer(sw.gather(w, NORMED), x))(w, x))


STACK = {
    name: dataclasses.replace(each, shape=(4, *each.shape), axes=(sw.LAYERS, *each.axes))
    for name, each in NORMED.items()
}


@program(STACK)
def scanned_layers(w: Any, x: Any) -> Any:
    """Levanter and MaxText: one layer, scanned with remat."""

    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        return llama_layer(sw.gather(w, NORMED), x), None

    return loss_of(lax.scan(layer, sw.shard(x, HID), w)[0])


GQA = {
    "q": PROJ,
    "k": spec(D, 2, K, axes=(sw.EMBED, sw.KV_HEAD, sw.KV_HEAD_DIM)),
    "v": spec(D, 2, K, axes=(sw.EMBED, sw.KV_HEAD, sw.KV_HEAD_DIM)),
    "o": OUT,
}


@program(GQA)
def grouped_queries(w: Any, x: Any) -> Any:
    """jax-llm-examples: groups of queries, without a repeat of the keys."""
    w = sw.gather(w, GQA)
    q = jnp.einsum("bsd,dhk->bshk", x, w["q"]).reshape(B, S, 2, H // 2, K)
    k, v = (jnp.einsum("bsd,dhk->bshk", x, w[n]) for n in "kv")
    scores = jax.nn.softmax(jnp.einsum("bqgrk,bsgk->bgrqs", q, k).astype(F32) * K**-0.5)
    mixed = jnp.einsum("bgrqs,bsgk->bqgrk", scores.astype(BF16), v).reshape(B, S, H, K)
    return loss_of(jnp.einsum("bshk,hkd->bsd", mixed, w["o"]))


@program(ATTENTION, inputs=STATES * 2, preset="fsdp_tp", mesh=TP)
def cross_attention(w: Any, x: Any, memory: Any) -> Any:
    """T5: keys and values of another sequence."""
    w = sw.gather(w, ATTENTION)
    q = sw.shard(jnp.einsum("bsd,dhk->bshk", sw.shard(x, HID), w["q"]), HEADS)
    k, v = (sw.shard(jnp.einsum("bsd,dhk->bshk", sw.shard(memory, HID), w[n]), KEYS) for n in "kv")
    mixed = sw.shard(attend(q, k, v), HEADS)
    return loss_of(sw.shard(jnp.einsum("bshk,hkd->bsd", mixed, w["o"]), HID))


# 15 to 21: embeddings and heads.
@program({"table": TABLE}, inputs=WORDS)
def embedding(w: Any, tokens: Any) -> Any:
    table = sw.gather(w["table"], sw.VOCAB, sw.EMBED)
    return loss_of(sw.shard(jnp.take(table, tokens, axis=0), HID))


@program({"table": TABLE}, inputs=WORDS, preset="fsdp_tp", mesh=TP)
def embedding_over_two_axes(w: Any, tokens: Any) -> Any:
    table = sw.gather(w["table"], sw.VOCAB, sw.EMBED)
    return loss_of(sw.shard(table[tokens], HID))


@program({"table": TABLE}, inputs=WORDS * 2)
def tied_heads(w: Any, tokens: Any, labels: Any) -> Any:
    """GPT-2: one table embeds and predicts."""
    table = sw.gather(w["table"], sw.VOCAB, sw.EMBED)
    x = sw.shard(table[tokens], HID)
    return cross_entropy(sw.shard(x @ table.T, LOGITS), labels)


@program({"table": TABLE}, inputs=WORDS * 2, preset="fsdp_tp", mesh=TP)
def tied_heads_over_two_axes(w: Any, tokens: Any, labels: Any) -> Any:
    return tied_heads(w, tokens, labels)


WIDE = spec(32000, 512, axes=(sw.VOCAB, sw.EMBED))


@program({"table": WIDE}, inputs=((TOKENS, (8, 8192), I32),))
def vocabulary_of_32000(w: Any, tokens: Any) -> Any:
    table = sw.gather(w["table"], sw.VOCAB, sw.EMBED)
    return loss_of(sw.shard(table[tokens], HID))


@program({"head": HEAD}, inputs=(*STATES, *WORDS), preset="fsdp_tp", mesh=TP)
def head_over_vocabulary(w: Any, x: Any, labels: Any) -> Any:
    head = sw.gather(w["head"], sw.EMBED, sw.VOCAB)
    logits = sw.shard(sw.shard(x, HID) @ head, LOGITS).astype(F32)
    hot = jax.nn.one_hot(labels, V, dtype=F32)
    return (jax.nn.logsumexp(logits, -1) - (logits * hot).sum(-1)).mean()


PLACES = spec(S, D, axes=(sw.EMPTY, sw.EMBED))


@program({"table": TABLE, "places": PLACES}, inputs=WORDS)
def learned_positions(w: Any, tokens: Any) -> Any:
    """BERT: the embeddings of words and of positions, added."""
    w = sw.gather(w, {"table": TABLE, "places": PLACES})
    return loss_of(sw.shard(w["table"][tokens] + w["places"][None], HID))


@program({"table": TABLE}, inputs=WORDS, grad=False)
def one_hot_embedding(w: Any, tokens: Any) -> Any:
    """MaxText: a matmul in place of a lookup."""
    table = sw.gather(w["table"], sw.VOCAB, sw.EMBED)
    return sw.shard(jax.nn.one_hot(tokens, V, dtype=BF16) @ table, HID)


# 22 to 25: experts.
E = 8
GATE = spec(D, E, axes=(sw.EMPTY, sw.EMPTY), dtype=F32)
EXPERTS = {
    "gate": GATE,
    "up": spec(E, D, 512, axes=(sw.EXPERT, sw.EMPTY, sw.EMPTY)),
    "down": spec(E, 512, D, axes=(sw.EXPERT, sw.EMPTY, sw.EMPTY)),
}
SLOTS = (sw.EXPERT, sw.EMPTY, sw.EMPTY, sw.EMPTY)


def route(w: Any, x: Any) -> tuple[Any, Any]:
    probabilities = jax.nn.softmax(x.astype(F32) @ w["gate"])
    best, chosen = lax.top_k(probabilities, 1)
    hot = jax.nn.one_hot(chosen[..., 0], E, dtype=F32)
    slot = (jnp.cumsum(hot, 1) * hot).astype(I32) - 1
    sent = jax.nn.one_hot(slot, S // E, dtype=BF16)
    return sent, sent * best[..., None].astype(BF16)


@program(EXPERTS, preset="moe_ep", mesh={"ep": 8}, grad=False)
def one_hot_experts(w: Any, x: Any) -> Any:
    """Switch and flaxformer: tokens are sent to their experts by a matmul with one-hots."""
    x = sw.shard(x, HID)
    sent, back = route(w, x)
    slots = jnp.einsum("bsec,bsd->ebcd", sent, x)
    slots = sw.shard(sw.shard(slots, sw.EMPTY, sw.BATCH, sw.EMPTY, sw.EMBED), SLOTS)
    out = jnp.einsum(
        "ebcf,efd->ebcd", jax.nn.relu(jnp.einsum("ebcd,edf->ebcf", slots, w["up"])), w["down"]
    )
    out = sw.shard(sw.shard(out, SLOTS), sw.EMPTY, sw.BATCH, sw.EMPTY, sw.EMBED)
    return sw.shard(jnp.einsum("bsec,ebcd->bsd", back, out), HID)


@program(EXPERTS, preset="moe_ep", mesh={"ep": 8})
def one_hot_experts_trained(w: Any, x: Any) -> Any:
    return loss_of(one_hot_experts(w, x))


@program(EXPERTS, preset="ddp", mesh={"dp": 8})
def dense_experts(w: Any, x: Any) -> Any:
    """Mixtral in a few lines: every expert sees every token."""
    best, chosen = lax.top_k(jax.nn.softmax(x.astype(F32) @ w["gate"]), 2)
    share = (jax.nn.one_hot(chosen, E) * best[..., None]).sum(-2).astype(BF16)
    up = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, w["up"]))
    return loss_of(jnp.einsum("bsef,efd,bse->bsd", up, w["down"], share))


@program({"gate": spec(D, V, axes=(sw.EMPTY, sw.VOCAB))}, preset="tensor", mesh=TENSOR, grad=False)
def top_k_of_logits(w: Any, x: Any) -> Any:
    """Sampling: the best of a sharded vocabulary."""
    return lax.top_k(sw.shard(x[:, -1] @ w["gate"], sw.BATCH, sw.VOCAB), 8)


# 26 to 30: other styles.
@program({"up": UP, "down": DOWN}, preset="fsdp_tp", mesh=TP)
def raw_constraints(w: Any, x: Any) -> Any:
    """Constraints written as PartitionSpecs."""
    pin = lax.with_sharding_constraint
    up, down = pin(w["up"], P(None, "tp")), pin(w["down"], P("tp", None))
    h = pin(pin(x, P("fsdp")) @ up, P("fsdp", None, "tp"))
    return loss_of(pin(jax.nn.gelu(h) @ down, P("fsdp")))


@program(ATTENTION, preset="sequence", mesh={"dp": 2, "sp": 4}, grad=False)
def sequence_parallel(w: Any, x: Any) -> Any:
    """Queries over sequence shards, keys gathered."""
    x = sw.shard(x, HID)
    q, k, v = (sw.shard(jnp.einsum("bsd,dhk->bshk", x, w[n]), HEADS) for n in "qkv")
    k, v = (sw.shard(a, sw.BATCH, sw.EMPTY, sw.HEAD, sw.HEAD_DIM) for a in (k, v))
    return sw.shard(jnp.einsum("bshk,hkd->bsd", attend(q, k, v), w["o"]), HID)


PATCH = spec(16 * 16 * 3, D, axes=(sw.EMPTY, sw.EMBED))
CLASSES = spec(D, 1000, axes=(sw.EMBED, sw.EMPTY))


@program(
    {"patch": PATCH, "first": SCALE, "head": CLASSES},
    inputs=(((sw.BATCH, sw.EMPTY, sw.EMPTY, sw.EMPTY), (64, 224, 224, 3), BF16),),
)
def vision_patches(w: Any, images: Any) -> Any:
    """ViT: patches by a reshape, mean pooling, a classifier."""
    w = {n: sw.gather(w[n], a) for n, a in (("patch", PATCH.axes), ("head", CLASSES.axes))} | {
        "first": w["first"]
    }
    patches = images.reshape(64, 14, 16, 14, 16, 3).transpose(0, 1, 3, 2, 4, 5)
    x = rms(patches.reshape(64, 196, 768) @ w["patch"], w["first"])
    return loss_of(x.mean(1) @ w["head"])


@program({"up": UP, "down": DOWN})
def layer_norm_and_bias(w: Any, x: Any) -> Any:
    """haliax and BERT: means and variances, a residual, dropout with a fixed key."""
    w = sw.gather(w, {"up": UP, "down": DOWN})
    wide = x.astype(F32)
    centered = wide - wide.mean(-1, keepdims=True)
    h = (centered * lax.rsqrt(centered.var(-1, keepdims=True) + 1e-5)).astype(BF16)
    h = jax.nn.gelu(h @ w["up"])
    h = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, h.shape), h, 0)
    return loss_of(x + h @ w["down"])


@program({"up": UP, "down": DOWN})
def microbatches(w: Any, x: Any) -> Any:
    """Gradient accumulation in a loop over parts of the sequence."""
    w = sw.gather(w, {"up": UP, "down": DOWN})

    def part(total: Any, x: Any) -> Any:
        return total + loss_of(jax.nn.gelu(x @ w["up"]) @ w["down"]), None

    parts = sw.shard(x, HID).reshape(B, 4, S // 4, D).swapaxes(0, 1)
    parts = sw.shard(parts, sw.EMPTY, *HID)
    return lax.scan(part, jnp.zeros((), F32), parts)[0]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A plan beside its compiled program.

    Attributes:
      name: Name of the program.
      marks: Why the plan is unsure of what is sent.
      differences: "kind over axes" -> planned and compiled bytes, where they differ.
    """

    name: str
    marks: list[str]
    differences: dict[str, tuple[int, int]]


def plan(case: Foreign, *, tpu: bool = True) -> PlanReport:
    """Return the plan of a program."""
    function, given, outputs = _given(case)
    pm = sw.PartitionManager(_strategy(case), mesh=sw.abstract_mesh(dict(case.mesh)))
    specs = (case.weights, *(axes for axes, _, _ in case.inputs))
    options = {"topology": TOPOLOGY} if tpu else {}
    report: PlanReport = pm.plan(function, *given, specs=specs, outputs=outputs, **options)
    return report


def jaxpr_of(case: Foreign) -> Any:
    """Return the program as JAX traces it, with its constraints."""
    function, given, _ = _given(case)
    with sw.PartitionManager(_strategy(case), mesh=sw.abstract_mesh(dict(case.mesh))):
        return jax.make_jaxpr(function)(*given).jaxpr


def compile_for_tpus(case: Foreign) -> Any:
    """Compile a program for TPUs."""
    lowered = _traced(case, tpu_mesh(**case.mesh)).lower(lowering_platforms=("tpu",))
    # Low effort sends the same bytes within 1%, and takes a quarter of the time.
    return lowered.compile(compiler_options={"exec_time_optimization_effort": -1.0})


def _strategy(case: Foreign) -> sw.Strategy:
    given = case.preset
    return given if isinstance(given, sw.Strategy) else sw.Strategy.preset(given)


def _given(case: Foreign) -> tuple[Callable[..., Any], list[Any], Any]:
    """Return what runs, the shapes of its arguments, and the annotations of its outputs."""
    weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), case.weights)
    given = [jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in case.inputs]
    function = jax.grad(case.function) if case.grad else case.function
    return function, [weights, *given], case.weights if case.grad else None


def _traced(case: Foreign, mesh: Any) -> Any:
    function, (weights, *given), outputs = _given(case)
    pm = sw.PartitionManager(_strategy(case), mesh=mesh)
    with pm:
        arrays = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pm.sharding(axes, shape=x.shape))
            for x, (axes, _, _) in zip(given, case.inputs, strict=True)
        ]
        ends = {"out_shardings": pm.shardings(weights, outputs, role=None)} if case.grad else {}
        return jax.jit(function, **ends).trace(pm.abstract(case.weights), *arrays)


def compare(name: str, case: Foreign, *, tpu: bool) -> Compared:
    """Plan and compile a program."""
    report = plan(case, tpu=tpu)
    if tpu:
        mesh, compiled = tpu_mesh(**case.mesh), compile_for_tpus(case)
    else:
        mesh = sw.create_mesh(dict(case.mesh))
        compiled = _traced(case, mesh).lower().compile()
    planned: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for event in report.events:
        planned[_row(str(event.kind), event.mesh_axes, tpu)] += event.logical_bytes * event.runs
    for each in read_collectives(compiled, mesh):
        sent[_row(str(each.kind), each.mesh_axes, tpu)] += each.total_bytes or 0
    for axes_sent in {each.mesh_axes for each in report.events}:
        _join_parts(
            planned, sent, "+".join(axes_sent), math.prod(case.mesh[axis] for axis in axes_sent)
        )
    if tpu:
        _join_sums(planned, sent)
    rows = sorted(planned.keys() | sent.keys())
    return Compared(
        name=name,
        marks=[line for line in unsure_lines(report) if not line.startswith("idle")],
        differences={row: (planned[row], sent[row]) for row in rows if planned[row] != sent[row]},
    )


def _join_parts(planned: Counter[str], sent: Counter[str], axes: str, devices: int) -> None:
    """Count the permutes of a collective matmul as the reduce-scatter that they take the place of.

    The partitioner for TPUs multiplies part by part, and sends each part while it multiplies the
    next one. A device does not send its own part. If sums are added, there are more parts.
    """
    scatter, permute = f"reduce_scatter over {axes}", f"permute over {axes}"
    missing = planned[scatter] - sent[scatter]
    parts = sent[permute] - planned[permute]
    if missing > 0 and (devices - 1) / devices <= parts / missing < 2:
        sent[scatter] += missing
        sent[permute] -= parts


def _join_sums(planned: Counter[str], sent: Counter[str]) -> None:
    """Count a sum over two mesh axes as the two sums of the plan.

    XLA's partitioner adds over one mesh axis after the other. The compiler for TPUs then folds both
    all-reduces into one.
    """
    for row in [row for row in sent if row.startswith("all_reduce over ") and "+" in row]:
        parts = [f"all_reduce over {axis}" for axis in row.split()[-1].split("+")]
        folded = sent[row] - planned[row]
        if 0 < folded <= min(planned[part] - sent[part] for part in parts):
            sent[row] -= folded
            sent.update(dict.fromkeys(parts, folded))


def _row(kind: str, axes: tuple[str, ...], tpu: bool) -> str:
    # XLA:CPU makes no reduce-scatter: it has an all-reduce, of which each device keeps its part.
    kind = "all_reduce" if kind == "reduce_scatter" and not tpu else kind
    return f"{kind} over {'+'.join(axes)}"


def main(names: list[str], *, tpu: bool) -> None:
    """Compare programs, and print a line of JSON for each."""
    for name in names or PROGRAMS:
        tell(compare(name, PROGRAMS[name], tpu=tpu))


if __name__ == "__main__":
    if "--cpu" in sys.argv:
        from shardwright.testing import virtual_devices

        virtual_devices(8)
    main([each for each in sys.argv[1:] if each != "--cpu"], tpu="--cpu" not in sys.argv)
