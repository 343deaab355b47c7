"""Lists of logical axis rules, compared with flax."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.interop import haliax, jax_llm_examples, maxtext
from shardwright.interop.logical_rules import (
    Imported,
    Names,
    Semantics,
    one_rule_each,
    to_logical_axis_rules,
    to_strategy,
)
from shardwright.interop.logical_rules.models import library
from shardwright.testing import cpu_mesh
from shardwright.vocabulary.axes import CAPACITY, NORM
from tests.interop.rule_lists import (
    NAMES,
    as_tuples,
    compare_lists,
    entries,
    random_lists,
)
from tests.raising import facts, raises

GOLDEN = Path(__file__).parent / "golden" / "flax_rules.json"
OWN = {name: f"name_{name}" for name in NAMES}
MESH = {"data": 2, "model": 4}


def different(case: dict[str, Any], expected: list[Any]) -> list[Any]:
    """Return the arrays of a list whose imported spec is another one."""
    rules, mesh = as_tuples(case["rules"]), case["mesh"]
    imported = to_strategy(rules, mesh=mesh, names=OWN, own_axes=OWN.values())
    compiled = imported.strategy.compile()
    found = [
        entries(sw.resolve(imported.annotation(names), compiled, mesh).spec, mesh)
        for names in case["arrays"]
    ]
    return [] if found == expected else [(rules, mesh, case["arrays"], expected, found)]


def test_golden_specs_of_flax() -> None:
    lists = json.loads(GOLDEN.read_text())["lists"]
    wrong = [one for case in lists for one in different(case, case["specs"])]
    assert not wrong, (len(wrong), wrong[0])
    assert sum(len(case["arrays"]) for case in lists) == 600
    drawn = [{**case, "specs": None} for case in random_lists(seed=0, count=200)]
    assert [{**case, "specs": None} for case in lists] == drawn


@pytest.mark.full
@pytest.mark.parametrize("semantics", ["flax", "nnx", "strict"])
def test_random_lists_equal_libraries(semantics: Semantics) -> None:
    pytest.importorskip("flax.linen.spmd")
    compared, different = compare_lists(semantics, seed=1, count=5000)
    assert not different, (len(different), different[0])
    assert compared >= 15_000


@pytest.mark.parametrize("semantics", ["flax", "nnx", "strict"])
def test_some_lists_equal_libraries(semantics: Semantics) -> None:
    pytest.importorskip("flax.linen.spmd")
    compared, different = compare_lists(semantics, seed=3, count=100)
    assert not different, (len(different), different[0])
    assert compared >= 300


RULES = (
    ("batch", "data"),
    ("embed", "model"),
    ("embed", "data"),
    ("mlp", "model"),
    ("embed", None),
    ("embed", "model"),
    ("activation_embed", None),
    ("kv", ()),
)


def test_explain_names_the_imported_rule() -> None:
    places = [f"base.yml:{number}" for number in range(10, 18)]
    imported = to_strategy(RULES, mesh=MESH, source=places)
    rules = imported.strategy.compile()
    resolution = sw.explain(imported.annotation(("mlp", "embed", "batch")), rules, MESH)
    assert [str(decision.rule) for decision in resolution.decisions] == [
        'logical_mlp = "model"   (base.yml:13, [rules])',
        'logical_embed = "model | data"   (base.yml:11, base.yml:12, [rules])',
        'logical_batch = "data"   (base.yml:10, [rules])',
    ]
    assert resolution.spec == P(None, "model", "data")
    assert imported.notes == (
        'never applies, since an earlier rule replicates: embed = "model"   (base.yml:15)',
    )
    assert str(imported).splitlines()[0] == "5 names imported"


def test_names_with_roles() -> None:
    names: Names = {
        "batch": (sw.BATCH, "activation"),
        "embed": (sw.EMBED, "param"),
        "activation_embed": (sw.EMBED, sw.Role.ACTIVATION),
        "heads": "heads",
    }
    imported = to_strategy(RULES, mesh=MESH, names=names, own_axes=["heads"])
    strategy = imported.strategy
    assert imported.names["embed"] == (sw.EMBED, "param")
    assert strategy.rules["embed"] == "-"
    assert strategy.params["embed"] == "model | data | -"
    assert strategy.params["batch"] == "data"
    assert imported.notes[1:] == (
        "names without a rule are replicated: heads",
        "names that became axes of their own: mlp, kv",
    )
    pm = sw.PartitionManager(strategy, mesh=sw.abstract_mesh("data:2,model:4"))
    assert pm.resolve(sw.BATCH, sw.EMBED) == P("data")
    weight = imported.annotation(("mlp", "embed"))
    assert weight == ("__LOGICAL_MLP__", sw.EMBED)
    assert pm.resolve(*weight, role="param") == P(None, "model")
    assert pm.resolve(*imported.annotation(("heads", None))) == P()
    assert sw.Strategy.loads(strategy.dumps()) == strategy


MISSPELLED: Names = {"embed": ("EMBD", "param"), "mlp": "MLP"}
BOTH = (
    facts("axis", path="names['embed']", axis="EMBD", fix=("EMBED", "own_axes")),
    facts("axis", path="names['mlp']", axis="MLP", fix=("MLP_INTERMEDIATE", "own_axes")),
)


def test_misspelled_axes_are_not_declared() -> None:
    with raises(sw.UnknownAxisError, BOTH):
        to_strategy(RULES, mesh=MESH, names=MISSPELLED)
    own = to_strategy(RULES, mesh=MESH, names=MISSPELLED, own_axes=["embd", "MLP"])
    assert [*own.strategy.axes][:2] == ["embd", "mlp"]
    # A strategy with its own import's names needs no declaration.
    plain = to_strategy(RULES, mesh=MESH)
    again = to_strategy(RULES, mesh=MESH, names=plain.names)
    assert again.strategy == plain.strategy


@dataclasses.dataclass
class ShardingRules:
    embed: Any = "data"
    mlp: Any = None


def test_every_importer_refuses_misspelled_axes() -> None:
    names: Any = {"embed": "EMBD", "mlp": "MLP"}
    config = {"mesh_axes": ["data"], "logical_axis_rules": [["embed", "data"], ["mlp", "data"]]}
    mappings = {"embed": "data", "mlp": "data"}
    importers: list[Any] = [
        functools.partial(maxtext.to_strategy, config),
        functools.partial(jax_llm_examples.to_strategy, ShardingRules, mesh={"data": 2}),
        functools.partial(haliax.to_strategy, mappings, mesh={"data": 2}),
        functools.partial(
            haliax.levanter.to_strategy, {"trainer": {"tensor_parallel_axes": ["mlp"]}}
        ),
    ]
    for load in importers:
        with raises(sw.UnknownAxisError, BOTH):
            load(names=names)
        assert {"embd", "mlp"} <= {*load(names=names, own_axes=["embd", "mlp"]).strategy.axes}


def test_misspelled_axes_are_not_exported() -> None:
    """They were exported as replicated names."""
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=cpu_mesh("fsdp:4,tp:2"))
    for export in (to_logical_axis_rules, one_rule_each):
        with raises(
            sw.UnknownAxisError, "axis", path="names['mlp']", axis="MLP", fix="mlp", count=2
        ):
            export(pm, MISSPELLED)
        with raises(
            sw.UnknownAxisError,
            "unknown",
            "axis",
            path="names['embed']",
            axis="LOGICAL_EMBED",
            fix="logical_embed",
        ):
            export(pm, {"embed": ("logical_embed", "param")})


def test_names_of_one_axis_keep_their_place() -> None:
    """A rule between two equal ones is tried after the first and before the second."""
    rules = (("embed", "fsdp"), ("vocab", "fsdp"), ("embed_out", "fsdp"))
    names: Names = dict.fromkeys(("embed", "embed_out"), (sw.EMBED, "param"))
    mesh = "data:2,fsdp:2"
    with raises(sw.StrategyError, "embed_out", "fsdp", "rules[0]", "rules[1]", path="rules[2]"):
        to_strategy(rules, mesh=mesh, names=names)
    # The semantics "nnx" has no order, and a rule of another mesh axis does not compete.
    to_strategy(rules, mesh=mesh, names=names, semantics="nnx")
    imported = to_strategy((rules[0], ("vocab", "data"), rules[2]), mesh=mesh, names=names)
    assert imported.names["embed_out"] == (sw.EMBED, "param")


def test_a_name_without_a_rule_is_replicated() -> None:
    """It had the rule of the other role."""
    names: Names = {"embed": (sw.EMBED, "param"), "activation_embed": (sw.EMBED, "activation")}
    mesh = {"fsdp": 4}
    imported = to_strategy((("embed", "fsdp"),), mesh=mesh, names=names)
    compiled = imported.strategy.compile()
    for name, role, spec in (
        ("activation_embed", "activation", P()),
        ("embed", "param", P("fsdp")),
    ):
        axes = imported.annotation((name,))
        assert sw.resolve(axes, compiled, mesh, shape=(8,), role=role).spec == spec
    assert imported.notes == ("names without a rule are replicated: activation_embed",)


def test_modes_of_weights_are_noted() -> None:
    names: Names = {"a": (sw.EMBED, "activation"), "b": (sw.EMBED, "param")}
    rules = (("a", "data"), ("b", "data"), ("p_b", "model"))
    imported = to_strategy(rules, mesh=MESH, names=names, modes={"p_b": ("b", "prefill")})
    assert "p_b applies in all modes, because b is a name of weights" in imported.notes
    assert imported.annotation(("p_b",)) == ("__LOGICAL_P_B__",)


def test_names_mapped_to_empty() -> None:
    rules = (("embed", "data"), ("mlp", "model"))
    imported = to_strategy(rules, mesh=MESH, names={"embed": sw.EMPTY})
    assert imported.annotation(("embed", "mlp")) == (sw.EMPTY, "__LOGICAL_MLP__")
    assert imported.notes[0] == 'mapped to EMPTY, so never sharded: embed = "data"   (rules[0])'
    assert not any("without a rule" in note for note in imported.notes)
    assert dict(imported.strategy.rules) == {"logical_mlp": "model"}
    assert imported.strategy.policy.idle == "data"


def test_name_twice() -> None:
    """flax refuses it, even if it is replicated. JAX refuses a mesh axis twice."""
    rules, names = (("embed", None), ("mlp", "model")), ("embed", None, "embed")
    with raises(sw.AxisConflictError, "embed", dim=2, fix="None"):
        to_strategy(rules, mesh=MESH).annotation(names)
    for semantics in ("nnx", "strict"):
        imported = to_strategy(rules, mesh=MESH, semantics=semantics)  # type: ignore[arg-type]
        compiled = imported.strategy.compile()
        assert sw.resolve(imported.annotation(names), compiled, MESH).spec == P()
        with raises(sw.AxisConflictError, "model", 0, dim=1):
            sw.resolve(imported.annotation(("mlp", "mlp")), compiled, MESH)


def test_idle_mesh_axes_are_declared() -> None:
    mesh = {"data": 2, "replica": 2, "tp": 2}
    imported = to_strategy([("batch", "data")], mesh=mesh)
    assert imported.strategy.policy.idle == "replica"
    assert imported.notes == ("mesh axes that no rule names are idle: replica",)
    sw.PartitionManager(imported.strategy, mesh=sw.abstract_mesh("data:2,replica:2,tp:2"))


def test_names_that_collide() -> None:
    rules = [("a.b", "data"), ("a-b", "model"), ("A_B", None), ("embed", None)]
    imported = to_strategy(rules, mesh=MESH)
    assert list(imported.strategy.axes) == [
        "logical_a_b",
        "logical_a_b_2",
        "logical_a_b_3",
        "logical_embed",
    ]


def test_nnx_takes_the_last_rule() -> None:
    rules = (("embed", "data"), ("mlp", "model"), ("embed", ("model",)))
    imported = to_strategy(rules, mesh=MESH, semantics="nnx")
    compiled = imported.strategy.compile()
    assert imported.notes == (
        'replaced by a later rule of the name: embed = "data"   (rules[0])',
        "mesh axes are names too: data, model",
    )
    expected = {
        ("embed",): P("model"),
        ("embed", "data"): P("model", "data"),
        ("mlp", None): P("model"),
    }
    for names, spec in expected.items():
        assert (
            sw.resolve(imported.annotation(names), compiled, MESH, shape=(8,) * len(names)).spec
            == spec
        )
    with raises(sw.AxisConflictError, "model", 0, "LOGICAL_EMBED", fix="EMPTY"):
        sw.resolve(imported.annotation(("embed", "mlp")), compiled, MESH, shape=(8, 8))


def test_strict_has_one_rule_for_each_name() -> None:
    imported = to_strategy(RULES[3:5], mesh=MESH, semantics="strict")
    assert dict(imported.strategy.rules) == {"logical_mlp": "model", "logical_embed": "-"}
    with raises(sw.StrategyError, "embed", "model", path="rules[2]", fix="flax"):
        to_strategy(RULES, mesh=MESH, semantics="strict")


def test_every_bad_rule_is_reported() -> None:
    rules: Any = [
        ("embed", "fsdp"),
        ("mlp", ("model", "sp")),
        ("heads",),
        ("kv", 3),
        ("vocab", ("data", "data")),
    ]
    with pytest.raises(sw.MissingMeshAxisError) as caught:
        to_strategy(rules, mesh=MESH, source="t5x.py")
    pair = 'write ("embed", "fsdp"), ("embed", ("fsdp", "sp")) or ("embed", None)'
    size = "add it to the mesh, with size 1 if need be; the mesh has data, model"
    expected = (
        ("[0]: the rule of 'embed' names fsdp, which the mesh lacks", size),
        ("[1]: the rule of 'mlp' names sp, which the mesh lacks", size),
        ("[2]: the rule ('heads',) is not a pair of a name and mesh axes", pair),
        ("[3]: the rule of 'kv' has 3 instead of mesh axes", pair),
        ("[4]: the rule of 'vocab' has a mesh axis twice", "name each mesh axis once"),
    )
    assert [str(problem) for problem in caught.value.problems] == [
        f"t5x.py{what}\n  fix   {fix}" for what, fix in expected
    ]


def test_bad_arguments() -> None:
    same: Names = {"embed": (sw.EMBED, "param"), "mlp": (sw.EMBED, "param")}
    with raises(sw.StrategyError, "model", "rules[1]", path="rules[3]"):
        to_strategy(RULES, mesh=MESH, names=same)
    with raises(sw.StrategyError, "semantics", "t5x"):
        to_strategy(RULES, mesh=MESH, semantics="t5x")  # type: ignore[arg-type]
    with raises(sw.StrategyError, "embed", "use"):
        to_strategy(RULES, mesh=MESH, names={"embed": (sw.EMBED, "use")})
    for bad in (["embed"], {"embed": 3}, {3: "EMBED"}, {"embed": ("EMBED",)}):
        with raises(sw.StrategyError, path=..., fix="embed"):
            to_strategy(RULES, mesh=MESH, names=bad)  # type: ignore[arg-type]
    for wrong in (None, "rules", {"embed": "data"}):
        with raises(sw.StrategyError, "list", fix="embed"):
            to_strategy(wrong, mesh=MESH)  # type: ignore[arg-type]
    with raises(sw.StrategyError, 1, 8):
        to_strategy(RULES, mesh=MESH, source=["base.yml:1"])
    imported = to_strategy(RULES, mesh=MESH)
    with raises(sw.UnknownAxisError, "embed", "mlp", fix="embed"):
        imported.annotation((["embed", "mlp"], None))  # type: ignore[list-item]
    with raises(sw.UnknownAxisError, "mpl", "rule", fix="mlp"):
        imported.annotation(("mpl",))


def test_equal_rules_may_become_one_axis() -> None:
    rules = (("embed", "model"), ("mlp", "data"), ("emb", "model"))
    same: Names = {"embed": (sw.EMBED, "param"), "emb": (sw.EMBED, "param")}
    imported = to_strategy(rules, mesh=MESH, names=same)
    assert imported.strategy.rules["embed"] == "model"
    assert imported.notes[-1] == "emb has the rule of embed, and became the same axis"


# Round trips.

WEIGHTS = (
    (sw.VOCAB, sw.EMBED),
    (sw.EMBED, sw.HEAD, sw.HEAD_DIM),
    (sw.EMBED, sw.KV_HEAD, sw.KV_HEAD_DIM),
    (sw.HEAD, sw.HEAD_DIM, sw.EMBED),
    (sw.EMBED, sw.MLP_INTERMEDIATE),
    (sw.MLP_INTERMEDIATE, sw.EMBED),
    (sw.EXPERT, sw.EMBED, sw.MLP_INTERMEDIATE),
    (sw.EMBED, sw.EXPERT_GATE),
    (sw.LAYERS, NORM),
)
ACTIVATIONS = (
    (sw.BATCH, sw.LENGTH, sw.EMBED),
    (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM),
    (sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM),
    (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE),
    (sw.BATCH, sw.QUERY_LENGTH, sw.VOCAB),
    (sw.BATCH, sw.HEAD, sw.QUERY_LENGTH, sw.BIAS_KV_SEQ),
    (sw.EXPERT, CAPACITY, sw.EMBED),
)
MESHES = (
    "fsdp:8",
    "fsdp:4,tp:2",
    "dp:2,tp:4",
    "dp:2,fsdp:2,sp:2,tp:2",
    "fsdp:2,ep:2,sp:2,tp:1",
)


def exported_names(arrays: Any, role: str) -> dict[str, tuple[str, str]]:
    """Return a name for each axis; the first to want a mesh axis comes first."""
    axes = dict.fromkeys(axis for annotation in arrays for axis in annotation)
    first = [sw.EXPERT, sw.BATCH]
    ordered = [*[axis for axis in first if axis in axes], *[a for a in axes if a not in first]]
    return {f"{role}_{axis.strip('_').lower()}": (axis, role) for axis in ordered}


def sizes_of(names: dict[str, tuple[str, str]]) -> dict[str, int]:
    return {name: 3 if axis == sw.KV_HEAD else 48 for name, (axis, _) in names.items()}


def outcome(axes: Any, pm: sw.PartitionManager, role: str, shape: Any) -> Any:
    try:
        return pm.resolve(*axes, role=role, shape=shape)
    except sw.ShardingError as error:
        return type(error).__name__


@pytest.mark.full(but=["fsdp:8", "fsdp:2,ep:2,sp:2,tp:1"])
@pytest.mark.filterwarnings("ignore:in an array with both names")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.ci
def test_round_trip_of_every_preset(mesh: str) -> None:
    problems = []
    for preset in sw.Strategy.presets():
        if preset == "vision":  # a list of rules cannot express `largest_dim`
            continue
        pm = sw.PartitionManager(sw.Strategy.preset(preset), mesh=sw.abstract_mesh(mesh))
        for mode in (sw.MODE_TRAIN, sw.MODE_DECODE):
            for role, arrays in (("param", WEIGHTS), ("activation", ACTIVATIONS)):
                there = pm.for_mode(mode)
                names = exported_names(arrays, role)
                problems += lost(there, names, arrays, role, f"{preset} {mode}")
    assert not problems, (len(problems), problems[:3])


def lost(pm: sw.PartitionManager, names: Any, arrays: Any, role: str, label: str) -> list[Any]:
    """Return the annotations whose spec differs after a round trip; a refused one may differ."""
    sizes = sizes_of(names)
    try:
        rules = to_logical_axis_rules(pm, names, sizes=sizes)
    except sw.IndivisibleError:
        names = {name: target for name, target in names.items() if target[0] != sw.KV_HEAD}
        rules = to_logical_axis_rules(pm, names, sizes=sizes_of(names))
    imported = to_strategy(rules, mesh=pm.mesh, names=names)
    again = sw.PartitionManager(imported.strategy, mesh=pm.mesh)
    found = []
    known = {axis for axis, _ in names.values()}
    for annotation in arrays:
        if not known.issuperset(annotation):
            continue
        shape = tuple(3 if axis == sw.KV_HEAD else 48 for axis in annotation)
        expected = outcome(annotation, pm, role, shape)
        if isinstance(expected, str):
            continue
        if outcome(annotation, again, role, shape) != expected:
            found.append((label, annotation, expected, outcome(annotation, again, role, shape)))
    return found


def test_ordered_rules_round_trip() -> None:
    """Interleaved chains keep their order."""
    for case in random_lists(seed=2, count=40):
        rules = as_tuples(case["rules"])
        imported: Imported = to_strategy(rules, mesh=case["mesh"], names=OWN, own_axes=OWN.values())
        mesh = sw.abstract_mesh(case["mesh"])
        pm = sw.PartitionManager(imported.strategy, mesh=mesh)
        again = to_strategy(
            to_logical_axis_rules(pm, OWN),
            mesh=case["mesh"],
            names=OWN,
            own_axes=imported.strategy.axes,
        )
        for names in case["arrays"]:
            axes = imported.annotation(names)
            one, other = (
                sw.resolve(axes, each.strategy.compile(), case["mesh"]).spec
                for each in (imported, again)
            )
            assert one == other, (rules, names)


def test_unconstrained_rules_equal_flax() -> None:
    """UNCONSTRAINED ends the chain of its name, as None does, in a list and in its round trip."""
    spmd = pytest.importorskip("flax.linen.spmd")

    def written(spec: Any) -> list[Any]:
        dims = [*spec]
        while dims and dims[-1] is None:
            dims.pop()
        return [(dim,) if isinstance(dim, str) else dim for dim in dims]

    left_open = 0
    for case in random_lists(seed=5, count=150):
        rules = tuple((name, axes or P.UNCONSTRAINED) for name, axes in as_tuples(case["rules"]))
        mesh = dict.fromkeys(case["mesh"], 2)
        imported = to_strategy(rules, mesh=mesh, names=OWN, own_axes=OWN.values())
        pm = sw.PartitionManager(imported.strategy, mesh=sw.abstract_mesh(mesh))
        exported = to_logical_axis_rules(pm, {name: OWN[name] for name, _ in rules})
        for names in case["arrays"]:
            theirs = spmd.logical_to_mesh_axes(tuple(names), rules)
            left_open += P.UNCONSTRAINED in theirs
            assert written(pm.resolve(*imported.annotation(names))) == written(theirs), rules
            again = spmd.logical_to_mesh_axes(tuple(names), exported)
            assert written(again) == written(theirs), (rules, exported)
    assert left_open > 30


def test_exports_that_are_refused() -> None:
    pm = sw.PartitionManager(
        sw.Strategy(
            mesh={"dp": 2, "tp": 4},
            rules={"batch": "dp | -", "embed": "tp", "vocab": "?", "head": "tp"},
            params={"embed": "dp"},
        ),
        mesh=sw.abstract_mesh("dp:2,tp:4"),
    )
    for names, sizes, error, message in (
        ({"b": sw.BATCH}, {}, sw.ShapeRequiredError, facts("b", fix="b")),
        ({"e": sw.EMBED}, {}, sw.StrategyError, facts("EMBED", "rules", fix="e")),
        ({"h": sw.HEAD}, {"h": 6}, sw.IndivisibleError, facts(6, "h", "tp")),
    ):
        with raises(error, message):
            to_logical_axis_rules(pm, names, sizes=sizes)  # type: ignore[arg-type]
    assert to_logical_axis_rules(pm, {"b": sw.BATCH, "h": sw.HEAD}, sizes={"b": 4, "h": 8}) == (
        ("b", "dp"),
        ("b", None),
        ("h", "tp"),
    )
    with raises(sw.StrategyError, "v", "?", fix="?"):
        one_rule_each(pm, {"v": (sw.VOCAB, "activation")})
    first = sw.Strategy(rules={"embed": "tp"}, policy={"conflict": "first_dim"})
    with raises(sw.StrategyError, "first_dim", "list", fix="next"):
        to_logical_axis_rules(sw.PartitionManager(first, mesh=pm.mesh), {}, sizes={})


def test_the_mesh_may_be_text() -> None:
    rules = (("batch", "data"), ("embed", "model"))
    one, other = (to_strategy(rules, mesh=mesh) for mesh in ("data:2,model:4", MESH))
    assert (one.strategy, one.names, one.notes) == (other.strategy, other.names, other.notes)
    with raises(sw.MeshSpecError, "data", -1, fix="devices"):
        to_strategy(rules, mesh="data:-1,model:4")


@pytest.mark.parametrize("name", ["equinox", "flax", "haliax", "safetensors"])
def test_an_absent_library_is_named_with_its_version(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = itertools.chain(*project["optional-dependencies"].values())
    # No extra has a development version, and haliax has only these. Its page gives the command.
    page = re.findall('"(haliax>=.*)"', (root / "docs/haliax.md").read_text(encoding="utf-8"))
    wanted = next(each for each in [*extras, *page] if each.startswith(f"{name}>="))
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=re.escape(f"pip install '{wanted}'")):
        library(f"{name}.part")


def test_a_strategy_is_not_a_manager() -> None:
    strategy: Any = sw.Strategy.preset("fsdp_tp")
    with raises(sw.StrategyError, "PartitionManager", fix="sw.PartitionManager") as caught:
        to_logical_axis_rules(strategy, {"embed": (sw.EMBED, "param")})
    assert "sw.PartitionManager(strategy, mesh=...)" in caught.value.fix
