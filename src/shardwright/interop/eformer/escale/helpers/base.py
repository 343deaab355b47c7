"""No name of `eformer.escale.helpers.base` is provided. A call raises an error with a fix."""

from shardwright.interop.eformer.absent import __getattr__  # noqa: F401
