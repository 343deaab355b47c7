"""The calls that every implementation of attention is compared on, and the meshes on which."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np

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
# Name -> mesh. The fourth has more tensor shards than kv heads, the sixth an odd number of sequence shards.
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
COMBINATIONS: Final = tuple((dtype, axis_types) for dtype in DTYPES for axis_types in AXIS_TYPES)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One call: sizes, static options, and which arrays it has.

    Attributes:
      name: what a test calls it.
      mode: runtime mode; a case of training is one of prefill too.
      options: static arguments of `dot_product_attention`.
      arrays: names of the arrays that it gets beside q, k and v.
      stored: dtype of quantised k and v, or None.
    """

    name: str
    mode: str = "train"
    batch: int = 4
    q_length: int = 24
    kv_length: int = 24
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    v_dim: int = 8
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    arrays: tuple[str, ...] = ()
    stored: str | None = None

    @functools.cache  # noqa: B019  a case lives as long as the module
    def values(self, dtype: str) -> dict[str, Any]:
        """q, k, v and the arrays, of this case and of no other. NumPy's: JAX would compile a program for each."""
        random = np.random.default_rng(len(self.name))
        b, t, s, h = self.batch, self.q_length, self.kv_length, self.heads
        shapes = {"q": (b, t, h, self.head_dim), "k": (b, s, self.kv_heads, self.head_dim), "v": (b, s, self.kv_heads, self.v_dim)}
        made: dict[str, Any] = {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
        if self.options.get("layout") == "BHTD":
            made = {name: np.swapaxes(x, 1, 2) for name, x in made.items()}
        # A permutation that puts neighbours far apart, as a balanced ring does, and then some.
        shuffled = np.arange(s, dtype=np.int32).reshape(6, -1)[[0, 5, 1, 4, 2, 3]].reshape(-1)
        rows = np.arange(s, dtype=np.int32)
        known: dict[str, Callable[[], Any]] = {
            "segment_ids": lambda: np.sort(random.integers(0, 3, (b, t), np.int32)),
            "kv_segment_ids": lambda: np.sort(random.integers(0, 3, (b, s), np.int32)),
            "lengths": lambda: np.resize(np.array([s - 3, s, 5, 9 if self.mode == "decode" else 0], np.int32), (b,)),
            "positions": lambda: s - t + rows[:t] if self.mode == "decode" else shuffled,
            "kv_positions": lambda: np.where(rows % 5 == 3, -1, (rows + 7) % s) if self.mode == "decode" else shuffled,
            "mask": lambda: random.random((b, 1, t, s)) < 0.7,
            "row_mask": lambda: random.random((b, 1, 1, s)) < 0.7,
            "bias": lambda: random.standard_normal((1, h, t, s), np.float32),
            "row_bias": lambda: random.standard_normal((b, 1, 1, s), np.float32),
            "sinks": lambda: random.standard_normal(h, np.float32),
            "dropout_key": lambda: np.uint32(5),
        }
        if self.stored is not None:
            made |= {key: x for name in ("k", "v") for key, x in quantised(name, made[name], self.stored).items()}
        made |= {name.removeprefix("row_"): known[name]() for name in self.arrays}
        return made if self.mode == "train" else self._with_remains(made)

    def _with_remains(self, made: dict[str, Any]) -> dict[str, Any]:
        """Put NaN where there is no key: what an earlier sequence left in a cache may be anything. A cache has no gradient."""
        positions = np.broadcast_to(made.get("kv_positions", np.arange(self.kv_length)), (self.batch, self.kv_length))
        held = positions >= 0
        if "lengths" in made:
            held = held & (positions < made["lengths"][:, None])
        for name in ("k_scale", "v_scale") if self.stored is not None else ("k", "v"):
            x = made[name].copy()
            rows = np.swapaxes(x, 1, 2) if self.options.get("layout") == "BHTD" else x
            rows[~held] = np.nan
            made[name] = x
        return made

    def weights(self) -> Any:
        """What the elements of the output count in the loss."""
        weights = np.random.default_rng(1).standard_normal((self.batch, self.q_length, self.heads, self.v_dim), np.float32)
        return np.swapaxes(weights, 1, 2) if self.options.get("layout") == "BHTD" else weights


def quantised(name: str, x: Any, dtype: str) -> dict[str, Any]:
    """Keys or values in a dtype of 8 bits, and their scales; whatever these are, they are to be multiplied."""
    scale = np.abs(x.astype(np.float32)).max(axis=-1) / 100
    return {name: np.round(x.astype(np.float32) / scale[..., None]).astype(dtype), f"{name}_scale": scale}


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
    Case(name="permuted, packed, window", options={"causal": True, "window": (9, 0)}, arrays=("positions", "kv_positions", "segment_ids")),
    Case(name="bias", options={"causal": True}, arrays=("bias",)),
    Case(name="broadcast bias and mask", arrays=("row_bias", "row_mask")),
    Case(name="dense mask", arrays=("mask",)),
    Case(name="sinks", options={"causal": True}, arrays=("sinks",)),
    Case(name="dropped", options={"causal": True, "dropout": 0.3}, arrays=("dropout_key",)),
    Case(name="logsumexp", options={"causal": True, "return_lse": True}, arrays=("sinks", "lengths")),
    Case(name="as many kv heads", kv_heads=4, options={"causal": True}),
    Case(name="one kv head", kv_heads=1, options={"causal": True}),
    Case(name="wider values", v_dim=12, options={"causal": True}),
    Case(name="cross", kv_length=48, arrays=("segment_ids", "kv_segment_ids")),
    Case(name="fewer queries", q_length=12, options={"causal": True}),
    Case(
        name="everything",
        options={"causal": True, "window": (11, 0), "softcap": 3.0, "dropout": 0.2, "return_lse": True},
        arrays=("segment_ids", "lengths", "mask", "bias", "sinks", "dropout_key"),
    ),
    Case(name="prefill", mode="prefill", options={"causal": True}),
    Case(name="prefill packed", mode="prefill", options={"causal": True}, arrays=("segment_ids", "lengths")),
    Case(name="decode", mode="decode", q_length=1, options={"causal": True}, arrays=("lengths",)),
    Case(name="decode drafts", mode="decode", q_length=3, options={"causal": True, "window": (8, None)}, arrays=("lengths", "sinks")),
    Case(
        name="decode slots", mode="decode", q_length=1, options={"causal": True, "return_lse": True}, arrays=("positions", "kv_positions")
    ),
    Case(name="decode one kv head", mode="decode", q_length=1, kv_heads=1, options={"softcap": 2.0}, arrays=("lengths", "row_bias")),
    Case(name="decode int8", mode="decode", q_length=1, stored="int8", options={"causal": True}, arrays=("lengths",)),
    Case(
        name="decode float8, drafts, bhtd",
        mode="decode",
        q_length=3,
        stored="float8_e4m3fn",
        options={"causal": True, "window": (8, None), "softcap": 2.0, "layout": "BHTD", "return_lse": True},
        arrays=("lengths", "sinks", "bias"),
    ),
    Case(
        name="decode float8_e5m2, one kv head", mode="decode", q_length=1, kv_heads=1, stored="float8_e5m2", arrays=("lengths", "row_mask")
    ),
    Case(name="prefill int8", mode="prefill", stored="int8", v_dim=12, options={"causal": True}, arrays=("segment_ids",)),
)
