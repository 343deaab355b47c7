"""Models of haliax, and configurations of levanter.

Code that reads named axes, axis mappings or levanter's files belongs here. haliax is imported only
where a model is read.
"""

from shardwright.interop.haliax import levanter as levanter
from shardwright.interop.haliax.bridge import NAMES as NAMES
from shardwright.interop.haliax.bridge import Mappings as Mappings
from shardwright.interop.haliax.bridge import annotate as annotate
from shardwright.interop.haliax.bridge import arrays as arrays
from shardwright.interop.haliax.bridge import mappings as mappings
from shardwright.interop.haliax.bridge import place as place
from shardwright.interop.haliax.bridge import rules as rules
from shardwright.interop.haliax.bridge import sizes_of as sizes_of
from shardwright.interop.haliax.bridge import to_strategy as to_strategy
