"""`shardwright plan` and `search` of a Hugging Face `config.json`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "sliding_window": 32,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(path)


def run(words: str) -> int:
    return main(shlex.split(words))


def test_config_is_planned(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"plan {model} --strategy fsdp_tp --mesh fsdp:4,tp:2 --topology v5e:2x4 --json"
    assert run(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data["modes"]) == ["train", "prefill", "decode"]
    assert data["notes"] == [
        "model: a reference decoder with the sizes of llama: 1,443,072 parameters in bfloat16",
        "assumed: batch 8, length 64, remat full, two float32 moments",
    ]
    sources = {event["source"] for each in data["modes"].values() for event in each["events"]}
    assert {source.partition(":")[0] for source in sources} == {"decoder.py"}


@pytest.mark.full
@pytest.mark.ci
def test_options_change_the_program(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"plan {model} --strategy fsdp --mesh fsdp:4 --mode train"
    assert run(f"{words} --batch 4 --set length=32 --set remat=none --set param=float32") == 0
    out = capsys.readouterr().out
    assert "1,443,072 parameters in float32" in out
    assert "assumed: batch 4, length 32, remat none" in out


@pytest.mark.full
def test_search_takes_a_config(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"search {model} --strategy fsdp_tp --topology v5e:2x4 --axes fsdp,tp --mode train"
    assert run(f"{words} --set remat=none,full") == 0
    out = capsys.readouterr().out
    assert out.startswith("model: a reference decoder with the sizes of llama")
    assert "judged all 8 candidates" in out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--set lenght=4", ("no option 'lenght'", "length")),
        ("--set length=long", ("length='long' is not a positive integer", "fix")),
        ("--set remat=some", ("remat='some' is unknown", "none, full, dots, blocks")),
        ("--set capacity=0", ("capacity=0 is not a positive number", "fix")),
        ("--set param=int8", ("'int8' is not a dtype", "fix")),
        ("--set length=4,8", ("has 2 values", "search compares several")),
        ("--set length", ("is not NAME=A,B", "fix")),
        ("--optimizer-copies 2", ("is for a file of tensors", "fix")),
    ],
)
def test_bad_option_has_message_and_fix(
    options: str, says: tuple[str, ...], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"plan {model} --strategy fsdp --mesh fsdp:4 --mode train {options}") == 2
    error: Any = capsys.readouterr().err
    assert [text for text in says if text not in error] == []


def test_a_batch_that_does_not_divide_is_found(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"plan {model} --strategy fsdp --mesh fsdp:4 --mode train --batch 6") == 1
    assert "size 6 does not divide over fsdp=4" in capsys.readouterr().err


def test_unknown_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "mamba"}', encoding="utf-8")
    assert run(f"plan {path} --strategy fsdp --mesh fsdp:4") == 2
    error = capsys.readouterr().err
    assert "the family 'mamba' is unknown" in error
    assert "families are llama, mistral, qwen2" in error
