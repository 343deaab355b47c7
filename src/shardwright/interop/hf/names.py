"""The axes of tensors, from their names and a configuration."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from shardwright.errors import Problem, StrategyError, raise_problems
from shardwright.interop.hf.config import (
    MOST_PROBLEMS,
    OWN_CONFIG,
    Config,
    SizedDim,
    block_of,
    complete,
    dims_of,
    fault,
)
from shardwright.interop.hf.families import Tensors, tensors_of
from shardwright.trees.paths import compile_rule, is_array_spec, path_text
from shardwright.vocabulary.annotations import PartOf
from shardwright.vocabulary.axes import EMBED, EMPTY, axis_label

Shapes = Mapping[str, Sequence[int]]
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
# Ends of the names of scales. A weight has one scale per block, one per row, or a single one.
_SCALES: Final = (".weight_scale_inv", ".weight_scale", ".input_scale")
_MAPPINGS: Final = {
    "config": "pass the content of config.json; for a config of transformers, pass its .to_dict()",
    "axes": 'write axes={"pattern": (sw.EMBED,)}',
}


def annotate(tree: Any, config: Mapping[str, Any], *, axes: Mapping[str, Any] | None = None) -> Any:
    """Return the annotations of a tree whose leaves have the names of Hugging Face tensors.

    Linear layers are [out, in], as in PyTorch. A dim of heads * head_dim is `merged`, so that no
    head is split. The scales of a quantized weight are sharded like the weight.

    Args:
      tree: Arrays or other values with a shape. The keys of nested dicts are joined with dots to
        names such as `model.layers.0.mlp.up_proj.weight`. Experts and layers may be stacked. The
        name of a stack lacks the number of the expert or layer.
      config: The content of `config.json`.
      axes: Pattern -> annotation, for tensors that the family does not have. The first pattern that
        is found in a name applies, even if the family has the tensor.

    Raises:
      CheckpointError: Tensors are unknown, or their shapes differ from the configuration. All are
        reported at once.
      StrategyError: A pattern or an annotation is invalid, or `config` or `axes` is not a mapping.

    >>> import jax
    >>> config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}
    >>> annotate({"model.norm.weight": jax.ShapeDtypeStruct((8,), "float32")}, config)
    {'model.norm.weight': ('__NORM__',)}
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_array_spec)
    shapes: dict[str, Sequence[int]] = {}
    problems = []
    for path, leaf in pairs:
        name = path_text(path).replace("/", ".")
        if name in shapes:
            what = f"two leaves of the tree have this name; one is at {path_text(path)}"
            fix = "remove one of them"
            problems.append(fault(what, name, fix))
        shapes[name] = np.shape(leaf)
    raise_problems(limited(problems))
    return jax.tree.unflatten(structure, axes_of(shapes, config, axes=axes).values())


def check_mappings(**values: Any) -> None:
    """Check that each of these arguments is a mapping.

    Raises:
      StrategyError: An argument is not a mapping.
    """
    for what, value in values.items():
        if not isinstance(value, Mapping):
            kind = type(value).__name__
            raise StrategyError(f"{what} is {kind}, not a mapping", fix=_MAPPINGS[what])


def axes_of(
    shapes: Shapes,
    config: Mapping[str, Any],
    *,
    axes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the annotation of each tensor, by its name.

    Args:
      shapes: Name of each tensor -> its shape.
      config: The content of `config.json`.
      axes: Pattern -> annotation, for tensors that the family does not have.

    Raises:
      CheckpointError: Tensors are unknown, or their shapes differ from the configuration.
      StrategyError: A pattern or an annotation is invalid, or a pattern matches no tensor.
    """
    check_mappings(config=config, axes=axes or {})
    table = NameTable.of(config)
    given = axes or {}
    rules = [compile_rule(at, *rule) for at, rule in enumerate(given.items())]
    unused = dict.fromkeys(given)

    def of(name: str) -> Any:
        for written, (pattern, annotation) in zip(given, rules, strict=True):
            if pattern.search(name):
                unused.pop(written, None)
                return annotation
        return table.axes(name, shapes, of)

    found = {name: of(name) for name in shapes}
    raise_problems(limited([place for place in found.values() if isinstance(place, Problem)]))
    # Report no pattern whose tensors were all matched by earlier patterns.
    if unmatched := [
        written
        for written, (pattern, _) in zip(given, rules, strict=True)
        if written in unused and not any(map(pattern.search, shapes))
    ]:
        what = f"patterns of axes= that match no tensor: {', '.join(map(repr, unmatched))}"
        raise StrategyError(what, fix="correct the patterns, or remove them")
    return found


def missing(names: Iterable[str], config: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each tensor that is missing."""
    present = {_NUMBERED.sub("", name) for name in names}
    layers = Config(values=config).number("num_hidden_layers")
    # If the number of layers is far off, do not list a problem for each layer.
    if layers > len(present):
        what = f"config.json has {layers} layers, and there are {len(present)} tensors"
        return [fault(what, "")]
    table = NameTable.of(config)
    absent = [name for name in table.required(present) if name not in present]
    fix = "download the checkpoint again, or use its own config.json"
    return limited([fault("the tensor is absent", name, fix) for name in absent])


# The number of an expert in a tensor name. A stack of experts has no such number, so names are
# compared without it.
_NUMBERED: Final = re.compile(r"(?<=experts\.)\d+\.")


def limited(problems: list[Problem]) -> list[Problem]:
    """Return the first problems, and one problem that gives the number of all further problems."""
    more = len(problems) - MOST_PROBLEMS
    if more <= 1:
        return problems
    last = dataclasses.replace(problems[MOST_PROBLEMS], what=f"... and {more} others", path="")
    return [*problems[:MOST_PROBLEMS], last]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NameTable:
    """The tensors that a configuration describes."""

    family: Tensors
    rows: Mapping[str, str]
    dims: Mapping[str, SizedDim]
    config: Config

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "NameTable":
        """Return the table of a configuration.

        Raises:
          CheckpointError: The model is unknown, or a size is absent or invalid.
        """
        family = tensors_of(config)
        # A value that the configuration lacks has the default of the configuration's class.
        whole = Config(values=complete(Config(values=config))[0])
        return cls(family=family, rows=family.rows(), dims=dims_of(whole), config=whole)

    def axes(self, name: str, shapes: Shapes, of: Callable[[str], Any]) -> Any:
        """Return the annotation of a tensor, or a problem.

        Args:
          name: Name of the tensor.
          shapes: Name of each tensor -> its shape.
          of: Function from the name of a tensor to its annotation, or to a problem.
        """
        own = name.removeprefix(self.family.prefix)
        row = _NUMBER.sub("#", own)
        dims = self.rows.get(row)
        # The name is not in the family: it is a scale of a quantized weight, or unknown.
        if dims is None:
            scale = self._scale(name, shapes, of)
            return self._unknown(name, shapes, of) if scale is None else scale
        # The first number is the number of the layer, unless layers are stacked.
        kinds = ("layers", "experts") if row.startswith(self.family.layers) else ("experts",)
        numbers = dict(zip(kinds, map(int, _NUMBER.findall(own)), strict=False))
        return self._out_of_range(name, numbers) or self._sized(name, dims, shapes[name])

    def _sized(self, name: str, dims: str, shape: Sequence[int]) -> Any:
        """Return the annotation that a row of the table gives; a problem if the shape differs."""
        words = dims.removesuffix(" ?").split()
        absent = [word for word in words if word not in self.dims]
        if absent:
            what = f"config.json has no size for {', '.join(absent)}"
            return fault(what, name)
        expected = [self.dims[word] for word in words]
        fits = len(shape) == len(expected) and all(
            dim.size in (None, size) for dim, size in zip(expected, shape, strict=True)
        )
        if fits:
            return tuple(dim.entry for dim in expected)
        sizes = ", ".join("any" if dim.size is None else str(dim.size) for dim in expected)
        what = f"the shape is {tuple(shape)}, and config.json says ({sizes})"
        fix = f"{OWN_CONFIG}; the dims are {', '.join(words)}"
        return fault(what, name, fix)

    def _out_of_range(self, name: str, numbers: Mapping[str, int]) -> Problem | None:
        """Return a problem if the number of a layer or of an expert is too large."""
        # In DeepSeek-V3, layers that predict further tokens follow the decoder layers, and have the
        # next numbers.
        further = self.config.size("num_nextn_predict_layers") or 0
        for kind, number in numbers.items():
            if kind == "layers":
                count = self.config.number("num_hidden_layers")
            else:
                count = (self.dims[kind].size or 0) if kind in self.dims else 0
            if number >= count + (further if kind == "layers" else 0):
                what = f"config.json has {count} {kind}, and this is number {number}"
                return fault(what, name)
        return None

    def _scale(self, name: str, shapes: Shapes, of: Callable[[str], Any]) -> Any:
        """Return the annotation of a tensor that scales a weight; None for any other tensor."""
        suffix = next((suffix for suffix in _SCALES if name.endswith(suffix)), None)
        weight = f"{name.removesuffix(suffix)}.weight" if suffix else ""
        if weight not in shapes:
            return None
        whole, shape = tuple(shapes[weight]), tuple(shapes[name])
        if math.prod(shape) == 1 or len(shape) > len(whole):
            return (EMPTY,) * len(shape) if math.prod(shape) == 1 else None
        annotation = of(weight)
        if isinstance(annotation, Problem):
            return annotation
        problem = self._blocks(name, shape, whole)
        # A dim of the scale is sharded like the same dim of the weight. If its size is 1, there is
        # one scale for the whole dim of the weight.
        follows = [at if size > 1 else None for at, size in enumerate(shape)]
        return problem or PartOf(
            annotation=annotation, shape=whole, dims=tuple(follows), path=weight
        )

    def _blocks(self, name: str, shape: Sequence[int], whole: Sequence[int]) -> Problem | None:
        """Return a problem if the shape of a scale fits neither its weight nor the blocks."""
        block = block_of(self.config)
        expected: Sequence[int] = whole
        if block and len(block) <= len(whole) and name.endswith("_scale_inv"):
            # A stack of experts or layers has leading dims, which are not divided into blocks.
            lead = len(whole) - len(block)
            parts = zip(whole[lead:], block, strict=True)
            expected = (*whole[:lead], *(-(-size // part) for size, part in parts))
            fits = tuple(shape) == expected
        else:
            fits = all(size <= most for size, most in zip(shape, whole, strict=False))
            # If the scale has fewer dims than the weight, there is one scale per row.
            fits &= len(shape) == len(whole) or tuple(shape) == tuple(whole[: len(shape)])
        if fits:
            return None
        what = f"the scale has shape {tuple(shape)}, and its weight {tuple(whole)}"
        fix = "a weight has one scale per block of weight_block_size, or one per row"
        return fault(what, name, fix)

    def _unknown(self, name: str, shapes: Shapes, of: Callable[[str], Any]) -> Problem:
        model = self.config.family
        what = f"no tensor of {model} has this name, so its axes are unknown"
        # Suggest a pattern that matches this tensor in all layers.
        pattern = re.escape(_NUMBER.sub("#", name)).replace(r"\#", r"\d+")
        axes = "(sw.EMBED, ...)"
        weight = f"{name.removesuffix('.bias')}.weight"
        if len(shapes[name]) == 1:
            # A bias has the axis of the outputs, the first axis of its weight.
            dims = of(weight) if name.endswith(".bias") and weight in shapes else (EMBED,)
            axis = dims[0] if isinstance(dims, tuple) and isinstance(dims[0], str) else EMBED
            axes = f"(sw.{axis_label(axis)},)"
        fix = f"""name its axes: axes={{r"{pattern}": {axes}}}"""
        return fault(what, name, fix)

    def required(self, present: set[str]) -> Iterator[str]:
        """Yield the names of the tensors that the checkpoint must have.

        A layer is taken to have the kind of attention of which it has the most tensors in the
        checkpoint. The same holds for MLPs. If one layer has an optional tensor, such as a bias,
        all layers of this kind must have it.
        """
        family = self.family
        prefix = family.prefix if any(name.startswith(family.prefix) for name in present) else ""
        yield from (prefix + name for name, dims in family.whole.items() if dims[-1] != "?")
        has_head = prefix and "lm_head.weight" in family.whole
        if has_head and self.config.values.get("tie_word_embeddings") is False:
            yield "lm_head.weight"
        groups = ((family.layer,), *family.choices)
        # Use the names of stacked experts, which have no expert numbers, like those in `present`.
        choices = [
            [
                {name.replace("experts.#.", "experts."): dims for name, dims in rows.items()}
                for rows in kinds
            ]
            for kinds in groups
        ]
        chosen: list[tuple[str, int, int]] = []
        for number in range(self.config.number("num_hidden_layers")):
            start = prefix + family.layers.replace("#", str(number))
            for at, kinds in enumerate(choices):
                there = [sum(start + name in present for name in rows) for rows in kinds]
                chosen.append((start, at, there.index(max(there))))
        seen = {
            (at, kind, name)
            for start, at, kind in chosen
            for name in choices[at][kind]
            if start + name in present
        }
        for start, at, kind in chosen:
            for name, dims in choices[at][kind].items():
                if dims[-1] != "?" or (at, kind, name) in seen:
                    yield start + name
