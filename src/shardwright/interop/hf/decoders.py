"""A decoder with the weights of a checkpoint: its parameters, and the function that serves it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from shardwright.errors import StrategyError
from shardwright.interop.hf.checkpoint import Checkpoint, check_manager, read
from shardwright.interop.hf.families import read_config
from shardwright.interop.hf.model.decoder import Decoder, decoder_specs
from shardwright.interop.hf.model.latent import LatentConfig
from shardwright.interop.hf.model.sizes import Sizes
from shardwright.interop.hf.parameters import arrange
from shardwright.interop.hf.pieces import place
from shardwright.interop.hf.source import Source
from shardwright.manager.manager import PartitionManager
from shardwright.trees.paths import is_array_spec, path_text

if TYPE_CHECKING:
    from shardwright.serving import CacheShape


# A decoder is the function of compiled steps, so it is hashed by identity and held weakly.
@dataclasses.dataclass(
    frozen=True, slots=True, kw_only=True, eq=False, repr=False, weakref_slot=True
)
class LoadedDecoder:
    """A decoder of the blocks of `shardwright.layers`, whose weights are not read yet.

    It is itself the model of a `serving.Engine`.

    Attributes:
      config: Sizes and options: the configs of its blocks.
      specs: Its parameters as `ArraySpec`s.
      sources: Where each parameter is, by its path in `specs`.
      notes: What differs from the files, one line each.
    """

    config: Sizes
    specs: dict[str, Any]
    sources: Mapping[str, Source]
    notes: tuple[str, ...]

    def load(self, pm: PartitionManager, *, mode: str | None = None) -> dict[str, Any]:
        """Read every parameter, shard by shard, into its sharding.

        Args:
          pm: The manager.
          mode: Runtime mode. Defaults to the manager's.

        Raises:
          ShardingError: A parameter does not fit the rules, or the mesh is abstract. Nothing is
            read.
          CheckpointError: A file has changed, or a value does not fit its dtype.
        """
        check_manager(pm)
        shardings = pm.shardings(self.specs, mode=mode)
        structure: Any
        pairs, structure = jax.tree_util.tree_flatten_with_path(self.specs, is_leaf=is_array_spec)
        placed = [
            place(path_text(path), self.sources[path_text(path)], spec.dtype, sharding)
            for (path, spec), sharding in zip(pairs, jax.tree.leaves(shardings), strict=True)
        ]
        params: dict[str, Any] = structure.unflatten(placed)
        return params

    @property
    def cache_shape(self) -> CacheShape:
        """The `shape` of a `serving.Engine`.

        Raises:
          StrategyError: As `__call__`.
        """
        from shardwright.serving import CacheShape

        self._check_served()
        stacks = self.config.stacks
        attention: Any = stacks[0].attention
        windows = {
            stack.attention_of(number).window  # type: ignore[union-attr]
            for stack in stacks
            for number in range(stack.period)
        }
        window: Any = next(iter(windows)) if len(windows) == 1 else None
        return CacheShape(
            layers=sum(stack.layers for stack in stacks),
            kv_heads=attention.key_heads,
            head_dim=attention.size,
            dtype=attention.dtypes.cache,
            # The positions before a query, and its own.
            window=None if window is None else window[0] + 1,
        )

    def __call__(
        self, params: Any, tokens: jax.Array, caches: Any, valid: jax.Array
    ) -> tuple[jax.Array, list[Any]]:
        """Return logits and caches: the model of a `serving.Engine`.

        Args:
          params: What `load` returns.
          tokens: `[batch, length]` int32.
          caches: One per layer. The tokens follow those in them.
          valid: `[batch, length]` bool, False for padding.

        Raises:
          StrategyError: The logits would not be those of the model, or no cache keeps what its
            attention needs.
        """
        self._check_served()
        return Decoder(self.config, remat="none").logits(params, tokens, caches, valid)

    def _check_served(self) -> None:
        reasons = list(self.config.differs)
        if any(isinstance(stack.attention, LatentConfig) for stack in self.config.stacks):
            reasons.append("attention needs a cache of latents, and no kind of cache is one")
        if reasons:
            raise StrategyError(
                f"{self.config.family} cannot be served: {'; '.join(reasons)}",
                fix="write the forward pass yourself; plans and the parameters do not need it",
            )


def decoder(
    folder: str | os.PathLike[str],
    *,
    param: str | None = None,
) -> LoadedDecoder:
    """Read the headers of a checkpoint, and make a decoder of the blocks of `shardwright.layers`.

    Args:
      folder: Folder with `config.json` and safetensors files.
      param: Dtype of stored parameters, with products in bfloat16. Defaults to the configuration's
        dtype for both.

    Raises:
      CheckpointError: As `read` raises it, or the decoder has another set of parameters than the
        checkpoint, or other sizes, or a weight is not stored as floats of 16 bits or more. All are
        reported at once.
      StrategyError: The configuration is not that of a decoder, or a value is not valid.
    """
    path = Path(folder)
    checkpoint: Checkpoint = read(path)
    config = (path if path.is_dir() else path.parent) / "config.json"
    sizes = read_config(str(config), param=param, capacity=None)
    specs = decoder_specs(sizes, stacked=False)
    pairs, _ = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_array_spec)
    sources = arrange(checkpoint, sizes, {path_text(path): spec for path, spec in pairs})
    notes = (*checkpoint.notes, *sizes.notes)
    return LoadedDecoder(config=sizes, specs=specs, sources=sources, notes=notes)
