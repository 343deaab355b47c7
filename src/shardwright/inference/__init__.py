"""Inference: the axes of a model that nobody annotated, from one trace of its forward function.

A walk over the jaxpr finds which dims are the same. The walk is in `walk`, with one file for each
family of primitives. The rules in `names` then name the dims, from the axes that the caller gives
for inputs (the seeds), and from how the program uses each dim.
Nothing is computed and no array is placed. A person reviews the result, as a file of path rules.
Code about annotations that a program already has belongs in `trees` and `manager`.
"""
