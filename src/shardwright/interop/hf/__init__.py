"""Checkpoints in the formats of Hugging Face: read them into the sharding of a strategy.

The axes of each tensor follow from its name and from `config.json`. What reads or names a
checkpoint belongs here; code of models does not.
"""

from shardwright.interop.hf.checkpoint import Checkpoint as Checkpoint
from shardwright.interop.hf.checkpoint import load as load
from shardwright.interop.hf.checkpoint import read as read
from shardwright.interop.hf.names import annotations as annotations
