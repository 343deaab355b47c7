"""Attention on a CPU, compared with `jax.nn.dot_product_attention` and with repeated keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.timing import Row, Target
from shardwright.attention import dot_product_attention

HEADS, KV_HEADS, DIM = 4, 2, 64
TRAIN = {1024: Target(at_most=1.1), 4096: Target(at_most=1.0)}
DECODE = {"batch": 2, "length": 2048, "heads": 16, "kv_heads": 2}
OURS, THEIRS, REPEATED = "blockwise", "jax.nn", "repeated keys"


def run(*, peers: bool, repeats: int) -> list[Row]:
    """Measure forward and backward of causal attention at two lengths, and one decoded token."""
    del peers
    rows = [
        row
        for length, target in TRAIN.items()
        for row in _train(length, target, repeats=max(3, repeats // (length // 1024)))
    ]
    return [*rows, _decode(repeats=repeats)]


def _train(length: int, target: Target, *, repeats: int) -> list[Row]:
    q, k, v = _arrays(1, length, length, HEADS, KV_HEADS)

    def ours(q: Any, k: Any, v: Any) -> Any:
        return dot_product_attention(q, k, v, mode="train", causal=True, implementation="blockwise")

    def theirs(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    rows = []
    for what, change in (("forward", _same), ("forward and backward", _gradient)):
        cases = {OURS: change(ours), THEIRS: change(theirs)}
        case = f"{length} tokens, {HEADS}/{KV_HEADS} heads of {DIM}, {what}"
        rows.append(
            _beside(
                cases,
                (q, k, v),
                THEIRS,
                case=case,
                repeats=repeats,
                target=target if change is _gradient else None,
            )
        )
    return rows


def _decode(*, repeats: int) -> Row:
    q, k, v = _arrays(DECODE["batch"], 1, DECODE["length"], DECODE["heads"], DECODE["kv_heads"])

    def ours(q: Any, k: Any, v: Any) -> Any:
        return dot_product_attention(
            q, k, v, mode="decode", causal=True, implementation="blockwise"
        )

    def repeated(q: Any, k: Any, v: Any) -> Any:
        k, v = (jnp.repeat(x, DECODE["heads"] // DECODE["kv_heads"], axis=2) for x in (k, v))
        logits = jnp.einsum("bthd,bshd->bhts", q, k) / DIM**0.5
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits, axis=-1), v)

    case = (
        f"one token, {DECODE['length']} keys, batch {DECODE['batch']}, "
        f"{DECODE['heads']}/{DECODE['kv_heads']} heads of {DIM}"
    )
    cases = {OURS: ours, REPEATED: repeated}
    return _beside(
        cases, (q, k, v), REPEATED, case=case, repeats=repeats, target=Target(at_most=1.0)
    )


def _beside(
    cases: Mapping[str, Callable[..., Any]],
    arrays: tuple[jax.Array, ...],
    against: str,
    *,
    case: str,
    repeats: int,
    target: Target | None,
) -> Row:
    # Kernels run in other threads, so the processor time of all threads counts.
    prepared = {name: timing.always(_call(jax.jit(f), arrays)) for name, f in cases.items()}
    times = timing.interleave(prepared, repeats=repeats, clock=time.process_time)
    return timing.ratio(times, OURS, against=against, subject="attention", case=case, target=target)


def _call(f: Callable[..., Any], arrays: tuple[jax.Array, ...]) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(f(*arrays))


def _same(attend: Callable[..., Any]) -> Callable[..., Any]:
    return attend


def _gradient(attend: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda q, k, v: jnp.sum(jnp.sin(attend(q, k, v))), argnums=(0, 1, 2))


def _arrays(
    batch: int, q_length: int, kv_length: int, heads: int, kv_heads: int
) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (
        (batch, q_length, heads, DIM),
        (batch, kv_length, kv_heads, DIM),
        (batch, kv_length, kv_heads, DIM),
    )
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
