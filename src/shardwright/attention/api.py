"""The public call."""

from __future__ import annotations

from typing import Any

from shardwright.attention.call import AttentionCall
from shardwright.attention.choose import AUTO, Choice, choose
from shardwright.attention.inputs import Options, describe, make_operands, make_options
from shardwright.attention.metadata import AttentionMetadata
from shardwright.attention.run import serve
from shardwright.manager import context


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
    metadata: AttentionMetadata | None = None,
) -> Any:
    """Attend: `softmax(softcap(scale * q k^T + bias))` over the keys that the mask lets through, times v.

    Under an ambient manager q, k and v lie as (BATCH, QUERY_LENGTH, HEAD, HEAD_DIM) and (BATCH, KV_LENGTH, KV_HEAD,
    KV_HEAD_DIM) resolve in the mode, jointly; the result is that of an unsharded call. Softmax and sums are float32.
    A query that sees no key gets exactly 0. Everything masks by position; True = attend.

    | positions given | a query stands at | a key stands at |
    | --- | --- | --- |
    | none | its row number plus kv_length - q_length: the last query at the last key | its row number |
    | none, decode with `lengths` | lengths - q_length plus its row number: the last query at the last valid key | its row number |
    | `positions`, decode | as given | its row number: a cache |
    | `positions`, train, as many queries as keys | as given | as given |
    | both | as given | as given; a negative position hides the row |

    Anything else is refused, so that nothing is guessed.

    Args:
      q: `[batch, q_length, heads, head_dim]`.
      k: `[batch, kv_length, kv_heads, head_dim]`; query head h reads kv head `h * kv_heads // heads`.
      v: `[batch, kv_length, kv_heads, v_dim]`.
      mode: runtime mode; absent: the manager's.
      implementation: a name, or "auto"; absent: what the strategy names for the mode under `[attention]`, else "auto". `explain`
        shows the choice.
      causal: no key after the query.
      window: (left, right), positions seen before and after the query; None for no bound. `(w - 1, 0)` is w tokens.
      chunk: length of chunks that do not see each other.
      segment_ids: `[batch, q_length]` int; rows with equal ids see each other.
      kv_segment_ids: `[batch, kv_length]` int; absent: `segment_ids`.
      positions: `[batch, q_length]` or `[q_length]` int; see the table.
      kv_positions: `[batch, kv_length]` or `[kv_length]` int; see the table.
      lengths: `[batch]` int; keys at positions below are seen.
      mask: a `masks.Mask`, or bool `[batch, heads, q_length, kv_length]`, each dim full or 1.
      bias: added to the scaled logits, `[batch, heads, q_length, kv_length]`, each dim full or 1. At most -2e38 hides the pair.
      sinks: `[heads]`, a logit per head that takes weight and gives nothing.
      k_scale: `[batch, kv_length, kv_heads]` float32 (layout "BHTD": `[batch, kv_heads, kv_length]`) of int8 or float8 keys, each
        of which is `k * k_scale`; logits are multiplied by it, and no copy of the keys is made. Has no gradient.
      v_scale: likewise of the values, which then have k's dtype; weights are multiplied by it.
      softcap: c in `c * tanh(logits / c)`.
      scale: factor of the products; absent: `1 / sqrt(head_dim)`.
      dropout: probability with which a weight is dropped; which ones is the same on every mesh. Absent: the metadata's in
        training, else 0; 0 is none in any case.
      dropout_key: a JAX key, or an integer seed.
      layout: of q, k, v and the output: "BTHD", or "BHTD" `[batch, heads, length, head_dim]`.
      return_lse: return a `Result` with the logsumexp too, `[batch, heads, q_length]` float32.
      return_weights: return a `Result` with the weights too, `[batch, heads, q_length, kv_length]`.
      metadata: an `AttentionMetadata`, for what the other keywords do not say.

    Returns:
      The output like q with v's head_dim; or a `Result` if more is asked for.

    Raises:
      AttentionError: the arguments do not go together, or no implementation can serve them; before anything is traced.
      ShardingError: the arrays do not lie on the mesh as the rules say.
    """
    given = dict(locals())
    for name in ("q", "k", "v", "implementation", "metadata"):
        given.pop(name)
    options = make_options(given) if metadata is None else metadata.options(given)
    return attend(q, k, v, options=options, implementation=implementation)


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    implementation: str | None = None,
    metadata: AttentionMetadata | None = None,
    **options: Any,
) -> Choice:
    """Return which implementation `dot_product_attention` would take, and why not the others; print it.

    The arguments are those of `dot_product_attention`; arrays may be `jax.ShapeDtypeStruct`s.

    Raises:
      AttentionError: as there.
    """
    found = make_options(options) if metadata is None else metadata.options(options)
    return _choose(describe(q, k, v, options=found)[0], found, implementation)


def attend(q: Any, k: Any, v: Any, *, options: Options, implementation: str | None = None) -> Any:
    """Attend as options say; see `dot_product_attention`."""
    call, mask = describe(q, k, v, options=options)
    chosen = _choose(call, options, implementation).require()
    found = serve(chosen, make_operands(q, k, v, options=options, call=call, mask=mask), call)
    return found if options.return_lse or options.return_weights else found.o


def _choose(call: AttentionCall, options: Options, implementation: str | None) -> Choice:
    """Choose by what the call says, else by what the manager's strategy says of the mode."""
    manager = options.manager if options.manager is not None else context.current()
    if implementation is not None or manager is None:
        return choose(call, implementation=implementation or AUTO)
    line = manager.rules.attention_in(call.mode)
    return choose(call) if line is None else choose(call, implementation=line.text, line=line)
