"""The words of an annotation: axes, modes and layouts, and the code that reads them.

Constants that name a dimension, a mode or a layout belong here, and so do annotations, their
lowering to dims, and the readers of arguments and of PRNG keys. Rules, which map names to mesh
axes, do not: they are in `resolution`.
"""

from shardwright.vocabulary.annotations import ArraySpec as ArraySpec
from shardwright.vocabulary.annotations import PartOf as PartOf
from shardwright.vocabulary.annotations import is_annotation as is_annotation
from shardwright.vocabulary.annotations import stacked as stacked
from shardwright.vocabulary.merged_dims import merged as merged
from shardwright.vocabulary.modes import mode_name as mode_name
from shardwright.vocabulary.modes import parse_mode as parse_mode
