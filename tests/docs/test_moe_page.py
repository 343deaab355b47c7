"""The page on MoE shows the results of `benchmarks.moe`, and these are as they should be.

`--update-golden` writes the tables of the page.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import moe as benchmark
from benchmarks import moe_by_hand
from shardwright.layers import mlp_block, moe
from shardwright.testing import cpu_mesh
from shardwright.testing.golden import Golden
from shardwright.vocabulary.units import bytes_text
from tests.docs.snippets import ROOT
from tests.layers import blocks
from tests.layers.moe.reference import config, parameters, tokens

PAGE = ROOT / "docs" / "moe.md"


def results() -> Any:
    return json.loads(benchmark.RESULTS.read_text(encoding="utf-8"))


def with_rows(page: str, header: str, rows: list[list[str]]) -> str:
    """Return the page with the rows of one table replaced."""
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    pattern = re.compile(rf"(\| {re.escape(header)} .*\n\| ---.*\n)((?:\|.*\n)*)")
    assert len(pattern.findall(page)) == 1, header
    return pattern.sub(lambda found: found[1] + table, page)


def test_the_page_shows_the_results(golden: Golden) -> None:
    page = PAGE.read_text(encoding="utf-8")
    programs = [
        [
            f"`{row['layer']}`" if row["layer"] == "layers.moe" else row["layer"],
            row["pass"],
            ", ".join(f"{count} {kind}" for kind, count in row["collectives"].items()),
            bytes_text(row["sent"]),
            bytes_text(row["temporaries"]),
        ]
        for row in results()["programs"]
    ]
    golden.file(PAGE, with_rows(page, "layer | pass", programs))


def test_results_meet_the_targets() -> None:
    programs = {(row["layer"], row["pass"]): row for row in results()["programs"]}
    for what, collectives in {
        "forward": {"all-to-all": 2},
        "training": {"all-to-all": 4, "all-reduce": 2},
    }.items():
        ours, theirs = programs["layers.moe", what], programs["one-hot einsum", what]
        assert ours["collectives"] == collectives
        assert ours["sent"] < theirs["sent"] / 5
        assert ours["temporaries"] < theirs["temporaries"] / 5
    assert {row["verdict"] for row in results()["trace"]} == {"ok"}
    assert {row["target"]["at_most"] for row in results()["trace"]} == {1.15}


@pytest.mark.full
def test_layers_by_hand_are_the_same_layers() -> None:
    """Otherwise their trace times could not be compared."""
    small = config(capacity=moe.CapacityFactor(4.0))
    params, x = parameters(small), tokens(8, 4, 16)
    mesh = cpu_mesh("fsdp:2,ep:4")
    wanted, state = moe.apply(small, params, x)
    assert state.stats is not None
    assert int(state.stats.dropped) == 0
    # Four tokens per device, and one slot for each at every expert.
    sent = jax.jit(lambda p, x: moe_by_hand.all_to_all_moe(mesh, 2, 4, p, x))(params, x)
    blocks.assert_close(sent, wanted)
    one_hot = jax.jit(lambda p, x: moe_by_hand.one_hot_moe(mesh, 2, 32, p, x))(params, x)
    blocks.assert_close(one_hot, wanted)
    mlp = mlp_block.MlpConfig(embed=16, hidden=32)
    weights = blocks.random_params(mlp_block.specs(mlp))
    by_hand = jax.jit(lambda p, x: moe_by_hand.mlp(cpu_mesh("fsdp:2,tp:4"), p, x))
    blocks.assert_close(by_hand(weights, x), np.asarray(mlp_block.apply(mlp, weights, x)[0]))
