"""Compile the quantized dense for eight TPUs, without one: dtype and bytes of its all-gathers.

    python -m tests.layers.tpu_fp8

prints one line of JSON per recipe; see `tests.tpu_compile`.
"""

from __future__ import annotations

import dataclasses
import re

from tests import tpu_compile

RECIPES = ("delayed", "current", "mxfp8")
INPUTS, OUTPUTS = 512, 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The all-gathers of a forward and backward pass.

    Attributes:
      recipe: Name.
      floats: Those of floats, as "dtype[shape]".
      bytes: Bytes of all, with the exponents of blocks.
    """

    recipe: str
    floats: list[str]
    bytes: int


def measure() -> list[Gathered]:
    return tpu_compile.measure("tests.layers.tpu_fp8", Gathered)


def main() -> None:
    import jax
    import jax.numpy as jnp

    import shardwright as sw
    from shardwright.layers import fp8

    axes = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
    kernel = sw.ArraySpec((INPUTS, OUTPUTS), jnp.bfloat16, (sw.EMBED, sw.MLP_INTERMEDIATE))
    mesh = tpu_compile.tpu_mesh(fsdp=8)
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=mesh, mode="train")
    x = pm.abstract(sw.ArraySpec((8, 256, INPUTS), jnp.bfloat16, axes), role="activation")
    for name in RECIPES:
        recipe = fp8.read_recipe(name)
        state = fp8.init(recipe, ["up"])

        def loss(w, x, channel, recipe=recipe, state=state):  # type: ignore[no-untyped-def]
            out = {"up": (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)}
            use = fp8.uses(state, channel)
            kernels = {"up": fp8.stored(w, kernel)}
            result = fp8.dense(x, kernels, recipe=recipe, use=use, axes=axes, out=out)
            return jnp.sum(jnp.sin(result.ys["up"].astype(jnp.float32))), result.seen

        # Before the manager is entered: no array can be created on its devices.
        channel = fp8.new_channel(state)
        with pm:
            step = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
            compiled = step.lower(pm.abstract(kernel), x, channel).compile()
        text = compiled.as_text()
        floats = re.findall(r"= (b?f\w+\[[\d,]+\])\S* all-gather(?:-start)?\(", text)
        _, sent = tpu_compile.collectives(compiled, mesh)
        tpu_compile.tell(Gathered(recipe=name, floats=floats, bytes=sent.get("all_gather", 0)))


if __name__ == "__main__":
    main()
