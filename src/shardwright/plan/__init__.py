"""What a strategy costs, before there is a device to run it on."""

from shardwright.plan.collectives import Collective as Collective
from shardwright.plan.collectives import read_collectives as read_collectives
from shardwright.plan.memory import bytes_by_path as bytes_by_path
from shardwright.plan.semantic_axes import by_axis as by_axis
from shardwright.plan.semantic_axes import carried_axes as carried_axes
