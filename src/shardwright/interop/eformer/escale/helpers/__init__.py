"""No name of `eformer.escale.helpers` is provided. A call of a name raises an error with a fix."""

from shardwright.interop.eformer.absent import __getattr__ as __getattr__
