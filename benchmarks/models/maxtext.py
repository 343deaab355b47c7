"""MaxText's decoder layers between its token embedding and its logits.

The modules `models/llama2.py` and `configs/pyconfig.py` are imported, with all that they import.
They also import the packages in `REPLACED`, which are not called here: empty modules take their
place. MaxText needs Python 3.12.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp

import shardwright as sw
from benchmarks.models.case import LENGTH, TOKENS, VOCAB, Case, Sharded, mesh_of

# Kernels for TPUs, the runtime of Pathways, and the log of Google Cloud.
REPLACED: Final = ("tokamax", "pathwaysutils", "google.cloud")
OPTIONS: Final = {
    "attention": "dot_product",
    "base_emb_dim": 32,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": 2,
    "base_num_query_heads": 4,
    "dtype": "float32",
    "enable_checkpointing": False,
    "enable_dropout": False,
    "float32_logits": True,
    "float32_qk_product": True,
    "head_dim": 8,
    "hardware": "cpu",
    "matmul_precision": "highest",
    "max_target_length": LENGTH,
    "per_device_batch_size": 1,
    "run_name": "benchmark",
    "scan_layers": False,
    "skip_jax_distributed_system": True,
    "vocab_size": VOCAB,
    "weight_dtype": "float32",
}
# The names that `maxtext.NAMES` leaves to the user.
MORE: Final = {"embed_vocab": (sw.EMBED, "param"), "heads": (sw.HEAD, "param")}


# Sizes on which the rules of `fsdp_tp` depend.
SIZES: Final = {"kv_heads": 4, "activation_kv_heads": 4}


class _Anything(type):
    """A stand-in for any imported class. Its attributes and results are such classes too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return _Anything("result", (), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Replaced(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find the modules of `REPLACED` that are not installed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.startswith(REPLACED):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module empty."""


def load(root: Path) -> None:
    """Let MaxText be imported from a checkout."""
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"
    sys.path.insert(0, str(root / "src"))
    sys.meta_path.append(_Replaced())


def shard_maxtext(pm: Any, bridge: Any, model: Any, names: Any, sizes: Any) -> Any:
    values, axes = bridge.arrays(model), bridge.annotate(model, names)
    return jax.device_put(values, pm.shardings(values, axes)), bridge.bound(pm, names, sizes=sizes)


def maxtext(checkouts: Path, kv_heads: int = 4) -> Case:
    """Return a language model of two decoder layers of MaxText's Llama.

    The mesh is a field of MaxText's modules, so the model is built again for each mesh.
    """
    from flax import nnx

    from shardwright.interop import nnx as bridge
    from shardwright.interop.maxtext import NAMES

    load(checkouts / "maxtext")
    from maxtext.configs import pyconfig
    from maxtext.utils import sharding

    base = checkouts / "maxtext/src/maxtext/configs/base.yml"
    values = {**OPTIONS, "base_num_kv_heads": kv_heads}
    options = [f"{key}={value}" for key, value in values.items()]
    config = pyconfig.initialize(["", str(base), *options])
    names = {**NAMES, **MORE}

    def build(mesh: Any) -> Any:
        with nnx.use_eager_sharding(False):
            return language_model(config, mesh)

    graph, boxed, rest = nnx.split(build(mesh_of(("dp",), (1,))), nnx.Param, ...)
    params = bridge.arrays(boxed)
    places = jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape)

    def run(graph: Any) -> Callable[[Any, Any], Any]:
        return lambda params, tokens: nnx.merge(graph, params, rest)(tokens, places)

    def own(sizes: tuple[int, int, int]) -> Any:
        shape = dict.fromkeys(config.mesh_axes, 1)
        shape |= dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))
        mesh = mesh_of(tuple(shape), tuple(shape.values()))
        with nnx.logical_axis_rules(config.logical_axis_rules):
            return sharding.nnx_construct_named_sharding(nnx.state(build(mesh), nnx.Param), mesh)

    def shard(pm: Any) -> Sharded:
        placed, context = shard_maxtext(pm, bridge, boxed, names, SIZES)
        graph = nnx.graphdef(build(pm.mesh))
        return Sharded(params=placed, forward=run(graph), context=context)

    return Case(
        name="MaxText layers",
        source="AI-Hypercomputer/maxtext: src/maxtext/models/llama2.py and what it imports",
        params=params,
        forward=run(graph),
        user=shard_maxtext,
        shard=shard,
        own=own,
    )


def language_model(config: Any, mesh: Any) -> Any:
    """Return a model of MaxText's modules, as its own decoder composes them."""
    from flax import nnx
    from maxtext.layers.embeddings import Embed
    from maxtext.layers.normalizations import RMSNorm
    from maxtext.models.llama2 import LlamaDecoderLayer

    class Model(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(params=0, dropout=1)
            self.embed = Embed(VOCAB, 32, config, mesh, attend_dtype=jnp.float32, rngs=rngs)
            self.layers = nnx.List(
                [LlamaDecoderLayer(config, "train", mesh, rngs) for _ in range(2)]
            )
            self.norm = RMSNorm(32, kernel_axes=("norm",), rngs=rngs)

        def __call__(self, tokens: Any, places: Any) -> Any:
            x = self.embed(tokens)
            for layer in self.layers:
                x, _ = layer(x, None, places, True, "train")
            return self.embed.attend(self.norm(x))

    return Model()
