"""The provided names of `eformer.escale`.

Its other names can be imported, but a call of one raises an error with a fix.
"""

from jax.sharding import NamedSharding as NamedSharding
from jax.sharding import PartitionSpec as PartitionSpec

from shardwright.interop.eformer.absent import __getattr__ as __getattr__
from shardwright.interop.eformer.errors import NoMeshError as NoMeshError
from shardwright.interop.eformer.errors import NotRegisteredError as NotRegisteredError
from shardwright.interop.eformer.errors import WrongTypeError as WrongTypeError
from shardwright.interop.eformer.escale.mesh.creation import *  # noqa: F403
from shardwright.interop.eformer.escale.partition.constraints import *  # noqa: F403
from shardwright.interop.eformer.escale.partition.manager import *  # noqa: F403
