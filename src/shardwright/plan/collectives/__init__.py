"""Collectives of a compiled program, read from its HLO text.

`read` walks through the computations of a program. All code that knows the text of HLO belongs
here.
"""

from shardwright.plan.collectives.collective import Collective as Collective
from shardwright.plan.collectives.collective import Kind as Kind
from shardwright.plan.collectives.collective import total as total
from shardwright.plan.collectives.read import read_collectives as read_collectives
