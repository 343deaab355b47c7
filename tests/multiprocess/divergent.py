"""One of two processes that differ on purpose, in one thing after the other.

`python -m tests.multiprocess.divergent PORT RANK PART` prints `told NAME SECONDS` for each case of
a part that ends in the right message. Errors of agreement leave JAX intact, so one pair of
processes runs many cases.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import shardwright as sw
from shardwright import _jax, serving
from shardwright.errors import AgreementError
from tests.serving.stub import SHAPE, stub

RULES = """
version = 1
[rules]
batch = "dp"
embed = "tp"
[policy]
gather = "dp"
"""
SPECS = {"w": (sw.BATCH, sw.EMBED), "b": (sw.EMBED,)}


def manager(text: str = RULES, mesh: str = "dp:2,tp:4", **options: Any) -> sw.PartitionManager:
    pm_mesh = options.pop("on", None) or sw.create_mesh(mesh)
    return sw.PartitionManager(sw.Strategy.loads(text), mesh=pm_mesh, **options)


def mine(first: Any, second: Any) -> Any:
    """Return what this process passes: the first or the second."""
    return (first, second)[jax.process_index()]


def say(word: str) -> None:
    """Set a key of JAX's store for `hear` in the other process."""
    _store().set(f"tests/{word}", b"")


def hear(word: str) -> None:
    assert _store().wait(f"tests/{word}", 300) is not None, f"the other process never said {word}"


def _store() -> _jax.CoordinationStore:
    store = _jax.coordination_store()
    assert store is not None
    return store


def told(call: Callable[[], Any], *says: str) -> None:
    """Check that a call raises an `AgreementError` with these texts.

    It does so within 10 seconds, and prints how many. Here only a much longer wait is an error,
    because a machine may be short of processors.
    """
    begun = time.monotonic()
    try:
        call()
    except AgreementError as error:
        seconds, text = time.monotonic() - begun, str(error)
        print(f"[{seconds:.2f} s] {text}", flush=True)
        missing = [part for part in says if part not in text]
        assert not missing, f"not told: {missing}"
        assert seconds < 60, seconds
        assert len(text) < 6000
        return
    raise AssertionError("no error was raised")


def entered(pm: sw.PartitionManager) -> Callable[[], Any]:
    def enter() -> None:
        with pm:
            pass

    return enter


def another_rule() -> None:
    pm = manager(mine(RULES, RULES.replace('embed = "tp"', 'embed = "tp | -"')))
    told(
        entered(pm),
        "[rules] EMBED in mode train and 7 more",
        'process 0 has EMBED = "tp", process 1 has EMBED = "tp | -"',
        "process 0: embed = ",
        "fix   start every process with the same strategy",
    )


def another_policy() -> None:
    pm = manager(mine(RULES, RULES + 'indivisible = "replicate"\n'))
    told(entered(pm), "policy indivisible: process 0 has error, process 1 has replicate")


def another_order_of_devices() -> None:
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = jax.sharding.Mesh(mine(devices, devices[:, ::-1]), ("dp", "tp"))
    pm = manager(on=mesh)
    told(entered(pm), "device at dp=0,tp=0 and 7 more: process 0 has device 0, process 1 has")


def another_mesh() -> None:
    pm = manager(mesh=mine("dp:2,tp:4", "dp:4,tp:2"))
    told(entered(pm), "mesh axes: process 0 has dp:2,tp:4, process 1 has dp:4,tp:2")


def another_mode() -> None:
    told(
        entered(manager().for_mode(mine("train", "decode"))),
        "mode: process 0 has train, process 1 has decode",
    )


def another_watchdog() -> None:
    """A process without a watchdog would lead those that have one."""
    told(
        entered(manager(watchdog=mine(None, 8))),
        "watchdog: process 0 has none, process 1 has 8.0 s",
    )


def another_exception_by_path() -> None:
    extra = '\n[[tensors]]\nmatch = "{}$"\nbatch = "-"\n'
    pm = manager(RULES + extra.format(mine("w", "b")))
    told(entered(pm), "[[tensors]] 0", "match = 'w$'", "match = 'b$'")


def one_enters_later() -> None:
    """A manager that the others have left is not agreed on."""
    pm = manager(RULES.replace("dp", "sp"), mesh="sp:2,tp:4")
    if jax.process_index() == 1:
        hear("process 0 left the manager")
        told(entered(pm), "process 0 waited for the others and left PartitionManager")
        say("process 1 was told")
    else:
        told(
            entered(pm), "process 1 has not entered PartitionManager", "process 0 has waited in it"
        )
        say("process 0 left the manager")
        hear("process 1 was told")
    entered(pm)()  # a second attempt in both


def one_does_not_agree() -> None:
    """`agree` and `global_array` name who is missing; only the first gives up soon."""
    tree = {"w": np.zeros((8, 8)), "b": np.zeros(8)}
    rows = np.zeros((4, 8), np.float32)
    if jax.process_index() == 1:
        hear("process 0 asked for the warning")
    else:
        told(
            lambda: manager().agree(tree, SPECS),
            "process 1 did not reach pm.agree within 8 s; process 0 waits there",
        )
        logging.getLogger("shardwright.processes").addHandler(handler := Warnings())
        say("process 0 asked for the warning")
    if jax.process_index() == 1:
        hear("process 0 was warned")
    manager().global_array(rows, sw.BATCH, sw.EMBED)
    if jax.process_index() == 0:
        assert handler.texts == ["process 0 has waited 8 s for process 1 to reach pm.global_array"]


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        say("process 0 was warned")


def another_shape() -> None:
    tree = {"w": np.zeros((8, mine(8, 16))), "b": np.zeros(8)}
    told(
        lambda: manager().agree(tree, SPECS),
        "w: process 0 has float64[8,8] as P('dp', 'tp'), process 1 has float64[8,16]",
    )


def another_dtype() -> None:
    tree = {"w": jnp.zeros((8, 8), mine(jnp.float32, jnp.bfloat16)), "b": np.zeros(8)}
    told(lambda: manager().agree(tree, SPECS), "w: process 0 has float32[8,8]", "bfloat16[8,8]")


def another_spec() -> None:
    tree = {"w": np.zeros((8, 8)), "b": np.zeros(8)}
    specs = {**SPECS, "b": mine((sw.EMBED,), (sw.EMPTY,))}
    told(
        lambda: manager().agree(tree, specs, role="activation"),
        "b: process 0 has float64[8] as P('tp'), process 1 has float64[8] as P()",
        'process 0: embed = "tp"',
    )


def another_leaf() -> None:
    tree = {"w": np.zeros((8, 8)), mine("b", "c"): np.zeros(8)}
    specs = {**SPECS, "c": (sw.EMBED,)}
    specs = {name: specs[name] for name in tree}
    told(
        lambda: manager().agree(tree, specs),
        "b: process 0 has float64[8] as P('tp'), process 1 has nothing",
        "c: process 0 has nothing",
    )


def a_size_that_divides_in_one() -> None:
    tree = {"w": np.zeros((mine(8, 9), 8)), "b": np.zeros(8)}
    told(lambda: manager().agree(tree, SPECS), "w: process 0 has float64[8,8]", "float64[9,8]")


def unequal_parts() -> None:
    rows = np.zeros((mine(4, 3), 8), np.float32)
    told(
        lambda: manager().global_array(rows, sw.BATCH, sw.EMBED),
        "the local array: process 0 has float32[4,8], process 1 has float32[3,8]",
    )


def parts_of_two_dtypes() -> None:
    rows = np.zeros((4, 8), mine(np.float32, ml_dtypes.bfloat16))
    told(
        lambda: manager().global_array(rows, sw.BATCH, sw.EMBED, global_shape=(8, 8)),
        "process 0 has float32[4,8], process 1 has bfloat16[4,8]",
    )


def copies_of_a_shard() -> None:
    """The spec replicates over the processes, or in part, so their data must be equal."""
    pm = manager(RULES.replace("dp", "sp"), mesh="tp:8,sp:1")
    rows = np.full((4, 8), mine(0, 1), np.float32)
    told(
        lambda: pm.global_array(rows, sw.BATCH, sw.EMPTY),
        "the local array: process 0 has float32[4,8] with values ",
        "fix   pass equal data in processes 0 and 1, whose devices hold the same shards of P()",
    )
    told(lambda: pm.global_array(np.float32(mine(0, 1))), "the local array: process 0 has float32")
    crossing = jax.sharding.Mesh(np.array(jax.devices())[[0, 4, 1, 5, 2, 6, 3, 7]], ("tp",))
    pm = manager('version = 1\n[rules]\nembed = "tp"\n[policy]\n', on=crossing)
    same = pm.global_array(np.arange(4.0), sw.EMBED, global_shape=(8,))
    assert same.shape == (8,)
    devices = np.array(jax.devices())[[0, 4, 1, 5, 2, 6, 3, 7]].reshape(4, 2)
    half = jax.sharding.Mesh(devices, ("tp", "dp"))
    pm = manager(on=half)
    told(
        lambda: pm.global_array(np.arange(8.0) + mine(0, 1) * (np.arange(8) == 5), sw.EMBED),
        "the local array at 4:6: process 0 has float64[2] with values",
    )
    again = pm.global_array(np.arange(8.0), sw.EMBED)
    assert again.shape == (8,)
    rows = np.arange(32.0).reshape(8, 4)
    told(
        lambda: manager().global_array(rows + mine(0, 1), sw.BATCH, sw.EMBED, global_shape=(8, 4)),
        "since global_shape has the size of the local array; or leave global_shape out",
    )
    whole = manager().global_array(rows, sw.BATCH, sw.EMBED, global_shape=(8, 4))
    for shard in whole.addressable_shards:
        np.testing.assert_array_equal(shard.data, rows[shard.index])


def host_leaves_of_a_move() -> None:
    pm = manager()
    tree = {"w": np.full((8, 8), mine(0.0, 1.0)), "step": mine(3, 4), "b": np.zeros(8)}
    specs = {**SPECS, "step": ()}
    told(
        lambda: pm.reshard(tree, specs),
        "w: process 0 has float64[8,8] with values",
        "step: process 0 has int[] with values",
        "fix   pass the same values in every process",
    )
    engine = engine_of_both()
    told(
        lambda: engine.update_params(np.int32(mine(2, 3))),
        "the array: process 0 has int32[] with values",
    )
    assert engine.update_params(np.int32(2)).version == 1
    moved = pm.reshard({**tree, "w": np.ones((8, 8)), "step": 3}, specs)
    assert int(moved["step"]) == 3


def calls_that_wait_for_each_other() -> None:
    rows = np.zeros((4, 8), np.float32)
    axes = (sw.BATCH, sw.EMBED)
    told(
        lambda: manager().global_array(rows, *mine(axes, axes[::-1])),
        "process 0 is in pm.global_array of (BATCH, EMBED), process 1 is in pm.global_array of "
        "(EMBED, BATCH); each waits for the other",
    )
    tree = {"w": np.zeros((8, 8)), mine("b", "c"): np.zeros(8)}
    specs = {name: {**SPECS, "c": (sw.EMBED,)}[name] for name in tree}
    told(
        lambda: manager().shard(tree, specs),
        mine("process 0 is in shard of b, w", "process 1 is in shard of c, w"),
    )


def callback_that_fails_in_one() -> None:
    """The processes are told before their programs differ, and go on with equal ones."""

    def broken(_: int) -> None:
        raise BrokenPipeError

    engine = engine_of_both()
    handle = engine.submit(
        serving.Request(prompt=[1, 2], max_new_tokens=6, on_token=mine(None, broken))
    )
    told(
        handle.result,
        "call 1: process 0 has nothing, process 1 has a failure of request 0: on_token raised "
        "BrokenPipeError",
    )
    engine = engine_of_both()
    request = serving.Request(prompt=[1, 2], max_new_tokens=6, on_token=broken)
    first, second = engine.submit(request), engine.submit(serving.Request(**ONE))
    assert first.result().finish is serving.Finish.FAILED
    assert second.result().finish is serving.Finish.LENGTH


def cancel_in_one() -> None:
    engine = engine_of_both()
    handles = [engine.submit(serving.Request(**ONE)) for _ in range(2)]
    engine.step()
    if jax.process_index() == 1:
        assert handles[0].cancel()
    told(engine.step, "call 1: process 0 has nothing, process 1 has cancel(request 0)")
    assert handles[1].cancel()
    assert handles[1].result().finish is serving.Finish.CANCELED
    assert handles[0].result().finish is serving.Finish.LENGTH


ONE: dict[str, Any] = {"prompt": [1, 2], "max_new_tokens": 4}


def engine_of_both() -> serving.Engine:
    engine = serving.Engine(
        stub, np.int32(1), shape=SHAPE, slots=4, capacity=16, prefill_rows=2, manager=served()
    )
    engine.compile()
    return engine


def other_data() -> None:
    """Only the leaf that differs is named, and its values are not printed."""
    tree = {"w": np.arange(4096.0).reshape(64, 64), "b": np.zeros(64, ml_dtypes.bfloat16)}
    tree["w"][3, 5] += mine(0, 1e-9)
    told(
        lambda: manager().shard(tree, SPECS),
        "w: process 0 has float64[64,64] with values ",
        "fix   pass the same values in every process",
    )
    told(lambda: manager().shard(mine(1.0, 2.0)), "the array: process 0 has float[]")
    told(
        lambda: manager().shard(jnp.full(8, mine(1, 2)), sw.EMBED),
        "the array: process 0 has int32[8] with values",
    )


def another_request() -> None:
    """The calls of an engine are compared at each step, and later steps go on."""
    engine = engine_of_both()
    engine.submit(serving.Request(prompt=[1, 2], max_new_tokens=2))
    engine.step()
    engine.submit(serving.Request(prompt=mine([1], [1, 2]), max_new_tokens=2))
    told(
        engine.step,
        "call 1: process 0 has submit(request 1: prompt of 1, max_new_tokens=2, digest ",
        "process 1 has submit(request 1: prompt of 2, max_new_tokens=2, digest ",
        "fix   create the same engines in every process, and make the same calls",
    )


def another_number_of_slots() -> None:
    told(
        serving.Engine(
            stub,
            np.int32(1),
            shape=SHAPE,
            slots=mine(4, 8),
            capacity=16,
            prefill_rows=2,
            manager=served(),
        ).step,
        "call 1: process 0 has Limits(slots=4",
    )


def served() -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset("serve_tp"), mesh=sw.create_mesh("dp:2,tp:4"))


def equal_data_is_placed_as_before() -> None:
    """Casts, low precision and memory are those of `device_put`."""
    pm = manager()
    tree = {"w": np.arange(64.0).reshape(8, 8), "b": np.arange(8).astype(ml_dtypes.bfloat16)}
    placed = pm.shard(tree, SPECS)
    for name, leaf in placed.items():
        expected = jax.device_put(tree[name], leaf.sharding)
        assert (leaf.dtype, leaf.sharding) == (expected.dtype, expected.sharding)
        for one, other in zip(leaf.addressable_shards, expected.addressable_shards, strict=True):
            assert (one.index, one.device) == (other.index, other.device)
            np.testing.assert_array_equal(one.data, other.data)
    assert pm.shard(placed, SPECS)["w"] is placed["w"]


def what_agrees_goes_on() -> None:
    """Re-entry, equal managers, other threads, other modes and local meshes do not wait."""
    pm = manager()
    tree = {"w": np.zeros((8, 8)), "b": np.zeros(8)}
    for manager_now in (pm, manager(), pm.for_mode("decode"), pm):
        with manager_now, manager_now:
            pass
    for _ in range(10):
        pm.agree(tree, SPECS)
    if jax.process_index() == 1:  # none of these waits for process 0, or it would raise
        for _ in range(1000):
            with pm:
                pass
        thread = threading.Thread(target=entered(pm))
        thread.start()
        thread.join()
        local = jax.sharding.Mesh(np.array(jax.local_devices()).reshape(2, 2), ("dp", "tp"))
        with manager(on=local) as alone:
            alone.agree(tree, SPECS)
            alone.shard(np.ones((8, 8)), sw.BATCH, sw.EMBED)
        other = manager(RULES.replace("tp", "sp"), "dp:2,sp:4")
        jax.eval_shape(entered(other))
        with manager(RULES + 'missing = "replicate"\n', agree=False) as free:
            free.agree(tree, SPECS)


def threads_enter_in_any_order() -> None:
    first = manager(RULES.replace("dp", "ep"), mesh="ep:2,tp:4")
    second = manager(RULES.replace("tp", "ep"), mesh="dp:2,ep:4")
    errors: list[Exception] = []

    def enter(pm: sw.PartitionManager, after: float) -> None:
        time.sleep(after)
        try:
            with pm:
                pass
        except AgreementError as error:
            errors.append(error)

    threads = [
        threading.Thread(target=enter, args=arguments)
        for arguments in ((first, mine(0, 0.3)), (second, mine(0.3, 0)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def time_of_a_call() -> None:
    pm = manager()
    rows = np.zeros((4, 8), np.float32)
    pm.global_array(rows, sw.BATCH, sw.EMBED)
    begun = time.perf_counter()
    for _ in range(50):
        pm.global_array(rows, sw.BATCH, sw.EMBED)
    ours = time.perf_counter() - begun
    begun = time.perf_counter()
    pm = manager(agree=False)
    for _ in range(50):
        pm.global_array(rows, sw.BATCH, sw.EMBED)
    bare = time.perf_counter() - begun
    print(f"global_array: {ours / 50 * 1e3:.2f} ms per call, {bare / 50 * 1e3:.2f} ms alone")


PARTS = {
    "quick": [
        what_agrees_goes_on,
        another_rule,
        another_watchdog,
        another_shape,
        another_dtype,
        unequal_parts,
        other_data,
        equal_data_is_placed_as_before,
        time_of_a_call,
    ],
    "all": [
        another_policy,
        another_order_of_devices,
        another_mesh,
        another_mode,
        another_exception_by_path,
        another_spec,
        another_leaf,
        a_size_that_divides_in_one,
        parts_of_two_dtypes,
        threads_enter_in_any_order,
        another_request,
        another_number_of_slots,
        copies_of_a_shard,
        host_leaves_of_a_move,
        calls_that_wait_for_each_other,
        callback_that_fails_in_one,
        cancel_in_one,
        one_enters_later,
        one_does_not_agree,
    ],
}


def connect(port: int, rank: int, count: int = 2, **timeouts: int) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        count,
        rank,
        initialization_timeout=300,
        **(timeouts or {"heartbeat_timeout_seconds": 60, "shutdown_timeout_seconds": 300}),
    )
    jax.devices()


def run(part: str) -> None:
    for case in PARTS[part]:
        begun = time.monotonic()
        case()
        print(f"told {case.__name__} {time.monotonic() - begun:.2f}", flush=True)
        # A process that is slow in one case must not count as late in the next one.
        say(f"{case.__name__} has ended in {jax.process_index()}")
        hear(f"{case.__name__} has ended in {1 - jax.process_index()}")


if __name__ == "__main__":
    code = 1
    try:
        connect(int(sys.argv[1]), int(sys.argv[2]))
        run(sys.argv[3])
        jax.distributed.shutdown()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
