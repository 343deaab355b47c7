"""`python -m benchmarks.inference CHECKOUTS [NAME ...] [--json FILE]`: infer published models.

The axes of each model of `benchmarks.models` are inferred with seeds on its inputs alone, and
compared with those in `right_axes.py`. The command exits with 1 if a name is wrong and not marked
as a guess, if two operations name a dim differently, or if less than 98 % of all dims are right.

`python -m benchmarks.inference --layers 61 [--json FILE]` compares the time of inference for a
decoder of so many unrolled layers with the time of its trace alone. It exits with 1 if the median
of the ratios is more than 1.5.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.inference.names import rows_of
from benchmarks.inference.seconds import ratios
from benchmarks.models.__main__ import commits
from benchmarks.models.cases import CASES
from shardwright.show.tables import table
from shardwright.testing import virtual_devices

SHARE: Final = 0.98
LIMIT: Final = 1.5
HEAD: Final = ("model", "dims", "right", "guesses", "open", "wrong, not marked", "conflicts")


def names(checkouts: Path, chosen: list[str]) -> tuple[list[Mapping[str, Any]], bool]:
    """Print the table of models; return its rows, and whether they are within the limits."""
    rows = [row for name in chosen or CASES for row in rows_of(name, checkouts)]
    keys = HEAD[1:]
    total = {"model": "all", **{key: sum(row[key] for row in rows) for key in keys}}
    cells = [[str(row[key]) for key in HEAD] for row in (*rows, total)]
    print(*table([HEAD, *cells]), sep="\n")
    for row in rows:
        print(*(f"{row['model']}: {text}" for text in row["differing"]), sep="\n", end="")
    is_ok = total["right"] >= SHARE * total["dims"]
    return rows, is_ok and not total["wrong, not marked"] and not total["conflicts"]


def seconds(layers: int) -> tuple[Mapping[str, Any], bool]:
    """Print how long inference takes; return that, and whether it is within the limit."""
    row = ratios(layers)
    print(
        f"{layers} layers: inference takes {row['ratio']:.2f} times the trace alone "
        f"(median of {row['runs']}, from {row['least']:.2f} to {row['most']:.2f}; "
        f"{row['inference']:.2f} s and {row['trace']:.2f} s)"
    )
    return row, row["ratio"] <= LIMIT


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inference", description=__doc__)
    parser.add_argument("checkouts", type=Path, nargs="?", help="folder with the checkouts")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--layers", type=int, help="measure the time for so many layers")
    parser.add_argument("--json", type=Path, help="file for the results; other results stay")
    arguments = parser.parse_args()
    if (arguments.layers is None) == (arguments.checkouts is None):
        parser.error("pass CHECKOUTS or --layers")
    virtual_devices(8)
    found: dict[str, Any] = {}
    if arguments.layers is not None:
        found["seconds"], is_ok = seconds(arguments.layers)
    else:
        found["names"], is_ok = names(arguments.checkouts, arguments.names)
        found["commits"] = commits(arguments.checkouts)
    if arguments.json is not None:
        old = json.loads(arguments.json.read_text("utf-8")) if arguments.json.exists() else {}
        versions = {"python": platform.python_version(), "jax": importlib.metadata.version("jax")}
        text = json.dumps({**old, "versions": versions, **found}, indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return not is_ok


if __name__ == "__main__":
    sys.exit(main())
