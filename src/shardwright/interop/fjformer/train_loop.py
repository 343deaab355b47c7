"""Training-loop utilities: per-call PRNG keys, host metrics."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardwright.errors import StrategyError
from shardwright.interop.fjformer.tree_names import flatten_tree


def wrap_function_with_rng(rng: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that passes a new key as the first argument of every call.

    Each call splits the stored key: `rng, key = jax.random.split(rng)`. Threads may call at the
    same time. Each call gets a different key, which depends on the order of the calls. All
    functions that one decorator decorates share the stored key.

    Raises:
      StrategyError: (From a call.) The call is inside a trace, and the key was created outside.
        Every run of the compiled program would use the same key.

    >>> @wrap_function_with_rng(jax.random.key(0))
    ... def noise(key, shape):
    ...     return jax.random.normal(key, shape)
    >>> bool((noise((2,)) != noise((2,))).all())
    True
    """
    lock = threading.Lock()
    stored = rng

    def next_key() -> Any:
        nonlocal stored
        with lock:
            following, key = jax.random.split(stored)
            if isinstance(following, jax.core.Tracer) and not isinstance(stored, jax.core.Tracer):
                raise StrategyError(
                    (
                        "the call is inside a trace, so every run of the compiled program would "
                        "use the same key"
                    ),
                    fix="call the function outside jit, or pass it a key as an argument",
                )
            stored = following
            return key

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_key(*args: Any, **kwargs: Any) -> Any:
            return function(next_key(), *args, **kwargs)

        return with_key

    return decorate


def get_metrics(metrics: Any, unreplicate: bool = False, stack: bool = False) -> Any:
    """Move metrics to the host: a dict of floats, or with `stack` a dict of NumPy arrays.

    Args:
      metrics: A dict of scalars; with `stack`, a list of such dicts, one per step, which may be
        nested.
      unreplicate: Whether metrics have a leading axis of replicas. The first replica is returned.
      stack: Whether to stack the steps along a new leading axis.

    Raises:
      StrategyError: A metric is not a real scalar, or has no axis of replicas; or steps have
        different metrics, or metrics that do not stack.

    >>> get_metrics({"loss": jax.numpy.float32(0.5)})
    {'loss': 0.5}
    """
    _check_numbers(metrics)
    if stack:
        return _stacked(
            [
                jax.device_get(_first_replicas(step) if unreplicate else step)
                for step in _steps(metrics)
            ]
        )
    if not isinstance(metrics, Mapping):
        raise StrategyError(
            f"metrics is a {type(metrics).__name__}, not a dict",
            fix="pass one dict of scalars, or stack=True for a list",
        )
    return {
        name: _scalar(name, value)
        for name, value in jax.device_get(
            _first_replicas(metrics) if unreplicate else metrics
        ).items()
    }


def _check_numbers(metrics: Any) -> None:
    for name, value in flatten_tree(metrics, sep="/", is_leaf=lambda leaf: leaf is None).items():
        dtype = getattr(value, "dtype", None)
        kinds = (np.number, np.bool_)
        number = (
            isinstance(value, int | float | complex)
            if dtype is None
            else any(jax.numpy.issubdtype(dtype, kind) for kind in kinds)
        )
        if not number:
            what = (
                f"{value!r:.40} of type {type(value).__name__}"
                if dtype is None
                else f"of dtype {dtype}"
            )
            raise StrategyError(
                f"metric {name!r} is {what}, not a number", fix="leave it out of the metrics"
            )


def _steps(metrics: Any) -> list[Any]:
    if not isinstance(metrics, Sequence) or not metrics:
        what = "an empty list" if metrics == [] else f"a {type(metrics).__name__}"
        raise StrategyError(
            f"metrics to stack are {what}", fix="pass a list with one dict per step"
        )
    return list(metrics)


def _stacked(steps: list[Any]) -> Any:
    first: Any = jax.tree.structure(steps[0])
    for number, step in enumerate(steps):
        if jax.tree.structure(step) != first:
            names = [
                ", ".join(flatten_tree(either, sep="/")) or "nothing" for either in (step, steps[0])
            ]
            raise StrategyError(
                f"step {number} has the metrics {names[0]}, and step 0 has {names[1]}",
                fix="stack steps with the same metrics",
            )
    flat = [flatten_tree(step, sep="/") for step in steps]
    stacked = [_stack(name, [step[name] for step in flat]) for name in flat[0]]
    return jax.tree.unflatten(first, stacked)


def _stack(name: str, values: list[Any]) -> np.ndarray:
    for number, value in enumerate(values):
        if np.shape(value) != np.shape(values[0]):
            what = (
                f"metric {name!r} has shape {np.shape(value)} in step {number}, "
                f"and {np.shape(values[0])} in step 0"
            )
            raise StrategyError(what, fix="stack steps whose metrics have one shape")
    try:
        return np.stack(values)
    except TypeError as error:
        dtypes = ", ".join(dict.fromkeys(str(np.asarray(value).dtype) for value in values))
        what = f"metric {name!r} has the dtypes {dtypes}, which NumPy cannot stack"
        raise StrategyError(what, fix="give the metric one dtype in every step") from error


def _first_replicas(metrics: Any) -> Any:
    for name, value in flatten_tree(metrics, sep="/").items():
        if np.ndim(value) == 0:
            raise StrategyError(
                f"metric {name!r} is a scalar without an axis of replicas",
                fix="leave unreplicate out",
            )
        if np.shape(value)[0] == 0:
            raise StrategyError(
                f"metric {name!r} of shape {np.shape(value)} has no replicas",
                fix="pass what the devices returned",
            )
    return jax.tree.map(lambda value: value[0], metrics)


def _scalar(name: str, value: Any) -> float:
    if not jax.tree_util.all_leaves([value]):
        fix = 'flatten nested metrics first, with fjformer.flatten_tree(metrics, sep="/")'
        raise StrategyError(f"metric {name!r} is a {type(value).__name__}, not a scalar", fix=fix)
    if np.iscomplexobj(value):
        raise StrategyError(
            f"metric {name!r} is complex, and a float cannot hold it",
            fix="take its real part, or its absolute value, in the step",
        )
    if np.size(value) != 1:
        fix = "reduce it in the step" + (
            ", or pass unreplicate=True" if np.ndim(value) == 1 else ""
        )
        raise StrategyError(f"metric {name!r} of shape {np.shape(value)} is not a scalar", fix=fix)
    return float(np.reshape(value, ()))
