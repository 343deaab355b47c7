"""A KV cache in prefill, insert and decode under a serving strategy."""

from __future__ import annotations

from collections.abc import Mapping

import shardwright as sw
from shardwright.testing import cpu_mesh
from tools.pictures.parts import holders, spec_text
from tools.pictures.svg import Box, Picture

PRESET, MESH = "serve_tp", "dp:2,tp:4"
AXES = (sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM)
CAPACITY, KV_HEADS, HEAD_DIM = 32, 4, 8
SLOTS, SLOT = 4, 2  # slots of the decode cache, and the one that the prompt goes to
PROMPT = 20
BEFORE: Mapping[int, int] = {0: 26, 3: 9}  # tokens in slots before the prompt comes
LEFT, CELL_WIDTH, CELL_HEIGHT = 176, 71, 26


def draw() -> str:
    """Return the picture: the cache of one prompt, then that of all slots."""
    pm = sw.PartitionManager(sw.Strategy.preset(PRESET), mesh=cpu_mesh(MESH))
    title = "The KV cache of one prompt, inserted into the cache of four slots, then decode"
    picture = Picture(title=title, width=480, height=590)
    picture.text(20, 32, f"A KV cache under {PRESET}", kind="title")
    picture.text(20, 54, f"Mesh {MESH}. A cell is one kv head of one slot, with the", kind="soft")
    legend = "devices that hold it. Yellow: device 0. Bar: tokens; red: new."
    picture.text(20, 72, legend, kind="soft")
    _stage(picture, 92, pm, mode="prefill", held={}, new={0: PROMPT})
    _next(picture, 230, f"insert the row into slot {SLOT}")
    _stage(picture, 262, pm, mode="insert", held=BEFORE, new={SLOT: PROMPT})
    _next(picture, 400, "one step: a token for each slot")
    held = {**BEFORE, SLOT: PROMPT}
    _stage(picture, 432, pm, mode="decode", held=held, new=dict.fromkeys(held, 1))
    return picture.render()


def _stage(
    picture: Picture,
    y: float,
    pm: sw.PartitionManager,
    *,
    mode: str,
    held: Mapping[int, int],
    new: Mapping[int, int],
) -> None:
    """Draw a cache in one mode: a column per slot, a row per kv head."""
    slots = SLOTS if mode != "prefill" else 1
    shape = (slots, CAPACITY, KV_HEADS, HEAD_DIM)
    sharding = pm.sharding(*AXES, mode=mode, shape=shape)
    picture.text(20, y + 36, mode, kind="title")
    picture.text(20, y + 58, spec_text(sharding.spec), kind="code soft")
    for slot in range(slots):
        picture.text(
            LEFT + slot * CELL_WIDTH + 2,
            y + 14,
            f"slot {slot}" if slots > 1 else "the prompt",
            kind="soft",
        )
    for (rows, _, heads, _), devices in holders(sharding, shape).items():
        for slot in range(*rows):
            for head in range(*heads):
                cell = Box(
                    x=LEFT + slot * CELL_WIDTH,
                    y=y + 22 + head * CELL_HEIGHT,
                    width=CELL_WIDTH,
                    height=CELL_HEIGHT,
                )
                _cell(picture, cell, devices, held=held.get(slot, 0), new=new.get(slot, 0))


def _cell(picture: Picture, cell: Box, devices: list[int], *, held: int, new: int) -> None:
    picture.box(cell, kind="mine" if 0 in devices else "part")
    picture.label(
        Box(x=cell.x, y=cell.y - 4, width=cell.width, height=cell.height),
        " ".join(map(str, devices)),
    )
    token = (cell.width - 4) / CAPACITY
    bar = {"y": cell.y + cell.height - 7, "height": 5}
    if held:
        picture.box(Box(x=cell.x + 2, width=held * token, **bar), kind="token")
    if new:
        picture.box(Box(x=cell.x + 2 + held * token, width=new * token, **bar), kind="fresh")


def _next(picture: Picture, y: float, words: str) -> None:
    picture.arrow(LEFT + CELL_WIDTH / 2, y, length=30)
    picture.text(LEFT + CELL_WIDTH / 2 + 18, y + 19, words, kind="soft")
