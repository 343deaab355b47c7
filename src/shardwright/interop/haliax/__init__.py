"""Models of haliax, and configurations of levanter.

What reads named axes, axis mappings or levanter's files belongs here. haliax is imported only where
a model is read.
"""

from shardwright.interop.haliax.bridge import NAMES as NAMES
from shardwright.interop.haliax.bridge import Mappings as Mappings
from shardwright.interop.haliax.bridge import annotations as annotations
from shardwright.interop.haliax.bridge import from_mappings as from_mappings
from shardwright.interop.haliax.bridge import mappings as mappings
from shardwright.interop.haliax.bridge import place as place
from shardwright.interop.haliax.bridge import rules as rules
from shardwright.interop.haliax.bridge import sizes_of as sizes_of
from shardwright.interop.haliax.levanter import from_levanter as from_levanter
