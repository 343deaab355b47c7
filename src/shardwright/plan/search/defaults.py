"""The strategies that a search tries if none is given: presets that suit the programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import jax

from shardwright.plan.planner import Program
from shardwright.vocabulary.annotations import is_annotation
from shardwright.vocabulary.axes import EXPERT
from shardwright.vocabulary.modes import MODE_TRAIN

if TYPE_CHECKING:
    from shardwright.strategy.model import Strategy

# On meshes with axes of size 1, they also give data parallelism, FSDP or tensor parallelism.
TRAIN: Final = ("fsdp_tp", "fsdp_tp_sp")
SERVE: Final = ("serve_tp", "serve_long_context")
EXPERTS: Final = "moe_ep"


def default_strategies(programs: Mapping[str, Program]) -> dict[str, Strategy]:
    """Return the presets that suit programs: name -> strategy.

    Args:
      programs: Mode -> program. All of them share a strategy.
    """
    from shardwright.strategy.model import Strategy

    names = [*(TRAIN if MODE_TRAIN in programs else SERVE)]
    if MODE_TRAIN in programs and any(map(_has_experts, programs.values())):
        names.append(EXPERTS)
    return {name: Strategy.preset(name) for name in names}


def _has_experts(program: Program) -> bool:
    """Tell whether an annotation of the arguments names EXPERT."""
    leaves = jax.tree.leaves(program.specs, is_leaf=is_annotation)
    return any(_names_experts(getattr(leaf, "axes", leaf)) for leaf in leaves)


def _names_experts(axes: Any) -> bool:
    if isinstance(axes, (tuple, list)):
        return any(map(_names_experts, axes))
    return bool(axes == EXPERT)
