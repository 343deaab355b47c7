"""`sw.visualize`: blocks and devices equal those of JAX, for any rank, as text and as SVG."""

from __future__ import annotations

import html.parser
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.testing import cpu_mesh
from tests.raising import raises

PM = sw.PartitionManager(sw.Strategy.preset("serve_tp"), mesh=sw.abstract_mesh("dp:2,tp:4"))
SPECS = {
    "whole": P(),
    "one": P("a"),
    "last": P(None, None, "b"),
    "two": P("b", None, "a"),
    "joined": P(("b", "a"), "c"),
    "three": P("a", "c", "b"),
}


@pytest.mark.parametrize("name", SPECS)
def test_blocks_equal_those_of_jax(name: str) -> None:
    sharding = NamedSharding(cpu_mesh("a:2,b:2,c:2"), SPECS[name])
    x = jax.device_put(jnp.zeros((8, 8, 8)), sharding)
    drawn = sw.visualize(x)
    for shard in x.addressable_shards:
        (block,) = (place for place, held in drawn.holders.items() if shard.device.id in held)
        own = {dim.dim: (dim, at) for dim, at in zip(drawn.dims, block, strict=True)}
        for at, index in enumerate(shard.index):
            start, stop, _ = index.indices(8)
            expected = own[at][0].block(own[at][1]) if at in own else "0:8"
            assert expected == f"{start}:{stop}"
    assert math.prod(dim.blocks for dim in drawn.dims) == len(drawn.holders)


def test_text_of_two_dims() -> None:
    drawn = sw.visualize(P("fsdp", "tp"), shape=(64, 256), mesh="fsdp:2,tp:4")
    assert str(drawn).splitlines() == [
        "P('fsdp', 'tp') of [64,256] on fsdp:2,tp:4, a block has [32,64]",
        "",
        "  dim 0 / dim 1  0:64  64:128  128:192  192:256",
        "  0:32           0     1       2        3",
        "  32:64          4     5       6        7",
    ]
    assert repr(drawn) == str(drawn)


def test_text_of_a_resolution_with_three_dims() -> None:
    strategy = sw.Strategy(rules={"batch": "dp", "kv_length": "sp", "kv_head": "tp"})
    pm = sw.PartitionManager(strategy, mesh=sw.abstract_mesh("dp:2,sp:2,tp:2"))
    axes = (sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD)
    text = str(sw.visualize(pm.explain(axes, shape=(4, 64, 2))))
    assert "dim 0 BATCH 0:2" in text
    assert "dim 0 BATCH 2:4" in text
    assert "dim 1 KV_LENGTH / dim 2 KV_HEAD" in text
    rows = [line.split() for line in text.splitlines() if line.startswith(("  0:32", "  32:64"))]
    assert [row[1:] for row in rows] == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]


def test_replicated_and_large_meshes_are_short() -> None:
    assert "0 to 7" in str(sw.visualize(P(), mesh="dp:8"))
    drawn = sw.visualize(P("x", "y"), shape=(4096, 4096), mesh="x:64,y:64,z:4")
    lines = str(drawn).splitlines()
    assert len(lines) < 70
    assert max(map(len, lines)) <= 90
    assert "..." in lines[2]
    assert len(drawn._repr_html_()) < 120_000
    assert ">252 to 255<" in drawn._repr_html_()
    # Texts of wide cells are squeezed, so that none runs into the next one.
    wide = sw.visualize(P("x"), mesh="x:4,y:16384")._repr_html_()
    assert 'lengthAdjust="spacingAndGlyphs">16384 to 32767<' in wide
    panels = str(sw.visualize(P("a", "b", "c", "d"), mesh="a:8,b:8,c:2,d:2"))
    assert panels.count("dim 2 / dim 3") == 16
    assert "\n...\n" in panels


def test_ids_of_devices_are_shown() -> None:
    devices = np.array(jax.devices()[::-1])
    x = jax.device_put(jnp.zeros(8), NamedSharding(jax.sharding.Mesh(devices, ("x",)), P("x")))
    assert sw.visualize(x).holders[0,] == (7,)


def test_shardings_without_names() -> None:
    one = jax.device_put(jnp.zeros((4, 4)), jax.devices()[3])
    assert sw.visualize(one).holders == {(): (3,)}
    sharding = NamedSharding(cpu_mesh("a:8"), P(None, "a"))
    assert "block 7" in str(sw.visualize(sharding))


class Tags(html.parser.HTMLParser):
    """Collects texts by tag, and checks that tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts += [data] * (self.open[-1] == "text")


def test_svg_has_panels_and_names() -> None:
    spec = PM.explain(sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, shape=(2, 64, 4), mode="decode")
    shown = sw.visualize(spec)._repr_html_()
    assert {"0:1", "1:2", "0", "7"} <= set(Tags(shown).texts)
    three = sw.visualize(P("a", "b", "c"), shape=(2, 2, 2), mesh="a:2,b:2,c:2")._repr_html_()
    assert three.count("<svg") == 2
    assert "dim 0 1:2" in three


def test_what_has_no_sharding_is_refused() -> None:
    with raises(sw.StrategyError, "ndarray", "sharding", fix="Resolution"):
        sw.visualize(np.zeros(3))
    with raises(sw.StrategyError, "mesh", fix="fsdp:2"):
        sw.visualize(P("fsdp"))
    with raises(sw.StrategyError, "sharding", fix="outside of jit"):
        jax.jit(sw.visualize)(jnp.zeros(8))
    with raises(sw.StrategyError, "P('a', 'b')", "[8]", fix="2 sizes"):
        sw.visualize(P("a", "b"), shape=(8,), mesh="a:2,b:2")
    failed = PM.explain(sw.HEAD, shape=(3,))
    with raises(sw.IndivisibleError, "tp=4", 3, fix="tp | -"):
        sw.visualize(failed)
    with pytest.raises(ValueError, match="divi"):
        sw.visualize(P("a"), shape=(3,), mesh="a:2")
