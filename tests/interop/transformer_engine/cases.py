"""Modules, inputs and keywords that are compared with TransformerEngine.

`tools/te_goldens.py` runs them on TransformerEngine's own modules, the tests on ours.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import zlib
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

BATCH, LENGTH, EMBED = 2, 7, 8


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
    """

    tree: dict[str, Any]
    values: dict[str, np.ndarray]


def run(namespace: Any, case: Case) -> Result:
    """Initialize the module of a case, then compute its outputs and all gradients.

    For the second part the parameters are drawn by NumPy, so that no bias and no scale is trivial.
    """
    module = build(namespace, case)
    args = arguments(case)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    boxed = module.init(rngs, *args, **case.kwargs)
    variables = nn.unbox(boxed)
    params = jax.tree_util.tree_map_with_path(_drawn, variables["params"])
    floats = [at for at, arg in enumerate(args) if is_float(arg)]

    def loss(params: Any, *inputs: Any) -> Any:
        given = list(args)
        for at, value in zip(floats, inputs, strict=True):
            given[at] = value
        given = [given[0] if case.inputs[at] == "same" else arg for at, arg in enumerate(given)]
        out = module.apply(
            {**variables, "params": params},
            *given,
            rngs={"dropout": jax.random.key(1)},
            **case.kwargs,
        )
        leaves = jax.tree_util.tree_leaves_with_path(out)
        total = sum(jnp.sum(leaf.astype(jnp.float32) * _weights(leaf)) for _, leaf in leaves)
        return total, out

    inputs = [args[at] for at in floats]
    grads, out = jax.grad(loss, argnums=tuple(range(len(floats) + 1)), has_aux=True)(
        params, *inputs
    )
    values = {"out": out, "grad": grads[0], "inputs": list(grads[1:])}
    return Result(tree=tree_of(boxed), values=flat(values))


def build(namespace: Any, case: Case) -> Any:
    fields = dict(case.fields)
    for name, value in fields.items():
        if name == "layer_type":
            fields[name] = namespace.TransformerLayerType[value]
        elif name.endswith("_init"):
            fields[name] = getattr(nn.initializers, value)
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
CASES = {"norm_and_dense": [*NORMS, *DENSE, *NORM_DENSE]}
MODULES = ("LayerNorm", "DenseGeneral", "LayerNormDenseGeneral")


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
