"""Modules, inputs and keywords that are compared with TransformerEngine.

`tools/te_goldens.py` runs them on TransformerEngine's own modules, the tests on ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import inspect
import zlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.interop.transformer_engine import layer_fields

BATCH, LENGTH, EMBED = 2, 7, 8
# Fields that are members of an enum.
ENUMS = {
    "layer_type": "TransformerLayerType",
    "softmax_type": "AttnSoftmaxType",
    "softmax_fusion_type": "SoftmaxFusionType",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of a module.

    Attributes:
      name: Name of the case; it seeds the inputs.
      module: Name of the class.
      fields: Fields of the module; a name of an initializer or a layer type is looked up.
      inputs: Shape of each positional argument; None for none, "same" for the first argument
        again, ("mask", shape) for a mask, a dict for other keywords of one array.
      kwargs: Keywords of the call.
      dtype: Dtype of the inputs.
    """

    name: str
    module: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: tuple[Any, ...] = ((BATCH, LENGTH, EMBED),)
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a case gives.

    Attributes:
      tree: Path -> [shape, dtype, logical names, summary of the initial value].
      values: Name of an output or a gradient -> its float32 values.
      masks: Shape, probability and a digest of the bits of each dropout mask, in the order of use.
    """

    tree: dict[str, Any]
    values: dict[str, np.ndarray]
    masks: list[Any]


def run(namespace: Any, case: Case) -> Result:
    """Initialize the module of a case, then compute its outputs and all gradients.

    For the second part the parameters are drawn by NumPy, so that no bias and no scale is trivial.
    """
    module = build(namespace, case)
    args = arguments(case)
    streams = {"dropout": jax.random.key(1), "noise": jax.random.key(2)}
    rngs = {"params": jax.random.key(0), **streams}
    boxed = module.init(rngs, *args, **case.kwargs)
    variables = nn.unbox(boxed)
    params = jax.tree_util.tree_map_with_path(_drawn, variables.get("params", {}))
    floats = [at for at, arg in enumerate(args) if is_float(arg)]

    def loss(params: Any, *inputs: Any) -> Any:
        given = list(args)
        for at, value in zip(floats, inputs, strict=True):
            given[at] = value
        given = [given[0] if case.inputs[at] == "same" else arg for at, arg in enumerate(given)]
        out = module.apply(
            {**variables, "params": params},
            *given,
            rngs=streams,
            **case.kwargs,
        )
        leaves = jax.tree_util.tree_leaves_with_path(out)
        total = sum(jnp.sum(leaf.astype(jnp.float32) * _weights(leaf)) for _, leaf in leaves)
        return total, out

    inputs = [args[at] for at in floats]
    with masks_recorded() as masks:
        grads, out = jax.grad(loss, argnums=tuple(range(len(floats) + 1)), has_aux=True)(
            params, *inputs
        )
    values = {"out": out, "grad": grads[0], "inputs": list(grads[1:])}
    return Result(tree=tree_of(boxed), values=flat(values), masks=masks)


@contextlib.contextmanager
def masks_recorded() -> Iterator[list[Any]]:
    """List the masks that are drawn inside of the context."""
    masks: list[Any] = []
    draw = jax.random.bernoulli

    def recorded(key: Any, p: Any = 0.5, shape: Any = None, **options: Any) -> Any:
        mask = draw(key, p, shape, **options)
        bits = np.packbits(np.asarray(mask))
        digest = hashlib.sha256(bits.tobytes()).hexdigest()[:16]
        masks.append([list(mask.shape), round(float(p), 6), digest])
        return mask

    with mock.patch.object(jax.random, "bernoulli", recorded):
        yield masks


def build(namespace: Any, case: Case) -> Any:
    fields = dict(case.fields)
    for name, value in fields.items():
        if name in ENUMS and not (name == "softmax_type" and case.module != "Softmax"):
            fields[name] = getattr(namespace, ENUMS[name])[value]
        elif name.endswith("_init") and isinstance(value, str):
            init = getattr(nn.initializers, value.removesuffix("()"))
            fields[name] = init() if value.endswith("()") else init
        elif name == "dtype":
            fields[name] = jnp.dtype(value)
        elif isinstance(value, list):
            fields[name] = tuple(value)
    return getattr(namespace, case.module)(**fields)


def arguments(case: Case) -> list[Any]:
    args: list[Any] = []
    for at, given in enumerate(case.inputs):
        rng = np.random.default_rng(zlib.crc32(f"{case.name}/{at}".encode()))
        if given is None or isinstance(given, int | bool):
            args.append(given)
        elif given == "same":
            args.append(args[0])
        elif given[0] == "mask":
            mask = rng.random(given[1]) < 0.3
            causal = np.triu(np.ones(given[1][-2:], bool), 1) if given[-1] == "causal" else False
            args.append(jnp.asarray(mask | causal, jnp.uint8))
        else:
            args.append(jnp.asarray(rng.standard_normal(given), case.dtype))
    return args


def is_float(arg: Any) -> bool:
    return hasattr(arg, "dtype") and jnp.issubdtype(arg.dtype, jnp.floating)


def _drawn(path: Any, leaf: Any) -> Any:
    rng = np.random.default_rng(zlib.crc32(path_of(path).encode()))
    fan = leaf.shape[0] if len(leaf.shape) > 1 else 4
    return jnp.asarray(rng.standard_normal(leaf.shape) / np.sqrt(fan), leaf.dtype)


def _weights(leaf: Any) -> Any:
    return np.random.default_rng(leaf.size).standard_normal(leaf.shape).astype(np.float32)


def path_of(path: Any) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def flat(values: Any) -> dict[str, np.ndarray]:
    return {
        path_of(path): np.asarray(leaf, np.float32)
        for path, leaf in jax.tree_util.tree_leaves_with_path(values)
    }


def tree_of(boxed: Any) -> dict[str, Any]:
    """Every variable, as what a golden holds of it."""
    tree = {}
    is_box = lambda leaf: isinstance(leaf, nn.meta.AxisMetadata)  # noqa: E731
    for path, leaf in jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_box):
        names = list(leaf.names) if is_box(leaf) else None
        value = np.asarray(nn.unbox(leaf))
        facts = [list(value.shape), str(value.dtype), names]
        tree[path_of(path)] = [*facts, summary(np.asarray(value, np.float64).ravel())]
    return tree


def summary(values: np.ndarray) -> list[float]:
    """Return a few elements, and two sums. Bits depend on how XLA compiles an initializer."""
    some = values[:: max(1, values.size // 3)][:4]
    return [float(f"{x:.8g}") for x in (*some, np.abs(values).sum(), np.square(values).sum())]


NORMS = [
    Case(name=f"norm-{at}", module="LayerNorm", fields=fields, dtype=dtype)
    for at, (fields, dtype) in enumerate(
        [
            ({}, "float32"),
            ({"layernorm_type": "rmsnorm"}, "float32"),
            ({"zero_centered_gamma": True}, "float32"),
            ({"epsilon": 1e-3, "scale_axes": ["a"], "bias_axes": [None]}, "float32"),
            ({"scale_init": "zeros", "layernorm_type": "rmsnorm"}, "float32"),
            ({"dtype": "bfloat16"}, "float32"),
            ({}, "bfloat16"),
            ({"layernorm_type": "rmsnorm", "dtype": "bfloat16"}, "bfloat16"),
        ]
    )
]
LORA = {"enable_low_rank_adaptation": True, "low_rank_adaptation_dim": 3}
DENSE = [
    Case(name=f"dense-{at}", module="DenseGeneral", fields=fields, inputs=(shape,), dtype=dtype)
    for at, (fields, shape, dtype) in enumerate(
        [
            ({"features": 5}, (2, 7, 8), "float32"),
            ({"features": [3, 5], "use_bias": False}, (2, 7, 8), "float32"),
            ({"features": 5, "axis": [-2, -1]}, (2, 7, 4, 3), "float32"),
            (
                {"features": 5, "kernel_axes": ["in", "out"], "bias_axes": ["out"]},
                (3, 8),
                "float32",
            ),
            ({"features": 5, "bias_init": "ones", "kernel_init": "ones"}, (3, 8), "float32"),
            ({"features": 5, **LORA}, (2, 7, 8), "float32"),
            ({"features": [3, 5], "low_rank_adaptation_alpha": 6.0, **LORA}, (2, 7, 8), "float32"),
            ({"features": 5, "axis": [-2, -1], **LORA}, (2, 7, 4, 3), "float32"),
            ({"features": 5, "transpose_batch_sequence": True}, (7, 2, 8), "float32"),
            ({"features": 5, "dtype": "bfloat16"}, (2, 7, 8), "float32"),
            ({"features": 5}, (2, 7, 8), "bfloat16"),
        ]
    )
]
NORM_DENSE = [
    Case(name=f"norm-dense-{at}", module="LayerNormDenseGeneral", fields={"features": 5, **fields})
    for at, fields in enumerate(
        [
            {},
            {"enable_layernorm": False},
            {"layernorm_type": "rmsnorm", "return_layernorm_output": True},
            {"zero_centered_gamma": True, "use_bias": True},
            {"features": [3, 5], "use_bias": True, "bias_axes": ["j", "o"], **LORA},
            {"depth_scaling": 3.0, "use_bias": True, "low_rank_adaptation_alpha": 2.0, **LORA},
            {"kernel_axes": ["e", "o"], "scale_axes": ["s"], "ln_bias_axes": ["t"]},
            {"enable_layernorm": False, "return_layernorm_output": True, "epsilon": 1e-3},
        ]
    )
]
MLP_SHAPE = {"intermediate_dim": 12}
MLPS = [
    Case(name=f"mlp-{at}", module="LayerNormMLP", fields={**MLP_SHAPE, **fields}, dtype=dtype)
    for at, (fields, dtype) in enumerate(
        [
            ({}, "float32"),
            ({"activations": ["relu"], "use_bias": True}, "float32"),
            ({"activations": ["gelu", "linear"], "use_bias": True}, "float32"),
            ({"activations": ["linear", "silu"], "return_layernorm_output": True}, "float32"),
            ({"activations": ["quick_gelu", "linear"], "enable_layernorm": False}, "float32"),
            ({"activations": ["squared_relu"], "layernorm_type": "rmsnorm"}, "float32"),
            ({"activations": ["clamped_silu", "clamped_linear"]}, "float32"),
            ({"intermediate_dropout_rate": 0.3}, "float32"),
            (
                {
                    "intermediate_dropout_rate": 0.5,
                    "intermediate_hidden_dropout_dims": [1],
                    "activations": ["silu", "linear"],
                    "use_bias": True,
                },
                "float32",
            ),
            ({"bias_axes_2": [None], "scale_axes": ["s"], "use_bias": True}, "float32"),
            ({"activations": ["GELU"], "dtype": "bfloat16"}, "float32"),
            ({"activations": ["silu", "linear"], "use_bias": True}, "bfloat16"),
        ]
    )
]
LOGITS = (2, 2, 5, 7)
SOFTMAX = [
    Case(
        name=f"softmax-{at}",
        module="Softmax",
        fields=fields,
        inputs=(LOGITS, *more),
        dtype=dtype,
    )
    for at, (fields, more, dtype) in enumerate(
        [
            ({}, (), "float32"),
            ({"scale_factor": 0.3}, (None, (1, 2, 5, 7)), "float32"),
            (
                {"scale_factor": 2.0, "softmax_fusion_type": "SCALED_MASKED"},
                (("mask", (2, 1, 5, 7)),),
                "float32",
            ),
            ({"softmax_fusion_type": "SCALED_UPPER_TRIANG_MASKED"}, (), "float32"),
            ({"softmax_type": "OFF_BY_ONE_SOFTMAX"}, (), "float32"),
            (
                {
                    "softmax_type": "LEARNABLE_SOFTMAX",
                    "softmax_fusion_type": "SCALED_MASKED",
                },
                (("mask", (2, 1, 5, 7)), None, (1, 2, 1, 1)),
                "float32",
            ),
            ({"scale_factor": 0.3}, (), "bfloat16"),
        ]
    )
]
POSITIONS = [
    Case(
        name=f"positions-{at}",
        module="RelativePositionBiases",
        fields={"num_buckets": buckets, "max_distance": distance, "num_attention_heads": 3},
        inputs=lengths,
    )
    for at, (buckets, distance, lengths) in enumerate(
        [(32, 128, (40, 40)), (32, 128, (7, 100, False)), (8, 20, (33, 50, True))]
    )
]
QKV = ((2, 7, 4, 6),) * 3
GQA = ((2, 7, 4, 6), (2, 7, 2, 6), (2, 7, 2, 6))
MASK = ("mask", (2, 1, 7, 7))
CAUSAL_MASK = (*MASK, "causal")
SCORES = [
    Case(
        name=f"scores-{at}",
        module="DotProductAttention",
        fields={
            "head_dim": 6,
            "num_attention_heads": 4,
            "transpose_batch_sequence": False,
            **fields,
        },
        inputs=inputs,
        kwargs=kwargs,
        dtype=dtype,
    )
    for at, (fields, inputs, kwargs, dtype) in enumerate(
        [
            ({}, QKV, {}, "float32"),
            ({"num_gqa_groups": 2}, GQA, {}, "float32"),
            ({"attn_mask_type": "no_mask"}, (*QKV, MASK), {}, "float32"),
            ({"attn_mask_type": "padding"}, (*QKV, MASK), {}, "float32"),
            ({"attn_mask_type": "padding_causal"}, (*QKV, CAUSAL_MASK), {}, "float32"),
            ({"window_size": [2, 0]}, (*QKV, CAUSAL_MASK), {}, "float32"),
            (
                {"attn_mask_type": "padding", "window_size": [1, 2]},
                (*QKV, MASK),
                {},
                "float32",
            ),
            ({}, (*QKV, None, (1, 4, 7, 7)), {}, "float32"),
            (
                {"attn_bias_type": "pre_scale_bias"},
                (*QKV, None, (1, 4, 7, 7)),
                {},
                "float32",
            ),
            ({"attention_dropout": 0.3}, QKV, {}, "float32"),
            ({"attention_dropout": 0.3, "num_gqa_groups": 2}, GQA, {}, "float32"),
            ({"attention_dropout": 0.3}, QKV, {"deterministic": True}, "float32"),
            ({"softmax_type": "off_by_one"}, QKV, {}, "float32"),
            (
                {"softmax_type": "learnable", "attn_mask_type": "padding"},
                (*QKV, MASK),
                {},
                "float32",
            ),
            ({"qkv_layout": "bs3hd"}, ((2, 7, 3, 4, 6), None, None), {}, "float32"),
            (
                {"qkv_layout": "BSHD_BS2HD", "num_gqa_groups": 2},
                ((2, 7, 4, 6), (2, 7, 2, 2, 6), None),
                {},
                "float32",
            ),
            ({"transpose_batch_sequence": True, "scale_factor": 0.7}, QKV, {}, "float32"),
            ({"float32_logits": True}, QKV, {}, "bfloat16"),
        ]
    )
]
HEADS = {"head_dim": 4, "num_attention_heads": 2, "transpose_batch_sequence": False}
SELF = ((2, 7, 8), "same")
CROSS = ((2, 7, 8), (2, 5, 8))
CROSS_MASK = ("mask", (2, 1, 7, 5))
MULTI_HEAD = [
    Case(
        name=f"heads-{at}",
        module="MultiHeadAttention",
        fields={**HEADS, **fields},
        inputs=inputs,
        kwargs={"deterministic": True},
    )
    for at, (fields, inputs) in enumerate(
        [
            ({}, SELF),
            ({"fuse_qkv_params": False}, SELF),
            ({"num_gqa_groups": 1}, SELF),
            ({"num_gqa_groups": 1, "fuse_qkv_params": False, "use_bias": True}, SELF),
            ({"return_layernorm_output": True, "use_bias": True}, SELF),
            ({"input_layernorm": False, "scale_attn_logits": True}, SELF),
            ({"enable_rotary_pos_emb": True, "rotary_pos_emb_windows": [1, 100]}, SELF),
            (
                {
                    "enable_rotary_pos_emb": True,
                    "rotary_pos_emb_group_method": "alternate",
                    "rotary_pos_emb_windows": [2, 5000],
                    "fuse_qkv_params": False,
                },
                SELF,
            ),
            ({"attn_mask_type": "padding"}, (*CROSS, CROSS_MASK)),
            ({"attn_mask_type": "padding", "fuse_qkv_params": False}, (*CROSS, CROSS_MASK)),
            ({"low_rank_adaptation_scope": "all", "low_rank_adaptation_dim": 3}, SELF),
            (
                {
                    "low_rank_adaptation_scope": "exclude_output_proj",
                    "fuse_qkv_params": False,
                    "low_rank_adaptation_dim": 3,
                    "low_rank_adaptation_alpha": 6.0,
                },
                SELF,
            ),
            ({"scaled_query_init": False, "layernorm_type": "rmsnorm"}, SELF),
            ({"transpose_batch_sequence": True, "enable_rotary_pos_emb": True}, SELF),
            ({"enable_sequence_parallel": True, "zero_centered_gamma": True}, SELF),
        ]
    )
]


def layers() -> list[Case]:
    cases = []
    for at, fields in enumerate(layer_fields.layers()):
        if {"drop_path", "dropout_rng_name"} <= fields.keys():
            continue  # TransformerEngine takes the second drop_path from the stream "dropout"
        size = fields["hidden_size"]
        x, encoded = (BATCH, LENGTH, size), (BATCH, 5, size)
        if fields.get("transpose_batch_sequence"):
            x, encoded = (LENGTH, BATCH, size), (5, BATCH, size)
        for kind in ("ENCODER", "DECODER"):
            inputs = (x, None if kind == "ENCODER" else encoded, CAUSAL_MASK, CROSS_MASK)
            cases.append(
                Case(
                    name=f"{kind.lower()}-{at}",
                    module="TransformerLayer",
                    fields={**fields, "layer_type": kind},
                    inputs=inputs,
                )
            )
    return cases


CASES = {
    "norm_and_dense": [*NORMS, *DENSE, *NORM_DENSE],
    "mlp_and_softmax": [*MLPS, *SOFTMAX, *POSITIONS],
    "attention": [*SCORES, *MULTI_HEAD],
    "layers": layers(),
}
MODULES = (
    "LayerNorm",
    "DenseGeneral",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "Softmax",
    "RelativePositionBiases",
    "DotProductAttention",
    "MultiHeadAttention",
    "TransformerLayer",
)


def signatures(module: Any) -> dict[str, Any]:
    """Names, order and defaults of a module's fields and of its call."""
    return {
        "fields": _parameters(module),
        "call": _parameters(module.__call__),
    }


def _parameters(function: Any) -> list[list[str]]:
    listed = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        if default is inspect.Parameter.empty:
            text = ""
        elif isinstance(default, enum.Enum):
            text = str(default)
        elif parameter.name == "parent":
            text = "parent"
        elif callable(default):
            text = default.__name__
        else:
            text = repr(default)
        listed.append([parameter.name, text, parameter.kind.name])
    return listed
