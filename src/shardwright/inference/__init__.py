"""Inference: the axes of a model that nobody annotated, from one trace of its forward function.

A walk over the jaxpr finds which dims are the same (`walk`, and one file per family of primitives),
and rules name the dims from seeds and from how the program uses them (`names`). Nothing is computed
and no array is placed. The result is written to a file that a person reviews. Annotations in a
program belong in `trees` and `manager`.
"""
