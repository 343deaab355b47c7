"""Run the code of other authors: import parts of it, and turn its models into programs."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import jax
import jax.numpy as jnp

import shardwright as sw

MESHES: Final = {"fsdp": {"fsdp": 8}, "fsdp_tp": {"fsdp": 4, "tp": 2}}
B, S, D, V = 16, 256, 512, 4096
TOKENS: Final = (sw.BATCH, sw.QUERY_LENGTH)
WORDS: Final = (TOKENS, (B, S), jnp.int32)
# Names of kernels. Kernels of `UP` are split over tp in their last dims, kernels of `DOWN` in their
# first dims.
UP: Final = r"query|key|value|mlp/weight|up|gate|MlpBlock_\d+/Dense_0|linear1"
DOWN: Final = r"out|down|MlpBlock_\d+/Dense_1|linear2"
SMALL: Final = 4096  # elements of a weight that is not worth sharding


def use_auto_axes() -> None:
    """Replace functions for Explicit mesh axes by constraints, which work on Auto mesh axes."""

    def pin(x: Any, sharding: Any) -> Any:
        # Over Auto axes, the type of an array always says that all dims are replicated. So a spec
        # that has only None is ignored.
        entries = getattr(sharding, "spec", sharding)
        known = entries is not None and any(entry is not None for entry in entries)
        return jax.lax.with_sharding_constraint(x, sharding) if known else x

    def constrained(function: Any) -> Any:
        @functools.wraps(function)
        def call(*a: Any, out_sharding: Any = None, **k: Any) -> Any:
            result = function(*a, **k)
            return pin(result, out_sharding)

        return call

    def auto(function: Any = None, *, out_sharding: Any = None) -> Any:
        if function is None:
            return lambda each: auto(each, out_sharding=out_sharding)
        return lambda *a, **k: jax.tree.map(pin, function(*a, **k), out_sharding)

    jax.sharding.reshard, jax.sharding.auto_axes = pin, auto
    for name in ("einsum", "dot", "zeros", "ones"):
        setattr(jnp, name, constrained(getattr(jnp, name)))
    for name in ("dot_general", "reshape"):
        setattr(jax.lax, name, constrained(getattr(jax.lax, name)))
    classes: list[Any] = []
    jax.eval_shape(lambda x: classes.append(type(x.at[0])), jax.ShapeDtypeStruct((1,), jnp.int32))
    classes[0].get = constrained(classes[0].get)


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for packages that a program imports, and that its mathematics does not need."""

    NAMES = frozenset(
        """aiohttp datasets fastapi gcsfs git grain lm_eval matplotlib openai psutil pyarrow ray
        requests seaborn tensorboardX tensorflow tensorstore trackio uvicorn wandb
        zstandard""".split()  # noqa: SIM905
    )

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in self.NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = mock.MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module: Any) -> None:
        pass


sys.meta_path.append(_Absent())
use_auto_axes()  # before flax is imported: its layers keep these functions


def stored(shapes: Any) -> Any:
    """Annotate weights as users do: EMBED is the largest dim, and kernels are split for tp."""

    def spec(path: Any, x: Any) -> sw.ArraySpec:
        name = name_of(path)
        axes = [sw.EMPTY] * x.ndim
        free = [at for at, size in enumerate(x.shape) if size % 8 == 0]
        kernel = x.ndim > 1 and name.endswith(("kernel", "weight"))
        turned = name.endswith("weight")  # equinox: [out, in]
        if kernel and re.search(DOWN, name):
            at = int(turned)
        elif kernel and re.search(UP, name):
            at = 0 if turned else min(x.ndim - 1, 1)
        else:
            at = -1
        if at in free:
            axes[at] = sw.MLP_INTERMEDIATE
            free.remove(at)
        if free and x.size >= SMALL:
            axes[max(free, key=lambda at: x.shape[at])] = sw.EMBED
        return sw.ArraySpec(x.shape, x.dtype, tuple(axes))

    return jax.tree_util.tree_map_with_path(spec, shapes)


def name_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def drop_stand_ins() -> None:
    """Forget the packages that do not exist: einops asks whether tensorflow is imported."""
    for name in [n for n, m in sys.modules.items() if isinstance(m, mock.MagicMock)]:
        del sys.modules[name]


def without_init(name: str, folder: Path) -> None:
    """Let a package be imported part by part: its `__init__` imports packages of no use here."""
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [str(folder)]


@contextlib.contextmanager
def importing(folder: Path, *names: str) -> Iterator[list[Any]]:
    """Import modules of an example, which import each other by their bare names."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        modules = [importlib.import_module(name) for name in names]
        drop_stand_ins()
        yield modules
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if isinstance(file, str) and Path(file).is_relative_to(folder) and "." not in name:
                del sys.modules[name]


def linen(module: Any, loss: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Any, ...]:
    """Return the program of a linen module: `loss(apply, *arrays)`.

    Args:
      module: The module.
      loss: Called with a function that applies the module, and the arrays.
      inputs: Annotation, shape and dtype of each array.
      options: Options of the call of the module.
    """
    from flax.core import meta

    arrays = [jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in inputs]
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1), "lstm": jax.random.key(2)}

    def apply_with(variables: Any) -> Any:
        return lambda *a, **k: module.apply(variables, *a, **options, **k, rngs=keys, mutable=False)

    taken: list[Any] = []

    class StopError(Exception):
        pass

    def first_call(*a: Any, **k: Any) -> Any:
        taken.append((a, k))
        raise StopError

    def init(*arrays: Any) -> Any:
        with contextlib.suppress(StopError):
            loss(first_call, *arrays)
        a, k = taken[0]
        return meta.unbox(module.init(keys, *a, **options, **k))

    variables = jax.eval_shape(init, *arrays)
    specs = stored(variables)

    def function(w: Any, *arrays: Any) -> Any:
        return loss(apply_with(sw.gather(w, specs)), *arrays)

    return function, specs, inputs


def picked(logits: Any, labels: Any) -> Any:
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def one_hot_loss(logits: Any, labels: Any) -> Any:
    import optax

    hot = jax.nn.one_hot(labels, logits.shape[-1])
    return optax.softmax_cross_entropy(logits, hot).mean()


def leaves(
    tree: Any, call: Callable[..., Any], *inputs: Any, specs: Any = None, **options: Any
) -> Any:
    """Return a program that takes the leaves of a tree by path, and runs `call(tree, *arrays)`.

    Args:
      tree: The model, with shapes as leaves.
      call: The loss, or what a forward pass returns.
      inputs: Annotation, shape and dtype of each array.
      specs: Path -> annotation, if the author has rules. The model then gets weights as stored.
      options: Options of the program.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [name_of(path) for path, _ in flat]
    shapes = {name: leaf for name, (_, leaf) in zip(names, flat, strict=True)}
    given = stored(shapes) if specs is None else specs

    def function(w: Any, *arrays: Any) -> Any:
        weights = sw.gather(w, given) if specs is None else w
        return call(structure.unflatten([weights[name] for name in names]), *arrays)

    return function, given, inputs, options


def notebook(path: Path) -> dict[str, Any]:
    """Run the imports, classes and functions of a notebook. Imports that fail are left out."""
    module = sys.modules[path.stem] = types.ModuleType(path.stem)
    scope = vars(module)
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        for node in ast.parse("".join(cell["source"])).body:
            if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef):
                with contextlib.suppress(ImportError, NameError):
                    exec(compile(ast.Module([node], []), str(path), "exec"), scope)
    drop_stand_ins()
    return scope


def equinox(build: Callable[[], Any], call: Callable[..., Any], *inputs: Any) -> Any:
    import equinox as eqx

    arrays, rest = eqx.partition(
        eqx.filter_eval_shape(build), lambda x: isinstance(x, jax.ShapeDtypeStruct)
    )
    return leaves(arrays, lambda w, *x: call(eqx.combine(w, rest), *x), *inputs)


def nnx_model(
    build: Callable[[], Any], call: Callable[..., Any], *inputs: Any, **options: Any
) -> Any:
    """Return the program of an nnx module.

    If variables of the module have an `out_sharding`, it places the weights.
    """
    from flax import nnx

    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(nnx.eval_shape(build))
    flat = nnx.to_flat_state(state)
    shapes = {"/".join(map(str, path)): variable for path, variable in flat}
    placed = {name: v.get_metadata().get("out_sharding") for name, v in shapes.items()}
    arrays = {name: v.get_value() for name, v in shapes.items()}
    specs = None
    if any(placed.values()):
        specs = {name: by_author(arrays[name], placed[name]) for name in arrays}

    def run(w: Any, *x: Any) -> Any:
        leaves = [
            (path, shapes["/".join(map(str, path))].replace(w["/".join(map(str, path))]))
            for path, _ in flat
        ]
        return call(nnx.merge(graph, nnx.from_flat_state(leaves)), *x)

    return leaves(arrays, run, *inputs, specs=specs, **options)


PLACES: Final = {"fsdp": sw.EMBED, "tp": sw.MLP_INTERMEDIATE, None: sw.EMPTY}


def by_author(array: Any, spec: Any) -> sw.ArraySpec:
    """Annotate a weight so that the presets place it as its author did."""
    axes = [PLACES[entry] for entry in spec or ()]
    return sw.ArraySpec(array.shape, array.dtype, (*axes, *[sw.EMPTY] * (array.ndim - len(axes))))
