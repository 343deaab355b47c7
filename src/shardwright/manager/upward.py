"""The table of the manager's methods that rooms above it implement.

A room imports only from the rooms below it. This table is the only exception. It names functions as
text, and a function is imported when its method is first called. Each entry is
`method: "module:function"`. The first parameter of the function is `manager`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

# A room that implements a method of the manager adds a line here.
UPWARD: Final[Mapping[str, str]] = {
    "plan": "shardwright.plan.planner:plan",
    "plan_reshard": "shardwright.reshard.tree:plan_reshard",
    "reshard": "shardwright.reshard.move:reshard",
}


def bind(name: str, manager: Any) -> Callable[..., Any] | None:
    """Return a method of the table, bound to a manager, or None if the table does not have it."""
    target = UPWARD.get(name)
    if target is None:
        return None
    module, function = target.split(":")
    return functools.partial(getattr(importlib.import_module(module), function), manager)
