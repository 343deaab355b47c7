"""The right axes of each published model, by path, read from its source.

If a model has as many heads of keys and values as of queries, all heads have the axis HEAD. If it
has fewer, its heads of keys and values have KV_HEAD: `GROUPED` has the patterns that then differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

Rules = Sequence[tuple[str, str]]

RIGHT: Final[Mapping[str, Rules]] = {
    "lm1b": [
        ("Embed_0/embedding", "VOCAB EMBED"),
        ("(query|key|value)/kernel", "EMBED HEAD HEAD_DIM"),
        ("out/kernel", "HEAD HEAD_DIM EMBED"),
        ("Dense_0/kernel", "EMBED MLP_INTERMEDIATE"),
        ("Dense_0/bias", "MLP_INTERMEDIATE"),
        ("Dense_1/kernel", "MLP_INTERMEDIATE EMBED"),
        ("logitdense/kernel", "EMBED VOCAB"),
        ("logitdense/bias", "VOCAB"),
        ("(Dense_1/bias|norm/.*|LayerNorm_./.*)", "NORM"),
    ],
    "gemma": [
        ("embedding/value", "VOCAB EMBED"),
        ("_(key|query)_norm/scale/value", "HEAD_DIM"),
        ("attn_vec_einsum/kernel/value", "HEAD HEAD_DIM EMBED"),
        ("kv_einsum/kernel/value", "_ _ EMBED HEAD_DIM"),
        ("q_einsum/kernel/value", "HEAD EMBED HEAD_DIM"),
        ("(gate|up)_proj/kernel/value", "EMBED MLP_INTERMEDIATE"),
        ("down_proj/kernel/value", "MLP_INTERMEDIATE EMBED"),
        ("norm/scale/value", "NORM"),
    ],
    "llama3": [
        ("layers/./(q|k|v)", "EMBED HEAD HEAD_DIM"),
        ("layers/./o", "HEAD HEAD_DIM EMBED"),
        ("w_(gate|up)", "EMBED MLP_INTERMEDIATE"),
        ("w_down", "MLP_INTERMEDIATE EMBED"),
        ("gamma(_final)?", "NORM"),
        ("embedding", "VOCAB EMBED"),
        ("lm_head", "EMBED VOCAB"),
    ],
    "equinox": [
        ("(embedding|head)/weight", "VOCAB EMBED"),
        ("norms/./weight", "NORM"),
        ("(query|key|value)_proj/weight", "HEAD:4*HEAD_DIM:8 EMBED"),
        ("output_proj/weight", "EMBED HEAD:4*HEAD_DIM:8"),
        ("layers/0/weight", "MLP_INTERMEDIATE EMBED"),
        ("layers/0/bias", "MLP_INTERMEDIATE"),
        ("layers/1/weight", "EMBED MLP_INTERMEDIATE"),
        ("layers/1/bias", "NORM"),
    ],
    "levanter": [
        ("q_proj/weight/0", "LAYERS HEAD _ HEAD_DIM EMBED"),
        ("(k|v)_proj/weight/0", "LAYERS HEAD HEAD_DIM EMBED"),
        ("o_proj/weight/0", "LAYERS EMBED HEAD HEAD_DIM"),
        ("(gate|up)_proj/weight/0", "LAYERS MLP_INTERMEDIATE EMBED"),
        ("down_proj/weight/0", "LAYERS EMBED MLP_INTERMEDIATE"),
        ("layernorm/weight/0", "LAYERS NORM"),
        ("transformer/norm/weight/0", "NORM"),
        ("(token_embeddings|lm_head)/weight/0", "VOCAB EMBED"),
    ],
    "transformer_engine": [
        ("embedding", "VOCAB EMBED"),
        ("qkv/kernel", "EMBED _ HEAD:4*HEAD_DIM:8"),
        ("query/kernel", "EMBED HEAD:4*HEAD_DIM:8"),
        ("out/kernel", "HEAD:4*HEAD_DIM:8 EMBED"),
        ("wi_kernel", "EMBED _ MLP_INTERMEDIATE"),
        ("wo_kernel", "MLP_INTERMEDIATE EMBED"),
        ("scale", "NORM"),
    ],
    "maxtext": [
        ("embedding", "VOCAB EMBED"),
        ("(query|key|value)/kernel", "EMBED HEAD HEAD_DIM"),
        ("out/kernel", "HEAD HEAD_DIM EMBED"),
        ("wi_./kernel", "EMBED MLP_INTERMEDIATE"),
        ("wo/kernel", "MLP_INTERMEDIATE EMBED"),
        ("norm/scale", "NORM"),
    ],
}
GROUPED: Final[Mapping[str, Rules]] = {
    "llama3": [("layers/./(k|v)", "EMBED KV_HEAD HEAD_DIM")],
    "levanter": [
        ("q_proj/weight/0", "LAYERS KV_HEAD _ HEAD_DIM EMBED"),
        ("(k|v)_proj/weight/0", "LAYERS KV_HEAD HEAD_DIM EMBED"),
    ],
    "transformer_engine": [("kv/kernel", "EMBED _ KV_HEAD:2*HEAD_DIM:8")],
    "maxtext": [("(key|value)/kernel", "EMBED KV_HEAD HEAD_DIM")],
}
# Two names of one dim, by the kind of array.
SYNONYMS: Final = {"KV_HEAD_DIM": "HEAD_DIM", "EMBED": "NORM"}


def right(rules: Rules, path: str) -> list[str]:
    """Return the axes of a path, by the first pattern that its end matches.

    Raises:
      LookupError: No pattern matches.
    """
    for pattern, axes in rules:
        if re.search(rf"{pattern}$", path):
            return axes.split()
    raise LookupError(f"no pattern of right_axes.py matches {path!r}")


def is_same(first: str, second: str) -> bool:
    """Tell whether two names are equal or synonyms."""
    return _plain(first) == _plain(second)


def _plain(axis: str) -> list[str]:
    names: list[Any] = re.split(r"([*:])", axis)
    return [SYNONYMS.get(name, name) for name in names]
