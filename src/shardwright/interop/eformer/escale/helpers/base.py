"""`eformer.escale.helpers.base`: no name is provided; the error of a call says why."""

from shardwright.interop.eformer.absent import __getattr__  # noqa: F401
