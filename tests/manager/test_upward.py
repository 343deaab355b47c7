"""Methods of the manager that rooms above it implement: imported at the first call."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

import shardwright as sw
from shardwright.manager import upward


@pytest.fixture
def pm(monkeypatch: pytest.MonkeyPatch) -> sw.PartitionManager:
    def weigh(manager: Any, tree: Any, *, by: str = "bytes") -> Any:
        return manager, tree, by

    module: Any = types.ModuleType("above_the_manager")
    module.weigh = weigh
    monkeypatch.setitem(sys.modules, "above_the_manager", module)
    monkeypatch.setattr(upward, "UPWARD", {"weigh": "above_the_manager:weigh"})
    return sw.PartitionManager(sw.Strategy.preset("ddp"), mesh=sw.abstract_mesh("dp:8"))


def test_method_gets_the_manager(pm: Any) -> None:
    assert pm.weigh({"a": 1}, by="rows") == (pm, {"a": 1}, "rows")
    assert "weigh" in dir(pm)


def test_unknown_attribute_is_refused(pm: Any) -> None:
    with pytest.raises(AttributeError, match="'PartitionManager' object has no attribute 'wiegh'"):
        _ = pm.wiegh
    assert not hasattr(pm, "_repr_latex_")
