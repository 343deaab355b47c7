"""A fixed sample of requests and their answers as text: `python -m tests.properties.sample`. Equal
in every process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

import shardwright as sw
from shardwright.resolution.decisions import Resolution
from shardwright.resolution.resolver import explain
from tests.golden.specs import render
from tests.properties import cases
from tests.properties.cases import Case


def sampled(count: int) -> Iterator[Case]:
    """Yield requests drawn from the pools that the properties draw from."""
    random = Random(17)
    for _ in range(count):
        axes = random.sample(cases.AXES, k=random.randint(1, 4))
        dims = tuple(axis if random.random() < 0.9 else sw.EMPTY for axis in axes)
        if len(axes) > 2 and random.random() < 0.2:
            dims = ((axes[0], axes[1]), *axes[2:])
        tables: cases.Tables = {name: {} for name in cases.TABLES}
        for axis in axes:
            if random.random() < 0.9:
                tables["rules"][axis] = random.choice(cases.RULES)
            name = random.choice(cases.TABLES)
            tables[name][axis] = random.choice(
                cases.PARAMETER_RULES if "params" in name else cases.RULES
            )
        yield Case(
            tables=tables,
            mesh=random.choice(cases.MESHES),
            policy=random.choice((sw.Policy(), random.choice(cases.POLICIES))),
            axes=dims,
            shape=tuple(random.choice(cases.SIZES) for _ in dims)
            if random.random() < 0.9
            else None,
            mode=random.choice(cases.MODES),
            role=random.choice(cases.ROLES),
        )


def answers(count: int) -> Iterator[Resolution]:
    """Yield the answer to each of the sampled requests."""
    for case in sampled(count):
        yield explain(case.axes, case.rules, case.mesh, **case.asked)


def text(count: int) -> str:
    """Return answers with everything that is said about them, the specs of a layer, and a strategy
    written out.
    """
    lines = [
        line for answer in answers(count) for line in (str(answer), json.dumps(answer.to_json()))
    ]
    strategy = sw.Strategy.preset("moe_ep")
    lines += [render("moe_ep"), strategy.dumps(), strategy.dumps(format="json")]
    lines += [" ".join(strategy.compile().named_mesh_axes()), json.dumps(sw.Strategy.json_schema())]
    return "\n".join(lines)


if __name__ == "__main__":
    print(text(300))
