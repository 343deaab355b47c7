"""Malformed meshes, annotations and calls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import shardwright as sw
from shardwright.testing import cpu_mesh
from shardwright.trees.factored_weights import quantized
from shardwright.vocabulary.annotations import PartOf
from tests.bad_input.scene import RULES, Call, Scene

X = (sw.BATCH, sw.EMBED)
KERNEL = (sw.EMBED, sw.MLP_INTERMEDIATE)

MESHES: dict[str, Call] = {
    "mesh text with an empty part": lambda scene: sw.create_mesh("dp:2,,tp:4"),
    "mesh text without a size": lambda scene: sw.create_mesh("dp:2,tp"),
    "mesh axis that no rule can name": lambda scene: sw.create_mesh({"it's": 2, "-tp": 4}),
    "mesh axis twice": lambda scene: sw.create_mesh("dp:2,dp:4"),
    "mesh too large": lambda scene: sw.create_mesh({"dp": 4, "tp": 4}, devices=jax.devices()[:8]),
    "mesh that does not divide": lambda scene: sw.create_mesh(
        (3, -1), ("dp", "tp"), devices=jax.devices()[:8]
    ),
    "mesh with too few axis names": lambda scene: sw.create_mesh((2, 4), ("dp",)),
    "mesh of a bad axis type": lambda scene: sw.create_mesh(
        "dp:2", devices=jax.devices()[:2], axis_types="Explict"
    ),
    "mesh of bytes": lambda scene: sw.abstract_mesh(b"dp:2"),
    "mesh of device numbers": lambda scene: sw.create_mesh("dp:2", devices=[0, 1]),
    "mesh of None": lambda scene: sw.create_mesh(None),
    "abstract mesh without a number of devices": lambda scene: sw.abstract_mesh("dp:-1,tp:4"),
    "manager without a mesh": lambda scene: sw.PartitionManager(scene.strategy),
    "manager of rules without a mesh": lambda scene: sw.PartitionManager(scene.strategy.compile()),
    "manager of a file name": lambda scene: sw.PartitionManager("fsdp_tp.toml"),
    "manager on a mesh that lacks an axis": lambda scene: sw.PartitionManager(
        sw.Strategy(mesh={"data": 8}, rules={"batch": "data"}), mesh=cpu_mesh("dp:8")
    ),
}


def wrong_order(scene: Scene) -> None:
    other = scene.pm.for_mode("decode")
    with scene.pm, other:
        scene.pm.__exit__(None, None, None)


def under_another_mesh(scene: Scene) -> None:
    with jax.set_mesh(cpu_mesh("dp:4,tp:2")):
        scene.pm.shard(scene.host, *X)


def inside_shard_map(scene: Scene) -> Any:
    body = lambda x: scene.pm.shard(x, sw.BATCH, sw.EMPTY)  # noqa: E731
    return jax.shard_map(body, mesh=scene.pm.mesh, in_specs=jax.P(), out_specs=jax.P())(scene.host)


def in_jit(scene: Scene) -> Any:
    with scene.pm:
        return jax.jit(lambda x: sw.shard(x * 2, sw.BATCH, sw.HEAD, sw.EMBED), donate_argnums=0)(
            scene.placed
        )


def donated(scene: Scene) -> Any:
    with scene.pm:
        return jax.jit(lambda x: sw.shard(x * 2, sw.EMBED, sw.HEAD), donate_argnums=0)(scene.placed)


def spec_of_weights(scene: Scene) -> dict[str, Any]:
    return {
        "up": sw.ArraySpec((8, 8), jnp.float32, KERNEL),
        "down": sw.ArraySpec((8, 8), jnp.float32, KERNEL[::-1]),
    }


def state_of_another_shape(scene: Scene) -> Any:
    state = {"mu": {"up": scene.array(8)}, "extra": scene.array(3)}
    return scene.pm.state_shardings(state, spec_of_weights(scene))


def mapped(*in_axes: Any, out_axes: Any = X, count: int = 1, sizes: Any = None) -> Call:
    def call(scene: Scene) -> Any:
        return scene.pm.shard_map(
            lambda *args: args[0], in_axes=in_axes, out_axes=out_axes, sizes=sizes
        )(*[scene.host] * count)

    return call


def mixed_order(scene: Scene) -> Any:
    mesh = cpu_mesh("dp:2,tp:4", axis_types={"tp": "explicit"})
    return sw.PartitionManager(scene.strategy, mesh=mesh).shard(scene.host, sw.VOCAB, sw.EMPTY)


ANNOTATIONS: dict[str, Call] = {
    "an axis spelled wrong": lambda scene: scene.pm.shard(scene.host, sw.BATCH, "embedd"),
    "names that are not axes": lambda scene: scene.pm.shard(scene.host, "data", "model"),
    "None for a dim": lambda scene: scene.pm.shard(scene.host, (sw.BATCH, None)),
    "a number for a dim": lambda scene: scene.pm.shard(scene.host, sw.BATCH, 1),
    "a number for an annotation": lambda scene: scene.pm.shard(scene.host, 3),
    "a dict for an annotation": lambda scene: sw.resolve(
        {"x": sw.BATCH}, scene.pm.rules, {"dp": 2}
    ),
    "too few axes": lambda scene: scene.pm.shard(scene.host, sw.BATCH),
    "too many axes": lambda scene: scene.pm.shard(scene.host, sw.BATCH, sw.LENGTH, sw.EMBED),
    "no axes at all": lambda scene: scene.pm.shard(scene.host),
    "one axis twice": lambda scene: scene.pm.shard(scene.host, sw.BATCH, sw.BATCH),
    "two dims that claim one mesh axis": lambda scene: scene.pm.shard(
        scene.host, sw.EMBED, sw.HEAD
    ),
    "a size that does not divide": lambda scene: scene.pm.shard(scene.array(8, 6), *X),
    "a size that does not divide over two": lambda scene: scene.pm.shard(scene.array(12), sw.VOCAB),
    "a layout for a bias": lambda scene: scene.pm.shardings(scene.array(8), sw.ColumnWise),
    "a layout for a stack of stacks": lambda scene: scene.pm.shardings(
        scene.array(2, 2, 8, 8), sw.ColumnWise
    ),
    "other axes for a named layout": lambda scene: sw.ColumnWise([sw.BATCH]),
    "a layout of an unknown mode": lambda scene: sw.DynamicShardingAxes(
        [sw.BATCH], mode="training"
    ),
    "a merged dim of another size": lambda scene: scene.pm.shard(
        scene.array(8, 12), sw.BATCH, sw.merged((sw.HEAD, 4), (sw.HEAD_DIM, 2))
    ),
    "a merged dim that would split a head": lambda scene: scene.pm.shard(
        scene.array(12), (sw.merged((sw.HEAD, 6), (sw.HEAD_DIM, 2)),)
    ),
    "a merged dim of size zero": lambda scene: sw.merged((sw.HEAD, 0)),
    "a composite with an unconstrained axis": lambda scene: scene.pm.shard(
        scene.host, (sw.BATCH, "open"), sw.EMPTY
    ),
    "a composite with EMPTY": lambda scene: scene.pm.shard(
        scene.host, (sw.BATCH, sw.EMPTY), sw.EMBED
    ),
    "a composite of a head and its dim": lambda scene: scene.pm.shard(
        scene.host, sw.BATCH, (sw.HEAD, sw.HEAD_DIM)
    ),
    "a composite that does not divide": lambda scene: scene.pm.shard(
        scene.array(6), ((sw.BATCH, sw.HEAD),)
    ),
    "a composite whose members conflict": lambda scene: scene.pm.shard(
        scene.host, (sw.BATCH, sw.VOCAB), sw.LENGTH
    ),
    "a literal spec of an unknown mesh axis": lambda scene: scene.pm.shard(
        scene.host, jax.P("data")
    ),
    "a literal spec too long": lambda scene: scene.pm.shard(scene.host, jax.P("dp", "tp", None)),
    "an ArraySpec of another rank": lambda scene: sw.ArraySpec((8, 8, 8), jnp.float32, KERNEL),
    "several dims in one text": lambda scene: scene.pm.shard(scene.host, "BATCH EMBED"),
    "a literal spec that is reduced": lambda scene: scene.pm.shard(
        scene.host, jax.P("dp", reduced={"tp"})
    ),
    "a stack of a stack": lambda scene: sw.stacked(sw.stacked(sw.ColumnWise)),
    "a fractional number of layers": lambda scene: sw.stacked(
        sw.ArraySpec((8,), jnp.float32, (sw.EMBED,)), 2.9
    ),
    "a part that is longer than the whole": lambda scene: scene.pm.shard(
        scene.array(160), PartOf(annotation=X, shape=(8, 16), dims=(1,))
    ),
    "a part with invalid dims": lambda scene: PartOf(annotation=X, shape=(8, 8), dims=0),
    "a quantized weight without a shape": lambda scene: quantized(KERNEL, (1, 1)),
    "an ArraySpec of another shape": lambda scene: scene.pm.shard(
        scene.host, sw.ArraySpec((8, 4), jnp.float32, X)
    ),
}

CALLS: dict[str, Call] = {
    "shard without a manager": lambda scene: sw.shard(scene.host, *X),
    "gather without a manager": lambda scene: sw.gather(scene.host, *KERNEL),
    "current_manager without a manager": lambda scene: sw.current_manager(),
    "managers left in the wrong order": wrong_order,
    "a manager left without being entered": lambda scene: scene.pm.__exit__(None, None, None),
    "another ambient mesh": under_another_mesh,
    "a Manual axis that does not vary": inside_shard_map,
    "a wrong rank inside jit": in_jit,
    "a conflict inside jit that donates": donated,
    "an unknown mode": lambda scene: scene.pm.for_mode("decoding"),
    "a mode that is a number": lambda scene: scene.pm.shard(scene.host, *X, mode=1),
    "an unknown role": lambda scene: scene.pm.resolve(*X, role="params"),
    "a missing size that decides": lambda scene: scene.pm.resolve(sw.KV_HEAD),
    "mesh_axes without a size that decides": lambda scene: scene.pm.mesh_axes(sw.KV_HEAD),
    "a layout's mode without a shape": lambda scene: scene.pm.resolve(sw.HiddenStateSharding),
    "a sharding with an unconstrained dim": lambda scene: scene.pm.sharding(sw.BATCH, "open"),
    "an assignment to a manager": lambda scene: setattr(scene.pm, "mode", "train"),
    "a tree of another structure": lambda scene: scene.pm.shard(scene.tree, {"up": X}),
    "a tree of a deeper structure": lambda scene: scene.pm.shard(
        {"up": scene.tree}, {"up": {"up": X, "wo": X}}
    ),
    "a PathMatch for its annotations": lambda scene: scene.pm.shardings(
        scene.tree, sw.match_paths(scene.tree, [(".*", KERNEL)])
    ),
    "a tree of lists": lambda scene: scene.pm.shard(scene.tree, {"up": list(X), "down": list(X)}),
    "a tree without annotations": lambda scene: scene.pm.shardings(scene.tree),
    "a tree with two bad leaves": lambda scene: scene.pm.shardings(
        {"a": scene.array(7, 8), "b": {"c": scene.array(8, 6)}}, KERNEL
    ),
    "specs without an initializer": lambda scene: scene.pm.init(
        spec_of_weights(scene), jax.random.key(0)
    ),
    "state that follows no parameter": state_of_another_shape,
    "paths that no rule matches": lambda scene: sw.match_paths(scene.tree, [("^up$", KERNEL)]),
    "a path rule with an invalid pattern": lambda scene: sw.match_paths(
        scene.tree, [("(", KERNEL)]
    ),
    "a repetition that is too large": lambda scene: sw.match_paths(
        scene.tree, [("a{99999999999}", KERNEL)]
    ),
    "layers without an ArraySpec": lambda scene: sw.stacked(KERNEL, 3),
    "shard_map with too many arguments": mapped(X, count=2),
    "shard_map of a wrong rank": mapped((sw.BATCH,)),
    "shard_map of an axis with two shardings": lambda scene: scene.pm.shard_map(
        lambda x, y: x, in_axes=[(sw.KV_HEAD,)] * 2, out_axes=()
    )(scene.array(8), scene.array(6)),
    "shard_map to an axis of unknown size": mapped(X, out_axes=(sw.KV_HEAD, sw.EMPTY)),
    "shard_map to one mesh axis twice": mapped(X, out_axes=(sw.EMBED, sw.HEAD)),
    "shard_map of an unconstrained axis": mapped((sw.BATCH, "open")),
    "a global array without its shape": lambda scene: scene.pm.global_array(
        scene.host, sw.BATCH, sw.KV_HEAD
    ),
    "a global array of another rank": lambda scene: scene.pm.global_array(scene.host, sw.BATCH),
    "a global array that does not divide": lambda scene: scene.pm.global_array(
        scene.array(8, 6), *X
    ),
    "an Auto axis before an Explicit one": mixed_order,
    "an attribute that is not a rule": lambda scene: sw.PartitionAxis(
        head_axis=3, batch_axis=("dp", None)
    ).compile(),
    "an unknown policy value": lambda scene: sw.Policy(indivisible="ignore"),
    "a policy with text instead of a rule": lambda scene: sw.Policy(zero1="dp | -"),
    "a policy that gathers over text": lambda scene: sw.Policy(gather="fsdp"),
    "a policy that gathers over joined names": lambda scene: sw.Policy(gather=("fsdp+sp",)),
    "a policy that gathers over an empty name": lambda scene: sw.Policy(gather=("fsdp", "")),
    "a policy that gathers over one mesh axis twice": lambda scene: sw.Policy(
        gather=("fsdp", "sp", "fsdp")
    ),
    "rules that conflict for an array": lambda scene: sw.PartitionManager(
        sw.Strategy.loads(RULES.replace('"dp"', '"tp"')), mesh=scene.pm.mesh
    ).shard(scene.placed, *X),
}
