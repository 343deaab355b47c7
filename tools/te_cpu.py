"""Run the JAX code of TransformerEngine on a CPU, with a stand-in for its compiled extension.

`load(root)` imports this code from a checkout. Each primitive then runs in pure JAX.
"""

from __future__ import annotations

import enum
import os
import sys
import types
from importlib import metadata
from typing import Any

ENUMS = {
    "DType": (
        "kByte kInt32 kInt64 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat8E8M0 "
        "kFloat4E2M1"
    ),
    "JAXX_Scaling_Mode": (
        "NO_SCALING DELAYED_TENSOR_SCALING MXFP8_1D_SCALING CURRENT_TENSOR_SCALING "
        "NVFP4_1D_SCALING NVFP4_2D_SCALING"
    ),
    "JAXX_Quantize_Layout": "ROWWISE COLWISE ROWWISE_COLWISE",
    "JAXX_Collective_Op": "NONE ALL_GATHER REDUCE_SCATTER",
    "JAXX_Score_Function": "SIGMOID SOFTMAX SQRTSOFTPLUS",
    "JAXX_Routing_Map_Format": "BYTEMAP BITMAP_U8",
    "NVTE_Activation_Type": (
        "GELU GEGLU SILU SWIGLU RELU REGLU QGELU QGEGLU SRELU SREGLU CLAMPED_SWIGLU GLU"
    ),
    "NVTE_Norm_Type": "LayerNorm RMSNorm",
    "NVTE_Bias_Type": "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS",
    "NVTE_Mask_Type": (
        "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK "
        "NVTE_CAUSAL_BOTTOM_RIGHT_MASK NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK"
    ),
    "NVTE_Softmax_Type": "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX",
    "NVTE_QKV_Layout": (
        "NVTE_BS3HD NVTE_BSHD_BS2HD NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_THD_T2HD NVTE_THD_THD_THD"
    ),
    "NVTE_QKV_Format": "NVTE_SBHD NVTE_BSHD NVTE_THD",
    "NVTE_Fused_Attn_Backend": (
        "NVTE_No_Backend NVTE_F16_max512_seqlen NVTE_F16_arbitrary_seqlen NVTE_FP8"
    ),
}
ANSWERS = {
    "get_device_compute_capability": 100,
    "get_cublasLt_version": 130000,
    "get_cuda_version": 13000,
    "get_cudnn_version": 91000,
    "get_num_compute_streams": 1,
    "nvte_built_with_cublasmp": False,
    "is_collective_gemm_with_cublasmp": False,
    "get_cgemm_num_max_streams": 1,
    "get_grouped_gemm_setup_workspace_size": 0,
    "initialize_cgemm_communicator": None,
}


def extension() -> types.ModuleType:
    module: Any = types.ModuleType("transformer_engine_jax")
    for title, text in ENUMS.items():
        names = [(name, value) for value, name in enumerate(text.split())]
        setattr(module, title, enum.IntEnum(title, names))
    for name, answer in ANSWERS.items():
        setattr(module, name, lambda *_, answer=answer, **__: answer)

    def format_of(layout: Any) -> Any:
        is_packed = layout.name.removeprefix("NVTE_").startswith("T")
        formats = module.NVTE_QKV_Format
        return formats.NVTE_THD if is_packed else formats.NVTE_BSHD

    module.nvte_get_qkv_format = format_of
    backend = module.NVTE_Fused_Attn_Backend.NVTE_No_Backend
    module.get_fused_attn_backend = lambda *_, **__: backend
    module.registrations = dict
    return module


def package(name: str, path: str, **attributes: Any) -> Any:
    module: Any = types.ModuleType(name)
    module.__path__ = [path]
    module.__dict__.update(attributes)
    sys.modules[name] = module
    return module


def load(root: str) -> Any:
    """Return `transformer_engine.jax` of a checkout, which is imported once."""
    if "transformer_engine.jax" in sys.modules:
        return sys.modules["transformer_engine.jax"]
    os.environ["NVTE_JAX_CUSTOM_CALLS"] = "false"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.modules["transformer_engine_jax"] = extension()
    base = f"{root}/transformer_engine"
    top = package("transformer_engine", base, __version__="0")
    top.common = package(
        "transformer_engine.common",
        f"{base}/common",
        load_framework_extension=lambda *_: None,
        is_package_installed=lambda *_: False,
    )
    version = metadata.version
    metadata.version = lambda name: "2.0.0" if name.startswith("transformer") else version(name)
    import transformer_engine.jax
    from transformer_engine.jax.cpp_extensions.base import BasePrimitive

    BasePrimitive.enabled = classmethod(lambda _: False)
    return transformer_engine.jax


def multiply_blocks_in_float32() -> None:
    """Replace JAX's block-scaled matmul, which XLA for CPU lacks, by one in float32."""
    import jax
    import jax.numpy as jnp

    def expanded(values: Any, scales: Any) -> Any:
        size = values.shape[-1] // scales.shape[-1]
        return values.astype(jnp.float32) * jnp.repeat(scales.astype(jnp.float32), size, axis=-1)

    def scaled_matmul(
        a: Any, b: Any, a_scales: Any, b_scales: Any, preferred_element_type: Any = jnp.float32
    ) -> Any:
        matmul = jnp.einsum("bmk,bnk->bmn", expanded(a, a_scales), expanded(b, b_scales))
        return matmul.astype(preferred_element_type)

    jax.nn.scaled_matmul = scaled_matmul
