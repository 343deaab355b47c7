"""The implementations of attention, one file each.

Each has `supports(call)` and `run(operands, call)`; `attention.implementation` lists them. Code
that several kernels share belongs in `attention.parts`.
"""
