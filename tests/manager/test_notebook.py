"""A manager that one cell enters and later cells use, in a real Jupyter kernel."""

from __future__ import annotations

from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

pytestmark = pytest.mark.full

# Each cell, and what it prints.
CELLS = {
    """
import asyncio, contextvars, jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 8)
import shardwright as sw
pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:2,tp:4"))
decode = pm.for_mode("decode")
f = jax.jit(lambda x: sw.hint(2 * x, sw.BATCH, sw.MLP_INTERMEDIATE))
def place():
    x = jnp.ones((8, 64))
    try:
        return sw.hint(x, sw.BATCH, sw.MLP_INTERMEDIATE).sharding.spec, f(x).sharding.spec
    except (sw.NoManagerError, AttributeError) as error:
        return error.what
print(f(jnp.ones((8, 64))).sharding.is_fully_replicated)
""": "True",
    "_ = pm.__enter__()": "",
    "print(*place())": "P('fsdp', 'tp') P('fsdp', 'tp')",
    # A cell that awaits is a task too.
    "await asyncio.sleep(0.01); print(*place())": "P('fsdp', 'tp') P('fsdp', 'tp')",
    # The task that entered it has ended, and the context of that task may be gone.
    "print(*contextvars.Context().run(place))": "P('fsdp', 'tp') P('fsdp', 'tp')",
    """
released = asyncio.Event()
async def holds():
    with decode:
        await released.wait()
        return sw.current_manager().mode
holding = asyncio.ensure_future(holds())
await asyncio.sleep(0.01)
""": "",
    # The manager of a task that still runs is never used by a cell.
    "print(place())": "JAX's caches in this thread do not know the ambient manager, "
    "PartitionManager('fsdp_tp', mesh='fsdp:2,tp:4'); they know PartitionManager('fsdp_tp', "
    "mesh='fsdp:2,tp:4', mode='decode'), entered by another task",
    "with pm: print(*place())": "P('fsdp', 'tp') P('fsdp', 'tp')",
    "released.set(); print(await holding, *place())": "__autoregressive__ P('fsdp', 'tp') "
    "P('fsdp', 'tp')",
    "pm.__exit__(None, None, None)": "",
    "print(f(jnp.ones((8, 64))).sharding.is_fully_replicated)": "True",
}


def test_cells_share_the_manager_of_a_cell() -> None:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source.strip()) for source in CELLS]
    )
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3")
    client.execute()
    for cell, wanted in zip(notebook.cells, CELLS.values(), strict=True):
        assert printed(cell) == wanted, cell.source


def printed(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs).strip()
