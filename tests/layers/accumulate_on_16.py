"""Accumulate on 16 CPU devices, where all mesh axes of a preset have two.

    python -m tests.layers.accumulate_on_16

Each step must equal one batch. Prints one line of JSON per step.
"""

from __future__ import annotations

import dataclasses

from shardwright.testing import cpu_mesh, virtual_devices

if __name__ == "__main__":
    virtual_devices(16)  # before `test_accumulate` is imported, which makes arrays

import jax

import shardwright as sw
from shardwright.layers import accumulate
from tests.layers import blocks
from tests.layers.test_accumulate import padded_whole_batch, reductions_in_the_loop
from tests.tpu_compile import tell

MESHES = {
    "fsdp_tp": "dp:2,fsdp:2,sp:2,tp:2",
    "fsdp_tp_sp": "dp:2,fsdp:2,sp:2,tp:2",
    "moe_ep": "dp:2,sp:2,ep:2,tp:2",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """Numbers of reductions of gradients that the loop of a step runs.

    Attributes:
      preset: The preset.
      kind: Type of the mesh axes.
      over_dp: Reductions over dp.
      over_sp: All-reduces of whole gradients over sp alone.
    """

    preset: str
    kind: str
    over_dp: int
    over_sp: int


def main() -> None:
    """Compare each step with one batch, and print what its loop reduces."""
    for preset, mesh in MESHES.items():
        f, specs, params, batch, wanted = padded_whole_batch(preset)
        for kind in ("auto", "explicit"):
            pm = sw.PartitionManager(
                sw.Strategy.preset(preset), mesh=cpu_mesh(mesh, axis_types=kind), mode="train"
            )
            with pm:
                stored = pm.shard(params, specs, role="param")
                run = jax.jit(accumulate(f, 4, specs=specs, gather="once"))
                compiled = run.lower(stored, batch).compile()
                result = compiled(stored, batch)
            blocks.assert_close((result.value, result.grads), wanted, rtol=1e-5)
            inside = reductions_in_the_loop(compiled, pm)
            over_dp = sum("dp" in each for each in inside)
            tell(Inside(preset=preset, kind=kind, over_dp=over_dp, over_sp=len(inside) - over_dp))


if __name__ == "__main__":
    main()
