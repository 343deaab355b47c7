"""A profile beside a plan: what a program took on its devices, by semantic axis and by line.

Reading a profile, and joining it with the program and its plan, belongs here. Running and recording
a program does not: `jax.profiler` does that.
"""
