"""Run TransformerEngine's own `test_layer.py` on a CPU, with our package in place of theirs.

    python tools/te_test_layer.py CHECKOUT ours|theirs [PYTEST OPTION ...]

CHECKOUT is a clone of NVIDIA/TransformerEngine; it needs no build and no GPU. "theirs" tests
TransformerEngine itself. Either way the inputs are smaller than upstream, for time.
`TE_CPU_ARCH=90` hides MXFP8.
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

# Text of test_layer.py -> the text that replaces it on a CPU.
SMALLER = {"(32, 128, 1024)": "(32, 64, 64)", "32-128-1024": "32-64-64", "(64, 0),": "(32, 0),"}
ARCHITECTURE = int(os.environ.get("TE_CPU_ARCH", "100"))


def main(checkout: str, whose: str, *options: str) -> int:
    import pytest

    if whose == "theirs":
        from tools import te_cpu

        te_cpu.ANSWERS["get_device_compute_capability"] = ARCHITECTURE
        te_cpu.load(checkout)
        te_cpu.multiply_blocks_in_float32()
    elif whose == "ours":
        install()
    else:
        raise SystemExit(f"{whose!r} is neither 'ours' nor 'theirs'")
    source = Path(checkout) / "tests" / "jax"
    with tempfile.TemporaryDirectory() as place:
        for name in ("utils.py", "test_layer.py"):
            text = (source / name).read_text(encoding="utf-8")
            for old, new in SMALLER.items() if name == "test_layer.py" else ():
                if old not in text:
                    raise SystemExit(f"{name} has no {old}: read it, and change SMALLER")
                text = text.replace(old, new)
            (Path(place) / name).write_text(text, encoding="utf-8")
        fixed = ["-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull, "-W", "ignore"]
        return int(pytest.main([*fixed, "--rootdir", place, *options, f"{place}/test_layer.py"]))


class ScalingMode(enum.Enum):
    """The modes that test_layer.py names."""

    NO_SCALING = 0
    DELAYED_TENSOR_SCALING = 1
    MXFP8_1D_SCALING = 2
    CURRENT_TENSOR_SCALING = 3


class TensorSource(enum.Enum):
    X = 0
    KERNEL = 1
    DGRAD = 2


class SoftmaxType(enum.Enum):
    """The enum of attention; TransformerEngine's test reads members from text."""

    VANILLA_SOFTMAX = "vanilla"
    OFF_BY_ONE_SOFTMAX = "off_by_one"
    LEARNABLE_SOFTMAX = "learnable"

    @classmethod
    def from_str(cls, name: str) -> SoftmaxType:
        return cls(name)


_MODES = {
    "DelayedScaling": ScalingMode.DELAYED_TENSOR_SCALING,
    "MXFP8BlockScaling": ScalingMode.MXFP8_1D_SCALING,
    "Float8CurrentScaling": ScalingMode.CURRENT_TENSOR_SCALING,
}
_RECIPES: list[Any] = []


class QuantizeConfig:
    """What test_layer.py asks of the configuration of a recipe."""

    COLLECTION_NAME = "fp8_metas"

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe

    def is_fp8_enabled(self) -> bool:
        return self.recipe is not None

    def get_scaling_mode(self, source: TensorSource) -> ScalingMode:
        del source
        return _MODES.get(type(self.recipe).__name__, ScalingMode.NO_SCALING)


def install() -> None:
    """Register our package under TransformerEngine's names, with all that the test imports."""
    import shardwright.interop.transformer_engine as te
    from shardwright.interop.transformer_engine import sharding

    @contextlib.contextmanager
    def autocast(enabled: bool = False, recipe: Any = None, **options: Any) -> Iterator[None]:
        own = te.recipe.DelayedScaling() if recipe is None else recipe
        with te.autocast(enabled, recipe, **options):
            _RECIPES.append(own if enabled else None)
            try:
                yield
            finally:
                _RECIPES.pop()

    def is_fp8_available(
        mode: ScalingMode = ScalingMode.DELAYED_TENSOR_SCALING,
    ) -> tuple[bool, str]:
        if mode is ScalingMode.MXFP8_1D_SCALING and ARCHITECTURE < 100:
            return False, "TE_CPU_ARCH hides MXFP8"
        names = {value: name for name, value in _MODES.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with te.autocast(enabled=True, recipe=getattr(te.recipe, names[mode])()):
                    return True, ""
            except te.recipe.LayerError as error:
                return False, str(error)

    dtypes = enum.Enum(  # type: ignore[misc]
        "DType",
        "kByte kInt32 kInt64 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat8E8M0",
    )
    register("transformer_engine", is_package=True)
    register("transformer_engine.common", is_package=True, recipe=te.recipe)
    sys.modules["transformer_engine.jax"] = te
    sys.modules["transformer_engine.jax.flax"] = te.flax
    sys.modules["transformer_engine.jax.sharding"] = sharding
    register(
        "transformer_engine.jax.attention",
        AttnSoftmaxType=SoftmaxType,
        canonicalize_attn_mask_type=str,
        make_swa_mask=visible_in_window,
    )
    register(
        "transformer_engine.jax.quantize",
        is_package=True,
        ScalingMode=ScalingMode,
        TensorSource=TensorSource,
        autocast=autocast,
        get_global_quantize_recipe=lambda: _RECIPES[-1],
        get_quantize_config_with_recipe=QuantizeConfig,
        is_fp8_available=is_fp8_available,
        update_collections=te.update_collections,
    )
    register("transformer_engine.jax.quantize.helper", DType=dtypes)
    register(
        "transformer_engine.jax.version_utils",
        TRITON_EXTENSION_MIN_JAX_VERSION="",
        is_triton_extension_supported=lambda: False,
    )


def register(name: str, *, is_package: bool = False, **attributes: Any) -> None:
    module = types.ModuleType(name)
    if is_package:
        module.__path__ = []
    module.__dict__.update(attributes)
    sys.modules[name] = module


def visible_in_window(positions_q: Any, positions_kv: Any, window: Any, dtype: Any) -> Any:
    """Return 1 where a query sees a key, `[batch, 1, q_length, kv_length]`."""
    import jax.numpy as jnp

    distance = positions_kv[:, None, None, :] - positions_q[:, None, :, None]
    left, right = (-1, -1) if window is None else window
    visible = jnp.ones(distance.shape, bool)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    return visible.astype(dtype)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
