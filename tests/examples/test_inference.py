"""The axes of the decoder are inferred, although its source names them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from decoder.config import DecoderConfig, decoder_specs
from decoder.model import forward

import shardwright as sw


def test_axes_of_the_decoder_are_inferred() -> None:
    config = DecoderConfig()
    specs = decoder_specs(config)
    shapes = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("fsdp:4,tp:2"))
    tokens = jax.ShapeDtypeStruct((8, 32), jnp.int32)
    with pm:
        inferred = sw.infer_axes(
            lambda params, tokens: forward(params, tokens, config)[0],
            shapes,
            tokens,
            seeds=[(sw.BATCH, sw.LENGTH)],
            # Right guesses that are confirmed: gate and up, and the columns of the projection.
            sizes={2: sw.EMPTY, config.vocab: sw.VOCAB},
            strict=True,
        )
    hand = jax.tree.map(lambda spec: spec.axes, specs)
    assert inferred.annotations == hand
