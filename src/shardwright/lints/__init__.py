"""Lints: find likely mistakes in a strategy file, alone or against a mesh and a tree of tensors.

A lint is a function that reads a `Subject` (strategy, mesh, tensors) and yields findings. A lint
does not change its input. `names` reads a model instead: its annotations, and what inference found
in its program.
"""
