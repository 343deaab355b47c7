"""What stands around a training step: a key per call, metrics on the host."""

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
    """Return a decorator that gives a function a new key as its first argument in every call.

    Each call splits the key that is kept: `rng, key = jax.random.split(rng)`. Threads may call at once: each call gets a
    key of its own, but which one depends on who comes first. All functions decorated by one result share its key.

    Raises:
      StrategyError: (from a call) the key is drawn inside a trace in which it was not made: it would be one and the same in
        every run of the compiled program.

    >>> @wrap_function_with_rng(jax.random.key(0))
    ... def noise(key, shape):
    ...     return jax.random.normal(key, shape)
    >>> bool((noise((2,)) != noise((2,))).all())
    True
    """
    lock = threading.Lock()
    kept = rng

    def next_key() -> Any:
        nonlocal kept
        with lock:
            following, key = jax.random.split(kept)
            if isinstance(following, jax.core.Tracer) and not isinstance(kept, jax.core.Tracer):
                raise StrategyError(
                    "a key per call was drawn inside a trace: every run of the compiled program would use the same one",
                    fix="call the function outside jit, or pass it a key as an argument",
                )
            kept = following
            return key

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_key(*args: Any, **kwargs: Any) -> Any:
            return function(next_key(), *args, **kwargs)

        return with_key

    return decorate


def get_metrics(metrics: Any, unreplicate: bool = False, stack: bool = False) -> Any:
    """Bring metrics to the host: a dict of floats, or with `stack` a dict of NumPy arrays from a list of dicts.

    Args:
      metrics: a dict of scalars; with `stack` one such dict per step, which may be nested.
      unreplicate: take the first along a leading axis of replicas.
      stack: put the steps on a new leading axis.

    Raises:
      StrategyError: a metric that is no real scalar, or that has no axis of replicas; steps with other metrics, or whose metrics
        do not stack.

    >>> get_metrics({"loss": jax.numpy.float32(0.5)})
    {'loss': 0.5}
    """
    _check_numbers(metrics)
    if stack:
        return _stacked(
            [
                jax.device_get(_first_replicas(one) if unreplicate else one)
                for one in _steps(metrics)
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
    for at, step in enumerate(steps):
        if jax.tree.structure(step) != first:
            names = [", ".join(flatten_tree(one, sep="/")) or "nothing" for one in (step, steps[0])]
            raise StrategyError(
                f"step {at} has the metrics {names[0]}, step 0 has {names[1]}",
                fix="stack steps with the same metrics",
            )
    flat = [flatten_tree(step, sep="/") for step in steps]
    made = [_stack(name, [step[name] for step in flat]) for name in flat[0]]
    return jax.tree.unflatten(first, made)


def _stack(name: str, values: list[Any]) -> np.ndarray:
    for at, value in enumerate(values):
        if np.shape(value) != np.shape(values[0]):
            what = f"metric {name!r} has shape {np.shape(value)} in step {at}, {np.shape(values[0])} in step 0"
            raise StrategyError(what, fix="stack steps whose metrics have one shape")
    try:
        return np.stack(values)
    except TypeError as error:
        dtypes = ", ".join(dict.fromkeys(str(np.asarray(value).dtype) for value in values))
        what = f"metric {name!r} is {dtypes} in different steps, which NumPy cannot stack"
        raise StrategyError(what, fix="give it one dtype in every step") from error


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
        fix = 'flatten nested metrics first: shardwright.interop.fjformer.tree_names.flatten_tree(metrics, sep="/")'
        raise StrategyError(f"metric {name!r} is a {type(value).__name__}, not a scalar", fix=fix)
    if np.iscomplexobj(value):
        raise StrategyError(
            f"metric {name!r} is complex: no float holds it",
            fix="take its real part, or its absolute value, in the step",
        )
    if np.size(value) != 1:
        fix = "reduce it in the step" + (
            ", or pass unreplicate=True" if np.ndim(value) == 1 else ""
        )
        raise StrategyError(f"metric {name!r} of shape {np.shape(value)} is no scalar", fix=fix)
    return float(np.reshape(value, ()))
