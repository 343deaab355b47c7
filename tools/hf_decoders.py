"""Write the logits that transformers gives for small decoders of several families.

    python -m tools.hf_decoders

Run it where transformers and PyTorch are installed. Tests load the same checkpoints with
`hf.decoder`, and compare the logits.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.interop.hf import small_decoders

ROOT = Path(__file__).resolve().parents[1]


def outputs(name: str) -> tuple[dict[str, list[int]], np.ndarray[Any, Any]]:
    """Return the shapes of the tensors by their published names, and the logits."""
    import torch
    from safetensors.numpy import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(json.dumps(small_decoders.config_of(name)), encoding="utf-8")
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        # `save_pretrained` writes the names of published checkpoints, also for experts that are
        # fused in memory.
        model.save_pretrained(folder)
        config.write_text(json.dumps(small_decoders.config_of(name)), encoding="utf-8")
        file = Path(folder, "model.safetensors")
        shapes = {key: value.shape for key, value in load_file(file).items()}
        values = small_decoders.values_of(shapes, small_decoders.CONFIGS[name]["model_type"])
        save_file(values, file, metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            tokens = torch.tensor(small_decoders.tokens(name), dtype=torch.int64)
            logits = model(input_ids=tokens).logits
    return {key: list(shape) for key, shape in shapes.items()}, logits.numpy()


def main() -> None:
    """Write both files."""
    golden = ROOT / "tests" / "interop" / "golden"
    shapes, logits = {}, {}
    for name in small_decoders.CONFIGS:
        shapes[name], logits[name] = outputs(name)
        print(name, len(shapes[name]), float(np.abs(logits[name]).max()))
    np.savez_compressed(golden / "hf_decoders.npz", **logits)
    text = json.dumps(shapes, separators=(",", ":")).replace('"model', '\n"model')
    (golden / "hf_decoders.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
