"""Choose the implementation that serves a call, and say why the others do not."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from shardwright import _jax
from shardwright.attention.call import AttentionCall
from shardwright.attention.implementation import Implementation, find, implementations
from shardwright.attention.kernels import flash_decode
from shardwright.attention.parts.shards import IN_A_PLAN
from shardwright.errors import AttentionError
from shardwright.resolution.decisions import RuleRef
from shardwright.resolution.rules import OWN_ATTENTION
from shardwright.vocabulary.modes import MODE_DECODE, mode_name

AUTO: Final = "auto"
# All-gather keys and values if, for the heads and sequences of one device, they take at most this
# many bytes.
_GATHER_BYTES: Final = 16 * 2**20
# On a GPU, compute all float32 logits of a device at once if they take at most this many bytes.
_LOGIT_BYTES: Final = 64 * 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RefusedImplementation:
    """An implementation that cannot serve a call, with the reasons."""

    name: str
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The implementation that serves a call. Print it to see why.

    Attributes:
      name: Name of the implementation, or empty if none can serve the call.
      why: Why the implementation is preferred to `alternatives`. `refusals` says why
        implementations that rank above it were not chosen.
      refusals: The implementations that cannot serve the call, each with all its reasons.
      alternatives: Names of less preferred implementations that could serve the call, best first.
        An implementation that "auto" does not rank, such as a registered one, is not listed.
      call: The call.
      instead: The choice that "auto" makes, if an implementation is named and refuses the call;
        else None.
      line: The line of the strategy that names the implementation, or None.
      inner: A line that names the kernel that runs on each shard and, if this is not the platform's
        own kernel, says why. Empty if no implementation is chosen, or if the chosen one has a
        single kernel.
      implementation: The chosen implementation, or None.
    """

    name: str
    why: str
    refusals: tuple[RefusedImplementation, ...]
    alternatives: tuple[str, ...]
    call: AttentionCall
    instead: Choice | None = None
    line: RuleRef | None = None
    inner: str = ""
    implementation: Implementation | None = dataclasses.field(default=None, repr=False)

    def __str__(self) -> str:
        call = self.call
        dtypes = call.dtype
        if call.kv_dtype is not None:
            dtypes += f" with {call.kv_dtype} keys"
        none = "no implementation" if self.instead is None else "refused"
        lines = [
            f"{self.name or none}   {self.why}",
            f"  call  {_shape(call)}, {dtypes}, {mode_name(call.mode)}, {call.platform}",
        ]
        if call.mesh is not None:
            lines.append(f"  mesh  {_sharding(call)}; {call.specs.why}")
        lines += [f"  runs  {self.inner}"] if self.inner else []
        lines += [f"  also  {', '.join(self.alternatives)}"] if self.alternatives else []
        lines += [
            f"  not   {refusal.name}: {reason}"
            for refusal in self.refusals
            for reason in refusal.reasons
        ]
        if self.instead is not None:
            lines.append(f"  auto  {self.instead.name or 'no implementation'}: {self.instead.why}")
        return "\n".join(lines)

    def require(self) -> Implementation:
        """Return the implementation.

        Raises:
          AttentionError: The named implementation refuses the call, or all implementations do. The
            message has every reason.
        """
        if self.implementation is not None:
            return self.implementation
        details = str(self).partition("\n")[2]
        if self.instead is None:
            raise AttentionError(
                f"no attention implementation can serve this call: {self.why}",
                snippet=details,
                fix="change the call: each line above says why an implementation refuses it",
            )
        fix = "change the call: no other implementation serves it"
        if self.instead.name:
            line = "" if self.line is None else f', and so does the line {self.line.key} = "auto"'
            fix = f'implementation="auto" takes {self.instead.name}{line}'
        raise AttentionError(self.why, snippet=details, fix=fix)


def choose(
    call: AttentionCall, *, implementation: str | None = None, manager: Any = None
) -> Choice:
    """Choose an implementation by name, or the implementation that suits the call best.

    Args:
      call: The call.
      implementation: A name, or "auto". Defaults to the name that the manager's strategy has for
        the mode of the call under `[attention]`, else to "auto".
      manager: The manager of the call, or None.

    Raises:
      AttentionError: The name is unknown.
    """
    line = None
    if implementation is None and manager is not None:
        line = manager.rules.attention_in(call.mode)
    name = implementation or AUTO if line is None else line.text
    known = implementations()
    if manager is None:
        return _choose(call, name, line, known)
    # Some implementations refuse a surrounding shard_map, so the ambient mesh is part of the key.
    choice: Choice = manager.remember(
        ("choose", call, name, line, known, _jax.ambient_mesh()),
        lambda: _choose(call, name, line, known),
    )
    return choice


def _choose(
    call: AttentionCall, name: str, line: RuleRef | None, known: tuple[Implementation, ...]
) -> Choice:
    if name == AUTO:
        return _choose_best(call, known)
    named = find(name.removeprefix(OWN_ATTENTION), line="" if line is None else str(line))
    reasons = named.refusals(call)
    if reasons == (IN_A_PLAN,):
        instead = _choose_best(call, known)
        why = f"a plan counts it in place of {named.name}"
        return dataclasses.replace(instead, why=why, line=line)
    if line is not None:
        why = f"the strategy says {line}{f', and {named.name} refuses' if reasons else ''}"
    else:
        why = f"{named.name} was asked for by name and refuses" if reasons else "asked for by name"
    if reasons:
        refusals = (RefusedImplementation(name=named.name, reasons=reasons),)
        instead = _choose_best(call, known)
        return Choice(
            name="",
            why=why,
            refusals=refusals,
            alternatives=(),
            call=call,
            instead=instead,
            line=line,
        )
    return Choice(
        name=named.name,
        why=why,
        refusals=(),
        alternatives=(),
        call=call,
        line=line,
        inner=named.inner(call),
        implementation=named,
    )


def _choose_best(call: AttentionCall, known: tuple[Implementation, ...]) -> Choice:
    """Choose the first implementation in order of preference that does not refuse the call."""
    preferred = dict(_preference(call))
    by_name = {each.name: each for each in sorted(known, key=lambda each: each.name)}
    able, refusals = [], []
    rest = [name for name in by_name if name not in preferred]
    for name in [*(name for name in preferred if name in by_name), *rest]:
        reasons = by_name[name].refusals(call)
        if reasons:
            refusals.append(RefusedImplementation(name=name, reasons=reasons))
        elif name in preferred:
            able.append(name)
    if not able:
        return Choice(
            name="", why="all refuse", refusals=tuple(refusals), alternatives=(), call=call
        )
    best = by_name[able[0]]
    return Choice(
        name=best.name,
        why=preferred[best.name],
        refusals=tuple(refusals),
        alternatives=tuple(able[1:]),
        call=call,
        inner=best.inner(call),
        implementation=best,
    )


def _preference(call: AttentionCall) -> list[tuple[str, str]]:
    """Return the implementations to try, best first, each with the reason for its rank."""
    last = [("vanilla", f"all {_logit_bytes(call) / 2**20:.1f} MiB of logits per device at once")]
    if call.return_weights:
        return [("vanilla", "only vanilla returns weights")]
    specs = call.specs
    if specs.kv_length and (call.mode == MODE_DECODE or not specs.q_length):
        over = "+".join(specs.kv_length)
        why = f"the keys are sharded over {over}: partial softmaxes are combined"
        return [("flash_decode", why), *last]
    if specs.q_length or specs.kv_length:
        return [*_sequence_parallel(call), *last]
    fast = {
        "tpu": [("splash", "the TPU's own kernel")],
        "gpu": [("cudnn", "the GPU's own kernel")],
    }.get(call.platform, [])
    if call.recipe.cached is not None:
        # The TPU's own kernel needs keys ordered by head, and would copy the cache into that order.
        return [("blockwise", "it reads a cache in its stored order"), *fast, *last]
    if call.platform == "gpu" and call.mode == MODE_DECODE:
        once = ("triton_decode", "it reads each key once, in the order in which a cache stores it")
        return [once, *fast, *_without_cudnn(call), *last]
    if call.platform == "gpu":
        return [*fast, *_without_cudnn(call), *last]
    return [*fast, ("blockwise", "memory linear in length"), *last]


def _without_cudnn(call: AttentionCall) -> list[tuple[str, str]]:
    """Rank `sdpa` and `blockwise` for a GPU: `sdpa` is faster if there are few logits."""
    logits = _logit_bytes(call)
    if logits > _LOGIT_BYTES:
        many = (
            f"all logits at once would take {logits / 2**20:.1f} MiB per device, "
            f"more than {_LOGIT_BYTES // 2**20}"
        )
        return [
            ("blockwise", f"memory linear in length: {many}"),
            ("sdpa", "JAX's attention by XLA"),
        ]
    few = f"JAX's attention by XLA: all {logits / 2**20:.1f} MiB of logits per device at once"
    return [("sdpa", few), ("blockwise", "memory linear in length")]


def _sequence_parallel(call: AttentionCall) -> list[tuple[str, str]]:
    """Rank the implementations for a sharded sequence by bytes sent."""
    specs = call.specs
    shards = call.shards(specs.kv_length or specs.q_length)
    # Bytes of the keys and values of this device's heads and sequences, over the whole length.
    local_heads = call.kv_heads / call.shards(specs.kv_heads)
    local_batch = call.batch / call.shards(specs.batch)
    row = (call.head_dim + call.v_dim) * (4 if call.dtype == "float32" else 2)
    gathered = int(local_heads * local_batch * call.kv_length * row)
    few = _few_queries(call, gathered * (shards - 1) // shards)
    # A ring sends keys and values n - 1 times. All-to-alls also send queries and outputs, but each
    # array only once. Per row a ring sends (n - 1) * 2 * kv_heads vectors, and all-to-alls send
    # (n - 1) / n * 2 * (heads + kv_heads).
    even = 1 + call.heads / call.kv_heads
    limit = f"1 + heads / kv_heads = {even:g}"
    many_shards = f"{shards} shards are more than {limit}: all-to-alls send fewer bytes than a ring"
    ulysses = ("ulysses", many_shards)
    few_shards = f"{shards} shards are at most {limit}: a ring sends no more bytes than all-to-alls"
    ring = ("ring", few_shards)
    size_text = f"{gathered / 2**20:.1f} MiB per device"
    why = (
        f"the gathered keys and values take {size_text}: "
        "one collective sends as many bytes as a ring"
    )
    if not specs.kv_length:
        why = "every device has all keys already: nothing is gathered"
    gather = ("allgather_kv", why)
    rest = [ulysses, ring] if shards > even else [ring, ulysses]
    return [*few, *([gather, *rest] if gathered <= _GATHER_BYTES else [*rest, gather])]


def _few_queries(call: AttentionCall, keys_sent: int) -> list[tuple[str, str]]:
    """Rank `flash_decode` first if it sends fewer bytes than a gather of the keys.

    It sends queries and results.
    """
    specs = call.specs
    if not specs.kv_length or not set(specs.kv_length) <= set(specs.q_length):
        return []
    sent = flash_decode.bytes_sent_by_rows(call)
    if sent >= keys_sent:
        return []
    sizes = f"{sent / 2**20:.3g} MiB of queries and results are fewer than {keys_sent / 2**20:.3g}"
    return [("flash_decode", f"{sizes} MiB of keys and values")]


def _logit_bytes(call: AttentionCall) -> int:
    """Return the bytes of all float32 logits of one device."""
    specs = call.specs
    lengths = tuple(dict.fromkeys((*specs.q_length, *specs.kv_length)))
    devices = call.shards(specs.batch) * call.shards(specs.heads) * call.shards(lengths)
    return 4 * call.batch * call.heads * call.q_length * call.kv_length // devices


def _shape(call: AttentionCall) -> str:
    dims = str(call.head_dim) if call.head_dim == call.v_dim else f"{call.head_dim}/{call.v_dim}"
    lengths, heads = f"{call.q_length} x {call.kv_length}", f"{call.heads}/{call.kv_heads}"
    return f"batch {call.batch}, {lengths}, heads {heads}, head_dim {dims}"


def _sharding(call: AttentionCall) -> str:
    names = ("batch", "q_length", "kv_length", "heads", "kv_heads")
    over = {name: "+".join(getattr(call.specs, name)) for name in names}
    sharded = ", ".join(f"{name} {axes}" for name, axes in over.items() if axes)
    return sharded or "replicated"
