"""No name of `eformer.escale.partition.auto_spec` is provided: a call raises an error."""

from shardwright.interop.eformer.absent import __getattr__  # noqa: F401
