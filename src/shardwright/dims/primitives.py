"""Families of JAX primitives. All primitives of a family have the same rule."""

from __future__ import annotations

from typing import Final

# Primitives that compute their result element by element. The result has the shape of all operands
# that are not scalars.
ELEMENTWISE: Final = frozenset(
    [
        "abs",
        "acos",
        "acosh",
        "add",
        "add_any",
        "and",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "bessel_i0e",
        "bessel_i1e",
        "cbrt",
        "ceil",
        "clamp",
        "clz",
        "complex",
        "conj",
        "convert_element_type",
        "copy",
        "copy_p",
        "cos",
        "cosh",
        "device_put",
        "digamma",
        "div",
        "eq",
        "eq_to",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "igamma",
        "igammac",
        "imag",
        "integer_pow",
        "is_finite",
        "layout_constraint",
        "le",
        "le_to",
        "lgamma",
        "log",
        "log1p",
        "log2",
        "logistic",
        "lt",
        "lt_to",
        "max",
        "min",
        "mul",
        "mulhi",
        "name",
        "ne",
        "neg",
        "nextafter",
        "not",
        "one_minus_square",
        "optimization_barrier",
        "or",
        "pcast",
        "polygamma",
        "polynomial",
        "population_count",
        "pow",
        "pvary",
        "real",
        "reduce_precision",
        "rem",
        "round",
        "rsqrt",
        "select_n",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "xor",
        "zeta",
    ]
)
# Primitives that may run on the partial sums of each device, before the all-reduce adds them.
KEEPS_SUM: Final = frozenset({"convert_element_type", "neg", "copy", "copy_p", "reduce_precision"})
# Primitives that return their operands unchanged: names for a remat policy, barriers, and
# constraints on the order of dims in memory. Attention on TPUs constrains its operands to the order
# of dims that a cache has.
NAMES: Final = frozenset({"name", "optimization_barrier", "layout_constraint"})
ADDITIONS: Final = frozenset({"add", "sub", "add_any"})
CUMULATIVE: Final = frozenset({"cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod"})
REDUCTIONS: Final = frozenset(
    [
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "reduce_and",
        "reduce_or",
        "reduce_xor",
        "argmax",
        "argmin",
    ]
)
SCATTERS: Final = frozenset(
    {"scatter", "scatter-add", "scatter_add", "scatter-max", "scatter-min", "scatter-mul"}
)
# Max and mean pooling, and their gradients. Pooling with a function of the user has no rule.
WINDOWS: Final = frozenset(
    {"reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add"}
)
CONSTRAINTS: Final = frozenset({"sharding_constraint", "reshard", "annotate_axes"})
# Primitives that move, split, join or add dims.
VIEWS: Final = frozenset({"transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim"})
# Primitives that cut, join, repeat or order elements. All except `stack` need all shards of some
# dims.
CUTS: Final = frozenset(
    [
        *("concatenate", "dynamic_slice", "pad", "rev", "slice", "sort", "split", "stack", "tile"),
        *("top_k", "unstack"),
    ]
)
# Primitives whose result every device can compute by itself.
SOURCES: Final = frozenset(
    {
        "iota",
        "empty",
        "empty2",
        "random_seed",
        "random_wrap",
        "random_bits",
        "random_split",
        "random_fold_in",
        "random_unwrap",
        "random_clone",
        "threefry2x32",
        "rng_bit_generator",
        "axis_index",
        "platform_index",
    }
)
