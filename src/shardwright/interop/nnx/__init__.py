"""flax nnx: models that are annotated for nnx, and the blocks of `shardwright.layers` as modules.

Code belongs here if it handles variables of nnx. `bridge` imports flax on the first call. `layers`
imports flax, so it is imported by its own name.
"""

from shardwright.interop.nnx.bridge import annotate as annotate
from shardwright.interop.nnx.bridge import arrays as arrays
from shardwright.interop.nnx.bridge import bound as bound
from shardwright.interop.nnx.bridge import place as place
