"""Save the whole state of a training run, and restore it under any strategy, mesh and number of
processes.

`state` saves and restores with orbax, `leaves` says how each leaf of a state is written, `chunks`
bounds the memory of reading, `stored` reads parts of arrays, and `safetensors` exports parameters.
Caches also save themselves with orbax: that code is in `caches`, because it also saves their specs.
Moving arrays that are already on devices belongs to `reshard`.
"""

from shardwright.checkpoint.safetensors import export_safetensors as export_safetensors
from shardwright.checkpoint.state import Saving as Saving
from shardwright.checkpoint.state import restore as restore
from shardwright.checkpoint.state import save as save
from shardwright.checkpoint.state import steps as steps
