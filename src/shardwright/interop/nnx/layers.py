"""The blocks of `shardwright.layers` as modules of flax nnx.

A module has the parameters of its block as `nnx.Param`s, with the names that they have in the
`specs` of the block. Under a manager, the parameters are created sharded. A module computes what
its block computes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from shardwright.errors import LayerError
from shardwright.layers import (
    attention_block,
    dense,
    dropout,
    embedding,
    mlp_block,
    moe,
    moe_block,
    norm,
    transformer_block,
)
from shardwright.layers.dtypes import FLOAT32, Dtypes
from shardwright.layers.fp8 import DelayedScaling
from shardwright.layers.placement import use
from shardwright.manager import context
from shardwright.trees.initialize import initializer
from shardwright.trees.paths import is_array_spec
from shardwright.vocabulary.read import RATE, read_value

# Any, so that type checkers give the same result with and without flax.
Module: Any = nnx.Module


class _Parameters(Module):  # type: ignore[misc]
    """A tree of `nnx.Param`s, with the names of a tree of `ArraySpec`s."""

    def __init__(self, specs: Any, arrays: Any) -> None:
        for name in _names(specs):
            spec, array = specs[name], arrays[name]
            if is_array_spec(spec):
                # `interop.nnx.annotate` reads these axes.
                child = nnx.Param(array, axes=spec.axes)
            else:
                child = _Parameters(spec, array)
            # nnx finds children by attribute, so the children of a list are named "0", "1" and so
            # on.
            setattr(self, str(name), child)


def _names(specs: Any) -> list[Any]:
    return list(specs) if isinstance(specs, dict) else list(range(len(specs)))


def _read(node: Any, specs: Any) -> Any:
    """Return the arrays below a module, as a tree with the structure of `specs`."""
    if is_array_spec(specs):
        return node.get_value()
    children = {name: _read(getattr(node, str(name)), specs[name]) for name in _names(specs)}
    return children if isinstance(specs, dict) else list(children.values())


class _Block(_Parameters):
    """Base of the modules: it creates the parameters and the keys of dropout.

    Attributes:
      path: Path of the parameters in the model, for strategies with `[[tensors]]` entries.
      rngs: The random stream of dropout, or None if the block never drops.
      deterministic: Whether nothing is dropped; `model.eval()` sets it.
    """

    def __init__(self, specs: Any, rngs: Any, path: str | None, *, drops: bool = False) -> None:
        stream = _stream(rngs, "params")
        nested, parts = specs, path.split("/") if path else []
        # Create the parameters under their path, so that `[[tensors]]` entries of a strategy match.
        for part in reversed(parts):
            nested = {part: nested}
        manager, key = context.current(), stream()
        arrays = initializer(nested)(key) if manager is None else manager.init(nested, key)
        for part in parts:
            # The tree of the module itself starts below this path.
            arrays = arrays[part]
        super().__init__(specs, arrays)
        self.path = path
        # Use a separate stream, as `nnx.Dropout` does, so that modules do not share a counter.
        self.rngs: Any = _stream(rngs, "dropout").fork() if drops else None
        self.deterministic = False

    def _keys(self) -> dict[str, jax.Array] | None:
        """Return `{"dropout": key}`, or None if nothing is dropped."""
        is_dropping = self.rngs is not None and not self.deterministic
        return {"dropout": self.rngs()} if is_dropping else None


def _stream(rngs: Any, name: str) -> Any:
    """Return the random stream of this name in `rngs`.

    Raises:
      LayerError: `rngs` has neither a stream of this name nor a default one.
    """
    if not isinstance(rngs, nnx.Rngs):
        raise LayerError(f"rngs is a {type(rngs).__name__}", path="rngs", fix="pass nnx.Rngs(0)")
    if name not in rngs and "default" not in rngs:
        raise LayerError(
            f"rngs has no stream {name}",
            path="rngs",
            fix="pass nnx.Rngs(0), or nnx.Rngs(params=0, dropout=1)",
        )
    return rngs[name]


class Norm(_Block):
    """A layer norm or an RMS norm of the last dim.

    Args:
      config: The kind of the norm, and its options.
      size: Size of the last dim.
      dtypes: `param` is the dtype of the parameters, `output` that of the result.
      rngs: Random streams. `params` is for initialization.
      path: Path of the parameters in the model, for strategies with `[[tensors]]` entries.
    """

    def __init__(
        self,
        config: norm.NormConfig,
        size: int,
        *,
        rngs: Any,
        dtypes: Dtypes = FLOAT32,
        path: str | None = None,
    ) -> None:
        super().__init__(norm.specs(config, size, dtypes), rngs, path)
        self.config, self.size, self.dtypes = config, size, dtypes

    def __call__(self, x: Any) -> Any:
        """Return `x`, `[..., size]`, after the norm."""
        specs = norm.specs(self.config, self.size, self.dtypes)
        params = use(_read(self, specs), specs, path=self.path)
        return norm.apply(self.config, params, x, dtype=self.dtypes.output)


class Dense(_Block):
    """A matmul with a kernel, and an optional bias.

    Args:
      inputs: Axis and size of the contracted dims, which are the last dims of the input.
      outputs: Axis and size of the dims of the result.
      bias: Whether there is a bias.
      init: Initializer of the kernel. Defaults to that of `layers.dense.specs`.
      dtypes: Dtypes of the parameters, the matmul and the result.
      rngs: Random streams. `params` is for initialization.
      path: Path of the parameters in the model, for strategies with `[[tensors]]` entries.
    """

    def __init__(
        self,
        inputs: dense.NamedSizes,
        outputs: dense.NamedSizes,
        *,
        rngs: Any,
        bias: bool = False,
        init: Any = None,
        dtypes: Dtypes = FLOAT32,
        path: str | None = None,
    ) -> None:
        specs = dense.specs(inputs, outputs, bias=bias, init=init, dtypes=dtypes)
        super().__init__(specs, rngs, path)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.has_bias, self.dtypes = bias, dtypes

    def __call__(self, x: Any, out: Any = None) -> Any:
        """Return `x @ kernel + bias`.

        Args:
          x: `[..., *inputs]`.
          out: Annotation of the result. Without it, the compiler decides how the result is sharded.
        """
        specs = dense.specs(self.inputs, self.outputs, bias=self.has_bias, dtypes=self.dtypes)
        params = use(_read(self, specs), specs, path=self.path)
        y = dense.dense(
            x,
            params["kernel"],
            params.get("bias"),
            out=out,
            contract=len(self.inputs),
            dtype=self.dtypes.compute,
        )
        return y.astype(self.dtypes.output)


class Embedding(_Block):
    """Token embeddings. `table` is the parameter, which a tied output projection uses too.

    Args:
      vocab: Number of tokens.
      embed: Size of the residual.
      init: Initializer. Defaults to that of `layers.embedding.specs`.
      dtypes: Dtypes of the table, the lookup and the result.
      rngs: Random streams. `params` is for initialization.
      path: Path of the parameters in the model, for strategies with `[[tensors]]` entries.
    """

    def __init__(
        self,
        vocab: int,
        embed: int,
        *,
        rngs: Any,
        init: Any = None,
        dtypes: Dtypes = FLOAT32,
        path: str | None = None,
    ) -> None:
        table = embedding.specs(vocab, embed, init=init, dtypes=dtypes)
        super().__init__({"table": table}, rngs, path)
        self.dtypes = dtypes

    def __call__(self, tokens: Any) -> Any:
        """Return the embeddings of `tokens`, `[batch, length]`."""
        path = None if self.path is None else f"{self.path}/table"
        return embedding.apply(self.table.get_value(), tokens, dtypes=self.dtypes, path=path)


class Dropout(Module):  # type: ignore[misc]
    """Dropout whose mask does not depend on the mesh.

    Args:
      rate: Probability of dropping an element.
      shared: Dims along which all elements share one mask value.
      rngs: Random streams; each call takes a key of `dropout`.
    """

    def __init__(self, rate: float, *, rngs: Any, shared: tuple[int, ...] = ()) -> None:
        read_value("rate", rate, RATE, error=LayerError)
        self.rate, self.shared, self.rngs = rate, shared, _stream(rngs, "dropout").fork()
        self.deterministic = False

    def __call__(self, x: Any) -> Any:
        """Drop elements of `x`, unless `deterministic`."""
        key = None if self.deterministic else self.rngs()
        return dropout.dropout(x, key, self.rate, shared=self.shared)


class Mlp(_Block):
    """`layers.mlp_block`.

    Args:
      config: Sizes and options.
      rngs: Random streams. `params` is for initialization, `dropout` for dropout.
      path: Path of the parameters in the model, for strategies with `[[tensors]]` entries.

    Raises:
      LayerError: The recipe is delayed scaling, whose state this module does not take.
    """

    def __init__(self, config: mlp_block.MlpConfig, *, rngs: Any, path: str | None = None) -> None:
        if isinstance(config.recipe, DelayedScaling):
            raise LayerError(
                "delayed scaling has a state, and Mlp does not take one",
                path="config.recipe",
                fix='use recipe="current", a Transformer, or mlp_block.apply',
            )
        super().__init__(mlp_block.specs(config), rngs, path, drops=config.dropout > 0)
        self.config = config

    def __call__(self, x: Any) -> Any:
        """Return what the block adds to the residual `x`, `[batch, length, embed]`."""
        params = _read(self, mlp_block.specs(self.config))
        return mlp_block.apply(self.config, params, x, keys=self._keys(), path=self.path)[0]


class Attention(_Block):
    """`layers.attention_block`.

    Args:
      config: Sizes and options.
      rngs: Random streams. `params` is for initialization, `dropout` for dropout.
      path: Path of the parameters in the model, for strategies with `[[tensors]]` entries.
    """

    def __init__(
        self, config: attention_block.AttentionConfig, *, rngs: Any, path: str | None = None
    ) -> None:
        super().__init__(attention_block.specs(config), rngs, path, drops=config.dropout > 0)
        self.config = config

    def __call__(self, x: Any, *, state: Any = None, **options: Any) -> tuple[Any, Any]:
        """Return what the block adds to the residual `x`, and the cache after the append.

        Args:
          x: `[batch, length, embed]`.
          state: A cache, an `AttentionState`, or None. Nothing is dropped with a cache.
          **options: As in `attention_block.apply`.
        """
        params = _read(self, attention_block.specs(self.config))
        has_scaling = isinstance(state, attention_block.AttentionState)
        cache = state.cache if has_scaling else state
        # Serving drops nothing, even if the module is not in eval mode.
        keys = self._keys() if cache is None else None
        return attention_block.apply(
            self.config, params, x, keys=keys, state=state, path=self.path, **options
        )

    def init_cache(self, kind: str = "dense", **options: Any) -> Any:
        """Create an empty cache; see `attention_block.init_cache`."""
        return attention_block.init_cache(self.config, kind, **options)


class MoE(_Block):
    """`layers.moe`, an MoE layer.

    Args:
      config: Sizes and options.
      rngs: Random streams. `params` is for initialization.
      path: Path of the parameters in the model, for strategies with `[[tensors]]` entries.
    """

    def __init__(self, config: moe.MoEConfig, *, rngs: Any, path: str | None = None) -> None:
        super().__init__(moe.specs(config), rngs, path)
        self.config = config

    def __call__(self, x: Any, *, state: Any = None, valid: Any = None) -> tuple[Any, moe.MoEState]:
        """Apply the MoE layer, and return its result and its state.

        Args:
          x: Tokens, `[batch, embed]` or `[batch, length, embed]`.
          state: State with the router's bias, or None.
          valid: As in `moe.apply`.
        """
        params = _read(self, moe.specs(self.config))
        return moe.apply(self.config, params, x, state=state, path=self.path, valid=valid)


class MoEBlock(_Block):
    """`layers.moe_block`: a norm, then an MoE layer.

    Args:
      config: Options of the norm and of the MoE layer.
      rngs: Random streams. `params` is for initialization.
      path: Path of the parameters in the model, for strategies with `[[tensors]]` entries.
    """

    def __init__(
        self, config: moe_block.MoEBlockConfig, *, rngs: Any, path: str | None = None
    ) -> None:
        super().__init__(moe_block.specs(config), rngs, path)
        self.config = config

    def __call__(self, x: Any, *, state: Any = None, valid: Any = None) -> tuple[Any, moe.MoEState]:
        """Return what the block adds to the residual `x`, and the state of the router.

        Args:
          x: `[batch, length, embed]`.
          state: State with the router's bias, or None.
          valid: As in `moe_block.apply`.
        """
        params = _read(self, moe_block.specs(self.config))
        return moe_block.apply(self.config, params, x, state=state, path=self.path, valid=valid)


class Transformer(_Block):
    """`layers.transformer_block`: a stack of layers.

    Its parameters are under "0", "1" and so on. If the layers are scanned, there is one tree for
    each layer of the pattern. Otherwise there is one tree per layer.

    Args:
      config: Sizes and options.
      rngs: Random streams. `params` is for initialization, `dropout` for dropout.
      path: Path of the parameters in the model, for strategies with `[[tensors]]` entries.
    """

    def __init__(
        self, config: transformer_block.TransformerConfig, *, rngs: Any, path: str | None = None
    ) -> None:
        parts = (config, config.attention, config.cross, *config.mlps)
        # A part may be None, or a block that has no dropout.
        drops = any(getattr(part, "dropout", 0) > 0 for part in parts)
        super().__init__(transformer_block.specs(config), rngs, path, drops=drops)
        self.config = config

    def __call__(
        self, x: Any, *, state: Any = None, **options: Any
    ) -> tuple[Any, transformer_block.StackState]:
        """Return the residual after all layers, and the state.

        With caches, the layers are not scanned, and nothing is dropped.

        Args:
          x: The residual, `[batch, length, embed]`.
          state: A `StackState`, or None.
          **options: As in `transformer_block.apply`.
        """
        config, params = self.config, _read(self, transformer_block.specs(self.config))
        keys = self._keys()
        if state is not None and state.caches is not None:
            config, params = transformer_block.unstack(config, params)
            keys = None
        return transformer_block.apply(
            config, params, x, keys=keys, state=state, path=self.path, **options
        )

    def init_caches(
        self, kind: str = "dense", *, state: Any = None, **options: Any
    ) -> transformer_block.StackState:
        """Create the state with an empty cache per layer; see `transformer_block.init_caches`.

        Args:
          kind: Kind of the caches.
          state: `StackState` of training, or None. Each layer takes its biases and scales from this
            state.
          **options: As in `transformer_block.init_caches`.
        """
        caches = transformer_block.init_caches(self.config, kind, **options)
        own = transformer_block.StackState() if state is None else state
        own = transformer_block.unstack_state(self.config, own)
        return dataclasses.replace(own, caches=caches)
