"""Every malformed request has one message, which a person has read, and changes nothing.

`messages.txt` holds them all. After a message changes on purpose, `python -m tests.bad_input.update` writes it anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardwright as sw
from tests.bad_input import calls, strategies
from tests.bad_input.scene import Call, make_scene, message, state

MESSAGES = Path(__file__).with_name("messages.txt")
CASES: dict[str, Call] = {**strategies.CASES, **calls.MESHES, **calls.ANNOTATIONS, **calls.CALLS}
MARK = "==== "

# Python says this well enough itself.
PLAIN = {"a manager that is assigned to": AttributeError}


def read_messages() -> dict[str, str]:
    found = {}
    for block in MESSAGES.read_text(encoding="utf-8").split(MARK)[1:]:
        name, _, text = block.partition("\n")
        found[name] = text.rstrip("\n")
    return found


def render(messages: dict[str, str]) -> str:
    return "\n\n".join(f"{MARK}{name}\n{text}" for name, text in messages.items()) + "\n"


@pytest.mark.parametrize("name", list(CASES))
def test_refused_with_its_message_and_without_a_trace(name: str, tmp_path: Path) -> None:
    scene = make_scene(tmp_path)
    before = state(scene)
    with pytest.raises(PLAIN.get(name, sw.ShardingError), match=r"\S") as caught:
        CASES[name](scene)
    assert state(scene) == before
    golden = read_messages()
    assert name in golden, "no golden message: python -m tests.bad_input.update"
    assert message(scene, caught.value) == golden[name]


def test_every_golden_message_has_its_case() -> None:
    assert list(read_messages()) == list(CASES)


@pytest.mark.parametrize("name", [name for name in CASES if name not in PLAIN])
def test_message_says_how_to_fix_it(name: str) -> None:
    """Each problem of each message ends in what to do."""
    text = read_messages()[name]
    blocks = re.split(r"\n \d+\. ", text)
    for block in blocks[1:] or blocks:
        assert re.search(r"\n +fix   \S", block), block


def test_messages_advise_what_exists_and_show_no_data() -> None:
    """A fix must be something that one can write; a message shows shapes and sizes, never an array's contents."""
    messages = read_messages()
    assert "pm.current_manager" not in messages["current_manager without a manager"], "a manager has no such method"
    assert "shape=" not in messages["mesh_axes of a size that decides"], "mesh_axes takes a size"
    assert "array(" not in messages["a tree of lists"]
    assert "scene.toml" not in messages["an overlay with a bad mesh axis"], "the rule came from Python, not from that line"
    assert "this manager" not in messages["left and never entered"] + messages["left in the wrong order"], "which one?"
