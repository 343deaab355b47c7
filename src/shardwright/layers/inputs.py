"""Check what callers give to layers: parameters, keys, and the fields of configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwright import _jax
from shardwright.errors import LayerError, Problem, RankMismatchError, did_you_mean, raise_problems
from shardwright.layers.placement import path_of
from shardwright.manager import context
from shardwright.resolution.request import ShardingRequest
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.integers import with_article
from shardwright.vocabulary.keys import as_key
from shardwright.vocabulary.read import array, integer, read_value

SIZE: Final = integer(fix="pass a positive integer, such as {name}=32")
KEYS: Final = ("dropout",)  # the names that a block reads in `keys`
_KEYS_FIX: Final = 'pass keys={"dropout": jax.random.key(0)}; leave keys out to drop nothing'
_UNKNOWN_FIX: Final = (
    "set the option of the config that adds it, such as bias= or lora=, or leave it out"
)


def check_params(specs: Any, params: Any, *, path: str | None, create: str) -> None:
    """Check that parameters have the names and the shapes of their specs.

    Inside a `shard_map`, the shape of a parameter is not checked if the rules of the manager shard
    the parameter over a Manual mesh axis. Without a manager nothing is gathered, so each parameter
    must have its whole shape.

    Args:
      specs: Tree of `ArraySpec`s. The nodes are dicts.
      params: Tree of arrays.
      path: Path of `params` in the model, for the message.
      create: Call that returns the specs, for the message, such as "moe.specs(config)".

    Raises:
      LayerError: A parameter is missing, has a wrong shape, or is not described by the config. The
        error lists all such parameters.
    """
    found = _problems(specs, params, (), path)
    raise_problems(
        [
            Problem(
                error=LayerError,
                what=what,
                path=path or "",
                fix=fix or f"create the parameters from {create}",
            )
            for what, fix in found
        ]
    )


def check_names(names: tuple[str, ...], params: Any, *, create: str) -> None:
    """Check that a dict of parameters has these names and no others.

    Raises:
      LayerError: Names are missing or unknown. The error lists all such names.
    """
    check_params(dict.fromkeys(names), params, path=None, create=create)


def _problems(
    specs: Any, params: Any, parents: tuple[str, ...], path: str | None
) -> Iterator[tuple[str, str]]:
    """Yield each problem of a tree, with its fix, or "" for the usual fix of `check_params`."""
    if not isinstance(params, Mapping):
        where = f"parameter {'/'.join(parents)} is" if parents else "the parameters are"
        yield (
            f"{where} {with_article(type(params))}, not a dict of {', '.join(map(str, specs))}",
            "",
        )
        return
    for name, spec in specs.items():
        place = (*parents, str(name))
        value = params.get(name)
        if value is None:
            yield f"parameter {'/'.join(place)} is missing", ""
        elif isinstance(spec, Mapping):
            yield from _problems(spec, value, place, path)
        elif spec is not None and not _has_shape(value, spec, path_of(path, "/".join(place))):
            what = (
                f"has shape {value.shape}"
                if hasattr(value, "shape")
                else f"is {with_article(type(value))}"
            )
            yield f"parameter {'/'.join(place)} {what}, and the config needs {spec.shape}", ""
    for name in params:
        if name not in specs:
            known = f"the names are {', '.join(map(str, specs))}"
            where = "/".join((*parents, str(name)))
            yield f"the config describes no parameter {where}: {known}", _UNKNOWN_FIX


def _has_shape(value: Any, spec: Any, path: str | None) -> bool:
    """Return True if a parameter has the shape of its spec, or may be a shard in a `shard_map`."""
    if getattr(value, "shape", None) == spec.shape:
        return True
    manager = context.current()
    if manager is None:
        return False
    # `spec.shape` is global, so the weight resolves as it does outside of the `shard_map`.
    request = ShardingRequest(spec.axes, spec.shape, None, Role.PARAM, path)
    manual = manager.manual_axes(_jax.ambient_mesh())
    return any(manual.intersection(each.mesh_axes) for each in manager.answer(request).decisions)


def check_valid(valid: Any, rows: tuple[int, ...]) -> None:
    """Check `valid`, which says for each row whether it is a token. None: all rows are tokens.

    Raises:
      LayerError: The array is not bool, or does not have one element per row.
    """
    if valid is not None:
        kind = array(rows, dtype="bool", layout=f"pass one bool for each row of x, {rows}")
        read_value("valid", valid, kind, error=LayerError)


def read_keys(keys: Any) -> jax.Array | None:
    """Return the key of dropout, or None if nothing is dropped.

    Args:
      keys: `{"dropout": key}`, or None. A key of the old kind, a uint32 array, becomes a typed key.

    Raises:
      LayerError: `keys` is not a mapping, a name is unknown, or the value is not one key.
    """
    if keys is None:
        return None
    if not isinstance(keys, Mapping):
        raise LayerError(
            f"keys is {with_article(type(keys))}, not a dict", path="keys", fix=_KEYS_FIX
        )
    if unknown := [str(name) for name in keys if name not in KEYS]:
        raise LayerError(
            f"keys has the unknown name {', '.join(map(repr, unknown))}; "
            f"the known names are {', '.join(KEYS)}",
            path="keys",
            fix=f"{did_you_mean(unknown[0], KEYS)} {_KEYS_FIX}".strip(),
        )
    given = keys.get("dropout")
    return None if given is None else read_key('keys["dropout"]', given, fix=_KEYS_FIX)


def read_key(name: str, value: Any, *, fix: str) -> jax.Array:
    """Return one typed key. A key of the old kind, a uint32 array, becomes a typed key.

    Raises:
      LayerError: `value` is not one key.
    """
    key = as_key(value)
    if key is None:
        shape = f" of shape {value.shape}" if hasattr(value, "shape") else ""
        what = f"it is {with_article(type(value))}{shape}, not one key"
        raise LayerError(what, path=name, fix=fix)
    return key


def read_array(name: str, value: Any, dims: str, *, integers: bool = False) -> jax.Array:
    """Return an array, or numbers in nested lists, as a JAX array.

    Args:
      name: Name of the argument.
      value: The argument.
      dims: Dims that the argument must have, such as "[batch, length]".
      integers: Whether the array must have integers.

    Raises:
      LayerError: `value` is None, a dict, or another value that is not an array. Or `integers` is
        true, and the elements are not integers.
      RankMismatchError: `value` has another number of dims.
    """
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        what = f"{name} is {with_article(type(value))}, not an array"
        raise LayerError(what, path=name, fix="pass a JAX or NumPy array") from error
    if array.ndim != 1 + dims.count(","):
        raise RankMismatchError(f"{name} has shape {array.shape}", path=name, fix=f"pass {dims}")
    if integers and not jnp.issubdtype(array.dtype, jnp.integer):
        raise LayerError(f"{name} are {array.dtype}", path=name, fix="pass integers")
    return array


def as_concrete(value: Any) -> np.ndarray | None:
    """Return an array as NumPy; None if it is traced or if other processes have parts of it."""
    if isinstance(value, jax.core.Tracer):
        return None
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    return np.asarray(value)
