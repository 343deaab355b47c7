"""Show values: as text and tables, as HTML for notebooks and pages, as charts and as plain data.

One function per value belongs here, in a file per room. The rooms below do not import this room. A
value asks `vocabulary/shown.py`, where `shardwright/__init__` has named the file to import when the
first such value is shown. So this file imports nothing. One-line texts that errors quote, such as
the text of a rule, do not belong here: they stay with their value.
"""
