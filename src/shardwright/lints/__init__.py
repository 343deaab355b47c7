"""Questions about a whole strategy: what is odd about it, and what it costs without need.

A lint is one function that reads a strategy, a mesh and tensors and returns findings. It changes
nothing and decides no spec.
"""
