"""Write a file for `--hardware` with the rates that a profile measured."""

from __future__ import annotations

import datetime as dt
import json
from typing import Final

from shardwright.errors import StrategyError, visible
from shardwright.plan.profile.result import Profile

# No rate is fitted to a collective that sends fewer bytes: its time may be mostly latency.
_LEAST_BYTES: Final = 2**20


def fitted_chip(profile: Profile) -> str:
    """Return the measured rates of the chip as TOML: of matmuls, and of the links.

    The file has only what the profile measured; the package has the other values. The rates of
    links come from collectives that send at least 1 MiB per run inside a slice.

    Raises:
      StrategyError: The plan has no slice, its slice is of another platform than the profile, or
        the profile measured no rate.
    """
    layout = profile.report.layout
    if layout is None:
        raise StrategyError(
            "a plan without a slice has no chip to fit", fix="plan with a topology, such as v5e:2x4"
        )
    if profile.layout is None:
        ran = profile.platform.upper()
        raise StrategyError(
            f"the profile is of {ran}s, and the plan is for {layout.topology}",
            fix="plan with the topology that ran the program",
        )
    chip = layout.topology.chip
    cells: dict[str, dict[str, float]] = {}
    if profile.flops_rate is not None:
        cells["bf16_tflops"] = {"value": profile.flops_rate * chip.devices / 1e12}
    sent: dict[tuple[str, ...], tuple[int, float]] = {}
    for each in profile.collectives:
        axes = each.collective.mesh_axes
        if each.collective.wire_bytes >= _LEAST_BYTES and layout.slices_of(axes) == 1:
            size, seconds = sent.get(axes, (0, 0.0))
            sent[axes] = size + each.total_wire_bytes, seconds + each.fastest
    links = [
        # All links of the mesh axes send at the same time.
        size / seconds / layout.rates(axes)[1] * chip.link_rates[1] * chip.devices / 1e9
        for axes, (size, seconds) in sent.items()
        if seconds and layout.rates(axes)[1]
    ]
    if links:
        cells["link_gbps"] = {"low": min(links), "high": max(links)}
    if not cells:
        raise StrategyError(
            "the profile has no matmuls of the plan, and no collective of 1 MiB or more",
            fix="record a larger program",
        )
    # The program's name comes from the files of the profile, so it may contain quotes.
    source = visible(f"profile of {profile.program}, {profile.runs} runs on {layout.topology}")
    quoted = json.dumps(source, ensure_ascii=False)
    date = dt.datetime.now(dt.UTC).date().isoformat()
    lines = [f"[{chip.name}]"]
    for key, numbers in cells.items():
        values = "".join(f"{name} = {value:.4g}, " for name, value in numbers.items())
        lines.append(f'{key} = {{ {values}source = {quoted}, date = "{date}" }}')
    return "\n".join(lines) + "\n"
