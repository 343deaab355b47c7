"""Checkpoints in the formats of Hugging Face: read them into the sharding of a strategy.

The axes of each tensor follow from its name and from `config.json`. Code belongs here if it reads a
checkpoint or names its tensors. Models do not belong here.
"""

from shardwright.interop.hf.checkpoint import Checkpoint as Checkpoint
from shardwright.interop.hf.checkpoint import load as load
from shardwright.interop.hf.checkpoint import read as read
from shardwright.interop.hf.names import annotations as annotations
