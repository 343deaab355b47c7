"""The conformance table of attention: each cell equals the oracle, or `supports` refuses it.

A cell is an implementation × a case × a dtype × a mesh × axis types × a mode.
`AttentionConformance` is a test class that runs the cells of one implementation.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.attention.api import dot_product_attention, explain
from shardwright.attention.call import AttentionCall
from shardwright.attention.inputs import read, read_options
from shardwright.manager.manager import PartitionManager
from shardwright.mesh.build import create_mesh, parse_mesh
from shardwright.strategy.model import Strategy
from shardwright.testing import attention_oracle as oracle
from shardwright.testing.attention_cases import AXIS_TYPES, CASES, DTYPES, MESHES, STRATEGY, Case
from shardwright.testing.meshes import cpu_mesh

# On a CPU, optimizing a program takes five times as long as everything else, and each program runs
# once. So do not optimize, and compile each program in one piece, which is less work. Before JAX
# 0.11, compiling without fusion emitters takes half the time.
QUICK: Final[dict[str, bool | int]] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    **({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}),
}
OUTPUTS: Final = ("o", "lse")
# Half a unit in the last place of a float32 number between 1 and 2.
FLOAT32_UNIT: Final = 2.0**-24


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """The largest errors that an implementation may have.

    Attributes:
      forward: Largest difference of float32 outputs, relative to the largest value if that value is
        above 1.
      backward: Largest difference of float32 gradients, relative in the same way.
      relative: Largest norm of a bfloat16 error, relative to the norm of the expected values.
    """

    forward: float = 2e-6
    backward: float = 1e-5
    relative: float = 5e-3

    def times(self, factor: float) -> Tolerances:
        """Return larger tolerances."""
        return Tolerances(
            forward=self.forward * factor,
            backward=self.backward * factor,
            relative=self.relative * factor,
        )

    def with_logits(self, spread: float) -> Tolerances:
        """Return tolerances that also allow the largest error of rounding a logit to float32.

        The largest of normally distributed logits is about 4 standard deviations. An absolute error
        of a logit is a relative error of its probability.

        Args:
          spread: Standard deviation of the logits.
        """
        unit = 4 * spread * FLOAT32_UNIT
        return dataclasses.replace(self, forward=self.forward + unit, backward=self.backward + unit)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    """One comparison: a case in a dtype, by an implementation, on a mesh, in a mode.

    The mesh has virtual CPU devices, or the first of `devices` if there are any.
    """

    implementation: str
    case: Case
    dtype: str
    mesh: str
    axis_types: str
    mode: str
    devices: tuple[jax.Device, ...] = ()

    def __str__(self) -> str:
        mode = f"-{self.mode}" if self.mode != self.case.mode else ""
        where = f"{self.dtype}-{self.mesh}-{self.axis_types}"
        return f"{self.implementation}-{self.case.name}-{where}{mode}"


def product(
    case: Case, mesh: str, implementations: tuple[str, ...], dtypes: Sequence[str] = DTYPES
) -> Iterator[Cell]:
    """Yield every cell of a case on a mesh: all dtypes, axis types, implementations and modes."""
    for dtype, axis_types in itertools.product(dtypes, AXIS_TYPES):
        for mode in ("train", "prefill") if case.mode == "train" else (case.mode,):
            for name in implementations:
                yield Cell(
                    implementation=name,
                    case=case,
                    dtype=dtype,
                    mesh=mesh,
                    axis_types=axis_types,
                    mode=mode,
                )


class AttentionConformance:
    """The tests of an implementation of attention. Subclass it in a test module:

        class TestHalves(AttentionConformance):
            implementation = "halves"

    A cell that the implementation refuses is a skipped test with the reasons. A cell that the
    implementation serves must equal the oracle, in values and gradients.

    Attributes:
      implementation: The registered name.
      refuses: Function that tells whether a call must be refused. The test fails if `supports`
        decides otherwise. With None, `supports` may refuse any call.
      tolerances: The largest errors.
      every: Whether to test every cell of the conformance table, more than 2,000. By default, each
        case runs on two meshes only.
      devices: Devices of the meshes, such as `jax.devices("gpu")`. Meshes with more devices are
        left out. Defaults to virtual CPU devices.
      dtypes: Dtypes of queries, keys and values, which may include float16. With float32, the
        default matmuls of GPUs and TPUs are too coarse: set `jax_default_matmul_precision`.
    """

    implementation: ClassVar[str] = ""
    refuses: ClassVar[Callable[[AttentionCall], bool] | None] = None
    tolerances: ClassVar[Tolerances] = Tolerances()
    every: ClassVar[bool] = False
    devices: ClassVar[Sequence[jax.Device]] = ()
    dtypes: ClassVar[Sequence[str]] = DTYPES

    @classmethod
    def cells(cls) -> list[Cell]:
        """Return the cells to test.

        By default, each case has two cells, which take the meshes, dtypes and axis types in turn.
        """
        if cls.every:
            return [
                dataclasses.replace(cell, devices=tuple(cls.devices))
                for case in CASES
                for mesh in cls._meshes()
                for cell in product(case, mesh, (cls.implementation,), cls.dtypes)
            ]
        names = cls._meshes()
        combinations = tuple(itertools.product(cls.dtypes, AXIS_TYPES))
        cells = []
        for number, case in enumerate(CASES):
            for which in range(2):
                # 7 meshes and 4 combinations have no common factor, so every mesh meets every
                # combination in the first 28 cases.
                at = (2 * number + which + 1) % len(names)
                dtype, axis_types = combinations[(number + 3 * which) % len(combinations)]
                cells.append(
                    Cell(
                        implementation=cls.implementation,
                        case=case,
                        dtype=dtype,
                        mesh=names[at],
                        axis_types=axis_types,
                        mode=case.mode,
                        devices=tuple(cls.devices),
                    )
                )
        return cells

    @classmethod
    def _meshes(cls) -> list[str]:
        """Return the names of the meshes that the devices can form."""
        most = len(cls.devices)
        sizes = {name: math.prod(parse_mesh(text).sizes) for name, text in MESHES.items()}
        return [name for name, size in sizes.items() if not most or size <= most]

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make a test of each cell; pytest calls this hook."""
        if "cell" in metafunc.fixturenames:
            metafunc.parametrize("cell", self.cells(), ids=str)

    def test_equals_the_oracle_or_says_why_not(self, cell: Cell) -> None:
        """Compare the values and the gradients of one cell."""
        refused = check(cell, refuses=type(self).refuses, tolerances=self.tolerances)
        if refused:
            raise unittest.SkipTest(f"refused: {'; '.join(refused)}")

    def test_serves_something(self) -> None:
        """Fail if the implementation refuses every cell."""
        _must(
            any(not _choose(cell, _values(cell))[1] for cell in self.cells()),
            f"{self.implementation} refuses every cell",
        )


def check(
    cell: Cell, *, refuses: Callable[[AttentionCall], bool] | None, tolerances: Tolerances
) -> tuple[str, ...]:
    """Assert that an implementation equals the oracle on a cell, or refuses it.

    Args:
      cell: The cell.
      refuses: Function that tells whether a call must be refused; None accepts any refusal.
      tolerances: The largest errors.

    Returns:
      The reasons of the refusal; none if the cell was compared.

    Raises:
      AssertionError: The implementation differs, or refuses more or less than it should.
    """
    case, values = cell.case, _values(cell)
    call, refused = _choose(cell, values)
    if refuses is not None:
        _must(bool(refused) == refuses(call), f"{cell}: {list(refused) or 'not refused'}")
    _must(
        all(reason and "\n" not in reason for reason in refused),
        f"{cell}: a reason must be one line: {refused}",
    )
    if refused:
        return refused
    with _manager(cell):
        attend = functools.partial(dot_product_attention, **_keywords(cell))
        results = _results(
            _program(
                attend, case, cell.dtype, values, mesh=cell.mesh, gradients=cell.mode == "train"
            ),
            cell.devices[0].platform if cell.devices else "cpu",
        )
    expected = _expected(case, cell.dtype)
    names = {name for name in expected if cell.mode == "train" or name in OUTPUTS}
    _must(set(results) == names, f"{cell}: it returns {sorted(results)}, not {sorted(names)}")
    # Compare outputs first: if an output is wrong, its gradients are too, and the message should
    # name the output.
    for name in sorted(results, key=lambda name: (name not in OUTPUTS, name)):
        # In a bfloat16 cell, the gradient of a float32 bias has bfloat16 errors too.
        dtypes = {
            cell.dtype,
            cell.dtype if name in OUTPUTS else str(values[name.removeprefix("d")].dtype),
        }
        _compare(
            f"{cell}: {name}",
            results[name],
            expected[name],
            tolerances.times(case.slack).with_logits(case.spread),
            "float32" if dtypes == {"float32"} else "bfloat16",
        )
    return ()


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def _values(cell: Cell) -> dict[str, Any]:
    return cell.case.values(cell.dtype)


def _keywords(cell: Cell) -> dict[str, Any]:
    return {**cell.case.options, "mode": cell.mode, "implementation": cell.implementation}


def _manager(cell: Cell) -> PartitionManager:
    options: Any = {"axis_types": cell.axis_types}
    text = MESHES[cell.mesh]
    if cell.devices:
        mesh = create_mesh(text, devices=cell.devices, **options)
    else:
        mesh = cpu_mesh(text, **options)
    return PartitionManager(Strategy.loads(STRATEGY), mesh=mesh)


def _choose(cell: Cell, values: dict[str, Any]) -> tuple[AttentionCall, tuple[str, ...]]:
    """Return the call of a cell, and the reasons why the implementation refuses it."""
    with _manager(cell):
        choice = explain(**values, **_keywords(cell))
    return choice.call, tuple(reason for refusal in choice.refusals for reason in refusal.reasons)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _LoweredCase:
    """A lowered program and its arguments.

    Programs with equal text are compiled once: if no length is sharded, several implementations
    lower to the same program.
    """

    text: bytes
    inputs: tuple[str, str]
    mesh: str
    lowered: Any = dataclasses.field(compare=False)
    args: Any = dataclasses.field(compare=False)


def _program(
    attend: Callable[..., Any],
    case: Case,
    dtype: str,
    values: dict[str, Any],
    *,
    mesh: str,
    gradients: bool,
) -> _LoweredCase:
    """Lower a function that returns the outputs by name.

    With `gradients`, the function also returns the gradients of a loss with respect to each float
    input. The loss depends on every output.
    """
    floats = {name: x for name, x in values.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    rest = {name: x for name, x in values.items() if name not in floats}

    def outputs(floats: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
        result = attend(**floats, **rest)
        return (
            {"o": result} if isinstance(result, jax.Array) else {"o": result.o, "lse": result.lse}
        )

    def loss(floats: dict[str, Any], rest: dict[str, Any], weights: Any) -> Any:
        result = outputs(floats, rest)
        weighed = jnp.sum(result["o"].astype(jnp.float32) * weights)
        if "lse" in result:
            # The derivative of sin differs from row to row, so a wrong factor in one row is
            # noticed.
            weighed += jnp.sum(jnp.where(jnp.isneginf(result["lse"]), 0.0, jnp.sin(result["lse"])))
        return weighed, result

    def everything(floats: dict[str, Any], rest: dict[str, Any], weights: Any) -> dict[str, Any]:
        (_, result), grads = jax.value_and_grad(loss, has_aux=True)(floats, rest, weights)
        return {**result, **{f"d{name}": grad for name, grad in grads.items()}}

    args = (floats, rest, case.weights()) if gradients else (floats, rest)
    # The trace reads the ambient manager: the caller has entered the manager of the cell.
    lowered = jax.jit(everything if gradients else outputs).lower(*args)
    text = hashlib.sha256(lowered.as_text().encode()).digest()
    return _LoweredCase(text=text, inputs=(case.name, dtype), mesh=mesh, lowered=lowered, args=args)


@functools.lru_cache(maxsize=32)
def _results(program: _LoweredCase, platform: str) -> dict[str, Any]:
    options = QUICK if platform == "cpu" else None
    results = program.lowered.compile(compiler_options=options)(*program.args)
    return {name: np.asarray(x, np.float32) for name, x in results.items()}


@functools.cache
def _expected(case: Case, dtype: str) -> dict[str, Any]:
    """Return the results of the oracle, computed in float64 from unsharded inputs in `dtype`."""
    arrays = dict(case.values(dtype))
    q, k, v = (arrays.pop(name) for name in ("q", "k", "v"))
    q, k, v = (
        x if case.stored is not None and name != "q" else x.astype(np.float32)
        for name, x in (("q", q), ("k", k), ("v", v))
    )
    options = read_options({**arrays, **case.options, "mode": case.mode})
    operands, call = read(q, k, v, options)
    # The oracle takes only the layout BTHD, so BHTD arrays are transposed.
    turned = (
        functools.partial(np.swapaxes, axis1=1, axis2=2) if call.layout == "BHTD" else np.asarray
    )
    exact = oracle.forward(operands, call.recipe)
    expected = {"o": turned(exact["o"]), **({"lse": exact["lse"]} if call.return_lse else {})}
    if case.mode == "train":
        # Compute the cotangents that the loss in `_program` gives to the outputs.
        is_counted = ~np.isneginf(exact["lse"]) & call.return_lse
        dlse = np.where(is_counted, np.cos(np.where(is_counted, exact["lse"], 0.0)), 0.0)
        grads = oracle.backward(operands, call.recipe, do=turned(case.weights()), dlse=dlse)
        expected |= {
            f"d{name}": turned(grad) if name in ("q", "k", "v") else grad
            for name, grad in grads.items()
        }
    return {name: x.astype(np.float32) for name, x in expected.items()}


def _compare(what: str, actual: Any, want: Any, tolerances: Tolerances, dtype: str) -> None:
    _must(actual.shape == want.shape, f"{what}: shape {actual.shape}, not {want.shape}")
    np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(want), err_msg=what)
    actual, want = (np.where(np.isneginf(want), 0.0, x) for x in (actual, want))
    _must(bool(np.isfinite(actual).all()), f"{what}: NaN or infinite")
    # `what` ends with the name of the array, and the names of gradients begin with d.
    gradient = what.rpartition(" ")[2].startswith("d")
    if not gradient:  # rows without keys must be exactly 0
        np.testing.assert_array_equal(actual[want == 0.0], 0.0, err_msg=what)
    if dtype == "float32":
        tolerance = tolerances.backward if gradient else tolerances.forward
        error = np.abs(actual - want).max() / max(1.0, np.abs(want).max())
    else:
        # The error of a single bfloat16 element may be large relative to its value. The norm over
        # all elements is stable.
        tolerance, error = (
            tolerances.relative,
            np.linalg.norm(actual - want) / max(float(np.linalg.norm(want)), 1e-6),
        )
    _must(bool(error <= tolerance), f"{what}: {error:.2e} is more than {tolerance:.0e}")
