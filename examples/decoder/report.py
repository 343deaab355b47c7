"""The output of the demo: shardings, bytes per device, and how losses and texts compare."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

import shardwright as sw
from decoder.config import DecoderConfig, decoder_specs
from decoder.serve import Server
from shardwright.layers.attention_block import NEW_ROWS, QUERIES
from shardwright.layers.loss import LOGITS
from shardwright.layers.mlp_block import HIDDEN
from shardwright.layers.placement import RESIDUAL
from shardwright.vocabulary.axes import axis_label

CACHE_AXES = (sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM)


def weights(config: DecoderConfig) -> dict[str, sw.ArraySpec]:
    """Return one of each kind of weight, by name."""
    specs = decoder_specs(config)
    layer = specs["layers"][0]
    kinds = {
        f"{part} {name}": params["kernel"]
        for part in ("attention", "mlp")
        for name, params in layer[part].items()
        # Leave out the weight of values, which is sharded like that of keys.
        if name not in ("norm", "value")
    }
    return {
        "embedding": specs["embedding"],
        **kinds,
        "norm": specs["norm"]["scale"],
        "lm_head": specs["lm_head"],
    }


def activations(
    config: DecoderConfig, *, batch: int, q_length: int, kv_length: int
) -> dict[str, sw.ArraySpec]:
    """Return every annotated activation of the model, by name, with its shape in one call."""
    new, read = (batch, q_length), (batch, kv_length)
    shapes = {
        "tokens": (new, (sw.BATCH, sw.LENGTH)),
        "residual": ((*new, config.embed), RESIDUAL),
        "queries": ((*new, config.heads, config.head_dim), QUERIES),
        "new keys": ((*new, config.kv_heads, config.head_dim), NEW_ROWS),
        "keys read, cache": ((*read, config.kv_heads, config.head_dim), CACHE_AXES),
        "mlp hidden": ((*new, config.mlp), HIDDEN),
        "logits": ((*new, config.vocab), LOGITS),
    }
    return {name: sw.ArraySpec(shape, jnp.float32, axes) for name, (shape, axes) in shapes.items()}


def mesh_axes(resolution: sw.Resolution) -> str:
    """Return the mesh axes of each dim, or `-`."""
    return ",".join("+".join(decision.mesh_axes) or "-" for decision in resolution.decisions)


def training_table(
    config: DecoderConfig, managers: Mapping[str, sw.PartitionManager], *, batch: int, length: int
) -> Table:
    """Return the mesh axes of each tensor in training, with a column per strategy."""
    table = _columns([*managers])
    kinds = weights(config)
    _section(
        table,
        kinds,
        lambda spec: [mesh_axes(_explain(pm, spec, role="param")) for pm in managers.values()],
    )
    used = {f"{name}, used": kinds[name] for name in ("attention query", "mlp down")}
    _section(
        table,
        used,
        lambda spec: [mesh_axes(_explain(pm, spec, role="use")) for pm in managers.values()],
    )
    tensors = activations(config, batch=batch, q_length=length, kv_length=length)
    _section(
        table,
        tensors,
        lambda spec: [mesh_axes(_explain(pm, spec, role="activation")) for pm in managers.values()],
    )
    return table


def serving_table(
    config: DecoderConfig, pm: sw.PartitionManager, *, slots: int, capacity: int, prompt_length: int
) -> Table:
    """Return the mesh axes of each tensor under a serving strategy, with a column per mode."""
    sizes = {
        "train": {"batch": slots, "q_length": prompt_length, "kv_length": prompt_length},
        "prefill": {"batch": 1, "q_length": prompt_length, "kv_length": prompt_length},
        "insert": {"batch": 1, "q_length": prompt_length, "kv_length": prompt_length},
        "decode": {"batch": slots, "q_length": 1, "kv_length": capacity},
    }
    titles = [f"{mode}\n{size['batch']} x {size['q_length']}" for mode, size in sizes.items()]
    table = _columns(titles)
    _section(
        table,
        weights(config),
        lambda spec: [mesh_axes(_explain(pm, spec, mode=mode, role="param")) for mode in sizes],
    )
    in_mode = {mode: activations(config, **size) for mode, size in sizes.items()}
    for name, spec in in_mode["train"].items():
        cells = [
            mesh_axes(_explain(pm, in_mode[mode][name], mode=mode, role="activation"))
            for mode in sizes
        ]
        table.add_row(name, _axes(spec), *cells)
    return table


def _explain(pm: sw.PartitionManager, spec: sw.ArraySpec, **how: Any) -> sw.Resolution:
    resolution = pm.explain(spec.axes, shape=spec.shape, **how)
    resolution.require()
    return resolution


def _columns(names: Sequence[str]) -> Table:
    table = _table()
    for name in ("tensor", "axes", *names):
        table.add_column(name, overflow="fold")
    return table


def _table(title: str | None = None) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)


def _section(
    table: Table, specs: Mapping[str, sw.ArraySpec], cells: Callable[[sw.ArraySpec], list[str]]
) -> None:
    for name, spec in specs.items():
        table.add_row(name, _axes(spec), *cells(spec))
    table.add_section()


def _axes(spec: sw.ArraySpec) -> str:
    return ", ".join(axis_label(axis) for axis in spec.axes)


def bytes_per_device(tree: Any) -> int:
    """Return the largest number of bytes that one device holds of a tree of arrays."""
    bytes_of: collections.Counter[Any] = collections.Counter()
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            bytes_of[shard.device] += shard.data.nbytes
    return max(bytes_of.values())


def memory_table(
    states: Mapping[str, Any],
    managers: Mapping[str, sw.PartitionManager],
    seconds: Mapping[str, float],
) -> Table:
    """Return the bytes of one device under each strategy in training."""
    table = _table()
    for name in (
        "strategy",
        "mesh",
        "parameters",
        "optimizer state",
        "together",
        "of single",
        "time",
    ):
        table.add_column(name, justify="left" if name in ("strategy", "mesh") else "right")
    whole = None
    for name, state in states.items():
        params, opt = bytes_per_device(state["params"]), bytes_per_device(state["opt"])
        whole = whole or params + opt
        share = f"{(params + opt) / whole:.1%}"
        table.add_row(
            name,
            mesh_text(managers[name]),
            f"{params:,}",
            f"{opt:,}",
            f"{params + opt:,}",
            share,
            f"{seconds[name]:.1f} s",
        )
    return table


def serving_memory(server: Server, params: Any) -> str:
    """Return one line with the bytes of one device when serving."""
    weights = server.pm.shard(params, decoder_specs(server.config), role="param", mode="decode")
    held, rows = bytes_per_device(weights), bytes_per_device(server.empty()[0])
    mesh = mesh_text(server.pm)
    return f"{server.pm.name} ({mesh}): weights {held:,} and cache {rows:,} bytes per device"


def mesh_text(pm: sw.PartitionManager) -> str:
    """Return the mesh of a manager as text."""
    return " ".join(f"{axis}:{size}" for axis, size in pm.mesh.shape.items())


def loss_table(losses: Mapping[str, Sequence[float]], *, rows: int = 6) -> Table:
    """Return the losses of each strategy at a few steps, and their largest difference."""
    table = _table()
    for name in ("step", *losses, "largest difference"):
        table.add_column(name, justify="right")
    steps = len(next(iter(losses.values())))
    for step in sorted({round(at) for at in np.linspace(0, steps - 1, min(rows, steps))}):
        values = [series[step] for series in losses.values()]
        table.add_row(
            str(step + 1), *(f"{value:.7f}" for value in values), f"{max(values) - min(values):.1e}"
        )
    return table


def precision_table(results: Mapping[str, Any]) -> Table:
    """Return the committed losses of `benchmarks/fp8.py`, with a column per precision."""
    context = results["context"]
    title = (
        f"Losses in fp8 after {context['steps']} steps, nats per byte: the committed results"
        " of benchmarks/fp8.py, not trained in this run"
    )
    table = _table(title)
    for name in results["losses"]:
        table.add_column(name, justify="right")
    last = f"at {context['steps']}"
    table.add_row(*(f"{losses[last]:.4f}" for losses in results["losses"].values()))
    return table


def largest_difference(losses: Mapping[str, Sequence[float]]) -> float:
    """Return the largest relative difference of a loss from that of the first strategy."""
    first, *others = (np.asarray(series, np.float64) for series in losses.values())
    # np.max keeps a NaN, which max drops. A NaN must count as a difference.
    return (
        float(np.max([np.max(np.abs(other - first) / np.abs(first)) for other in others]))
        if others
        else 0.0
    )


def text_table(prompts: Sequence[bytes], texts: Mapping[str, Sequence[bytes]]) -> Table:
    """Return the text of each slot, and whether all strategies wrote the same bytes."""
    table = _table()
    for name in ("slot", "bytes", "prompt", "continuation", "equal"):
        table.add_column(name, justify="right" if name in ("slot", "bytes") else "left")
    for slot, row in enumerate(differing(texts)):
        written = next(iter(texts.values()))[slot]
        table.add_row(
            str(slot),
            str(len(prompts[slot])),
            _shown(prompts[slot][-32:]),
            _shown(written),
            "yes" if row is None else f"NO, byte {row}",
        )
    return table


def differing(texts: Mapping[str, Sequence[bytes]]) -> Iterator[int | None]:
    """Yield for each slot the first byte at which the texts differ, or None."""
    for written in zip(*texts.values(), strict=True):
        first = (at for at, values in enumerate(zip(*written, strict=True)) if len(set(values)) > 1)
        yield next(first, None)


def _shown(text: bytes) -> str:
    return repr(text.decode("utf-8", errors="replace")).replace("[", r"\[")
