"""Models of flax linen: read the logical names of variables, and resolve constraints by a strategy.

The model's source stays as it is. `names` maps each of its logical names to an axis and a role, as
in `logical_rules`. flax is imported on the first call.
"""

from shardwright.interop.flax.bridge import annotate as annotate
from shardwright.interop.flax.bridge import arrays as arrays
from shardwright.interop.flax.bridge import place as place
from shardwright.interop.flax.bridge import rules as rules
