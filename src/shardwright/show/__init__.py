"""Show values: as text and tables, as HTML for notebooks and pages, as charts and as plain data.

A class has at most one function here for each form in which its values are shown. The packages of
these classes do not import `show`: a value asks `vocabulary/shown.py` for its function. There,
`shardwright/__init__` has registered the file that has the function of each class. The file is
imported when the first value of the class is shown, so `show/__init__.py` imports nothing. One-line
texts that errors quote, such as the text of a rule, do not belong here: they stay in the file of
their class.
"""
