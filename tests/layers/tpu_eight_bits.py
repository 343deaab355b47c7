"""Compile the quantized dense for eight TPUs, without one: dtype and bytes of its all-gathers.

    python -m tests.layers.tpu_eight_bits

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
    return tpu_compile.measure("tests.layers.tpu_eight_bits", Gathered)


def main() -> None:
    import jax
    import jax.numpy as jnp

    import shardwright as sw
    from shardwright.layers import eight_bits

    axes = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
    kernel = sw.ArraySpec((INPUTS, OUTPUTS), jnp.bfloat16, (sw.EMBED, sw.MLP_INTERMEDIATE))
    mesh = tpu_compile.tpu_mesh(fsdp=8)
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=mesh, mode="train")
    x = pm.abstract(sw.ArraySpec((8, 256, INPUTS), jnp.bfloat16, axes), role="activation")
    for name in RECIPES:
        recipe = eight_bits.read_recipe(name)
        state = eight_bits.init(recipe, ["up"])

        def loss(w, x, channel, recipe=recipe, state=state):  # type: ignore[no-untyped-def]
            out = {"up": (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)}
            use = eight_bits.uses(state, channel)
            kernels = {"up": eight_bits.stored(w, kernel)}
            result = eight_bits.dense(x, kernels, recipe=recipe, use=use, axes=axes, out=out)
            return jnp.sum(jnp.sin(result.ys["up"].astype(jnp.float32))), result.seen

        # Before the manager is entered: no array can be created on its devices.
        channel = eight_bits.new_channel(state)
        with pm:
            step = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
            compiled = step.lower(pm.abstract(kernel), x, channel).compile()
        text = compiled.as_text()
        floats = re.findall(r"= (b?f\w+\[[\d,]+\])\S* all-gather(?:-start)?\(", text)
        _, sent = tpu_compile.collectives(compiled, mesh)
        tpu_compile.tell(Gathered(recipe=name, floats=floats, bytes=sent.get("all_gather", 0)))


if __name__ == "__main__":
    main()
