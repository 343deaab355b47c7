"""Every malformed request has one message, which a person has read, and changes nothing.

The golden files, one for each class of error, hold the prose of messages. Other tests assert the
facts of an error with `raises` of `tests/raising.py`, and no prose.
"""

from __future__ import annotations

import inspect
import re

import pytest

import shardwright as sw
from shardwright import errors
from shardwright.testing.golden import Golden
from tests.bad_input import calls, rooms, slips, strategies
from tests.bad_input.scene import Call, make_scene, message, state

CASES: dict[str, Call] = {
    **strategies.CASES,
    **calls.MESHES,
    **calls.ANNOTATIONS,
    **calls.CALLS,
    **slips.SLIPS,
    **rooms.CASES,
}

# Python says this well enough itself.
PLAIN = {"an assignment to a manager": AttributeError}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], list[str]]:
    """The message of each case, and the cases that changed something."""
    actual, changed = {}, []
    for name, call in CASES.items():
        scene = make_scene(tmp_path_factory.mktemp("scene"))
        before = state(scene)
        with pytest.raises(PLAIN.get(name, sw.ShardingError), match=r"\S") as caught:
            call(scene)
        actual[name] = message(scene, caught.value)
        if state(scene) != before:
            changed.append(name)
    return actual, changed


@pytest.fixture(scope="module")
def messages(refusals: tuple[dict[str, str], list[str]]) -> dict[str, str]:
    return refusals[0]


def test_messages(messages: dict[str, str], golden: Golden) -> None:
    files: dict[str, list[str]] = {}
    for name, said in messages.items():
        error, _, text = said.partition("\n")
        files.setdefault(error, []).append(f"==== {name}\n{text}")
    for error, texts in files.items():
        golden("\n\n".join(texts), error)


def test_each_class_of_error_has_messages(messages: dict[str, str]) -> None:
    classes = {
        name
        for name, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, sw.ShardingError)
    }
    shown = {said.partition("\n")[0] for said in messages.values()}
    assert classes - shown == {"ShardingError"}


def test_refused_without_a_trace(refusals: tuple[dict[str, str], list[str]]) -> None:
    assert refusals[1] == []


def test_messages_say_how_to_fix_it(messages: dict[str, str]) -> None:
    """Each problem of each message ends in what to do."""
    unfixed = []
    for name in messages.keys() - PLAIN.keys():
        blocks = re.split(r"\n \d+\. ", messages[name])
        unfixed += [
            f"{name}: {block}"
            for block in blocks[1:] or blocks
            if not re.search(r"\n +fix   \S", block)
        ]
    assert not unfixed, "\n".join(unfixed)


def test_messages_name_only_what_exists(messages: dict[str, str]) -> None:
    """A fix must be something that one can write; a message shows shapes and sizes, never an
    array's contents.
    """
    assert "pm.current_manager" not in messages["current_manager without a manager"], (
        "a manager has no such method"
    )
    assert "shape=" not in messages["mesh_axes without a size that decides"], (
        "mesh_axes takes a size"
    )
    assert "array(" not in messages["a tree of lists"]
    assert "scene.toml" not in messages["an overlay with a bad mesh axis"], (
        "the rule came from Python, not from that line"
    )
    assert (
        "this manager"
        not in messages["a manager left without being entered"]
        + messages["managers left in the wrong order"]
    ), "which one?"
