"""The one reader of arguments: the definition of a field says which values it takes.

    scale: Annotated[float, number("positive", fix="write scale=1.0")] = 1.0

`Literal`, classes and unions of classes need no `FieldKind`. An `Any` without a `FieldKind` is not
checked. A fix may contain `{name}`, the name of the field.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import numbers
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.errors import Problem, ShardingError, did_you_mean, raise_problems
from shardwright.vocabulary.integers import as_integer, integer_faults, quoted, with_article

Faults = Sequence[tuple[str, str]]  # what is wrong, and the fix
# Class of dtypes -> the word that messages use for its members.
_CLASSES: Final = {jnp.integer: "integers", jnp.floating: "floats"}
_WORDS: Final = {bool: "True or False", Callable: "a function", type(None): "None"}


class FieldKind(NamedTuple):
    """The values that a field takes.

    `read` takes the name and the value of a field. It returns the value as the program uses it, and
    the faults of the value.
    """

    read: Callable[[str, Any], tuple[Any, Faults]]


def passes(test: Callable[[Any], object], what: str, *, fix: str) -> FieldKind:
    """Return the kind of a field that takes the values for which `test` is true.

    `what` is the end of the message, such as "is not positive" after `scale=-1`.
    """
    return FieldKind(
        lambda name, value: (
            (value, [] if test(value) else [(f"{name}={quoted(value)} {what}", fix)])
        )
    )


def instance(*classes: Any, fix: str = "") -> FieldKind:
    """Return the kind of a field that takes instances of these classes."""
    words = " or ".join(_WORDS.get(each) or with_article(each) for each in classes)

    def read(name: str, value: Any) -> tuple[Any, Faults]:
        if isinstance(value, classes):
            return value, []
        shown = "it" if value is None or hasattr(value, "shape") else quoted(value)
        what = f"{shown} is {with_article(type(value))}, not {words}"
        return value, [(what, fix or f"pass {words}")]

    return FieldKind(read)


def one_of(names: Collection[str]) -> FieldKind:
    """Return the kind of a field that takes one of the listed names."""

    def read(name: str, value: Any) -> tuple[Any, Faults]:
        if isinstance(value, str) and value in names:
            return value, []
        fix = f"{did_you_mean(str(value), names)} write one of {', '.join(names)}"
        return value, [(f"{name}={quoted(value)} is unknown", fix.strip())]

    return FieldKind(read)


def choice(words: type[enum.StrEnum]) -> FieldKind:
    """Return the kind of a field that takes a member of an enum, or its text."""
    known = one_of([*map(str, words)])

    def read(name: str, value: Any) -> tuple[Any, Faults]:
        faults = known.read(name, value)[1]
        return (value if faults else words(value)), faults

    return FieldKind(read)


def integer(least: int = 1, most: int | None = None, fix: str = "") -> FieldKind:
    """Return the kind of a field that takes Python and NumPy integers in a range.

    If `fix` is empty, the error proposes the nearest integer in the range.
    """
    return FieldKind(
        lambda name, value: (
            (as_integer(value), integer_faults(name, value, least=least, most=most, fix=fix))
        )
    )


def number(sign: Literal["any", "positive", "not negative"] = "any", *, fix: str) -> FieldKind:
    """Return the kind of a field that takes finite Python numbers.

    It takes no arrays, because an array cannot be compiled into a program.
    """
    # `math.ulp(0.0)` is the smallest positive float, so `>= lowest` means above 0.
    lowest = {"any": -math.inf, "positive": math.ulp(0.0), "not negative": 0}[sign]
    words = {"any": "", "positive": " above 0", "not negative": " of at least 0"}[sign]

    def fits(value: Any) -> bool:
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            return False
        # Compare as a Python float: NumPy would compare a float32 with these limits in float32.
        try:
            return math.isfinite(value) and float(value) >= lowest
        except OverflowError:  # an integer beyond float64
            return False

    return passes(fits, f"is not a finite Python number{words}", fix=fix)


def floating(*, fix: str) -> FieldKind:
    """Return the kind of a field that takes the floating-point dtypes of JAX, as NumPy dtypes."""

    def read(name: str, value: Any) -> tuple[Any, Faults]:
        try:
            dtype = np.dtype(jnp.dtype(value))
        except TypeError:
            return value, [(f"{name}={quoted(value)} is not a dtype", fix)]
        # `longdouble` has more than 8 bytes, and JAX has no such dtype.
        if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 8:
            return value, [(f"{name}={dtype} is not a floating-point dtype of JAX", fix)]
        # If x64 is off, JAX would only warn, and use a narrower dtype.
        if (kept := jax.dtypes.canonicalize_dtype(dtype)) != dtype:
            return value, [(f"JAX makes {kept} of {dtype}", f"pass {kept}, or set jax_enable_x64")]
        return dtype, []

    return FieldKind(read)


def _read_rate(name: str, value: Any) -> tuple[Any, Faults]:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if is_number and 0 <= value < 1:
        return value, []
    compiled = ": the value is compiled into the program" if isinstance(value, jax.Array) else ""
    what = f"{name}={quoted(value)} is not a Python number in [0, 1)"
    return value, [(what, f"write 0.1, or 0{compiled}")]


# A probability of dropping: below 1, because the kept values are divided by `1 - rate`.
RATE: Final = FieldKind(_read_rate)


def array(*shapes: tuple[int, ...], dtype: Any, layout: str = "", cast: str = "") -> FieldKind:
    """Return the kind of a field that takes arrays.

    An array must have one of the shapes. `dtype` is its dtype, or a class such as `jnp.floating`.

    `layout` is the fix of a wrong shape, `cast` the fix of a wrong dtype.
    """
    name_of = _CLASSES.get(dtype) or str(dtype)
    known = " or ".join(map(str, shapes))
    usual = f"pass {name_of} of shape {known}"

    def read(name: str, value: Any) -> tuple[Any, Faults]:
        if not hasattr(value, "shape"):
            return value, [(f"it is {type(value).__name__}, not an array", usual)]
        faults = []
        if tuple(value.shape) not in shapes:
            faults.append((f"shape {tuple(value.shape)}, not {known}", layout or usual))
        if not jnp.issubdtype(value.dtype, dtype):
            fix = cast.format(name=name, own=value.dtype, dtype=dtype)
            faults.append((f"dtype {value.dtype}, not {name_of}", fix or usual))
        return value, faults

    return FieldKind(read)


def read_value(name: str, value: Any, kind: FieldKind, *, error: type[ShardingError]) -> Any:
    """Return one argument as the program uses it, or raise its faults."""
    return read_all([(name, value, kind)], error=error)[0]


def read_all(
    given: Iterable[tuple[str, Any, FieldKind]], *, error: type[ShardingError]
) -> list[Any]:
    """Return named values as the program uses them. Raise all faults at once."""
    values, broken = [], []
    for name, value, kind in given:
        read, faults = kind.read(name, value)
        values.append(read)
        # `replace` and not `format`, because a fix may contain other braces.
        broken += [(True, name, what, fix.replace("{name}", name)) for what, fix in faults]
    if broken:
        refuse(error, *broken)
    return values


def refuse(error: type[ShardingError], *rules: tuple[object, str, str, str]) -> None:
    """Raise one error for all broken rules. A rule is (is it broken, path, what is wrong, fix)."""
    broken = [each for is_broken, *each in rules if is_broken]
    raise_problems([Problem(error=error, path=at, what=what, fix=fix) for at, what, fix in broken])


def read_fields(config: Any, *, error: type[ShardingError]) -> None:
    """Read the fields of a frozen dataclass by their annotations; call it in `__post_init__`."""
    given = [
        (name, value, kind)
        for name, kind, default in _kinds(config.__class__)
        if (value := getattr(config, name)) is not default
    ]
    for (name, value, _), read in zip(given, read_all(given, error=error), strict=True):
        if read is not value:
            object.__setattr__(config, name, read)


@functools.cache
def _kinds(cls: Any) -> list[tuple[str, FieldKind, Any]]:
    # Read the annotations at the first construction and not at import: they may name classes that
    # are defined later. A subclass that a caller defines may add fields of any kind. The caller
    # checks these fields.
    *_, cls = (base for base in cls.__mro__ if "__post_init__" in vars(base))
    hints = typing.get_type_hints(cls, include_extras=True)
    kinds = [(each.name, _kind(hints[each.name]), each.default) for each in dataclasses.fields(cls)]
    return [(name, kind, default) for name, kind, default in kinds if kind]


def _kind(hint: Any) -> FieldKind | None:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return next(each for each in args if isinstance(each, FieldKind))
    if origin is Literal:
        return one_of(args)
    members = args if origin in (typing.Union, types.UnionType) else (hint,)
    special = [each for each in members if typing.get_origin(each) in (Annotated, Literal)]
    if special:  # such as `Literal["a", "b"] | None`
        kind = _kind(special[0])
        return kind and FieldKind(
            lambda name, it: (None, []) if it is None else kind.read(name, it)
        )
    classes = [typing.get_origin(each) or each for each in members]
    return None if Any in classes else instance(*classes)
