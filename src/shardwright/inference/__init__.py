"""Inference: the axes of a model that nobody annotated, from one trace of its forward function.

A walk over the jaxpr finds which dims are the same: it is in `walk`, and each family of primitives
has a file. The rules in `names` then name the dims by seeds and by how the program uses them.
Nothing is computed and no array is placed. A person reviews the result, as a file of path rules.
Annotations in a program belong in `trees` and `manager`.
"""
