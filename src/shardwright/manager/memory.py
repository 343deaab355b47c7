"""Memory kinds of a backend, and moves between the memories of host and device."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardwright.errors import StrategyError
from shardwright.resolution.decisions import RuleRef
from shardwright.resolution.rules import AxisRules
from shardwright.vocabulary.axes import Memory, Role

DEVICE: Final = "device"
HOST: Final = "pinned_host"


def host_kind(mesh: Mesh | AbstractMesh, rule: RuleRef | None, path: str = "") -> str:
    """Return the memory kind of the host: `pinned_host`, or the only host kind of the backend.

    Args:
      mesh: The mesh. An abstract mesh has no backend, and is treated as if its backend had
        `pinned_host`.
      rule: The line of the strategy that puts an array on the host, for the error.
      path: Path of the array, for the error.

    Raises:
      StrategyError: The backend has no memory on the host.
    """
    # A device of another process lists no memories, so ask a local device. All devices of a backend
    # are of one kind.
    own = [] if isinstance(mesh, AbstractMesh) else mesh.local_devices
    if not own:
        return HOST
    kinds = [memory.kind for memory in own[0].addressable_memories()]
    hosts = [kind for kind in kinds if is_host(kind)]
    if HOST in hosts or len(hosts) == 1:
        return HOST if HOST in hosts else hosts[0]
    raise StrategyError(
        f"the rule is for host memory, and the backend {own[0].platform} has "
        f"{'several kinds of it' if hosts else 'none'}: its memory kinds are {', '.join(kinds)}",
        path=path,
        rule=str(rule or ""),
        fix='write "device" in the rule, or pass memory_kind=',
    )


def is_host(kind: str | None) -> bool:
    """Tell whether a memory kind is on the host."""
    return kind is not None and kind.endswith("host")


def holds_params(rules: AxisRules, mode: str) -> bool:
    """Tell whether rules may put a parameter into host memory in a mode."""
    for rule in rules.memory:
        if rule.role is Role.PARAM and mode in rule.modes:
            if rule.memory is Memory.HOST:
                return True
            if rule.match is None:
                return False  # this rule decides for all paths, so no later rule applies
    return False


def in_host_memory(x: Any) -> bool:
    """Tell whether a value is in host memory, by its JAX type."""
    space: bool = jax.typeof(x).memory_space == jax.memory.Space.Host
    return space


def to_device(x: Any, sharding: NamedSharding) -> Any:
    """Move a value from host memory to the device, inside or outside of a trace.

    In reverse mode its cotangent moves from the device to the host.
    """
    # An abstract mesh names no devices, so pass the memory space alone, which keeps the sharding of
    # the value.
    if isinstance(sharding.mesh, AbstractMesh):
        return jax.device_put(x, jax.memory.Space.Device)
    # Pass the sharding too. Otherwise the compiler chooses one for the copy on the device.
    return jax.device_put(x, sharding.with_memory_kind(DEVICE))


def to_host(x: Any, sharding: NamedSharding) -> Any:
    """Move a value of a trace from the device to host memory."""
    if isinstance(sharding.mesh, AbstractMesh):
        return jax.device_put(x, jax.memory.Space.Host)
    # In JAX's types, a value is on the host only if it has this memory kind.
    return jax.device_put(x, sharding.with_memory_kind(HOST))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class OffloadedState:
    """The state of an `offloaded` optimizer, which moves its state to the device by itself.

    Attributes:
      inner: The state of the optimizer that `offloaded` was given.
    """

    inner: Any


def fetch(tree: Any, shardings: Any) -> Any:
    """Move to the device those values of a tree that are in host memory.

    The state of an `offloaded` optimizer stays where it is.
    """

    def move(x: Any, sharding: Any) -> Any:
        if isinstance(x, OffloadedState) or not is_host(sharding.memory_kind):
            return x
        return to_device(x, sharding)

    return jax.tree.map(move, tree, shardings, is_leaf=lambda x: isinstance(x, OffloadedState))
