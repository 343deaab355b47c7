"""`PartitionManager._repr_html_`: the mesh, and where each axis goes."""

from __future__ import annotations

import shardwright as sw
from shardwright.testing import Golden, cpu_mesh
from tests.resolution.test_html import Tags


def shown(mesh: str, preset: str = "fsdp_tp") -> str:
    return sw.PartitionManager(
        sw.Strategy.preset(preset), mesh=sw.abstract_mesh(mesh), mode="decode"
    )._repr_html_()


def test_manager(golden: Golden) -> None:
    golden(shown("dp:1,fsdp:2,tp:4", "serve_tp").replace("><", ">\n<"), "manager")


def test_devices_by_mesh_axis() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=cpu_mesh("fsdp:2,tp:4"))
    tags = Tags(pm._repr_html_())
    assert tags.texts("text") == [str(device.id) for device in pm.mesh.devices.flat]
    assert tags.texts("figcaption") == ["Devices by mesh axis. Rows: fsdp=2. Columns: tp=4"]
    assert Tags(shown("dp:1")).texts("text") == ["0"]


def test_size_dependent_axes_show_their_rule() -> None:
    cells = Tags(shown("fsdp:2,tp:4")).texts("td")
    row = cells.index("KV_HEAD")
    assert cells[row : row + 3] == ["KV_HEAD", "tp | -", "tp | -"]


def test_large_mesh_has_no_picture() -> None:
    for mesh in ("fsdp:64,tp:8", "fsdp:32", "dp:8,fsdp:4,tp:2"):
        assert "<svg" not in shown(mesh)
    assert "<svg" in shown("dp:4,fsdp:4,tp:4")


def test_text_is_escaped() -> None:
    strategy = sw.Strategy.preset("ddp") | sw.Strategy(name="<script>")
    pm = sw.PartitionManager(strategy, mesh=sw.abstract_mesh("dp:8"))
    assert "<script>" not in pm._repr_html_()
    assert "&lt;script&gt;" in pm._repr_html_()
