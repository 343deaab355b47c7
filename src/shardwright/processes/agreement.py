"""Check that all processes of a mesh have the same rules, policy and mesh, before they compute.

Processes with different rules compile different programs, and then wait for each other in a
collective forever. So a manager compares its values when it is first entered. The first entry waits
until every process of the mesh has entered a manager with the same digest of its values. Each
digest has a `Meeting` of its own, so threads may enter several managers in any order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from jax.sharding import AbstractMesh, Mesh

from shardwright.errors import AgreementError
from shardwright.processes import compare, watchdog
from shardwright.processes.compare import ProcessFacts, ProcessGroup, ProcessOptions
from shardwright.processes.meeting import (
    ROOT,
    Meeting,
    MeetingVerdict,
    any_late,
    collect,
    unanswered,
)

# If an absent process has entered another manager, one of its other threads may still enter this
# manager within this many seconds.
GRACE_S: Final = 1.0
_ROOM: Final = f"{ROOT}/manager"
_FIX: Final = (
    "start every process with the same strategy, policy, mesh and watchdog, or pass agree=False to "
    "the manager"
)

_ABSENT: Final = (
    "enter the manager in every process of its mesh at the same time, for instance by "
    "`with pm: pass` directly after building it, or pass agree=False to the manager"
)


def meet(
    mesh: Mesh | AbstractMesh, options: ProcessOptions, name: str, facts: Callable[[], ProcessFacts]
) -> None:
    """Wait until every process of a mesh has entered an equal manager. Then start the watchdog.

    Args:
      mesh: Mesh of the manager. Nothing happens on a mesh of one process.
      options: Whether to compare, and the seconds of the watchdog.
      name: Name of the manager in messages.
      facts: Returns the values that must be equal in all processes.

    Raises:
      AgreementError: See `agree_on_manager`.
    """
    group = compare.process_group(mesh)
    if group is None:
        return
    if options.agree:
        agree_on_manager(group, name, facts())
    if options.watchdog is not None:
        watchdog.watch(group, options.watchdog)


def agree_on_manager(group: ProcessGroup, name: str, facts: ProcessFacts) -> None:
    """Wait until every process of a group has entered a manager with equal facts.

    Raises:
      AgreementError: A process has entered another manager instead, or no manager within 8 seconds.
    """
    entering = _Entering(group, name, facts)
    verdict = collect(
        entering.meeting,
        decide=dict,
        look=entering.look,
        fail=entering.failure,
        is_late=lambda: any_late(group.store, entering.absent()),
        patience=compare.WAIT_S,
        first_look=GRACE_S / 2,
    )
    if verdict:
        raise entering.error(verdict)


class _Entering:
    """One process that enters a manager, and waits for the others.

    The first process that enters the manager reads which managers the others have entered.
    """

    def __init__(self, group: ProcessGroup, name: str, facts: ProcessFacts) -> None:
        self._group, self._store, self._text, self._facts = group, group.store, name, facts
        self._digest = compare.facts_digest(self._facts)
        # The n-th of several equal managers is compared with the n-th in the other processes.
        self._times = f"{_ROOM}/times/{group.rank}/{self._digest}"
        self._name = f"{self._digest}-{self._store.count(self._times)}"
        self._number = self._store.count(f"{_ROOM}/entries/{group.rank}")
        room = f"{_ROOM}/meetings/{group.name}/{self._name}"
        self.meeting = Meeting(self._store, room, len(group.ranks))
        self._own = f"{_ROOM}/entered/{group.rank}/{self._name}"
        # Announce this process before `arrive` counts it: the last to arrive reads all
        # announcements.
        self._enter(failed=False)
        self.meeting.arrive()
        self._differs_since = 0.0
        self._published = False

    def _enter(self, *, failed: bool) -> None:
        entry = {
            "group": self._group.name,
            "number": self._number,
            "attempt": self.meeting.attempt,
            "failed": failed,
        }
        self._store.set(self._own, json.dumps(entry).encode())

    def look(self, waited: float) -> MeetingVerdict | None:
        """If this process is the first, look for absent processes that entered another manager."""
        if not self.meeting.is_first:
            return None
        if not self._published:
            self._published = True
            self._store.set(f"{_ROOM}/facts/{self._digest}", compare.packed(self._facts))
            compare.publish_ranks(self._group)
        others = self._others(late=waited > compare.WAIT_S)
        self._differs_since = (self._differs_since or waited) if others else 0.0
        if not others or (waited - self._differs_since < GRACE_S and waited < compare.WAIT_S):
            return None
        return _differing(others)

    def failure(self) -> MeetingVerdict:
        """Return the verdict of a wait that ends before every process has entered this manager."""
        absent = self.absent()
        if self.meeting.is_complete or not absent:
            return unanswered(self._text)
        others = self._others(late=True)
        if others:
            return _differing(others)
        left = {
            int(key.split("/")[0])
            for key in self._store.entries(f"{_ROOM}/left")
            if key.endswith(f"/{self._name}")
        }
        gone = [rank for rank in absent if rank in left] or absent
        verb = "waited for the others and left" if left & {*absent} else "has not entered"
        if len(gone) > 1:
            verb = verb.replace("has not", "have not")
        text = (
            f"{compare.processes_text(gone)} {verb} {self._text}; process {self._group.rank} has "
            f"waited in it for {compare.WAIT_S:.0f} s"
        )
        return {"error": text}

    def absent(self) -> list[int]:
        """Return the processes that have not entered the manager."""
        return self._absent(self._entered())

    def error(self, verdict: MeetingVerdict) -> AgreementError:
        """Return the error of a verdict.

        Also record in the store that this process has left the manager.
        """
        # Undo the count of equal managers, so that the next attempt gets the same name.
        self._store.count(self._times, -1)
        if "error" in verdict:
            self._store.delete(self._own)
            self._store.set(f"{_ROOM}/left/{self._group.rank}/{self._name}", b"")
            return AgreementError(verdict["error"], fix=verdict.get("fix", _ABSENT))
        self._enter(failed=True)
        theirs = self._store.wait(f"{_ROOM}/facts/{verdict['digest']}", GRACE_S)
        rank, what = verdict["rank"], "the entered manager"
        if theirs is None:
            return AgreementError(f"{what} differs in process {rank}", fix=_FIX)
        also = f"; {verdict['same']} processes agree with process {rank}"
        sides = ((self._group.rank, self._facts), (rank, compare.unpacked(theirs)))
        suffix = also if verdict["same"] > 1 else ""
        return compare.disagreement(sides, what, _FIX, suffix=suffix)

    def _entered(self) -> dict[int, dict[str, Any]]:
        """Return, by rank, the managers that each process has entered: `_name` -> its entry."""
        entered: dict[int, dict[str, Any]] = {}
        for key, value in self._store.entries(f"{_ROOM}/entered").items():
            rank, name = key.split("/")
            entered.setdefault(int(rank), {})[name] = json.loads(value)
        return entered

    def _absent(self, entered: dict[int, dict[str, Any]]) -> list[int]:
        # The store may still have an entry of a failed attempt.
        def is_there(rank: int) -> bool:
            entry = entered.get(rank, {}).get(self._name)
            return entry is not None and entry["attempt"] == self.meeting.attempt

        return [rank for rank in self._group.ranks if not is_there(rank)]

    def _others(self, *, late: bool) -> dict[int, str]:
        """Return the digest of the manager that each absent process has entered instead.

        This is the first manager that the absent process has entered and this process has not.
        Each process numbers the managers that it enters. A manager with a lower number than the one
        that this process enters may belong to another thread, so it is left out. With `late`, it is
        included, unless its comparison failed.
        """
        entered = self._entered()
        own, others = entered.get(self._group.rank, {}), {}
        for rank in self._absent(entered):
            theirs = [
                (entry["number"], name)
                for name, entry in entered.get(rank, {}).items()
                if name not in own
                and self._group.rank in compare.ranks_of(self._group, entry["group"])
                and (entry["number"] >= self._number or (late and not entry["failed"]))
            ]
            if theirs:
                others[rank] = min(theirs)[1].partition("-")[0]
        return others


def _differing(others: dict[int, str]) -> MeetingVerdict:
    """Return the verdict for absent processes that have entered managers with other digests."""
    rank, digest = min(others.items())
    return {"rank": rank, "digest": digest, "same": sum(d == digest for d in others.values())}
