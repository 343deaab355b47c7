"""From an annotation, rules and mesh sizes to a spec, with one recorded decision per dim.

Everything here is pure: no arrays, no devices, no globals and no environment. Divisibility,
conflicts and fallbacks are decided in `decide`, and nowhere else in the project.
"""

from shardwright.resolution.decisions import Resolution as Resolution
from shardwright.resolution.partition_axis import PartitionAxis as PartitionAxis
from shardwright.resolution.resolver import explain as explain
from shardwright.resolution.resolver import resolve as resolve
from shardwright.resolution.rules import AxisRules as AxisRules
from shardwright.resolution.rules import Policy as Policy
