"""A profile beside a plan: the time of a program on its devices, by semantic axis and by line.

Reading a profile, and joining it with the program and its plan, belongs here. Running and recording
a program does not: `jax.profiler` does that.
"""
