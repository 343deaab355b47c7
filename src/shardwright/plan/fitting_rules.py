"""Find rules under which replicated state takes less memory on the same mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from shardwright.errors import ShardingError
from shardwright.manager.manager import PartitionManager
from shardwright.plan.search.settings import with_settings
from shardwright.plan.state import Category, StateBytes
from shardwright.strategy.files import file_to_edit
from shardwright.vocabulary.units import bytes_text

if TYPE_CHECKING:
    from shardwright.strategy.model import Strategy

_CAUSES: Final = 3  # rules that are changed, those that replicate most; each is planned in a second


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FittingRules:
    """Settings of a strategy with which a program takes less memory.

    Attributes:
      settings: Key of a strategy file, such as `params.embed` -> its text.
      file: The file to write them in, as text.
      needs: Bytes that a device then needs at least.
    """

    settings: Mapping[str, str]
    file: str
    needs: int

    def __str__(self) -> str:
        # With the header of the table: a dotted key at the end of a file belongs to its last table.
        written = [
            f'[{table or "rules"}] {name} = "{text}"'
            for key, text in self.settings.items()
            for table, _, name in [key.rpartition(".")]
        ]
        needs = bytes_text(self.needs)
        return f"write {' and '.join(written)} in {self.file}: then it needs at least {needs}"


def find_smaller_rules(
    strategy: Strategy,
    manager: PartitionManager,
    state: StateBytes,
    plan: Callable[[PartitionManager], int],
    *,
    below: float,
) -> FittingRules | None:
    """Return the change of a strategy that saves most memory, of those under which a plan succeeds.

    Parameters are stored over one more mesh axis and gathered, as in FSDP, or their optimizer state
    is sharded over it, by `zero1`. Or LENGTH is sharded over tp too, as in `fsdp_tp_sp`.

    Args:
      strategy: The strategy.
      manager: A manager of the strategy, with mesh and mode.
      state: The bytes of the program's state, with the rules that replicate it.
      plan: Plans the program under a manager, and returns the bytes that a device needs.
      below: Bytes that a device may need with the changes.

    Returns:
      None if no change works and needs fewer bytes.
    """
    best: FittingRules | None = None
    for settings in _changes(strategy, manager, state):
        try:
            changed = with_settings(strategy, settings)
            needs = plan(PartitionManager(changed, mesh=manager.mesh, mode=manager.mode))
        except ShardingError:
            continue  # for example, an activation already uses the mesh axis
        if needs < (below if best is None else best.needs):
            file = file_to_edit(strategy.name, strategy.source())
            best = FittingRules(settings=settings, file=file, needs=needs)
    return best


def _changes(
    strategy: Strategy, manager: PartitionManager, state: StateBytes
) -> Iterator[dict[str, str]]:
    """Yield settings that shard what is replicated most, and the residual."""
    saved: dict[tuple[str, str], int] = {}
    for leaf in state.leaves:
        if leaf.category in (Category.INPUTS, Category.CACHE):
            continue
        for cause in leaf.causes:
            if cause.rule:
                key = cause.mesh_axis, cause.rule
                saved[key] = saved.get(key, 0) + cause.saves
    policy = manager.rules.policy
    length = str(strategy.rules.get("length", "-"))
    if manager.mesh.shape.get("tp", 1) > 1 and "tp" not in length:
        yield {"length": "tp" if length == "-" else f"{length}+tp", "params.length": "-"}
    for axis, rule in sorted(saved, key=lambda key: -saved[key])[:_CAUSES]:
        name, _, text = rule.partition(" = ")
        own = text.strip().strip('"')
        first = own.partition("|")[0].strip()
        rest = f" | {own}" if "|" in own else ""  # the fallbacks stay
        wider = axis if first == "-" else f"{first}+{axis}{rest}"
        # A weight that is used as stored keeps the mesh axis in matmuls, where the batch competes.
        gather = "+".join(dict.fromkeys([*policy.gather, axis]))
        is_policy = name in ("largest_dim", "zero1")
        change = {f"{'policy' if is_policy else 'params'}.{name}": wider}
        # What zero1 adds to optimizer state is never gathered.
        yield change if name == "zero1" else {**change, "policy.gather": gather}
        if policy.zero1 is None and Category.OPTIMIZER in state.categories:
            yield {"policy.zero1": f"{axis} | -"}
