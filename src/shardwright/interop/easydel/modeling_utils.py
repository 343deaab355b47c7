"""The functions of EasyDeL's `flax_modeling_utils`, except its attention module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from shardwright.errors import LayerError, RankMismatchError, did_you_mean
from shardwright.interop.easydel.quantized_dot import (
    DimensionNumbers,
    check_bits,
    quantized_dot_general,
)
from shardwright.manager.ambient import current_mesh_has

Documented = TypeVar("Documented", bound=Callable[..., Any])

names_in_mesh = current_mesh_has


def get_gradient_checkpoint_policy(name: str) -> Callable[..., Any]:
    """Return the policy of `jax.checkpoint_policies` with this name.

    Pass the policy to `jax.checkpoint(f, policy=...)`. If the name begins with `save_`, the result
    is a factory. Call the factory with names, or with two policies, to get a policy.

    Raises:
      LayerError: The name is unknown. (It is a ValueError.)

    >>> get_gradient_checkpoint_policy(
    ...     "nothing_saveable"
    ... ) is jax.checkpoint_policies.nothing_saveable
    True
    """
    # EasyDeL has a table of these names, and gives each the policy of JAX with that name.
    known: dict[str, Callable[..., Any]] = vars(jax.checkpoint_policies)
    if name not in known:
        hint = did_you_mean(str(name), known) or f"name one of {', '.join(known)}"
        raise LayerError(f"unknown checkpoint policy {name!r}", fix=hint)
    return known[name]


def add_start_docstrings(*docstr: str) -> Callable[[Documented], Documented]:
    """Return a decorator that puts texts before the docstring of a function or class.

    The texts are joined without separators.

    >>> @add_start_docstrings("Shared part. ", "More. ")
    ... def f():
    ...     '''Own part.'''
    >>> f.__doc__
    'Shared part. More. Own part.'
    """

    def decorate(documented: Documented) -> Documented:
        documented.__doc__ = "".join(docstr) + (documented.__doc__ or "")
        return documented

    return decorate


def canonicalize_dtype(*args: Any, dtype: Any = None, inexact: bool = True) -> Any:
    """Return the dtype to which arguments should be cast before a computation.

    Args:
      *args: Arrays and numbers; None is ignored. If `dtype` is None, the result is their common
        dtype (`jax.numpy.result_type`). If the result must be inexact and the common dtype is not,
        the common dtype is promoted with float32.
      dtype: Returned unchanged, if given.
      inexact: Whether the result must be a float or complex dtype, as for a mean or a norm.

    Raises:
      LayerError: The given dtype is not inexact. (It is a ValueError.)

    >>> canonicalize_dtype(jnp.ones(2, jnp.int32), None)
    dtype('float32')
    >>> canonicalize_dtype(jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.int8)).name
    'bfloat16'
    """
    if dtype is not None:
        if inexact and not jnp.issubdtype(jnp.dtype(dtype), jnp.inexact):
            raise LayerError(
                f"dtype {jnp.dtype(dtype)} is not inexact",
                fix="give a float or complex dtype, or inexact=False",
            )
        return dtype
    # `canonicalize_dtype` of `flax.linen.dtypes` does the same.
    common = jnp.result_type(*(arg for arg in args if arg is not None))
    if inexact and not jnp.issubdtype(common, jnp.inexact):
        # JAX does not promote integers smaller than int8.
        return (
            jnp.promote_types(jnp.float32, common)
            if jax.dtypes.itemsize_bits(common) >= 8
            else jnp.dtype(jnp.float32)
        )
    return common


def rotate_half(x: jax.Array) -> jax.Array:
    """Return `(-second half, first half)` along the last dim.

    Raises:
      RankMismatchError: The last dim is odd.
    """
    if x.shape[-1] % 2:
        raise RankMismatchError(
            f"the last dim of {x.shape} is odd, so it has no halves", fix="rotate an even head_dim"
        )
    # Rotate halves, as GPT-NeoX and Llama do, and not pairs of neighbors, as GPT-J does.
    half = x.shape[-1] // 2
    return jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)


def apply_rotary_pos_emb(tensor: jax.Array, sin_: jax.Array, cos_: jax.Array) -> jax.Array:
    """Rotate `[batch, heads, length, head_dim]` by tables of sines and cosines (Su et al. 2021).

    The tables are cut to the length of the tensor. Row i of a table rotates row i of the tensor. So
    for a permuted sequence, or for one that continues a cache, gather the rows of the tables by
    position first. For tensors `[batch, length, heads, head_dim]`, as the attention of this package
    takes them, use `layers.rope`.

    Args:
      tensor: Queries or keys, `[batch, heads, length, head_dim]`. The dim order of `layers.rope` is
        an error. It is detected only if dim 1 is as long as the tables, and dim 2 is shorter.
      sin_: `[batch or 1, heads or 1, length or more, head_dim]`.
      cos_: Like `sin_`.

    Raises:
      RankMismatchError: The tables do not have rank 4, are shorter than the tensor, differ from
        each other in shape, or have another batch, number of heads or head_dim than the tensor. Or
        the tensor has the dim order of `layers.rope`.
    """
    for name, table in (("sin_", sin_), ("cos_", cos_)):
        _check_table(name, table.shape, tensor.shape)
    if sin_.shape != cos_.shape:
        what = f"sin_ has shape {sin_.shape}, and cos_ has shape {cos_.shape}"
        raise RankMismatchError(
            what, path="cos_", fix="pass the sines and the cosines of the same angles"
        )
    length = tensor.shape[-2]
    return tensor * cos_[:, :, :length] + rotate_half(tensor) * sin_[:, :, :length]


def _check_table(name: str, table: tuple[int, ...], tensor: tuple[int, ...]) -> None:
    fix = (
        "pass both tables as [batch, heads, length, head_dim], at least as long as the tensor and "
        "with the same head_dim"
    )
    fits = len(tensor) == len(table) == 4 and table[2] >= tensor[2] and table[3] == tensor[3]
    fits = fits and all(rows in (1, size) for rows, size in zip(table[:2], tensor[:2], strict=True))
    # If the tensor is [batch, length, heads, head_dim], the table would rotate heads as positions.
    if fits and table[2] == tensor[1] > tensor[2]:
        fits = False
        fix = (
            "dim 1 is as long as the table: use layers.rope for [batch, length, heads, head_dim]; "
            "if dim 1 is heads, cut the table to the length"
        )
    if not fits:
        raise RankMismatchError(
            f"{name} has shape {table}, and the tensor has shape {tensor}", path=name, fix=fix
        )


def repeat_kv_bnsh(x: jax.Array, n_rep: int) -> jax.Array:
    """Repeat each head of `[batch, heads, length, head_dim]` `n_rep` times; copies are adjacent.

    The attention of this package does not need the copies.
    """
    return _repeat(x, n_rep, 1)


def repeat_kv_bsnh(x: jax.Array, n_rep: int) -> jax.Array:
    """Repeat each head of `[batch, length, heads, head_dim]` `n_rep` times; copies are adjacent."""
    return _repeat(x, n_rep, 2)


def _repeat(x: jax.Array, n_rep: int, dim: int) -> jax.Array:
    if x.ndim != 4:
        raise RankMismatchError(
            f"the array has shape {x.shape}, and needs 4 dims",
            fix="pass keys or values with batch and heads",
        )
    if n_rep < 1:
        raise RankMismatchError(
            f"n_rep={n_rep} is not a positive integer", fix="pass query heads // kv heads"
        )
    return x if n_rep == 1 else jnp.repeat(x, n_rep, axis=dim)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainDotGeneral:
    """`jax.lax.dot_general` on integers, which quantizes both operands in every call.

    Attributes:
      bits: 4 to 8.
    """

    bits: int

    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> Any:
        """Compute the dot; see `quantized_dot_general`. `precision` is ignored for integers."""
        return quantized_dot_general(
            lhs,
            rhs,
            dimension_numbers,
            bits=self.bits,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DotGeneralClass:
    """A factory of `dot_general` for a layer. Layers with equal factories are equal for jit.

    Attributes:
      bits: 4 to 8.
      mode: train, serve or convert.
    """

    bits: int
    mode: str

    def __call__(self) -> Any:
        """Return a `dot_general` for the mode."""
        if self.mode == "train":
            return TrainDotGeneral(bits=self.bits)
        try:
            from shardwright.interop.easydel.quantized_module import QuantizedDotGeneral
        except ModuleNotFoundError as error:
            raise LayerError(
                f"mode {self.mode!r} keeps weights in a flax module, and flax is not installed",
                fix="pip install flax; or, without flax, call quantize(w, shared=...) once, and "
                "quantized_dot_general(x, quantized, ...) for each matmul",
            ) from error
        return QuantizedDotGeneral(bits=self.bits, convert=self.mode == "convert")


def get_dot_general_by_bits(bits: int | None = None, mode: str = "train") -> dict[str, Any]:
    """Return the arguments that make a flax layer compute its dot product on integers.

    Pass the arguments as in `nn.Dense(8, **get_dot_general_by_bits(8))`. The modes are:

    - train: quantizes both operands in every call, and does the same in the dot products of the
      gradients (straight-through). It does not need flax:
      `get_dot_general_by_bits(8)["dot_general_cls"]()` is a `dot_general` for any library.
    - convert: also stores the quantized kernel of each layer in a collection of flax variables.
    - serve: uses the stored kernels. The program then does not read the float kernels.

    Convert and serve have a gradient with respect to the left operand only.

    Args:
      bits: 4 to 8, forward and backward. With None, nothing is quantized.
      mode: "train", "serve" (also called "eval") or "convert".

    Returns:
      `{}` if bits is None, else `{"dot_general_cls": ...}`.

    Raises:
      LayerError: `bits` is not from 4 to 8, or the mode is unknown. (It is a ValueError.)

    >>> get_dot_general_by_bits()
    {}
    """
    if mode not in ("train", "serve", "eval", "convert"):
        fix = "write train, serve (or eval) or convert"
        raise LayerError(f"unknown mode {mode!r}", fix=fix)
    if bits is None:
        return {}
    return {
        "dot_general_cls": DotGeneralClass(
            bits=check_bits(bits), mode="serve" if mode == "eval" else mode
        )
    }
