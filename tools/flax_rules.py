"""Write the specs that flax gives for random lists of logical axis rules.

    python tools/flax_rules.py

Run it where flax is installed. Tests compare these specs with those of the imported rules.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main() -> None:
    import flax
    from flax.linen.spmd import logical_to_mesh_axes

    from tests.interop.rule_lists import as_tuples, entries, random_lists

    lists = []
    for case in random_lists(seed=0, count=200):
        rules = as_tuples(case["rules"])
        specs = [logical_to_mesh_axes(tuple(names), rules) for names in case["arrays"]]
        lists.append({**case, "specs": [entries(spec, case["mesh"]) for spec in specs]})
    path = ROOT / "tests" / "interop" / "golden" / "flax_rules.json"
    rows = ",\n".join(json.dumps(case, separators=(",", ":")) for case in lists)
    path.write_text(f'{{"flax": "{flax.__version__}", "lists": [\n{rows}\n]}}\n')
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
