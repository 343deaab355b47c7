"""Show values: as text and tables, as HTML for notebooks and pages, as charts and as plain data.

One function per value belongs here, in a file per room. The rooms below know nothing of it: a value
asks `vocabulary/shown.py`, and `shardwright/__init__` names the file there, which is imported when
the first such value is shown. So this file imports nothing. A text of one line that errors quote,
such as that of a rule, does not belong here; it stays with its value.
"""
