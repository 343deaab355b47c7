"""Write `messages.txt` anew from what the cases say now: `python -m tests.bad_input.update`. Read the difference."""

from __future__ import annotations

import tempfile
from pathlib import Path

from shardwright.testing import virtual_devices


def main() -> None:
    virtual_devices(8)
    from tests.bad_input.scene import make_scene, message
    from tests.bad_input.test_bad_input import CASES, MESSAGES, render

    found = {}
    for name, call in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            scene = make_scene(Path(folder))
            try:
                call(scene)
            except Exception as error:  # noqa: BLE001  whatever it says is what the file is to show
                found[name] = message(scene, error)
            else:
                found[name] = "nothing was raised"
    MESSAGES.write_text(render(found), encoding="utf-8")


if __name__ == "__main__":
    main()
