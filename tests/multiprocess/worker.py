"""One of two processes with four virtual CPU devices each.

`python -m tests.multiprocess.worker PORT RANK [long]` prints `ok NAME` for each case that passes.
The first failure ends the process at once with its traceback, because a process that only raises
would leave the other one waiting in a collective.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from safetensors.numpy import save_file

import shardwright as sw
from shardwright import caches, serving
from shardwright.interop import fjformer, hf
from shardwright.testing import virtual_devices
from tests.multiprocess import divergent
from tests.serving.stub import SHAPE, VOCAB, stub, text_of

RULES = """
version = 1
[rules]
batch = "dp"
embed = "tp"
kv_head = "tp | -"
[params]
embed = "dp"
[policy]
gather = "dp"
"""


def numbers(*shape: int) -> np.ndarray:
    return np.linspace(-1.0, 1.0, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def manager(mesh: str = "dp:2,tp:4", **options: Any) -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.loads(RULES), mesh=sw.create_mesh(mesh, **options))


def whole(x: Any) -> np.ndarray:
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def half(x: np.ndarray, axis: int) -> np.ndarray:
    """Return this process's part of a dim."""
    return np.split(x, 2, axis=axis)[jax.process_index()]


def refused(call: Callable[[], Any], text: str) -> None:
    """Check that a call raises an error with this text. pytest is not imported here."""
    output = ""
    try:
        call()
    except sw.ShardingError as error:
        output = str(error)
    assert text in output, output or "nothing was raised"


def global_array_by_rows() -> None:
    pm = manager()
    array = pm.global_array(half(numbers(8, 8), 0), sw.BATCH, sw.EMBED)
    assert array.shape == (8, 8)
    assert array.sharding.spec == jax.P("dp", "tp")
    np.testing.assert_array_equal(whole(array), numbers(8, 8))
    assert {shard.data.shape for shard in array.addressable_shards} == {(4, 2)}


def global_array_by_columns() -> None:
    """tp crosses the processes, so each passes half of the columns and all rows."""
    pm = manager("tp:8,dp:1")
    array = pm.global_array(half(numbers(4, 16), 1), sw.BATCH, sw.EMBED)
    assert (array.shape, array.sharding.spec) == ((4, 16), jax.P(None, "tp"))
    np.testing.assert_array_equal(whole(array), numbers(4, 16))


def global_array_of_equal_parts() -> None:
    """Nothing is sharded across the processes, so both pass the whole array."""
    pm = manager()
    array = pm.global_array(numbers(8, 8), sw.EMPTY, sw.EMBED)
    assert (array.shape, array.sharding.spec) == ((8, 8), jax.P(None, "tp"))
    np.testing.assert_array_equal(whole(array), numbers(8, 8))


def global_array_that_depends_on_its_size() -> None:
    pm = manager()
    for heads, spec in ((8, jax.P("dp", "tp")), (6, jax.P("dp"))):
        array = pm.global_array(
            half(numbers(8, heads), 0), sw.BATCH, sw.KV_HEAD, global_shape=(8, heads)
        )
        assert (array.shape, array.sharding.spec) == ((8, heads), spec)
        np.testing.assert_array_equal(whole(array), numbers(8, heads))
    refused(
        lambda: pm.global_array(half(numbers(8, 6), 0), sw.BATCH, sw.KV_HEAD), "pass global_shape="
    )


def shard_of_equal_numpy_data() -> None:
    pm = manager()
    placed = pm.shard({"x": numbers(8, 8), "n": np.int32(3)}, {"x": (sw.BATCH, sw.EMBED), "n": ()})
    assert placed["x"].sharding.spec == jax.P("dp", "tp")
    np.testing.assert_array_equal(whole(placed["x"]), numbers(8, 8))
    assert pm.shard(placed["x"], sw.BATCH, sw.EMBED) is placed["x"]


def slices_are_processes_where_dcn_says_so() -> None:
    mesh = sw.create_mesh("dp:2,fsdp:2,tp:2", dcn={"dp": 2})
    owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    assert mesh.devices.shape == (2, 2, 2)
    np.testing.assert_array_equal(owners, np.broadcast_to(np.arange(2)[:, None, None], (2, 2, 2)))
    within = sw.create_mesh("fsdp:4,tp:2", dcn={"tp": 2})
    owners = np.vectorize(lambda device: device.process_index)(within.devices)
    np.testing.assert_array_equal(owners, np.broadcast_to(np.arange(2), (4, 2)))
    refused(
        lambda: sw.create_mesh("dp:4,tp:2", dcn={"dp": 4}),
        "dcn puts dp=4 across slices (4), but the number of slices is 2",
    )


def a_strategy_s_own_mesh_over_both() -> None:
    text = RULES + "[mesh]\ndp = -1\ntp = 2\n[dcn]\ndp = 2\n"
    pm = sw.PartitionManager(sw.Strategy.loads(text))
    assert dict(pm.mesh.shape) == {"dp": 4, "tp": 2}
    array = pm.global_array(half(numbers(8, 4), 0), sw.BATCH, sw.EMBED)
    np.testing.assert_array_equal(whole(array), numbers(8, 4))


def a_training_step_equals_the_unsharded_one() -> None:
    pm = manager("dp:4,tp:2")
    x, w = numbers(8, 16), numbers(16, 8)
    kernel = (sw.EMBED, sw.EMPTY)

    def loss(w: Any, x: Any, gather: Any, shard: Any) -> Any:
        return (shard(jnp.tanh(x @ gather(w, *kernel)), sw.BATCH, sw.EMPTY) ** 2).mean()

    specs = sw.ArraySpec((16, 8), jnp.float32, kernel, lambda key, shape, dtype: jnp.asarray(w))
    with pm:
        placed = pm.init(specs, jax.random.key(0))
        assert placed.sharding.spec == jax.P("dp")
        batch = pm.global_array(half(x, 0), sw.BATCH, sw.EMPTY)
        actual, grad = jax.jit(jax.value_and_grad(lambda w, x: loss(w, x, sw.gather, sw.shard)))(
            placed, batch
        )
    wanted, wanted_grad = jax.value_and_grad(
        lambda w: loss(w, x, lambda w, *_: w, lambda x, *_: x)
    )(w)
    assert grad.sharding.is_equivalent_to(placed.sharding, 2)
    np.testing.assert_allclose(whole(grad), wanted_grad, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(float(actual), float(wanted), rtol=1e-6)


def a_step_refuses_the_rows_of_one_process() -> None:
    pm = manager("dp:8,tp:1")
    specs = sw.ArraySpec((8, 4), jnp.float32, (sw.EMBED, sw.EMPTY), jax.nn.initializers.ones)
    state = {"w": pm.init(specs, jax.random.key(0))}

    def run(state: Any, x: Any) -> Any:
        return state, (x @ state["w"]).sum()

    step = pm.jit_step(run, state, (sw.BATCH, sw.EMPTY))
    rows = numbers(8, 8)
    refused(lambda: step(state, rows), "input 0: the array is in the memory of this process")
    refused(lambda: step(state, rows), "pm.global_array(rows, *axes)")
    state, total = step(state, pm.global_array(rows, sw.BATCH, sw.EMPTY))
    assert np.isfinite(float(total))


def shard_map_sums_over_both() -> None:
    pm = manager("dp:8,tp:1")
    total = pm.shard_map(
        lambda x: jax.lax.psum(x.sum(), pm.mesh_axes(sw.BATCH)), in_axes=[(sw.BATCH,)], out_axes=()
    )
    actual = jax.jit(total)(pm.global_array(half(np.arange(16, dtype=np.float32), 0), sw.BATCH))
    assert float(actual) == 120.0


def both_resolve_alike() -> None:
    """Both processes get the same specs in the same order, and compile the same programs."""
    lines = []
    for name in sw.Strategy.presets():
        pm = sw.PartitionManager(
            sw.Strategy.preset(name), mesh=sw.abstract_mesh("dp:2,fsdp:2,sp:2,ep:2,tp:2")
        )
        for role in sw.Role:
            lines.append(str(pm.explain(sw.BATCH, sw.VOCAB, role=role, shape=(32, 32)).to_json()))
            lines.append(
                str(
                    pm.explain(
                        sw.EXPERT, sw.EMBED, sw.MLP_INTERMEDIATE, role=role, shape=(32, 64, 64)
                    ).to_json()
                )
            )
    digest = np.frombuffer(hashlib.sha256("\n".join(lines).encode()).digest(), np.uint8)
    multihost_utils.assert_equal(digest, "the processes resolve differently")


def to_the_mesh_and_back_to_both() -> None:
    """Every process gathers all values, also of arrays of which it holds a part."""
    params = {"w": numbers(8, 16), "n": np.arange(8, dtype=np.int32), "s": np.float32(2)}
    specs = fjformer.match_partition_rules([("w", jax.P("dp", "tp")), ("n", jax.P("tp"))], params)
    with jax.set_mesh(sw.create_mesh("dp:2,tp:4")):
        shard_fns, gather_fns = fjformer.make_shard_and_gather_fns(specs, jnp.bfloat16)
    placed = fjformer.tree_apply(shard_fns, params)
    assert {shard.data.shape for shard in placed["w"].addressable_shards} == {(4, 4)}
    assert not placed["w"].is_fully_addressable
    back = fjformer.tree_apply(gather_fns, placed)
    assert jax.tree.map(lambda leaf: (type(leaf), str(leaf.dtype)), back) == {
        "w": (np.ndarray, "bfloat16"),
        "n": (np.ndarray, "int32"),
        "s": (np.ndarray, "bfloat16"),
    }
    np.testing.assert_array_equal(back["w"], params["w"].astype(jnp.bfloat16))
    np.testing.assert_array_equal(back["n"], params["n"])
    assert fjformer.get_metrics({"s": placed["s"]}) == {"s": 2.0}


def planned_moves_cross_processes() -> None:
    """Collectives and permutes move between meshes of the same devices, piece by piece."""
    axes = (sw.EMBED, sw.KV_HEAD)
    x = manager().reshard(numbers(16, 32), axes, piece=256)
    target = manager("tp:4,dp:2")
    assert target.plan_reshard(x, axes, piece=256).bytes_sent > 0
    moved = target.reshard(x, axes, piece=256)
    np.testing.assert_array_equal(whole(moved), numbers(16, 32))
    few = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
    some = sw.PartitionManager(sw.Strategy.loads(RULES), mesh=few)
    refused(lambda: some.reshard(x, axes), "between the devices of different processes")


def ranks_of_processes_that_share_a_model_or_not() -> None:
    index = jax.process_index()
    shared = sw.get_ranks_and_size(sw.create_mesh("dp:1,tp:8"))
    assert [shared[name] for name in RANKS] == [2, 1, 0, index]
    alone = sw.get_ranks_and_size(sw.create_mesh("dp:2,tp:2,sp:2"))
    assert [alone[name] for name in RANKS] == [1, 2, index, 0]


def each_process_reads_its_shards_of_a_checkpoint() -> None:
    """The rows of a weight are sharded over the processes, so each reads half of them."""
    values = {
        "embeddings.word_embeddings.weight": numbers(64, 16),
        "embeddings.position_embeddings.weight": numbers(8, 16),
        "embeddings.token_type_embeddings.weight": numbers(2, 16),
        "embeddings.LayerNorm.weight": numbers(16),
        "embeddings.LayerNorm.bias": numbers(16),
    }
    layer = "encoder.layer.0"
    names = {f"{layer}.attention.self.{name}": (16, 16) for name in ("query", "key", "value")}
    names |= {
        f"{layer}.attention.output.dense": (16, 16),
        f"{layer}.intermediate.dense": (32, 16),
        f"{layer}.output.dense": (16, 32),
    }
    values |= {f"{name}.weight": numbers(*shape) for name, shape in names.items()}
    for name in (f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"):
        values |= {f"{name}.weight": numbers(16), f"{name}.bias": numbers(16)}
    config = {"model_type": "bert", "hidden_size": 16, "intermediate_size": 32, "vocab_size": 64}
    config |= {"num_attention_heads": 4, "num_hidden_layers": 1}
    config |= {"max_position_embeddings": 8, "type_vocab_size": 2}
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:2,tp:4"))
    read: list[tuple[tuple[int, int], ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        save_file(values, f"{folder}/model.safetensors")
        checkpoint = hf.read(folder)
        source = checkpoint.sources[f"{layer}.output.dense.weight"]
        counting = type("Counting", (), {"shape": source.shape, "read": None})()
        counting.read = lambda bounds: read.append(bounds) or source.read(bounds)
        sources = {**checkpoint.sources, f"{layer}.output.dense.weight": counting}
        params = dataclasses.replace(checkpoint, sources=sources).load(pm)
    rows = (0, 8) if jax.process_index() == 0 else (8, 16)
    assert sorted(read) == [(rows, (first, first + 8)) for first in range(0, 32, 8)]
    for name, value in values.items():
        np.testing.assert_array_equal(whole(params[name]), value)


def refusals_of_slots_in_other_processes() -> None:
    """The slots are sharded over the processes, and each process reads all refusals."""
    with manager().for_mode("decode"):
        cache = caches.init("dense", batch=4, capacity=4, kv_heads=1, head_dim=2, dtype="float32")
        assert not cache.length.is_fully_addressable
        k = numbers(4, 3, 1, 2)
        append = jax.jit(lambda cache, k, valid: cache.append(k, k, valid=valid))
        first = append(cache, k, np.arange(3) < np.array([[3], [1], [1], [3]]))
        second = append(first.require(), k, np.ones((4, 3), bool))
    assert first.reasons() == {}
    assert {at: why.name for at, why in second.reasons().items()} == {0: "OVERFLOW", 3: "OVERFLOW"}
    refused(second.require, "entry 0 was refused")


RANKS = ("mp_node_size", "dp_node_size", "dp_node_rank", "mp_node_rank")


def an_engine_serves_over_both() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("serve_tp"), mesh=sw.create_mesh("dp:2,tp:4"))
    kinds: list[dict[str, Any]] = [
        {"cache": "dense", "prefill_rows": 2},
        {"cache": "paged", "cache_options": {"page_size": 4, "pages": 12}},
    ]
    served: dict[str, list[serving.Completion]] = {}
    for kind, ahead in itertools.product(kinds, (True, False)):
        engine = serving.Engine(
            stub,
            np.int32(1),
            shape=SHAPE,
            slots=4,
            capacity=24,
            prefill_chunk=4,
            manager=pm,
            ahead=ahead,
            **kind,
        )
        asked = [
            serving.Request(prompt=[at % VOCAB] * (1 + at), max_new_tokens=3 + at % 4)
            for at in range(8)
        ]
        canceled = engine.submit(asked[-1])
        engine.step()
        canceled.cancel()
        results = engine.run(asked)
        for request, done in zip(asked, results, strict=True):
            text = text_of(request.prompt, request.max_new_tokens, shift=1)
            assert list(done.tokens) == text, (done.error, done.tokens, text)
        assert served.setdefault(kind["cache"], results) == results
        held = engine.cache_usage()
        assert (set(held.slot_lengths), held.pages, engine.idle) == ({0}, 0, True)


CASES = [
    global_array_by_rows,
    global_array_by_columns,
    global_array_of_equal_parts,
    global_array_that_depends_on_its_size,
    shard_of_equal_numpy_data,
    slices_are_processes_where_dcn_says_so,
    a_strategy_s_own_mesh_over_both,
    a_training_step_equals_the_unsharded_one,
    a_step_refuses_the_rows_of_one_process,
    shard_map_sums_over_both,
    both_resolve_alike,
    to_the_mesh_and_back_to_both,
    planned_moves_cross_processes,
    ranks_of_processes_that_share_a_model_or_not,
    each_process_reads_its_shards_of_a_checkpoint,
    refusals_of_slots_in_other_processes,
]

LONG_CASES = [an_engine_serves_over_both]


def run(port: int, rank: int, cases: Sequence[Callable[[], None]]) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        2,
        rank,
        initialization_timeout=300,
        heartbeat_timeout_seconds=60,
        shutdown_timeout_seconds=300,
    )
    assert (jax.process_count(), jax.device_count(), len(virtual_devices(4))) == (2, 8, 4)
    for case in cases:
        case()
        print(f"ok {case.__name__}", flush=True)
    if cases is CASES:
        divergent.run("quick")
    jax.distributed.shutdown()


if __name__ == "__main__":
    code = 1
    try:
        run(int(sys.argv[1]), int(sys.argv[2]), LONG_CASES if "long" in sys.argv else CASES)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not a return: an interpreter that exits normally sometimes waits for its peer forever.
        os._exit(code)
