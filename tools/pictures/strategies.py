"""One weight under four strategies on a 2x4 mesh."""

from __future__ import annotations

from jax.sharding import Mesh

import shardwright as sw
from shardwright.testing import cpu_mesh
from tools.pictures.parts import draw_matrix, draw_mesh, spec_text
from tools.pictures.svg import Box, Picture

AXES = (sw.EMBED, sw.MLP_INTERMEDIATE)
SHAPE = (64, 256)
PRESETS = ("ddp", "fsdp", "tensor", "fsdp_tp")


def draw() -> str:
    """Return the picture: under each preset, the parts of the weight and their devices."""
    mesh = cpu_mesh("fsdp:2,tp:4")
    title = f"One weight under {', '.join(PRESETS)} on a mesh of 2 x 4 devices"
    picture = Picture(title=title, width=480, height=528)
    picture.text(20, 32, "One weight, one annotation", kind="title")
    picture.text(20, 54, "(EMBED 64, MLP_INTERMEDIATE 256)", kind="code")
    picture.text(20, 76, "Yellow: what device 0 holds.", kind="soft")
    picture.text(342, 24, "mesh fsdp:2, tp:4", kind="code soft")
    draw_mesh(picture, Box(x=340, y=34, width=120, height=46), mesh)
    for number, preset in enumerate(PRESETS):
        row, column = divmod(number, 2)
        _panel(picture, 20 + 230 * column, 100 + 212 * row, preset, mesh)
    return picture.render()


def _panel(picture: Picture, x: float, y: float, preset: str, mesh: Mesh) -> None:
    pm = sw.PartitionManager(sw.Strategy.preset(preset), mesh=mesh)
    resolution = pm.explain(*AXES, role="param", shape=SHAPE)
    sharding = pm.sharding(*AXES, role="param", shape=SHAPE)
    picture.text(x, y + 16, preset, kind="title")
    picture.text(x + 80, y + 16, spec_text(resolution.require()), kind="code")
    draw_matrix(picture, Box(x=x, y=y + 28, width=210, height=100), sharding, SHAPE)
    for line, decision in enumerate(resolution.decisions):
        assert decision.rule is not None
        rule = f'{decision.rule.key} = "{decision.rule.text}"'
        picture.text(x, y + 148 + 18 * line, rule, kind="code soft")
    picture.text(x, y + 186, f"one device holds {sharding.shard_shape(SHAPE)}")
