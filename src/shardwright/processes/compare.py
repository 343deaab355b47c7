"""Compare values between the processes that a mesh spans, without a collective.

Each process writes a digest of its values into JAX's coordination store. The process that arrives
last compares the digests, and writes one verdict for all. If digests differ, two of the processes
also write their values.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardwright import _jax
from shardwright.errors import AgreementError, Problem, StrategyError
from shardwright.processes.meeting import (
    ROOT,
    Meeting,
    MeetingVerdict,
    any_late,
    busy_compiling,
    collect,
    ranks_in,
    unanswered,
)

# Seconds to wait: fewer than 10, so that every process reports a difference within 10 seconds.
WAIT_S: Final = 8.0
# Seconds that a comparison inside a training loop waits. It logs a warning after `WAIT_S`.
PATIENCE_S: Final = 300.0
# Seconds after which a process checks whether another process waits for it in another call.
CROSSING_S: Final = 3.0
MOST_PROBLEMS: Final = 10
_MOST_RANKS: Final = 10
# Number of calls, the latest ones of a topic, whose keys the store keeps.
_KEPT: Final = 4
# Seconds to wait for the values of another process, after the digests differ.
_FACTS_S: Final = 4.0
_FIX: Final = "make the same calls in every process, in the same order"
_LOG = logging.getLogger("shardwright.processes")


class Fact(NamedTuple):
    """One value that all processes must share.

    Attributes:
      text: The value.
      place: Where the value is written, or empty. The place may differ between processes.
      kind: Kind of the value, or empty. Messages show only the first difference of each kind.
    """

    text: str
    place: str = ""
    kind: str = ""


ProcessFacts = Mapping[str, Fact]
NOTHING: Final = Fact("nothing")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """Options of a manager for the processes of its mesh.

    Attributes:
      agree: Whether the manager compares values with the other processes.
      watchdog: Seconds that a process may be missing before the others exit, or None for no
        watchdog.

    Raises:
      StrategyError: `agree` is not a bool, or `watchdog` is not a number of at least 1.
    """

    agree: bool = True
    watchdog: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.agree, bool):
            raise StrategyError(f"agree={self.agree!r} is not a bool", fix="pass True or False")
        seconds = self.watchdog
        if seconds is None:
            return
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 1:
            raise StrategyError(
                f"watchdog={seconds!r} is not a number of seconds, at least 1",
                fix="pass watchdog=8, or None to wait forever",
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """The processes that a mesh spans, this process included.

    Attributes:
      store: The coordination store.
      ranks: Indices of the processes, ascending.
    """

    store: _jax.CoordinationStore
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Index of this process."""
        return self.store.rank

    @property
    def name(self) -> str:
        """A digest of the ranks, for use in keys."""
        return digest_of(",".join(map(str, self.ranks)))[:16]


def process_group(mesh: Mesh | AbstractMesh) -> ProcessGroup | None:
    """Return the processes that a mesh spans, this process among them.

    Return None for a local mesh, for a mesh of other processes, or without `jax.distributed`.
    """
    if isinstance(mesh, AbstractMesh) or not mesh.is_multi_process:
        return None
    store = _jax.coordination_store()
    ranks = tuple(sorted({device.process_index for device in mesh.devices.flat}))
    # Meshes of compile-only devices name processes that do not exist, so these meshes have no
    # group.
    if store is None or store.rank not in ranks or ranks[-1] >= jax.process_count():
        return None
    return ProcessGroup(store=store, ranks=ranks)


def digest_of(text: str) -> str:
    """Return 32 hexadecimal digits, equal for equal text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def facts_digest(facts: ProcessFacts) -> str:
    """Return a digest of the values, which does not depend on their places."""
    return digest_of(json.dumps([(key, fact.text) for key, fact in sorted(facts.items())]))


def packed(facts: ProcessFacts) -> bytes:
    """Return facts as bytes for the store."""
    return zlib.compress(json.dumps(facts).encode())


def unpacked(data: bytes) -> dict[str, Fact]:
    """Return the facts that `packed` has written as bytes."""
    return {key: Fact(*fact) for key, fact in json.loads(zlib.decompress(data)).items()}


def compare(
    group: ProcessGroup,
    topic: str,
    facts: ProcessFacts,
    *,
    what: str,
    fix: str,
    patience: float = WAIT_S,
    detail: str = "",
) -> None:
    """Compare facts with those of the other processes.

    The n-th call for a topic compares with the n-th calls of the other processes for this topic.

    Each process sends at most 6 messages to the store, unless it waits for more than 3 seconds.

    Args:
      group: The processes.
      topic: Name of the comparison.
      facts: The values of this process.
      what: Text that says what is compared. It is the subject of sentences in messages.
      fix: How to fix a difference.
      patience: Seconds to wait for the other processes. The wait starts again if all absent
        processes compile. Their watchdogs report this.
      detail: `what` with details that distinguish the call from others of its kind. Defaults to
        `what`.

    Raises:
      AgreementError: The values differ, or a process has not made the call in time.
    """
    store = group.store
    room = f"{ROOT}/{topic}/{group.name}"
    calls = f"{room}/calls/{group.rank}"
    number = store.count(calls)
    meeting = Meeting(store, f"{room}/{number}", len(group.ranks))
    digest = facts_digest(facts)
    # Write the digest before `arrive` counts this process: the last to arrive reads all digests.
    store.set(f"{meeting.folder}/digests/{group.rank}", digest.encode())
    meeting.arrive()
    if meeting.is_first and number > _KEPT:
        # The keys of earlier calls are no longer needed. Keep those of the last few calls, because
        # other threads may not have finished these calls.
        store.delete(f"{room}/{number - _KEPT}")
    waiting = Waiting(group, meeting, what, detail or what, patience)
    try:
        verdict = collect(
            meeting,
            decide=lambda: _compared(group, meeting),
            look=waiting.look,
            fail=waiting.failure,
            is_late=lambda: any_late(store, waiting.absent()),
            patience=patience,
            first_look=CROSSING_S,
        )
    finally:
        waiting.withdraw()
    if "error" in verdict:
        # Give the number back. Then the next call of this process is compared with the call that an
        # absent process still has to make.
        store.count(calls, -1)
        raise AgreementError(verdict["error"], fix=verdict.get("fix", _FIX))
    if not verdict:
        return
    pair = verdict["differ"]
    if group.rank in pair:
        store.set(f"{meeting.folder}/facts/{group.rank}", packed(facts))
    # The index is a bool: a process that agrees with the first process of the pair reads the values
    # of the second process.
    other = pair[digest == verdict["first"]]
    theirs = store.wait(f"{meeting.folder}/facts/{other}", _FACTS_S)
    if theirs is None:
        raise AgreementError(f"{what} differs between processes {ranks_text(group.ranks)}", fix=fix)
    raise disagreement(((group.rank, facts), (other, unpacked(theirs))), what, fix)


def _compared(group: ProcessGroup, meeting: Meeting) -> MeetingVerdict:
    """Return a verdict: empty, or the first process and one with a different digest."""
    digests = ranks_in(group.store, f"{meeting.folder}/digests")
    first, *others = group.ranks
    differing = [rank for rank in others if digests.get(rank) != digests[first]]
    return {"differ": [first, differing[0]], "first": digests[first]} if differing else {}


class Waiting:
    """The wait of one process in a comparison. The other processes can read where it waits.

    The main threads of two processes may wait for each other in different calls. Neither continues,
    so both calls fail. Only waits of main threads are published: while another thread waits, the
    main thread may still make the call that the other process waits for. Only the first process of
    a call reads what the others wait for.

    Args:
      group: The processes.
      meeting: The meeting of the call.
      what: As in `compare`.
      detail: As in `compare`.
      patience: Seconds to wait.
    """

    def __init__(
        self, group: ProcessGroup, meeting: Meeting, what: str, detail: str, patience: float
    ) -> None:
        self._group, self._meeting, self._what, self._detail = group, meeting, what, detail
        self._patience = patience
        self._is_main = threading.current_thread() is threading.main_thread()
        self._published = self._reported = False

    def look(self, waited: float) -> MeetingVerdict | None:
        """Publish where this process waits.

        The first process also checks which processes are absent.
        """
        self._publish()
        if not self._meeting.is_first:
            return None
        absent = self.absent()
        if waited > WAIT_S and self._patience > WAIT_S and not self._reported and absent:
            self._reported = True
            _LOG.warning(
                "process %d has waited %.0f s for %s to reach %s",
                *(self._group.rank, WAIT_S, self._described(absent), self._what),
            )
        return self._crossing(absent)

    def failure(self) -> MeetingVerdict:
        """Return the verdict of a call that a process has not made in time."""
        absent = self.absent()
        if self._meeting.is_complete or not absent:
            return unanswered(self._what)
        text = (
            f"{self._described(absent)} did not reach {self._what} within "
            f"{self._patience:.0f} s; process {self._group.rank} waits there"
        )
        return {"error": text}

    def withdraw(self) -> None:
        """Delete what this process has published."""
        if self._published:
            self._group.store.delete(f"{ROOT}/waits/{self._group.rank}")

    def _publish(self) -> None:
        if self._published or not self._is_main:
            return
        self._published = True
        if self._meeting.is_first:
            publish_ranks(self._group)
        entry = {
            "room": self._meeting.room,
            "attempt": self._meeting.attempt,
            "detail": self._detail,
            "group": self._group.name,
        }
        self._group.store.set(f"{ROOT}/waits/{self._group.rank}", json.dumps(entry).encode())

    def absent(self) -> list[int]:
        """Return the processes that have not made the call."""
        arrived = ranks_in(self._group.store, f"{self._meeting.folder}/digests")
        return [rank for rank in self._group.ranks if rank not in arrived]

    def _described(self, ranks: Sequence[int]) -> str:
        compiling = busy_compiling(self._group.store, ranks)
        text = processes_text(ranks)
        return f"{text} ({processes_text(compiling)}: compiling)" if compiling else text

    def _crossing(self, absent: Sequence[int]) -> MeetingVerdict | None:
        """Return a verdict if two processes wait for each other; None otherwise.

        An absent process may wait, in another call, for a process that waits in this call.
        """
        store, own = self._group.store, (self._meeting.room, self._meeting.attempt)
        waits = {
            int(rank): json.loads(text) for rank, text in store.entries(f"{ROOT}/waits").items()
        }
        calls = {rank: (entry["room"], entry["attempt"]) for rank, entry in waits.items()}
        here = [rank for rank, call in calls.items() if call == own]
        for other in absent:
            if other not in waits or calls[other] == own:
                continue
            ranks = ranks_of(self._group, waits[other]["group"])
            room, attempt = calls[other]
            theirs = Meeting(store, room, len(ranks), attempt)
            arrived = ranks_in(store, f"{theirs.folder}/digests")
            waited_for = [rank for rank in here if rank in ranks and rank not in arrived]
            if waited_for:
                places = sorted((rank, waits[rank]["detail"]) for rank in (waited_for[0], other))
                text = ", ".join(f"process {rank} is in {detail}" for rank, detail in places)
                verdict = {"error": f"{text}; each waits for the other"}
                theirs.close(functools.partial(dict, verdict))
                return verdict
        return None


def publish_ranks(group: ProcessGroup) -> None:
    """Write the ranks of a group under its name. Keys use the name: ranks would be too long."""
    group.store.set(f"{ROOT}/groups/{group.name}/ranks", json.dumps(group.ranks).encode())


def ranks_of(group: ProcessGroup, name: str) -> Sequence[int]:
    """Return the ranks of the group with this name. They are empty if they are not known yet."""
    if name == group.name:
        return group.ranks
    found = group.store.entries(f"{ROOT}/groups/{name}")
    ranks: list[int] = json.loads(found.get("ranks", b"[]"))
    return ranks


def disagreement(
    sides: Sequence[tuple[int, ProcessFacts]], what: str, fix: str, *, suffix: str = ""
) -> AgreementError:
    """Return the error that names each value that differs between two processes.

    Args:
      sides: The rank and the facts of both processes.
      what: Text that says what is compared. It is the subject of sentences in messages.
      fix: How to fix a difference.
      suffix: Added to each fix.
    """
    (_, first), (_, second) = ordered = sorted(sides, key=lambda side: side[0])
    groups: dict[tuple[str, ...], list[str]] = {}
    for key in dict.fromkeys((*first, *second)):
        one, other = first.get(key, NOTHING), second.get(key, NOTHING)
        if one.text != other.text:
            kind = one.kind or other.kind
            groups.setdefault((kind,) if kind else (*one, *other), []).append(key)
    problems = []
    for keys in groups.values():
        facts = [(rank, side.get(keys[0], NOTHING)) for rank, side in ordered]
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        places = [f"process {rank}: {fact.place}" for rank, fact in facts if fact.place]
        if len({fact.place for _, fact in facts}) == 1:
            places = [facts[0][1].place]
        problems.append(
            Problem(
                error=AgreementError,
                what=", ".join(f"process {rank} has {fact.text}" for rank, fact in facts),
                path=f"{keys[0]}{more}",
                rule="\n".join(places),
                fix=f"{fix}{suffix}",
            )
        )
    left = len(problems) - MOST_PROBLEMS
    if left > 0:
        problems = [
            *problems[:MOST_PROBLEMS],
            Problem(error=AgreementError, what=f"{left} more values differ", fix=fix),
        ]
    if not problems:
        return AgreementError(f"{what} differs between {processes_text([s[0] for s in sides])}")
    return AgreementError(problems=problems)


def array_text(value: Any) -> str:
    """Return dtype and shape of an array, such as `float32[8,16]`."""
    dtype = getattr(value, "dtype", None)
    name = type(value).__name__ if dtype is None else str(dtype)
    return f"{name}[{','.join(map(str, np.shape(value)))}]"


def processes_text(ranks: Sequence[int]) -> str:
    """Return `process 3` or `processes 1, 2 and 5`. After ten ranks, say how many others follow."""
    if len(ranks) == 1:
        return f"process {ranks[0]}"
    more = len(ranks) - _MOST_RANKS
    if more > 1:
        return f"processes {', '.join(map(str, ranks[:_MOST_RANKS]))} and {more} others"
    return f"processes {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `0-3` for consecutive ranks, else `0, 2, 5`."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
