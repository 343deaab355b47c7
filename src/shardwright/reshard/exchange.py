"""Move blocks directly from the devices that hold them to the devices that need them.

An exchange sends the least possible bytes between any two shardings. It has rounds: in a round,
each device sends at most one block and receives at most one block, so a round is one permute. An
exchange has more rounds than collectives have steps. So an exchange is used only if collectives
would send many more bytes, or cannot express the move.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from shardwright.reshard.grid import Block, DeviceGrid


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """One block that goes to a device.

    Attributes:
      sender: Position of the device that holds the block, in the device order of the source.
      source_offset: Place of the block in the shard of the sender, in units along each dimension.
      receiver: Position of the device that needs the block, in the device order of the target.
      target_offset: Place of the block in the shard of the receiver, in units along each dim.
      stays: Whether sender and receiver are the same device.
    """

    sender: int
    source_offset: Block
    receiver: int
    target_offset: Block
    stays: bool


def units_of(source: DeviceGrid, target: DeviceGrid) -> tuple[int, ...]:
    """Return the number of units along each dimension.

    A unit is a block that is sent as a whole.
    """
    return tuple(map(math.lcm, source.counts, target.counts))


def sends_of(source: DeviceGrid, target: DeviceGrid) -> tuple[Send, ...]:
    """Return the sends of a move: for each target device, one send per unit, in order.

    A device that holds a unit keeps it. If several devices hold a unit that another device needs,
    the holder that has sent the fewest units sends it.
    """
    units = units_of(source, target)
    holders: dict[Block, list[int]] = {}
    for at, block in enumerate(source.blocks):
        holders.setdefault(block, []).append(at)
    place = {device: at for at, device in enumerate(source.devices)}
    sent = [0] * len(source.devices)
    sends = []
    for receiver, (device, block) in enumerate(zip(target.devices, target.blocks, strict=True)):
        own = place.get(device)
        for unit, offset in _units_in(block, target.counts, units):
            # `units` is the lcm of the source and target counts, so no unit lies in two source
            # blocks.
            holder = tuple(
                number * count // total
                for number, count, total in zip(unit, source.counts, units, strict=True)
            )
            candidates = holders[holder]
            stays = own in candidates
            # Among the candidates that have sent the fewest units, the nearest to the receiver
            # sends. So devices with the same block send in a ring.
            sender = (
                own
                if own is not None and stays
                else min(
                    candidates,
                    key=lambda at: (sent[at], (at - receiver) % len(source.devices)),
                )
            )
            # Only units that go to another device count as sent.
            sent[sender] += not stays
            sends.append(
                Send(
                    sender=sender,
                    source_offset=tuple(
                        number - at * (total // count)
                        for number, at, count, total in zip(
                            unit, holder, source.counts, units, strict=True
                        )
                    ),
                    receiver=receiver,
                    target_offset=offset,
                    stays=stays,
                )
            )
    return tuple(sends)


def rounds_of(sends: Sequence[Send], devices: int) -> tuple[tuple[Send, ...], ...]:
    """Arrange sends in rounds, in which a device sends at most one block and receives at most one.

    Blocks that stay on their device come first, in separate rounds.
    """
    # The ring distance of a send is (sender - receiver) modulo the number of devices. Sends of
    # equal ring distance can share a round, because each device then sends to one device and
    # receives from one. So a first fit by distance fills the rounds well.
    order = sorted(
        sends,
        key=lambda send: (not send.stays, (send.sender - send.receiver) % devices, send.receiver),
    )
    rounds: list[_Round] = []
    for send in order:
        free = next((each for each in rounds if each.has_room(send)), None)
        if free is None:
            free = _Round(stays=send.stays)
            rounds.append(free)
        free.by_sender[send.sender] = free.by_receiver[send.receiver] = send
    return tuple(tuple(each.by_sender.values()) for each in rounds)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Round:
    """A round that is being filled with sends."""

    stays: bool
    by_sender: dict[int, Send] = dataclasses.field(default_factory=dict)
    by_receiver: dict[int, Send] = dataclasses.field(default_factory=dict)

    def has_room(self, send: Send) -> bool:
        """Tell whether a send can be added to the round.

        In a round, a device sends at most one block and receives at most one. Either all blocks of
        a round stay on their device, or all move to another device.
        """
        return (
            send.stays == self.stays
            and send.sender not in self.by_sender
            and send.receiver not in self.by_receiver
        )


def _units_in(
    block: Block, counts: Sequence[int], units: Sequence[int]
) -> Iterator[tuple[Block, Block]]:
    """Yield the index of every unit of a block: in the array, and in the block."""
    sizes = [total // count for total, count in zip(units, counts, strict=True)]
    for offset in itertools.product(*map(range, sizes)):
        unit = tuple(
            number * size + step for number, size, step in zip(block, sizes, offset, strict=True)
        )
        yield unit, offset
