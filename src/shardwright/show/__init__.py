"""Show values: as text and tables, as HTML for notebooks and pages, as charts and as plain data.

Each value has one function here, and each package has one file. The packages below do not import
this package: a value asks `vocabulary/shown.py` for its function. `shardwright/__init__` has
registered there, for each class, the file with its function. The file is imported when the first
value of the class is shown. So this file imports nothing. One-line texts that errors quote, such as
the text of a rule, do not belong here: they stay with their value.
"""
