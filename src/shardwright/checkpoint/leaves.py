"""Decide what a checkpoint writes for each leaf of a state, and how the leaf is restored."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from shardwright.errors import CheckpointError, Problem, did_you_mean, raise_problems
from shardwright.trees.paths import path_text

_NUMBERS = {"bool": bool, "int": int, "float": float, "complex": complex}
_NESTED = dict[str, Any]


class LeafKind(enum.StrEnum):
    """How a leaf is written."""

    ARRAY = "array"
    EMPTY = "empty"  # an array without elements, which orbax does not store
    KEY = "key"  # typed PRNG keys, written as their bits; not written if there are no elements
    NUMBER = "number"  # a number of Python, written as text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedLeaf:
    """One leaf of a saved state.

    Attributes:
      path: Names from the root of the state to the leaf.
      kind: How the leaf is written.
      shape: Global shape. For an array of keys, without the dim of the bits.
      dtype: Name of the dtype, such as `float32` or, for keys, `key<fry>`. For a number, the name
        of its Python type.
      value: The text of a number, or "" for other kinds.
    """

    path: tuple[str, ...]
    kind: LeafKind
    shape: tuple[int, ...] = ()
    dtype: str = ""
    value: str = ""

    @property
    def is_stored(self) -> bool:
        """Whether orbax stores an array for the leaf."""
        return self.kind is LeafKind.ARRAY or (self.kind is LeafKind.KEY and 0 not in self.shape)

    @property
    def text(self) -> str:
        """The path as messages show it."""
        return "/".join(self.path)

    def __str__(self) -> str:
        if self.kind is LeafKind.NUMBER:
            return f"a number of type {self.dtype}"
        keys = "keys " if self.kind is LeafKind.KEY else ""
        return f"{keys}{self.dtype}{list(self.shape)}"

    def number(self) -> Any:
        """Return the value of a number."""
        # Compare the text, because bool("False") is True.
        if self.dtype == "bool":
            return self.value == "True"
        return _NUMBERS[self.dtype](self.value)

    def to_json(self) -> dict[str, Any]:
        """Return the leaf as plain data."""
        return {**dataclasses.asdict(self), "kind": str(self.kind)}


def parse_leaf(data: Mapping[str, Any]) -> SavedLeaf:
    """Return a leaf from what `to_json` returned."""
    return SavedLeaf(
        path=tuple(data["path"]),
        kind=LeafKind(data["kind"]),
        shape=tuple(data["shape"]),
        dtype=data["dtype"],
        value=data["value"],
    )


def flatten(state: Any) -> tuple[list[tuple[tuple[str, ...], Any]], Any]:
    """Return the path and the value of each leaf of a state, and its structure.

    Raises:
      CheckpointError: Two leaves have the same path.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(state)
    leaves = [(tuple(path_text((entry,)) for entry in path), leaf) for path, leaf in pairs]
    counts = Counter(path for path, _ in leaves)
    twice = ["/".join(path) for path, count in counts.items() if count > 1]
    if twice:
        raise CheckpointError(
            "two leaves have this path",
            path=twice[0],
            fix="rename one of the keys: 1 and '1' are equal as text",
        )
    return leaves, structure


def written(leaves: Sequence[tuple[tuple[str, ...], Any]]) -> tuple[list[SavedLeaf], _NESTED]:
    """Return the description of each leaf that is written, and the arrays as a tree of dicts.

    Raises:
      CheckpointError: Leaves cannot be saved. The error lists all of them.
    """
    saved: list[SavedLeaf] = []
    arrays: _NESTED = {}
    problems: list[Problem] = []
    for path, value in leaves:
        if (refused := refusal(value)) is not None:
            problems.append(_problem(path, *refused))
            continue
        leaf = _saved_leaf(path, value)
        saved.append(leaf)
        if leaf.kind is LeafKind.ARRAY:
            put(arrays, path, value)
        elif leaf.is_stored:
            put(arrays, path, jax.random.key_data(value))
    raise_problems(problems)
    return saved, arrays


def refusal(value: Any) -> tuple[str, str] | None:
    """Return why a leaf cannot be saved, and the fix. None if it can be saved."""
    if isinstance(value, jax.Array) and value.is_deleted():
        return "the array is deleted: it was donated", "save the state that the last step returned"
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        dtype = value.dtype
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return None
        # Refuse objects, texts and dates. Allow the kind V, which bfloat16, float8_e4m3fn and int4
        # have.
        if dtype.kind not in "OSUMm" and str(dtype) not in _NOT_WRITTEN:
            return None
        return f"the dtype {dtype} cannot be saved", "save numbers, bools and PRNG keys"
    if isinstance(value, (bool, int, float, complex)):
        return None
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return (
            f"{type(value).__name__} has no values",
            "save arrays; restore takes such descriptions of arrays",
        )
    return (
        f"{type(value).__name__} cannot be saved",
        "save arrays, numbers and PRNG keys; write anything else to a file of its own",
    )


def _saved_leaf(path: tuple[str, ...], value: Any) -> SavedLeaf:
    if not hasattr(value, "dtype"):
        name = _number_type(value)
        # Write the plain number: the `repr` of a member of an `IntEnum` cannot be read back.
        return SavedLeaf(
            path=path, kind=LeafKind.NUMBER, dtype=name, value=repr(_NUMBERS[name](value))
        )
    kind, dtype = _kind_and_dtype(value)
    return SavedLeaf(path=path, kind=kind, shape=tuple(value.shape), dtype=dtype)


def _number_type(value: Any) -> str:
    """Return the name of the Python type of a number.

    The number may be an instance of a subclass.
    """
    # bool is the first entry of `_NUMBERS`, because True is an int too.
    return next(name for name, kind in _NUMBERS.items() if isinstance(value, kind))


def _kind_and_dtype(value: Any) -> tuple[LeafKind, str]:
    """Return how a value with shape and dtype is written, and the name of its dtype."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return LeafKind.KEY, str(value.dtype)
    kind = LeafKind.EMPTY if 0 in value.shape else LeafKind.ARRAY
    return kind, str(np.dtype(value.dtype))


def put(tree: _NESTED, path: tuple[str, ...], value: Any) -> None:
    """Put a value into a tree of dicts."""
    # If the state is a single leaf, the path of this leaf is empty.
    *parents, last = map(_escaped, path or ("",))
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[last] = value


def get(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """Return the value at a path of a tree of dicts."""
    value: Any = tree
    for name in map(_escaped, path or ("",)):
        value = value[name]
    return value


def file_name(path: tuple[str, ...]) -> str:
    """Return the name that orbax gives to the leaf at a path."""
    return ".".join(map(_escaped, path or ("",)))


def _escaped(name: str) -> str:
    """Return a name that orbax can join with others by "." and "/"."""
    # An escape has two digits after the %, so a lone % stands for the empty name.
    return re.sub(r"[%./]", lambda match: f"%{ord(match[0]):02X}", name) or "%"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetLeaf:
    """One leaf that is restored.

    Attributes:
      saved: The saved leaf at the path of `target`.
      target: The leaf of the target: an array, a `jax.ShapeDtypeStruct` or a number.
    """

    saved: SavedLeaf
    target: Any

    @property
    def sharding(self) -> Sharding | None:
        """Sharding in which the leaf is read. None means a NumPy array, or JAX's default device."""
        # JAX moves an uncommitted array to the devices of the other operands of an operation. So
        # the restored array must be uncommitted too.
        if isinstance(self.target, jax.Array) and not self.target.committed:
            return None
        sharding: Sharding | None = getattr(self.target, "sharding", None)
        if self.is_recut and isinstance(sharding, NamedSharding):
            return _as_saved(sharding, self.target.shape, self.saved.shape)
        return sharding

    @property
    def is_recut(self) -> bool:
        """Whether the file and the target have different shapes; see `recut` of `restore`."""
        return self.saved.kind is LeafKind.ARRAY and self.saved.shape != np.shape(self.target)

    def read_as(self) -> Any:
        """Return the description of what orbax reads, or None if it reads nothing."""
        if not self.saved.is_stored:
            return None
        shape, dtype = self._stored()
        if self.sharding is None:
            # Describe the NumPy array to orbax by an array that takes no memory.
            return np.broadcast_to(np.zeros((), _dtype(dtype)), shape)
        return jax.ShapeDtypeStruct(shape, _dtype(dtype), sharding=self.sharding)

    def _stored(self) -> tuple[tuple[int, ...], str]:
        """Return the shape and the dtype of the array in the file: for keys, those of the bits."""
        shape, dtype = self.saved.shape, self.saved.dtype
        if self.saved.kind is not LeafKind.KEY:
            return shape, dtype
        # A key has two words of 32 bits with threefry and four with rbg.
        bits = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=_impl(dtype))))
        return (*shape, *bits.shape), str(bits.dtype)

    def restored(self, value: Any) -> Any:
        """Return the restored leaf. `value` is the array that was read, or None."""
        if self.saved.kind is LeafKind.NUMBER:
            number = self.saved.number()
            return type(self.target)(number) if isinstance(self.target, enum.Enum) else number
        if not self.saved.is_stored:
            shape, dtype = self._stored()
            # Nothing is stored for an array without elements, so make the array from its shape.
            value = np.zeros(shape, _dtype(dtype))
            value = value if self.sharding is None else jax.device_put(value, self.sharding)
        if self.saved.kind is LeafKind.KEY:
            return jax.random.wrap_key_data(jnp.asarray(value), impl=_impl(self.saved.dtype))
        if isinstance(self.target, (bool, int, float, complex)) and not hasattr(
            self.target, "dtype"
        ):
            return value.item()
        if isinstance(self.target, np.generic):
            return value[()]
        if self.is_recut:
            shape, sharding = self.target.shape, getattr(self.target, "sharding", None)
            if isinstance(self.target, np.ndarray) or sharding is None:
                return value.reshape(shape)
            return jax.jit(lambda array: array.reshape(shape), out_shardings=sharding)(value)
        return value if isinstance(self.target, np.ndarray) else jnp.asarray(value)


def matched(
    saved: Sequence[SavedLeaf],
    targets: Sequence[tuple[tuple[str, ...], Any]],
    *,
    partial: bool,
    recut: bool,
) -> list[TargetLeaf]:
    """Return each leaf of a target with its saved leaf; the options are those of `restore`.

    Raises:
      CheckpointError: Leaves of the target do not fit the saved leaves. The error lists all of
        them.
    """
    by_path = {leaf.path: leaf for leaf in saved}
    problems: list[Problem] = []
    leaves: list[TargetLeaf] = []
    for path, target in targets:
        leaf = by_path.pop(path, None)
        if leaf is None:
            hint = did_you_mean("/".join(path), [other.text for other in saved])
            fix = f"{hint} restore the structure that was saved".strip()
            problems.append(_problem(path, "the checkpoint has no leaf at this path", fix))
            continue
        misfit = _misfit(leaf, target, recut=recut)
        if misfit is not None:
            problems.append(_problem(path, *misfit))
        leaves.append(TargetLeaf(saved=leaf, target=target))
    if not partial:
        fix = "add it to the target, or pass partial=True to leave it in the file"
        problems += [
            _problem(path, "it was saved, but the target has no leaf at this path", fix)
            for path in by_path
        ]
    raise_problems(problems)
    return leaves


def _problem(path: tuple[str, ...], what: str, fix: str) -> Problem:
    return Problem(error=CheckpointError, what=what, path="/".join(path), fix=fix)


def _misfit(leaf: SavedLeaf, target: Any, *, recut: bool) -> tuple[str, str] | None:
    """Return the difference between a saved leaf and a leaf of the target, and the fix."""
    is_array = isinstance(target, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))
    if not is_array and not isinstance(target, (bool, int, float, complex)):
        # Other values with a shape and a dtype, such as an `ArraySpec`, the type of an array or an
        # array of another library, have no sharding that this code can read.
        return (
            f"the target is {type(target).__name__}",
            "pass arrays, jax.ShapeDtypeStructs or numbers, such as pm.abstract(specs)",
        )
    if not is_array:
        if leaf.kind is LeafKind.NUMBER and leaf.dtype == _number_type(target):
            return _enum_misfit(leaf, target)
        # The target of a saved scalar array may be a number, because `reshard` turns numbers into
        # arrays.
        if _scalar_type(leaf) == _number_type(target) and not isinstance(target, enum.Enum):
            return None
        return f"saved as {leaf}, and the target is {target!r}", "restore it as it was saved"
    kind, dtype = _kind_and_dtype(target)
    same_layers = kind is LeafKind.ARRAY and _has_same_layers(leaf.shape, tuple(target.shape))
    same_shape = leaf.shape == tuple(target.shape) or (recut and same_layers)
    if not same_shape or (kind, dtype) != (leaf.kind, leaf.dtype):
        asked = SavedLeaf(path=leaf.path, kind=kind, shape=tuple(target.shape), dtype=dtype)
        fix = "restore it as it was saved, then convert it"
        if same_layers and dtype == leaf.dtype:
            fix += "; if both are the same stack of layers with other repeats, pass recut=True"
        return f"saved as {leaf}, and the target is {asked}", fix
    # Without x64, JAX cannot create arrays of 64 bits. A `ShapeDtypeStruct` can ask for one.
    narrowed = dtype in _WIDE and str(jax.dtypes.canonicalize_dtype(dtype)) != dtype
    if isinstance(target, jax.ShapeDtypeStruct) and narrowed:
        return (
            f"saved as {leaf}, and JAX has no 64-bit dtypes here: values would be cut to 32 bits",
            "pass a NumPy array as the target, or set jax_enable_x64",
        )
    if isinstance(target, jax.ShapeDtypeStruct) and target.sharding is None:
        if target.shape == () or kind is LeafKind.KEY:
            return None  # JAX places the array like a new scalar
        return "the target has no sharding", "pass pm.abstract(specs), or set sharding="
    return _sharding_misfit(leaf, target)


def _scalar_type(leaf: SavedLeaf) -> str:
    """Return the name of the Python type for a saved scalar array; empty if it is not a scalar."""
    if leaf.kind is not LeafKind.ARRAY or leaf.shape:
        return ""
    dtype = _dtype(leaf.dtype)
    kinds = {
        "bool": np.bool_,
        "int": np.integer,
        "float": np.floating,
        "complex": np.complexfloating,
    }
    return next((name for name, kind in kinds.items() if jnp.issubdtype(dtype, kind)), "")


def _enum_misfit(leaf: SavedLeaf, target: Any) -> tuple[str, str] | None:
    """Return why a number is not a member of the target's enumeration, or None."""
    if not isinstance(target, enum.Enum):
        return None
    try:
        type(target)(leaf.number())
    except ValueError:
        what = f"saved as {leaf.value}, which is not a member of {type(target).__name__}"
        return what, f"pass {_NUMBERS[leaf.dtype](target)} as the target"
    return None


def _sharding_misfit(leaf: SavedLeaf, target: Any) -> tuple[str, str] | None:
    """Return why an array cannot get the sharding of the target, and the fix."""
    sharding = getattr(target, "sharding", None)
    if sharding is None:
        return None
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        what = "the sharding of the target is on an abstract mesh, which has no devices"
        return what, "pass the shardings of a manager whose mesh has devices"
    try:
        sharding.shard_shape(target.shape)
    except ValueError as error:
        what = f"it has the shape {list(target.shape)}, and {sharding} does not divide it"
        return what, f"pass another sharding; JAX says: {next(iter(str(error).splitlines()), '')}"
    return None


def _has_same_layers(saved: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Tell whether two shapes may belong to the same stack of layers.

    The shape of a stack is `[layers, ...]` or `[repeats, layers / repeats, ...]`.
    """
    cuts = [
        {shape, (math.prod(shape[:2]), *shape[2:])} if len(shape) > 1 else {shape}
        for shape in (saved, target)
    ]
    return not cuts[0].isdisjoint(cuts[1])


def _as_saved(
    sharding: NamedSharding, target: tuple[int, ...], saved: tuple[int, ...]
) -> NamedSharding:
    """Return the sharding for reading a stack of layers that was saved in another shape."""
    entries = [*sharding.spec, *[None] * (len(target) - len(sharding.spec))]
    # The saved array, the target or both have the leading dims [repeats, layers / repeats].
    depths = [
        1 if len(own) < len(other) else 2 for own, other in ((target, saved), (saved, target))
    ]
    layers, rest = entries[depths[0] - 1], entries[depths[0] :]
    for entry in (layers, None):
        read = NamedSharding(
            sharding.mesh,
            PartitionSpec(*[None] * (depths[1] - 1), entry, *rest),
            memory_kind=sharding.memory_kind,
        )
        with contextlib.suppress(ValueError):  # the mesh axes do not divide the layers
            read.shard_shape(saved)
            break
    return read


def _impl(dtype: str) -> str:
    """Return the implementation of a key from the name of its dtype, `key<fry>`."""
    # JAX has no public function that returns the implementation, given the name of a key's dtype.
    names = {str(jax.random.key(0, impl=impl).dtype): impl for impl in _IMPLEMENTATIONS}
    if dtype not in names:
        raise CheckpointError(
            f"this JAX has no PRNG implementation for keys of type {dtype}",
            fix=f"restore with the JAX that saved the keys; this JAX knows {', '.join(names)}",
        )
    return names[dtype]


_WIDE = ("int64", "uint64", "float64", "complex128")
# dtypes that tensorstore does not have
_NOT_WRITTEN = ("uint4", "uint2", "float96", "float128", "complex192", "complex256")
_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(jnp.dtype(name))
