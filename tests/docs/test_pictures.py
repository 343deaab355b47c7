"""`python -m tools.pictures` draws the pictures in docs/pictures."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import jax
import pytest
from jax.sharding import NamedSharding

from shardwright.testing import cpu_mesh
from shardwright.testing.golden import Golden
from tests.docs.snippets import ROOT
from tools.pictures.__main__ import FOLDER, PICTURES
from tools.pictures.parts import holders
from tools.pictures.svg import Picture


@pytest.mark.parametrize("name", PICTURES)
def test_picture_matches_its_script(name: str, golden: Golden) -> None:
    picture = PICTURES[name]()
    golden.file(FOLDER / f"{name}.svg", picture)
    ET.fromstring(picture)
    assert "prefers-color-scheme: dark" in picture


def test_every_picture_has_a_script() -> None:
    assert FOLDER == ROOT / "docs" / "pictures"
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(PICTURES)


def test_devices_of_each_part() -> None:
    sharding = NamedSharding(cpu_mesh("fsdp:2,tp:4"), jax.P("fsdp"))
    assert holders(sharding, (4, 8)) == {
        ((0, 2), (0, 8)): [0, 1, 2, 3],
        ((2, 4), (0, 8)): [4, 5, 6, 7],
    }


def test_too_long_text() -> None:
    picture = Picture(title="a & b", width=100, height=20)
    picture.text(0, 10, "x < y")
    assert "<title>a &amp; b</title>" in picture.render()
    assert ">x &lt; y</text>" in picture.render()
    with pytest.raises(ValueError, match="is too long for a picture 100 pixels wide"):
        picture.text(0, 10, "a line that does not fit")
