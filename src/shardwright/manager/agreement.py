"""Check that all processes of a mesh have the same rules, policy and mesh, before they compute.

Processes with different rules compile different programs, and then wait for each other in a
collective forever. So a manager compares its values when it is first entered. It writes their
digest into JAX's coordination store, and waits until every process of its mesh has written the same
digest. Each digest has a key of its own, so threads may enter several managers in any order.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any, Final

import jax
import numpy as np

from shardwright import _jax
from shardwright.errors import AgreementError
from shardwright.manager import processes, watchdog
from shardwright.manager.core import ManagerCore
from shardwright.manager.processes import Fact, ProcessGroup
from shardwright.resolution.rules import Rule
from shardwright.vocabulary.axes import axis_label
from shardwright.vocabulary.modes import MODES, mode_name

# Seconds in which another thread may still enter the manager that another process has entered.
GRACE_S: Final = 1.0
_ROOM: Final = f"{processes.ROOT}/manager"
_FIX: Final = (
    "start every process with the same strategy, policy and mesh, or pass agree=False to the "
    "manager"
)


def meet(manager: ManagerCore) -> None:
    """Compare a manager with the other processes of its mesh, at its first entry.

    Nothing happens in a trace. Only the first thread waits. If the comparison fails, the next entry
    compares again.

    Raises:
      AgreementError: See `agree_on_manager`.
    """
    if _jax.in_trace():
        return
    object.__setattr__(manager, "_met", True)
    group = processes.process_group(manager.mesh)
    if group is None:
        return
    try:
        if manager._options.agree:
            agree_on_manager(manager, group)
        if manager._options.watchdog is not None:
            watchdog.watch(group, manager._options.watchdog)
    except BaseException:
        object.__setattr__(manager, "_met", False)
        raise


def agree_on_manager(manager: ManagerCore, group: ProcessGroup) -> None:
    """Wait until every process of a manager's mesh has entered an equal manager.

    Raises:
      AgreementError: A process has entered another manager instead, or none for 8 seconds.
    """
    facts = manager_facts(manager)
    digest, store = processes.facts_digest(facts), group.store
    store.set(f"{_ROOM}/facts/{digest}", processes.packed(facts))
    # The n-th of several equal managers is compared with the n-th one in the other processes.
    times = f"{_ROOM}/times/{group.rank}/{digest}"
    name = f"{digest}-{store.count(times)}"
    number = store.count(f"{_ROOM}/entries/{group.rank}")
    own = f"{_ROOM}/entered/{group.rank}/{name}"
    entry = {"ranks": group.ranks, "number": number, "failed": False}
    store.set(own, json.dumps(entry).encode())
    store.delete(f"{_ROOM}/left/{group.rank}/{name}")
    begun, differs_since = time.monotonic(), 0.0
    while True:
        entered = _entered(group)
        absent = [rank for rank in group.ranks if name not in entered.get(rank, {})]
        if not absent:
            return
        now = time.monotonic()
        late = now - begun > processes.WAIT_S
        others = _others(entered, group, absent, number, late=late)
        if others:
            differs_since = differs_since or now
            if late or now - differs_since > GRACE_S:
                store.set(own, json.dumps({**entry, "failed": True}).encode())
                raise _difference(group, facts, others)
        if late:
            # If a process enters later, it must not find this entry and continue alone.
            store.delete(own)
            store.set(f"{_ROOM}/left/{group.rank}/{name}", b"")
            store.count(times, -1)
            raise _absence(group, manager, name, absent)
        store.wait(f"{_ROOM}/entered/{absent[0]}/{name}", 0.25)


def _entered(group: ProcessGroup) -> dict[int, dict[str, Any]]:
    """Return the entries of each process, by rank and name."""
    entered: dict[int, dict[str, Any]] = {}
    for key, value in group.store.entries(f"{_ROOM}/entered").items():
        rank, name = key.split("/")
        entered.setdefault(int(rank), {})[name] = json.loads(value)
    return entered


def _others(
    entered: dict[int, dict[str, Any]],
    group: ProcessGroup,
    absent: list[int],
    number: int,
    *,
    late: bool,
) -> dict[int, str]:
    """Return the digest of the manager that each absent process has entered instead.

    This is the first manager that the absent process has entered and this process has not. Entries
    with a lower number than `number` may be those of other threads, so they are left out. If `late`
    is true, they are included, except those whose comparison failed.
    """
    own, others = entered.get(group.rank, {}), {}
    for rank in absent:
        theirs = [
            (entry["number"], name)
            for name, entry in entered.get(rank, {}).items()
            if name not in own
            and group.rank in entry["ranks"]
            and (entry["number"] >= number or (late and not entry["failed"]))
        ]
        if theirs:
            others[rank] = min(theirs)[1].partition("-")[0]
    return others


def _difference(
    group: ProcessGroup, facts: processes.Facts, others: dict[int, str]
) -> AgreementError:
    rank, digest = min(others.items())
    theirs = group.store.wait(f"{_ROOM}/facts/{digest}", 1.0)
    what = "the entered manager"
    if theirs is None:
        return AgreementError(f"{what} differs in {processes.processes_text([rank])}", fix=_FIX)
    same = [other for other, text in others.items() if text == digest]
    also = f"; {processes.processes_text(same)} agree" if len(same) > 1 else ""
    sides = ((group.rank, facts), (rank, processes.unpacked(theirs)))
    return processes.disagreement(sides, what, _FIX, suffix=also)


def _absence(
    group: ProcessGroup, manager: ManagerCore, name: str, absent: list[int]
) -> AgreementError:
    left = {
        int(key.split("/")[0])
        for key in group.store.entries(f"{_ROOM}/left")
        if key.endswith(f"/{name}")
    }
    gone = [rank for rank in absent if rank in left] or absent
    verb = "waited for the others and left" if left & {*absent} else "has not entered"
    if len(gone) > 1:
        verb = verb.replace("has not", "have not")
    return AgreementError(
        f"{processes.processes_text(gone)} {verb} {manager!r}; process {group.rank} has waited in "
        f"it for {processes.WAIT_S:.0f} s",
        fix="enter it in every process of its mesh at the same time, for instance by `with pm: "
        "pass` directly after building it, or pass agree=False to the manager",
    )


def manager_facts(manager: ManagerCore) -> dict[str, Fact]:
    """Return all values of a manager on which its compiled programs depend."""
    rules = manager.rules
    facts = {
        "versions": Fact(f"JAX {jax.__version__}"),
        "mode": Fact(mode_name(manager.mode) if manager.mode else "none"),
    }
    facts.update(_mesh_facts(manager.mesh))
    for field in dataclasses.fields(rules.policy):
        value = getattr(rules.policy, field.name)
        ref = str(value.ref) if isinstance(value, Rule) else ""
        facts[f"policy {field.name}"] = Fact(_value_text(value), ref)
    facts["axes of the strategy"] = Fact(", ".join(rules.user_axes) or "none")
    for mode, line in rules.attention:
        facts[f"attention in mode {mode_name(mode)}"] = Fact(line.text, str(line))
    for table, tables in (("rules", rules.activations), ("params", rules.params)):
        for mode, entries in zip(MODES, tables, strict=True):
            for axis, rule in entries:
                name = f"[{table}] {axis_label(axis)} in mode {mode_name(mode)}"
                facts[name] = rule_fact(axis, rule)
    for at, entry in enumerate(rules.tensors):
        facts[f"[[tensors]] {at}"] = Fact(f"match = {entry.match!r}")
        for axis, rule in entry.rules:
            facts[f"[[tensors]] {at} {axis_label(axis)}"] = rule_fact(axis, rule)
    if rules.order:
        facts["order of the rules"] = Fact(processes.digest_of(repr(rules.order)))
    return facts


def rule_fact(axis: str, rule: Rule) -> Fact:
    """Return a rule as a fact, with the place where it is written."""
    return Fact(f"{axis_label(axis)} = {_value_text(rule)}", str(rule.ref))


def _value_text(value: Any) -> str:
    if isinstance(value, Rule):
        words = ["+".join(candidate) for candidate in value.candidates]
        text = f'"{" | ".join([*words, *filter(None, [value.fallback])])}"'
        one = "" if value.of_one is None else f" (of size 1: {_value_text(value.of_one)})"
        return text + one
    if isinstance(value, tuple):
        return "+".join(value) or "none"
    return "none" if value is None else str(value)


def _mesh_facts(mesh: Any) -> Iterator[tuple[str, Fact]]:
    sizes = ",".join(f"{axis}:{size}" for axis, size in mesh.shape.items())
    types = ", ".join(str(kind).rpartition(".")[2] for kind in mesh.axis_types)
    yield "mesh axes", Fact(sizes)
    yield "axis types of the mesh", Fact(types)
    # One fact per device, so that the message names the first one that differs.
    for index, device in np.ndenumerate(mesh.devices):
        place = ",".join(f"{axis}={at}" for axis, at in zip(mesh.shape, index, strict=True))
        yield f"device at {place}", Fact(f"device {device.id}", kind="device")
