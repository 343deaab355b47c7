"""A weight: stored, gathered, used, and its gradient."""

from __future__ import annotations

import shardwright as sw
from shardwright.testing import cpu_mesh
from tools.pictures.parts import draw_matrix, spec_text
from tools.pictures.svg import Box, Picture

PRESET, MESH = "fsdp_tp", "fsdp:2,tp:4"
WEIGHT, WEIGHT_SHAPE = (sw.EMBED, sw.MLP_INTERMEDIATE), (64, 256)
INPUT, INPUT_SHAPE = (sw.BATCH, sw.EMBED), (64, 64)
OUTPUT, OUTPUT_SHAPE = (sw.BATCH, sw.MLP_INTERMEDIATE), (64, 256)
ARROW_X = 330


def draw() -> str:
    """Return the picture: four stages from top to bottom."""
    pm = sw.PartitionManager(sw.Strategy.preset(PRESET), mesh=cpu_mesh(MESH))
    use = pm.explain(*WEIGHT, role="use", shape=WEIGHT_SHAPE)
    over = "+".join(axis for decision in use.decisions for axis in decision.gathered)
    title = "A weight is stored in parts, gathered and used; its gradient is in the same parts"
    picture = Picture(title=title, width=480, height=650)
    picture.text(20, 32, f"A weight under {PRESET}", kind="title")
    picture.text(20, 54, f"Mesh {MESH}. Yellow: what device 0 holds.", kind="soft")
    _weight(picture, 76, pm, title="1 stored", code='role="param"', role="param")
    _next(picture, 174, f"all-gather over {over}")
    _weight(picture, 222, pm, title="2 gathered", code="sw.gather(w, ...)", role="use")
    _next(picture, 320, "forward pass")
    _matmul(picture, 364, pm)
    _next(picture, 484, f"backward pass, sum over {over}")
    _weight(picture, 536, pm, title="4 gradient", code="like the stored weight", role="param")
    return picture.render()


def _weight(
    picture: Picture,
    y: float,
    pm: sw.PartitionManager,
    *,
    title: str,
    code: str,
    role: str,
) -> None:
    """Draw the weight in one role."""
    sharding = pm.sharding(*WEIGHT, role=role, shape=WEIGHT_SHAPE)
    picture.text(20, y + 24, title, kind="title")
    picture.text(20, y + 48, code, kind="code")
    picture.text(20, y + 68, spec_text(sharding.spec), kind="code soft")
    draw_matrix(picture, Box(x=200, y=y, width=260, height=90), sharding, WEIGHT_SHAPE)


def _next(picture: Picture, y: float, words: str) -> None:
    picture.arrow(ARROW_X, y, length=40)
    picture.text(20, y + 24, words, kind="soft")


def _matmul(picture: Picture, y: float, pm: sw.PartitionManager) -> None:
    """Draw `x @ w = y`: device 0 holds its factors, and computes its part of the result."""
    picture.text(20, y + 16, "3 used", kind="title")
    picture.text(100, y + 16, "x @ w = y", kind="code")
    picture.text(200, y + 16, "each device multiplies its shards", kind="soft")
    x = pm.sharding(*INPUT, shape=INPUT_SHAPE)
    w = pm.sharding(*WEIGHT, role="use", shape=WEIGHT_SHAPE)
    out = pm.sharding(*OUTPUT, shape=OUTPUT_SHAPE)
    draw_matrix(picture, Box(x=20, y=y + 34, width=84, height=72), x, INPUT_SHAPE)
    picture.text(112, y + 74, "@", kind="code")
    draw_matrix(picture, Box(x=132, y=y + 34, width=150, height=72), w, WEIGHT_SHAPE)
    picture.text(290, y + 74, "=", kind="code")
    draw_matrix(picture, Box(x=310, y=y + 34, width=150, height=72), out, OUTPUT_SHAPE)
