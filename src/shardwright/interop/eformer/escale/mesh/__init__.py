"""The names of `eformer.escale.mesh`."""

from shardwright.interop.eformer.absent import __getattr__ as __getattr__
from shardwright.interop.eformer.escale.mesh.creation import *  # noqa: F403
