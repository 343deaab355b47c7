"""Rule lists of other libraries: pairs of a logical axis name and mesh axes.

flax, T5X, MaxText and TransformerEngine map names to mesh axes by an ordered list of pairs. These
functions turn such a list into a strategy and back. `models` has the common code of bridges that
read the names of arrays. Every bridge may use this package. Code for one library belongs in its
bridge.
"""

from shardwright.interop.logical_rules.checked import checked as checked
from shardwright.interop.logical_rules.files import REPLICATED_NAMES as REPLICATED_NAMES
from shardwright.interop.logical_rules.files import read_replicated as read_replicated
from shardwright.interop.logical_rules.files import read_rules as read_rules
from shardwright.interop.logical_rules.files import read_yaml as read_yaml
from shardwright.interop.logical_rules.files import read_yaml_tree as read_yaml_tree
from shardwright.interop.logical_rules.models import annotate_boxes as annotate_boxes
from shardwright.interop.logical_rules.models import by_name as by_name
from shardwright.interop.logical_rules.models import check_used as check_used
from shardwright.interop.logical_rules.models import library as library
from shardwright.interop.logical_rules.models import place as place
from shardwright.interop.logical_rules.names import Imported as Imported
from shardwright.interop.logical_rules.names import MeshAxes as MeshAxes
from shardwright.interop.logical_rules.names import Modes as Modes
from shardwright.interop.logical_rules.names import Names as Names
from shardwright.interop.logical_rules.names import Semantics as Semantics
from shardwright.interop.logical_rules.names import axis_of as axis_of
from shardwright.interop.logical_rules.names import check_names as check_names
from shardwright.interop.logical_rules.names import entry_of as entry_of
from shardwright.interop.logical_rules.names import names_of_metadata as names_of_metadata
from shardwright.interop.logical_rules.names import plain_name as plain_name
from shardwright.interop.logical_rules.names import read_names as read_names
from shardwright.interop.logical_rules.names import resized as resized
from shardwright.interop.logical_rules.to_rules import check_manager as check_manager
from shardwright.interop.logical_rules.to_rules import one_rule_each as one_rule_each
from shardwright.interop.logical_rules.to_rules import (
    to_logical_axis_rules as to_logical_axis_rules,
)
from shardwright.interop.logical_rules.to_strategy import (
    to_strategy as to_strategy,
)
