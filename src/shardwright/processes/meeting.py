"""A meeting of processes in JAX's coordination store: all arrive, and all get one verdict.

Each process announces itself, adds 1 to a counter, and waits for one key, so the number of its
messages does not depend on the number of processes. The process that arrives last reads what the
others have announced, and writes the verdict. While others wait, the process that arrived first
acts for all: it reads which processes are absent, and why. If a wait fails, it fails for all
processes, and their next call is a new attempt.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from shardwright import _jax

ROOT: Final = "shardwright"
# Seconds of one wait. Python answers Ctrl-C only between two waits.
_SLICE_S: Final = 5.0
# Seconds until processes that are not the first say where they wait.
_OTHERS_LOOK_S: Final = 3.0
# Seconds within which a process that decides or that closes the meeting must write the verdict.
_VERDICT_S: Final = 5.0
# Added to the counter of arrivals if a wait fails. The store adds to a counter in one step. So it
# is certain whether the last arrival or the first failure came first, and the one that came first
# decides the verdict.
# Counters have 32 bits, which is enough even if each of 32,767 processes fails.
_CLOSED: Final = 2**16

MeetingVerdict = dict[str, Any]


class Meeting:
    """One attempt of processes to meet.

    Args:
      store: The coordination store.
      room: Prefix of the keys of this call, equal in all processes.
      count: Number of processes.
      attempt: Number of the attempt. Defaults to the current one.

    Attributes:
      room: Prefix of the keys of this call.
      attempt: Number of the attempt.
      folder: Prefix of the keys of this attempt.
      place: Number of this process in the order of arrival, from 1.
      is_complete: Whether `close` found that all processes have arrived.
    """

    def __init__(
        self, store: _jax.CoordinationStore, room: str, count: int, attempt: int | None = None
    ) -> None:
        self.room, self._store, self._count = room, store, count
        self.attempt = store.count(f"{room}/attempt", 0) if attempt is None else attempt
        self.folder = f"{room}/{self.attempt}"
        self.place = self._extensions = 0
        self.is_complete = False

    def arrive(self) -> None:
        """Count this process, after it has announced itself."""
        self.place = self._store.count(f"{self.folder}/arrived")

    @property
    def is_first(self) -> bool:
        """Whether this process arrived first, and so acts for the other processes."""
        return self.place == 1

    def decide(self, verdict: MeetingVerdict) -> None:
        """Write the verdict."""
        self._store.set(f"{self.folder}/verdict", json.dumps(verdict).encode())

    def close(self, verdict: Callable[[], MeetingVerdict]) -> None:
        """Close the meeting with a verdict, unless another process has closed it.

        If all processes have arrived, the last one writes the verdict, so write none here.
        """
        # The low 16 bits count arrivals, and the high bits count attempts to close.
        value = self._store.count(f"{self.folder}/arrived", _CLOSED)
        self.is_complete = value % _CLOSED >= self._count
        if value // _CLOSED == 1 and not self.is_complete:
            self._store.count(f"{self.room}/attempt")  # before a process can call again
            self.decide(verdict())

    def wait(self, seconds: float) -> MeetingVerdict | None:
        """Return the verdict, or None if there is none after `seconds`."""
        data = self._store.wait(f"{self.folder}/verdict", seconds)
        return None if data is None else json.loads(data)

    def extends(self, is_late: Callable[[], bool]) -> bool:
        """Return whether all processes extend the wait.

        The first process decides whether to extend, and counts its extensions in the store. The
        other processes extend only if the count has grown since their last call, so they do not
        wait for a first process that no longer runs.
        """
        key = f"{self.folder}/extensions"
        if self.is_first:
            return not is_late() and self._store.count(key) > 0
        before, self._extensions = self._extensions, self._store.count(key, 0)
        return self._extensions > before

    @property
    def is_last(self) -> bool:
        """Whether this process arrived last, so that it decides."""
        return self.place == self._count


def collect(
    meeting: Meeting,
    *,
    decide: Callable[[], MeetingVerdict],
    look: Callable[[float], MeetingVerdict | None],
    fail: Callable[[], MeetingVerdict],
    is_late: Callable[[], bool],
    patience: float,
    first_look: float,
) -> MeetingVerdict:
    """Wait for the verdict of a meeting.

    The watchdog looks for this function on the stack: a process inside it waits for others.

    Args:
      meeting: The meeting, at which this process has arrived.
      decide: Called by the last process, for the verdict.
      look: Called now and then with the seconds since the wait began. It returns a verdict if the
        meeting cannot succeed.
      fail: Returns the verdict if not all processes arrive in time.
      is_late: Tells whether an absent process is late, and not just compiling.
      patience: Seconds to wait.
      first_look: Seconds until the first call of `look`.
    """
    if meeting.is_last:
        verdict = decide()
        meeting.decide(verdict)
        return verdict
    # If the wait fails, the first process writes the verdict. The others wait a little longer, in
    # case the first process has ended.
    patience += 0.0 if meeting.is_first else 1.0
    begun = time.monotonic()
    deadline, closed = begun + patience, False
    pause = first_look if meeting.is_first else max(first_look, _OTHERS_LOOK_S)
    while True:
        found = meeting.wait(max(0.05, min(pause, deadline - time.monotonic())))
        if found is not None:
            return found
        now = time.monotonic()
        # Each look reads the store, so look often only in the first 10 seconds. A difference must
        # be reported within this time.
        pause = min(first_look, 1.0) if meeting.is_first and now - begun < 10 else _SLICE_S
        failed = None if closed else look(now - begun)
        if failed is None and now < deadline:
            continue
        if closed:
            return fail()  # the process that decides, or that closed the meeting, no longer runs
        if failed is None and meeting.extends(is_late):
            deadline = now + patience
            continue
        meeting.close(fail if failed is None else functools.partial(dict, failed))
        closed, deadline = True, now + _VERDICT_S


def any_late(store: _jax.CoordinationStore, absent: Sequence[int]) -> bool:
    """Return whether an absent process does anything other than compile.

    If no process is absent, return True: the last process has arrived but wrote no verdict, so
    waiting for a compilation makes no sense.
    """
    return not absent or len(busy_compiling(store, absent)) < len(absent)


def unanswered(what: str) -> MeetingVerdict:
    """Return the verdict for the case that all have arrived, but the last one has not decided."""
    return {
        "error": f"all processes have reached {what}, but the last process has not compared them",
        "fix": "look in the output of the other processes: one of them has ended",
    }


def ranks_in(store: _jax.CoordinationStore, folder: str) -> dict[int, str]:
    """Return the text that each process wrote below a folder, by rank."""
    return {int(rank): text.decode() for rank, text in store.entries(folder).items()}


def busy_compiling(store: _jax.CoordinationStore, ranks: Sequence[int]) -> list[int]:
    """Return which of the processes compile a program, as their watchdogs report."""
    beats = store.entries(f"{ROOT}/watchdog/beats")
    return [
        rank
        for rank in ranks
        if str(rank) in beats and json.loads(beats[str(rank)]).get("compiles", False)
    ]
