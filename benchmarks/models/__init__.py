"""Models of other repositories, with their source untouched, under the strategies of shardwright.

`python -m benchmarks.models CHECKOUTS [NAME ...]` trains each model unsharded and on three meshes.
CHECKOUTS is a folder with checkouts of the repositories: flax, jax-llm-examples,
levanter, TransformerEngine and maxtext.
"""
