"""Compile a planned program for devices that are not present, and compare it with its plan.

Code that exports a program, compiles it in a worker process, or explains how the compiled program
differs from the plan belongs here. Code that runs a program does not.
"""
