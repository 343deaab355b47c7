"""What the promises about speed cost: run `python -m benchmarks`, or `make bench`."""
