"""`python -m benchmarks.fp8`: losses of one model in float32, bfloat16 and fp8.

The model is a stack of blocks with the sizes of the demo, on the demo's text: the sources of the
standard library of Python. All runs have the same initial parameters and the same batches. The
results go to `benchmarks/results/fp8/losses.json`, and a test compares the page with them.
"""

from __future__ import annotations

import functools
import json
import platform
import sys
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import optax

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results" / "fp8" / "losses.json"
STEPS, BATCH, LENGTH, SEED = 500, 8, 64, 0
RUNS: Final = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "delayed": ("bfloat16", "delayed"),
    "current": ("bfloat16", "current"),
    "mxfp8": ("bfloat16", "mxfp8"),
}


def config_of(compute: str, recipe: str | None) -> Any:
    from shardwright.layers import attention_block, mlp_block, transformer_block
    from shardwright.layers.dtypes import Dtypes

    dtypes = Dtypes(param="float32", compute=compute)
    return transformer_block.TransformerConfig(
        layers=2,
        # MXFP8 has blocks of 32 elements, which need a head dim of at least 32. So there are 4
        # heads, not 8 as in the demo.
        attention=attention_block.AttentionConfig(
            embed=128, heads=4, kv_heads=2, head_dim=32, dtypes=dtypes, recipe=recipe
        ),
        mlp=mlp_block.MlpConfig(embed=128, hidden=384, dtypes=dtypes, recipe=recipe),
    )


def losses(config: Any, *, steps: int = STEPS) -> list[float]:
    """Train, and return the loss of each step in nats per byte."""
    sys.path.insert(0, str(ROOT / "examples"))
    from decoder.text import stdlib_text, text_batches

    from shardwright.layers import embedding, fp8, loss, norm, transformer_block
    from shardwright.trees.initialize import initializer

    specs = {
        "embedding": embedding.specs(256, 128),
        "stack": transformer_block.specs(config),
        "norm": norm.specs(norm.RMS, 128),
    }
    params = jax.jit(initializer(specs))(jax.random.key(SEED))
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 50, STEPS))
    moments, scaling = optimizer.init(params), transformer_block.init_scaling(config)
    recipe = config.mlp.recipe

    def mean_loss(params: Any, channel: Any, scaling: Any, batch: Any) -> Any:
        state = transformer_block.StackState(scaling=fp8.uses(scaling, channel))
        x = embedding.apply(params["embedding"], batch["inputs"])
        x, after = transformer_block.apply(config, params["stack"], x, state=state)
        x = norm.apply(norm.RMS, params["norm"], x)
        result = loss.cross_entropy(x, params["embedding"], batch["targets"], tied=True)
        return result.mean, after.scaling

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params: Any, moments: Any, scaling: Any, batch: Any) -> Any:
        (value, seen), (grads, sent) = jax.value_and_grad(mean_loss, (0, 1), has_aux=True)(
            params, fp8.new_channel(scaling), scaling, batch
        )
        changes, moments = optimizer.update(grads, moments, params)
        scaling = fp8.update(recipe, scaling, seen, sent)
        return optax.apply_updates(params, changes), moments, scaling, value

    values = []
    batches = text_batches(stdlib_text(), batch=BATCH, length=LENGTH, seed=SEED)
    for _, batch in zip(range(steps), batches, strict=False):
        params, moments, scaling, value = step(params, moments, scaling, batch)
        values.append(float(value))
    fp8.check(scaling)
    return values


def main() -> None:
    table = {}
    for name, (compute, recipe) in RUNS.items():
        values = losses(config_of(compute, recipe))
        assert np.isfinite(values).all(), name
        windows = {"first": values[0], "at 100": values[80:100], "at 500": values[450:500]}
        table[name] = {key: round(float(np.mean(value)), 4) for key, value in windows.items()}
        print(name, table[name], flush=True)
    context = {
        "jax": jax.__version__,
        "machine": platform.machine(),
        "platform": jax.default_backend(),
        "steps": STEPS,
        "batch": BATCH,
        "length": LENGTH,
    }
    RESULTS.write_text(json.dumps({"context": context, "losses": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
