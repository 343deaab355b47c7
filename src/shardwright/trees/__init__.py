"""Trees of arrays and what annotates them: paths, optimizer state, factored weights, tensor files.

Code that pairs a tree with annotations belongs here. It returns annotations and paths, never specs:
the manager resolves them.
"""
