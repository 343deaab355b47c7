"""Checks between processes: whether all have equal rules and equal data, and whether all are alive.

Each check writes to JAX's coordination store and waits there. It needs no collective and no device.
This package takes a mesh, options and facts (values as text), and knows nothing of managers.
"""
