"""The calls and the meshes of the conformance table of attention."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from shardwright.vocabulary.axes import DEFAULT_MASK_VALUE

STRATEGY = """
[rules]
batch = "dp"
query_length = "sp"
kv_length = "sp"
head = "tp"
kv_head = "tp | -"
[modes.decode]
query_length = "-"
"""
# Meshes by name. "tp > kv heads" has more devices along tp than most cases have kv heads. "odd sp"
# has an odd number of shards of the sequence.
MESHES = {
    "one": "dp:1",
    "dp": "dp:4",
    "tp": "tp:2",
    "tp > kv heads": "tp:4",
    "sp": "sp:4",
    "odd sp": "sp:3",
    "all": "dp:2,sp:2,tp:2",
}
DTYPES = ("float32", "bfloat16")
AXIS_TYPES = ("auto", "explicit")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One call: sizes, static options, and the names of its arrays.

    Attributes:
      name: Name in test ids.
      mode: Runtime mode. A case of the mode `train` also runs in `prefill`.
      options: Static arguments of `dot_product_attention`.
      arrays: Names of the arrays other than q, k and v.
      stored: Dtype of quantized k and v, or None.
      coarse: Whether the elements of q and k are multiples of 1/4. Every implementation then rounds
        the sum of a score and a bias in the same way.
      spread: Standard deviation of the scores, `scale * q k^T`.
      slack: Factor by which the tolerances are multiplied.
    """

    name: str
    mode: str = "train"
    batch: int = 4
    # 24 divides over 1, 2, 3 and 4 shards of the sequence, and into the six chunks of `positions`.
    q_length: int = 24
    kv_length: int = 24
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    v_dim: int = 8
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    arrays: tuple[str, ...] = ()
    stored: str | None = None
    coarse: bool = False
    spread: float = 1.0
    slack: float = 1.0

    @functools.cache  # noqa: B019  a case lives as long as the module
    def values(self, dtype: str) -> dict[str, Any]:
        """Return q, k, v and the other arrays. The seed is the length of the case's name.

        The arrays are NumPy arrays, because JAX would compile a program for each array.
        """
        random = np.random.default_rng(len(self.name))
        b, t, s, h = self.batch, self.q_length, self.kv_length, self.heads
        shapes = {
            "q": (b, t, h, self.head_dim),
            "k": (b, s, self.kv_heads, self.head_dim),
            "v": (b, s, self.kv_heads, self.v_dim),
        }
        arrays: dict[str, Any] = {
            name: random.standard_normal(shape) for name, shape in shapes.items()
        }
        if self.coarse:
            arrays |= {name: np.round(4 * arrays[name]) / 4 for name in ("q", "k")}
        arrays["q"] = arrays["q"] * self.spread
        arrays = {name: x.astype(dtype) for name, x in arrays.items()}
        if self.options.get("layout") == "BHTD":
            arrays = {name: np.swapaxes(x, 1, 2) for name, x in arrays.items()}
        # Chunks in the zigzag order of three shards, which puts neighbors far apart.
        shuffled = np.arange(s, dtype=np.int32).reshape(6, -1)[[0, 5, 1, 4, 2, 3]].reshape(-1)
        rows = np.arange(s, dtype=np.int32)
        known: dict[str, Callable[[], Any]] = {
            # Sort the ids, because packing makes each segment one run of tokens.
            "segment_ids": lambda: np.sort(random.integers(0, 3, (b, t), np.int32)),
            "kv_segment_ids": lambda: np.sort(random.integers(0, 3, (b, s), np.int32)),
            "lengths": lambda: np.resize(
                np.array([s - 3, s, 5, 9 if self.mode == "decode" else 0], np.int32), (b,)
            ),
            "positions": lambda: s - t + rows[:t] if self.mode == "decode" else shuffled,
            # In decode, positions of the rows of a ring buffer: rotated, and -1 for an empty row.
            "kv_positions": lambda: (
                np.where(rows % 5 == 3, -1, (rows + 7) % s) if self.mode == "decode" else shuffled
            ),
            "mask": lambda: random.random((b, 1, t, s)) < 0.7,
            "row_mask": lambda: random.random((b, 1, 1, s)) < 0.7,
            "bias": lambda: random.standard_normal((1, h, t, s), np.float32),
            "row_bias": lambda: random.standard_normal((b, 1, 1, s), np.float32),
            "hiding_bias": lambda: _rows_of_biases(_HIDING_ROWS, h, t, s),
            "bfloat16_hiding_bias": lambda: _rows_of_biases(_HIDING_ROWS, h, t, s).astype(
                "bfloat16"
            ),
            "hiding_row_bias": lambda: np.swapaxes(_rows_of_biases(_HIDING_ROWS, b, 1, s), 0, 1),
            "large_bias": lambda: _rows_of_biases(_LARGE_ROWS, h, t, s),
            "sinks": lambda: random.standard_normal(h, np.float32),
            "dropout_key": lambda: np.uint32(5),
        }
        if self.stored is not None:
            arrays |= {
                key: x
                for name in ("k", "v")
                for key, x in quantize_arrays(name, arrays[name], self.stored).items()
            }
        # The call names its arguments `bias` and `mask`, whatever the case calls these arrays.
        arrays |= {
            "bias" if name.endswith("bias") else name.removeprefix("row_"): known[name]()
            for name in self.arrays
        }
        return arrays if self.mode == "train" else self._with_remains(arrays)

    def _with_remains(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Put NaN into rows that hold no key, because a cache may hold anything there.

        Arrays of training cases are not changed, because training uses no cache.
        """
        positions = np.broadcast_to(
            arrays.get("kv_positions", np.arange(self.kv_length)), (self.batch, self.kv_length)
        )
        held = positions >= 0
        if "lengths" in arrays:
            held = held & (positions < arrays["lengths"][:, None])
        # int8 has no NaN, so put NaN into the scale of the row.
        for name in ("k_scale", "v_scale") if self.stored is not None else ("k", "v"):
            x = arrays[name].copy()
            rows = np.swapaxes(x, 1, 2) if self.options.get("layout") == "BHTD" else x
            rows[~held] = np.nan
            arrays[name] = x
        return arrays

    def weights(self) -> Any:
        """Return the weight of each element of the output in the loss."""
        weights = np.random.default_rng(1).standard_normal(
            (self.batch, self.q_length, self.heads, self.v_dim), np.float32
        )
        return np.swapaxes(weights, 1, 2) if self.options.get("layout") == "BHTD" else weights


# Values that other code writes into a bias in place of a mask. Each is at most -2e38, also in
# bfloat16, and hides its key from its query.
_HIDING = np.array(
    [-np.inf, DEFAULT_MASK_VALUE, np.finfo(np.float32).min, -3.3895314e38, -2.01e38], np.float32
)
# Rows of biases. The first rows hide all keys, by one value or by several values. The next rows
# hide some keys. The row before the last one hides all but the last key, and a causal mask hides
# that key from most queries. The last row hides no key.
_HIDING_ROWS: tuple[Callable[[Any], Any], ...] = (
    *(
        functools.partial(lambda column, value: np.full(column.shape, value), value=value)
        for value in _HIDING
    ),
    lambda column: _HIDING[column % 5],
    lambda column: np.where(column % 2 == 0, _HIDING[column % 5], 0.5),
    lambda column: np.where(column % 3 == 0, -0.25, -np.inf),
    lambda column: np.where(column < column.max(), DEFAULT_MASK_VALUE, 1.0),
    lambda column: column % 4 / 4,
)
# Rows with large numbers. Unlike -inf, these hide nothing: softmax is the same if one number is
# added to a whole row.
_LARGE_ROWS: tuple[Callable[[Any], Any], ...] = (
    # -65504 is the least number of float16, and -1.9e38 is just above the bound of -2e38.
    lambda column: np.full(column.shape, -1e9),
    lambda column: np.full(column.shape, -65504.0),
    lambda column: np.full(column.shape, -1.9e38),
    lambda column: np.where(column % 2 == 0, -1e9, 0.5),
    lambda column: np.where(column % 3 == 0, -65504.0, -1e9),
    lambda column: np.where(column % 2 == 0, -65504.0, 0.25),
    lambda column: np.where(column % 4 == 0, -1e9, -np.inf),
    lambda column: column % 4 / 4,
)


def _rows_of_biases(
    rows: tuple[Callable[[Any], Any], ...], heads: int, q_length: int, kv_length: int
) -> Any:
    """Return a bias `[1, heads, q_length, kv_length]` float32 that cycles through rows.

    Each head starts at another row.
    """
    biases = [
        [rows[(3 * head + row) % len(rows)](np.arange(kv_length)) for row in range(q_length)]
        for head in range(heads)
    ]
    return np.asarray(biases, np.float32)[None]


def quantize_arrays(name: str, x: Any, dtype: str) -> dict[str, Any]:
    """Return keys or values in int8 or fp8, and their scales."""
    scale = np.abs(x.astype(np.float32)).max(axis=-1) / 100
    return {
        name: np.round(x.astype(np.float32) / scale[..., None]).astype(dtype),
        f"{name}_scale": scale,
    }


CASES = (
    Case(name="full"),
    Case(name="causal", options={"causal": True}),
    Case(name="bhtd", options={"causal": True, "layout": "BHTD"}),
    Case(name="window capped", options={"causal": True, "window": (5, None), "softcap": 2.0}),
    Case(name="window both sides", options={"window": (7, 3), "scale": 0.5}),
    Case(name="chunks", options={"causal": True, "chunk": 7}),
    Case(name="packed", options={"causal": True}, arrays=("segment_ids",)),
    Case(name="lengths", arrays=("lengths",)),
    Case(name="permuted", options={"causal": True}, arrays=("positions", "kv_positions")),
    Case(
        name="permuted, packed, window",
        options={"causal": True, "window": (9, 0)},
        arrays=("positions", "kv_positions", "segment_ids"),
    ),
    Case(name="bias", options={"causal": True}, arrays=("bias",)),
    Case(name="broadcast bias and mask", arrays=("row_bias", "row_mask")),
    Case(name="dense mask", arrays=("mask",)),
    Case(name="sinks", options={"causal": True}, arrays=("sinks",)),
    Case(name="dropped", options={"causal": True, "dropout": 0.3}, arrays=("dropout_key",)),
    Case(
        name="logsumexp", options={"causal": True, "return_lse": True}, arrays=("sinks", "lengths")
    ),
    Case(name="as many kv heads", kv_heads=4, options={"causal": True}),
    Case(name="one kv head", kv_heads=1, options={"causal": True}),
    Case(name="wider values", v_dim=12, options={"causal": True}),
    Case(name="cross", kv_length=48, arrays=("segment_ids", "kv_segment_ids")),
    Case(name="fewer queries", q_length=12, options={"causal": True}),
    Case(
        name="everything",
        options={
            "causal": True,
            "window": (11, 0),
            "softcap": 3.0,
            "dropout": 0.2,
            "return_lse": True,
        },
        arrays=("segment_ids", "lengths", "mask", "bias", "sinks", "dropout_key"),
    ),
    Case(name="prefill", mode="prefill", options={"causal": True}),
    Case(
        name="prefill packed",
        mode="prefill",
        options={"causal": True},
        arrays=("segment_ids", "lengths"),
    ),
    Case(name="decode", mode="decode", q_length=1, options={"causal": True}, arrays=("lengths",)),
    Case(
        name="decode drafts",
        mode="decode",
        q_length=3,
        options={"causal": True, "window": (8, None)},
        arrays=("lengths", "sinks"),
    ),
    Case(
        name="decode slots",
        mode="decode",
        q_length=1,
        options={"causal": True, "return_lse": True},
        arrays=("positions", "kv_positions"),
    ),
    Case(
        name="decode one kv head",
        mode="decode",
        q_length=1,
        kv_heads=1,
        options={"softcap": 2.0},
        arrays=("lengths", "row_bias"),
    ),
    Case(
        name="decode int8",
        mode="decode",
        q_length=1,
        stored="int8",
        options={"causal": True},
        arrays=("lengths",),
    ),
    Case(
        name="decode float8, drafts, bhtd",
        mode="decode",
        q_length=3,
        stored="float8_e4m3fn",
        options={
            "causal": True,
            "window": (8, None),
            "softcap": 2.0,
            "layout": "BHTD",
            "return_lse": True,
        },
        arrays=("lengths", "sinks", "bias"),
    ),
    Case(
        name="decode float8_e5m2, one kv head",
        mode="decode",
        q_length=1,
        kv_heads=1,
        stored="float8_e5m2",
        arrays=("lengths", "row_mask"),
    ),
    Case(
        name="prefill int8",
        mode="prefill",
        stored="int8",
        v_dim=12,
        options={"causal": True},
        arrays=("segment_ids",),
    ),
    Case(name="hidden by a bias", arrays=("hiding_bias",)),
    Case(
        name="hidden by a bias, causal, sinks",
        options={"causal": True, "return_lse": True},
        arrays=("hiding_bias", "sinks"),
    ),
    Case(
        name="hidden by a bias in bfloat16, bhtd",
        options={"causal": True, "layout": "BHTD"},
        arrays=("bfloat16_hiding_bias",),
    ),
    Case(name="hidden by a bias for all queries", arrays=("hiding_row_bias", "row_mask")),
    Case(
        name="hidden by a bias, everything",
        options={
            "causal": True,
            "window": (11, 0),
            "softcap": 3.0,
            "dropout": 0.2,
            "return_lse": True,
        },
        arrays=("segment_ids", "lengths", "mask", "hiding_bias", "sinks", "dropout_key"),
    ),
    Case(name="large biases", coarse=True, options={"scale": 0.25}, arrays=("large_bias",)),
    Case(
        name="large biases and sinks, causal",
        coarse=True,
        options={"scale": 0.25, "causal": True},
        arrays=("large_bias", "sinks"),
    ),
    Case(
        name="decode hidden by a bias",
        mode="decode",
        q_length=1,
        options={"causal": True},
        arrays=("lengths", "hiding_bias"),
    ),
    Case(
        name="decode hidden by a bias for all queries, sinks",
        mode="decode",
        q_length=3,
        stored="int8",
        options={"return_lse": True},
        arrays=("lengths", "hiding_row_bias", "sinks"),
    ),
    Case(
        name="decode large biases",
        mode="decode",
        q_length=3,
        coarse=True,
        options={"scale": 0.25},
        arrays=("lengths", "large_bias"),
    ),
    Case(
        name="prefill hidden by a bias",
        mode="prefill",
        options={"causal": True},
        arrays=("hiding_bias",),
    ),
    # Large logits reveal an operand that is scaled and then rounded. The head dims 80 and 128 have
    # scales that are not powers of two. In bfloat16, an implementation needs `slack` if its
    # backward pass reads the rounded output.
    *(
        Case(
            name=f"large logits {dim}",
            head_dim=dim,
            v_dim=dim,
            spread=36.0,
            slack=2.0,
            options={"causal": True},
        )
        for dim in (64, 80, 128)
    ),
)
