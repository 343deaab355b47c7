"""Serving: prefill each prompt, insert it into a slot, decode all slots together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardwright as sw
from decoder.config import DecoderConfig, decoder_specs
from decoder.model import Tree, forward
from shardwright.caches import KVCache
from shardwright.layers import transformer_block

Caches = list[KVCache]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Compiled serving functions on one mesh.

    Attributes:
      pm: The manager; each function runs under its own `pm.for_mode(...)`.
      config: Sizes.
      slots: How many texts are decoded together.
      capacity: Bytes of a slot, prompt included.
      prompt_length: Prompts are padded to this many bytes, so that one compiled prefill serves all.
      prefill: `(params, tokens[1, prompt_length], real[1]) -> (next byte[1], caches of one text)`.
      insert: `(caches, last[slots], prefix, next byte[1], slot) -> (caches, last)`; the first two
        are donated.
      decode: `(params, caches, last[slots]) -> (caches, next bytes[slots])`; caches and `last` are
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

    def empty(self) -> tuple[Caches, jax.Array]:
        """Return the caches of empty slots, and the last byte of each, already sharded."""
        with self.pm.for_mode("decode") as decoding:
            last = decoding.shard(np.zeros(self.slots, np.int32), sw.BATCH)
            return empty_caches(self.config, self.slots, self.capacity), last


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
      ValueError: Prompts would be longer than a slot.
    """
    if prompt_length > capacity:
        raise ValueError(f"prompt_length {prompt_length} exceeds the capacity {capacity} of a slot")
    return Server(
        pm=sw.PartitionManager(strategy, mesh=mesh),
        config=config,
        slots=slots,
        capacity=capacity,
        prompt_length=prompt_length,
        prefill=jax.jit(prefill_step(config)),
        insert=jax.jit(insert_step, donate_argnums=(0, 1)),
        decode=jax.jit(decode_step(config), donate_argnums=(1, 2)),
    )


def empty_caches(config: DecoderConfig, batch: int, capacity: int) -> Caches:
    """Return one cache per layer, sharded as the mode of the ambient manager needs it."""
    return transformer_block.init_caches(config.stack, batch=batch, capacity=capacity)


def prefill_step(config: DecoderConfig) -> Callable[..., Any]:
    """Return the function that reads padded prompts into new caches."""

    def prefill(params: Tree, tokens: jax.Array, real: jax.Array) -> tuple[jax.Array, Caches]:
        caches = empty_caches(config, *tokens.shape)
        valid = jnp.arange(tokens.shape[1]) < real[:, None]
        logits, caches = forward(params, tokens, config, caches=caches, valid=valid)
        last = jnp.take_along_axis(logits, real[:, None, None] - 1, axis=1)[:, 0]
        return jnp.argmax(last, axis=-1).astype(jnp.int32), caches

    return prefill


def insert_step(
    caches: Caches, last: jax.Array, prefix: Caches, first: jax.Array, slot: jax.Array
) -> tuple[Caches, jax.Array]:
    """Put a prefilled prompt and its first new byte into a slot, in place of what the slot held."""
    emptied = [cache.free(slot[None]).cache for cache in caches]
    filled = [
        cache.insert(prompt, slot[None]).cache
        for cache, prompt in zip(emptied, prefix, strict=True)
    ]
    return filled, sw.shard(last.at[slot].set(first[0], mode="drop"), sw.BATCH)


def decode_step(config: DecoderConfig) -> Callable[..., Any]:
    """Return the function that writes the most likely next byte of every occupied slot."""

    def decode(params: Tree, caches: Caches, last: jax.Array) -> tuple[Caches, jax.Array]:
        occupied = caches[0].length[:, None] > 0
        logits, caches = forward(params, last[:, None], config, caches=caches, valid=occupied)
        return caches, sw.shard(jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32), sw.BATCH)

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
      ShardingError: The slots or a weight do not fit the strategy.
      ValueError: A prompt or its continuation does not fit. No step has run.
    """
    check_fits(server, prompts, new_bytes)
    pm = server.pm
    weights = pm.shard(params, decoder_specs(server.config), role="param")
    caches, last = server.empty()
    for slot, prompt in enumerate(prompts):
        with pm.for_mode("prefill"):
            first, prefix = server.prefill(weights, *padded(prompt, server.prompt_length))
            on_step(f"prefill {len(prompt)} bytes")
        with pm.for_mode("insert"):
            caches, last = server.insert(caches, last, prefix, first, np.int32(slot))
    written = [np.asarray(last)]
    with pm.for_mode("decode"):
        for _ in range(new_bytes - 1):
            caches, last = server.decode(weights, caches, last)
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
                "shorten the prompt, lower new_bytes, or make the server with more capacity"
            )


def padded(prompt: bytes, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a prompt as tokens `[1, length]`, padded with zeros, and its real length `[1]`."""
    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(prompt)] = np.frombuffer(prompt, np.uint8)
    return tokens, np.array([len(prompt)], np.int32)
