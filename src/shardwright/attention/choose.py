"""Which implementation serves a call, and why the others do not: a value that can be printed."""

from __future__ import annotations

import dataclasses

from shardwright.attention.call import AttentionCall
from shardwright.attention.kernels.allgather_kv import AllGatherKVAttention
from shardwright.attention.kernels.blockwise import BlockwiseAttention
from shardwright.attention.kernels.flash_decode import FlashDecodeAttention
from shardwright.attention.kernels.ring import RingAttention
from shardwright.attention.kernels.sdpa import CudnnAttention, SdpaAttention
from shardwright.attention.kernels.splash import SplashAttention
from shardwright.attention.kernels.ulysses import UlyssesAttention
from shardwright.attention.kernels.vanilla import VanillaAttention
from shardwright.attention.registry import AttentionImpl, AttentionRegistry, impl_names
from shardwright.errors import AttentionError
from shardwright.resolution.decisions import RuleRef
from shardwright.resolution.rules import OWN_ATTENTION
from shardwright.vocabulary.modes import MODE_DECODE, mode_name

AUTO = "auto"
# One line for each implementation that comes with the package.
SHIPPED: tuple[type[AttentionImpl], ...] = (
    VanillaAttention,
    BlockwiseAttention,
    RingAttention,
    UlyssesAttention,
    AllGatherKVAttention,
    FlashDecodeAttention,
    SdpaAttention,
    CudnnAttention,
    SplashAttention,
)
# All keys of a shard's sequences, up to this many bytes, are gathered without a thought.
_GATHER_BYTES = 16 * 2**20
# On a GPU, float32 logits of one device up to this many bytes are computed at once.
_LOGIT_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An implementation that cannot serve a call, and why."""

    name: str
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What serves a call. Print it.

    Attributes:
      name: the implementation, or empty if none can.
      why: what decided.
      refusals: those that cannot, each with every reason.
      passed_over: those that could too, in the order in which they would have come.
      call: what was asked.
      instead: where one was named and refuses, what "auto" says of the call; else None.
      line: the line of the strategy that named it, or None.
      inner: which kernel runs on each shard, and why not the platform's own; empty where there is no choice.
    """

    name: str
    why: str
    refusals: tuple[Refusal, ...]
    passed_over: tuple[str, ...]
    call: AttentionCall
    instead: Choice | None = None
    line: RuleRef | None = None
    inner: str = ""

    def __str__(self) -> str:
        call = self.call
        lines = [
            f"{self.name or ('no implementation' if self.instead is None else 'refused')}   {self.why}",
            f"  call  {_shape(call)}, {_dtypes(call)}, {mode_name(call.mode)}, {call.platform}",
        ]
        if call.mesh is not None:
            lines.append(f"  lies  {_lies(call)}; {call.specs.why}")
        lines += [f"  runs  {self.inner}"] if self.inner else []
        lines += [f"  also  {', '.join(self.passed_over)}"] if self.passed_over else []
        lines += [
            f"  not   {refusal.name}: {reason}"
            for refusal in self.refusals
            for reason in refusal.reasons
        ]
        if self.instead is not None:
            lines.append(f"  auto  {self.instead.name or 'no implementation'}: {self.instead.why}")
        return "\n".join(lines)

    def require(self) -> type[AttentionImpl]:
        """Return the implementation.

        Raises:
          AttentionError: the one that was named refuses, or none can serve the call; with every reason.
        """
        if self.name:
            return AttentionRegistry.get(self.name)
        about = str(self).partition("\n")[2]
        if self.instead is None:
            raise AttentionError(
                f"no attention implementation can serve this call: {self.why}", snippet=about
            )
        fix = "change the call: nothing else serves it either"
        if self.instead.name:
            there = "" if self.line is None else f', and so does {self.line.key} = "auto" there'
            fix = f'implementation="auto" takes {self.instead.name}{there}'
        raise AttentionError(self.why, snippet=about, fix=fix)


def choose(
    call: AttentionCall, *, implementation: str = AUTO, line: RuleRef | None = None
) -> Choice:
    """Choose an implementation, by name or by what suits the call best.

    Args:
      call: what is asked.
      implementation: a name, or "auto".
      line: the line of the strategy that names it, or None: the call does.

    Raises:
      AttentionError: an unknown name.
    """
    if implementation != AUTO:
        found = AttentionRegistry.get(
            implementation.removeprefix(OWN_ATTENTION), line="" if line is None else str(line)
        )
        name, reasons = impl_names(found)[0], found.refusals(call)
        refusals = (Refusal(name=name, reasons=reasons),) if reasons else ()
        if line is None:
            why = f"{name} was asked for by name and refuses" if reasons else "asked for by name"
        else:
            why = f"the strategy says {line}{', and it refuses' if reasons else ''}"
        instead = choose(call) if reasons else None
        inner = "" if reasons else found.inner(call)
        return Choice(
            name="" if reasons else name,
            why=why,
            refusals=refusals,
            passed_over=(),
            call=call,
            instead=instead,
            line=line,
            inner=inner,
        )
    able, refusals_found, reasons_why = [], [], dict(_preference(call))
    known = dict.fromkeys(
        impl_names(AttentionRegistry.get(name))[0]
        for name in AttentionRegistry.list_implementations()
    )
    for name in [
        *(name for name in reasons_why if name in known),
        *(name for name in known if name not in reasons_why),
    ]:
        reasons = AttentionRegistry.get(name).refusals(call)
        if reasons:
            refusals_found.append(Refusal(name=name, reasons=reasons))
        elif name in reasons_why:
            able.append(name)
    return Choice(
        name=able[0] if able else "",
        why=reasons_why[able[0]] if able else "all refuse",
        refusals=tuple(refusals_found),
        passed_over=tuple(able[1:]),
        call=call,
        inner=AttentionRegistry.get(able[0]).inner(call) if able else "",
    )


def _preference(call: AttentionCall) -> list[tuple[str, str]]:
    """Return the implementations to try, best first, each with what speaks for it."""
    last = [("vanilla", f"all {_logit_bytes(call) / 2**20:.1f} MiB of logits per device at once")]
    if call.return_weights:
        return [("vanilla", "only it returns weights")]
    combined = (
        "flash_decode",
        f"the keys lie over {'+'.join(call.specs.kv_length)}: partial softmaxes are combined",
    )
    if call.specs.kv_length and (call.mode == MODE_DECODE or not call.specs.q_length):
        return [combined, *last]
    if call.specs.q_length or call.specs.kv_length:
        return [*_sequence_parallel(call), *last]
    fast = {
        "tpu": [("splash", "the TPU's own kernel")],
        "gpu": [("cudnn", "the GPU's own kernel")],
    }.get(call.platform, [])
    if call.recipe.cached is not None:  # the TPU's kernel wants it in another order
        return [("blockwise", "it reads a cache in the order in which it lies"), *fast, *last]
    if call.platform == "gpu":
        return [*fast, *_without_cudnn(call), *last]
    return [*fast, ("blockwise", "memory linear in length"), *last]


def _without_cudnn(call: AttentionCall) -> list[tuple[str, str]]:
    """Rank what XLA makes of a call for a GPU: all logits at once are faster while they are few."""
    logits = _logit_bytes(call)
    if logits > _LOGIT_BYTES:
        many = f"all logits at once would take {logits / 2**20:.1f} MiB per device, more than {_LOGIT_BYTES // 2**20}"
        return [("blockwise", f"memory linear in length: {many}"), ("sdpa", "XLA's own")]
    few = f"XLA's own: all {logits / 2**20:.1f} MiB of logits per device at once"
    return [("sdpa", few), ("blockwise", "memory linear in length")]


def _sequence_parallel(call: AttentionCall) -> list[tuple[str, str]]:
    """Rank the ways to attend over a sharded sequence, by bytes sent."""
    shards = call.shards(call.specs.kv_length or call.specs.q_length)
    local = (
        call.kv_heads
        / call.shards(call.specs.kv_heads)
        * call.batch
        / call.shards(call.specs.batch)
    )
    gathered = int(
        local
        * call.kv_length
        * (call.head_dim + call.v_dim)
        * (4 if call.dtype == "float32" else 2)
    )
    even = 1 + call.heads / call.kv_heads
    ulysses = (
        "ulysses",
        f"{shards} shards are more than 1 + heads / kv_heads = {even:g}: it sends fewer bytes than a ring",
    )
    ring = (
        "ring",
        f"{shards} shards are no more than 1 + heads / kv_heads = {even:g}: it sends no more bytes than all-to-alls",
    )
    whole = not call.specs.kv_length
    gather = (
        "allgather_kv",
        "every device has all keys already: nothing is gathered"
        if whole
        else f"the gathered keys take {gathered / 2**20:.1f} MiB per device: one collective, a ring's bytes",
    )
    rest = [ulysses, ring] if shards > even else [ring, ulysses]
    return [gather, *rest] if gathered <= _GATHER_BYTES else [*rest, gather]


def _logit_bytes(call: AttentionCall) -> int:
    specs = call.specs
    per = (
        call.shards(specs.batch)
        * call.shards(specs.heads)
        * call.shards(tuple(dict.fromkeys((*specs.q_length, *specs.kv_length))))
    )
    return 4 * call.batch * call.heads * call.q_length * call.kv_length // per


def _shape(call: AttentionCall) -> str:
    dims = str(call.head_dim) if call.head_dim == call.v_dim else f"{call.head_dim}/{call.v_dim}"
    return f"batch {call.batch}, {call.q_length} x {call.kv_length}, heads {call.heads}/{call.kv_heads}, head_dim {dims}"


def _dtypes(call: AttentionCall) -> str:
    return call.dtype if call.kv_dtype is None else f"{call.dtype} with {call.kv_dtype} keys"


def _lies(call: AttentionCall) -> str:
    specs = call.specs
    named = {
        "batch": specs.batch,
        "q_length": specs.q_length,
        "kv_length": specs.kv_length,
        "heads": specs.heads,
        "kv_heads": specs.kv_heads,
    }
    return (
        ", ".join(f"{name} {'+'.join(axes)}" for name, axes in named.items() if axes)
        or "on every device whole"
    )
