"""The rooms of shardwright from top to bottom: each imports only from those below it."""

from __future__ import annotations

from tools.pictures.svg import Box, Picture

# What each room holds, the highest first; a test compares the names with the packages.
ROOMS = (
    ("cli", "commands: explain, check, diff, plan"),
    ("testing", "virtual devices, assertions, golden files"),
    ("show", "text, tables, pages and data of all values"),
    ("interop", "names of other libraries, one package each"),
    ("serving", "engine, scheduler, sampling"),
    ("layers", "norms, attention, MLP, experts, loss"),
    ("attention", "one call, many kernels"),
    ("caches", "dense, sliding, quantized, paged"),
    ("checkpoint", "training states in files"),
    ("reshard", "arrays from one sharding to another"),
    ("plan", "memory, collectives, time, search"),
    ("lints", "likely mistakes in a strategy"),
    ("inference", "axes of models that nobody annotated"),
    ("manager", "PartitionManager: shard, gather, explain"),
    ("dims", "how dims of operands and results correspond"),
    ("processes", "what processes check of each other"),
    ("strategy", "strategy files and presets"),
    ("trees", "annotated trees, optimizer state"),
    ("resolution", "axes, sizes and rules to a spec; pure"),
    ("mesh", "meshes and their text form"),
    ("vocabulary", "axes, modes, layouts"),
    ("_jax, errors", "what differs in JAX; error classes"),
)
ROW = 30


def draw() -> str:
    """Return the picture: a row per room."""
    height = 92 + ROW * len(ROOMS)
    title = "The rooms of shardwright: each imports only from those below it"
    picture = Picture(title=title, width=480, height=height)
    picture.text(20, 32, "The rooms, from users down to the vocabulary", kind="title")
    picture.text(20, 54, "Imports go down only.", kind="soft")
    picture.arrow(28, 74, length=ROW * len(ROOMS) - 4)
    for number, (name, content) in enumerate(ROOMS):
        y = 72 + ROW * number
        picture.box(Box(x=48, y=y, width=412, height=ROW - 4), kind="room", radius=4)
        picture.text(58, y + 17, name, kind="code bold")
        picture.text(158, y + 17, content)
    return picture.render()
