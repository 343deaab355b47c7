"""Resolve an annotation, with rules and mesh sizes, to a spec and one recorded decision per dim.

Rules, decisions, and values derived from them belong here. Everything is pure: no arrays, devices,
globals or environment. Divisibility, conflicts and fallbacks are decided in `decide`, and nowhere
else in the project.
"""

from shardwright.resolution.decisions import Resolution as Resolution
from shardwright.resolution.partition_axis import PartitionAxis as PartitionAxis
from shardwright.resolution.resolver import explain as explain
from shardwright.resolution.resolver import resolve as resolve
from shardwright.resolution.rules import AxisRules as AxisRules
from shardwright.resolution.rules import Policy as Policy
