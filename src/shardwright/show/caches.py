"""Show how a cache is resharded."""

from __future__ import annotations

from shardwright.caches.relayout import Relayout
from shardwright.resolution.partition_specs import spec_text
from shardwright.vocabulary.modes import mode_name
from shardwright.vocabulary.shown import text_of


@text_of.register(Relayout)
def relayout_text(relayout: Relayout) -> str:
    """Return the steps of each array of a cache."""
    count = f"{relayout.collectives} collective{'' if relayout.collectives == 1 else 's'}"
    lines = [f"to {mode_name(relayout.mode)}: {count}, {relayout.bytes:,} B sent by each device"]
    for array in relayout.arrays:
        stays = "" if array.moves else "  stays"
        lines.append(
            f"  {array.name}  {spec_text(array.source)} -> {spec_text(array.target)}{stays}"
        )
        lines += [f"    {move}" for move in array.moves]
    return "\n".join(lines)
