"""Constraints of an untouched model: where they are, what they send, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.plan.collectives.read import read_collectives
from shardwright.testing import cpu_mesh
from tests.inference import models
from tests.inference.models import LLAMA, MODELS, SCANNED, Model, attend, rms_norm, rotary
from tests.raising import facts, raises

MESHES = ("fsdp:8", "fsdp:4,tp:2", "dp:2,tp:4")


def infer(model: Model, **options: Any) -> Any:
    return sw.infer_axes(model.forward, model.shapes, *model.inputs, seeds=model.seeds, **options)


def manager(mesh: str = "fsdp:4,tp:2") -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=cpu_mesh(mesh))


def unchanged(x: Any, *axes: Any) -> Any:
    return x


def decoder(params: Any, tokens: Any, shard: Any = unchanged) -> Any:
    """A decoder with flat projections; `shard` is where a person would write a constraint."""
    length, stream = (sw.BATCH, sw.QUERY_LENGTH), (sw.BATCH, sw.LENGTH, sw.EMBED)
    heads = (*length, sw.HEAD, sw.HEAD_DIM)
    x = shard(params["table"][tokens], *stream)
    for layer in params["layers"]:
        normed = rms_norm(x, layer["norm1"])
        q, k, v = (
            shard(jnp.einsum("ble,ehd->blhd", normed, layer[name]), *heads) for name in "qkv"
        )
        mixed = shard(attend(rotary(q), rotary(k), v), *heads)
        x = shard(x + jnp.einsum("blhd,hde->ble", mixed, layer["o"]), *stream)
        hidden = rms_norm(x, layer["norm2"]) @ layer["up"]
        hidden = jax.nn.gelu(shard(hidden, *length, sw.MLP_INTERMEDIATE))
        x = shard(x + hidden @ layer["down"], *stream)
    return shard(x @ params["table"].T, *length, sw.VOCAB)


VOCAB, EMBED, HIDDEN = 128, 32, 64
LAYER = {
    "norm1": ((EMBED,), "NORM"),
    **dict.fromkeys("qkv", ((EMBED, 8, 4), "EMBED HEAD HEAD_DIM")),
    "o": ((8, 4, EMBED), "HEAD HEAD_DIM EMBED"),
    "norm2": ((EMBED,), "NORM"),
    "up": ((EMBED, HIDDEN), "EMBED MLP_INTERMEDIATE"),
    "down": ((HIDDEN, EMBED), "MLP_INTERMEDIATE EMBED"),
}
DECODER = Model(
    "decoder",
    decoder,
    {"table": ((VOCAB, EMBED), "VOCAB EMBED"), "layers": [LAYER, LAYER]},
    (jax.ShapeDtypeStruct((8, 16), jnp.int32),),
)


def loss(forward: Any, params: Any, tokens: Any) -> Any:
    logits = jax.nn.log_softmax(forward(params, tokens).astype(jnp.float32))
    return -jnp.take_along_axis(logits, tokens[..., None], axis=-1).mean()


def sent(forward: Any, pm: sw.PartitionManager, axes: Any) -> int:
    """Return the bytes that a device sends for one value and gradient."""
    shardings = pm.shardings(DECODER.shapes, axes)
    batch = pm.sharding(sw.BATCH, sw.EMPTY, shape=(8, 16))
    step = jax.value_and_grad(lambda params, tokens: loss(forward, params, tokens))
    program = jax.jit(step, in_shardings=(shardings, batch), out_shardings=(None, shardings))
    with pm:
        compiled = program.lower(DECODER.shapes, *DECODER.inputs).compile()
    totals = [each.total_wire_bytes for each in read_collectives(compiled, pm.mesh)]
    return sum(count for count in totals if count is not None)


@pytest.mark.full
def test_bytes_equal_hand_annotation() -> None:
    inferred = infer(DECODER)
    by_inference = sw.constrained(decoder, inferred)
    differences = []
    for mesh in MESHES:
        pm = manager(mesh)
        untouched, by_hand, automatic = (
            sent(forward, pm, inferred.annotations)
            for forward in (decoder, lambda p, t: decoder(p, t, sw.shard), by_inference)
        )
        assert automatic == by_hand, (mesh, untouched, by_hand, automatic)
        differences.append(untouched - automatic)
    # On one of the meshes, the compiler alone sends something else.
    assert any(differences), differences


def arrays(model: Model) -> tuple[Any, list[Any]]:
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda shape: jnp.asarray(random.normal(size=shape.shape) * 0.1, jnp.float32), model.shapes
    )
    inputs = [jnp.asarray(random.integers(0, 9, each.shape), each.dtype) for each in model.inputs]
    return params, inputs


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_values_and_gradients(model: Model) -> None:
    """A weighted sum of the results has the same value and gradient with constraints."""
    params, inputs = arrays(model)
    forward = sw.constrained(model.forward, infer(model))

    def total(function: Any, params: Any) -> Any:
        result = function(params, *inputs)
        weights = jnp.cos(jnp.arange(result.size, dtype=jnp.float32)).reshape(result.shape)
        return (result * weights).sum()

    expected = jax.jit(jax.value_and_grad(lambda p: total(model.forward, p)))(params)
    with manager("fsdp:2,tp:2"):
        traced = jax.jit(jax.value_and_grad(lambda p: total(forward, p))).trace(params)
        actual = traced.lower().compile()(params)
    assert str(traced.jaxpr).count("sharding_constraint") >= len(forward.inferred.constraints)
    # The gradient of a bias of keys is 0 but for rounding, so differences are compared with the
    # largest gradient of all. In float32, jit alone changes them by as much.
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected[1]))
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * largest)


def test_scan_and_remat_stay() -> None:
    forward = sw.constrained(SCANNED.forward, infer(SCANNED))
    places = [each.place for each in forward.inferred.constraints]
    assert sum(len(place) > 1 for place in places) == 7  # inside the scanned layer
    with manager("fsdp:2,tp:2"):
        text = str(jax.make_jaxpr(forward)(SCANNED.shapes, *SCANNED.inputs))
    plain = str(jax.make_jaxpr(SCANNED.forward)(SCANNED.shapes, *SCANNED.inputs))
    for primitive in (" scan[", "checkpoint[", "custom_jvp_call["):
        assert text.count(primitive) == plain.count(primitive), primitive
    assert text.count("= sharding_constraint[") == len(places)


def test_constraints_line_by_line() -> None:
    forward = sw.constrained(LLAMA.forward, infer(LLAMA))
    lines = str(forward).splitlines()
    assert lines[-1] == "26 constraints"
    places = [line.partition(": ")[2] for line in lines]
    assert "BATCH LENGTH EMBED: residual stream (gather)" in places
    assert "BATCH QUERY_LENGTH HEAD HEAD_DIM: heads (dot_general), 3 times" in places
    assert (
        "BATCH KV_LENGTH KV_HEAD KV_HEAD_DIM: heads of keys and values (dot_general), 3 times"
        in (places)
    )
    assert (
        "BATCH QUERY_LENGTH MLP_INTERMEDIATE: hidden dim of an MLP (dot_general), 6 times" in places
    )
    assert places[-2] == "BATCH QUERY_LENGTH VOCAB: logits (dot_general)"
    assert all(line.startswith("models.py:") for line in lines[:-1])
    explained = forward.explain(manager("fsdp:2,tp:2"), width=200)
    assert "P('fsdp', None, 'tp')" in explained
    assert len(explained.splitlines()) == len(lines)


def test_grouped_heads_have_the_query_length() -> None:
    """Heads of queries as two dims, kv heads and groups, stand beside the length of queries."""
    lines = [str(each).partition(": ")[2] for each in infer(models.FLAT_LLAMA).constraints]
    assert "BATCH KV_HEAD HEAD_DIM _ QUERY_LENGTH: heads (dot_general)" in lines
    assert sum("KV_LENGTH" in line for line in lines) == 2  # keys and values


def test_fused_projections_get_no_constraint() -> None:
    """Their number and the heads are one dim. The heads after attention get a constraint."""
    lines = [str(each) for each in infer(models.GPT2).constraints]
    assert not any("3*" in line or "HEAD:12" in line for line in lines)
    assert any("BATCH HEAD HEAD_DIM QUERY_LENGTH: heads" in line for line in lines)


@pytest.mark.full(but=["fsdp_tp", "moe_ep", "serve_tp", "vision"])
@pytest.mark.parametrize("preset", sw.Strategy.presets())
@pytest.mark.ci
def test_every_preset_runs(preset: str) -> None:
    """The length enters matmuls as QUERY_LENGTH, so it shares no mesh axis with their dims."""
    forward = sw.constrained(decoder, infer(DECODER))
    strategy = sw.Strategy.preset(preset)
    mesh = cpu_mesh(",".join(f"{axis}:{1 + (axis in ('fsdp', 'tp'))}" for axis in strategy.mesh))
    with sw.PartitionManager(strategy, mesh=mesh) as pm:
        jax.eval_shape(forward, DECODER.shapes, *DECODER.inputs)
        assert len(forward.explain(pm).splitlines()) > 2


@pytest.mark.parametrize("length", ["QUERY_LENGTH", "KV_LENGTH"])
def test_seeds_may_name_the_length_otherwise(length: str) -> None:
    for model in (DECODER, LLAMA, models.GPT2):
        seeded = dataclasses.replace(model, seeds=(("BATCH", length),))
        assert infer(seeded).constraints == infer(model).constraints, model.name


def test_the_reason_for_no_constraint_is_named() -> None:
    for seeds, reason in (
        ((None, "LENGTH"), facts(28, "dim")),
        (("_", "LENGTH"), facts(28, "BATCH")),
    ):
        model = dataclasses.replace(DECODER, seeds=(seeds,))
        with raises(sw.StrategyError, reason):
            sw.constrained(decoder, infer(model))


def test_guessed_dims_get_no_constraint() -> None:
    kinds = {each.kind for each in infer(models.VIT).constraints}
    assert "logits" not in kinds
    assert "residual stream" in kinds
    guess = Model(
        "guess",
        lambda params, x: jax.nn.gelu(x @ params["in"]) @ params["out"],
        {"in": ((24, 40), ""), "out": ((40, 7), "")},
        (jax.ShapeDtypeStruct((2, 24), jnp.float32),),
        (("BATCH", "EMBED"),),
    )
    says = facts(3, "dim")
    with raises(sw.StrategyError, says):
        sw.constrained(guess.forward, infer(guess))
    named = infer(guess, sizes={40: "MLP_INTERMEDIATE"})
    assert [each.kind for each in named.constraints] == ["hidden dim of an MLP"]


@pytest.mark.full
def test_reshards_that_a_mesh_adds_are_no_difference() -> None:
    """Under a mesh, JAX traces `where` of a number with `reshard`, also between two constraints."""

    def forward(params: Any, x: Any, labels: Any, key: Any) -> Any:
        drop = jax.random.bernoulli(key, 0.3, labels.shape)
        x = x + params["table"][jnp.where(drop, 31, labels)]
        x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
        x = x + params["table"][jnp.where(labels > 3, 7, labels)]
        return x + jax.nn.gelu(x @ params["up"]) @ params["down"]

    draw = np.random.default_rng(0)
    shapes = {"table": (32, 64), "up": (64, 256), "down": (256, 64)}
    params = {name: draw.normal(size=shape) * 0.1 for name, shape in shapes.items()}
    params = jax.tree.map(np.float32, params)
    x, labels = draw.normal(size=(8, 64)).astype(np.float32), np.arange(8) % 6
    inputs = (x, labels, jax.random.key(0))
    seeds = [(sw.BATCH, sw.EMBED), (sw.BATCH,), ()]
    wrapped = sw.constrained(forward, sw.infer_axes(forward, params, *inputs, seeds=seeds))
    kinds = [each.kind for each in wrapped.inferred.constraints]
    block = ["hidden dim of an MLP", "residual stream"]
    assert kinds == ["residual stream", *block, "residual stream", "residual stream", *block]
    with manager():
        actual = jax.jit(jax.grad(lambda *given: wrapped(*given).sum()))(params, *inputs)
    expected = jax.jit(jax.grad(lambda *given: forward(*given).sum()))(params, *inputs)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, actual, expected)


def test_another_program_is_refused() -> None:
    forward = sw.constrained(SCANNED.forward, infer(SCANNED))
    other = dataclasses.replace(forward, forward=LLAMA.forward)
    with (
        manager("fsdp:2,tp:2"),
        raises(sw.StrategyError, 2, "broadcast_in_dim", 3, fix="infer_axes"),
    ):
        jax.eval_shape(other, LLAMA.shapes, *LLAMA.inputs)


@pytest.mark.full
def test_batch_of_another_size() -> None:
    forward = sw.constrained(DECODER.forward, infer(DECODER))
    params, _ = arrays(DECODER)
    tokens = jnp.arange(64).reshape(4, 16)
    with manager("fsdp:4,tp:2"):
        actual = jax.jit(jax.value_and_grad(lambda p: loss(forward, p, tokens)))(params)
    expected = jax.jit(jax.value_and_grad(lambda p: loss(decoder, p, tokens)))(params)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_errors_name_the_constraint() -> None:
    forward = sw.constrained(LLAMA.forward, infer(LLAMA))
    params, inputs = arrays(LLAMA)
    with pytest.raises(sw.NoManagerError):
        forward(params, *inputs)
    with manager("fsdp:8"), pytest.raises(sw.IndivisibleError) as caught:
        jax.eval_shape(forward, params, *inputs)
    assert caught.value.__notes__[0].startswith("constrained: models.py:")
    with pytest.raises(sw.IndivisibleError):
        forward.explain(manager("fsdp:8"))


def test_inputs_may_be_passed_by_name() -> None:
    inferred = infer(DECODER)
    tokens = jnp.zeros((8, 16), jnp.int32)
    with manager():
        by_name = jax.eval_shape(
            lambda params: sw.constrained(decoder, inferred)(params, tokens=tokens), DECODER.shapes
        )
    assert by_name.shape == (8, 16, VOCAB)

    def only_by_name(params: Any, *, tokens: Any) -> Any:
        return decoder(params, tokens)

    with manager(), raises(sw.StrategyError, "tokens", fix="infer_axes"):
        sw.constrained(only_by_name, inferred)(DECODER.shapes, tokens=tokens)


def test_what_is_no_inference_is_refused() -> None:
    with raises(sw.StrategyError, "NoneType", "infer_axes", fix="infer_axes"):
        sw.constrained(decoder, None)  # type: ignore[arg-type]


def test_explicit_axes_are_refused() -> None:
    """Their shardings are part of the types, and a trace has other ones."""
    mesh = cpu_mesh("fsdp:4,tp:2", axis_types="explicit")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh)
    forward = sw.constrained(decoder, infer(DECODER))
    with pm, raises(sw.StrategyError, "mesh", fix="axis_types"):
        jax.eval_shape(forward, DECODER.shapes, *DECODER.inputs)


def test_conflicts_are_refused() -> None:
    def two_names(params: Any, tokens: Any) -> Any:
        rows = jax.lax.scan(lambda x, row: (x + (x @ row) * row, None), jnp.ones(24), params)[0]
        return params[tokens] + rows

    inferred = infer(Model("two names", two_names, ((96, 24), "")))
    with raises(sw.StrategyError, "VOCAB", "LAYERS"):
        sw.constrained(two_names, inferred)


def test_a_linear_scan_is_a_shard_map_under_a_manager() -> None:
    """So the program differs from the inferred one inside the scan, and nowhere else."""

    def forward(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        hidden = x @ params["in"]
        states = sw.linear_scan(jax.nn.sigmoid(hidden), hidden, sw.BATCH, sw.LENGTH, sw.EMPTY)
        return (x + jax.nn.gelu(states) @ params["out"]) @ params["table"].T

    shapes = {"table": (64, 16), "in": (16, 32), "out": (32, 16)}
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    tokens = jnp.arange(64).reshape(4, 16)
    inferred = sw.infer_axes(forward, params, tokens, seeds=[(sw.BATCH, sw.LENGTH)])
    constrained = sw.constrained(forward, inferred)
    with sw.PartitionManager(sw.Strategy.preset("sequence"), mesh=cpu_mesh("fsdp:2,sp:4")):
        found = jax.jit(constrained)(params, tokens)
    np.testing.assert_allclose(found, jax.jit(forward)(params, tokens), rtol=1e-4, atol=1e-4)
