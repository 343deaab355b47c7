"""Inferred axes equal those that a person wrote, and what is not certain is marked."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.inference import infer as infer_module
from shardwright.inference.atoms import new_dims, regroup, size_of
from shardwright.testing import cpu_mesh
from shardwright.vocabulary.merged_dims import axis_text
from tests.inference import models
from tests.inference.models import LLAMA, MODELS, Model
from tests.raising import Facts, facts, raises


def infer(model: Model, **options: Any) -> Any:
    return sw.infer_axes(
        model.forward, model.shapes, *model.inputs, **{"seeds": model.seeds, **options}
    )


def test_axes_equal_hand_annotations() -> None:
    wrong, guesses, total = [], [], 0
    for model in MODELS:
        inferred = infer(model)
        expected = [axis for row in model.axes for axis in row]
        total += len(expected)
        assert inferred.conflicts == (), model.name
        assert inferred.unknown == (), model.name
        for dim, axis in zip(inferred.evidence, expected, strict=True):
            if dim.is_open or axis_text(dim.axis) != axis:
                where = f"{model.name} {dim.path} dim {dim.dim}: {dim.axis}, not {axis}"
                (guesses if dim.guess or dim.is_open else wrong).append(where)
    assert wrong == []
    assert len(guesses) <= 0.02 * total, guesses


def test_evidence_names_primitive_and_line() -> None:
    dims = {(dim.path, dim.dim): dim for dim in infer(LLAMA).evidence}
    key = dims["layers/1/attention/k", 2].evidence
    assert key.reason == "queries times keys: summed over"
    assert key.primitive == "dot_general"
    lines = Path(models.__file__).read_text(encoding="utf-8").splitlines()
    name, _, number = key.source.partition(":")
    assert name == "models.py"
    assert 'einsum("bqhd,bkhd->bhqk"' in lines[int(number) - 1]


def test_evidence_inside_jax_names_the_caller() -> None:
    """JAX caches `jnp.take` with the lines of its first call."""

    def forward(params: Any, tokens: Any) -> Any:
        first = jnp.take(params["first"], tokens, axis=0)
        second = jnp.take(params["second"], tokens, axis=0)
        return first + second

    table = jax.ShapeDtypeStruct((96, 24), jnp.float32)
    inferred = sw.infer_axes(
        forward, {"first": table, "second": table}, models.TOKENS, seeds=[("BATCH", "LENGTH")]
    )
    first, second = (
        int(dim.evidence.source.partition(":")[2]) for dim in inferred.evidence if dim.dim == 0
    )
    assert second == first + 1


def test_toml_annotates_the_same_tree() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("fsdp:4,tp:2"))
    for model in MODELS:
        inferred = infer(model)
        if model.name == "vit":
            inferred = infer(model, sizes={7: "_"})
        rules = tomllib.loads(inferred.toml())
        match = sw.match_paths(model.shapes, rules.items())
        assert match.unused == match.shadowed == (), model.name
        expected = pm.shardings(model.shapes, inferred.annotations)
        assert pm.shardings(model.shapes, match.annotations) == expected, model.name


@pytest.mark.parametrize("queries", [1, 4])
def test_decode_with_a_cache(queries: int) -> None:
    """One query per sequence has no dim of positions; softmax does not make heads an MLP."""

    def forward(params: Any, tokens: Any, cache: Any, start: Any) -> Any:
        x = params["e"][tokens]
        q = jnp.einsum("ble,ehd->blhd", x, params["q"])
        k = jnp.einsum("ble,ehd->blhd", x, params["k"])
        cache = jax.lax.dynamic_update_slice(cache, k, (0, start, 0, 0))
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, cache))
        x = x + jnp.einsum("bhqk,bkhd,hde->bqe", scores, cache, params["o"])
        return x @ params["e"].T, cache

    shapes = {"e": (96, 24), "q": (24, 4, 6), "k": (24, 4, 6), "o": (4, 6, 24)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    inputs = [
        jax.ShapeDtypeStruct((2, queries), "int32"),
        jax.ShapeDtypeStruct((2, 32, 4, 6), "float32"),
        jax.ShapeDtypeStruct((), "int32"),
    ]
    inferred = sw.infer_axes(
        forward, params, *inputs, seeds=[("BATCH", "LENGTH"), None, None], strict=True
    )
    assert inferred.annotations == {
        "e": (sw.VOCAB, sw.EMBED),
        "q": (sw.EMBED, sw.HEAD, sw.HEAD_DIM),
        "k": (sw.EMBED, sw.HEAD, sw.HEAD_DIM),
        "o": (sw.HEAD, sw.HEAD_DIM, sw.EMBED),
    }


def test_loss_with_labels() -> None:
    """The result is a number; the labels select from the logits."""

    def loss(params: Any, tokens: Any) -> Any:
        logits = jax.nn.log_softmax(LLAMA.forward(params, tokens))
        return -jnp.take_along_axis(logits, tokens[..., None], axis=-1).mean()

    inferred = sw.infer_axes(loss, LLAMA.shapes, *LLAMA.inputs, seeds=LLAMA.seeds, strict=True)
    assert inferred.annotations == infer(LLAMA).annotations


def test_layers_share_a_rule() -> None:
    text = infer(LLAMA).toml()
    assert '\'^layers/[0-9]+/up$\' = ["EMBED", "MLP_INTERMEDIATE"]  # 3 arrays' in text
    assert "layers/*/up" in str(infer(LLAMA))


def test_rules_of_unlike_numbers_stay_apart() -> None:
    params = {
        f"block_{layer}": {"dense_0": ((24, 40), ""), "dense_1": ((40, 24), "")}
        for layer in range(2)
    }

    def forward(params: Any, tokens: Any) -> Any:
        x = jnp.ones((96, 24))[tokens]
        for block in params.values():
            x = x + jax.nn.gelu(x @ block["dense_0"]) @ block["dense_1"]
        return x

    model = Model("dense", forward, params, seeds=(("BATCH", "LENGTH"),))
    rules = tomllib.loads(infer(model).toml())
    assert rules == {
        r"^block_[0-9]+/dense_0$": ["EMBED", "MLP_INTERMEDIATE"],
        r"^block_[0-9]+/dense_1$": ["MLP_INTERMEDIATE", "EMBED"],
    }


def test_two_names_for_one_dim() -> None:
    def forward(params: Any, tokens: Any) -> Any:
        rows = params["table"][tokens]
        total, _ = jax.lax.scan(
            lambda x, row: (x + (x @ row) * row, None), jnp.ones(24), params["table"]
        )
        return rows + total

    model = Model("two names", forward, {"table": ((96, 24), "")})
    inferred = infer(model)
    (conflict,) = inferred.conflicts
    assert (conflict.path, conflict.dim) == ("table", 0)
    assert {conflict.first[0], conflict.second[0]} == {sw.VOCAB, sw.LAYERS}
    sources = {evidence.source for _, evidence in (conflict.first, conflict.second)}
    assert len(sources) == 2
    assert all(source in str(inferred) for source in sources)
    with raises(sw.StrategyError, "VOCAB", "LAYERS", path="table"):
        inferred.toml()


def test_stack_that_is_also_looked_up_by_a_constant() -> None:
    """haliax scans over stacks of layers and reads one layer of them by its index too."""

    def forward(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        x = x + x @ jnp.take(params["stack"], jnp.argmax(jnp.arange(3)), axis=0)
        x, _ = jax.lax.scan(lambda x, weight: (x + x @ weight, None), x, params["stack"])
        return x

    model = Model("stack", forward, {"table": ((96, 24), ""), "stack": ((3, 24, 24), "")})
    inferred = infer(model)
    assert inferred.conflicts == ()
    assert inferred.annotations["stack"][:2] == (sw.LAYERS, sw.EMBED)


def test_seeds_that_contradict_each_other() -> None:
    square = jax.ShapeDtypeStruct((10, 10), jnp.float32)
    inferred = sw.infer_axes(
        lambda params, x, mask: (x * mask) @ params,
        square,
        square,
        square,
        seeds=[("BATCH", "LENGTH"), ("LENGTH", "BATCH")],
    )
    assert "used as one dim (mul, test_infer.py:" in inferred.conflicts[0].text


def test_strict_reports_open_and_guessed_dims() -> None:
    model = models.VIT
    with raises(
        sw.StrategyError,
        facts("VOCAB", "dot_general", path="head", fix="VOCAB"),
        facts("VOCAB", "dot_general", path="head_bias", fix="VOCAB"),
    ) as caught:
        infer(model, strict=True)
    assert [problem.path for problem in caught.value.problems] == ["head", "head_bias"]
    named = infer(model, sizes={7: "CLASSES"}, own_axes=["classes"], strict=True)
    assert named.annotations["head"] == (sw.EMBED, "__CLASSES__")

    unused = Model("unused", lambda params, tokens: tokens, {"weight": ((3, 5), "")})
    with raises(
        sw.StrategyError, facts("rule", "dim", path="weight"), facts("rule", "dim", path="weight")
    ):
        infer(unused, strict=True)
    assert infer(unused).annotations == {"weight": ("_", "_")}
    assert infer(unused).toml().endswith("# open: dim 0, 1\n")


def two_widths(params: Any, x: Any) -> Any:
    """Two blocks of two layers each; the second layer of each is wider at its end."""
    for block in params["blocks"]:
        for layer in block:
            x = x @ layer["w"]
    return x


WIDTHS = Model(
    "two widths",
    two_widths,
    {"blocks": [[{"w": ((16, 32), "")}, {"w": ((32, 16), "")}]] * 2},
    (jax.ShapeDtypeStruct((2, 16), jnp.float32),),
    (("BATCH", None),),
)


def test_one_entry_has_arrays_of_one_shape() -> None:
    inferred = infer(WIDTHS, sizes={16: "EMBED", 32: "EMBED"})
    labels = [line for line in str(inferred).splitlines() if line.startswith("blocks")]
    assert labels == ["blocks/*/0/w  (2 arrays)", "blocks/*/1/w  (2 arrays)"]
    rules = tomllib.loads(inferred.toml())
    assert list(rules) == ["^blocks/[0-9]+/0/w$", "^blocks/[0-9]+/1/w$"]


def test_advice_for_one_size_is_the_same_everywhere() -> None:
    """`sizes=` names every dim of a size, so it is no advice for two different guesses."""
    with pytest.raises(sw.StrategyError) as caught:
        infer(WIDTHS, strict=True)
    fixes: dict[int, set[str]] = {}
    for problem in caught.value.problems:
        fixes.setdefault(problem.size, set()).add(problem.fix)
    assert all(len(each) == 1 for each in fixes.values()), fixes
    inferred = infer(WIDTHS)
    axes = {dim.axis for dim in inferred.guesses if dim.size == 16}
    assert len(axes) > 1
    assert "dims of size 16 have several names" in fixes[16].pop()


def test_primitives_without_a_rule_are_listed() -> None:
    def forward(params: Any, tokens: Any) -> Any:
        return params["table"][tokens] @ jnp.linalg.eigh(params["square"])[1]

    params = {"table": ((96, 24), ""), "square": ((24, 24), "")}
    inferred = infer(Model("eigh", forward, params))
    assert inferred.unknown[0].startswith("eigh (test_infer.py:")
    assert "not understood: eigh" in str(inferred)


@pytest.mark.parametrize(
    ("seeds", "error", "says"),
    [
        ([], sw.StrategyError, facts(0, 1, "(2, 10)", fix="BATCH")),
        ([3], sw.StrategyError, facts(0, 3, "tuple", fix="BATCH")),
        (None, sw.StrategyError, facts("NoneType", "list", path="seeds", fix="BATCH")),
        ([(("BATCH", "LENGTH"), None)], sw.StrategyError, facts(0, "BATCH", "LENGTH", fix="BATCH")),
        ([(sw.merged(("HEAD", 4)), None)], sw.StrategyError, facts(0, 4, "__HEAD__", 2)),
        ([("BATCH",)], sw.RankMismatchError, facts(0, 1, "(2, 10)")),
    ],
)
def test_invalid_seeds(seeds: Any, error: type[Exception], says: Facts) -> None:
    with raises(error, says):
        infer(LLAMA, seeds=seeds)


def test_seed_of_a_dim_that_flattens_two() -> None:
    """Tokens of all sequences in one dim have a length, and their axes are checked too."""

    def forward(params: Any, tokens: Any) -> Any:
        return params["table"][tokens] + params["positions"][jnp.arange(20) % 10]

    params = {"table": ((96, 24), ""), "positions": ((16, 24), "")}
    model = Model("flat", forward, params, (jax.ShapeDtypeStruct((20,), jnp.int32),))
    inferred = infer(model, seeds=[(sw.merged((sw.BATCH, 2), (sw.LENGTH, 10)),)])
    assert inferred.annotations["table"] == (sw.VOCAB, sw.EMBED)
    assert inferred.guesses == ()
    with raises(sw.UnknownAxisError, "LENGHT", path="seed 0", fix="LENGTH"):
        infer(model, seeds=[(sw.merged(("BATCH", 2), ("LENGHT", 10)),)])


def test_leaves_that_are_not_arrays() -> None:
    """All of them are named with their paths."""
    params = {**LLAMA.shapes, "name": "llama", "activation": jax.nn.silu}
    with pytest.raises(sw.StrategyError) as caught:
        sw.infer_axes(LLAMA.forward, params, *LLAMA.inputs, seeds=LLAMA.seeds)
    problems = [(problem.path, problem.what) for problem in caught.value.problems]
    assert ("name", "the leaf is str, not an array") in problems
    assert len(problems) == 2
    assert "leave this leaf out of the tree" in caught.value.problems[0].fix


def test_reduction_by_a_function_keeps_the_other_dims() -> None:
    def forward(params: Any, tokens: Any) -> Any:
        hidden = params["table"][tokens] + params["scale"]
        mixed = jax.lax.reduce(hidden, np.float32(0), lambda a, b: a + b * 1.0, (1,))
        return mixed @ params["head"]

    params = {
        "table": ((96, 24), "VOCAB EMBED"),
        "scale": ((24,), "EMBED"),
        "head": ((24, 40), "EMBED"),
    }
    inferred = infer(Model("reduce", forward, params))
    axes = {(dim.path, dim.dim): axis_text(dim.axis) for dim in inferred.evidence}
    assert axes["head", 0] == axes["table", 1] == "EMBED"
    assert inferred.unknown == ()


def test_reshape_keeps_the_dims_that_it_does_not_cut() -> None:
    dims = new_dims((5, 4, 6))
    first, *others = regroup(dims, (5, 3, 8))
    assert first == dims[0]
    assert [size_of(dim) for dim in others] == [3, 8]


def test_errors_of_the_model_stay() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        infer(Model("broken", lambda params, tokens: params["w"] + "a", {"w": ((2, 3), "")}))


def test_misspelled_axes_are_refused() -> None:
    """Neither a seed nor a size may name an axis that no strategy declares."""
    seeds = [("BATCH", "LENGHT")]
    with pytest.raises(sw.UnknownAxisError) as caught:
        infer(LLAMA, seeds=seeds, sizes={models.HIDDEN: "MLP_INTERMEDIAT"})
    assert [(each.path, each.axis) for each in caught.value.problems] == [
        ("seed 0", "LENGHT"),
        (f"sizes {models.HIDDEN}", "MLP_INTERMEDIAT"),
    ]
    assert "did you mean 'LENGTH'?" in caught.value.problems[0].fix
    assert "did you mean 'MLP_INTERMEDIATE'?" in caught.value.problems[1].fix
    assert "own_axes=strategy.axes" in str(caught.value)
    declared = sw.Strategy.loads('version = 1\n[axes]\nlenght = "an axis of its own"\n')
    assert not infer(LLAMA, seeds=seeds, own_axes=declared.axes).conflicts
    with raises(sw.UnknownAxisError, "LENGH", path="seed 0", fix="LENGHT"):
        infer(LLAMA, seeds=[("BATCH", "LENGH")], own_axes=["lenght"])


def test_nothing_is_computed() -> None:
    seen = []

    def forward(params: Any, tokens: Any) -> Any:
        seen.append(type(tokens))
        return params[tokens]

    with jax.transfer_guard("disallow"):
        sw.infer_axes(
            forward,
            jax.ShapeDtypeStruct((96, 24), jnp.float32),
            models.TOKENS,
            seeds=[("BATCH", "LENGTH")],
        )
    assert len(seen) == 1


def calls_by_inference(layers: int) -> int:
    """Return how many calls of functions inference makes for a model with so many layers."""
    params = {**LLAMA.params, "layers": [models.LLAMA_LAYER] * layers}
    model = Model("deep", LLAMA.forward, params)
    folder = str(Path(infer_module.__file__).parent)
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(folder)

    sys.setprofile(count)
    try:
        infer(model)
    finally:
        sys.setprofile(None)
    return calls


def test_work_is_linear_in_the_layers() -> None:
    calls = [calls_by_inference(layers) for layers in (2, 6, 10)]
    assert calls[2] - calls[1] <= 1.1 * (calls[1] - calls[0]), calls


def train(model: Model, params: Any, tokens: Any, shardings: Any = None, batch: Any = None) -> Any:
    """Return the losses of some steps of gradient descent."""

    def loss(params: Any) -> Any:
        logits = model.forward(params, tokens[:, :-1])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
        return -picked.mean()

    @jax.jit
    def step(params: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda weight, slope: weight - 0.3 * slope, params, gradient)

    if shardings is not None:
        params, tokens = jax.device_put(params, shardings), jax.device_put(tokens, batch)
    losses = []
    for _ in range(20):
        value, params = step(params)
        losses.append(float(value))
    return losses


TRAINED = {
    "fsdp": ("fsdp:8", "fsdp:4", "dp:2,fsdp:4"),
    "fsdp_tp": ("fsdp:4,tp:2", "fsdp:2,tp:4", "dp:2,fsdp:2,tp:2"),
    "tensor": ("dp:2,tp:4", "dp:4,tp:2", "tp:2"),
}


@pytest.mark.full
@pytest.mark.parametrize("model", [LLAMA, models.GPT2, models.SCANNED], ids=lambda each: each.name)
def test_training_by_inferred_axes(model: Model) -> None:
    """Three presets, each on three meshes, train a model as without sharding."""
    keys = iter(jax.random.split(jax.random.key(0), 99))
    params = jax.tree.map(
        lambda shape: jax.random.normal(next(keys), shape.shape) * 0.1, model.shapes
    )
    tokens = jax.random.randint(next(keys), (8, 11), 0, models.VOCAB)
    expected = train(model, params, tokens)
    assert expected[-1] < expected[0] - 0.02
    annotations = infer(model).annotations
    for preset, texts in TRAINED.items():
        for text in texts:
            pm = sw.PartitionManager(sw.Strategy.preset(preset), mesh=cpu_mesh(text))
            shardings = pm.shardings(params, annotations)
            assert not all(sharding.is_fully_replicated for sharding in jax.tree.leaves(shardings))
            batch = pm.sharding(sw.BATCH, shape=(8,))
            actual = train(model, params, tokens, shardings, batch)
            np.testing.assert_allclose(actual, expected, rtol=1e-6, err_msg=f"{preset} {text}")


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"a": "EMBED"}, facts("dim", "a", path="sizes", fix="MLP_INTERMEDIATE")),
        (
            {"table dim 2": "EMBED"},
            facts("dim", "table dim 2", path="sizes", fix="MLP_INTERMEDIATE"),
        ),
        ({"t* dim 1": "HEAD"}, facts(1, "HEAD", "EMBED", path="sizes")),
        ({9: "EMBED", 16: "VOCAB"}, facts("dim", 9, path="sizes", fix="MLP_INTERMEDIATE")),
        ({0: "EMBED"}, facts(0, fix="MLP_INTERMEDIATE")),
        ([(8, "EMBED")], facts("list", path="sizes", fix="MLP_INTERMEDIATE")),
    ],
)
def test_invalid_sizes(sizes: Any, says: Facts) -> None:
    params = {"table": jax.ShapeDtypeStruct((16, 8), "float32")}
    tokens = jax.ShapeDtypeStruct((2, 4), "int32")
    seeds = [(sw.BATCH, sw.LENGTH)]
    with raises(sw.StrategyError, says):
        sw.infer_axes(lambda p, x: p["table"][x], params, tokens, seeds=seeds, sizes=sizes)


def test_a_size_may_be_that_of_a_factor() -> None:
    """No dim of a parameter has 6 elements, but one of 24 is 4 heads of 6."""

    def forward(params: Any, x: Any) -> Any:
        heads = (x @ params["w"]).reshape(2, 16, 4, 6)
        return jnp.einsum("bshd,bthd->bhst", heads, heads)

    params = {"w": jax.ShapeDtypeStruct((8, 24), "float32")}
    x = jax.ShapeDtypeStruct((2, 16, 8), "float32")
    seeds = [(sw.BATCH, sw.LENGTH, sw.EMBED)]
    inferred = sw.infer_axes(forward, params, x, seeds=seeds, sizes={6: "HEAD_DIM"})
    assert axis_text(inferred.annotations["w"][1]).endswith("HEAD_DIM:6")


def test_sizes_by_path_may_name_a_dim_as_its_weight_does() -> None:
    """A vector along EMBED is spelled NORM. That is no contradiction to the given name."""

    def forward(params: Any, x: Any) -> Any:
        return jnp.einsum("bte,ef->btf", x * params["scale"], params["w"][0])

    params = {"scale": jnp.zeros(64), "w": [jnp.zeros((64, 128))]}
    x = jnp.zeros((2, 16, 64))
    for key in ("scale dim 0", "w/0 dim 0"):
        seeds, sizes = [("BATCH", "LENGTH", None)], {key: "EMBED"}
        inferred = sw.infer_axes(forward, params, x, seeds=seeds, sizes=sizes)
        assert inferred.annotations["scale"] == (sw.NORM,)
        assert inferred.annotations["w"][0][0] == sw.EMBED
