"""Add the schema of strategy files to a checkout of SchemaStore, for a pull request there.

    python tools/schemastore.py path/to/schemastore

Editors find a schema in SchemaStore by the name of a file, or by its first line. Every preset has
the first line `#:schema https://json.schemastore.org/shardwright.json`.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

from shardwright import Strategy
from shardwright.strategy.files import preset_text

URL = "https://json.schemastore.org/shardwright.json"
ENTRY = {
    "name": "shardwright",
    "description": "How the axes of a JAX model are sharded over a mesh",
    "fileMatch": ["shardwright.toml", "*.shardwright.toml"],
    "url": URL,
}


def schema() -> dict[str, Any]:
    """Return the schema as SchemaStore takes it: draft 7, with its address as `$id`."""
    text = json.dumps(Strategy.json_schema()).replace('"#/$defs/', '"#/definitions/')
    data = json.loads(text)
    definitions = data.pop("$defs")
    data["$schema"] = "http://json-schema.org/draft-07/schema#"
    return {"$schema": data.pop("$schema"), "$id": URL, "definitions": definitions, **data}


def write(store: pathlib.Path) -> None:
    """Write the schema, its tests and the entry of the catalog. A second run changes nothing."""
    source = store / "src"
    _write_json(source / "schemas" / "json" / "shardwright.json", schema())
    examples = source / "test" / "shardwright"
    examples.mkdir(parents=True, exist_ok=True)
    for name in Strategy.presets():
        (examples / f"{name}.toml").write_text(preset_text(name), encoding="utf-8")
    catalog = source / "api" / "json" / "catalog.json"
    data = json.loads(catalog.read_text(encoding="utf-8"))
    others = [entry for entry in data["schemas"] if entry["name"] != ENTRY["name"]]
    data["schemas"] = sorted([*others, ENTRY], key=lambda entry: entry["name"].lower())
    _write_json(catalog, data)


def _write_json(path: pathlib.Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=2, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    write(pathlib.Path(sys.argv[1]))
