"""The watchdog: end this process, with a message, if another process of its mesh is missing.

If a process is killed, raises an error or ends, the other processes would wait for it in a
collective forever. In each process, a thread beside the main thread writes a beat into JAX's
coordination store. The process with the lowest rank of a mesh leads: its thread reads the beats of
all, and writes one summary, which the others read. So the bytes that a process reads and writes do
not depend on the number of processes, except in the leader. JAX's own `get_live_nodes` does not
help, because it waits for all processes.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import enum
import json
import os
import sys
import threading
import time
from typing import Any, Final

import jax

from shardwright import _jax
from shardwright.processes.compare import ProcessGroup
from shardwright.processes.meeting import ROOT, collect

# EX_TEMPFAIL of sysexits.h: the program may succeed if it is started again.
EXIT_CODE: Final = 75
_ROOM: Final = f"{ROOT}/watchdog"
# The main thread counts as busy if it uses more than this share of a processor.
_MAIN_BUSY: Final = 0.005
# The process counts as busy if it uses more than this share of a processor. Compilers work in
# threads other than the main thread.
_PROCESS_BUSY: Final = 0.05
# Largest number of characters of `place` in a beat.
_MOST_PLACE: Final = 200
_GRACE: Final = 0.3  # seconds in which the others can end, after all of them have reported LEFT


class _State(enum.StrEnum):
    """The state of a process, as the process itself reports it.

    A process in the state LEFT has printed its message, and ends.
    """

    RUNS = "runs"
    ENDED = "ended"
    RAISED = "raised"
    LEFT = "left"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Beat:
    """The report that a process writes into the store every few hundred milliseconds.

    Attributes:
      number: Number of the beat.
      state: State of the process.
      text: The error that it raised, or empty.
      jax_error: Whether it raised an error of JAX, which another process may have caused.
      place: Lines of the program that its main thread is in, the innermost first.
      waits_s: Seconds for which its main thread has run no Python code and used no processor.
      compiles: Whether its main thread traces, lowers or compiles a program.
    """

    number: int = 0
    state: str = _State.RUNS
    text: str = ""
    jax_error: bool = False
    place: str = ""
    waits_s: float = 0.0
    compiles: bool = False


def watch(group: ProcessGroup, seconds: float) -> None:
    """Start the watchdog of this process.

    If the watchdog runs already, let it watch these processes too.
    """
    for thread in threading.enumerate():
        if isinstance(thread, Watchdog):
            thread.widen(group, seconds)
            return
    Watchdog(group, seconds).start()


class Watchdog(threading.Thread):
    """Watch the processes of a mesh until one is missing.

    Then print which one, and end this process.

    Args:
      group: The processes.
      seconds: Seconds for which a process may be missing.
    """

    def __init__(self, group: ProcessGroup, seconds: float) -> None:
        super().__init__(name="shardwright-watchdog", daemon=True)
        self._store, self._rank = group.store, group.rank
        self._groups, self._seconds = {group.ranks}, float(seconds)
        self._main = _MainThread()
        self._seen: dict[int, tuple[int, float]] = {}
        # The line of the process that has waited longest. `_apart` says since when each other
        # process has ended or has been at another line.
        self._waited_at = ""
        self._apart: dict[int, float] = {}
        self._own = _Beat()
        self._exit: dict[str, Any] = {}  # set by `_leave`: fields of all beats after this call
        self._only_jax_errors_since = 0.0
        atexit.register(self._leave)

    def widen(self, group: ProcessGroup, seconds: float) -> None:
        """Watch more processes. If `seconds` differ, use the smaller number."""
        self._groups |= {group.ranks}
        self._seconds = min(self._seconds, float(seconds))

    @property
    def _leaders(self) -> list[int]:
        """The processes whose summaries this process reads."""
        return sorted({min(ranks) for ranks in self._groups} - {self._rank})

    @property
    def _led(self) -> frozenset[int]:
        """The processes that this process leads, itself included. Empty if it leads none."""
        own = [ranks for ranks in self._groups if min(ranks) == self._rank]
        return frozenset().union(*own)

    @property
    def _interval(self) -> float:
        return min(self._seconds / 16, 5.0)

    def run(self) -> None:
        """Write beats and read those of the other processes, until this process ends."""
        last = answered = time.monotonic()
        while True:
            now = time.monotonic()
            if now - last > 4 * self._interval + 1:
                self._seen.clear()  # this process was stopped, so it has missed beats of the others
                self._apart.clear()
                self._main.restart()
            last = now
            try:
                if self._step():
                    return
                answered = time.monotonic()
            except RuntimeError as error:
                if _jax.coordination_store() is None:
                    return  # jax.distributed.shutdown was called
                if time.monotonic() - answered > self._seconds:
                    self._end(
                        f"process 0, which has the coordination store, does not answer: {error}"
                    )
            ended = self._own.state == _State.ENDED
            time.sleep(min(self._interval, 0.25) if ended else self._interval)

    def _step(self) -> bool:
        """Write a beat, and lead or follow. Return whether all processes have ended."""
        self._beat()
        all_ended = True
        for leader in self._leaders:
            all_ended &= self._follow(leader)
        if self._led:
            all_ended &= self._lead()
        return all_ended and self._own.state == _State.ENDED

    def _lead(self) -> bool:
        """Read the beats of the led processes, and write their summary."""
        found = self._store.entries(f"{_ROOM}/beats")
        beats = {int(rank): _Beat(**json.loads(data)) for rank, data in found.items()}
        all_ended = all(
            beat.state != _State.RUNS for rank, beat in beats.items() if rank in self._led
        )
        self._summarize(all_ended=all_ended)
        missing = self._missing(beats)
        if missing:
            self._end("; ".join(text for _, text in sorted(missing.items())), decided=True)
        return all_ended

    def _summarize(self, *, all_ended: bool = False, verdict: str = "") -> None:
        summary = {"number": self._own.number, "all_ended": all_ended, "verdict": verdict}
        self._store.set(f"{_ROOM}/summary/{self._rank}/now", json.dumps(summary).encode())

    def _follow(self, leader: int) -> bool:
        """Read a leader's summary. End this process if the summary says so, or if it is too old."""
        found = self._store.entries(f"{_ROOM}/summary/{leader}")
        if not found:  # the leader has not entered its manager yet, or has no watchdog
            return self._own.state == _State.ENDED
        summary = json.loads(found["now"])
        if summary["verdict"]:
            self._end(summary["verdict"])
        silent = self._silent_since(leader, summary["number"])
        # A beat may have been written up to one interval before it was seen.
        if silent >= self._seconds - self._interval and not summary["all_ended"]:
            self._end(_no_sign(leader, silent))
        return bool(summary["all_ended"])

    def _silent_since(self, rank: int, number: int) -> float:
        """Return the seconds since the beat number of a process last changed."""
        now = time.monotonic()
        before, since = self._seen.get(rank, (-1, now))
        if number != before:
            self._seen[rank] = (number, now)
            return 0.0
        return now - since

    def _is_silent(self, rank: int) -> bool:
        """Tell whether a process missed several beats, so that its last beat may be outdated."""
        now = time.monotonic()
        return now - self._seen.get(rank, (0, now))[1] > 4 * self._interval

    def _beat(self, state: str = "") -> None:
        place, waits = self._main.look()
        own, frame = dataclasses.replace(self._own, **self._exit), self._main.frame()
        state = state or (_State.ENDED if _jax.shuts_down(frame) else own.state)
        self._own = dataclasses.replace(
            own,
            number=own.number + 1,
            place=place[:_MOST_PLACE],
            waits_s=round(waits, 2),
            compiles=_jax.compiles(frame) and not _jax.is_in(frame, collect.__code__),
        )
        beat = dataclasses.replace(self._own, state=state)
        data = json.dumps(dataclasses.asdict(beat)).encode()
        self._store.set(f"{_ROOM}/beats/{self._rank}", data)

    def _missing(self, beats: dict[int, _Beat]) -> dict[int, str]:
        """Return a text for each process that is missing, by rank.

        If a process is killed, the collectives of others raise errors of JAX before the killed
        process counts as silent. So such errors are reported later, and only if no process is
        silent.
        """
        silent = self._silent(beats, self._seconds - self._interval)
        raised = {
            rank: beat
            for rank, beat in beats.items()
            if rank in self._led and beat.state == _State.RAISED
        }
        texts = {rank: f"process {rank} raised {beat.text}" for rank, beat in raised.items()}
        missing = {**self._elsewhere(beats), **silent}
        missing = {rank: text for rank, text in missing.items() if rank not in raised}
        missing |= {rank: text for rank, text in texts.items() if not raised[rank].jax_error}
        if missing or not raised:
            return missing
        self._only_jax_errors_since = self._only_jax_errors_since or time.monotonic()
        if time.monotonic() - self._only_jax_errors_since < self._seconds - self._interval:
            return {}
        silent = self._silent(beats, self._seconds / 2)
        return {rank: text for rank, text in silent.items() if rank not in raised} or texts

    def _silent(self, beats: dict[int, _Beat], seconds: float) -> dict[int, str]:
        """Return a text for each process whose last beat is at least `seconds` old, by rank."""
        missing = {}
        for rank in self._led - {self._rank}:
            if (beat := beats.get(rank)) is None:
                continue  # the process has not entered its manager yet, or has no watchdog
            silent = self._silent_since(rank, beat.number)
            if silent >= seconds and beat.state != _State.ENDED:
                missing[rank] = _no_sign(rank, silent)
        return missing

    def _elsewhere(self, beats: dict[int, _Beat]) -> dict[int, str]:
        """Return the processes that have ended, or are at another line, while some process waits.

        A process that just ended or moved to the next line may have taken part in the collective,
        while the waiting process wakes late. So a process counts as missing only if it has been at
        other lines, or silent, for at least half of the watchdog's `seconds`. A process that
        compiles is not missing, however long it takes.
        """
        beats = {rank: beat for rank, beat in beats.items() if rank in self._led}
        running = [
            rank
            for rank, beat in beats.items()
            if beat.state == _State.RUNS and not beat.compiles and not self._is_silent(rank)
        ]
        if not running:
            return {}
        waiting = max(running, key=lambda rank: (beats[rank].waits_s, -rank))
        longest, now = beats[waiting], time.monotonic()
        self._note_apart(beats, longest.place, now)
        if longest.waits_s < self._seconds - self._interval:
            return {}
        half, missing = self._seconds / 2, {}
        for rank, beat in beats.items():
            apart = now - self._apart.get(rank, now)
            if beat.state == _State.ENDED:
                if apart >= half:
                    missing[rank] = f"process {rank} has ended"
            elif self._is_silent(rank):  # a silent process may be at another line by now
                silent = now - self._seen[rank][1]
                if silent >= half:
                    missing[rank] = _no_sign(rank, silent)
            elif apart >= half:
                missing[rank] = f"process {rank} is at {_first(beat.place)}"
        if missing:
            missing[waiting] = (
                f"process {waiting} has waited {longest.waits_s:.1f} s at {_first(longest.place)}"
            )
        return missing

    def _note_apart(self, beats: dict[int, _Beat], place: str, now: float) -> None:
        """Record since when processes have ended, or are not at the line of the waiting process."""
        if place != self._waited_at:
            self._waited_at = place
            self._apart.clear()
        for rank, beat in beats.items():
            elsewhere = beat.state == _State.RUNS and beat.place != place and not beat.compiles
            if beat.state == _State.ENDED or elsewhere:
                self._apart.setdefault(rank, now)
            else:
                self._apart.pop(rank, None)

    def _leave(self) -> None:
        """Tell the others that this process ends.

        This method runs at exit, before JAX waits for the other processes.
        """
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is None or hasattr(sys, "ps1") or not self.is_alive():
            self._exit = {"state": _State.ENDED}
            # Wait until all have ended, as JAX would. Then the thread ends before Python does: a
            # thread that is in native code while Python ends would abort this process.
            self.join()
            return
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        jax_error = isinstance(error, jax.errors.JaxRuntimeError)
        self._exit = {"state": _State.RAISED, "text": text, "jax_error": jax_error}
        # Wait for the watchdog's thread, which ends this process. Otherwise JAX would wait here for
        # processes that wait for this one.
        self.join(self._seconds + 4 * self._interval)
        os._exit(1)

    def _end(self, text: str, *, decided: bool = False) -> None:
        """Print which processes are missing, tell the others, and end this process."""
        own = self._own
        # A process that raised an error has the same exit code as without a watchdog.
        code = 1 if own.state == _State.RAISED and not own.jax_error else EXIT_CODE
        _write(f"shardwright watchdog in process {self._rank}: {text}\n")
        place = f" It was at {own.place}." if own.state == _State.RUNS else ""
        _write(f"  process {self._rank} ends with exit code {code}.{place}\n")
        flush = threading.Thread(target=sys.stdout.flush, daemon=True)
        flush.start()
        flush.join(0.5)  # the main thread may hold the lock of the stream
        try:
            if decided:
                self._summarize(verdict=text)
            self._beat(_State.LEFT)
            if self._rank == 0 or own.state == _State.RAISED:
                self._linger()  # without this process, the collectives of the others fail
            if self._rank == 0:
                time.sleep(_GRACE)  # without process 0, JAX aborts the others before they end
        except RuntimeError:
            pass  # process 0 has already ended
        finally:
            os._exit(code)

    def _linger(self) -> None:
        """Wait until the others have printed their messages. Process 0 waits longest."""
        intervals = 3 if self._rank == 0 else 1
        deadline = time.monotonic() + min(intervals * self._interval, 2.0)
        others = frozenset().union(*self._groups) - {self._rank}
        alive = {rank for rank in others if not self._is_silent(rank)}
        while time.monotonic() < deadline:
            found = self._store.entries(f"{_ROOM}/beats")
            states = {int(rank): json.loads(data)["state"] for rank, data in found.items()}
            if all(states.get(rank, _State.LEFT) == _State.LEFT for rank in alive):
                return
            time.sleep(0.1)


class _MainThread:
    """Observe the main thread: whether it runs Python code or waits, and in which lines.

    The interpreter runs a pending call in the main thread before the next instruction of Python
    code. So until a pending call has run, the main thread is inside one call of native code.
    """

    def __init__(self) -> None:
        self._thread = threading.main_thread()
        self._call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._answer)
        self._pending, self._ran = False, True
        self._main_cpu = self._process_cpu = 0.0
        self.restart()

    def restart(self) -> None:
        """Start to count the waiting time from 0."""
        self._since = self._before = time.monotonic()

    def _answer(self, _: object) -> int:
        self._pending = False
        # In `collect`, the main thread waits for other processes, which does not count as running.
        if not _jax.is_in(sys._getframe(), collect.__code__):
            self._ran = True
        return 0

    def frame(self) -> Any:
        """Return the innermost frame of the main thread, or None."""
        return sys._current_frames().get(self._thread.ident or 0)

    def look(self) -> tuple[str, float]:
        """Return the lines that the thread is in, and for how many seconds it has waited."""
        now, process = time.monotonic(), time.process_time()
        # Not every platform has a clock per thread; macOS has none.
        clock: Any = getattr(time, "pthread_getcpuclockid", None)
        main = 0.0 if clock is None else time.clock_gettime(clock(self._thread.ident))
        elapsed = now - self._before
        busy = (
            main - self._main_cpu > _MAIN_BUSY * elapsed
            or process - self._process_cpu > _PROCESS_BUSY * elapsed
        )
        if self._ran or busy:
            self._since = now
        self._ran, self._before = False, now
        self._main_cpu, self._process_cpu = main, process
        # CPython's queue of pending calls is short, so this observer has at most one call in it.
        if not self._pending:
            self._pending = True
            ctypes.pythonapi.Py_AddPendingCall(self._call, None)
        return _jax.program_lines(self.frame()), now - self._since


def _no_sign(rank: int, seconds: float) -> str:
    return f"process {rank} has given no sign of life for {seconds:.1f} s"


def _first(place: str) -> str:
    return place.partition(" < ")[0] or "an unknown line"


def _write(text: str) -> None:
    """Write to standard error without its lock, which the main thread may hold."""
    os.write(2, text.encode())
