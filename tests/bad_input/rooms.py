"""Malformed calls of the rooms above the manager, some for each class of error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import shardwright as sw
from shardwright import attention, caches, checkpoint, serving
from shardwright.layers import attention_block, mlp_block, moe, transformer_block
from shardwright.plan.collectives.hlo import parse_hlo
from shardwright.processes import compare as comparing
from shardwright.processes import meeting
from shardwright.processes.compare import Fact, ProcessGroup
from shardwright.reshard import leaf
from tests.bad_input.scene import Call, Scene
from tests.processes.simulated_store import SimulatedStore
from tests.serving.stub import SHAPE, stub

Q = jax.ShapeDtypeStruct((2, 6, 4, 8), jnp.float32)
K = jax.ShapeDtypeStruct((2, 6, 2, 8), jnp.float32)
CACHE: dict[str, Any] = {
    "batch": 2,
    "capacity": 4,
    "kv_heads": 2,
    "head_dim": 2,
    "dtype": "float32",
}
ROWS = np.zeros((2, 1, 2, 2), np.float32)
MOE = {"embed": 16, "hidden": 8, "experts": 4, "per_token": 2}


def attend(**changes: Any) -> Call:
    return lambda scene: attention.explain(
        **{"q": Q, "k": K, "v": K, "mode": "train", **changes}
    ).require()


def cache(operation: Callable[[Any], Any], kind: str = "dense", **options: Any) -> Call:
    return lambda scene: operation(caches.init(kind, **CACHE | options))


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


ATTENTION: dict[str, Call] = {
    "queries without heads": attend(q=struct(2, 6, 8)),
    "keys of another dtype": attend(k=struct(2, 6, 2, 8, dtype=jnp.bfloat16)),
    "keys of another batch": attend(k=struct(3, 6, 2, 8)),
    "heads that do not divide": attend(q=struct(2, 6, 5, 8)),
    "values of another length": attend(v=struct(2, 5, 2, 8)),
    "an unknown layout of arrays": attend(layout="THD"),
    "a window that is a number": attend(window=4),
    "chunks of no positions": attend(chunk=0),
    "a mask of another shape": attend(mask=struct(2, 6, 6, dtype=jnp.bool_)),
    "a mask of numbers": attend(mask=struct(2, 1, 6, 6)),
    "a bias of booleans": attend(bias=struct(1, 1, 6, 6, dtype=jnp.bool_)),
    "segments of the keys alone": attend(kv_segment_ids=struct(2, 6, dtype=jnp.int32)),
    "lengths beyond the keys": attend(lengths=np.array([3, 7])),
    "dropout without a key": attend(dropout=0.5),
    "int8 keys without a scale": attend(k=struct(2, 6, 2, 8, dtype=jnp.int8)),
    "an unknown implementation": attend(implementation="blokwise"),
    "an implementation that refuses": attend(implementation="splash", return_weights=True),
    "an option spelled wrong": attend(casual=True),
    "attention in the mode insert": attend(mode="insert"),
}

CACHES: dict[str, Call] = {
    "rows of another batch": cache(lambda made: made.append(ROWS[:1], ROWS)),
    "rows of another dtype": cache(lambda made: made.append(ROWS.astype(np.float16), ROWS)),
    "rows that are a list": cache(lambda made: made.append([[1.0]], ROWS)),
    "valid of numbers": cache(lambda made: made.append(ROWS, ROWS, valid=np.ones((2, 1)))),
    "slots that are not integers": cache(lambda made: made.free([0.5])),
    "parents of another length": cache(lambda made: made.reorder([1, 0, 1])),
    "a group that does not divide": cache(lambda made: made.reorder([1, 0], group=3)),
    "an insert of an array": cache(lambda made: made.insert(ROWS, [0])),
    "a cache that overflows": cache(
        lambda made: made.append(ROWS.repeat(5, 1), ROWS.repeat(5, 1)).require()
    ),
    "a cache without rows": cache(lambda made: made, capacity=0),
    "a sliding cache without a window": cache(lambda made: made, "sliding"),
    "an unknown kind of cache": cache(lambda made: made, "dens"),
    "an unknown option of a cache": cache(lambda made: made, pages=4),
}


def block(module: Any, config: Any, edit: Callable[[Any], Any], *shape: int) -> Call:
    """Call a block with parameters that `edit` has changed."""

    def call(scene: Scene) -> Any:
        params = jax.tree.map(
            lambda spec: jnp.zeros(spec.shape, spec.dtype),
            module.specs(config),
            is_leaf=lambda leaf: isinstance(leaf, sw.ArraySpec),
        )
        return module.apply(config, edit(params), jnp.zeros(shape or (2, 4, 16)))

    return call


def without(name: str) -> Callable[[Any], Any]:
    return lambda params: {key: value for key, value in params.items() if key != name}


LAYERS: dict[str, Call] = {
    "a block without hidden units": lambda scene: mlp_block.MlpConfig(embed=16, hidden=0),
    "heads that do not divide over KV heads": lambda scene: attention_block.AttentionConfig(
        embed=16, heads=4, kv_heads=3
    ),
    "an unknown activation": lambda scene: mlp_block.MlpConfig(
        embed=16, hidden=8, activations=("gelo", "linear")
    ),
    "more experts per token than experts": lambda scene: moe.MoEConfig(**MOE | {"per_token": 5}),
    "a stack without layers": lambda scene: transformer_block.TransformerConfig(
        layers=0,
        attention=attention_block.AttentionConfig(embed=16, heads=4),
        mlp=mlp_block.MlpConfig(embed=16, hidden=8),
    ),
    "a block without a parameter": block(
        mlp_block, mlp_block.MlpConfig(embed=16, hidden=8), without("up")
    ),
    "a parameter that no block has": block(
        moe, moe.MoEConfig(**MOE), lambda params: {**params, "bias": jnp.zeros(4)}
    ),
    "activations of another size": block(
        moe, moe.MoEConfig(**MOE), lambda params: params, 2, 4, 12
    ),
}


def engine(**options: Any) -> serving.Engine:
    given = {"slots": 1, "capacity": 8, "shape": SHAPE, **options}
    return serving.Engine(stub, np.int32(1), **given)


def request(**fields: Any) -> serving.Request:
    return serving.Request(**{"prompt": [1], "max_new_tokens": 1, **fields})


def full_queue(scene: Scene) -> None:
    made = engine(queue=1)
    made.submit(request())
    made.submit(request())


SERVING: dict[str, Call] = {
    "a prompt of nothing": lambda scene: request(prompt=[]),
    "a prompt of text": lambda scene: request(prompt="hello"),
    "two bad fields of a request": lambda scene: request(prompt=[-1], max_new_tokens=0),
    "a temperature below zero": lambda scene: serving.Sampling(temperature=-0.1),
    "a probability above one": lambda scene: serving.Sampling(top_p=1.1),
    "an engine without slots": lambda scene: engine(slots=0),
    "an engine without a shape": lambda scene: engine(shape=None),
    "an engine with a mode for its caches": lambda scene: engine(cache_options={"mode": "decode"}),
    "a request longer than a slot": lambda scene: engine().submit(request(prompt=[1] * 9)),
    "a request that is a list": lambda scene: engine().submit([1, 2]),
    "a request to a full queue": full_queue,
}


def saved(scene: Scene) -> Any:
    """Save a tree where `state` does not look."""
    folder = scene.folder.parent / f"{scene.folder.name}-saved"
    checkpoint.save(folder, {"w": np.zeros((4, 8), np.float32)}, step=1)
    return folder


def read(target: Any, **options: Any) -> Call:
    return lambda scene: checkpoint.restore(saved(scene), target, **options)


CHECKPOINTS: dict[str, Call] = {
    "a checkpoint that is not there": lambda scene: checkpoint.restore(
        scene.folder / "absent", {"w": 1}
    ),
    "a checkpoint in a file": lambda scene: checkpoint.restore(
        scene.folder / "scene.toml", {"w": 1}
    ),
    "a target of another shape": read({"w": np.zeros((4, 9), np.float32)}),
    "a target that was not saved": read({"v": np.zeros((4, 8), np.float32)}),
    "a step that was not saved": read({"w": np.zeros((4, 8), np.float32)}, step=2),
}


def interrupted_move(scene: Scene) -> Any:
    """Move an array over a network that fails."""
    target = sw.PartitionManager(sw.Strategy(version=1, rules={"batch": "tp"}), mesh=scene.pm.mesh)
    axes = {"x": (sw.BATCH, sw.EMPTY)}
    source = scene.pm.shard({"x": scene.host}, axes)
    failing = mock.Mock(side_effect=RuntimeError("the network is gone"))
    with mock.patch.object(leaf, "move_program", return_value=failing):
        return target.reshard(source, axes)


def disagreement(scene: Scene) -> None:
    """Compare the facts of two processes, of which one has another shape."""
    store = SimulatedStore()
    errors: list[Exception] = []

    def run(rank: int) -> None:
        group = ProcessGroup(store=store.of(rank), ranks=(0, 1))
        facts = {"x": Fact(f"float32[8,{4 + rank}]", "here")}
        try:
            comparing.compare(
                group, "tree", facts, what="pm.agree", fix="build the same tree", patience=300.0
            )
        except sw.AgreementError as error:
            errors.append(error)

    with mock.patch.object(meeting, "time", mock.Mock(monotonic=lambda: store.now)):
        store.together(2, run)
    raise errors[0]


OTHERS: dict[str, Call] = {
    "a move over a network that fails": interrupted_move,
    "processes with different shapes": disagreement,
    "a program without a root": lambda scene: parse_hlo(
        "HloModule x\n\nENTRY %main () -> f32[] {\n  %a = f32[] constant(1)\n}\n"
    ),
    "a program that is not a program": lambda scene: parse_hlo("print('hello')"),
}

CASES: dict[str, Call] = {
    **ATTENTION,
    **CACHES,
    **LAYERS,
    **SERVING,
    **CHECKPOINTS,
    **OTHERS,
}
