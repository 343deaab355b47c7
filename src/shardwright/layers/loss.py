"""Cross-entropy over a vocabulary that may be sharded. The logits are never gathered."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from shardwright import _jax
from shardwright.errors import LayerError, RankMismatchError, raise_problems
from shardwright.layers.accumulate import Weighted
from shardwright.layers.dtypes import DTYPES, FLOAT32, Dtypes
from shardwright.layers.inputs import as_concrete, read_array
from shardwright.layers.placement import (
    OPERAND,
    check_vocabulary,
    place,
    split_over,
    split_problems,
    use,
)
from shardwright.manager import context
from shardwright.manager.einsum import einsum
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.axes import BATCH, EMBED, QUERY_LENGTH, VOCAB, Role
from shardwright.vocabulary.integers import read_integer
from shardwright.vocabulary.read import instance, number, read_value

Z_LOSS: Final = number("not negative", fix="pass 1e-4, or 0 for none")
SOFTCAP: Final = number("positive", fix="leave {name} out for no cap")
TIED: Final = instance(bool)

LOGITS = (BATCH, QUERY_LENGTH, VOCAB)
_TOKENS = (BATCH, QUERY_LENGTH)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The losses of a batch: means over the tokens that are not ignored.

    Attributes:
      mean: Cross-entropy in nats per token, plus the z-loss: what training minimizes.
      cross_entropy: Cross-entropy in nats per token, without the z-loss.
      z_loss: Mean of the squared logsumexp, times its factor.
      tokens: Number of tokens that are not ignored, int32.
    """

    mean: jax.Array
    cross_entropy: jax.Array
    z_loss: jax.Array
    tokens: jax.Array

    @property
    def weighted(self) -> Weighted:
        """`mean` as a sum over tokens, with the number of tokens as its weight."""
        return Weighted(self.mean * self.tokens, self.tokens)


def specs(vocab: int, embed: int, *, init: Any = None, dtypes: Dtypes = FLOAT32) -> ArraySpec:
    """Return the output projection, `[embed, vocab]`. Tied models use the embedding table.

    Args:
      vocab: Number of tokens in the vocabulary.
      embed: Size of the residual.
      init: Initializer. Defaults to a normal distribution with the variance 1 / embed.
      dtypes: `param` is the dtype of the projection.
    """
    if init is None:
        init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
    return ArraySpec((embed, vocab), dtypes.param, (EMBED, VOCAB), init)


def logits(
    x: Any,
    head: Any,
    *,
    tied: bool = False,
    softcap: float | None = None,
    vocab: int | None = None,
    dtypes: Dtypes = FLOAT32,
    path: str | None = None,
) -> jax.Array:
    """Return float32 logits `[batch, length, vocab]`, sharded as (BATCH, QUERY_LENGTH, VOCAB).

    Args:
      x: `[batch, length, embed]`, after the last norm.
      head: As stored: `[embed, vocab]`, or the embedding table `[vocab, embed]`.
      tied: Whether `head` is the embedding table.
      softcap: c in `c * tanh(logits / c)`. Defaults to none.
      vocab: Size of the vocabulary without its padding, if the vocabulary of `head` is padded. The
        logits of the padding become -inf. By default, nothing is padding.
      dtypes: `compute` is the dtype of the operands.
      path: Path of `head` in the model, required if the strategy has `[[tensors]]` entries.

    Raises:
      RankMismatchError: The shapes do not fit each other.
      LayerError: `softcap` is not positive, or `vocab` is larger than the vocabulary of `head`. Or
        a `shard_map` around the call has split EMBED, or VOCAB if it is padded.
      ShardingError: The rules of the ambient manager do not fit the arrays.
    """
    read_value("dtypes", dtypes, DTYPES, error=LayerError)
    x, head = _read_operands(x, head, tied)
    weight = _use_head(x, head, tied, path).astype(dtypes.compute)
    _check_padding(weight, tied, vocab)
    if vocab is not None:
        axes = (VOCAB, EMBED) if tied else (EMBED, VOCAB)
        raise_problems(split_problems(weight.shape, axes, (VOCAB,), name="head", path=path))
    return _logits(place(x, OPERAND).astype(dtypes.compute), weight, tied, _cap(softcap), vocab)


def cross_entropy(
    x: Any,
    head: Any,
    labels: Any,
    *,
    tied: bool = False,
    chunks: int = 1,
    z_loss: float = 0.0,
    softcap: float | None = None,
    vocab: int | None = None,
    ignore: int = -100,
    dtypes: Dtypes = FLOAT32,
    path: str | None = None,
) -> Loss:
    """Return the cross-entropy of labels, averaged over all tokens of all shards.

    Each shard of the vocabulary has its part of the logits. Per token, the devices exchange only a
    maximum, a sum and the logit of the label. With `chunks`, the tokens are divided into parts, and
    only the logits of one part at a time are in memory. The backward pass computes these logits
    again, also part by part. Inside a `shard_map`, the means are over the tokens of one device. For
    means over all tokens, sum the total and the weight of `Loss.weighted` over the devices, and
    divide the sums.

    Args:
      x: `[batch, length, embed]`, after the last norm. Rows with NaN make gradients NaN, even where
        their labels are ignored.
      head: As stored: `[embed, vocab]`, or the embedding table `[vocab, embed]`.
      labels: `[batch, length]` integers, below the vocabulary size. Inside `jit`, labels have no
        values yet, so a larger label is not refused: the logit of such a label counts as 0.
      tied: Whether `head` is the embedding table.
      chunks: Number of parts. It must divide the length. If the length is sharded, it must divide
        the length of a shard. If devices have different sequences, the gradient of `head` is summed
        over the devices once per part, so n parts send n times the bytes.
      z_loss: Factor of the mean squared logsumexp (PaLM, arXiv:2204.02311, section 5).
      softcap: As in `logits`.
      vocab: As in `logits`. The padding of `head` does not enter the loss, and gets no gradient.
      ignore: Tokens with this label, or with any negative label, are ignored.
      dtypes: `compute` is the dtype of the operands. All sums are float32.
      path: As in `logits`.

    Raises:
      RankMismatchError: The shapes do not fit each other, or `chunks` does not divide the length.
      LayerError: The labels are not integers, or a label is not in the vocabulary. Or `chunks`,
        `z_loss`, `softcap`, `vocab` or `ignore` is not valid. Or a `shard_map` around the call has
        split VOCAB or EMBED. Or `x` or the compute dtype is float16, which would need loss scaling.
      ShardingError: The rules of the ambient manager do not fit the arrays.
    """
    read_value("dtypes", dtypes, DTYPES, error=LayerError)
    given, (x, head) = labels, _read_operands(x, head, tied)
    labels = read_array("labels", labels, "[batch, length]", integers=True)
    # Refuse float16: small gradients underflow in it.
    if jnp.float16 in (x.dtype, dtypes.compute):
        raise LayerError(
            "float16 needs loss scaling, which does not exist here: small gradients would become 0",
            path="x",
            fix="train in bfloat16; to evaluate a float16 model, pass x.astype(jnp.float32)",
        )
    _check_labels(x, labels, chunks)
    read_value("z_loss", z_loss, Z_LOSS, error=LayerError)
    weight = _use_head(x, head, tied, path).astype(dtypes.compute)
    axes = (VOCAB, EMBED) if tied else (EMBED, VOCAB)
    check_vocabulary(weight, axes, labels, name="head", path=path)
    _check_padding(weight, tied, vocab)
    _check_labels_in(given, vocab or weight.shape[0 if tied else 1], ignore)
    if labels.dtype.itemsize < 4:
        labels = labels.astype(jnp.int32)  # as uint8, -100 would be the label 156
    x, labels = place(x, OPERAND).astype(dtypes.compute), place(labels, _TOKENS)
    cap = _cap(softcap)

    def sums(x: Any, labels: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        return _sums(_logits(x, weight, tied, cap, vocab), labels, ignore)

    if chunks == 1:
        entropy, square, count = sums(x, labels)
    else:
        entropy, square, count = _by_chunks(sums, x, labels, weight, chunks)
    # If all tokens are ignored, the loss is 0 and not 0 / 0.
    tokens = jnp.maximum(count, 1).astype(jnp.float32)
    entropy = entropy / tokens
    # Without this branch, a loss without z-loss would still compute the z-loss.
    square = z_loss * square / tokens if z_loss else jnp.zeros((), jnp.float32)
    return Loss(mean=entropy + square, cross_entropy=entropy, z_loss=square, tokens=count)


def _read_operands(x: Any, head: Any, tied: bool) -> tuple[jax.Array, jax.Array]:
    read_value("tied", tied, TIED, error=LayerError)
    dims = "[vocab, embed]" if tied else "[embed, vocab]"
    return read_array("x", x, "[batch, length, embed]"), read_array("head", head, dims)


def _use_head(x: Any, head: Any, tied: bool, path: str | None) -> Any:
    """Gather the head, then check that its EMBED dim is whole. A stored shard may lack parts of it.

    Raises:
      LayerError: A `shard_map` has split EMBED.
    """
    axes = (VOCAB, EMBED) if tied else (EMBED, VOCAB)
    weight = use(head, axes, path=path)
    if weight.shape[1 if tied else 0] != x.shape[-1]:
        raise RankMismatchError(
            f"head has shape {weight.shape}, and x has shape {x.shape}",
            path="head",
            fix="pass a head whose EMBED is that of x, and tied=True for the embedding table",
        )
    problems = split_problems(x.shape, OPERAND, (EMBED,), name="x", role=Role.ACTIVATION)
    problems += split_problems(weight.shape, axes, (EMBED,), name="head", path=path)
    raise_problems(problems)
    return weight


def _logits(
    x: Any, weight: Any, tied: bool, cap: float | None, vocab: int | None = None
) -> jax.Array:
    # float32 needs no custom derivative: `_matmul_jvp` would equal the derivative of JAX.
    values = (_einsum if x.dtype == jnp.float32 else _matmul)(x, weight, tied)
    if cap is not None:
        values = cap * jnp.tanh(values / cap)
    if vocab is None:
        return values
    # Hide the logits of padding after the softcap, because its tanh would turn -inf into -cap.
    number = jax.lax.broadcasted_iota(jnp.int32, values.shape, 2)
    return jnp.where(number < vocab, values, -jnp.inf)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _matmul(x: Any, weight: Any, tied: bool) -> jax.Array:
    return _einsum(x, weight, tied)


@functools.partial(_matmul.defjvp, symbolic_zeros=True)
def _matmul_jvp(tied: bool, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """Compute the tangent of the logits in the dtype of the operands.

    The transpose of this rule then rounds the cotangent to this dtype. JAX's own rule multiplies a
    float32 cotangent with both operands. On a GPU, such float32 matmuls run at half the speed or
    less, and a float32 cotangent takes twice the memory.
    """
    (x, weight), (dx, dweight) = primals, tangents
    # A frozen head has no tangent, so leave its term out.
    terms = [
        _einsum(*pair, tied, dtype=x.dtype)
        for pair in ((dx, weight), (x, dweight))
        if not any(isinstance(each, SymbolicZero) for each in pair)
    ]
    return _matmul(x, weight, tied), functools.reduce(jnp.add, terms).astype(jnp.float32)


def _einsum(x: Any, weight: Any, tied: bool, *, dtype: Any = jnp.float32) -> jax.Array:
    # Compute logits in float32: the loss subtracts a logit, and bfloat16 has two or three digits.
    values: jax.Array = einsum(
        "ble,ve->blv" if tied else "ble,ev->blv",
        x,
        weight,
        out=LOGITS,
        preferred_element_type=dtype,
    )
    return values


def _sums(values: Any, labels: Any, ignore: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the sums of cross-entropy and squared logsumexp, and the number of tokens."""
    counts = (labels != ignore) & (labels >= 0)
    total = jax.nn.logsumexp(values, axis=-1)
    # Compare instead of indexing: an index into a sharded vocabulary would gather the logits.
    is_label = jax.lax.broadcasted_iota(jnp.int32, values.shape, 2) == labels[..., None]
    # Use a select and not a product with 0 and 1: the logits of padding are -inf, and 0 * -inf is
    # NaN.
    chosen = jnp.sum(jnp.where(is_label, values, 0), axis=-1)
    entropy = jnp.sum(jnp.where(counts, total - chosen, 0))
    square = jnp.sum(jnp.where(counts, jnp.square(total), 0))
    return entropy, square, jnp.sum(counts, dtype=jnp.int32)


def _by_chunks(sums: Any, x: Any, labels: Any, weight: Any, chunks: int) -> Any:
    """Compute the sums chunk by chunk, and add them.

    Chunk i has the tokens whose position modulo `chunks` is i. So each shard of the length has a
    part of every chunk, and no tokens are sent.
    """
    batch, length, embed = x.shape
    x = x.reshape(batch, length // chunks, chunks, embed)
    labels = labels.reshape(batch, length // chunks, chunks)

    # Without `jax.checkpoint`, the scan would keep the logits of every chunk for the backward pass.
    @jax.checkpoint
    def step(carry: Any, at: Any) -> tuple[Any, None]:
        # Index the chunks. If they were `xs` of the scan, their dim would have to be dim 0, and x
        # would be copied.
        part = sums(
            jax.lax.dynamic_index_in_dim(x, at, 2, keepdims=False),
            jax.lax.dynamic_index_in_dim(labels, at, 2, keepdims=False),
        )
        return jax.tree.map(jnp.add, carry, part), None

    zero = jnp.zeros((), jnp.float32)
    zeros = zero, zero, jnp.zeros((), jnp.int32)
    # Inside shard_map, the sums vary over the shards, so the carry must vary from the start.
    start = tuple(_jax.vary_together([*zeros, x, labels, weight])[:3])
    return jax.lax.scan(step, start, jnp.arange(chunks))[0]


def _cap(softcap: float | None) -> float | None:
    if softcap is not None:
        read_value("softcap", softcap, SOFTCAP, error=LayerError)
    return softcap


def _check_padding(weight: Any, tied: bool, vocab: Any) -> None:
    if vocab is not None:
        size = weight.shape[0 if tied else 1]
        fix = f"pass the number of tokens without padding, at most the {size} of head"
        read_integer("vocab", vocab, error=LayerError, most=size, fix=fix)


def _check_labels_in(labels: Any, vocab: int, ignore: int) -> None:
    """Check labels against the vocabulary, if this process can read all of their values.

    The check adds no operations to the program.
    """
    read_integer("ignore", ignore, error=LayerError, least=-(2**31), fix="pass ignore=-100")
    values = as_concrete(labels)
    if values is None or not values.size:
        return
    values = values.astype(np.int64)
    largest = np.max(values, initial=-1, where=values != ignore)
    if largest >= vocab:
        raise LayerError(
            f"the label {largest} is not in the vocabulary of {vocab} tokens",
            path="labels",
            fix=f"if this label marks padding, pass ignore={largest}; if not, pass a larger head",
        )


def _check_labels(x: Any, labels: Any, chunks: int) -> None:
    if labels.shape != x.shape[:2]:
        raise RankMismatchError(
            f"labels have shape {labels.shape}, and x has shape {x.shape}",
            path="labels",
            fix=f"pass shape {x.shape[:2]}, one label per token",
        )
    read_integer("chunks", chunks, error=LayerError, fix="pass 1 for all tokens at once")
    manager, length = context.current(), x.shape[1]
    # If a shard_map has split the length, `length` is the length of a shard.
    is_local = manager is None or any(split_over((length,), (QUERY_LENGTH,)))
    shards = 1 if is_local else manager.axis_size(QUERY_LENGTH, length)
    if (length // shards) % chunks:
        what = f"length {length}" if shards == 1 else f"length {length // shards} of a shard"
        raise RankMismatchError(
            f"chunks={chunks} does not divide the {what}",
            path="chunks",
            fix="pass a number that divides the length, such as 1",
        )
