"""The families of models, by the `model_type` of their `config.json`.

One row says which tensors a checkpoint has, which of them are the parameters of the decoder, and
how the configuration becomes the configs of the decoder's blocks. `defaults` has what a
configuration may leave out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from shardwright.errors import CheckpointError, LayerError, StrategyError, same_spelling
from shardwright.interop.hf import tensors
from shardwright.interop.hf.config import complete
from shardwright.interop.hf.model import sizes as readers_of
from shardwright.interop.hf.model.sizes import Config, Sizes
from shardwright.interop.hf.tensors import Tensors
from shardwright.layers.dtypes import Dtypes
from shardwright.strategy.foreign_files import read_json


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models.

    Attributes:
      tensors: The tensors of its checkpoints. None: they cannot be read.
      read: Function that returns the sizes of its decoder. None: it has none here.
    """

    tensors: Tensors | None = None
    read: Callable[[Config], Sizes] | None = None


_LLAMA = Family(tensors=tensors.LLAMA, read=readers_of.llama)
_QWEN = Family(tensors=tensors.QWEN, read=readers_of.qwen)
_QWEN_MOE = Family(tensors=tensors.QWEN_MOE, read=readers_of.qwen)
# Gemma 3 has the same names as Gemma 2, and norms of queries and keys besides.
_GEMMA_2 = Family(tensors=tensors.GEMMA_2, read=readers_of.gemma)
_DEEPSEEK = Family(tensors=tensors.DEEPSEEK, read=readers_of.deepseek)
FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": _LLAMA,
        # They multiply the residual, or leave out rotations, which the decoder does not do.
        **dict.fromkeys(("smollm3", "granite"), Family(tensors=tensors.LLAMA)),
        "qwen2": _QWEN,
        "qwen3": _QWEN,
        "qwen2_moe": _QWEN_MOE,
        "qwen3_moe": _QWEN_MOE,
        "gemma": Family(tensors=tensors.GEMMA, read=readers_of.gemma),
        "gemma2": _GEMMA_2,
        # A model of text and images. Its decoder of text is planned.
        "gemma3": Family(read=readers_of.gemma),
        "gemma3_text": _GEMMA_2,
        "mixtral": Family(tensors=tensors.MIXTRAL, read=readers_of.mixtral),
        "deepseek_v2": _DEEPSEEK,
        "deepseek_v3": _DEEPSEEK,
        "gpt_oss": Family(tensors=tensors.GPT_OSS, read=readers_of.gpt_oss),
        "bert": Family(tensors=tensors.BERT),
    }
)


def read_config(path: str, *, param: str | None = None, capacity: float | None = 1.0) -> Sizes:
    """Return the sizes of a configuration.

    Args:
      path: The file, `config.json`.
      param: Dtype of stored parameters, with matmuls in bfloat16. Defaults to the configuration's
        dtype for both.
      capacity: Capacity factor: capacity of an expert ÷ its tokens under an even load. None: no
        token is dropped.

    Raises:
      StrategyError: The file cannot be read, its family is not known, or a size is not valid.
    """
    return sizes_of(read_json(Path(path)), Path(path).name, param=param, capacity=capacity)


def sizes_of(values: Any, source: str, *, param: str | None, capacity: float | None) -> Sizes:
    """Return the sizes of the content of a `config.json`; see `read_config`."""
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise StrategyError(
            f"{source} has no model_type", fix="pass the config.json of a Hugging Face model"
        )
    values, notes = complete(values)
    kind = values["model_type"]
    readers = {name: family.read for name, family in FAMILIES.items() if family.read}
    if kind not in readers:
        hint = same_spelling(kind, readers)
        raise StrategyError(
            f"{source}: the family {kind!r:.60} is unknown",
            fix=f"{hint} families are {', '.join(readers)}; or pass file.py:function".strip(),
        )
    config = Config(values, source, _dtypes(values, param, source), capacity)
    sizes = readers[kind](config)
    method = config.mapping("quantization_config").get("quant_method")
    # Logits differ by the rounding of the weights.
    quantized = (f"weights are planned unquantized; the model's are {method}",) if method else ()
    return dataclasses.replace(
        sizes,
        notes=(*notes, *sizes.notes, *sizes.differs, *quantized),
        differs=(*sizes.differs, *quantized),
    )


def _dtypes(values: Mapping[str, Any], param: str | None, source: str) -> Dtypes:
    # `dtype` is the newer name of `torch_dtype` in transformers.
    own = values.get("torch_dtype") or values.get("dtype") or "bfloat16"
    compute = own if param is None else "bfloat16"
    try:
        return Dtypes(param=param or own, compute=compute)
    except LayerError as error:
        raise StrategyError(
            f"{source}: {param or own!r:.40} is not a dtype of parameters", fix="param=bfloat16"
        ) from error


_TEXT_FIX: Final = (
    "save the decoder of text alone, with transformers:\n"
    "whole = AutoModelForImageTextToText.from_pretrained(folder)\n"
    "text = AutoModelForCausalLM.from_config(whole.config.text_config)\n"
    "text.model.load_state_dict(whole.model.language_model.state_dict())\n"
    "text.lm_head.load_state_dict(whole.lm_head.state_dict())\n"
    'text.save_pretrained("text")'
)


def tensors_of(config: Mapping[str, Any]) -> Tensors:
    """Return the tensors of the model that a `config.json` describes.

    Raises:
      CheckpointError: Its `model_type` is absent or unknown.
    """
    kind = config.get("model_type")
    tables = {name: family.tensors for name, family in FAMILIES.items() if family.tensors}
    if isinstance(kind, str) and kind in tables:
        return tables[kind]
    known = ", ".join(tables)
    parts = [key for key in ("text_config", "vision_config", "audio_config") if config.get(key)]
    if parts:
        raise CheckpointError(
            f"config.json: the model {kind!r} is more than a decoder of text: it has "
            f"{', '.join(parts)}. The tensors of such models cannot be read",
            fix=_TEXT_FIX,
        )
    # Models differ by one digit, so only another spelling of the same name is suggested.
    meant = same_spelling(kind, tables) if isinstance(kind, str) else ""
    hint = f" ({meant})" if meant else ""
    raise CheckpointError(
        f"config.json: the model_type {kind!r} is unknown{hint}",
        fix=f"the known ones are {known}\n"
        "if the tensors have the names of one of these, write it as model_type",
    )
