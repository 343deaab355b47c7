"""Every lint fires on its case, with place and fix, and is silent on the presets."""

from __future__ import annotations

from typing import Any

import pytest

import shardwright as sw
from shardwright.lints.catalogue import Code, Finding, lint
from shardwright.trees.tensors import Tensor
from tests.golden import layer
from tests.golden.specs import MESHES
from tests.lints.cases import CASES, Case

PRESETS = sw.Strategy.presets()


def found(case: Case, text: str, mesh: Any) -> list[Finding]:
    return [
        finding
        for finding in lint(sw.Strategy.loads(text, source="s.toml"), case.tensors, mesh=mesh)
        if finding.code is case.code
    ]


@pytest.mark.parametrize("name", CASES)
def test_lint_fires_on_its_case_only(name: str) -> None:
    case = CASES[name]
    # A strategy that names an unknown axis in [rules] beside a mesh is refused when it is loaded:
    # the command line's test.
    first = next(
        (finding for finding in found(case, case.text, case.mesh) if finding.where == case.where),
        None,
    )
    assert first is not None, found(case, case.text, case.mesh)
    assert case.says in first.message
    assert case.fix in first.fix
    assert first.severity is case.severity
    if case.quiet:
        assert found(case, case.quiet, case.quiet_mesh or case.mesh) == []


def test_modes_of_ordered_rules_may_repeat() -> None:
    case = CASES["a mode that says nothing new"]
    ordered = '[policy]\norder = "rules"\n'
    assert len(found(case, case.text, case.mesh)) == 1
    assert found(case, ordered + case.text, case.mesh) == []


def test_arrays_of_a_tree_replace_layouts() -> None:
    case = CASES["a mesh axis for two axes of a layout"]
    findings = lint(sw.Strategy.loads(case.text), [Tensor(path="x", axes=(sw.HEAD,))])
    assert case.code not in {finding.code for finding in findings}


def test_mode_may_write_the_default_of_a_mesh_axis() -> None:
    case = CASES["a mode that says nothing new"]
    text = '[modes.decode{}]\ntensor_parallel = "tp"\n'
    assert len(found(case, text.format(""), None)) == 1
    assert found(case, text.format(".params"), None) == []


def test_every_code_has_a_case() -> None:
    # In tests/cli and in test_names.py.
    elsewhere = {
        Code.INVALID,
        Code.OTHER_NAME,
        Code.SPATIAL_AND_CHANNEL,
        Code.STATE_NOT_DONATED,
        Code.UNUSED_SAVED,
    }
    assert {case.code for case in CASES.values()} | elsewhere == {*Code}


TREE = [
    *(
        Tensor(
            path=f"params/{tensor.name}",
            axes=tensor.axes,
            shape=tensor.shape("train"),
            role=sw.Role.PARAM,
        )
        for tensor in layer.WEIGHTS
    ),
    *(
        Tensor(path=f"acts/{tensor.name}", axes=tensor.axes, shape=tensor.shape("train"))
        for tensor in layer.ACTIVATIONS
    ),
]
DENSE = [
    tensor
    for tensor in TREE
    if "expert" not in tensor.path
    and "router" not in tensor.path
    and "by layout" not in tensor.path
]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_clean(preset: str) -> None:
    strategy = sw.Strategy.preset(preset)
    assert lint(strategy) == ()
    assert lint(strategy, DENSE) == lint(strategy, TREE) == ()
    for mesh in MESHES:
        assert lint(strategy, mesh=mesh) == ()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.full(
    but=[
        "dp:1,fsdp:2,tp:4-ddp",
        "dp:1,fsdp:2,tp:4-fsdp_tp",
        "dp:1,fsdp:2,tp:4-sequence",
        "dp:2,tp:4-ddp",
        "dp:2,tp:4-fsdp_tp_sp",
        "dp:2,tp:4-single",
        "fsdp:2,tp:2,ep:2-fsdp_tp_sp",
        "fsdp:2,tp:2,ep:2-serve_long_context",
        "sp:2-fsdp",
        "sp:2-moe_ep",
        "sp:2-serve_long_context",
        "sp:2-tensor",
    ]
)
def test_presets_are_clean_on_a_layer(preset: str, mesh: str) -> None:
    """A mesh axis that a preset does not use is idle, and a batch of one does not divide.

    Both are true, and nothing else is said.
    """
    manager = sw.PartitionManager(sw.Strategy.preset(preset), mesh=sw.abstract_mesh(mesh))
    answers = [
        manager.explain(
            tensor.axes, mode=mode, role=tensor.role, shape=tensor.shape, path=tensor.path
        )
        for tensor in TREE
        for mode in ("train", "decode", "prefill")
    ]
    named = {
        axis for answer in answers for decision in answer.decisions for axis in decision.mesh_axes
    }
    named |= {
        axis for answer in answers for problem in answer.problems for axis in problem.mesh_axes
    }
    idle = [axis for axis, size in manager.mesh.shape.items() if size > 1 and axis not in named]
    failing = {answer.path for answer in answers if not answer.ok}
    findings = lint(sw.Strategy.preset(preset), TREE, mesh=mesh)
    assert [finding.key for finding in findings if finding.code is Code.IDLE_MESH_AXIS] == [
        f"mesh axis {axis}" for axis in idle
    ]
    assert {
        finding.key.partition(" dim ")[0] for finding in findings if finding.code is Code.UNRESOLVED
    } == failing
    assert {finding.code for finding in findings} <= {Code.IDLE_MESH_AXIS, Code.UNRESOLVED}
