"""Tables as plain text."""

from __future__ import annotations

from shardwright.show.tables import remarked_table, table


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


def test_table_pads_columns_and_strips_ends() -> None:
    assert table([("a", "bb"), ("ccc", "")], indent="  ") == ["  a    bb", "  ccc"]
