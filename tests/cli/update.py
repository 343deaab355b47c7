"""Write the golden files anew: `python -m tests.cli.update`. Then read the diff."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.cli.cases import CASES, GOLDEN, OTHERS, golden

if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, line in (CASES | OTHERS).items():
        with tempfile.TemporaryDirectory() as folder:
            (GOLDEN / f"{name}.txt").write_text(golden(line, Path(folder)), encoding="utf-8")
