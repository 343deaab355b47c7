"""Walk over a jaxpr, and find which dims are the same and how the program uses them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.extend import core

from shardwright import _jax
from shardwright.dims.primitives import REDUCTIONS, SCATTERS
from shardwright.inference import control, elementwise, indexing, manual, matmuls, shapes
from shardwright.inference.atoms import new_dims
from shardwright.inference.constraints import is_candidate, numbered
from shardwright.inference.evidence import EquationLocation, Evidence
from shardwright.inference.facts import Facts, Output
from shardwright.inference.kernels import Kernels
from shardwright.inference.step import ArrayFacts, InferenceStep

# To add a primitive, write a function in a file such as `matmuls` and a line here. Most functions
# ask `dims.table` which dims correspond. If a primitive has no line, the jaxpr inside it is walked.
# If it has no jaxpr, it counts as elementwise if its shapes fit. Otherwise nothing is known about
# the dims of its results.
RULES: Final[dict[str, Callable[[InferenceStep], list[ArrayFacts]]]] = {
    **dict.fromkeys((*REDUCTIONS, "reduce"), elementwise.reduction),
    **dict.fromkeys(["argmax", "argmin"], indexing.arg_reduction),
    **dict.fromkeys(
        ["reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"],
        shapes.pool,
    ),
    **dict.fromkeys(["reshape", "squeeze", "expand_dims"], shapes.reshape),
    **dict.fromkeys(
        ["random_bits", "random_wrap", "random_seed", "random_fold_in", "random_split"],
        indexing.random,
    ),
    **dict.fromkeys((*SCATTERS, "scatter-sub"), indexing.scatter),
    **dict.fromkeys(
        # psum_invariant is the psum of a `shard_map` that tracks varying axes. In older versions of
        # JAX, its name is psum2.
        ["psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "pvary", "pbroadcast"],
        manual.collective,
    ),
    **dict.fromkeys(
        ["all_gather", "all_gather_invariant", "all_to_all", "reduce_scatter"], manual.resized
    ),
    "broadcast_in_dim": shapes.broadcast,
    "concatenate": shapes.concatenate,
    "cond": control.cond,
    "conv_general_dilated": matmuls.convolution,
    "dot_general": matmuls.dot_general,
    "dynamic_update_slice": indexing.update_slice,
    "gather": indexing.gather,
    "iota": shapes.iota,
    **dict.fromkeys(["pad", "tile"], shapes.pad),
    "ragged_dot_general": matmuls.ragged_dot,
    "scan": control.scan,
    "shard_map": manual.shard_map,
    **dict.fromkeys(["slice", "dynamic_slice", "split"], shapes.cut),
    "stack": shapes.stack,
    "top_k": indexing.top_k,
    "transpose": shapes.transpose,
    "unstack": shapes.unstack,  # JAX 0.12
    "while": control.while_loop,
}
_SCALAR: Final = ArrayFacts(dims=())
_BACKWARD: Final = "transpose("  # part of the scope of operations that `jax.grad` transposes
_JAX: Final = f"{Path(jax.__file__ or '').resolve().parent}{os.sep}"


class FactWalker:
    """Walk over jaxprs and record facts.

    Args:
      kernels: Functions that stand for kernels, by name.
    """

    def __init__(self, kernels: Kernels | None = None) -> None:
        self.facts = Facts()
        self.kernels = Kernels({}) if kernels is None else kernels

    def walk(
        self,
        jaxpr: Any,
        values: Sequence[ArrayFacts],
        called_at: Any = None,
        place: tuple[int, ...] | None = None,
    ) -> list[ArrayFacts]:
        """Return the results of a jaxpr.

        Args:
          jaxpr: An open jaxpr. Nothing is known about its constants.
          values: One value per input.
          called_at: The equation that calls the jaxpr, or None. Evidence inside a function of JAX
            names this equation, because JAX caches the function with the source lines of its first
            call.
          place: The place of the jaxpr in the program. If it is None, no intermediate is recorded.
        """
        known: dict[Any, ArrayFacts] = dict(zip(jaxpr.invars, values, strict=True))
        known |= {variable: _unknown(variable.aval) for variable in jaxpr.constvars}
        # the file that defines the function; for `jnp.take`, it is a file of JAX
        function = getattr(getattr(jaxpr, "debug_info", None), "func_src_info", "") or ""
        caller = called_at if _JAX in str(function) else None

        def read(variable: Any) -> ArrayFacts:
            if isinstance(variable, core.Literal):
                return _unknown(variable.val) if np.ndim(variable.val) else _SCALAR
            return known[variable]

        for at, equation in numbered(jaxpr):
            step = InferenceStep(
                equation=equation,
                location=EquationLocation(equation, equation if caller is None else caller),
                values=[read(variable) for variable in equation.invars],
                facts=self.facts,
                walk=self.walk,
                place=None if place is None else (*place, at),
            )
            results = self._results(step)
            self._record(step, results)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def _record(self, step: InferenceStep, results: Sequence[ArrayFacts]) -> None:
        """Record the result of an equation if it may get a constraint."""
        if step.place is None or len(results) != 1 or not results[0].data:
            return
        if is_candidate(step.equation.primitive.name, step.values):
            output = Output(
                place=step.place,
                dims=results[0].dims,
                shape=step.shapes[0],
                is_lookup=any(value.one_hot is not None for value in step.values),
                location=step.location,
            )
            self.facts.outputs.append(output)

    def _results(self, step: InferenceStep) -> list[ArrayFacts]:
        if _BACKWARD in _jax.scope(step.equation):
            # The matmuls of a gradient do not belong to the model. The forward pass has all facts.
            return step.new_results()
        name = step.equation.primitive.name
        if name in RULES:
            return RULES[name](step)
        # Check kernels before calls: a Pallas kernel has a jaxpr too, but this jaxpr is about
        # blocks of memory.
        kernel = _jax.kernel_name(step.equation)
        if kernel:
            known, name = self.kernels.walk(step, kernel), f"{name} {kernel}"
        else:
            known = control.call(step)
            # An equation with a jaxpr that no rule reads is not elementwise, even if all shapes are
            # equal.
            if known is None and not list(core.jaxprs_in_params(step.equation.params)):
                known = elementwise.elementwise(step)
        if known is not None:
            return known
        # If all results are scalars, they have no dims, so no fact is lost.
        if any(step.shapes):
            reason = "its results have new dims"
            self.facts.unknown.setdefault(name, Evidence(reason, step.location))
        return step.new_results()


def _unknown(value: Any) -> ArrayFacts:
    return ArrayFacts(dims=new_dims(np.shape(value)))
