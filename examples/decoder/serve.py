"""Serving: prefill each prompt, insert it into a slot, decode all slots together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardwright as sw
from decoder.cache import cache_specs, empty_cache, insert_rows
from decoder.config import DecoderConfig, decoder_specs
from decoder.model import forward

Tree = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Compiled serving functions on one mesh.

    Attributes:
      pm: The manager; each function runs under its own `pm.for_mode(...)`.
      config: Sizes.
      slots: How many texts are decoded together.
      capacity: Bytes of a slot, prompt included.
      prompt_length: Prompts are padded to this many bytes, so that one compiled prefill serves all.
      prefill: `(params, tokens[1, prompt_length], real[1]) -> (next byte[1], cache of one)`.
      insert: `(cache, last[slots], prefix, next byte[1], slot) -> (cache, last)`; the first two are
        donated.
      decode: `(params, cache, last[slots]) -> (cache, next bytes[slots])`; the cache and `last` are
        donated.
    """

    pm: sw.PartitionManager
    config: DecoderConfig
    slots: int
    capacity: int
    prompt_length: int
    prefill: Callable[..., Any]
    insert: Callable[..., Any]
    decode: Callable[..., Any]


def make_server(
    strategy: sw.Strategy,
    config: DecoderConfig,
    *,
    slots: int,
    capacity: int,
    prompt_length: int,
    mesh: Any = None,
) -> Server:
    """Build the serving functions of a strategy, by default on its own mesh.

    Raises:
      ShardingError: The slots or a weight do not fit the strategy.
      ValueError: Prompts would be longer than a slot.
    """
    if prompt_length > capacity:
        raise ValueError(f"prompt_length {prompt_length} exceeds the capacity {capacity} of a slot")
    pm = sw.PartitionManager(strategy, mesh=mesh)
    cache = pm.shardings(
        cache_specs(config, batch=slots, capacity=capacity), mode="decode", role="activation"
    )
    last = pm.sharding(sw.BATCH, shape=(slots,), mode="decode")
    prefix = pm.shardings(
        cache_specs(config, batch=1, capacity=prompt_length), mode="prefill", role="activation"
    )
    first = pm.sharding(sw.BATCH, shape=(1,), mode="prefill")
    return Server(
        pm=pm,
        config=config,
        slots=slots,
        capacity=capacity,
        prompt_length=prompt_length,
        prefill=jax.jit(prefill_step(config, prompt_length), out_shardings=(first, prefix)),
        insert=jax.jit(insert_step, out_shardings=(cache, last), donate_argnums=(0, 1)),
        decode=jax.jit(decode_step(config), out_shardings=(cache, last), donate_argnums=(1, 2)),
    )


def prefill_step(config: DecoderConfig, capacity: int) -> Callable[..., Any]:
    """Return the function that reads one padded prompt into a new cache."""

    def prefill(params: Tree, tokens: jax.Array, real: jax.Array) -> tuple[jax.Array, Tree]:
        specs = cache_specs(config, batch=tokens.shape[0], capacity=capacity)
        cache = jax.tree.map(
            lambda spec: sw.shard(jnp.zeros(spec.shape, spec.dtype), spec.axes), specs
        )
        logits, cache = forward(params, tokens, config, cache=cache, real=real)
        last = jnp.take_along_axis(logits, real[:, None, None] - 1, axis=1)[:, 0]
        return jnp.argmax(last, axis=-1).astype(jnp.int32), cache

    return prefill


def insert_step(
    cache: Tree, last: jax.Array, prefix: Tree, first: jax.Array, slot: jax.Array
) -> tuple[Tree, jax.Array]:
    """Put a prefilled prompt and its first new byte into a slot."""
    return insert_rows(cache, prefix, slot), last.at[slot].set(first[0], mode="drop")


def decode_step(config: DecoderConfig) -> Callable[..., Any]:
    """Return the function that writes the most likely next byte of every occupied slot."""

    def decode(params: Tree, cache: Tree, last: jax.Array) -> tuple[Tree, jax.Array]:
        occupied = (cache["length"] > 0).astype(jnp.int32)
        logits, cache = forward(params, last[:, None], config, cache=cache, real=occupied)
        return cache, jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)

    return decode


def generate(
    server: Server,
    params: Tree,
    prompts: Sequence[bytes],
    *,
    new_bytes: int,
    on_step: Callable[[str], None] = print,
) -> list[bytes]:
    """Return the greedy continuation of each prompt.

    Args:
      server: From `make_server`.
      params: Weights with any sharding. They are moved to the shardings of the server.
      prompts: At most one per slot, of any lengths that fit.
      new_bytes: Bytes to write after each prompt.
      on_step: Called with a description of each step.

    Raises:
      ValueError: A prompt or its continuation does not fit. No step has run.
    """
    check_fits(server, prompts, new_bytes)
    pm = server.pm
    weights = pm.shard(params, decoder_specs(server.config), role="param")
    with pm.for_mode("decode") as decoding:
        cache = empty_cache(
            decoding, cache_specs(server.config, batch=server.slots, capacity=server.capacity)
        )
        last = decoding.shard(np.zeros(server.slots, np.int32), sw.BATCH)
    for slot, prompt in enumerate(prompts):
        with pm.for_mode("prefill"):
            first, prefix = server.prefill(weights, *padded(prompt, server.prompt_length))
            on_step(f"prefill {len(prompt)} bytes")
        with pm.for_mode("insert"):
            cache, last = server.insert(cache, last, prefix, first, np.int32(slot))
    written = [np.asarray(last)]
    with pm.for_mode("decode"):
        for _ in range(new_bytes - 1):
            cache, last = server.decode(weights, cache, last)
            written.append(np.asarray(last))
            on_step(f"decode {len(prompts)} slots")
    return [np.stack(written)[:, slot].astype(np.uint8).tobytes() for slot in range(len(prompts))]


def check_fits(server: Server, prompts: Sequence[bytes], new_bytes: int) -> None:
    """Raise ValueError for the first prompt that does not fit the slots."""
    if len(prompts) > server.slots:
        raise ValueError(
            f"there are {len(prompts)} prompts for {server.slots} slots: serve them in turns, or "
            "make more slots"
        )
    for number, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= server.prompt_length:
            raise ValueError(
                f"prompt {number} has {len(prompt)} bytes, but this server takes 1 to "
                f"{server.prompt_length}"
            )
        if len(prompt) + new_bytes > server.capacity:
            raise ValueError(
                f"prompt {number}: {len(prompt)} bytes and {new_bytes} new ones exceed the slot's "
                f"capacity {server.capacity}: "
                "shorten one of them, or make the server with more capacity"
            )


def padded(prompt: bytes, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a prompt as tokens `[1, length]`, padded with zeros, and its real length `[1]`."""
    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(prompt)] = np.frombuffer(prompt, np.uint8)
    return tokens, np.array([len(prompt)], np.int32)
