"""The names of `eformer.escale.helpers` can be imported, but are not provided.

A call of one raises an error with a fix.
"""

from shardwright.interop.eformer.absent import __getattr__ as __getattr__
