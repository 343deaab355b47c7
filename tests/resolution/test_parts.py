"""Parts are sharded like their weight, optimizer state further if the policy says so."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest

import shardwright as sw
from shardwright.resolution.decisions import Outcome
from shardwright.resolution.rules import parse_rule
from shardwright.vocabulary.annotations import PartOf
from shardwright.vocabulary.lowering import describe, lower
from tests.raising import Facts, facts, raises

P = jax.P
KERNEL = (sw.EMBED, sw.MLP_INTERMEDIATE)
MESH = {"dp": 2, "fsdp": 4, "tp": 2}


def rules(
    params: dict[str, str] | None = None, *, tensors: Any = (), **policy: str
) -> sw.AxisRules:
    given = {
        "embed": "fsdp",
        "mlp_intermediate": "tp",
        "vocab": "tp",
        "head": "tp",
        "norm": "-",
    } | (params or {})
    return sw.Strategy(
        rules={"embed": "-"}, params=given, policy=policy, tensors=list(tensors)
    ).compile()


def explain(
    annotation: Any, shape: Any, *, role: str | None = "state", path: str | None = None, **how: Any
) -> sw.Resolution:
    return sw.explain(annotation, rules(**how), MESH, role=role, shape=shape, path=path)


def part(
    dims: tuple[int | None, ...],
    shape: tuple[int, ...] = (16, 32),
    axes: Any = KERNEL,
    path: str = "",
) -> PartOf:
    return PartOf(annotation=axes, shape=shape, dims=dims, path=path)


# Parts.


@pytest.mark.parametrize(
    ("dims", "shape", "spec"),
    [
        ((0, 1), (16, 32), P("fsdp", "tp")),
        ((0,), (16,), P("fsdp")),
        ((1,), (32,), P("tp")),
        ((1, 0), (32, 16), P("tp", "fsdp")),
        ((None, 0, 1), (10, 16, 32), P(None, "fsdp", "tp")),
        ((0, None), (16, 3), P("fsdp")),
        ((None,), (1,), P()),
        ((), (), P()),
        ((0, 1), (4, 32), P("fsdp", "tp")),
    ],
)
def test_part_is_sharded_like_followed_dims(dims: Any, shape: Any, spec: Any) -> None:
    for axes in (KERNEL, sw.ColumnWise, P("fsdp", "tp")):
        for role in (None, "param", "state"):
            assert explain(part(dims, axes=axes), shape, role=role).spec == spec


@pytest.mark.parametrize("rank", ["error", "fit"])
def test_a_part_is_never_longer_than_the_whole(rank: str) -> None:
    says = facts(1, "EMBED", "MLP_INTERMEDIATE", path="w", dim=1, size=320, fix="whole")
    with raises(sw.RankMismatchError, says):
        explain(part((0, 1)), (16, 320), path="w", rank=rank).require()
    with raises(sw.RankMismatchError, 1, "EMBED", "MLP_INTERMEDIATE", dim=1, size=320, fix="whole"):
        sw.ArraySpec((16, 320), np.float32, part((0, 1)))
    assert explain(part((0, None)), (16, 320), rank=rank).spec == P("fsdp")


@pytest.mark.parametrize("rank", ["error", "fit"])
def test_a_part_may_be_as_long_as_the_whole(rank: str) -> None:
    """The limit is the whole's size: one more is refused, the size itself and less are not."""
    for size in (30, 32):
        assert explain(part((1,)), (size,), rank=rank).spec == P("tp")
    with raises(sw.RankMismatchError, 1, "EMBED", "MLP_INTERMEDIATE", path="w", dim=0, size=33):
        explain(part((1,)), (33,), path="w", rank=rank).require()
    with raises(sw.RankMismatchError, 1, "EMBED", "MLP_INTERMEDIATE", dim=0, size=33):
        lower(part((1,)), (33,))


@pytest.mark.parametrize("rank", ["error", "fit"])
def test_a_part_of_another_rank_is_not_cut_to_fit(rank: str) -> None:
    with raises(sw.RankMismatchError, "(0)", "EMBED", "MLP_INTERMEDIATE", 1, "(16, 4)", path="w"):
        explain(part((0,)), (16, 4), path="w", rank=rank).require()


def test_dims_may_be_a_list_and_are_numbers() -> None:
    dims: Any
    assert part(dims=[1, 0]) == part((1, 0))  # type: ignore[arg-type]
    assert hash(part(dims=[1, 0])) == hash(part((1, 0)))  # type: ignore[arg-type]
    for dims in (0, ("0",), [[0]], (2,), (0, 0), (-1,), None):
        with raises(sw.RankMismatchError, "dims", "EMBED", "MLP_INTERMEDIATE", 2, fix="dim"):
            part(dims)


def test_part_takes_the_choice_of_the_whole() -> None:
    """Alone the second dim would take its first candidate; in the weight an earlier dim holds
    that.
    """
    both = {"embed": "tp | fsdp"}
    assert explain((sw.VOCAB, sw.EMBED), (8, 8), params=both).spec == P("tp", "fsdp")
    assert explain((sw.EMBED,), (8,), params=both).spec == P("tp")
    resolution = explain(part((1,), (8, 8), (sw.VOCAB, sw.EMBED)), (8,), params=both)
    assert resolution.spec == P("fsdp")
    assert resolution.decisions[0].why == "tp: tp is taken by dim 0 VOCAB"
    assert resolution.notes == ("dims 1 of (VOCAB, EMBED)",)


def test_exceptions_by_path_are_those_of_the_whole() -> None:
    exceptions = [{"match": "^head$", "embed": "-", "mlp_intermediate": "fsdp"}]
    assert explain(
        part((0, 1), path="head"), (16, 32), path="0/mu/head", tensors=exceptions
    ).spec == P(None, "fsdp")
    assert explain(part((0, 1), path="other"), (16, 32), path="head", tensors=exceptions).spec == P(
        "fsdp", "tp"
    )


def test_a_block_is_never_split() -> None:
    """Six blocks of eight rows over four shards: twelve rows each, which is a block and a half."""
    with raises(sw.IndivisibleError, 6, 8, "fsdp", path="s", dim=0, axis="EMBED", fix="EMPTY"):
        explain(part((0, 1), (48, 32)), (6, 32), path="s").require()
    assert explain(part((0, 1), (48, 32)), (12, 32)).spec == P("fsdp", "tp")
    with raises(sw.IndivisibleError, 16, "fsdp", size=5, fix="EMPTY"):
        explain(part((0,)), (5,)).require()


def test_lenient_policy_on_a_part_is_recorded() -> None:
    long = {"embed": "dp+fsdp"}
    resolution = explain(part((0, 1), (48, 32)), (6, 32), params=long, indivisible="prefix")
    assert (resolution.spec, resolution.decisions[0].outcome) == (
        P("dp", "tp"),
        Outcome.POLICY_PREFIX,
    )
    resolution = explain(part((0, 1), (48, 32)), (6, 32), params=long, indivisible="replicate")
    assert (resolution.spec, resolution.decisions[0].outcome) == (
        P(None, "tp"),
        Outcome.POLICY_REPLICATE,
    )


def test_part_has_the_problems_of_the_whole() -> None:
    with raises(
        sw.IndivisibleError, "fsdp=4", path="0/mu/w", dim=0, axis="EMBED", size=6, fix="fsdp | -"
    ):
        explain(part((1,), (6, 32), path="w"), (32,), path="0/mu/w").require()
    with raises(sw.ShapeRequiredError, "shape", fix="shape"):
        explain(part((0,)), None).require()
    with raises(sw.RankMismatchError, "(0)", "EMBED", "MLP_INTERMEDIATE", 1, 2):
        explain(part((0,)), (16, 1)).require()
    for dims in ((2,), (0, 0), (-1,)):
        with raises(sw.RankMismatchError, "EMBED", "MLP_INTERMEDIATE", 2):
            part(dims)


def test_a_part_is_an_annotation() -> None:
    first_part = part((0, None))
    assert sw.is_annotation(first_part)
    assert sw.ArraySpec((16, 4), "float32", first_part).axes == first_part
    assert [dim.label for dim in lower(first_part).dims] == ["EMBED", "_"]
    assert (describe(first_part), describe(part((0, 1)))) == (
        "dims (0, -) of (EMBED, MLP_INTERMEDIATE)",
        "(EMBED, MLP_INTERMEDIATE)",
    )
    assert hash(first_part) == hash(part((0, None)))


def test_used_part_is_gathered_like_the_whole() -> None:
    assert explain(part((0,)), (16,), role="use", gather="fsdp").spec == P()
    assert explain(part((1,)), (32,), role="use", gather="fsdp").spec == P("tp")


# ZeRO-1.


@pytest.mark.parametrize(
    ("axes", "shape", "zero1", "spec"),
    [
        (KERNEL, (16, 32), "-", P("fsdp", "tp")),
        (KERNEL, (16, 32), "dp", P(("fsdp", "dp"), "tp")),
        (KERNEL, (4, 32), "dp", P("fsdp", ("tp", "dp"))),
        (KERNEL, (4, 2), "dp | -", P("fsdp", "tp")),
        ((sw.NORM,), (16,), "dp+fsdp", P(("dp", "fsdp"))),
        ((sw.NORM,), (4,), "dp+fsdp | dp", P("dp")),
        ((sw.NORM,), (3,), "dp+fsdp | dp | -", P()),
        (KERNEL, (16, 32), "dp+fsdp", P(("fsdp", "dp"), "tp")),
        (KERNEL, (4, 2), "fsdp", P("fsdp", "tp")),
        (KERNEL, (16, 32), "fsdp | dp", P(("fsdp", "dp"), "tp")),
        (KERNEL, (16, 32), "sp | tp | dp", P(("fsdp", "dp"), "tp")),
        (KERNEL, (4, 2), "fsdp | dp | -", P("fsdp", "tp")),
        ((sw.EMPTY, sw.EMBED), (16, 16), "dp", P(None, ("fsdp", "dp"))),
        ((sw.EMPTY,), (3,), "dp", P()),
        ((), (), "dp", P()),
        (sw.Replicated, (16,), "dp", P()),
        (KERNEL, (16, 32), "sp | -", P("fsdp", "tp")),
        (KERNEL, (16, 32), "sp", P("fsdp", "tp")),
    ],
)
def test_zero1_takes_free_mesh_axes(axes: Any, shape: Any, zero1: str, spec: Any) -> None:
    assert explain(axes, shape, zero1=zero1).spec == spec
    for role in ("param", "use", "activation"):
        assert (
            explain(axes, shape, zero1=zero1, role=role).spec
            == explain(axes, shape, role=role).spec
        ), "state alone"


def test_zero1_is_explained() -> None:
    resolution = explain(KERNEL, (16, 32), zero1="dp | -")
    assert resolution.decisions[0].zero1 == ("dp",)
    assert resolution.decisions[0].why == "dp by zero1"
    assert resolution.notes == ('zero1 = "dp | -"   ([policy]): dp on dim 0 EMBED',)
    assert resolution.to_json()["dims"][0]["zero1"] == ["dp"]
    assert explain(KERNEL, (4, 2), zero1="dp | -").notes == (
        'zero1 = "dp | -"   ([policy]): no dim can also be divided over dp',
    )
    assert explain(KERNEL, (4, 2), zero1="fsdp").notes == (
        'zero1 = "fsdp"   ([policy]): the parameter is already sharded over fsdp',
    )
    taken, chosen = explain(KERNEL, (16, 32), zero1="fsdp | dp").notes
    assert taken == 'zero1 = "fsdp | dp"   ([policy]): the parameter is already sharded over fsdp'
    assert chosen == 'zero1 = "fsdp | dp"   ([policy]): dp on dim 0 EMBED'
    assert explain(KERNEL, (4, 2), zero1="sp").notes == (
        'zero1 = "sp"   ([policy]): in the mesh, no axis of sp has more than one device',
    )


def test_zero1_that_no_dim_fits() -> None:
    with raises(
        sw.IndivisibleError, "dp", 4, "fsdp=4", "dp=2", path="0/mu/w", fix="zero1"
    ) as caught:
        explain(KERNEL, (4, 2), zero1="dp", path="0/mu/w").require()
    assert str(caught.value).splitlines() == [
        ("0/mu/w: no dim can also be divided over dp: 4 over fsdp=4, dp=2; 2 over tp=2, dp=2"),
        '  rule  zero1 = "dp"   ([policy])',
        (
            '  fix   end zero1 in a fallback, zero1 = "dp | -", which shards such state like its '
            "parameter"
        ),
    ]


def test_zero1_is_not_left_to_the_compiler() -> None:
    with raises(sw.StrategyError, "zero1", '"dp | ?"', "activations", path="zero1", fix='"-"'):
        sw.Policy(zero1=parse_rule("dp | ?"))


def test_zero1_needs_sizes() -> None:
    with raises(sw.ShapeRequiredError, "dim", "zero1"):
        explain(KERNEL, None, zero1="dp").require()
    assert explain(KERNEL, None, zero1="sp").spec == P("fsdp", "tp")


def test_first_member_of_merged_dim_must_divide() -> None:
    flat = (sw.EMPTY, sw.merged((sw.HEAD, 2), (sw.HEAD_DIM, 8)))
    assert explain(flat, (4, 16), zero1="dp | -").spec == P(None, "tp")
    flat = (sw.EMPTY, sw.merged((sw.HEAD, 4), (sw.HEAD_DIM, 8)))
    assert explain(flat, (4, 32), zero1="dp | -").spec == P(None, ("tp", "dp"))


def test_zero1_applies_to_parts() -> None:
    assert explain(part((0,)), (16,), zero1="dp").spec == P(("fsdp", "dp"))
    assert explain(part((None, 0)), (2, 16), zero1="dp").spec == P(None, ("fsdp", "dp"))


def test_laws_of_state_over_many_requests() -> None:
    """State keeps the mesh axes of its parameter in front, has each mesh axis once, and divides.

    Otherwise it is sharded like the parameter, or it is an error.
    """
    draw = np.random.default_rng(0)
    sizes = (1, 2, 3, 4, 6, 8, 12, 16, 48)
    wider = 0
    for _ in range(300):
        candidates = [
            list(draw.permutation(["dp", "fsdp", "tp"]))[: draw.integers(1, 4)]
            for _ in range(draw.integers(1, 3))
        ]
        zero1 = " | ".join(
            ["+".join(candidate) for candidate in candidates] + ["-"] * draw.integers(0, 2)
        )
        shape = tuple(int(size) for size in draw.choice(sizes, size=2))
        params = {
            "embed": str(draw.choice(["fsdp | -", "dp | -", "-"])),
            "mlp_intermediate": str(draw.choice(["tp | -", "fsdp | tp | -"])),
        }
        param = explain(KERNEL, shape, params=params, role="param")
        state = explain(KERNEL, shape, params=params, zero1=zero1)
        if not state.ok:
            assert not zero1.endswith("-")
            assert state.problems[0].error is sw.IndivisibleError
            continue
        held = [axis for decision in state.decisions for axis in decision.mesh_axes]
        assert len(held) == len(set(held))
        for size, param_decision, other in zip(
            shape, param.decisions, state.decisions, strict=True
        ):
            assert other.mesh_axes == (*param_decision.mesh_axes, *other.zero1)
            assert size % math.prod(MESH[axis] for axis in other.mesh_axes) == 0
        added = [decision.zero1 for decision in state.decisions if decision.zero1]
        assert len(added) <= 1
        wider += len(added)
        assert bool(added) == (state.spec != param.spec)
    assert wider > 50


# In the file.


def test_zero1_in_a_file() -> None:
    text = '[policy]\nzero1 = "dp | -"\n'
    strategy = sw.Strategy.loads(text, source="z.toml")
    assert str(strategy.compile().policy.zero1.ref) == 'zero1 = "dp | -"   (z.toml:2, [policy])'
    assert sw.Strategy.loads(strategy.dumps()) == strategy
    assert strategy.compile() != sw.Strategy().compile()
    assert sw.Strategy(policy={"zero1": "-"}).compile() == sw.Strategy().compile()
    assert (sw.Strategy.preset("ddp") | strategy).compile().policy.zero1.mesh_axes == ("dp",)


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        (
            "dp | ?",
            sw.StrategyError,
            facts("?", "sharding", path="z.toml:2 policy.zero1", fix="-"),
        ),
        (
            "dp + | -",
            sw.StrategyError,
            facts("mesh", "axis", path="z.toml:2 policy.zero1", fix="+"),
        ),
        (
            "data",
            sw.MissingMeshAxisError,
            facts("data", "dp", "fsdp", "tp", path="z.toml:2 policy.zero1", fix="data"),
        ),
    ],
)
def test_bad_zero1_is_named_by_its_line(text: str, error: type[Exception], says: Facts) -> None:
    with raises(error, says):
        sw.Strategy.loads(f'[policy]\nzero1 = "{text}"\n', source="z.toml").compile()


def test_zero1_mesh_axes_must_exist() -> None:
    own = sw.Strategy(mesh={"data": 8}, rules={"batch": "data"}, policy={"zero1": "data"})
    assert sw.PartitionManager(own, mesh=sw.abstract_mesh("data:8")).rules.policy.zero1 is not None
    with raises(sw.MeshMismatchError, "data", "dp", 8, fix="dp"):
        sw.PartitionManager(own, mesh=sw.abstract_mesh("dp:8"))


def test_zero1_alone_may_name_a_mesh_axis() -> None:
    """A mesh axis that only zero1 names is in use, and must be in the mesh."""
    own = sw.Strategy(mesh={"data": 8}, rules={"embed": "-"}, policy={"zero1": "data"})
    assert own.compile().named_mesh_axes() == ("data",)
    manager = sw.PartitionManager(own, mesh=sw.abstract_mesh("data:8"))
    assert manager.resolve(sw.EMBED, role="state", shape=(16,)) == P("data")
    with raises(sw.MeshMismatchError, "data", "dp", 8, fix="dp"):
        sw.PartitionManager(own, mesh=sw.abstract_mesh("dp:8"))
