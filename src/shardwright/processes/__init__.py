"""What several processes check of each other: equal rules and data, and that all of them live.

Each check writes to JAX's coordination store and waits there: no collective and no device. This
room takes a mesh, options and facts (values as text), and knows nothing of managers.
"""
