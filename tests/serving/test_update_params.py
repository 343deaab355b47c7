"""New weights for a running engine: who is served by which, and what a failed move leaves."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder.config import DecoderConfig, decoder_specs
from decoder.served import cache_shape, served
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright import _jax, serving
from shardwright.errors import MoveError, ServingError, ShardingError
from shardwright.reshard import move
from shardwright.serving import Request
from shardwright.serving import weights as weights_module
from shardwright.testing import cpu_mesh
from tests.raising import Facts, facts, raises
from tests.serving.stub import SHAPE, stub, text_of

TINY = DecoderConfig(layers=1, embed=32, heads=8, kv_heads=4, head_dim=8, mlp=64)
MODEL = served(TINY)
REQUESTS = [
    Request(prompt=list(range(1, 2 + 5 * at)), max_new_tokens=4 + 2 * at) for at in range(6)
]


def manager_of(preset: str, mesh: str) -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset(preset), mesh=cpu_mesh(mesh))


def weights(seed: int, manager: sw.PartitionManager, dtype: Any = None) -> Any:
    """Weights whose most likely token is clear, so that the order of sums does not change it."""
    params = jax.tree.map(
        lambda x: 1.5 * x, manager.init(decoder_specs(TINY), jax.random.key(seed))
    )
    return params if dtype is None else jax.tree.map(lambda x: x.astype(dtype), params)


def engine_of(params: Any, manager: sw.PartitionManager, **options: Any) -> serving.Engine:
    sizes = {"slots": 4, "capacity": 64, "prefill_chunk": 8} | options
    dtype = str(jax.tree.leaves(params)[0].dtype)
    shape = dataclasses.replace(cache_shape(TINY), dtype=dtype)
    return serving.Engine(MODEL, params, shape=shape, manager=manager, **sizes)


def shifted(params: Any, *rest: Any) -> Any:
    return stub(params["shift"], *rest)


def stub_engine(shift: Any = 0, **options: Any) -> serving.Engine:
    sizes = {"slots": 2, "capacity": 32, "prefill_rows": 1, "prefill_chunk": 4}
    return serving.Engine(stub, shift, shape=SHAPE, **sizes, **options)


@pytest.mark.full
def test_requests_are_served_by_the_new_weights() -> None:
    train, serve = manager_of("fsdp_tp", "fsdp:4,tp:2"), manager_of("serve_tp", "dp:2,tp:4")
    engine = engine_of(weights(3, serve), serve)
    engine.compile()
    before = engine.run(REQUESTS)
    new = weights(4, train)
    update = engine.update_params(new)
    assert (update.version, engine.version) == (1, 1)
    assert update.bytes_sent == update.plans[0].bytes_sent > 0
    head, line = str(update).splitlines()
    assert head == "version 1"
    assert re.fullmatch(r"  \d+ of \d+ arrays move: [\d.]+ KiB sent, the least possible .*", line)
    with _jax.watch_compilations() as compilations:
        after = engine.run(REQUESTS)
        engine.update_params(new, version="tuned")
    assert compilations.compiled == []
    alone = engine_of(weights(4, serve), serve).run(REQUESTS)
    assert [done.tokens for done in after] == [done.tokens for done in alone]
    assert [done.tokens for done in after] != [done.tokens for done in before]
    assert {done.versions for done in before} == {(0,)}
    assert {done.versions for done in after} == {(1,)}
    assert engine.version == "tuned"


def test_running_requests_continue_with_the_new_weights() -> None:
    engine = stub_engine(shift=1, ahead=False)
    running = engine.submit(Request(prompt=[2, 5], max_new_tokens=6))
    engine.step()
    engine.step()
    written = list(running.tokens)
    engine.update_params(2)
    waiting = engine.submit(Request(prompt=[2, 5], max_new_tokens=3))
    done = running.result()
    assert list(done.tokens[: len(written)]) == text_of([2, 5], len(written), shift=1)
    rest = text_of([2, 5, *written], 6 - len(written), shift=2)
    assert list(done.tokens[len(written) :]) == rest
    assert done.versions == (0, 1)
    assert list(waiting.result().tokens) == text_of([2, 5], 3, shift=2)
    assert waiting.result().versions == (1,)


@pytest.mark.full
def test_training_may_donate_what_was_pushed() -> None:
    """Arrays that are in place are copied, so that deleting the source deletes no weight."""
    serve = manager_of("serve_tp", "dp:2,tp:4")
    engine = engine_of(weights(3, serve), serve)
    new = weights(4, serve)
    update = engine.update_params(new)
    assert update.bytes_sent == 0
    wanted = engine_of(weights(4, serve), serve).run(REQUESTS[:2])
    for leaf in jax.tree.leaves(new):
        leaf.delete()
    assert [done.tokens for done in engine.run(REQUESTS[:2])] == [done.tokens for done in wanted]


@pytest.mark.full
def test_donation_keeps_what_is_in_place() -> None:
    serve = manager_of("serve_tp", "dp:2,tp:4")
    engine = engine_of(weights(3, serve), serve)
    new = weights(4, serve)
    engine.update_params(new, donate=True)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))
    kept = jax.tree.leaves(engine._arrays._setup.params)
    assert all(a is b for a, b in zip(kept, jax.tree.leaves(new), strict=True))


@pytest.mark.full
def test_weights_are_cast_to_the_served_dtype() -> None:
    serve = manager_of("serve_tp", "dp:2,tp:4")
    engine = engine_of(weights(3, serve, jnp.bfloat16), serve)
    host = jax.tree.map(np.asarray, weights(4, manager_of("single", "dp:1")))
    engine.update_params(host)
    wanted = engine_of(weights(4, serve, jnp.bfloat16), serve).run(REQUESTS[:2])
    assert [done.tokens for done in engine.run(REQUESTS[:2])] == [done.tokens for done in wanted]


@pytest.mark.full
def test_prefill_with_weights_of_its_own() -> None:
    serve, prefill = manager_of("serve_tp", "dp:2,tp:4"), manager_of("serve_tp", "dp:4,tp:2")
    options = {"prefill_manager": prefill, "prefill_rows": 4}
    engine = engine_of(weights(3, serve), serve, prefill_params=weights(3, prefill), **options)
    update = engine.update_params(weights(4, manager_of("fsdp_tp", "fsdp:4,tp:2")), donate=True)
    assert len(update.plans) == 2
    wanted = engine_of(weights(4, serve), serve).run(REQUESTS[:3])
    assert [done.tokens for done in engine.run(REQUESTS[:3])] == [done.tokens for done in wanted]


def mixed_weights(mesh: str, seed: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Weights with a sharding on a mesh, on one device, on no device in particular, on the host."""
    big = np.random.default_rng(seed).normal(size=(64, 64)).astype(np.float32)
    sharding = NamedSharding(cpu_mesh(mesh), P(cpu_mesh(mesh).axis_names[-1]))
    return {
        "big": jax.device_put(big, sharding).astype(dtype),
        "device": jax.device_put(big[0], jax.devices()[3]).astype(dtype),
        "scale": jnp.asarray(big[0, 0]).astype(dtype),
        "host": big[1].astype(dtype),
    }


@pytest.mark.parametrize("donate", [False, True])
def test_weights_of_different_places_move_by_plan(donate: bool) -> None:
    """One scalar without a sharding does not take the others off the plan."""
    old, new = mixed_weights("dp:8", 1, jnp.bfloat16), mixed_weights("dp:2,tp:4", 2)
    wanted = jax.tree.map(lambda x: np.asarray(jnp.asarray(x).astype(jnp.bfloat16)), new)
    moved = weights_module.move_weights(new, old, name="params", piece=4096, donate=donate)
    assert moved.plan is not None
    assert [leaf.path for leaf in moved.plan.leaves] == ["big", "device"]
    assert moved.plan.leaves[0].route.pieces.count > 1
    assert moved.plan.bytes_sent >= moved.plan.least_bytes > 0
    assert moved.placed_bytes == 2 + 64 * 2
    assert new["big"].is_deleted() is donate
    for name, leaf in moved.params.items():
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(leaf), wanted[name])
        if name != "host":
            assert (leaf.sharding, leaf.committed) == (old[name].sharding, old[name].committed)
    assert type(moved.params["host"]) is np.ndarray


def test_failure_beside_unplanned_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree of the error has all weights, so that it can be passed again."""
    old, new = mixed_weights("dp:8", 1), mixed_weights("dp:2,tp:4", 2)
    wanted = {name: np.asarray(leaf) for name, leaf in new.items()}
    move_leaf = move.move_leaf

    def failing(value: Any, *args: Any, **options: Any) -> Any:
        if value is new["device"]:
            raise KeyboardInterrupt
        return move_leaf(value, *args, **options)

    options: dict[str, Any] = {"name": "params", "piece": "1MiB", "donate": True}
    with monkeypatch.context() as patch:
        patch.setattr(move, "move_leaf", failing)
        with pytest.raises(KeyboardInterrupt) as caught:
            weights_module.move_weights(new, old, **options)
    failure = caught.value.__cause__
    assert isinstance(failure, MoveError)
    assert failure.moved == ("big",)
    moved = weights_module.move_weights(failure.tree, old, **options)
    for name, leaf in moved.params.items():
        np.testing.assert_array_equal(np.asarray(leaf), wanted[name])


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (jax.ShapeDtypeStruct((64, 64), jnp.float32), facts("ShapeDtypeStruct", path="params/big")),
        ("x", facts("x", "JAX", path="params/big")),
        (None, facts("deleted", "donated", path="params/big")),
    ],
)
def test_weights_without_values_are_named(leaf: Any, message: Facts) -> None:
    new = mixed_weights("dp:8", 1)
    if leaf is None:
        new["big"].delete()
    else:
        new["big"] = leaf
    with raises(ShardingError, message) as caught:
        weights_module.move_weights(
            new, mixed_weights("dp:8", 2), name="params", piece="1MiB", donate=False
        )
    assert "fix   " in str(caught.value)


def test_large_integers_of_the_host_are_refused() -> None:
    old = {"seed": np.int32(3)}
    with raises(ShardingError, "int64", "int32", "JAX", path="params/seed", fix="jax_enable_x64"):
        weights_module.move_weights(
            {"seed": np.int64(2**40)}, old, name="params", piece="1MiB", donate=False
        )


@pytest.mark.full
@pytest.mark.parametrize("shared", [False, True])
def test_failure_after_prefill_has_moved(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Donated weights of prefill that have moved are in the tree of the error."""
    train = manager_of("fsdp_tp", "fsdp:4,tp:2")
    serve, prefill = manager_of("serve_tp", "dp:2,tp:4"), manager_of("serve_tp", "dp:4,tp:2")
    options = {"prefill_manager": prefill, "prefill_rows": 4}
    engine = engine_of(weights(3, serve), serve, prefill_params=weights(3, prefill), **options)
    new = weights(4, train)
    both = {"params": new, "prefill_params": new if shared else weights(4, train)}
    count = len(jax.tree.leaves(new))
    calls, move_leaf = [], move.move_leaf

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == count + 2:
            raise RuntimeError("the link is down")
        return move_leaf(*args, **options)

    with raises(ServingError, "unknown", path="params"):
        engine.update_params({**new, "more": 1}, prefill_params=both["prefill_params"], donate=True)
    with monkeypatch.context() as patch:
        patch.setattr(move, "move_leaf", failing)
        with raises(
            MoveError, 8, "RuntimeError", path="layers/0/mlp/norm/scale", fix="error.tree"
        ) as caught:
            engine.update_params(both["params"], prefill_params=both["prefill_params"], donate=True)
    tree = caught.value.tree
    assert engine.update_params(tree["params"], prefill_params=tree["prefill_params"]).version == 1
    wanted = engine_of(weights(4, serve), serve).run(REQUESTS[:2])
    assert [done.tokens for done in engine.run(REQUESTS[:2])] == [done.tokens for done in wanted]


@pytest.mark.full
def test_failed_move_keeps_the_old_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    train, serve = manager_of("fsdp_tp", "fsdp:4,tp:2"), manager_of("serve_tp", "dp:2,tp:4")
    engine = engine_of(weights(3, serve), serve)
    wanted = engine.run(REQUESTS[:2])
    new, moved = weights(4, train), []
    move_leaf = move.move_leaf

    def failing(*args: Any, **options: Any) -> Any:
        if len(moved) == 2:
            raise RuntimeError("the link is down")
        moved.append(args)
        return move_leaf(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(move, "move_leaf", failing)
        with raises(
            MoveError, 2, 8, "RuntimeError", path="layers/0/attention/norm/scale", fix="error.tree"
        ):
            engine.update_params(new)
    assert engine.version == 0
    assert [done.tokens for done in engine.run(REQUESTS[:2])] == [done.tokens for done in wanted]
    assert engine.update_params(new).version == 1


@pytest.mark.full
def test_deleted_weights_can_be_replaced() -> None:
    serve = manager_of("serve_tp", "dp:2,tp:4")
    old = weights(3, serve)
    engine = engine_of(old, serve)
    for leaf in jax.tree.leaves(old):
        leaf.delete()
    engine.update_params(weights(4, serve))
    assert engine.run(REQUESTS[:1])[0].versions == (1,)


def test_bad_input() -> None:
    serve = manager_of("serve_tp", "dp:2,tp:4")
    zeros = jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), decoder_specs(TINY))
    params = jax.device_put(zeros, serve.shardings(decoder_specs(TINY)))
    engine, small = engine_of(params, serve), stub_engine()
    lacking = dict(params)
    lacking.pop("embedding")
    wrong = jax.tree.map(lambda x: x[..., :1], zeros)
    cases: list[tuple[Any, str]] = [
        (lambda: engine.update_params(lacking), facts("missing", path="params")),
        (lambda: engine.update_params({**params, "more": 1}), facts("unknown", path="params")),
        (
            lambda: engine.update_params(wrong),
            facts("(256, 1)", "(256, 32)", path="params/embedding", fix="model"),
        ),
        (lambda: engine.update_params(params, version=0), facts(0, path="version")),
        (lambda: engine.update_params(params, version=True), facts("True", path="version")),
        (
            lambda: engine.update_params(params, prefill_params=params),
            facts("weights", path="prefill_params"),
        ),
        (lambda: small.update_params(1.5), facts("float32", "int32", path="params", fix="int32")),
    ]
    for call, message in cases:
        with raises(ServingError, message) as caught:
            call()
        assert "fix  " in str(caught.value)
    assert engine.version == small.version == 0
    small.update_params(1, version="a")
    with raises(ServingError, "a", path="version", fix="a"):
        small.update_params(2)


def test_update_from_a_callback_is_refused() -> None:
    engine, seen = stub_engine(), []

    def update(token: int) -> None:
        try:
            engine.update_params(1)
        except ServingError as error:
            seen.append(error)

    engine.run([Request(prompt=[1], max_new_tokens=1, on_token=update)])
    assert "between two steps" in str(seen[0])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dense", "paged"])
@pytest.mark.parametrize("committed", [False, True])
def test_nothing_is_compiled_without_a_manager(kind: str, committed: bool) -> None:
    """Neither after `compile` nor after an update, wherever the weights come from."""
    first = jax.device_put(jnp.int32(1), jax.devices()[0]) if committed else jnp.int32(1)
    options = {"cache": "paged", "cache_options": {"page_size": 8, "pages": 16}}
    engine = serving.Engine(
        shifted,
        {"shift": first, "scale": jnp.ones(8)},
        shape=SHAPE,
        slots=2,
        capacity=64,
        prefill_chunk=8,
        **(options if kind == "paged" else {}),
    )
    engine.compile()
    others = (jnp.int32(2), np.int32(3), jax.device_put(jnp.int32(4), jax.devices()[1]))
    for shift, new in enumerate((first, *others), 1):
        if new is not first:
            engine.update_params({"shift": new, "scale": jnp.ones(8)}, donate=shift == 4)
        with _jax.watch_compilations() as compilations:
            done = engine.run(REQUESTS[:2])
        assert compilations.compiled == []
        for request, each in zip(REQUESTS, done, strict=False):
            wanted = text_of(request.prompt, request.max_new_tokens, shift=shift)
            assert list(each.tokens) == wanted
