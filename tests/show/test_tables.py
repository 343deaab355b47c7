"""Tables as plain text."""

from __future__ import annotations

from shardwright.show.tables import remarked_table, table, wrap


def test_remarks_in_the_last_column() -> None:
    rows = [("dim", "rule", "why"), ("0", "dp", "dp has size 1, and sp is not in the mesh")]
    assert remarked_table(rows, width=36) == [
        "dim  rule  why",
        "0    dp    dp has size 1, and sp is",
        "           not in the mesh",
    ]
    assert remarked_table(rows, width=32) == [
        "dim  rule",
        "     why",
        "0    dp",
        "     dp has size 1, and sp is",
        "     not in the mesh",
    ]


def test_a_column_that_wraps_is_as_wide_as_its_words() -> None:
    rows = [("place", "why"), ("fsdp_tp.toml:35 [params]", "first candidate fits")]
    head, *lines = table(rows, width=40)
    assert lines == ["fsdp_tp.toml:35  first candidate fits", "[params]"]
    assert head == "place            why"


def test_a_number_stays_with_its_unit() -> None:
    rows = [("axis", "bytes"), ("BATCH EMBED", "256.0 KiB")]
    assert table(rows, width=16) == ["axis   bytes", "BATCH  256.0 KiB", "EMBED"]
    assert wrap("sends 45 GB/s for 12 µs of 3 steps", 12) == [
        *("sends", "45 GB/s for", "12 µs of 3", "steps"),
    ]


def test_a_name_with_hyphens_stays_whole() -> None:
    assert wrap("see /a/long-name.toml:12", 14, rest="  ") == ["see", "  /a/long-name.toml:12"]


def test_table_pads_columns_and_strips_ends() -> None:
    assert table([("a", "bb"), ("ccc", "")], indent="  ") == ["  a    bb", "  ccc"]
