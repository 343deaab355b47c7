"""Write the results of TransformerEngine's own fp8 recipes, for the tests of our recipes.

    python tools/te_fp8.py CHECKOUT

CHECKOUT is a clone of NVIDIA/TransformerEngine, as for `te_goldens.py`.
"""

from __future__ import annotations

import json
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PLACE = ROOT / "tests" / "interop" / "transformer_engine" / "golden"


def main(checkout: str) -> None:
    import flax
    import jax

    from tests.interop.transformer_engine import fp8_cases as cases
    from tools import te_cpu, te_goldens

    warnings.simplefilter("ignore")
    package = te_cpu.load(checkout)
    te_cpu.multiply_blocks_in_float32()
    from transformer_engine.common import recipe

    namespace = types.SimpleNamespace(
        autocast=package.autocast, recipe=recipe, flax=te_goldens.modules_of(package)
    )
    found: dict[str, Any] = {
        "transformer_engine": te_goldens.revision(checkout),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "states": {"/".join(map(str, key)): machine(package, *key) for key in cases.STATES},
        "casts": casts(package),
        "layer": {},
        "modules": {},
    }
    for name in ("delayed", "delayed-most-recent"):
        values = cases.run_layer(namespace, name)
        found["layer"][name] = {key: value.tolist() for key, value in values.items()}
    flat = []
    for module in cases.MODULES:
        for name in cases.RECIPES:
            values = cases.run_module(namespace, module, name)
            shapes = [[key, list(value.shape)] for key, value in values.items()]
            found["modules"][f"{module}/{name}"] = shapes
            flat += [value.ravel() for value in values.values()]
    text = json.dumps(found, separators=(",", ":"))
    (PLACE / "fp8.json").write_text(text.replace('"modules"', '\n"modules"') + "\n")
    np.savez_compressed(PLACE / "fp8.npz", values=np.concatenate(flat).astype(np.float32))
    print(f"wrote {len(text)} characters and {sum(map(len, flat))} numbers")


def machine(package: Any, algorithm: str, margin: int, form: str) -> str:
    """Update the state of delayed scaling with given amax values. Return a digest of all states."""
    import jax.numpy as jnp

    from tests.interop.transformer_engine import fp8_cases as cases

    quantize = package.quantize

    def step(scale: Any, history: Any, amax: Any) -> tuple[Any, Any]:
        quantizer = quantize.DelayedScaleQuantizer(
            q_dtype=jnp.dtype(form),
            scaling_mode=quantize.ScalingMode.DELAYED_TENSOR_SCALING,
            q_layout=quantize.QuantizeLayout.ROWWISE,
            margin=margin,
            amax_compute_algo=quantize.helper.AmaxComputeAlgo(algorithm),
            scale=scale,
            amax_history=history,
        )
        quantizer.update(amax)
        return quantizer.scale, quantizer.amax_history

    return cases.histories(step)


def casts(package: Any) -> dict[str, str]:
    """Cast one array, and return digests of values and scales."""
    import jax.numpy as jnp

    from tests.interop.transformer_engine import fp8_cases as cases

    quantize = package.quantize
    x, found = jnp.asarray(cases.drawn("cast", 4, 64, 96)), {}
    modes = quantize.ScalingMode
    for form in ("float8_e4m3fn", "float8_e5m2"):
        options = {"q_dtype": jnp.dtype(form), "q_layout": quantize.QuantizeLayout.ROWWISE}
        quantizers = {
            "delayed": quantize.DelayedScaleQuantizer(
                scaling_mode=modes.DELAYED_TENSOR_SCALING, scale=jnp.asarray([7.0]), **options
            ),
            "current": quantize.CurrentScaleQuantizer(
                scaling_mode=modes.CURRENT_TENSOR_SCALING, **options
            ),
        }
        for name, quantizer in quantizers.items():
            result = quantizer.quantize(x, flatten_axis=-1)
            found[f"{name}/{form}"] = cases.digest(result.data, result.scale_inv)
        blocks = quantize.BlockScaleQuantizer(scaling_mode=modes.MXFP8_1D_SCALING, **options)
        for dim, is_other in ((2, False), (1, True)):
            result = blocks._quantize_func(x, is_colwise=is_other, flatten_axis=-1)
            exponents = np.asarray(result.scale_inv).view(np.uint8)
            found[f"blocks/{dim}/{form}"] = cases.digest(result.data, exponents)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
