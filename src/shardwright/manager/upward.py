"""The manager's methods that rooms above it implement, as one table.

A room imports only from the rooms below it. This table is the only exception: it names functions as
text, and imports one when its method is first called. Each entry is `method: "module:function"`;
the function takes the manager as its first argument, by the name `manager`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

# A room that serves the manager adds its line.
UPWARD: Final[Mapping[str, str]] = {
    "plan": "shardwright.plan.planner:plan",
    "plan_reshard": "shardwright.reshard.tree:plan_reshard",
    "reshard": "shardwright.reshard.move:reshard",
}


def bind(name: str, manager: Any) -> Callable[..., Any] | None:
    """Return the method of a manager that the table names, or None if it names none."""
    target = UPWARD.get(name)
    if target is None:
        return None
    module, function = target.split(":")
    return functools.partial(getattr(importlib.import_module(module), function), manager)
