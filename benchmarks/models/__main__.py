"""`python -m benchmarks.models CHECKOUTS [NAME ...] [--json FILE]`: train models of others.

Each model is trained for 20 steps, unsharded and under three meshes on 8 virtual CPU devices. The
command prints the bytes of parameters per device beside those that the model's own rules give, and
exits with 1 if losses differ by more than 1e-6 relative, or a user writes more than 3 lines.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardwright as sw
from benchmarks.models.case import MESHES, TOKENS, Case, Sharded, bytes_by, held
from benchmarks.models.cases import CASES
from shardwright.show.tables import table
from shardwright.testing import virtual_devices

STEPS: Final = 20
TOLERANCE: Final = 1e-6
LINES: Final = 3
HEAD: Final = ("model", "mesh", "bytes", "own rules", "all", "difference", "lines", "")


def losses(sharded: Sharded, pm: sw.PartitionManager | None, *, epsilon: float) -> list[float]:
    """Return the loss of each step. The batch is sharded by the manager, if there is one."""
    optimizer = optax.adamw(1e-3, eps=epsilon)

    @jax.jit
    def step(params: Any, state: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = sharded.forward(params, tokens).astype(jnp.float32)
            chosen = jax.nn.one_hot(jnp.roll(tokens, -1, 1), logits.shape[-1])
            return -(jax.nn.log_softmax(logits) * chosen).sum(-1).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    with sharded.context:
        tokens = jnp.asarray(TOKENS) if pm is None else pm.shard(TOKENS, sw.BATCH, sw.LENGTH)
        params, found = sharded.params, []
        state = optimizer.init(params)
        for _ in range(STEPS):
            params, state, value = step(params, state, tokens)
            found.append(float(value))
    return found


def compare(case: Case) -> list[dict[str, Any]]:
    """Train a model unsharded and under each mesh, and return one row for each mesh."""
    mesh = jax.typeof(jax.tree.leaves(case.params)[0]).sharding.mesh
    alone = contextlib.nullcontext() if mesh.empty else jax.set_mesh(_mesh(case.params))
    plain = Sharded(params=case.params, forward=case.forward, context=alone)
    expected = np.asarray(losses(plain, None, epsilon=case.epsilon))
    assert expected[-1] < expected[0], "training does not lower the loss"
    rows = []
    for text, sizes in MESHES.items():
        pm = case.manager(text)
        sharded = case.shard(pm)
        found = np.asarray(losses(sharded, pm, epsilon=case.epsilon))
        row = {
            "model": case.name,
            "source": case.source,
            "mesh": text,
            "bytes": held(sharded.params),
            "own": own_bytes(case, sizes),
            "all": sum(leaf.nbytes for leaf in jax.tree.leaves(case.params)),
            "difference": float(np.max(np.abs(found - expected) / np.abs(expected))),
            "lines": case.lines,
            "epsilon": case.epsilon,
        }
        rows.append(row)
        print(*table([HEAD, cells(row)]), sep="\n", flush=True)
    return rows


def _mesh(params: Any) -> jax.sharding.Mesh:
    return jax.tree.leaves(params)[0].sharding.mesh


def own_bytes(case: Case, sizes: tuple[int, int, int]) -> int | str:
    """Return the bytes per device by the model's own rules, or why there are none."""
    shardings = case.own(sizes)
    if shardings is None:
        return "no rules"
    try:
        return bytes_by(case.params, shardings)
    except ValueError as error:
        return f"fails: {str(error).splitlines()[0][:60]}"


def verdict(row: dict[str, Any]) -> str:
    """Return `ok`, or what is missed."""
    missed = []
    if not row["difference"] <= TOLERANCE:
        missed.append("DIFFERS")
    if row["lines"] > LINES:
        missed.append("LONG")
    return " ".join(missed) or "ok"


def cells(row: dict[str, Any]) -> list[str]:
    """Return the row of the table."""
    own = row["own"] if isinstance(row["own"], str) else f"{row['own']:,}"
    sizes = [f"{row['bytes']:,}", own, f"{row['all']:,}"]
    last = [f"{row['difference']:.1e}", str(row["lines"]), verdict(row)]
    return [row["model"], row["mesh"], *sizes, *last]


def commits(checkouts: Path) -> dict[str, str]:
    """Return the commit of each checkout that is a clone."""
    found = {}
    for folder in sorted(path for path in checkouts.iterdir() if (path / ".git").exists()):
        command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        found[folder.name] = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("checkouts", type=Path, help="folder with the checkouts")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--json", type=Path, help="file for the rows; rows of other models stay")
    arguments = parser.parse_args()
    virtual_devices(8)
    rows = [
        row
        for name in arguments.names or CASES
        for row in compare(CASES[name](arguments.checkouts))
    ]
    print(*table([HEAD, *map(cells, rows)]), sep="\n")
    if arguments.json is not None:
        write(arguments.json, rows, commits(arguments.checkouts))
    return any(verdict(row) != "ok" for row in rows)


def write(path: Path, rows: list[dict[str, Any]], clones: dict[str, str]) -> None:
    """Write rows to a file, which keeps the rows of other models."""
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    names = {row["model"] for row in rows}
    kept = [row for row in old["rows"] if row["model"] not in names]
    libraries = ("jax", "flax", "equinox", "haliax", "optax")
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in libraries}
    context = {"versions": versions, "commits": {**old.get("commits", {}), **clones}}
    text = json.dumps({**context, "rows": [*kept, *rows]}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
