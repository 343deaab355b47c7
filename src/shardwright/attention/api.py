"""The public call: read the inputs, choose an implementation, run it."""

from __future__ import annotations

from typing import Any

from shardwright import _jax
from shardwright.attention.choose import Choice, choose
from shardwright.attention.inputs import Defaults, describe, manager_of, read, read_options
from shardwright.attention.run import run, run_inline


def dot_product_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mode: str | None = None,
    implementation: str | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    segment_ids: Any = None,
    kv_segment_ids: Any = None,
    positions: Any = None,
    kv_positions: Any = None,
    lengths: Any = None,
    mask: Any = None,
    bias: Any = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout: float | None = None,
    dropout_key: Any = None,
    layout: str = "BTHD",
    return_lse: bool = False,
    return_weights: bool = False,
    metadata: Defaults | None = None,
) -> Any:
    """Return `softmax(softcap(scale * q k^T + bias)) v`, where the softmax is over visible keys.

    Under an ambient manager, q is sharded by (BATCH, QUERY_LENGTH, HEAD, HEAD_DIM), and k and v by
    (BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM). The rules of the mode give the three shardings, which
    must fit each other. The result equals that of an unsharded call. Softmax and sums are float32.
    The output of a query that sees no key is exactly 0. All masks compare positions. In an array
    that is a mask, True means that the query attends to the key.

    | positions given | position of a query | position of a key |
    | --- | --- | --- |
    | none | row number plus kv_length - q_length: the last query is at the last key | row number |
    | none, decode with `lengths` | lengths - q_length plus row number | row number |
    | `positions`, decode | as given | row number, as in a cache |
    | `positions`, train, as many queries as keys | as given | as given |
    | both | as given | as given; a negative position hides the row |
    | `kv_positions` without causal, window, chunk | not used | as given; negative hides the row |

    Any other combination is ambiguous, and raises an error.

    Args:
      q: `[batch, q_length, heads, head_dim]`.
      k: `[batch, kv_length, kv_heads, head_dim]`. Query head h reads kv head
        `h * kv_heads // heads`.
      v: `[batch, kv_length, kv_heads, v_dim]`.
      mode: Runtime mode. Defaults to the manager's.
      implementation: A name, or "auto". Defaults to the name that the strategy has for the mode
        under `[attention]`, else to "auto". `explain` shows the choice.
      causal: Whether a query sees only keys up to its own position.
      window: (left, right): how many positions a query sees before and after its own. None means no
        bound. `(w - 1, 0)` is a window of w tokens, the query's own included.
      chunk: Positions per chunk. A query sees only keys of its own chunk.
      segment_ids: `[batch, q_length]` int. Rows with equal ids see each other.
      kv_segment_ids: `[batch, kv_length]` int. Defaults to `segment_ids`.
      positions: `[batch, q_length]` or `[q_length]` int; see the table.
      kv_positions: `[batch, kv_length]` or `[kv_length]` int; see the table.
      lengths: `[batch]` int. Only keys at positions below the length of their sequence are visible.
      mask: A `masks.Mask`, or bool `[batch, heads, q_length, kv_length]`, where each dim has its
        full size or 1.
      bias: `[batch, heads, q_length, kv_length]`, where each dim has its full size or 1. It is
        added to the scaled logits. A bias of at most -2e38 hides the key from the query.
      sinks: `[heads]`, a logit per head that takes part in the softmax but has no value.
      k_scale: `[batch, kv_length, kv_heads]` float32 (in layout "BHTD"
        `[batch, kv_heads, kv_length]`) for int8 or float8 keys. Each key is `k * k_scale`. The
        scale multiplies the scores, so the keys are not copied. A call with scales has no gradient.
      v_scale: As `k_scale`, for the values. Quantized values must have k's dtype. The scale
        multiplies the weights.
      softcap: c in `c * tanh(logits / c)`.
      scale: Factor of the scores, q · k. Defaults to `1 / sqrt(head_dim)`.
      dropout: Probability of dropping a weight; 0 means no dropout. Which weights are dropped does
        not depend on the mesh. Defaults to 0 or, in mode train, to the value of `metadata`.
      dropout_key: A JAX key, or an integer seed.
      layout: Layout of q, k, v and the output: "BTHD", or "BHTD" for `[batch, heads, length,
        head_dim]`.
      return_lse: Whether to return a `Result` with the logsumexp, `[batch, heads, q_length]`
        float32.
      return_weights: Whether to return a `Result` with the weights, `[batch, heads, q_length,
        kv_length]`.
      metadata: Values for the keywords that are left out, such as an
        `interop.easydel.AttentionMetadata`.

    Returns:
      The output, in the layout of q, with v_dim in place of head_dim. A `Result` if the call also
      asks for the logsumexp or the weights.

    Raises:
      AttentionError: The arguments do not fit each other, or no implementation can serve the call.
        Raised before anything is traced.
      NoManagerError: No manager is entered or passed, and the call has no mode.
      ShardingError: The rules of the manager do not fit the arrays.
    """
    keywords = dict(locals())
    for name in ("q", "k", "v", "implementation", "metadata"):
        del keywords[name]
    options = read_options(keywords, metadata)
    operands, call = read(q, k, v, options)
    choice = choose(call, implementation=implementation, manager=manager_of(options))
    ambient = _jax.ambient_mesh()
    inside = ambient is not None and ambient.manual_axes
    result = (run_inline if inside else run)(choice.require(), operands, call)
    return result if options.return_lse or options.return_weights else result.o


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    implementation: str | None = None,
    metadata: Defaults | None = None,
    **options: Any,
) -> Choice:
    """Return the implementation that `dot_product_attention` chooses, and why the others refuse.

    Print the result to read it.

    Args:
      q: An array, or a `jax.ShapeDtypeStruct`.
      k: Likewise.
      v: Likewise.
      implementation: As for `dot_product_attention`.
      metadata: As for `dot_product_attention`.
      **options: The other keywords of `dot_product_attention`.

    Raises:
      AttentionError: As for `dot_product_attention`.
      ShardingError: As for `dot_product_attention`.
    """
    all_options = read_options(options, metadata)
    call = describe(q, k, v, all_options)
    return choose(call, implementation=implementation, manager=manager_of(all_options))
