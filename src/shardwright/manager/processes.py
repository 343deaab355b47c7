"""Compare values between the processes that a mesh spans, without a collective.

Each process writes a digest of its values into JAX's coordination store, and reads the digests of
the others. Processes exchange the values themselves only if their digests differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import secrets
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardwright import _jax
from shardwright.errors import AgreementError, Problem, StrategyError

ROOT: Final = "shardwright"
# Seconds to wait: fewer than 10, so that every process reports a difference within 10 seconds.
WAIT_S: Final = 8.0
# Seconds that a comparison inside a training loop waits. It logs a warning after `WAIT_S`.
PATIENCE_S: Final = 300.0
# Seconds until a process looks whether another one waits for it in another call.
CROSSING_S: Final = 3.0
MOST_PROBLEMS: Final = 10
_LOG = logging.getLogger("shardwright.processes")


class Fact(NamedTuple):
    """One value that all processes must share.

    Attributes:
      text: The value.
      place: Where the value is written, or empty. It may differ between processes.
      kind: Kind of the value, or empty. Messages show only the first difference of each kind.
    """

    text: str
    place: str = ""
    kind: str = ""


Facts = Mapping[str, Fact]
NOTHING: Final = Fact("nothing")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """Options of a manager for the processes of its mesh.

    Attributes:
      agree: Whether the manager compares values with the other processes.
      watchdog: Seconds that a process may be missing before the others exit, or None for no limit.

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
    """The processes that a mesh spans, one of which is this one.

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
        """The ranks as part of a key."""
        return digest_of(",".join(map(str, self.ranks)))[:16]


def process_group(mesh: Mesh | AbstractMesh) -> ProcessGroup | None:
    """Return the processes that a mesh spans, this process among them.

    Return None for a local mesh, for a mesh of other processes, or without `jax.distributed`.
    """
    if isinstance(mesh, AbstractMesh) or not mesh.is_multi_process:
        return None
    store = _jax.coordination_store()
    ranks = tuple(sorted({device.process_index for device in mesh.devices.flat}))
    # Meshes of compile-only devices name processes that do not exist.
    if store is None or store.rank not in ranks or ranks[-1] >= jax.process_count():
        return None
    return ProcessGroup(store=store, ranks=ranks) if len(ranks) > 1 else None


def digest_of(text: str) -> str:
    """Return 32 hexadecimal digits, equal for equal text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def facts_digest(facts: Facts) -> str:
    """Return a digest of the values. Their places do not change it."""
    return digest_of(json.dumps([(key, fact.text) for key, fact in sorted(facts.items())]))


def packed(facts: Facts) -> bytes:
    """Return facts as bytes for the store."""
    return zlib.compress(json.dumps(facts).encode())


def unpacked(data: bytes) -> dict[str, Fact]:
    """Return the facts of `packed`."""
    return {key: Fact(*fact) for key, fact in json.loads(zlib.decompress(data)).items()}


def compare(
    group: ProcessGroup,
    topic: str,
    facts: Facts,
    *,
    what: str,
    fix: str,
    patience: float = WAIT_S,
    detail: str = "",
) -> None:
    """Compare facts with those of the other processes.

    The n-th call for a topic compares with the n-th calls of the other processes for this topic.

    Args:
      group: The processes.
      topic: Name of the comparison.
      facts: This process's values.
      what: What is compared, as the subject of messages.
      fix: How to fix a difference.
      patience: Seconds to wait for the other processes. After 8 seconds, a warning in the log
        `shardwright.processes` names those that have not made the call.
      detail: `what`, with what distinguishes it from other calls of its kind. Defaults to `what`.

    Raises:
      AgreementError: The values differ, or a process has not made the call in time.
    """
    store = group.store
    room = f"{ROOT}/{topic}/{group.name}"
    number = store.count(f"{room}/calls/{group.rank}")
    digest = facts_digest(facts)
    store.set(f"{room}/{number}/digests/{group.rank}", digest.encode())
    try:
        digests = collect(group, f"{room}/{number}/digests", what, patience, detail or what)
    except AgreementError:
        # The next call is compared with the one that a process has missed.
        store.count(f"{room}/calls/{group.rank}", -1)
        raise
    # All processes have made this call, so the digests of earlier calls are not needed. Keep the
    # last few, because other threads may still compare.
    store.delete(f"{room}/{number - 4}/digests/{group.rank}")
    differing = [rank for rank in group.ranks if digests[rank] != digest]
    if not differing:
        return
    store.set(f"{room}/{number}/facts/{group.rank}", packed(facts))
    theirs = store.wait(f"{room}/{number}/facts/{differing[0]}", 1.0)
    if theirs is None:
        raise AgreementError(f"{what} differs between processes {ranks_text(group.ranks)}", fix=fix)
    sides = ((group.rank, facts), (differing[0], unpacked(theirs)))
    raise disagreement(sides, what, fix)


def collect(
    group: ProcessGroup, folder: str, what: str, patience: float, detail: str
) -> dict[int, str]:
    """Wait for the digests of all processes, and return them by rank."""
    begun, reported = time.monotonic(), False
    waiting = Waiting(group, folder, detail)
    try:
        while True:
            digests = digests_in(group, folder)
            absent = [rank for rank in group.ranks if rank not in digests]
            if not absent:
                return digests
            waited = time.monotonic() - begun
            crossing = waiting.crossing(absent) if waited > CROSSING_S else ""
            if crossing or waited >= patience:
                # A process that makes the call later must not continue alone.
                group.store.delete(f"{folder}/{group.rank}")
                raise AgreementError(
                    crossing
                    or f"{processes_text(absent)} did not reach {what} within {patience:.0f} s; "
                    f"process {group.rank} waits there",
                    fix="make the same calls in every process, in the same order",
                )
            if not reported and waited > WAIT_S:
                reported = True
                _LOG.warning(
                    "process %d has waited %.0f s for %s to reach %s",
                    *(group.rank, WAIT_S, processes_text(absent), what),
                )
            group.store.wait(f"{folder}/{absent[0]}", min(patience - waited, 1.0))
            waiting.publish()
    finally:
        waiting.withdraw()


def digests_in(group: ProcessGroup, folder: str) -> dict[int, str]:
    """Return the digests of the processes that have made a call, by rank."""
    return {int(rank): text.decode() for rank, text in group.store.entries(folder).items()}


class Waiting:
    """What this process waits for, as the others can read it.

    The main threads of two processes may wait for each other in different calls. Neither continues,
    so both raise an error. Other threads are left out, because another one may make the call.

    Args:
      group: The processes.
      folder: The digests that this process waits for.
      detail: The call, for messages.
    """

    def __init__(self, group: ProcessGroup, folder: str, detail: str) -> None:
        self._group, self._folder, self._detail = group, folder, detail
        self._is_main = threading.current_thread() is threading.main_thread()
        self._published = False
        # A message of another process counts for this wait alone.
        self._id = secrets.token_hex(8)

    def publish(self) -> None:
        """Write it into the store."""
        if self._is_main and not self._published:
            self._published = True
            entry = {
                "folder": self._folder,
                "detail": self._detail,
                "ranks": self._group.ranks,
                "id": self._id,
            }
            self._group.store.set(self._key(self._group.rank), json.dumps(entry).encode())

    def withdraw(self) -> None:
        """Delete it from the store."""
        if self._published:
            self._group.store.delete(self._key(self._group.rank))

    def crossing(self, absent: Sequence[int]) -> str:
        """Return what is wrong if an absent process waits for this one in another call."""
        store, rank = self._group.store, self._group.rank
        told = store.entries(f"{ROOT}/crossings/{rank}").get(self._id)
        if told is not None:
            return told.decode()
        waits = store.entries(f"{ROOT}/waits") if self._published else {}
        for other in absent:
            entry = json.loads(waits.get(str(other), b"{}"))
            if entry.get("folder", self._folder) == self._folder or rank not in entry["ranks"]:
                continue
            if rank in digests_in(self._group, entry["folder"]):
                continue
            places = sorted([(rank, self._detail), (other, entry["detail"])])
            text = ", ".join(f"process {each} is in {detail}" for each, detail in places)
            text += "; each waits for the other"
            store.set(f"{ROOT}/crossings/{other}/{entry['id']}", text.encode())
            return text
        return ""

    def _key(self, rank: int) -> str:
        return f"{ROOT}/waits/{rank}"


def disagreement(
    sides: Sequence[tuple[int, Facts]], what: str, fix: str, *, suffix: str = ""
) -> AgreementError:
    """Return the error that names each value that differs between two processes.

    Args:
      sides: The rank and the facts of both processes.
      what: What is compared.
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
    """Return `process 3`, or `processes 1, 2 and 5`."""
    if len(ranks) == 1:
        return f"process {ranks[0]}"
    return f"processes {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `0-3` for consecutive ranks, else `0, 2, 5`."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
