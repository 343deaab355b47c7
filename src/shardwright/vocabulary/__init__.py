"""The words of an annotation: axes, modes, layouts, and what counts as an annotation.

A constant that names a dimension, a mode or a layout belongs here, and so does the code that reads
an annotation into dims. What a name means on a mesh does not: that is a rule, in `resolution`.
"""

from shardwright.vocabulary.annotations import ArraySpec as ArraySpec
from shardwright.vocabulary.annotations import PartOf as PartOf
from shardwright.vocabulary.annotations import is_annotation as is_annotation
from shardwright.vocabulary.annotations import stacked as stacked
from shardwright.vocabulary.merged_dims import merged as merged
from shardwright.vocabulary.modes import mode_name as mode_name
from shardwright.vocabulary.modes import parse_mode as parse_mode
