"""Parameters, keys and options that do not fit a config are errors that name them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import shardwright as sw
from shardwright.layers import (
    attention_block,
    embedding,
    fp8,
    lora,
    loss,
    mlp_block,
    moe,
    moe_block,
    norm,
    transformer_block,
)
from shardwright.layers.activation import Clamp
from shardwright.layers.inputs import read_keys
from shardwright.testing import cpu_mesh
from tests.layers import blocks
from tests.raising import raises

X = np.ones((2, 4, 16), np.float32)
HEAD, LABELS = np.ones((16, 32), np.float32), np.ones((2, 4), np.int32)
KEY = jax.random.key(0)
LORA = lora.LoraConfig(rank=2)


def attention(**changes: Any) -> attention_block.AttentionConfig:
    return attention_block.AttentionConfig(**{"embed": 16, "heads": 4, **changes})


def mlp(**changes: Any) -> mlp_block.MlpConfig:
    return mlp_block.MlpConfig(**{"embed": 16, "hidden": 8, **changes})


def experts(**changes: Any) -> moe.MoEConfig:
    sizes = {"embed": 16, "hidden": 8, "experts": 4, "per_token": 2}
    return moe.MoEConfig(**{**sizes, **changes})


def stack(**changes: Any) -> transformer_block.TransformerConfig:
    sizes = {"layers": 2, "attention": attention(), "mlp": mlp()}
    return transformer_block.TransformerConfig(**{**sizes, **changes})


BLOCKS: dict[str, tuple[Any, Any]] = {
    "attention": (attention_block, attention()),
    "mlp": (mlp_block, mlp()),
    "moe": (moe, experts()),
    "moe_block": (moe_block, moe_block.MoEBlockConfig(moe=experts())),
    "stack": (transformer_block, stack()),
    "unrolled": (transformer_block, stack(scan=False)),
}


def refused(call: Callable[[], Any], text: str) -> None:
    """Check that a call, traced like in a step, is an error that has a text and a fix."""
    with pytest.raises(sw.ShardingError) as caught:
        jax.eval_shape(call)
    assert text in str(caught.value)
    assert "fix  " in str(caught.value)


def edited(tree: Any, path: str, change: Callable[[dict[Any, Any], Any], None]) -> Any:
    """Return a copy of a tree where `change(node, name)` has changed the node at a path."""
    tree = jax.tree.map(lambda leaf: leaf, tree)
    *parents, name = path.split("/")
    node = tree
    for part in parents:
        node = node[int(part) if isinstance(node, list) else part]
    change(node, name)
    return tree


# Block -> a parameter of it.
PLACES = {
    "attention": "out/kernel",
    "mlp": "up",
    "moe": "gate",
    "moe_block": "moe/router",
    "stack": "0/attention/query/kernel",
    "unrolled": "1/mlp/down/kernel",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_parameters_are_those_of_the_config(name: str) -> None:
    module, config = BLOCKS[name]
    params, path = blocks.random_params(module.specs(config)), PLACES[name]
    inside = re.sub(r"^\d/", "", path)
    parent = inside.rpartition("/")[0]
    added = f"{parent}/foo" if parent else "foo"

    def run(params: Any) -> Callable[[], Any]:
        return lambda: module.apply(config, params, X)

    jax.eval_shape(run(params))
    missing = edited(params, path, lambda node, name: node.pop(name))
    refused(run(missing), f"parameter {inside} is missing")
    extra = edited(params, path, lambda node, name: node.update(foo=HEAD))
    refused(run(extra), f"the config describes no parameter {added}: the names are ")
    refused(
        run(None), "params is None" if name in ("stack", "unrolled") else "the parameters are None"
    )


def test_parameters_of_other_options_are_refused() -> None:
    """Biases and adaptations that the config lacks would be ignored."""
    for module, make in ((attention_block, attention), (mlp_block, mlp)):
        for option, name in (({"bias": True}, "bias"), ({"lora": LORA}, "lora")):
            params = blocks.random_params(module.specs(make(**option)))
            first = next(iter(params))
            text = f"the config describes no parameter {first}/{name}: the names are kernel\n"
            refused(functools.partial(module.apply, make(), params, X), text)
    without = blocks.random_params(attention_block.specs(attention(norm=None)))
    refused(lambda: attention_block.apply(attention(), without, X), "parameter norm is missing")
    wide = blocks.random_params(mlp_block.specs(mlp(hidden=12)))
    text = "parameter down/kernel has shape (12, 16), and the config needs (8, 16)"
    refused(lambda: mlp_block.apply(mlp(), wide, X, path="layers/mlp"), f"layers/mlp: {text}")


def test_shapes_of_shards_are_not_checked() -> None:
    """Inside a shard_map, a stored parameter is a shard."""
    config = mlp(norm=None)
    with blocks.make_manager("fsdp", "auto") as pm:
        specs = mlp_block.specs(config)
        params = pm.shard(blocks.random_params(specs), specs, role="param")
        batch = np.ones((8, 4, 16), np.float32)
        spec = PartitionSpec("fsdp")
        on_shards = jax.shard_map(
            lambda params, x: mlp_block.apply(config, params, x)[0],
            mesh=pm.mesh,
            in_specs=(jax.tree.map(lambda leaf: leaf.sharding.spec, params), spec),
            out_specs=spec,
        )
        y = jax.jit(on_shards)(params, batch)
    plain, _ = mlp_block.apply(config, jax.tree.map(np.asarray, params), batch)
    np.testing.assert_allclose(y, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BLOCKS)
def test_keys_are_known(name: str) -> None:
    module, config = BLOCKS[name]
    params = blocks.random_params(module.specs(config))
    for keys, text in (
        (
            {"dropuot": KEY},
            "keys has the unknown name 'dropuot'; the known names are dropout",
        ),
        (KEY, "keys is a PRNGKeyArray, not a dict"),
        ({"dropout": 0}, 'keys["dropout"]: it is an int, not one key'),
        ({"dropout": [[1], [1, 2]]}, 'keys["dropout"]: it is a list, not one key'),
        ({"dropout": jax.random.split(KEY)}, "of shape (2,), not one key"),
    ):
        refused(lambda keys=keys: module.apply(config, params, X, keys=keys), text)
    jax.eval_shape(lambda: module.apply(config, params, X, keys={"dropout": KEY}))


def test_keys_of_the_old_kind() -> None:
    assert read_keys({"dropout": jax.random.PRNGKey(3)}) == jax.random.key(3)
    assert read_keys({"dropout": None}) is None
    assert read_keys({}) is None
    config = attention(dropout=0.5)
    params = blocks.random_params(attention_block.specs(config))
    run = jax.jit(lambda key: attention_block.apply(config, params, X, keys={"dropout": key})[0])
    old, new = (run(make(3)) for make in (jax.random.PRNGKey, jax.random.key))
    np.testing.assert_array_equal(old, new)


SCALING = [{"attention": None, "mlp": None}]
# Call -> what the error says.
OPTIONS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: attention(norm="rms"),
        "norm: 'rms' is a str, not a NormConfig or None\n  fix   pass a NormConfig or None",
    ),
    (lambda: attention(qk_norm="rms"), "qk_norm: 'rms' is a str"),
    (
        lambda: attention(lora=4),
        "lora: 4 is an int, not a LoraConfig or None\n  fix   pass a LoraConfig or None",
    ),
    (
        lambda: attention(dtypes="bfloat16"),
        "dtypes: 'bfloat16' is a str, not a Dtypes\n  fix   pass a Dtypes",
    ),
    (
        lambda: attention(bias="no"),
        "bias: 'no' is a str, not True or False\n  fix   pass True or False",
    ),
    (lambda: attention(causal=None), "causal: it is None, not True or False"),
    (
        lambda: attention(init="normal"),
        "init: 'normal' is a str, not a function or None\n  fix   pass a function or None",
    ),
    (lambda: attention(window=7), "window=7 is not a pair of lengths"),
    (lambda: attention(softcap="30"), "softcap='30' is not a finite Python number"),
    (lambda: attention(scale=float("nan")), "scale=nan is not a finite Python number"),
    (lambda: attention(rope_theta=-1), "rope_theta=-1 is not a finite Python number above 0"),
    (lambda: mlp(norm="rms"), "norm: 'rms' is a str"),
    (lambda: mlp(clamp=7.0), "clamp: 7.0 is a float"),
    (
        lambda: mlp(dropout_shared=1),
        "dropout_shared: 1 is an int, not a tuple\n  fix   pass a tuple",
    ),
    (lambda: experts(dtypes="bfloat16"), "dtypes: 'bfloat16' is a str"),
    (lambda: experts(normalize="no"), "normalize: 'no' is a str"),
    (lambda: experts(scale="2"), "scale='2' is not a finite Python number"),
    (
        lambda: experts(balance_loss=-1.0),
        "balance_loss=-1.0 is not a finite Python number of at least 0",
    ),
    (lambda: experts(z_loss=None), "z_loss=None is not a finite Python number"),
    (lambda: moe_block.MoEBlockConfig(moe={}), "moe: {} is a dict"),
    (lambda: moe_block.MoEBlockConfig(moe=experts(), norm="rms"), "norm: 'rms' is a str"),
    (lambda: stack(mlp=[mlp()]), "pass a MlpConfig or a MoEBlockConfig or a tuple"),
    (lambda: stack(mlp=(attention(),)), "is an AttentionConfig"),
    (lambda: stack(attention={}), "attention: {} is a dict"),
    (lambda: stack(cross=mlp()), "cross: MlpConfig("),
    (lambda: stack(windows=[(1, 0)]), "windows: [(1, 0)] is a list"),
    (lambda: stack(windows=(7, 7)), "window=7 is not a pair of lengths"),
    (lambda: stack(scan="no"), "scan: 'no' is a str"),
    (lambda: norm.NormConfig(epsilon="1e-6"), "epsilon='1e-6' is not a finite Python number"),
    (lambda: norm.NormConfig(kind="layer", zero_centered="no"), "zero_centered: 'no' is a str"),
    (lambda: lora.LoraConfig(alpha="1"), "alpha='1' is not a finite Python number"),
    (lambda: Clamp(limit="7"), "limit='7' is not a finite Python number"),
    (
        lambda: norm.apply(norm.NormConfig(kind="layer"), {"scale": X[0, 0]}, X),
        "parameter bias is missing",
    ),
    (
        lambda: norm.apply(norm.RMS, {"scale": X[0, 0], "bias": X[0, 0]}, X),
        "the config describes no parameter bias: the names are scale",
    ),
    (
        lambda: lora.apply(LORA, {"a": HEAD[:, :2]}, X, out=(), inner=()),
        "parameter b is missing",
    ),
]


@pytest.mark.parametrize("at", range(len(OPTIONS)))
def test_invalid_options(at: int) -> None:
    refused(*OPTIONS[at])


def states(**fields: Any) -> transformer_block.StackState:
    return transformer_block.StackState(**fields)


def test_states_of_other_configs() -> None:
    config = stack()
    params = blocks.random_params(transformer_block.specs(config))

    def run(state: Any, config: Any = config) -> Callable[[], Any]:
        return lambda: transformer_block.apply(config, params, X, state=state)

    fix = "pass fp8.uses"
    for state, text in (
        (
            states(scaling=SCALING * 2),
            f"state: scaling has 2 entries, and the config needs 1\n  fix   {fix}",
        ),
        (states(scaling=[3]), "state: scaling[0] is not a dict of attention and mlp"),
        (states(moe=[moe.MoEState()]), "moe[0] is a MoEState, and layer 0 has an MLP"),
    ):
        refused(run(state), text)
    four = blocks.random_params(transformer_block.specs(stack(layers=4)))
    text = "params[0]: parameter mlp/down/kernel has shape (4, 8, 16), and the config needs (2, 8"
    refused(lambda: transformer_block.apply(config, four, X), text)
    for tree in (params * 2, params[0]):
        refused(lambda tree=tree: transformer_block.unstack(config, tree), "the config needs 1")
    own = blocks.random_params(attention_block.specs(attention()))
    state = attention_block.AttentionState(scaling={"qkv": None, "out": None})
    text = "state has scaling, and the config has no recipe"
    refused(lambda: attention_block.apply(attention(), own, X, state=state), text)
    delayed = mlp(embed=32, hidden=32, recipe="delayed")
    weights = blocks.random_params(mlp_block.specs(delayed))
    uses = fp8.uses(mlp_block.init_scaling(delayed))
    refused(
        lambda: mlp_block.apply(delayed, weights, np.ones((2, 4, 32)), state={"upp": uses["up"]}),
        "the state is that of upp, not of up, down",
    )
    params = blocks.random_params(moe.specs(experts()))
    text = "state: Array([0., 0., 0., 0.], dtype=float32) is an ArrayImpl"
    refused(lambda: moe.apply(experts(), params, X, state=jnp.zeros(4)), "fix   pass a MoEState")


def test_caches_of_other_layers() -> None:
    """A ring forgets, and only a layer with a window may not notice."""
    config = stack(windows=((2, 0), None), scan=False)
    options = {"batch": 2, "capacity": 4, "window": 3}
    text = "caches: layer 1 attends to all tokens, and its cache keeps 3\n  fix   create the cache"
    refused(lambda: transformer_block.init_caches(config, "sliding", **options), text)
    local = stack(windows=((2, 0),), scan=False)
    rings = transformer_block.init_caches(local, "sliding", **options)
    params = blocks.random_params(transformer_block.specs(config))
    refused(lambda: transformer_block.apply(config, params, X, state=states(caches=rings)), text)
    own = blocks.random_params(attention_block.specs(attention()))
    cache = attention_block.init_cache(attention(), batch=3, capacity=8)
    text = "state: the cache has 3 slots, and x has a batch of 2"
    refused(lambda: attention_block.apply(attention(), own, X, state=cache), text)


@pytest.mark.parametrize("name", ["attention", "mlp", "moe_block", "stack"])
def test_residual_of_integers(name: str) -> None:
    module, config = BLOCKS[name]
    params = blocks.random_params(module.specs(config))
    refused(lambda: module.apply(config, params, X.astype(np.int32)), "x is int32\n  fix   pass")


def test_arguments_of_embedding_and_loss() -> None:
    def entropy(**changes: Any) -> Callable[[], Any]:
        given = {"x": X, "head": HEAD, "labels": LABELS, **changes}
        x, head, labels = (given.pop(name) for name in ("x", "head", "labels"))
        return lambda: loss.cross_entropy(x, head, labels, **given).mean

    not_a_number = "is not a finite Python number "
    cases: list[tuple[Callable[[], Any], str]] = [
        (
            entropy(softcap="30"),
            f"softcap='30' {not_a_number}above 0\n  fix   leave softcap out for no cap",
        ),
        (
            entropy(z_loss="1e-4"),
            f"z_loss='1e-4' {not_a_number}of at least 0\n  fix   pass 1e-4, or 0 for none",
        ),
        (entropy(z_loss=float("nan")), f"z_loss=nan {not_a_number}"),
        (entropy(z_loss=None), f"z_loss=None {not_a_number}"),
        (entropy(head=None), "head is None, not an array"),
        (entropy(labels=None), "labels is None, not an array"),
        (entropy(labels=X[..., 0]), "labels are float32"),
        (entropy(x=None), "x is None, not an array"),
        (entropy(ignore=None), "ignore must be an integer"),
        (entropy(tied="no"), "tied: 'no' is a str"),
        (entropy(dtypes="bfloat16"), "dtypes: 'bfloat16' is a str"),
        (entropy(head={"kernel": HEAD}), "head is a dict, not an array"),
        (lambda: loss.logits(X, None), "head is None, not an array"),
        (lambda: embedding.apply(HEAD, None), "tokens is None, not an array"),
        (lambda: embedding.apply(None, LABELS), "table is None, not an array"),
        (lambda: embedding.apply(HEAD, LABELS, dtypes="f4"), "dtypes: 'f4' is a str"),
    ]
    for call, text in cases:
        refused(call, text)
    traced = jax.jit(lambda z_loss: loss.cross_entropy(X, HEAD, LABELS, z_loss=z_loss).mean)
    with raises(sw.LayerError, "float32", path="z_loss"):
        traced(1e-4)


def test_chunks_of_a_sharded_length() -> None:
    """The error counts the positions of a shard, and does not propose to gather them."""
    pm = sw.PartitionManager(
        sw.Strategy.preset("sequence"), mesh=cpu_mesh("dp:2,sp:4"), mode="train"
    )
    x, labels = np.ones((2, 8, 16), np.float32), np.ones((2, 8), np.int32)
    with pm, raises(sw.RankMismatchError, 4, 2, path="chunks"):
        loss.cross_entropy(x, HEAD, labels, chunks=4)
    with pm:
        two = jax.jit(lambda x: loss.cross_entropy(x, HEAD, labels, chunks=2).mean)(x)
    one = jax.jit(lambda x: loss.cross_entropy(x, HEAD, labels).mean)(x)
    np.testing.assert_allclose(two, one, rtol=1e-6)


def test_labels_outside_of_the_vocabulary() -> None:
    """They are refused where they have values; inside of jit the page describes them."""
    for labels in (np.where(LABELS > 0, 300, 0), jnp.full((2, 4), 32), np.full((2, 4), 32, "u1")):
        with raises(sw.LayerError, 32, path="labels", fix="ignore"):
            loss.cross_entropy(X, HEAD, labels)
    with raises(sw.LayerError, 300, 32, path="labels", fix="ignore"):
        jax.jit(lambda x: loss.cross_entropy(x, HEAD, np.full((2, 4), 300)).mean)(X)
    padded = LABELS.copy()
    padded[0, 0] = 255
    for labels, ignore in ((padded, 255), (np.where(padded > 32, -1, padded), -100)):
        counted = functools.partial(loss.cross_entropy, head=HEAD, labels=labels, ignore=ignore)
        assert int(jax.jit(lambda x, counted=counted: counted(x).tokens)(X)) == 7
    jax.eval_shape(lambda labels: loss.cross_entropy(X, HEAD, labels).mean, padded)
