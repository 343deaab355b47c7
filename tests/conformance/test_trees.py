"""Mistakes of other sharding libraries: weights, optimizer state, meshes and round trips."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import types
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.mesh.build import arrange_devices, parse_mesh
from shardwright.plan.memory import bytes_by_path
from shardwright.testing import cpu_mesh
from shardwright.trees.factored_weights import quantized
from tests.raising import raises

PM = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("dp:1,fsdp:2,tp:4"))


def shaped(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_weight_stack_and_bias() -> None:
    weights = {
        "in": shaped(8, 16),
        "stack": shaped(3, 8, 16),
        "bias": shaped(16),
        "biases": shaped(3, 16),
    }
    column = {
        "in": sw.ColumnWise,
        "stack": sw.ColumnWise,
        "bias": sw.ColumnWise.bias,
        "biases": sw.stacked(sw.ColumnWise.bias),
    }
    row = {
        "in": sw.RowWise,
        "stack": sw.RowWise,
        "bias": sw.RowWise.bias,
        "biases": sw.stacked(sw.RowWise.bias),
    }
    shardings = jax.tree.map(
        lambda value: value.spec, [PM.shardings(weights, column), PM.shardings(weights, row)]
    )
    assert shardings == [
        {
            "in": P("fsdp", "tp"),
            "stack": P(None, "fsdp", "tp"),
            "bias": P("tp"),
            "biases": P(None, "tp"),
        },
        {"in": P("tp", "fsdp"), "stack": P(None, "tp", "fsdp"), "bias": P(), "biases": P()},
    ]
    with raises(
        sw.RankMismatchError, "ColumnWise", 2, 1, "(16,)", path="bias", fix="ColumnWise.bias"
    ):
        PM.shardings({"bias": shaped(16)}, sw.ColumnWise)


def test_quantized_weight_and_scale() -> None:
    weight = sw.ArraySpec((64, 32), np.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))
    parts = PM.shardings(quantized(weight, (16, 1)))
    assert (parts.value.spec, parts.scale.spec) == (P("fsdp", "tp"), P("fsdp", "tp"))
    assert PM.shardings(quantized(weight, (-1, 1))).scale.spec == P(None, "tp"), (
        "a scale that every shard needs"
    )
    with raises(sw.IndivisibleError, 2, 16, "tp", path="scale", dim=1, fix="EMPTY"):
        PM.shardings(quantized(weight, (16, 16)))  # two blocks over four shards


def test_optimizer_state_follows_parameters() -> None:
    optax = pytest.importorskip("optax")
    params = {"up": shaped(256, 512), "down": shaped(512, 256), "norm": shaped(256)}
    axes = {
        "up": (sw.EMBED, sw.MLP_INTERMEDIATE),
        "down": (sw.MLP_INTERMEDIATE, sw.EMBED),
        "norm": (sw.NORM,),
    }
    specs = {name: item.spec for name, item in PM.shardings(params, axes).items()}
    assert specs == {"up": P("fsdp", "tp"), "down": P("tp", "fsdp"), "norm": P()}
    for tx in (optax.adam(1e-3), optax.adafactor(1e-3)):
        state = jax.eval_shape(tx.init, params)
        shardings = PM.state_shardings(state, params, axes)
        assert jax.tree.structure(shardings) == jax.tree.structure(state)
        specs_by_field = jax.tree.map(lambda sharding: sharding.spec, shardings[0])._asdict()
        assert specs_by_field.pop("count") == P()
        if "mu" in specs_by_field:
            assert specs_by_field == {"mu": specs, "nu": specs}
        else:  # sums over one dim keep the other; an unfactored moment has one element
            assert (
                specs_by_field["v_row"]["up"],
                specs_by_field["v_col"]["up"],
                specs_by_field["v"]["up"],
            ) == (
                P("fsdp"),
                P("tp"),
                P(),
            )
            assert (
                bytes_by_path(state, shardings).select("/up$").most_replicated().leaves[0].path
                == "0/v_row/up"
            )


def test_replicated_bytes_on_both_sides() -> None:
    """A float32 norm beside an int8 weight.

    1 KiB on each of eight devices, seven of them copies, beside 128 KiB in shards.
    """
    tree = {"norm": shaped(256), "w": shaped(256, 512, dtype=np.int8)}
    shardings = bytes_by_path(
        tree, PM.shardings(tree, {"norm": (sw.NORM,), "w": (sw.EMBED, sw.MLP_INTERMEDIATE)})
    )
    assert (shardings.held, shardings.replicated) == (8 * 1024 + 128 * 1024, 7 * 1024)
    assert shardings.replicated_share == pytest.approx(7 / 136)


class Device(types.SimpleNamespace):
    """A device of one of two slices."""

    def __hash__(self) -> int:
        return int(self.id)


def test_mesh_equals_the_request() -> None:
    devices = [Device(id=i, platform="cpu", slice_index=i // 8, process_index=0) for i in range(16)]
    grid = arrange_devices(parse_mesh((4, 4), ("dp", "tp"), dcn={"tp": 2}), devices)
    assert grid.shape == (4, 4)
    with raises(sw.MeshSpecError, "dp", "fsdp", 2, "pp", fix="dp"):
        arrange_devices(parse_mesh("dp:1,fsdp:1,tp:16"), devices)
    with raises(sw.MeshSpecError, "fsdp", -1, 8, "tp=3", fix="abstract_mesh"):
        cpu_mesh("fsdp:-1,tp:3")
    assert dict(sw.create_mesh("dp:3,tp:2", devices=jax.devices()[:6]).shape) == {"dp": 3, "tp": 2}


def test_strategy_text_round_trip() -> None:
    for name in sw.Strategy.presets():
        strategy = sw.Strategy.preset(name)
        assert sw.Strategy.loads(strategy.dumps()) == strategy
        assert sw.Strategy.loads(strategy.dumps(format="json"), format="json") == strategy
        rules = strategy.compile()
        assert pickle.loads(pickle.dumps(rules)) == copy.deepcopy(rules) == rules
    assert pickle.loads(pickle.dumps(sw.NOT_GIVEN)) is copy.deepcopy(sw.NOT_GIVEN) is sw.NOT_GIVEN


PROGRAM = """
import json, shardwright as sw
from shardwright.interop.eformer import PartitionAxis
rules = sw.Strategy.preset("moe_ep").compile()
mesh = {"dp": 2, "fsdp": 2, "sp": 2, "ep": 2, "tp": 2}
tensors = [
    (sw.VOCAB, sw.EMBED, sw.LAYERS),
    (sw.EXPERT, sw.EMBED, sw.MLP_INTERMEDIATE),
    sw.ExpertColumnWiseAlt,
]
specs = [
    [str(sw.resolve(axes, rules, mesh, shape=(64, 64, 64), role=role).spec) for axes in tensors]
    for role in ("param", "use")
]
print(json.dumps([specs, rules.named_mesh_axes(), hash(PartitionAxis(batch_axis=("dp", "sp")))]))
"""


@pytest.mark.full
def test_answers_ignore_the_hash_seed() -> None:
    texts = set()
    for seed in ("1", "2"):
        env = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(filter(None, ["src", os.environ.get("PYTHONPATH")])),
        }
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=env,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        texts.add(json.dumps(json.loads(done.stdout)))
    assert len(texts) == 1
