"""eformer's names for sharding. Code that uses them runs if its imports are changed.

`from eformer.escale import …` becomes `from shardwright.interop.eformer.escale import …`, and
`from eformer.common_types import …` becomes
`from shardwright.interop.eformer.common_types import …`. All names can be imported from here too.
docs/eformer.md says what behaves differently, and why.
"""

from typing import Any

from shardwright.interop.eformer import common_types as common_types
from shardwright.interop.eformer import escale as escale
from shardwright.interop.eformer.common_types import *  # noqa: F403
from shardwright.interop.eformer.escale import *  # noqa: F403
from shardwright.interop.eformer.escale.partition import constraints as _constraints


def __getattr__(name: str) -> Any:
    # Each access of these two names reads the environment. Do not look up other names in
    # `_constraints`: a star import of this module looks up `__all__`, and would find the `__all__`
    # of `_constraints`.
    environment = ("LOG_SHARDING_MOVE", "MIN_SHARDING_SIZE")
    return getattr(_constraints if name in environment else escale, name)
