"""Write the outputs that the pages show anew: `python -m tests.docs.update [page ...]`. Then read the diff."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from shardwright.testing import virtual_devices
from tests.docs.snippets import PAGES, rewritten

if __name__ == "__main__":
    virtual_devices(8)
    wanted = {Path(name).resolve() for name in sys.argv[1:]}
    home = Path.cwd()
    for page in PAGES:
        if wanted and page not in wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            text = rewritten(page)
            os.chdir(home)
        changed = text != page.read_text(encoding="utf-8")
        page.write_text(text, encoding="utf-8")
        print(f"{page.relative_to(home)}: {'written' if changed else 'unchanged'}")
