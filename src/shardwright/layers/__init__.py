"""Layers and what they are made of."""

from shardwright.layers.checkpoint_policy import get_gradient_checkpoint_policy as get_gradient_checkpoint_policy
from shardwright.layers.docstrings import add_start_docstrings as add_start_docstrings
from shardwright.layers.dot_general_by_bits import get_dot_general_by_bits as get_dot_general_by_bits
from shardwright.layers.dtypes import canonicalize_dtype as canonicalize_dtype
from shardwright.layers.quantized_dot import QuantizedArray as QuantizedArray
from shardwright.layers.quantized_dot import quantize as quantize
from shardwright.layers.quantized_dot import quantized_dot_general as quantized_dot_general
