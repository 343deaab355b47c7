"""Models of equinox: annotate their arrays by path or by inference, and place them.

The model's source does not change. Only arrays are annotated. In the trees that `annotate`, `infer`
and `arrays` return, any other leaf, such as an activation function, is None, as after
`equinox.filter`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardwright.errors import StrategyError
from shardwright.inference.infer import infer_axes
from shardwright.inference.inferred import Inferred
from shardwright.interop import logical_rules
from shardwright.interop.logical_rules import library
from shardwright.trees.paths import match_paths

if TYPE_CHECKING:
    from shardwright.manager.manager import PartitionManager


def annotate(model: Any, rules: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Any:
    """Return a tree with the annotation of each array of `arrays(model)`, chosen by its path.

    Args:
      model: A model of equinox, or its shapes from `equinox.filter_eval_shape`.
      rules: Pattern of a path -> annotation, as for `sw.match_paths`.
        `tomllib.loads(inferred.toml())` is such a mapping.

    Raises:
      StrategyError: An array matches no rule, a rule matches no array, or a pattern or an
        annotation is invalid.

    >>> import equinox as eqx, jax, shardwright as sw
    >>> model = eqx.nn.MLP(4, 4, 8, 1, use_bias=False, use_final_bias=False, key=jax.random.key(0))
    >>> up, down = (sw.MLP_INTERMEDIATE, sw.EMBED), (sw.EMBED, sw.MLP_INTERMEDIATE)
    >>> annotate(model, {"layers/0/weight": up, "layers/1/weight": down}).layers[0].weight
    ('__MLP_INTERMEDIATE__', '__EMBED__')
    """
    # The first match wins. A mapping that is read from TOML keeps the order of its file.
    pairs = rules.items() if isinstance(rules, Mapping) else rules
    matched = match_paths(arrays(model), pairs)
    if matched.unused:
        what = f"rules that match no array of the model: {', '.join(map(repr, matched.unused))}"
        raise StrategyError(what, fix="correct the patterns, or remove the rules")
    return matched.annotations


def infer(
    model: Any,
    *inputs: Any,
    seeds: Sequence[Any],
    call: Callable[..., Any] | None = None,
    sizes: Mapping[int | str, str] | None = None,
    own_axes: Iterable[str] = (),
    strict: bool = False,
) -> Inferred:
    """Trace a model once, and infer the axes of each of its arrays. Nothing is computed.

    Args:
      model: A model of equinox, or its shapes from `equinox.filter_eval_shape`.
      *inputs: Arguments of `call` after the model: trees of arrays or of their shapes.
      seeds: The axes of each array of the inputs, such as `[(BATCH, LENGTH), None]`.
      call: Function of the model and the inputs. Defaults to `model(*inputs)`. For a batch, a model
        that takes one example needs `lambda model, tokens: jax.vmap(model)(tokens)`.
      sizes: Size of a dim -> its axis, as the model's config says.
      own_axes: Axes of your own that `seeds` and `sizes` name, such as `strategy.axes`.
      strict: Whether a dim without a name, with two names or with a guessed name is an error.

    Returns:
      An `Inferred`. Its `annotations` have the structure of the model.

    Raises:
      StrategyError: There are not as many seeds as arrays. With `strict`, a dim has no name, two
        names or a guessed name.
      UnknownAxisError: See `sw.infer_axes`.

    >>> import equinox as eqx, jax, shardwright as sw
    >>> model = eqx.nn.Embedding(16, 4, key=jax.random.key(0))
    >>> tokens = jax.ShapeDtypeStruct((8,), "int32")
    >>> def call(model, tokens):
    ...     return jax.vmap(model)(tokens)
    >>> infer(model, tokens, seeds=[(sw.BATCH,)], call=call).annotations.weight
    ('__VOCAB__', '__EMBED__')
    """
    equinox = library("equinox")
    values = arrays(model)
    # Other leaves, such as functions and sizes, are not traced, so join them with the arrays again
    # inside the trace.
    rest = equinox.filter(model, _is_array, inverse=True)

    def forward(values: Any, *inputs: Any) -> Any:
        whole = equinox.combine(values, rest)
        return whole(*inputs) if call is None else call(whole, *inputs)

    options: Any = {"sizes": sizes, "own_axes": own_axes, "strict": strict}
    return infer_axes(forward, values, *inputs, seeds=seeds, **options)


def place(model: Any, pm: "PartitionManager", annotations: Any) -> Any:
    """Return a model with its arrays placed as parameters. Other leaves are not changed.

    Args:
      model: A model of equinox.
      pm: The manager.
      annotations: Annotations of the model's arrays: the result of `annotate`, or
        `infer(...).annotations`.

    Raises:
      StrategyError: `pm` is not a manager.
    """
    return library("equinox").combine(logical_rules.place(arrays(model), pm, annotations), model)


def arrays(model: Any) -> Any:
    """Return a model with None for each leaf that is neither an array nor a ShapeDtypeStruct."""
    return library("equinox").filter(model, _is_array)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
