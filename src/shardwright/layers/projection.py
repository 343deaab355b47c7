"""The matmuls of a block: in its compute dtype, or in fp8 if its config has a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from shardwright.errors import LayerError, raise_problems
from shardwright.layers import dense, lora
from shardwright.layers.dense import NamedSizes
from shardwright.layers.fp8 import state as scaling
from shardwright.layers.fp8.dense import DenseResult
from shardwright.layers.fp8.dense import dense as quantized_dense
from shardwright.layers.fp8.recipe import DelayedScaling, Recipe
from shardwright.layers.fp8.state import USES_FIX
from shardwright.layers.fp8.weights import stored
from shardwright.layers.lora import LoraConfig
from shardwright.layers.placement import is_inside_shard_map, path_of, split_problems, use
from shardwright.trees.paths import path_text
from shardwright.vocabulary.annotations import is_annotation
from shardwright.vocabulary.axes import EMPTY


def specs(
    inputs: NamedSizes, outputs: NamedSizes, *, adaptation: LoraConfig | None, **options: Any
) -> dict[str, Any]:
    """Return the parameters of a matmul: those of `dense.specs`, and `lora` if it is adapted.

    Args:
      inputs: Axis and size of the dims that are contracted.
      outputs: Axis and size of the dims of the result.
      adaptation: The low-rank adaptation, or None.
      **options: As in `dense.specs`.
    """
    tree: dict[str, Any] = {**dense.specs(inputs, outputs, **options)}
    if adaptation is not None:
        # B starts at 0, so an adapted matmul starts equal to the unadapted one.
        given = {"init": options.get("init"), "dtypes": options["dtypes"]}
        tree["lora"] = lora.specs(adaptation, inputs, outputs, **given)
    return tree


def init_scaling(
    recipe: Any, groups: Mapping[str, Sequence[str]], layers: int | None
) -> dict[str, Any] | None:
    """Return the first state of delayed scaling for each input; None for other recipes.

    Args:
      recipe: The recipe of the block, or None.
      groups: The kernels that read each input: name of the group -> names of its kernels.
      layers: Size of a leading dim, for stacked parameters, or None.
    """
    if not isinstance(recipe, DelayedScaling):
        return None
    return {group: scaling.init(recipe, names, layers=layers) for group, names in groups.items()}


def gather_weights(
    recipe: Recipe | None, params: Mapping[str, Any], specs: Mapping[str, Any], *, path: str | None
) -> dict[str, Any]:
    """Gather the parameters of a block. Kernels that a recipe quantizes are not gathered here.

    Args:
      recipe: The recipe of the block, or None.
      params: `{name: {"kernel": ..., "bias": ...}}`, and norms.
      specs: The `ArraySpec`s of `params`.
      path: Path of `params` in the model, or None.

    Raises:
      LayerError: A `shard_map` has split a weight over a mesh axis that is not gathered. The error
        names all such weights.
    """
    if is_inside_shard_map():
        leaves = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_annotation)[0]
        names = {path_text(keys): spec for keys, spec in leaves}
        raise_problems(
            [
                problem
                for name, spec in names.items()
                for problem in split_problems(
                    spec.shape, spec.axes, name=name, path=path_of(path, name)
                )
            ]
        )
    if recipe is None:
        gathered: dict[str, Any] = use(params, specs, path=path)
        return gathered
    weights = {}
    for name, part in specs.items():
        place = path_of(path, name)
        kernel = part.get("kernel")
        rest = {key: spec for key, spec in part.items() if key != "kernel"}
        # Biases and norms are gathered as usual. The kernel stays as stored, so that FSDP sends
        # fp8.
        weights[name] = use({key: params[name][key] for key in rest}, rest, path=place)
        if kernel is not None:
            own = path_of(place, "kernel")
            weights[name]["kernel"] = stored(params[name]["kernel"], kernel, path=own)
    return weights


def project(
    x: Any,
    weights: Mapping[str, Any],
    *,
    out: Mapping[str, Any],
    axes: Any,
    recipe: Recipe | None = None,
    state: Any = None,
    adaptation: LoraConfig | None = None,
    contract: int = 1,
    dtype: Any = None,
) -> DenseResult:
    """Multiply one input with each of the kernels that `out` names.

    Args:
      x: `[..., *inputs]`.
      weights: The result of `gather_weights`.
      out: Annotation of each result.
      axes: Annotation of `x`.
      recipe: The recipe of the block, or None.
      state: The `DenseUse` of delayed scaling, or None.
      adaptation: The low-rank adaptation of every matmul, or None. Its own matmuls are not in fp8.
      contract: Number of dims that are contracted.
      dtype: Dtype of the operands and the results. Defaults to that of `x`.

    Raises:
      RankMismatchError: The shapes do not fit each other.
      LayerError: As `fp8.dense` raises it.
      ShardingError: An annotation does not fit its array, the rules or the mesh.
    """
    kernels = {name: weights[name]["kernel"] for name in out}
    biases = {name: weights[name].get("bias") for name in out}
    options: dict[str, Any] = {"contract": contract, "dtype": dtype}
    if recipe is None:
        ys = {
            name: dense.dense(x, kernel, biases[name], out=out[name], **options)
            for name, kernel in kernels.items()
        }
        result = DenseResult(ys=ys, seen=None)
    else:
        result = quantized_dense(
            x, kernels, recipe=recipe, use=state, biases=biases, out=out, axes=axes, **options
        )
    if adaptation is None:
        return result
    # A sharded rank would need an all-reduce after the matmul with B, so the rank is replicated.
    inner = (*axes[: len(axes) - contract], EMPTY)
    adapted = {
        name: y
        + lora.apply(adaptation, weights[name]["lora"], x, out=out[name], inner=inner, **options)
        for name, y in result.ys.items()
    }
    return dataclasses.replace(result, ys=adapted)


def parts_of(recipe: Recipe | None, state: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the state of each group of matmuls. Without a recipe or a state, each is None.

    Raises:
      LayerError: The groups of the state are not those of the block.
    """
    if recipe is None or not isinstance(state, Mapping):
        return dict.fromkeys(names)
    if set(state) != set(names):
        raise LayerError(
            f"the state is that of {', '.join(map(str, state))}, not of {', '.join(names)}",
            path="state",
            fix=USES_FIX,
        )
    return {name: state[name] for name in names}
