"""The collectives of a compiled program, read from its HLO text."""

from shardwright.plan.collectives.read import Collective as Collective
from shardwright.plan.collectives.read import Kind as Kind
from shardwright.plan.collectives.read import read_collectives as read_collectives
from shardwright.plan.collectives.read import total as total
