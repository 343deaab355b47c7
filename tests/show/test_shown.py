"""Every value that asks `show` for a form has a function for it there."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

import shardwright
from shardwright.vocabulary import shown
from shardwright.vocabulary.shown import data_of, html_of, text_of

SRC = Path(shardwright.__file__).parent
FORMS = {"text_of": text_of, "html_of": html_of, "data_of": data_of}


@functools.cache
def asked() -> set[tuple[str, str, str]]:
    """(module, class, form) of each class whose methods ask for one of its forms."""
    found = set()
    for path in SRC.rglob("*.py"):
        module = ".".join(("shardwright", *path.relative_to(SRC).with_suffix("").parts))
        text = path.read_text()
        if not any(f"{form}(" in text for form in FORMS):
            continue
        classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
        found |= {
            (module, each.name, call.func.id)
            for each in classes
            for call in ast.walk(each)
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id in FORMS
        }
    return found


def test_every_form_that_a_value_asks_for_is_registered() -> None:
    pairs = asked()
    assert ("shardwright.resolution.decisions", "Resolution", "html_of") in pairs
    missing = []
    for module, name, form in sorted(pairs):
        cls = getattr(importlib.import_module(module), name)
        importlib.import_module(shown._FILES[name])
        if cls not in FORMS[form].registry:
            missing.append((name, form))
    assert missing == []


def test_every_class_of_the_table_asks() -> None:
    """But for parts of others, whose data their whole asks for."""
    parts = {"LeafBytes"}
    assert set(shown._FILES) == {name for _, name, _ in asked()} | parts


@pytest.mark.full
def test_options_pass_on_the_first_call() -> None:
    """The first call of a class imports its file; the next ones go to its function directly."""
    code = (
        "import shardwright as sw; from shardwright.inference.inferred import Inferred; "
        "empty = Inferred(annotations=(), evidence=(), conflicts=(), unknown=()); "
        "first = empty.toml(); assert first == empty.toml() and 'Review' in first"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


SLOW = """
import gate
from shardwright.vocabulary.shown import text_of

@text_of.register(gate.SlowValue)
def _slow(value):
    return _late()

gate.half.set()
gate.go_on.wait(60)

def _late():
    return "shown"
"""


def test_a_thread_waits_for_the_import_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file registers a function before the names that the function uses are defined."""
    gate: Any = types.ModuleType("gate")
    gate.half, gate.go_on = threading.Event(), threading.Event()
    gate.SlowValue = type("SlowValue", (), {})
    (tmp_path / "slow_show.py").write_text(SLOW, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "gate", gate)
    monkeypatch.setitem(shown._FILES, "SlowValue", "slow_show")
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(text_of(gate.SlowValue()))) for _ in range(2)
    ]
    threads[0].start()
    assert gate.half.wait(60)
    threads[1].start()
    threads[1].join(0.3)
    gate.go_on.set()
    for thread in threads:
        thread.join(60)
    assert texts == ["shown", "shown"]
    monkeypatch.delitem(text_of.registry, gate.SlowValue)
    sys.modules.pop("slow_show")


def test_a_class_without_a_function_is_named() -> None:
    with pytest.raises(AssertionError, match="no function for object"):
        text_of(object())
