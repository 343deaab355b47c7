"""Completion scripts: what the commands take, described once, and written for each shell."""
