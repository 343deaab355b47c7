"""Show values: as text and tables, as HTML for notebooks and pages, as charts and as plain data.

Each class has one function here, and each package below has one file. The packages below do not
import `show`: a value asks `vocabulary/shown.py` for its function. `shardwright/__init__` has
registered there, for each class, the file with its function; the file is imported when the first
value of the class is shown. So `show/__init__.py` imports nothing. One-line texts that errors
quote, such as the text of a rule, do not belong here: they stay with their value.
"""
