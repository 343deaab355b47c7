"""Decoders that a Hugging Face `config.json` describes, as programs to plan.

`families` reads the sizes of a configuration. `decoder` is the reference decoder of these sizes,
made of the blocks of `shardwright.layers`. Weights are not read, and nothing is run.
"""

from shardwright.interop.hf_decoder.decoder import programs
from shardwright.interop.hf_decoder.families import FAMILIES, Sizes, Stack, read_config

__all__ = ["FAMILIES", "Sizes", "Stack", "programs", "read_config"]
