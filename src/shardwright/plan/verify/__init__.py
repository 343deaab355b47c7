"""Compile a planned program for its target, without having it, and compare both.

Code that exports a program, compiles it in a worker process, or explains how the compiled program
differs from the plan belongs here. Code that runs a program does not.
"""
