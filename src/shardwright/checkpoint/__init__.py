"""Save the whole state of a training run. Restore it under any strategy, mesh and process count.

`state` saves and restores with orbax, `leaves` decides how each leaf of a state is written,
`chunks` bounds the memory of reading, `files` writes directories whole or not at all, and
`safetensors` exports parameters. Caches are also saved with orbax, but in the package `caches`,
because their specs are saved too. Code that moves arrays that are already on devices belongs to
`reshard`.
"""

from shardwright.checkpoint.safetensors import export_safetensors as export_safetensors
from shardwright.checkpoint.state import Saving as Saving
from shardwright.checkpoint.state import restore as restore
from shardwright.checkpoint.state import save as save
from shardwright.checkpoint.state import steps as steps
