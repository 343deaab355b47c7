"""What messages suggest for mistakes that are easy to make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

import shardwright as sw
from shardwright.errors import did_you_mean
from tests.cli.cases import run

P = jax.P
MESH = {"dp": 4, "tp": 2}


def manager(preset: str = "fsdp_tp", mesh: str = "fsdp:4,tp:2") -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset(preset), mesh=sw.abstract_mesh(mesh))


def strategy(**tables: object) -> sw.AxisRules:
    return sw.Strategy(version=1, mesh=MESH, **tables).compile()


def router(*axes: str, preset: str = "moe_ep", **options: object) -> object:
    return manager(preset, "fsdp:2,ep:4").resolve(axes, shape=(8,) * len(axes), **options)


FLAX = (
    r"mesh axis 'embed' is not in the mesh\n.*\n *fix   name a mesh axis: the mesh has fsdp, tp\. "
    r"For logical names write the axes themselves, such as \(EMBED, MLP_INTERMEDIATE\), "
    r"or translate flax's with flax\.linen\.logical_to_mesh"
)

SLIPS: dict[str, tuple[Callable[[], object], str]] = {
    "preset of None": (
        lambda: sw.Strategy.preset(None),
        r"^the name of a preset must be text, got None\n  fix   presets are ddp, fsdp, ",
    ),
    "preset of a path": (
        lambda: sw.Strategy.preset(Path("fsdp")),
        r"must be text, got PosixPath\('fsdp'\)\n  fix   .*Strategy\.load reads a file",
    ),
    "preset with an ending": (
        lambda: sw.Strategy.preset("fsdp.toml"),
        r"no preset 'fsdp\.toml'\n  fix   did you mean 'fsdp'\?",
    ),
    "dpp in a rule": (lambda: strategy(rules={"batch": "dpp"}), r"fix   did you mean 'dp'\?"),
    "dpp for an axis": (
        lambda: manager().resolve(("dpp",)),
        r"unknown axis 'DPP'\n  fix   did you mean 'DP'\?",
    ),
    "dpp as a key": (
        lambda: strategy(rules={"dpp": "dp"}),
        r"rules\.dpp: unknown axis 'dpp'\n  fix   did you mean 'dp'\?",
    ),
    "the name of another library": (
        lambda: manager().resolve(("mlp",)),
        r"unknown axis 'MLP'\n  fix   did you mean 'MLP_INTERMEDIATE'\?",
    ),
    "the name of another library as a key": (
        lambda: strategy(rules={"mlp": "tp"}),
        r"rules\.mlp: unknown axis 'mlp'\n  fix   did you mean 'mlp_intermediate'\?",
    ),
    "a name with two meanings": (
        lambda: manager().resolve(("seq",)),
        r"unknown axis 'SEQ'\n  fix   did you mean 'LENGTH' or 'QUERY_LENGTH'\?",
    ),
    "a parallelism axis for an axis": (
        lambda: manager().resolve(("model",)),
        r"unknown axis 'MODEL'\n  fix   did you mean 'EMBED' or 'TP'\?",
    ),
    "dpp in a spec": (
        lambda: manager(mesh="dp:8").resolve(P("dpp"), shape=(8,)),
        r"'dpp' is not in the mesh\n.*\n  fix   did you mean 'dp'\?",
    ),
    "dp 2": (
        lambda: sw.abstract_mesh("dp 2"),
        r'part \'dp 2\' has no size\n  dp 2\n  \^\n  fix   write "dp:2"$',
    ),
    "dp 2,tp 4": (
        lambda: sw.abstract_mesh("dp 2,tp 4"),
        r'fix   write "dp:2"\n(.|\n)*fix   write "tp:4"$',
    ),
    "dp 2 tp 4": (lambda: sw.abstract_mesh("dp 2 tp 4"), r'fix   write "dp:2,tp:4"$'),
    "dp:2 tp:4": (
        lambda: sw.abstract_mesh("dp:2 tp:4"),
        r"size '2 tp:4' is not an integer\n.*\n.*\n  fix   write \"dp:2,tp:4\"$",
    ),
    "dp2": (lambda: sw.abstract_mesh("dp2"), r'fix   write "dp:2"$'),
    "dp = 2": (lambda: sw.abstract_mesh("dp = 2"), r'fix   write "dp:2"$'),
    "dp": (lambda: sw.abstract_mesh("dp"), r'fix   write "dp:2"$'),
    "__DP__": (
        lambda: manager().resolve(("__DP__",)),
        r"unknown axis '__DP__'\n  fix   write DP, whose value is '__DATA_PARALLEL__'$",
    ),
    "__batch__": (
        lambda: manager().resolve(("__batch__",)),
        r"unknown axis '__batch__'\n  fix   write BATCH, whose value is '__BATCH__'$",
    ),
    "__DP__ as a key": (
        lambda: strategy(rules={"__DP__": "dp"}),
        r"unknown axis '__DP__'\n  fix   did you mean 'dp'\?$",
    ),
    "__batch__ as a key": (
        lambda: strategy(rules={"__batch__": "dp"}),
        r"unknown axis '__batch__'\n  fix   did you mean 'batch'\?$",
    ),
    "__DP__ in a rule": (lambda: strategy(rules={"batch": "__DP__"}), r"fix   did you mean 'dp'\?"),
    "__DATA_PARALLEL__ in a rule": (
        lambda: strategy(rules={"batch": "__DATA_PARALLEL__"}),
        r"fix   did you mean 'dp'\?",
    ),
    "JSON for TOML": (
        lambda: sw.Strategy.loads('{"version": 1}'),
        r'fix   this is JSON: pass format="json" to loads, or name the file \.json$',
    ),
    "JSON in lines": (
        lambda: sw.Strategy.loads('\n{\n "version": 1\n}\n'),
        r'fix   this is JSON: pass format="json"',
    ),
    "TOML for JSON": (
        lambda: sw.Strategy.loads("version = 1", format="json"),
        r'fix   if this is TOML, pass format="toml" to loads',
    ),
    "YAML": (
        lambda: sw.Strategy.loads("version: 1", format="yaml"),
        r"unknown format 'yaml'\n  fix   write \"toml\" or \"json\"",
    ),
    "a path for a text": (
        lambda: sw.Strategy.loads("fsdp.toml"),
        r"fix   Strategy\.load\('fsdp\.toml'\) reads a file",
    ),
    "flax in a spec": (lambda: manager().resolve(P("embed", "mlp"), shape=(8, 8)), FLAX),
    "flax in shard": (
        lambda: manager().shard(np.ones((8, 8), np.float32), P("embed", "mlp")),
        FLAX,
    ),
    "flax in a tree": (
        lambda: manager().shardings({"w": np.ones((8, 8))}, {"w": P("embed", "mlp")}),
        FLAX,
    ),
    "router logits": (
        lambda: router(sw.BATCH, sw.QUERY_LENGTH, sw.EXPERT),
        r"fix   router weights and logits end in EXPERT_GATE: write it in place of EXPERT",
    ),
    "router weights": (
        lambda: router(sw.EMBED, sw.EXPERT, role="param"),
        r"fix   router weights and logits end in EXPERT_GATE: write it in place of EXPERT",
    ),
    "router logits, served": (
        lambda: router(sw.BATCH, sw.QUERY_LENGTH, sw.EXPERT, preset="serve_tp", mode="decode"),
        r"fix   router weights and logits end in EXPERT_GATE: write it in place of EXPERT",
    ),
}


@pytest.mark.parametrize("name", SLIPS)
def test_fix_of_a_slip(name: str) -> None:
    call, says = SLIPS[name]
    with pytest.raises(sw.ShardingError, match=says):
        call()


def test_expert_gate_is_not_advised_elsewhere() -> None:
    with pytest.raises(sw.AxisConflictError, match="ep is taken by dim 0 BATCH") as caught:
        router(sw.BATCH, sw.EXPERT, sw.CAPACITY)
    assert "EXPERT_GATE" in str(caught.value)
    with pytest.raises(sw.AxisConflictError, match="fsdp is taken by dim 0 BATCH") as caught:
        router(sw.BATCH, sw.EXPERT_GATE, sw.CAPACITY)
    assert "router weights" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("dpp", ["dp", "fsdp", "tp", "ep", "sp", "pp"], "dp"),
        ("ttp", ["dp", "fsdp", "tp", "ep", "sp", "pp"], "tp"),
        ("fdsp", ["dp", "fsdp"], "fsdp"),
        ("HEAD", ["head", "HEAD_DIM"], "head"),
        ("zzz", ["dp"], ""),
    ],
)
def test_closest_name(name: str, known: list[str], meant: str) -> None:
    assert did_you_mean(name, known) == (f"did you mean {meant!r}?" if meant else "")


# The command line.


def test_presets_without_an_action_lists_them(tmp_path: Path) -> None:
    assert run("presets", tmp_path) == run("presets list", tmp_path)
    assert run("presets", tmp_path)[0] == 0
    assert run("presets --json", tmp_path) == run("presets list --json", tmp_path)


@pytest.mark.parametrize("command", ["", "explain", "check", "diff", "presets", "schema"])
@pytest.mark.parametrize("columns", [60, 100])
def test_help_follows_the_width_of_the_terminal(
    command: str, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run(f"{command} --help", tmp_path)
    prose = [line for line in out.splitlines() if not line.startswith("  ")]
    assert code == 0
    assert [line for line in prose if len(line) > columns] == []
    monkeypatch.setenv("COLUMNS", "200")
    assert len(run(f"{command} --help", tmp_path)[1].splitlines()) <= len(out.splitlines())


def test_control_characters_are_escaped() -> None:
    text = "\x1b[2J\ud800"
    error = sw.StrategyError(
        f"rule {text}", path=text, axis=text, rule=text, fix=text, snippet=text
    )
    message = str(error)
    assert message.count(r"\x1b[2J\ud800") == 5
    assert all(line.isprintable() for line in message.split("\n"))
    assert error.path == text
