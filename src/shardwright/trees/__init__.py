"""Trees of arrays and their annotations: paths, optimizer state, factored weights, named tensors.

Code that pairs a tree with annotations belongs here. This code returns annotations and paths, but
no specs: the manager resolves the annotations.
"""
