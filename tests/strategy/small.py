"""A strategy file with one of each table."""

SMALL = """version = 1
name = "small"

[mesh]
dp = 2
tp = -1

[rules]
batch = "dp"
embed = "-"
head = "tp | -"

[params]
embed = "dp"
"""
