"""What the kernels share: shards, blocks, online softmax, dropout, derivatives.

An implementation itself belongs in `attention.kernels`.
"""
