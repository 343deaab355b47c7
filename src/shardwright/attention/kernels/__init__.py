"""The implementations of attention, one file each.

A kernel gets operands and a call whose specs are resolved, and returns the output and its log-sum-exp.
What several kernels share belongs in `attention.parts`.
"""
