"""The names of `eformer.escale.partition`."""

from shardwright.interop.eformer.absent import __getattr__ as __getattr__
from shardwright.interop.eformer.escale.partition.constraints import *  # noqa: F403
from shardwright.interop.eformer.escale.partition.manager import *  # noqa: F403
