"""The pieces of the demo, quickly: a tiny model under two strategies trains and writes the same."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from decoder import report
from decoder.config import DecoderConfig, decoder_specs
from decoder.model import forward
from decoder.serve import Server, check_fits, generate, make_server, padded
from decoder.text import stdlib_text, text_batches
from decoder.train import make_trainer, train
from jax.sharding import PartitionSpec as P

import shardwright as sw
from tests.raising import raises

# Programs of several seconds; the parts are tested by themselves.
pytestmark = pytest.mark.full

STRATEGIES = Path(__file__).parents[2] / "examples" / "strategies"
TINY = DecoderConfig(layers=1, embed=32, heads=8, kv_heads=4, head_dim=8, mlp=64)
PROMPTS = (b"def f(x):", b"import", b"    return self.name")


def load(name: str) -> sw.Strategy:
    return sw.Strategy.load(STRATEGIES / f"{name}.toml")


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    return stdlib_text(50_000)


@pytest.fixture(scope="module")
def trained(text: np.ndarray) -> dict[str, Any]:
    """Three steps under two strategies."""
    runs = {}
    for name in ("single", "fsdp_tp"):
        trainer = make_trainer(load(name), TINY, optax.adamw(1e-2))
        batches = itertools.islice(text_batches(text, batch=8, length=32, seed=1), 3)
        runs[name] = train(trainer, trainer.init(7), batches, on_step=lambda loss: None)
    return runs


def test_losses_agree_and_fall(trained: dict[str, Any]) -> None:
    single, sharded = (np.array(trained[name].losses) for name in ("single", "fsdp_tp"))
    np.testing.assert_allclose(sharded, single, rtol=2e-6)
    assert single[-1] < single[0] - 0.1
    assert report.largest_difference({"single": single, "fsdp_tp": sharded}) < 2e-6


def test_state_keeps_its_sharding_in_a_step(trained: dict[str, Any]) -> None:
    state = trained["fsdp_tp"].state
    adam = state["opt"][0]
    for tree in (state["params"], adam.mu, adam.nu):
        layer = tree["layers"][0]
        assert layer["attention"]["query"]["kernel"].sharding.spec == P("fsdp", "tp")
        assert layer["attention"]["out"]["kernel"].sharding.spec == P("tp", None, "fsdp")
        assert layer["mlp"]["down"]["kernel"].sharding.spec == P("tp", "fsdp")
        assert tree["norm"]["scale"].sharding.spec == P()
    assert (
        report.bytes_per_device(state["params"])
        < report.bytes_per_device(trained["single"].state["params"]) / 6
    )


def test_trained_parameters_equal_unsharded(trained: dict[str, Any]) -> None:
    for sharded, single in zip(
        *(jax.tree.leaves(trained[name].state["params"]) for name in ("fsdp_tp", "single")),
        strict=True,
    ):
        np.testing.assert_allclose(np.asarray(sharded), np.asarray(single), atol=2e-5)


@pytest.fixture(scope="module")
def servers() -> dict[str, Server]:
    return {
        name: make_server(load(name), TINY, slots=4, capacity=48, prompt_length=24)
        for name in ("single", "serve_tp")
    }


def test_texts_are_equal_byte_by_byte(trained: dict[str, Any], servers: dict[str, Server]) -> None:
    params, done = trained["fsdp_tp"].state["params"], []
    texts = {
        name: generate(server, params, PROMPTS, new_bytes=12, on_step=done.append)
        for name, server in servers.items()
    }
    assert [len(written) for written in texts["single"]] == [12, 12, 12]
    assert texts["serve_tp"] == texts["single"]
    assert list(report.differing(texts)) == [None, None, None]
    assert done[:4] == ["prefill 9 bytes", "prefill 6 bytes", "prefill 20 bytes", "decode 3 slots"]


def test_cache_equals_full_forward_pass(
    trained: dict[str, Any], servers: dict[str, Server]
) -> None:
    """Each byte written with a cache is what a forward pass over the whole text calls likeliest."""
    pm = sw.PartitionManager(load("single"))
    texts = generate(
        servers["serve_tp"],
        trained["single"].state["params"],
        PROMPTS,
        new_bytes=12,
        on_step=lambda output: None,
    )
    with pm:
        weights = pm.shard(trained["single"].state["params"], decoder_specs(TINY), role="param")
        for prompt, text in zip(PROMPTS, texts, strict=True):
            row = np.frombuffer(prompt + text, np.uint8).astype(np.int32)
            logits, cache = jax.jit(forward, static_argnums=2)(weights, row[None], TINY)
            assert cache is None
            assert np.argmax(np.asarray(logits)[0, len(prompt) - 1 : -1], axis=-1).tolist() == list(
                text
            )


@pytest.mark.parametrize(
    ("prompts", "new", "says"),
    [
        ((b"a" * 24,), 25, r"prompt 0: 24 bytes and 25 new ones exceed the slot's capacity 48"),
        ((b"a", b"b" * 25), 1, r"prompt 1 has 25 bytes, but this server takes 1 to 24"),
        ((b"",), 1, r"prompt 0 has 0 bytes"),
        ((b"a",) * 5, 1, r"5 prompts for 4 slots"),
    ],
)
def test_invalid_sizes_are_refused_early(
    servers: dict[str, Server], prompts: Any, new: int, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        generate(servers["single"], {}, prompts, new_bytes=new)


def test_largest_request_is_served(servers: dict[str, Server]) -> None:
    check_fits(servers["single"], (b"a" * 24,) * 4, 24)


def test_indivisible_batch_error(text: np.ndarray) -> None:
    trainer = make_trainer(load("fsdp"), TINY, optax.adamw(1e-2))
    batch = next(text_batches(text, batch=12, length=32, seed=0))
    with raises(sw.IndivisibleError, "fsdp=8", axis="BATCH", size=12, fix="fsdp | -"):
        trainer.place(batch)


def test_indivisible_weights_are_all_named() -> None:
    odd = DecoderConfig(layers=1, embed=36, heads=6, kv_heads=3, head_dim=8, mlp=64)
    with raises(
        sw.IndivisibleError,
        "tp=4",
        path="layers/0/attention/out/kernel",
        dim=0,
        axis="HEAD",
        size=6,
        fix="tp | -",
    ) as caught:
        make_trainer(load("fsdp_tp"), odd, optax.adamw(1e-2))
    assert {problem.path for problem in caught.value.problems} == {
        "layers/0/attention/query/kernel",
        "layers/0/attention/out/kernel",
    }


def test_insert_replaces_one_slot(trained: dict[str, Any], servers: dict[str, Server]) -> None:
    """Padding is not written. A slot that is in use gets the new text, and nothing of the old."""
    server = servers["serve_tp"]
    params = server.pm.shard(
        trained["single"].state["params"], decoder_specs(TINY), role="param", mode="decode"
    )
    caches, last = server.empty()
    for prompt in (b"a long prompt", b"short"):
        with server.pm.for_mode("prefill"):
            first, prefix = server.prefill(params, *padded(prompt, server.prompt_length))
        with server.pm.for_mode("insert"):
            caches, last = server.insert(caches, last, prefix, first, np.int32(2))
        np.testing.assert_array_equal(caches[0].length, [0, 0, len(prompt), 0])
        assert caches[0].k.sharding.spec == P("dp", None, "tp")
        rows = np.asarray(caches[0].k)
        np.testing.assert_array_equal(
            rows[2, : len(prompt)], np.asarray(prefix[0].k)[0, : len(prompt)]
        )
        assert not rows[[0, 1, 3]].any()


def test_differences_are_detected() -> None:
    assert list(report.differing({"a": [b"same", b"text"], "b": [b"same", b"tent"]})) == [None, 2]
    assert report.largest_difference({"a": [4.0, 2.0], "b": [4.0, 2.5], "c": [3.0, 2.0]}) == 0.25
    assert report.largest_difference({"a": [4.0, 2.0]}) == 0.0


@pytest.mark.parametrize("series", [[math.nan, 4.0], [5.0, math.nan], [math.inf, 4.0]])
def test_nan_loss_agrees_with_nothing(series: list[float]) -> None:
    good = [5.0, 4.0]
    for losses in ({"a": good, "b": series, "c": good}, {"a": good, "b": good, "c": series}):
        assert not report.largest_difference(losses) <= 1e6


def test_batches_are_the_text_shifted_by_one(text: np.ndarray) -> None:
    first, again = (next(text_batches(text, batch=4, length=16, seed=3)) for _ in range(2))
    np.testing.assert_array_equal(first["inputs"][:, 1:], first["targets"][:, :-1])
    np.testing.assert_array_equal(first["inputs"], again["inputs"])
    assert bytes(first["inputs"][0].astype(np.uint8)) in text.tobytes()


def test_bfloat16_is_kept_and_near_float32(text: np.ndarray) -> None:
    low = dataclasses.replace(TINY, dtype=jnp.bfloat16)
    trainer = make_trainer(load("fsdp_tp"), low, optax.adamw(1e-2))
    batches = list(itertools.islice(text_batches(text, batch=8, length=32, seed=1), 3))
    done = train(trainer, trainer.init(7), batches, on_step=lambda loss: None)
    assert {str(x.dtype) for x in jax.tree.leaves(done.state["params"])} == {"bfloat16"}
    assert done.losses[-1] < done.losses[0] - 0.1
    params = jax.tree.map(np.asarray, done.state["params"])
    wide = jax.tree.map(lambda x: x.astype(np.float32), params)
    with sw.PartitionManager(load("single")):
        logits, exact = (
            forward(given, batches[0]["inputs"], config)[0]
            for given, config in ((params, low), (wide, TINY))
        )
    assert logits.dtype == jnp.float32
    assert jnp.linalg.norm(logits - exact) < 0.02 * jnp.linalg.norm(exact)
    server = make_server(load("serve_tp"), low, slots=4, capacity=48, prompt_length=24)
    texts = generate(server, params, PROMPTS, new_bytes=4, on_step=lambda output: None)
    assert [len(written) for written in texts] == [4, 4, 4]
