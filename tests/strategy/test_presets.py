"""Presets keep the promises of the documentation."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.resolution.decisions import Outcome
from shardwright.resolution.partition_specs import entry_names
from shardwright.vocabulary.axes import PARALLELISM_AXES, SEMANTIC_AXES, Role
from shardwright.vocabulary.layouts import LAYOUTS
from shardwright.vocabulary.modes import MODE_DECODE, MODE_INSERT, MODES, parse_mode
from tests.golden.specs import MESHES
from tests.raising import raises

PRESETS = sw.Strategy.presets()
SERVING = ("serve_long_context", "serve_tp")
TRAINING = tuple(sorted({*PRESETS} - {*SERVING}))
# `make test` asks one mesh of a few axes, and one of all axes.
EVERY_MESH = (
    *(pytest.param(mesh, marks=pytest.mark.full) for mesh in MESHES[1:]),
    MESHES[0],
    "dp:2,fsdp:2,sp:2,ep:2,tp:2",
)
GENERATION = ("prefill", "insert", "decode")


def manager(preset: str, mesh: str) -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset(preset), mesh=sw.abstract_mesh(mesh))


def test_preset_names() -> None:
    wanted = (
        "ddp",
        "fsdp",
        "fsdp_pp",
        "fsdp_tp",
        "fsdp_tp_sp",
        "moe_ep",
        "sequence",
        "serve_long_context",
        "serve_tp",
        "single",
        "tensor",
        "vision",
    )
    assert wanted == PRESETS


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("format", ["toml", "json"])
def test_preset_round_trip(preset: str, format: str, tmp_path: Path) -> None:
    strategy = sw.Strategy.preset(preset)
    assert strategy.name == preset
    text = strategy.dumps(format=format)  # type: ignore[arg-type]
    again = sw.Strategy.loads(text, format=format)  # type: ignore[arg-type]
    from_file = sw.Strategy.load(strategy.dump(tmp_path / f"copy.{format}"))
    assert again == strategy
    assert from_file == strategy
    assert hash(again.compile()) == hash(strategy.compile())
    assert again.compile() == strategy.compile() == from_file.compile()


@pytest.mark.parametrize("preset", PRESETS)
def test_every_axis_has_a_rule(preset: str) -> None:
    rules = sw.Strategy.preset(preset).compile()
    for mode in MODES:
        for role in Role:
            missing = [
                axis
                for axis in SEMANTIC_AXES
                if rules.stated(axis, mode=mode, role=role, path=None) is None
            ]
            assert not missing, (mode, role)


@pytest.mark.parametrize("preset", PRESETS)
def test_norms_head_dims_and_layers_are_replicated(preset: str) -> None:
    pm = manager(preset, "dp:2,fsdp:2,sp:2,ep:2,tp:2")
    axes = (sw.NORM, sw.HEAD_DIM, sw.KV_HEAD_DIM, sw.LAYERS, sw.EXPERT_GATE)
    for mode in MODES:
        for role in Role:
            assert pm.resolve(axes, shape=(4,) * 5, mode=mode, role=role) == P()


@pytest.mark.parametrize("preset", PRESETS)
def test_pages_are_sharded_only_for_long_contexts(preset: str) -> None:
    pm = manager(preset, "dp:2,fsdp:2,sp:2,ep:2,tp:2")
    for mode in MODES:
        is_sharded = preset == "serve_long_context" and mode in (MODE_DECODE, MODE_INSERT)
        pages = P(("dp", "fsdp", "ep", "sp")) if is_sharded else P()
        assert pm.resolve((sw.PAGE,), shape=(64,), mode=mode, role=Role.ACTIVATION) == pages


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_use_standard_mesh_axes(preset: str) -> None:
    assert {*sw.Strategy.preset(preset).compile().named_mesh_axes()} <= {*PARALLELISM_AXES.values()}


LAYOUT_MEANS = [
    (sw.ColumnWise, (sw.EMBED, sw.MLP_INTERMEDIATE)),
    (sw.RowWise, (sw.MLP_INTERMEDIATE, sw.EMBED)),
    (sw.ExpertColumnWiseAlt, (sw.EXPERT, sw.EMBED, sw.MLP_INTERMEDIATE)),
    (sw.ExpertRowWiseAlt, (sw.EXPERT, sw.MLP_INTERMEDIATE, sw.EMBED)),
    (sw.ColumnWise.bias, (sw.MLP_INTERMEDIATE,)),
    (sw.ExpertColumnWise.bias, (sw.EXPERT, sw.MLP_INTERMEDIATE)),
    (sw.ExpertRowWise.bias, (sw.EXPERT, sw.EMPTY)),
]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("mesh", EVERY_MESH)
def test_weight_layouts_equal_their_axes(preset: str, mesh: str) -> None:
    pm = manager(preset, mesh)
    for layout, axes in LAYOUT_MEANS:
        shape = tuple(64 * (dim + 1) for dim in range(len(axes)))
        for mode in MODES:
            for role in ("param", "use"):
                meant = pm.resolve(axes, shape=shape, mode=mode, role=role)
                assert pm.resolve(layout, shape=shape, mode=mode, role=role) == meant
                assert pm.resolve(layout(), shape=shape, mode=mode, role=role) == meant
                stack = pm.resolve((sw.LAYERS, *axes), shape=(32, *shape), mode=mode, role=role)
                assert (
                    pm.resolve(sw.stacked(layout), shape=(32, *shape), mode=mode, role=role)
                    == stack
                )


@pytest.mark.parametrize("preset", PRESETS)
def test_row_wise_bias_is_replicated(preset: str) -> None:
    assert (
        manager(preset, "dp:2,fsdp:2,sp:2,ep:2,tp:2").resolve(sw.RowWise.bias, shape=(64,)) == P()
    )


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "layout",
    [sw.UnifiedExpertColumnWise, sw.UnifiedExpertRowWise],
    ids=lambda layout: layout.__name__,
)
def test_unified_layouts_are_never_gathered(
    preset: str, layout: type[sw.DynamicShardingAxes]
) -> None:
    for mesh in (*MESHES, "dp:2,fsdp:2,sp:2,ep:2,tp:2"):
        pm = manager(preset, mesh)
        stored, used = (
            pm.explain(layout, shape=(64, 64, 64), role=role) for role in ("param", "use")
        )
        assert used.spec == stored.spec
        assert all(decision.gathered == () for decision in used.decisions)


@pytest.mark.parametrize("preset", ["single", "ddp"])
def test_unsharded_params_leave_layouts_whole(preset: str) -> None:
    pm = manager(preset, "dp:2,fsdp:2,sp:2,ep:2,tp:2")
    for layout in (layout for layout in LAYOUTS.values() if layout.role is Role.PARAM):
        shape = (64,) * len(layout.axes)
        assert pm.resolve(layout, shape=shape) == P(), layout


@pytest.mark.parametrize("preset", PRESETS)
def test_weight_layouts_resolve_on_every_mesh(preset: str) -> None:
    for mesh in MESHES:
        pm = manager(preset, mesh)
        for layout in (layout for layout in LAYOUTS.values() if layout.role is Role.PARAM):
            shape = (64,) * len(layout.axes)
            for mode in MODES:
                assert pm.explain(layout, shape=shape, mode=mode).ok, (layout, mesh, mode)


PROMPT = {
    "hidden": (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED),
    "cache": (sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM),
    "scores": (sw.BATCH, sw.HEAD, sw.QUERY_LENGTH, sw.BIAS_KV_SEQ),
}


@pytest.mark.parametrize("preset", SERVING)
@pytest.mark.parametrize("mode", GENERATION)
@pytest.mark.parametrize("mesh", [*MESHES, "dp:2,fsdp:2,ep:2,sp:2,tp:2"])
def test_serving_presets_accept_one_prompt(preset: str, mode: str, mesh: str) -> None:
    pm = manager(preset, mesh)
    for axes in PROMPT.values():
        resolution = pm.explain(axes, shape=(1, 64, 64, 64)[: len(axes)], mode=mode)
        assert resolution.ok, resolution
        assert resolution.decisions[0].outcome is Outcome.REPLICATED


@pytest.mark.parametrize("preset", SERVING)
@pytest.mark.parametrize(
    ("batch", "lies_over"),
    [(16, ("dp", "fsdp", "ep")), (4, ("dp", "fsdp")), (2, ("dp",)), (3, ())],
)
def test_serving_presets_shorten_the_batch(
    preset: str, batch: int, lies_over: tuple[str, ...]
) -> None:
    pm = manager(preset, "dp:2,fsdp:2,ep:4,tp:2")
    for mode in GENERATION:
        assert pm.mesh_axes(sw.BATCH, batch, mode=mode) == lies_over


@pytest.mark.parametrize("preset", SERVING)
@pytest.mark.parametrize(
    ("capacity", "lies_over"),
    [(16, ("dp", "fsdp", "ep")), (4, ("dp", "fsdp")), (2, ("dp",)), (3, ())],
)
def test_serving_presets_shorten_the_capacity(
    preset: str, capacity: int, lies_over: tuple[str, ...]
) -> None:
    pm = manager(preset, "dp:2,fsdp:2,ep:4,tp:2")
    for mode in GENERATION:
        assert pm.mesh_axes(sw.CAPACITY, capacity, mode=mode) == lies_over


@pytest.mark.parametrize("preset", [preset for preset in TRAINING if preset != "single"])
@pytest.mark.parametrize("mode", ["train", *GENERATION])
@pytest.mark.parametrize("mesh", ["fsdp:2,tp:4", "dp:2,tp:4"])
def test_training_presets_refuse_one_prompt(preset: str, mode: str, mesh: str) -> None:
    with raises(sw.IndivisibleError, dim=0, axis="BATCH", size=1) as caught:
        manager(preset, mesh).resolve(PROMPT["hidden"], shape=(1, 64, 64), mode=mode)
    assert f"{preset}.toml:" in caught.value.rule


@pytest.mark.parametrize("preset", SERVING)
def test_serving_presets_are_strict_in_train(preset: str) -> None:
    with raises(sw.IndivisibleError, "dp=2", size=1, fix="dp+fsdp+ep | -"):
        manager(preset, "dp:2,tp:4").resolve(PROMPT["hidden"], shape=(1, 64, 64), mode="train")


@pytest.mark.parametrize("preset", SERVING)
def test_serving_presets_store_weights_as_used(preset: str) -> None:
    pm = manager(preset, "dp:2,fsdp:2,sp:2,tp:2")
    for axes in (
        (sw.EMBED, sw.MLP_INTERMEDIATE),
        (sw.VOCAB, sw.EMBED),
        (sw.EMBED, sw.HEAD, sw.HEAD_DIM),
    ):
        stored, used = (
            pm.explain(axes, shape=(64,) * len(axes), role=role) for role in ("param", "use")
        )
        assert stored.spec == used.spec
        assert {axis for decision in stored.decisions for axis in decision.mesh_axes} == {"tp"}


class TestServeLongContext:
    MESH = "dp:2,fsdp:2,sp:2,tp:2"

    @pytest.mark.parametrize("mode", ["decode", "insert"])
    def test_one_prompt_decodes_over_all_data_axes(self, mode: str) -> None:
        pm = manager("serve_long_context", self.MESH)
        assert pm.resolve(PROMPT["cache"], shape=(1, 4096, 8, 128), mode=mode) == P(
            None, ("dp", "fsdp", "sp"), "tp"
        )
        assert pm.resolve(PROMPT["scores"], shape=(1, 32, 1, 4096), mode=mode) == P(
            None, "tp", None, ("dp", "fsdp", "sp")
        )

    def test_more_prompts_leave_sp_to_the_cache(self) -> None:
        pm = manager("serve_long_context", self.MESH)
        assert pm.resolve(PROMPT["cache"], shape=(4, 4096, 8, 128), mode="decode") == P(
            ("dp", "fsdp"), "sp", "tp"
        )
        assert pm.resolve(PROMPT["scores"], shape=(4, 32, 1, 4096), mode="decode") == P(
            ("dp", "fsdp"), "tp", None, "sp"
        )

    def test_length_divisible_by_sp_is_sharded(self) -> None:
        pm = manager("serve_long_context", self.MESH)
        assert pm.resolve(PROMPT["cache"], shape=(1, 4098, 8, 128), mode="decode") == P(
            None, "sp", "tp"
        )

    def test_nothing_left_for_the_cache_is_an_error(self) -> None:
        with raises(sw.AxisConflictError, "dp", 0, "BATCH", axis="KV_LENGTH", fix="EMPTY"):
            manager("serve_long_context", "dp:2,tp:4").resolve(
                PROMPT["cache"], shape=(16, 4096, 8, 128), mode="decode"
            )

    def test_prefill_splits_the_prompt_over_sp(self) -> None:
        pm = manager("serve_long_context", self.MESH)
        assert pm.resolve(PROMPT["hidden"], shape=(1, 4096, 64), mode="prefill") == P(None, "sp")
        assert pm.resolve(PROMPT["scores"], shape=(1, 32, 4096, 4096), mode="prefill") == P(
            None, "tp", "sp"
        )


class TestFsdpTpSp:
    MESH = "fsdp:2,sp:2,tp:2"
    RESIDUAL = (sw.BATCH, sw.LENGTH, sw.EMBED)

    def test_only_length_differs_from_fsdp_tp(self) -> None:
        own, other = sw.Strategy.preset("fsdp_tp_sp"), sw.Strategy.preset("fsdp_tp")
        assert dict(own.rules) == {**other.rules, "length": "sp+tp"}
        assert (own.params, own.policy, own.mesh) == (other.params, other.policy, other.mesh)

    def test_length_is_sharded_over_tp(self) -> None:
        pm = manager("fsdp_tp_sp", self.MESH)
        assert pm.resolve(self.RESIDUAL, shape=(4, 16, 8)) == P("fsdp", ("sp", "tp"))
        assert pm.resolve(PROMPT["hidden"], shape=(4, 16, 8)) == P("fsdp", "sp")
        with raises(sw.IndivisibleError, "sp=2", "tp=2", 4, axis="LENGTH", size=6):
            pm.resolve(self.RESIDUAL, shape=(4, 6, 8))

    def test_prompts_of_any_length(self) -> None:
        pm = manager("fsdp_tp_sp", self.MESH)
        specs = {16: P("fsdp", ("sp", "tp")), 6: P("fsdp", "sp"), 5: P("fsdp")}
        for length, spec in specs.items():
            assert pm.resolve(self.RESIDUAL, shape=(4, length, 8), mode="prefill") == spec
        for mode in ("decode", "insert"):
            assert pm.resolve(self.RESIDUAL, shape=(4, 1, 8), mode=mode) == P("fsdp")


class TestMoeEp:
    MESH = "dp:2,fsdp:2,sp:2,ep:2,tp:2"

    def test_batch_is_sharded_over_data_axes_and_ep(self) -> None:
        assert manager("moe_ep", self.MESH).mesh_axes(sw.BATCH) == ("dp", "fsdp", "ep")

    def test_dense_weights_are_stored_over_ep(self) -> None:
        pm = manager("moe_ep", self.MESH)
        axes = (sw.EMBED, sw.MLP_INTERMEDIATE)
        assert pm.resolve(axes, shape=(64, 64), role="param") == P(("fsdp", "sp", "ep"), "tp")
        used = pm.explain(axes, shape=(64, 64), role="use")
        assert used.spec == P(None, "tp")
        assert used.decisions[0].gathered == ("fsdp", "sp", "ep")

    def test_used_expert_weights_keep_ep(self) -> None:
        pm = manager("moe_ep", self.MESH)
        axes = (sw.EXPERT, sw.EMBED, sw.MLP_INTERMEDIATE)
        assert pm.resolve(axes, shape=(8, 64, 64), role="param") == P("ep", ("fsdp", "sp"), "tp")
        used = pm.explain(axes, shape=(8, 64, 64), role="use")
        assert used.spec == P("ep", None, "tp")
        assert [decision.gathered for decision in used.decisions] == [(), ("fsdp", "sp"), ()]

    def test_dispatched_tokens_over_ep_and_data_axes(self) -> None:
        pm = manager("moe_ep", self.MESH)
        assert pm.resolve((sw.EXPERT, sw.CAPACITY, sw.EMBED), shape=(8, 64, 64)) == P(
            "ep", ("dp", "fsdp", "sp")
        )
        assert pm.axis_size(sw.CAPACITY) == 8
        with raises(sw.IndivisibleError, "dp=2", "fsdp=2", "sp=2", axis="CAPACITY", size=12):
            pm.resolve((sw.EXPERT, sw.CAPACITY, sw.EMBED), shape=(8, 12, 64))

    def test_router_logits_are_sharded_like_tokens(self) -> None:
        pm = manager("moe_ep", self.MESH)
        assert pm.resolve((sw.BATCH, sw.QUERY_LENGTH, sw.EXPERT_GATE), shape=(16, 64, 8)) == P(
            ("dp", "fsdp", "ep"), "sp"
        )
        assert pm.resolve((sw.EMBED, sw.EXPERT_GATE), shape=(64, 8), role="use") == P()

    @pytest.mark.parametrize(
        ("mesh", "stored"),
        [
            ("ep:8", P("ep")),
            ("dp:2,ep:4", P("ep")),
            ("ep:2,tp:4", P("ep", None, "tp")),
            ("sp:2,ep:4", P("ep", "sp")),
        ],
    )
    def test_expert_weights_need_no_fsdp(self, mesh: str, stored: P) -> None:
        """Only the experts are sharded over ep. The mesh has no other axis for the other dims."""
        pm = manager("moe_ep", mesh)
        axes = (sw.EXPERT, sw.EMBED, sw.MLP_INTERMEDIATE)
        assert pm.resolve(axes, shape=(8, 64, 64), role="param") == stored
        assert pm.resolve(sw.ExpertColumnWiseAlt, shape=(8, 64, 64)) == stored

    def test_its_rules_are_those_of_the_page(self) -> None:
        preset = sw.Strategy.preset("moe_ep")
        named = {
            name: preset.rules[name] for name in ("batch", "expert", "expert_gate", "capacity")
        }
        assert named == {
            "batch": "dp+fsdp+ep",
            "expert": "ep",
            "expert_gate": "-",
            "capacity": "dp+fsdp+sp",
        }
        assert preset.params["embed"] == "fsdp+sp+ep | fsdp+sp | -"
        assert preset.compile().policy.gather == ("fsdp", "sp", "ep")


@pytest.mark.parametrize("preset", SERVING)
@pytest.mark.parametrize("mode", GENERATION)
def test_serving_presets_share_the_token_chain(preset: str, mode: str) -> None:
    rules = sw.Strategy.preset(preset).compile()
    for axis in (sw.BATCH, sw.CAPACITY):
        rule = rules.stated(axis, mode=parse_mode(mode), role=Role.ACTIVATION, path=None)
        assert rule is not None
        assert rule.ref.text == "dp+fsdp+ep | dp+fsdp | dp | -"


def test_long_context_decode_uses_free_axes() -> None:
    rules = sw.Strategy.preset("serve_long_context").compile()
    for axis, mode in itertools.product((sw.KV_LENGTH, sw.BIAS_KV_SEQ), ("decode", "insert")):
        rule = rules.stated(axis, mode=parse_mode(mode), role=Role.ACTIVATION, path=None)
        assert rule is not None
        assert rule.ref.text == "dp+fsdp+sp | sp"


@pytest.mark.parametrize("preset", ["fsdp_tp", "moe_ep", "sequence", "serve_long_context"])
def test_lengths_are_sharded_over_sp(preset: str) -> None:
    pm = manager(preset, "sp:2")
    for mode in ("train", "prefill"):
        assert pm.resolve(PROMPT["scores"], shape=(2, 4, 64, 64), mode=mode) == P(None, None, "sp")
        assert pm.resolve((sw.BATCH, sw.LENGTH), shape=(2, 64), mode=mode) == P(None, "sp")
    for mode in ("decode", "insert"):
        assert pm.resolve(PROMPT["scores"], shape=(2, 4, 1, 64), mode=mode) == P(
            None, None, None, "sp"
        )
        assert pm.resolve((sw.BATCH, sw.LENGTH), shape=(2, 1), mode=mode) == P()
        assert pm.resolve(PROMPT["cache"], shape=(2, 64, 4, 16), mode=mode) == P(None, "sp")


def test_scores_with_two_lengths_are_refused() -> None:
    axes = (sw.BATCH, sw.HEAD, sw.QUERY_LENGTH, sw.KV_LENGTH)
    assert manager("fsdp_tp", "fsdp:2,sp:1,tp:4").resolve(axes, shape=(2, 4, 64, 64)) == P(
        "fsdp", "tp"
    )
    with raises(
        sw.AxisConflictError, "sp", 2, "QUERY_LENGTH", dim=3, axis="KV_LENGTH", fix="EMPTY"
    ):
        manager("fsdp_tp", "fsdp:2,sp:2,tp:2").resolve(axes, shape=(2, 4, 64, 64))


TOKENS = {
    "hidden": ((sw.BATCH, sw.QUERY_LENGTH), sw.EMBED),
    "residual": ((sw.BATCH, sw.LENGTH), sw.EMBED),
    "feed-forward": ((sw.BATCH, sw.QUERY_LENGTH), sw.MLP_INTERMEDIATE),
    "logits": ((sw.BATCH, sw.QUERY_LENGTH), sw.VOCAB),
    "router logits": ((sw.BATCH, sw.QUERY_LENGTH), sw.EXPERT_GATE),
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("mesh", EVERY_MESH)
def test_flat_tokens_are_sharded_like_dims(preset: str, mesh: str) -> None:
    pm = manager(preset, mesh)
    for mode in MODES:
        length = 1 if mode == MODE_DECODE else 4096
        for name, axes in TOKENS.items():
            apart = pm.resolve(*axes[0], axes[1], shape=(16, length, 64), mode=mode)
            entries = [entry_names(entry) for entry in apart]
            batch, tokens, last = [*entries, (), (), ()][:3]
            flat = pm.explain(*axes, shape=(16 * length, 64), mode=mode)
            assert [decision.mesh_axes for decision in flat.decisions] == [
                (*batch, *tokens),
                last,
            ], (name, mode)


@pytest.mark.parametrize("preset", SERVING)
@pytest.mark.parametrize("mode", GENERATION)
@pytest.mark.parametrize("mesh", [*MESHES, "dp:2,fsdp:2,ep:2,sp:2,tp:2"])
def test_serving_presets_accept_a_flat_prompt(preset: str, mode: str, mesh: str) -> None:
    pm = manager(preset, mesh)
    for length in (1, 7, 4096):
        for name, axes in TOKENS.items():
            resolution = pm.explain(*axes, shape=(length, 64), mode=mode)
            if (
                preset == "serve_long_context"
                and mode == "prefill"
                and "sp" in mesh
                and length < 4096
            ):
                assert [problem.error for problem in resolution.problems] == [sw.IndivisibleError]
            else:
                assert resolution.ok, (name, resolution)
