"""Write the results of TransformerEngine's own modules, for the tests of our modules.

    python tools/te_goldens.py CHECKOUT [GROUP ...]
    python tools/te_goldens.py CHECKOUT --compare CASE [CASE ...]

CHECKOUT is a clone of NVIDIA/TransformerEngine; it needs no build and no GPU. Run it where flax is
installed. `--compare` writes nothing: it runs their modules and ours in one process, and prints the
largest relative difference of a tensor, and how many tensors are equal bit for bit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PLACE = ROOT / "tests" / "interop" / "transformer_engine" / "golden"


def main(checkout: str, *groups: str) -> None:
    import flax
    import jax

    from tests.interop.transformer_engine import cases
    from tools import te_cpu

    warnings.simplefilter("ignore")
    namespace = modules_of(te_cpu.load(checkout))
    about = {
        "transformer_engine": revision(checkout),
        "jax": jax.__version__,
        "flax": flax.__version__,
    }
    PLACE.mkdir(exist_ok=True)
    signatures = {name: cases.signatures(getattr(namespace, name)) for name in cases.MODULES}
    write("signatures", {**about, "modules": signatures})
    for group, members in cases.CASES.items():
        if groups and group not in groups:
            continue
        trees, values = {}, []
        for case in members:
            try:
                result = cases.run(namespace, case)
            except Exception as error:
                raise RuntimeError(f"TransformerEngine cannot run {case}") from error
            shapes = [[name, list(value.shape)] for name, value in result.values.items()]
            values += [value.ravel() for value in result.values.values()]
            trees[case.name] = {
                "tree": result.tree,
                "values": shapes,
                "masks": result.masks,
            }
        write(group, {**about, "cases": trees})
        np.savez_compressed(PLACE / f"{group}.npz", values=np.concatenate(values))


def compare(checkout: str, *names: str) -> None:
    from shardwright.interop.transformer_engine import flax
    from tests.interop.transformer_engine import cases
    from tools import te_cpu

    warnings.simplefilter("ignore")
    namespace = modules_of(te_cpu.load(checkout))
    known = {case.name: case for members in cases.CASES.values() for case in members}
    for name in names:
        results = [cases.run(modules, known[name]).values for modules in (namespace, flax)]
        pairs = [(value, results[1][key]) for key, value in results[0].items()]
        equal = sum(np.array_equal(*pair) for pair in pairs)
        largest = max(np.max(np.abs(a - b)) / max(np.max(np.abs(a)), 1e-30) for a, b in pairs)
        print(
            f"{name}: {equal} of {len(pairs)} tensors equal, difference {largest:.1e}", flush=True
        )


def modules_of(package: Any) -> Any:
    """Return one namespace with the modules and the enums of their fields."""
    from transformer_engine.jax.attention import AttnSoftmaxType
    from transformer_engine.jax.flax.module import Softmax
    from transformer_engine.jax.softmax import SoftmaxFusionType

    more = {
        "Softmax": Softmax,
        "AttnSoftmaxType": AttnSoftmaxType,
        "SoftmaxFusionType": SoftmaxFusionType,
    }
    return types.SimpleNamespace(**{**vars(package.flax), **more})


def write(name: str, content: Any) -> None:
    path = PLACE / f"{name}.json"
    text = json.dumps(content, separators=(",", ":"))
    path.write_text(text.replace('"tree":', '\n"tree":') + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}, {len(text)} characters")


def revision(checkout: str) -> str:
    git = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return git.stdout.strip()


if __name__ == "__main__":
    if sys.argv[2:3] == ["--compare"]:
        compare(sys.argv[1], *sys.argv[3:])
    else:
        main(*sys.argv[1:])
