"""The command `shardwright`: `main`, and one file per command with `parser()` and `run(arguments)`.

Code that reads arguments and prints answers belongs here. The answers come from other packages.
"""
