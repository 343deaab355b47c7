"""The table of the README is true: its times are measured, and flax and JAX behave as it says."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwright.testing import cpu_mesh
from tests.docs.snippets import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results" / "jax-0.10.2-peers.json"

on_the_jax_of_the_table = pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="the README says what JAX 0.10.2 does"
)


def cells(start: str) -> dict[str, str]:
    """Return a row of the table by column."""
    rows = [line.strip("|").split("|") for line in README.splitlines() if line.startswith("|")]
    head, *rest = [[cell.strip() for cell in row] for row in rows]
    (row,) = (row for row in rest if row[0].startswith(start))
    return dict(zip(head, row, strict=True))


def shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


@pytest.mark.parametrize(
    ("row", "case", "ours", "peers"),
    [
        (
            "time: specs of 45,456 weights",
            "DeepSeek-V3, 45,456 leaves, 8 CPU devices",
            "first",
            {"flax (linen)": "flax logical_to_mesh_sharding", "eformer": "eformer, sizes checked"},
        ),
        (
            "time: trace 1,000 constraints",
            "1,000 constraints, 8 CPU devices",
            "shard",
            {
                "flax (linen)": "flax with_logical_constraint",
                "haliax": "haliax auto_sharded",
                "eformer": "eformer apply_logical_sharding",
            },
        ),
    ],
)
def test_times_are_those_of_the_results(
    row: str, case: str, ours: str, peers: dict[str, str]
) -> None:
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    measured = {each["what"]: each for each in rows if each["case"] == case}
    expected = {column: shown(measured[what]["seconds"]) for column, what in peers.items()}
    expected["shardwright"] = shown(measured[ours]["seconds"])
    expected["JAX by hand"] = shown(measured[ours]["against_seconds"])
    written = cells(row)
    assert {column: written[column] for column in expected} == expected
    others = set(written) - set(expected) - {""}
    assert {written[column] for column in others} == {"not measured"}


def test_versions_are_those_of_the_results() -> None:
    context = json.loads(RESULTS.read_text(encoding="utf-8"))["context"]
    text = " ".join(README.split())
    for name in ("flax", "haliax", "eformer"):
        assert f"{name} {context[name]}" in text
    assert f"JAX {context['jax']} with flax" in text


@on_the_jax_of_the_table
def test_jax_replicates_a_size_that_does_not_divide() -> None:
    mesh = cpu_mesh("tp:4")
    sharding = NamedSharding(mesh, P("tp"))
    constrained = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, sharding))
    assert constrained(jnp.ones(6)).sharding.is_fully_replicated
    with pytest.raises(ValueError, match="divi"):
        jax.device_put(np.ones(6), sharding)
    with pytest.raises(Exception, match="duplicate entries"):
        NamedSharding(mesh, P("tp", "tp"))


@on_the_jax_of_the_table
def test_flax_behaves_as_the_table_says() -> None:
    spmd = pytest.importorskip("flax.linen", reason="make docs installs flax")
    rules = (("embed", "tp"), ("mlp", "tp"))
    assert spmd.logical_to_mesh_axes(("embde",), rules=rules) == P(None)
    assert spmd.logical_to_mesh_axes(("embed", "mlp"), rules=rules) == P("tp", None)

    constrained = jax.jit(lambda x: spmd.with_logical_constraint(x, ("embed",)))
    with jax.set_mesh(cpu_mesh("tp:4")):
        with spmd.logical_axis_rules(rules):
            assert constrained(jnp.ones(6)).sharding.is_fully_replicated
            assert constrained(jnp.ones(8)).sharding.spec == P("tp")
        with spmd.logical_axis_rules((("embed", None),)):  # the program of the other rules
            assert constrained(jnp.ones(8)).sharding.spec == P("tp")
    explicit = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Explicit,))
    with (
        jax.set_mesh(explicit),
        spmd.logical_axis_rules(rules),
        pytest.raises(AssertionError, match="acts as an assert"),
    ):
        jax.jit(lambda x: spmd.with_logical_constraint(x, ("embed",)))(jnp.ones(8))
