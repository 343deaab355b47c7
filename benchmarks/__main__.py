"""`python -m benchmarks [SUBJECT ...]`: measure, print, and fail if a target is missed."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import attention, enter, imports, peers, report, serving, trace, tree
from benchmarks.timing import Row
from shardwright.testing.meshes import virtual_devices

SUBJECTS = {
    "tree": tree,
    "trace": trace,
    "enter": enter,
    "import": imports,
    "attention": attention,
    "serving": serving,
}


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "subjects", nargs="*", metavar="SUBJECT", help=f"of {', '.join(SUBJECTS)}; defaults to all"
    )
    parser.add_argument("--peers", action="store_true", help="measure flax, eformer and haliax too")
    parser.add_argument(
        "--repeats",
        type=int,
        default=15,
        help="repetitions per median (default %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    parser.add_argument(
        "--no-fail", action="store_true", help="exit with 0 even if a target is missed"
    )
    given = parser.parse_args(argv)
    unknown = [name for name in given.subjects if name not in SUBJECTS]
    if unknown:
        parser.error(f"unknown subject {unknown[0]!r}: subjects are {', '.join(SUBJECTS)}")
    if given.repeats < 3:
        parser.error("--repeats: a median needs at least 3")
    return given


def main(argv: list[str] | None = None) -> int:
    """Run the subjects. Return 0 if all targets are met, 1 if not, 2 for a bad request."""
    given = _arguments(argv)
    missing = peers.missing() if given.peers else []
    if missing:
        print(
            "peers are missing:",
            *missing,
            'run python -m pip install -e ".[peers]" in the clone',
            sep="\n  ",
            file=sys.stderr,
        )
        return 2
    virtual_devices(8)
    where = report.context(peers=peers.versions() if given.peers else {})
    print(*(f"{key:<12} {value}" for key, value in where.items()), sep="\n", flush=True)
    rows: list[Row] = []
    for name in given.subjects or SUBJECTS:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        rows += SUBJECTS[name].run(peers=given.peers, repeats=given.repeats)
    print(f"\n{report.text(rows)}")
    for path, content in (
        (given.json, json.dumps(report.data(rows, where), indent=1)),
        (given.markdown, report.markdown(rows, where)),
    ):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content.rstrip("\n") + "\n", encoding="utf-8")
    missed = [row for row in rows if row.verdict == "MISSED"]
    for row in missed:
        print(
            (
                f"missed: {row.subject}, {row.case}, {row.what}: {row.value:.2f} {row.unit}, "
                f"target {row.target}"
            ),
            file=sys.stderr,
        )
    return 1 if missed and not given.no_fail else 0


if __name__ == "__main__":
    sys.exit(main())
