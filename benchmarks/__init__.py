"""Measurements with targets: run `python -m benchmarks`, or `make bench`."""
