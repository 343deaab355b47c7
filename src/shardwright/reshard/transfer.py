"""Copy blocks from device to device, or from the host to a device, without a compiled program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def send(blocks: Sequence[Any], devices: Sequence[jax.Device]) -> list[jax.Array]:
    """Copy each block to a device.

    Args:
      blocks: Arrays, each on one device or on the host.
      devices: Target device of each block. No block is already on its target device.
    """
    sent: list[jax.Array] = jax.device_put(list(blocks), list(devices))
    return sent
