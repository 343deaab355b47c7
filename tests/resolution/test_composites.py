"""Composites: the product of their members' candidates, by hand and against a reference."""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.resolution.composites import MOST_CANDIDATES
from shardwright.resolution.decisions import Outcome, Reason
from shardwright.resolution.resolver import explain, resolve
from shardwright.resolution.rules import Conflict, Indivisible, Missing, Policy
from shardwright.show.resolution import row
from tests.raising import raises
from tests.resolving import make_rules, spec

B, Q, L, E, H, K, D, M = (
    *(sw.BATCH, sw.QUERY_LENGTH, sw.LENGTH, sw.EMBED, sw.HEAD, sw.KV_HEAD),
    *(sw.HEAD_DIM, sw.MLP_INTERMEDIATE),
)
MESH = {"dp": 2, "fsdp": 2, "sp": 2, "tp": 4}
CHAINS = make_rules(rules={B: "dp+fsdp | dp | -", Q: "sp | -"})


class TestProduct:
    @pytest.mark.parametrize(
        ("size", "wanted"),
        [
            (16, P(("dp", "fsdp", "sp"))),
            (4, P(("dp", "fsdp"))),
            (2, P("dp")),
            (3, P()),
        ],
    )
    def test_first_member_varies_slowest(self, size: int, wanted: P) -> None:
        assert spec(((B, Q),), CHAINS, MESH, shape=(size,)) == wanted

    def test_order_of_members_is_order_of_the_product(self) -> None:
        rules = make_rules(rules={B: "dp | fsdp", H: "tp | sp"})
        # 4 % (2 * 4) fails; what is tried next depends on which member varies faster.
        assert spec(((B, H),), rules, MESH, shape=(4,)) == P(("dp", "sp"))
        rules = make_rules(rules={B: "tp | dp", H: "sp | fsdp"})
        assert spec(((B, H),), rules, MESH, shape=(4,)) == P(("dp", "sp"))
        assert spec(((B, H),), rules, MESH, shape=(12,)) == P(("dp", "sp"))

    def test_every_tried_candidate_is_recorded(self) -> None:
        resolution = explain(((B, Q),), CHAINS, MESH, shape=(2,))
        tried = [
            (skip.reason, skip.candidate, skip.detail) for skip in resolution.decisions[0].skipped
        ]
        assert tried == [
            (Reason.INDIVISIBLE, ("dp", "fsdp", "sp"), "2 % 8 != 0"),
            (Reason.INDIVISIBLE, ("dp", "fsdp"), "2 % 4 != 0"),
            (Reason.INDIVISIBLE, ("dp", "sp"), "2 % 4 != 0"),
        ]
        why = "dp+fsdp+sp: 2 % 8 != 0; dp+fsdp: 2 % 4 != 0; dp+sp: 2 % 4 != 0"
        assert resolution.decisions[0].why == why

    def test_explain_shows_the_rules_of_all_members(self) -> None:
        rules = make_rules(rules={Q: "sp | -"}, decode={B: "dp | -"})
        resolution = explain(((B, Q), E), rules, MESH, shape=(8, 4), mode="decode")
        cells = row(resolution.decisions[0])
        assert 'batch = "dp | -"; query_length = "sp | -"' in cells
        assert "t.toml [modes.decode]; t.toml [rules]" in cells
        resolution = resolution.to_json()
        members = resolution["dims"][0]["rule"]["members"]
        assert [(member["key"], member["table"]) for member in members] == [
            ("batch", "modes.decode"),
            ("query_length", "rules"),
        ]

    def test_emptied_candidates_leave_the_product(self) -> None:
        rules = make_rules(rules={B: "pp | dp", Q: "pp+sp | -"})
        assert spec(((B, Q),), rules, MESH, shape=(4,)) == P(("dp", "sp"))
        resolution = explain(((B, Q),), rules, MESH, shape=(6,)).decisions[0]
        assert resolution.mesh_axes == ("dp",)
        assert "pp is not in the mesh" in resolution.why

    def test_a_mesh_axis_of_size_one_leaves_its_candidate(self) -> None:
        sizes = {"dp": 2, "fsdp": 1, "sp": 2}
        resolution = explain(((B, Q),), CHAINS, sizes, shape=(2,)).decisions[0]
        assert resolution.mesh_axes == ("dp",)
        assert resolution.why == "fsdp has size 1; dp+fsdp+sp: 2 % 4 != 0"

    def test_no_mesh_axis_is_left(self) -> None:
        rules = make_rules(rules={B: "pp", Q: "ep"})
        assert (
            explain(((B, Q),), rules, MESH, shape=(3,)).decisions[0].outcome is Outcome.NO_MESH_AXIS
        )
        rules = make_rules(rules={B: "pp", Q: "ep | -"})
        assert (
            explain(((B, Q),), rules, MESH, shape=(3,)).decisions[0].outcome is Outcome.REPLICATED
        )

    def test_shared_axis_fails_one_candidate(self) -> None:
        rules = make_rules(rules={B: "dp", H: "dp | tp"})
        resolution = explain(((B, H),), rules, MESH, shape=(8,)).decisions[0]
        assert resolution.mesh_axes == ("dp", "tp")
        assert [(skip.reason, skip.detail) for skip in resolution.skipped] == [
            (Reason.TAKEN, "dp occurs twice")
        ]

    def test_taken_mesh_axis_tries_next_candidate(self) -> None:
        rules = make_rules(rules={E: "sp", B: "dp", Q: "sp | -"})
        resolution = explain((E, (B, Q)), rules, MESH, shape=(4, 4))
        assert resolution.spec == P("sp", "dp")
        assert resolution.decisions[1].skipped[0].detail == "sp is taken by dim 0 EMBED"

    def test_weights_gather_axes_no_member_names(self) -> None:
        rules = make_rules(
            Policy(gather=("fsdp", "dp")), rules={E: "-", M: "dp | tp"}, params={E: "fsdp | -"}
        )
        resolution = explain(((E, M),), rules, MESH, shape=(16,), role="use").decisions[0]
        assert (resolution.mesh_axes, resolution.gathered) == (("dp",), ("fsdp",))


class TestNoShape:
    @pytest.mark.parametrize(
        ("batch", "length", "wanted"),
        [
            ("dp", "sp", P(("dp", "sp"))),
            ("dp", "-", P("dp")),
            ("dp | pp", "sp", P(("dp", "sp"))),
            ("pp+dp | dp", "ep | -", P("dp")),
            ("pp | -", "ep | -", P()),
        ],
    )
    def test_allowed_where_the_product_has_one(self, batch: str, length: str, wanted: P) -> None:
        resolution = resolve(((B, Q),), make_rules(rules={B: batch, Q: length}), MESH)
        assert resolution.spec == wanted
        assert resolution.decisions[0].unchecked is bool(wanted.partitions)

    @pytest.mark.parametrize(
        ("batch", "length"), [("dp | -", "sp"), ("dp", "sp | -"), ("dp | -", "-")]
    )
    def test_refused_where_the_size_picks(self, batch: str, length: str) -> None:
        with raises(
            sw.ShapeRequiredError, "candidate", "applies", dim=0, axis="BATCH+QUERY_LENGTH"
        ):
            resolve(((B, Q),), make_rules(rules={B: batch, Q: length}), MESH)

    def test_a_policy_needs_the_size(self) -> None:
        rules = make_rules(Policy(indivisible=Indivisible.PREFIX), rules={B: "dp", Q: "sp"})
        with raises(
            sw.ShapeRequiredError, "candidate", "applies", dim=0, axis="BATCH+QUERY_LENGTH"
        ):
            resolve(((B, Q),), rules, MESH)


class TestRefusals:
    @pytest.mark.parametrize("rule", ["?", "tp | ?"])
    def test_unconstrained_member(self, rule: str) -> None:
        with raises(sw.StrategyError, "KV_HEAD", "?", fix="KV_HEAD") as caught:
            resolve(((B, K),), make_rules(rules={B: "dp", K: rule}), MESH, shape=(8,))
        assert "kv_head" in caught.value.rule
        assert 'without "?"' in caught.value.fix

    def test_more_than_64_candidates(self) -> None:
        four = "dp+fsdp | dp | fsdp | -"
        three = make_rules(rules={B: four, Q: four, M: four})
        assert MOST_CANDIDATES == 4**3
        assert explain(((B, Q, M),), three, MESH, shape=(3,)).spec == P()
        more = make_rules(rules={B: four, Q: four, M: four, E: "tp | -"})
        with raises(sw.StrategyError, 4, 2, 128, 64) as caught:
            resolve(((B, Q, M, E),), more, MESH, shape=(1024,))
        assert "fewer candidates" in caught.value.fix

    def test_candidates_that_a_mesh_makes_equal_count_once(self) -> None:
        chain = "dp+fsdp+ep | dp+fsdp | dp+ep | dp | -"
        rules = make_rules(rules={B: chain, Q: chain, M: chain})
        assert explain(((B, Q, M),), rules, {"dp": 2}, shape=(4,)).ok

    @pytest.mark.parametrize(
        "axes",
        [
            (sw.HEAD, sw.HEAD_DIM),
            (sw.HEAD_DIM, sw.HEAD),
            (sw.KV_HEAD, sw.KV_HEAD_DIM),
            ("head", sw.KV_HEAD_DIM),
        ],
    )
    def test_head_and_head_dim_in_a_composite(self, axes: Any) -> None:
        """A flat dim that is cut in equal parts cuts heads where the parts are not whole heads."""
        for rules in (make_rules(rules={H: "tp"}), make_rules()):
            with raises(sw.StrategyError, "composite", "within", dim=1, fix="head_dim") as caught:
                resolve((E, axes), rules, MESH, shape=(8, 768))
            assert "merged((" in caught.value.fix
            assert caught.value.dim == 1

    def test_message_names_head_and_dim(self) -> None:
        """The message names the first head and the head dim; other members do not matter."""
        with raises(
            sw.StrategyError, "composite", dim=0, axis="EMBED+HEAD_DIM+KV_HEAD+HEAD", fix="KV_HEAD"
        ) as caught:
            resolve(((E, sw.HEAD_DIM, sw.KV_HEAD, H),), make_rules(), MESH, shape=(8,))
        assert (
            caught.value.fix
            == "annotate the flat dim as merged((KV_HEAD, heads), (HEAD_DIM, head_dim)); the "
            "number of heads must be a multiple of the number of shards"
        )
        assert resolve(((E, H), (B, sw.HEAD_DIM)), make_rules(), MESH, shape=(8, 8)).spec == P()

    @pytest.mark.parametrize("axes", [((H, sw.EMPTY),), ((sw.EMPTY,),), (B, (sw.EMPTY, Q))])
    def test_empty_in_a_composite(self, axes: Any) -> None:
        with raises(sw.StrategyError, "EMPTY", fix="EMPTY") as caught:
            resolve(axes, make_rules(rules={H: "tp"}), MESH)
        assert caught.value.dim == len(axes) - 1
        assert caught.value.axis
        assert caught.value.fix.startswith(
            "write EMPTY for a whole dim, or remove it from the composite"
        )


class TestPolicies:
    def test_indivisible_names_a_fallback_that_helps(self) -> None:
        rules = make_rules(rules={B: "dp", H: "tp"})
        with raises(sw.IndivisibleError, "dp=2", "tp=4", 8, size=6, fix="tp | -") as caught:
            resolve(((B, H),), rules, MESH, shape=(6,))
        assert 'head = "tp | -"' in caught.value.fix
        assert "batch" not in caught.value.fix
        assert spec(((B, H),), make_rules(rules={B: "dp", H: "tp | -"}), MESH, shape=(6,)) == P(
            "dp"
        )
        with raises(sw.IndivisibleError, "dp=2", "tp=4", 8, size=3, fix="dp | -") as caught:
            resolve(((B, H),), rules, MESH, shape=(3,))
        assert 'batch = "dp | -" and head = "tp | -"' in caught.value.fix

    def test_conflict_names_a_fallback_that_helps(self) -> None:
        rules = make_rules(rules={E: "dp", B: "dp", H: "tp"})
        with raises(
            sw.AxisConflictError, "dp", 0, "EMBED", dim=1, axis="BATCH+HEAD", fix="EMPTY"
        ) as caught:
            resolve((E, (B, H)), rules, MESH, shape=(8, 8))
        assert 'batch = "dp | -"' in caught.value.fix
        assert "head" not in caught.value.fix

    def test_the_first_candidate_picks_the_policy(self) -> None:
        rules = make_rules(
            Policy(indivisible=Indivisible.PREFIX), rules={B: "dp+fsdp | fsdp", H: "tp"}
        )
        assert spec(((B, H),), rules, MESH, shape=(12,)) == P(("dp", "fsdp"))

    def test_first_dim_drops_repeated_axes(self) -> None:
        rules = make_rules(Policy(conflict=Conflict.FIRST_DIM), rules={B: "dp", H: "dp+tp"})
        assert spec(((B, H),), rules, MESH, shape=(8,)) == P(("dp", "tp"))

    def test_missing_mesh_axis_drops_the_dim(self) -> None:
        rules = make_rules(Policy(missing=Missing.REPLICATE), rules={B: "dp | pp", H: "tp"})
        assert spec(((B, H),), rules, MESH, shape=(8,)) == P(("dp", "tp"))
        resolution = explain(((B, H),), rules, MESH, shape=(4,)).decisions[0]
        assert resolution.outcome is Outcome.POLICY_MISSING
        assert "pp is not in the mesh" in resolution.why


RULES = st.lists(
    st.lists(
        st.sampled_from(["dp", "fsdp", "sp", "tp", "pp", "ep"]), min_size=1, max_size=2, unique=True
    ),
    max_size=3,
)


def reference(
    rules: list[tuple[list[list[str]], bool]], mesh: dict[str, int], size: int, taken: set[str]
) -> Any:
    """Return the composite's mesh axes, "conflict" or "indivisible", straight from the contract."""
    chains: list[list[list[str]]] = []
    for candidates, replicated in rules:
        chain = [[name for name in names if mesh.get(name, 1) > 1] for names in candidates]
        chain = [names for names in chain if names]
        chains.append(chain + ([[]] if replicated or not chain else []))
    product = [list(itertools.chain(*picks)) for picks in itertools.product(*chains)]
    first = ""
    for names in product:
        blocked = len({*names}) < len(names) or bool({*names} & taken)
        if not names or (not blocked and size % math.prod(mesh[name] for name in names) == 0):
            return tuple(names)
        first = first or ("conflict" if blocked else "indivisible")
    return first


class TestAgainstAReference:
    MESHES: ClassVar = [
        {"dp": 2, "fsdp": 2, "sp": 2, "tp": 4},
        {"dp": 2, "fsdp": 1, "sp": 3, "tp": 2},
        {"tp": 2},
    ]

    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(st.tuples(RULES, st.booleans()), min_size=2, max_size=3),
        st.sampled_from(MESHES),
        st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 48]),
        st.sampled_from(["", "dp", "tp"]),
    )
    def test_product_equals_reference(
        self, members: Any, mesh: dict[str, int], size: int, held: str
    ) -> None:
        members = [(candidates, replicated or not candidates) for candidates, replicated in members]
        axes = (B, Q, M)[: len(members)]
        text = {
            axis: " | ".join(["+".join(names) for names in candidates] + ["-"] * replicated)
            for axis, (candidates, replicated) in zip(axes, members, strict=True)
        }
        resolution = explain(
            (E, axes), make_rules(rules={E: held or "-", **text}), mesh, shape=(48, size)
        )
        taken = {held} if mesh.get(held, 1) > 1 else set()
        wanted = reference(members, mesh, size, taken)
        names = {sw.AxisConflictError: "conflict", sw.IndivisibleError: "indivisible"}
        actual = (
            names[resolution.problems[0].error]
            if resolution.problems
            else resolution.decisions[1].mesh_axes
        )
        assert actual == wanted
