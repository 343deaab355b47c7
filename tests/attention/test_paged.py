"""Paged attention equals references of JAX under every sharding; what it sends and refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.attention import Result, dot_product_attention, inputs, paged_attention
from shardwright.caches import quantize
from shardwright.errors import AttentionError
from shardwright.testing import assert_collectives, assert_no_collectives, assert_spec, cpu_mesh
from tests.raising import facts, raises

# Minutes of compiling: the conformance table has a few cells of every implementation by default.
pytestmark = pytest.mark.full

RULES = """
[rules]
batch = "dp+ep"
head = "{head}"
kv_head = "tp | -"
page = "{page}"
"""
PAGES, PAGE_SIZE, COLUMNS = 24, 4, 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Sequences in prefill and in decode, with pages in no order and nonsense in unused entries."""

    q_length: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    v_dim: int = 8
    lengths: tuple[int, ...] = (5, 23, 1, 12)
    q_lengths: tuple[int, ...] = (5, 1, 1, 3)

    def arrays(self) -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(0), 4)
        tables = np.full((4, COLUMNS), 10**6, np.int32)
        free = iter(np.random.default_rng(0).permutation(PAGES))
        for b, length in enumerate(self.lengths):
            for j in range(-(-length // PAGE_SIZE)):
                tables[b, j] = next(free)
        return {
            "q": jax.random.normal(keys[0], (4, self.q_length, self.heads, self.head_dim)),
            "k_pages": jax.random.normal(keys[1], (PAGES, PAGE_SIZE, self.kv_heads, self.head_dim)),
            "v_pages": jax.random.normal(keys[2], (PAGES, PAGE_SIZE, self.kv_heads, self.v_dim)),
            "block_tables": tables,
            "lengths": np.asarray(self.lengths, np.int32),
            "q_lengths": np.asarray(self.q_lengths, np.int32),
        }


def run(arrays: dict[str, Any], **options: Any) -> Any:
    return jax.jit(lambda arrays: paged_attention(**arrays, **options))(arrays)


def reference(arrays: dict[str, Any], **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Output and logsumexp of each sequence by itself, its keys in a row."""
    q, tables = arrays["q"], arrays["block_tables"]
    o = np.zeros((*q.shape[:3], arrays["v_pages"].shape[-1]), np.float32)
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf, np.float32)
    for b, (length, count) in enumerate(zip(arrays["lengths"], arrays["q_lengths"], strict=True)):
        used = tables[b, : -(-length // PAGE_SIZE)]
        k, v = (
            arrays[name][used].reshape(1, -1, *arrays[name].shape[2:])[:, :length]
            for name in ("k_pages", "v_pages")
        )
        query = q[b : b + 1, :count]
        output = dot_product_attention(
            query,
            k,
            v,
            implementation="vanilla",
            mode="prefill",
            causal=True,
            return_lse=True,
            **options,
        )
        o[b, :count], lse[b, :, :count] = output.o[0], output.lse[0]
    return o, lse


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (6, 2.0)])
def test_equals_ragged_reference_of_jax(window: int | None, softcap: float | None) -> None:
    reference = pytest.importorskip(
        "jax.experimental.pallas.ops.tpu.ragged_paged_attention"
    ).ref_ragged_paged_attention
    arrays = Batch().arrays()
    k, v = arrays["k_pages"], arrays["v_pages"]
    both = jnp.stack([k, v], axis=3).reshape(
        PAGES, PAGE_SIZE, -1, k.shape[-1]
    )  # k and v of a head side by side
    counts = arrays["q_lengths"]
    wanted = reference(
        jnp.concatenate([arrays["q"][b, :count] for b, count in enumerate(counts)]),
        both,
        jnp.asarray(arrays["lengths"]),
        jnp.where(arrays["block_tables"] < PAGES, arrays["block_tables"], 0),
        jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts)]).astype(jnp.int32),
        jnp.array([4], jnp.int32),
        sm_scale=0.3,
        sliding_window=window,
        soft_cap=softcap,
    )
    result = run(
        arrays, scale=0.3, softcap=softcap, window=None if window is None else (window - 1, None)
    )
    rows = jnp.concatenate([result[b, :count] for b, count in enumerate(counts)])
    np.testing.assert_allclose(rows, wanted, rtol=2e-6, atol=2e-6)


def test_decode_equals_paged_reference_of_jax() -> None:
    reference = pytest.importorskip(
        "jax.experimental.pallas.ops.gpu.paged_attention"
    ).paged_attention_reference
    arrays = Batch(q_length=1, q_lengths=(1, 1, 1, 1)).arrays()
    tables = np.where(arrays["block_tables"] < PAGES, arrays["block_tables"], 0)
    k, v = (
        arrays[name][tables].reshape(4, COLUMNS * PAGE_SIZE, 2, 8)
        for name in ("k_pages", "v_pages")
    )
    wanted = reference(arrays["q"][:, 0], k, v, jnp.asarray(arrays["lengths"]))
    result = run({**arrays, "q_lengths": None}, scale=1.0)
    np.testing.assert_allclose(result[:, 0], wanted, rtol=2e-6, atol=2e-6)


# Name -> mesh, rule of the heads, rule of the pages, collectives.
LAYOUTS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "one device": ("dp:1,sp:1,tp:1", "tp", "sp", {}),
    "batch and kv heads": ("dp:2,tp:2", "tp", "-", {}),
    "more shards than kv heads": ("tp:4", "tp", "-", {}),
    "pages": ("sp:4", "tp", "sp", {"all_gather": 1}),
    "pages, heads that do not divide": ("sp:3", "tp", "sp", {"all_gather": 1}),
    "batch, pages and kv heads": ("dp:2,sp:2,tp:2", "tp", "sp", {"all_gather": 1}),
    # The queries are gathered, the tables and other integers, and over sp the partial softmaxes.
    "pages over the batch's shards": (
        "dp:4",
        "tp",
        "dp",
        {"all_gather": range(4, 6), "all_to_all": 1},
    ),
    "pages over the batch's shards and sp": (
        "dp:2,sp:2,tp:2",
        "tp",
        "dp+sp",
        {"all_gather": range(5, 7), "all_to_all": 1},
    ),
    "pages over some of the batch's shards": (
        "dp:2,ep:2,sp:2",
        "tp",
        "sp+dp",
        {"all_gather": range(5, 7), "all_to_all": 1},
    ),
    "heads over the pages' shards too": (
        "tp:2,sp:2",
        "tp+sp",
        "sp",
        {"all_to_all": 1, "all_gather": 1},
    ),
}


def place(arrays: dict[str, Any], manager: sw.PartitionManager) -> dict[str, Any]:
    pages = (sw.PAGE, sw.EMPTY, sw.KV_HEAD, sw.KV_HEAD_DIM)
    axes = {
        "q": (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM),
        "k_pages": pages,
        "v_pages": pages,
    }
    axes |= {"block_tables": (sw.BATCH, sw.EMPTY), "lengths": (sw.BATCH,), "q_lengths": (sw.BATCH,)}
    return {
        name: jax.device_put(x, manager.sharding(axes[name], shape=x.shape))
        for name, x in arrays.items()
    }


def manager_of(layout: str, axis_types: str = "auto") -> sw.PartitionManager:
    mesh, head, page, _ = LAYOUTS[layout]
    rules = sw.Strategy.loads(RULES.format(head=head, page=page))
    devices = cpu_mesh(mesh, axis_types=axis_types)  # type: ignore[arg-type]
    return sw.PartitionManager(rules, mesh=devices).for_mode("decode")


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.alternate
def test_every_sharding_equals_one_device(layout: str, axis_types: str) -> None:
    arrays = Batch(v_dim=12).arrays()
    sinks = jax.random.normal(jax.random.key(9), (4,))
    manager = manager_of(layout, axis_types)
    with manager:
        placed = place(arrays, manager)
        result: Result = run(placed, sinks=sinks, window=(9, None), softcap=3.0, return_lse=True)
        assert_spec(
            result.o,
            manager.resolve(
                (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM), shape=result.o.shape
            ),
        )
    o, lse = reference(arrays, sinks=sinks, window=(9, None), softcap=3.0)
    np.testing.assert_allclose(result.o, o, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(np.isneginf(result.lse), np.isneginf(lse))
    np.testing.assert_allclose(
        np.where(np.isneginf(lse), 0, result.lse),
        np.where(np.isneginf(lse), 0, lse),
        rtol=2e-6,
        atol=2e-6,
    )
    np.testing.assert_array_equal(np.asarray(result.o)[1, 1:], 0.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_communication(layout: str) -> None:
    manager = manager_of(layout)
    with manager:
        compiled = (
            jax.jit(lambda arrays: paged_attention(**arrays))
            .lower(place(Batch().arrays(), manager))
            .compile()
        )
    counts: dict[str, Any] = LAYOUTS[layout][3]
    if counts:
        assert_collectives(compiled, **counts, only=True, mesh=manager.mesh)
    else:
        assert_no_collectives(compiled, mesh=manager.mesh)


def sizes_of(jaxpr: Any) -> list[int]:
    """Sizes of every array that a program makes, loops and branches included."""
    actual = []
    for equation in jaxpr.eqns:
        actual += [out.aval.size for out in equation.outvars]
        for value in equation.params.values():
            programs = (
                getattr(item, "jaxpr", item)
                for item in (value if isinstance(value, (tuple, list)) else [value])
            )
            actual += [
                size for inner in programs if hasattr(inner, "eqns") for size in sizes_of(inner)
            ]
    return actual


def test_no_sequence_is_gathered_whole() -> None:
    columns, page_size = 64, 16
    shapes = {
        "q": (4, 1, 4, 8),
        "k_pages": (256, page_size, 2, 8),
        "v_pages": (256, page_size, 2, 8),
    }
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    arrays |= {
        "block_tables": jax.ShapeDtypeStruct((4, columns), jnp.int32),
        "lengths": jax.ShapeDtypeStruct((4,), jnp.int32),
    }
    sizes = sizes_of(jax.make_jaxpr(lambda arrays: paged_attention(**arrays))(arrays).jaxpr)
    whole = 4 * columns * page_size * 2 * 8
    assert 0 < max(sizes) <= whole // 8


def test_traced_table_may_name_missing_pages() -> None:
    arrays = Batch(q_length=1, q_lengths=(1, 1, 1, 1)).arrays()
    tables = arrays["block_tables"].copy()
    tables[1, 2], tables[3] = PAGES, -7
    result = run({**arrays, "block_tables": tables, "q_lengths": None})
    v = arrays["v_pages"].at[arrays["block_tables"][1, 2]].set(1e9)  # is not read
    np.testing.assert_array_equal(
        run({**arrays, "block_tables": tables, "q_lengths": None, "v_pages": v}), result
    )
    np.testing.assert_array_equal(result[3], 0.0)
    assert np.abs(result[1]).min() > 0.0


def test_remains_in_a_page_are_hidden() -> None:
    arrays = Batch().arrays()
    wanted = run(arrays)
    last = arrays["block_tables"][2, 0]  # a page of which one row is used
    spoiled = {name: arrays[name].at[last, 1:].set(jnp.nan) for name in ("k_pages", "v_pages")}
    np.testing.assert_array_equal(run({**arrays, **spoiled}), wanted)


@pytest.mark.parametrize(
    ("platform", "layout"),
    [
        ("cpu", "pages"),
        # The kernel for GPUs, interpreted.
        ("gpu", "one device"),
        ("gpu", "batch, pages and kv heads"),
        ("gpu", "pages over the batch's shards"),
    ],
)
def test_bfloat16(platform: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "platform_of", lambda mesh: platform)
    arrays = {
        name: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x
        for name, x in Batch().arrays().items()
    }
    wanted, _ = reference(
        {
            name: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
            for name, x in arrays.items()
        }
    )
    manager = manager_of(layout)
    with manager:
        placed = place(arrays, manager)
        result = run(placed)
        traced = str(jax.make_jaxpr(lambda arrays: paged_attention(**arrays))(placed))
    assert ("pallas_call" in traced) == (platform == "gpu")
    assert result.dtype == jnp.bfloat16
    assert np.linalg.norm(np.asarray(result, np.float32) - wanted) / np.linalg.norm(wanted) < 5e-3


def test_a_strategy_prevents_the_kernel_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "platform_of", lambda mesh: "gpu")
    arrays = {
        name: jnp.asarray(x, jnp.bfloat16) if x.dtype == jnp.float32 else x
        for name, x in Batch().arrays().items()
    }
    rules = RULES.format(head="tp", page="-")
    for line, expected in (("", True), ('decode = "blockwise"', False), ('decode = "auto"', True)):
        strategy = sw.Strategy.loads(f"{rules}[attention]\n{line}\n")
        with sw.PartitionManager(strategy, mesh=cpu_mesh("dp:1,tp:1")).for_mode("decode"):
            traced = jax.make_jaxpr(lambda arrays: paged_attention(**arrays))(arrays)
        assert ("pallas_call" in str(traced)) == expected


def test_a_strategy_names_the_kernel_for_gpus() -> None:
    """It is interpreted here, and refuses pages that it cannot read; a plan counts the loop."""
    arrays = {
        name: jnp.asarray(x, jnp.bfloat16) if x.dtype == jnp.float32 else x
        for name, x in Batch().arrays().items()
    }
    rules = RULES.format(head="tp", page="-")
    strategy = sw.Strategy.loads(f'{rules}[attention]\ndecode = "triton_decode"\n')
    with sw.PartitionManager(strategy, mesh=cpu_mesh("dp:1,tp:1")).for_mode("decode") as manager:
        traced = jax.make_jaxpr(lambda arrays: paged_attention(**arrays))(arrays)
        assert "pallas_call" in str(traced)
        manager.plan(lambda arrays: paged_attention(**arrays), arrays)
        whole = Batch().arrays()
        refused = facts("triton_decode", snippet="float32", fix='decode = "auto"')
        with raises(AttentionError, refused):
            paged_attention(**whole)
        with raises(AttentionError, refused):
            manager.plan(lambda arrays: paged_attention(**arrays), whole)


def test_no_gradient() -> None:
    arrays = Batch().arrays()
    with raises(AttentionError, "paged", "cache", fix="dot_product_attention"):
        jax.grad(lambda q: paged_attention(**{**arrays, "q": q}).sum())(arrays["q"])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "page": (
        {"block_tables": np.full((4, COLUMNS), 24, np.int32)},
        facts("[0, 0]", 24, 0, 5, path="block_tables"),
    ),
    "negative page": (
        {"block_tables": np.full((4, COLUMNS), -1, np.int32)},
        facts("[0, 0]", -1, 24, 0, path="block_tables"),
    ),
    "length": (
        {"lengths": np.array([1, 25, 1, 3], np.int32)},
        facts(25, 0, 24, path="lengths", fix="pages_per_sequence"),
    ),
    "more queries": (
        {"q_lengths": np.array([1, 6, 1, 3], np.int32)},
        facts(6, 0, 5, path="q_lengths"),
    ),
    "more queries than keys": (
        {"q_lengths": np.array([1, 1, 2, 3], np.int32)},
        facts(2, 1, path="q_lengths"),
    ),
    "table of one sequence": (
        {"block_tables": np.zeros(COLUMNS, np.int32)},
        facts(
            "(6,)", "(batch, pages_per_sequence)", path="block_tables", fix="(4, pages_per_sequence"
        ),
    ),
    "no pages": (
        {"block_tables": np.zeros((4, 0), np.int32)},
        facts("(4, 0)", "(batch, pages_per_sequence)", path="block_tables", fix="integers"),
    ),
    "list of pages": (
        {"block_tables": [[0]]},
        facts("(batch, pages_per_sequence)", path="block_tables"),
    ),
    "floats for pages": (
        {"block_tables": np.zeros((4, COLUMNS), np.float32)},
        facts("float32", path="block_tables", fix="integers"),
    ),
    "no integers": ({"lengths": np.ones(4)}, facts("float64", path="lengths", fix="(4,)")),
    "rank": (
        {"k_pages": np.ones((24, 4, 8), np.float32)},
        facts("(24, 4, 8)", path="k_pages", fix="page_size"),
    ),
    "values": (
        {"v_pages": np.ones((24, 8, 2, 8), np.float32)},
        facts("(24, 8, 2, 8)", "k_pages", "(24, 4, 2, 8)", path="v_pages"),
    ),
    "heads": (
        {"q": np.ones((4, 5, 3, 8), np.float32)},
        facts(3, 2, path="k", fix="kv heads"),
    ),
    "head_dim": (
        {"q": np.ones((4, 5, 4, 4), np.float32)},
        facts("head_dim", 8, 4, path="k", fix="BTHD"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    changed, message = WRONG[name]
    with raises(AttentionError, message):
        paged_attention(**{**Batch().arrays(), **changed})


def test_pages_split_by_shard_map_are_refused() -> None:
    manager = manager_of("pages")
    arrays = {name: jnp.asarray(x) for name, x in Batch().arrays().items()}
    pages = P("sp")

    def local(k_pages: Any, v_pages: Any) -> Any:
        return paged_attention(**{**arrays, "k_pages": k_pages, "v_pages": v_pages})

    split = jax.shard_map(local, mesh=manager.mesh, in_specs=(pages, pages), out_specs=P())
    with (
        manager,
        raises(AttentionError, "shard_map", "sp", path="k_pages", fix="shard_map"),
    ):
        split(arrays["k_pages"], arrays["v_pages"])


def test_pages_over_a_leading_head_axis_are_refused() -> None:
    manager = sw.PartitionManager(
        sw.Strategy.loads(RULES.format(head="sp+tp", page="sp")), mesh=cpu_mesh("tp:2,sp:2")
    ).for_mode("decode")
    with manager, raises(AttentionError, "tp", "sp", path="k"):
        paged_attention(**Batch().arrays())


def test_specs_of_pages() -> None:
    manager = manager_of("batch, pages and kv heads")
    assert manager.resolve(
        (sw.PAGE, sw.EMPTY, sw.KV_HEAD, sw.KV_HEAD_DIM), shape=(PAGES, 4, 2, 8)
    ) == P("sp", None, "tp")


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", ["one device", "batch, pages and kv heads"])
def test_quantized_pages(stored: str, layout: str) -> None:
    arrays = Batch().arrays()
    stored_pages = {name: quantize(arrays[name], stored) for name in ("k_pages", "v_pages")}
    plain = {
        **arrays,
        **{
            name: pages.values.astype(jnp.float32) * pages.scale[..., None]
            for name, pages in stored_pages.items()
        },
    }
    given = {**arrays, **{name: pages.values for name, pages in stored_pages.items()}}
    scales = {
        "k_scale_pages": stored_pages["k_pages"].scale,
        "v_scale_pages": stored_pages["v_pages"].scale,
    }
    wanted = run(plain, window=(9, None))
    manager = manager_of(layout)
    with manager:
        axes = (sw.PAGE, sw.EMPTY, sw.KV_HEAD)
        scales = {
            name: jax.device_put(x, manager.sharding(axes, shape=x.shape))
            for name, x in scales.items()
        }
        result = run(place(given, manager), window=(9, None), **scales)
    np.testing.assert_allclose(result, wanted, rtol=2e-6, atol=2e-6)


def test_remains_in_a_scale_are_hidden() -> None:
    arrays = Batch().arrays()
    stored_pages = {name: quantize(arrays[name]) for name in ("k_pages", "v_pages")}
    given = {**arrays, **{name: pages.values for name, pages in stored_pages.items()}}
    used = np.zeros((PAGES, PAGE_SIZE), bool)
    for row, length in zip(arrays["block_tables"], arrays["lengths"], strict=True):
        for position in range(length):
            used[row[position // PAGE_SIZE], position % PAGE_SIZE] = True
    assert not used.all()
    clean = {f"{name[0]}_scale_pages": pages.scale for name, pages in stored_pages.items()}
    dirty = {name: jnp.where(used[..., None], scale, jnp.inf) for name, scale in clean.items()}
    np.testing.assert_array_equal(run(given, **dirty), run(given, **clean))


def test_scales_of_pages_are_checked() -> None:
    arrays = Batch().arrays()
    shape = arrays["k_pages"].shape[:3]
    given = {
        **arrays,
        "k_pages": arrays["k_pages"].astype(jnp.int8),
        "v_pages": arrays["v_pages"].astype(jnp.int8),
    }
    with raises(
        AttentionError, "k_pages", "int8", path="k_scale_pages", fix=("float32", str(shape))
    ):
        run(given)
    with raises(AttentionError, "v_pages", "float32", path="v_scale_pages", fix="int8"):
        run(arrays, v_scale_pages=jnp.ones(shape))
