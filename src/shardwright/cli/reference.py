"""Make the programs of a Hugging Face `config.json`: those of a decoder with the same sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jax

from shardwright.errors import ShardingError, StrategyError, did_you_mean
from shardwright.plan.planner import Program
from shardwright.strategy.foreign_files import read_json

# The options that `--batch` and `--set` may give. Those in `_WHOLE` are positive integers.
_WHOLE: Final = ("batch", "length", "chunks", "repeats")
_OPTIONS: Final = (*_WHOLE, "remat", "param", "capacity")
_LENGTH: Final = 4096
_MODEL: Final = "model: a reference decoder with the sizes of"


def is_config(model: str) -> bool:
    """Tell whether a file is the `config.json` of a model, or a folder with one.

    A JSON file may also be a file of tensors.
    """
    path = _config_path(model)
    if path.suffix != ".json":
        return False
    if path.name == "config.json":
        return True
    try:
        data = read_json(path)
    except StrategyError:
        return False  # the reader of tensors reports what is wrong
    return isinstance(data, dict) and "model_type" in data


def _config_path(model: str) -> Path:
    """Return the file of a model that is given as a file, or as a folder with a `config.json`."""
    path = Path(model)
    inside = path / "config.json"
    return inside if inside.is_file() else path


def read_reference(
    model: str, options: Mapping[str, Any], *, devices: int
) -> tuple[dict[str, Program], list[str]]:
    """Return the programs of the reference decoder by mode, and lines that state the assumptions.

    Args:
      model: Path of the `config.json`, or of its folder.
      options: `batch`, `length`, `remat`, `chunks`, `repeats`, `param` and `capacity`, as integers
        or text.
      devices: Number of devices. It is the default of the batch: one sequence per device.

    Raises:
      StrategyError: The file or an option is not valid.
    """
    # Imported here, since no other command needs the layers.
    from shardwright.interop.hf import programs, read_config

    _check(options)
    # Missing options have the defaults of `programs`.
    keywords = {key: options[key] for key in ("remat", "chunks", "repeats") if key in options}
    sizes = read_config(
        str(_config_path(model)),
        param=options.get("param"),
        capacity=float(options.get("capacity", 1)),
    )
    batch = options.get("batch", devices)
    # Plan at most 4,096 tokens by default, because a model may state a length of a million.
    length = options.get("length", min(sizes.longest, _LENGTH))
    try:
        by_mode = programs(sizes, batch=batch, length=length, **keywords)
    except ShardingError:
        raise
    except Exception as error:
        what = f"the reference decoder of {model} cannot be built: {error}"
        raise StrategyError(what, fix="pass file.py:function") from error
    # Only shapes: nothing of the decoder is computed.
    leaves = jax.tree.leaves(by_mode["train"].shapes[0])
    count = sum(math.prod(leaf.shape) for leaf in leaves)
    remat = keywords.get("remat", "full")
    return by_mode, [
        f"{_MODEL} {sizes.family}: {count:,} parameters in {sizes.dtypes.param}",
        f"assumed: batch {batch}, length {length}, remat {remat}, two float32 moments",
        *(f"differs: {note}" for note in sizes.notes),
    ]


def _check(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in _OPTIONS:
            hint = did_you_mean(name, _OPTIONS)
            fix = f"{hint} options are {', '.join(_OPTIONS)}".strip()
            raise StrategyError(f"a config.json has no option {name!r:.40}", fix=fix)
        if name in _WHOLE and (type(value) is not int or value < 1):
            what = f"{name}={value!r:.40} is not a positive integer"
            raise StrategyError(what, fix=f"{name}=64")
        if name == "capacity" and not _is_positive(value):
            what = f"capacity={value!r:.40} is not a positive number"
            raise StrategyError(what, fix="capacity=1.25")


def _is_positive(value: Any) -> bool:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return False
    return math.isfinite(number) and number > 0
