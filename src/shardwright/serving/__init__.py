"""Serve a model: requests of any length share decode slots.

Code that schedules requests, assigns slots and runs steps belongs here. The caches are in `caches`,
attention to them in `attention`. The caller provides the model.
"""

from shardwright.serving.arrays import CacheUsage as CacheUsage
from shardwright.serving.engine import Engine as Engine
from shardwright.serving.engine import Handle as Handle
from shardwright.serving.jobs import Phase as Phase
from shardwright.serving.metrics import Percentiles as Percentiles
from shardwright.serving.metrics import Report as Report
from shardwright.serving.request import Completion as Completion
from shardwright.serving.request import Finish as Finish
from shardwright.serving.request import Request as Request
from shardwright.serving.request import Sampling as Sampling
from shardwright.serving.steps import CacheShape as CacheShape
from shardwright.serving.steps import Model as Model
from shardwright.serving.weights import Update as Update
