"""The one reader of arguments: what a declaration allows, and what it says of other values."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.errors import LayerError, ShardingError
from shardwright.layers.norm import NormConfig
from shardwright.vocabulary import read
from shardwright.vocabulary.read import array, instance, integer, number, one_of, passes
from tests.raising import facts, raises

ARRAY = array(
    (2, 3), dtype="float32", layout="pass [batch, length]", cast="pass {name}.astype({dtype})"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    size: Annotated[int, integer(fix="give a size")]
    window: Annotated[int, integer(0)] | None = None
    scale: Annotated[float, number("positive", fix="write scale=1.0")] = 1.0
    order: Literal["rows", "columns"] = "rows"
    mode: Literal["fast"] | None = None
    causal: bool = True
    names: tuple[str, ...] = ()
    init: Callable[..., Any] | None = None
    dtype: Any = None

    def __post_init__(self) -> None:
        read.read_fields(self, error=LayerError)


def test_a_declaration_allows_what_it_names() -> None:
    read_options = Options(size=np.int64(3), window=np.uint8(0), scale=2, mode="fast", init=print)
    assert read_options == Options(size=3, window=0, scale=2, mode="fast", init=print)
    assert type(read_options.size) is int
    assert type(read_options.window) is int


REFUSED: list[tuple[str, Any, str, str]] = [
    ("size", 2.5, "must be a positive integer, got 2.5", "give a size"),
    ("size", True, "got True", "give a size"),
    ("window", -1, "must be a non-negative integer, got -1", "pass window=0"),
    ("scale", float("nan"), "is not a finite Python number above 0", "write scale=1.0"),
    ("scale", 10**400, "is not a finite Python number", "write scale=1.0"),
    ("scale", 0, "is not a finite Python number above 0", "write scale=1.0"),
    ("scale", np.ones(()), "is not a finite Python number", "write scale=1.0"),
    ("order", "row", "order='row' is unknown", "did you mean 'rows'? write one of rows, col"),
    ("order", None, "order=None is unknown", "write one of rows, columns"),
    ("order", [], "order=[] is unknown", "write one of rows, columns"),
    ("mode", "slow", "mode='slow' is unknown", "write one of fast"),
    ("causal", 1, "1 is an int, not True or False", "pass True or False"),
    ("names", ["a"], "['a'] is a list, not a tuple", "pass a tuple"),
    ("init", 3, "3 is an int, not a function or None", "pass a function or None"),
]


def test_other_values_are_refused() -> None:
    for field, value, what, fix in REFUSED:
        with pytest.raises(LayerError) as caught:
            Options(**{"size": 1, field: value})
        (problem,) = caught.value.problems
        assert problem.path == field
        assert what in problem.what
        assert fix in problem.fix


def test_all_problems_are_raised_at_once() -> None:
    with pytest.raises(LayerError) as caught:
        Options(size=0, scale=-1, causal=None)
    assert [problem.path for problem in caught.value.problems] == ["size", "scale", "causal"]
    assert str(caught.value).startswith("3 problems\n 1. size must be a positive integer, got 0\n")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.ones((2, 3), np.float32), []),
        (np.ones((3, 2), np.float32), [("shape (3, 2), not (2, 3)", "pass [batch, length]")]),
        (np.ones((2, 3), int), [("dtype int64, not float32", "pass x.astype(float32)")]),
        ([[1]], [("it is list, not an array", "pass float32 of shape (2, 3)")]),
    ],
)
def test_arrays_have_a_shape_and_a_dtype(value: Any, found: list[Any]) -> None:
    assert ARRAY.read("x", value)[1] == found


def test_arrays_may_have_one_of_several_shapes() -> None:
    rows = array((2, 3), (3,), dtype=np.integer)
    for value in (np.ones((2, 3), int), np.ones(3, np.uint8)):
        assert rows.read("x", value)[1] == []
    usual = "pass integers of shape (2, 3) or (3,)"
    wrong = [("shape (2,), not (2, 3) or (3,)", usual), ("dtype float64, not integers", usual)]
    assert rows.read("x", np.ones(2))[1] == wrong


def test_arguments_are_read_in_order() -> None:
    even = passes(lambda value: value % 2 == 0, "is odd", fix="pass an even one")
    given = [("n", np.int32(4), integer()), ("name", "a", one_of("ab")), ("even", 2, even)]
    assert read.read_all(given, error=ShardingError) == [4, "a", 2]
    with raises(LayerError, 3, path="x", fix=("str", "float")):
        read.read_value("x", 3, instance(str, float), error=LayerError)


def test_broken_rules_are_raised_together() -> None:
    rules = [(size > 1, "x", f"{size} is above 1", "pass 1") for size in (1, 2, 3)]
    read.refuse(LayerError, *rules[:1])
    with pytest.raises(LayerError) as caught:
        read.refuse(LayerError, *rules)
    assert [problem.what for problem in caught.value.problems] == ["2 is above 1", "3 is above 1"]


@pytest.mark.parametrize("value", [np.float32("inf"), np.float32(0), np.float16("nan"), 10**400])
def test_numbers_are_compared_as_python_floats(value: Any) -> None:
    """NumPy would compare a scalar of 32 bits with the limits of float64 in float32."""
    with raises(LayerError, "epsilon", path="epsilon"):
        NormConfig(epsilon=value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert NormConfig(epsilon=np.float32(1e-6)).epsilon == np.float32(1e-6)


@pytest.mark.parametrize("rate", [0, 0.5, np.int64(0), np.float32(0.5), np.float16(0)])
def test_rates_are_numbers_of_python_and_numpy(rate: Any) -> None:
    assert read.read_value("rate", rate, read.RATE, error=LayerError) == rate


@pytest.mark.parametrize("rate", [1, -0.5, np.nan, False, "0", None, np.zeros(()), np.int64(1)])
def test_other_rates_are_refused(rate: Any) -> None:
    with raises(LayerError, "Python number", "[0, 1)", path="rate", fix="0.1") as caught:
        read.read_value("rate", rate, read.RATE, error=LayerError)
    assert "compiled" not in caught.value.problems[0].fix


def test_an_array_is_no_rate() -> None:
    """Its value is known, but that of a traced array is not, and the program has the rate in it."""
    message = facts("Python number", "[0, 1)", path="rate", fix="compiled")
    with raises(LayerError, message):
        read.read_value("rate", jnp.float32(0.1), read.RATE, error=LayerError)
    with raises(LayerError, message):
        jax.jit(lambda rate: read.read_value("rate", rate, read.RATE, error=LayerError))(0.1)


def test_a_subclass_may_add_fields_of_any_kind() -> None:
    class Kind:
        pass

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(NormConfig):
        extra: float = 1
        number: Annotated[int, "a number"] = 2
        local: Kind | None = None
        choice: Literal[1, 2] = 1

    assert Mine(epsilon=1e-5).extra == 1
    with raises(LayerError, "epsilon", path="epsilon"):
        Mine(epsilon=-1.0)
