"""Models of Hugging Face: checkpoints, and decoders that `config.json` describes.

A checkpoint is read into the sharding of a strategy: the axes of each tensor follow from its name
and from `config.json`. A decoder of the same sizes, made of the blocks of `shardwright.layers`, can
be planned without weights, or loaded and served.
"""

from shardwright.interop.hf.checkpoint import Checkpoint as Checkpoint
from shardwright.interop.hf.checkpoint import load as load
from shardwright.interop.hf.checkpoint import read as read
from shardwright.interop.hf.decoders import LoadedDecoder as LoadedDecoder
from shardwright.interop.hf.decoders import decoder as decoder
from shardwright.interop.hf.families import read_config as read_config
from shardwright.interop.hf.model.decoder import programs as programs
from shardwright.interop.hf.model.sizes import Sizes as Sizes
from shardwright.interop.hf.model.sizes import Stack as Stack
from shardwright.interop.hf.names import annotate as annotate
