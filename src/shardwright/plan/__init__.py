"""Predict the bytes and collectives of a strategy without a device, and compare strategies.

Such a prediction is a plan. Code belongs here if it counts the bytes that a tree, a traced program
or a compiled program keeps in memory and sends, or if it compares a profile with a plan. Code that
runs a program does not belong here.
"""

from shardwright.plan.collectives.collective import Collective as Collective
from shardwright.plan.collectives.collective import by_axis as by_axis
from shardwright.plan.collectives.collective import carried_axes as carried_axes
from shardwright.plan.collectives.read import read_collectives as read_collectives
from shardwright.plan.compare_plans import compare_plans as compare_plans
from shardwright.plan.memory import bytes_by_path as bytes_by_path
from shardwright.plan.planner import PlanReport as PlanReport
from shardwright.plan.planner import Program as Program
from shardwright.plan.verify.run import verify_plan as verify_plan
