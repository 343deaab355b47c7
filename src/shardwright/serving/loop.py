"""Run one step of an engine: read prompts, fill slots, decode, hand out tokens. Handle failures.

The scheduler records which request owns which slot and row. The arrays are on devices. Each part of
a step changes both the scheduler and the arrays, or neither. If a part fails after the arrays have
changed, the requests in them fail, and the arrays are replaced.

A part begins a call, which is then in flight: the devices compute it, and the host has not read its
results. With `ahead`, a step reads the results of the step before it, so the devices do not wait
for the host between two steps. Otherwise each part reads its own results.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from shardwright import _jax
from shardwright.caches.refusals import Refusal
from shardwright.errors import ServingError
from shardwright.serving.arguments import deleted_weights
from shardwright.serving.arrays import Codes, Held, read_held
from shardwright.serving.calls import Calls
from shardwright.serving.metrics import Meter, Report
from shardwright.serving.request import Finish
from shardwright.serving.sampling import Drawn, Read
from shardwright.serving.scheduler import Chunk, Job, Move, Scheduler
from shardwright.serving.steps import MISCOUNTED, NO_NUMBER, REFUSED


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call in flight.

    Attributes:
      part: The arrays that it changed, such as "rows".
      step: Number of the step that began it.
      jobs: Jobs that it gives something. If all of them have ended, its results are not read.
      fetch: Waits for the results and returns them.
      take: Called with the results.
    """

    part: str
    step: int
    jobs: Sequence[Job]
    fetch: Callable[[], Any]
    take: Callable[[Any], None]


class Loop:
    """The parts of a step.

    Attributes:
      scheduler: Records which request owns which slot and row.
      arrays: The caches and the compiled functions.
      meter: Counts requests, tokens and steps.
      stepping: Whether a step is running. Callbacks of requests run inside a step.
      canceled: Jobs to cancel. Any thread may add to it.
      calls: The calls of an engine, which several processes compare before each step.
      ahead: Whether a step begins before the results of the step before it are read.
    """

    def __init__(
        self, scheduler: Scheduler, arrays: Any, meter: Meter, calls: Calls, *, ahead: bool
    ) -> None:
        self.scheduler, self.arrays, self.meter, self.calls = scheduler, arrays, meter, calls
        self.ahead, self.stepping = ahead, False
        self.canceled: collections.deque[Job] = collections.deque()
        self._step, self._in_flight = 0, collections.deque[Call]()
        self._outbox: collections.deque[tuple[Job, int]] = collections.deque()
        self._failed: collections.deque[tuple[Job, Exception]] = collections.deque()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        waiting = self._outbox or self.canceled or self._failed or self._in_flight
        return self.scheduler.idle and not waiting

    def step(self) -> None:
        """Read a chunk of every prompt, and give every slot its next token."""
        self.stepping, start = True, self.meter.now()
        self._step += 1
        try:
            # Several processes have compared what ends now, but not yet what fails in this step.
            if self.calls.are_compared:
                self._end_requested()
            self._hand_out()
            self._end_unless_shared()
            self.clean()
            self.scheduler.admit()
            self._read()
            self._fill()
            self._decode()
            self._settle(before=self._step)
            self._end_unless_shared()
            self._drop_settled()
            self.clean()
        finally:
            self.stepping = False
            self.meter.busy += self.meter.now() - start

    def compile(self) -> None:
        """Run every compiled function once, on no requests."""
        with self._changing("rows"), self._changing("slots"):
            self.arrays.compile()

    def end_canceled(self) -> None:
        """Cancel jobs, and empty their rows and slots, unless a step will do so."""
        self._end_unless_shared()
        if not self.stepping and not self.calls.are_compared:
            self.clean()

    def drop_requested(self) -> None:
        """Forget cancels and failures on which the processes do not agree."""
        self.canceled.clear()
        self._failed.clear()

    def _end_unless_shared(self) -> None:
        if not self.calls.are_compared:
            self._end_requested()

    def _end_requested(self) -> None:
        """End the jobs that are canceled, or whose callbacks have failed."""
        while self.canceled:
            self.scheduler.end(self.canceled.popleft(), Finish.CANCELED)
        while self._failed:
            self.scheduler.fail(*self._failed.popleft())

    def forget(self) -> None:
        """Share nothing that the old weights computed. Without pages, nothing is shared."""

    def report(self) -> Report:
        """Return counts and times since the engine was created."""
        return self.meter.report(self.scheduler.limits.slots, shared_pages=0, preempted=0)

    def held(self) -> Held:
        """Return the number of tokens and pages that the caches hold, read from the devices."""
        self._settle()
        if not self.stepping:
            self.clean()
        return read_held(self.arrays)

    def clean(self) -> None:
        """Empty the rows and slots that requests have left."""
        rows, slots = sorted(self.scheduler.dirty_rows), sorted(self.scheduler.dirty_slots)
        if rows:
            with self._changing("rows"):
                self.arrays.clear_rows(rows)
                self.scheduler.clean(rows=rows)
        if slots:
            with self._changing("slots"):
                self.arrays.clear_slots(slots)
                self.scheduler.clean(slots=slots)
        self._count_ended()

    def _begin(
        self,
        part: str,
        jobs: Sequence[Job],
        fetch: Callable[[], Any],
        take: Callable[[Any], None],
    ) -> None:
        """Record a call in flight; see `Call`."""
        call = Call(part=part, step=self._step, jobs=jobs, fetch=fetch, take=take)
        self._in_flight.append(call)

    def _settle(self, *, before: int | None = None) -> None:
        """Read the results of calls in flight, in order.

        Within a step, hand out the tokens of a call before the next one is read: a callback may end
        its request.

        Args:
          before: Read those of the steps with a smaller number. None means all.
        """
        while self._in_flight and (before is None or self._in_flight[0].step < before):
            call = self._in_flight.popleft()
            if not _is_needed(call):
                continue
            try:
                call.take(call.fetch())
            except BaseException as error:
                # The arrays come from the same call, so they are lost too.
                self._give_up(call.part, error, call.jobs)
                self._check_weights(error)
                raise
            if self.stepping:
                self._hand_out()

    def _drop_settled(self) -> None:
        """Forget the calls in flight that no job needs, so that an engine may be idle."""
        self._in_flight = collections.deque(filter(_is_needed, self._in_flight))

    def _read(self) -> None:
        """Read the next chunk of every prompt in the prefill batch."""
        self._rotate()
        chunks = self.scheduler.chunks()
        if not chunks:
            return
        with self._changing("rows"):
            drawn = self.arrays.prefill(
                {chunk.row: chunk.tokens for chunk in chunks},
                {chunk.row: chunk.job.request.sampling for chunk in chunks},
            )
            self.scheduler.advance(chunks)
            complete = {move.row for move in self.scheduler.ready()}
            first = {chunk.row for chunk in chunks if chunk.row in complete}
            self._begin_read("rows", chunks, first, drawn)

    def _begin_read(
        self, part: str, chunks: Sequence[Chunk], first: Collection[int], drawn: Drawn
    ) -> None:
        """Record a call in flight that reads chunks.

        Args:
          part: The arrays that it changed.
          chunks: The chunks.
          first: Rows whose tokens are the first ones of their jobs. The others are not used.
          drawn: The tokens that follow the chunks.
        """
        for chunk in chunks:
            chunk.job.used(self.arrays.version)
            if chunk.row in first:
                self.scheduler.expect(chunk.job, 1)
        self.meter.prefill_steps += 1
        self.meter.prompt_tokens += sum(len(chunk.tokens) for chunk in chunks)
        take = functools.partial(self._take_read, chunks, first)
        self._begin(part, [chunk.job for chunk in chunks], drawn.fetch, take)

    def _take_read(self, chunks: Sequence[Chunk], first: Collection[int], drawn: Read) -> None:
        """Take the first tokens of jobs; see `_begin_read`."""
        now = self.meter.now()
        for chunk in chunks:
            job, row, is_first = chunk.job, chunk.row, chunk.row in first
            job.in_flight -= is_first
            # A code fails the job after every chunk.
            if job.completion is None and (is_first or drawn.tokens[row] < 0):
                self._take(job, drawn.tokens[row], drawn.logprobs[row], now)

    def _fill(self) -> None:
        """Move the prompts that are completely read into their slots."""
        moves = self.scheduler.ready()
        if not moves:
            return
        # A prompt whose only token is in flight needs no slot any more.
        filled = [move for move in moves if self.scheduler.left(move.job, 1)]
        with self._changing("slots"):
            if filled:
                self._begin_move("slots", filled, self._insert(filled))
            self.scheduler.move([move.job for move in moves])

    def _insert(self, moves: Sequence[Move]) -> Codes:
        codes: Codes = self.arrays.insert(
            {move.row: move.slot for move in moves},
            {move.row: move.job.written[-1] for move in moves if move.job.written},
            {move.row: move.job.request.sampling for move in moves},
            {move.row: move.job.request.max_new_tokens for move in moves},
        )
        return codes

    def _rotate(self) -> None:
        """Give rows of the prefill batch to the prompts whose turn it is."""
        moves = self.scheduler.over()
        if moves:
            with self._changing("slots"):
                codes = self.arrays.park({move.row: move.slot for move in moves})
                self.scheduler.park([move.job for move in moves])
                self._begin_move("slots", moves, codes)
            self.clean()
        moves = self.scheduler.turns()
        begun = [move for move in moves if move.job.read]
        with self._changing("rows"):
            if begun:
                codes = self.arrays.resume({move.row: move.slot for move in begun})
                self._begin_move("rows", begun, codes)
            self.scheduler.take(moves)

    def _begin_move(self, part: str, moves: Sequence[Move], codes: Codes) -> None:
        jobs = [move.job for move in moves]
        self._begin(part, jobs, codes.fetch, functools.partial(self._fail_refused, moves))

    def _fail_refused(self, moves: Sequence[Move], codes: Any) -> None:
        """Fail the jobs whose tokens a cache refused.

        Args:
          moves: Jobs that have moved.
          codes: Codes of `Refusal` by row.
        """
        for move in moves:
            if codes[move.row]:
                meaning = Refusal(int(codes[move.row])).meaning
                error = ServingError(
                    f"slot {move.slot} refused the prompt: {meaning}",
                    fix="let the model pass valid= on, so that no padding is written to a slot",
                )
                self.scheduler.end(move.job, Finish.FAILED, error)

    def _decode(self) -> None:
        """Give every slot its next tokens."""
        most = self.arrays.decode_steps
        jobs = {
            slot: (job, self.scheduler.left(job, most))
            for slot, job in self.scheduler.decoding().items()
        }
        if jobs:
            self._begin_decode("slots", jobs, self.arrays.decode)

    def _begin_decode(
        self, part: str, jobs: dict[int, tuple[Job, int]], decode: Callable[[], Drawn]
    ) -> None:
        """Begin to decode.

        Args:
          part: The arrays that `decode` changes.
          jobs: Jobs by slot, each with the number of tokens that it gets.
          decode: Gives active slots their next tokens.
        """
        with self._changing(part):
            drawn = decode()
            for job, count in jobs.values():
                self.scheduler.expect(job, count)
            take = functools.partial(self._take_decoded, jobs, self.arrays.version)
            self._begin(part, [job for job, _ in jobs.values()], drawn.fetch, take)

    def _take_decoded(
        self, jobs: dict[int, tuple[Job, int]], version: int | str, drawn: Read
    ) -> None:
        """Add the tokens of a call to its jobs, except to those that have ended."""
        now, counts = self.meter.now(), []
        for slot, (job, count) in jobs.items():
            job.in_flight -= count
            if job.completion is not None:
                continue
            job.used(version)
            counts.append(count)
            for at in range(count):
                # A stop sequence or an error may end it.
                if job.completion is None:
                    self._take(job, drawn.tokens[at][slot], drawn.logprobs[at][slot], now)
        self.meter.decode_steps += max(counts)
        self.meter.slot_steps += sum(counts)

    def _take(self, job: Job, token: int, logprob: float, now: float) -> None:
        """Add a token to a job, or fail the job if the token is the code of an error.

        Args:
          job: The job.
          token: Its next token, or a code such as NO_NUMBER.
          logprob: The log-probability of the token.
          now: The time at which the token was known.
        """
        if token < 0:
            self._fail_by_code(job, token)
            return
        self.meter.wrote(job.number, now)
        job.logprobs.append(logprob)
        new = self.scheduler.write(job, token)
        if job.request.on_token is not None:
            self._outbox.extend((job, text) for text in new)

    def _fail_by_code(self, job: Job, code: int) -> None:
        what, fix = _ERRORS[code]
        error = ServingError(
            f"request {job.number}, after {len(job.written)} tokens: {what}", fix=fix
        )
        self.scheduler.end(job, Finish.FAILED, error)

    def _hand_out(self) -> None:
        """Call `on_token` of the requests that have new tokens."""
        while self._outbox:
            job, token = self._outbox.popleft()
            wanted = job.completion is None or job.completion.finish in (Finish.LENGTH, Finish.STOP)
            failed = any(job is each for each, _ in self._failed)
            if job.request.on_token is None or not wanted or failed:
                continue
            try:
                job.request.on_token(token)
            except Exception as error:
                # The callback is code of the caller. Any exception of it fails only this request.
                self._fail(job, error)
        self._count_ended()

    def _fail(self, job: Job, error: Exception) -> None:
        """Fail a job whose callback has raised an error, now or in the next step."""
        if self.calls.are_compared and job.completion is None:
            self._failed.append((job, error))
            self.calls.failed(job.number, error)
        else:
            self.scheduler.fail(job, error)

    def _count_ended(self) -> None:
        for job, finish in self.scheduler.take_ended():
            self.meter.ended(job.number, finish)

    @contextlib.contextmanager
    def _changing(self, part: str) -> Iterator[None]:
        """Change the scheduler and "rows" or "slots" together.

        If that fails after the arrays have changed, fail the requests in them. In any case, read
        the calls that are in flight: what failed does not affect them, because they began before.
        """
        before = getattr(self.arrays, part)
        try:
            yield
        except BaseException as error:
            try:
                self._settle()
            finally:
                if getattr(self.arrays, part) is not before or _jax.is_deleted(before):
                    self._give_up(part, error)
                self._check_weights(error)
            raise
        if not self.ahead:
            self._settle()

    def _give_up(self, part: str, cause: BaseException, jobs: Sequence[Job] = ()) -> None:
        """Fail the requests in "rows" or "slots", and replace the arrays.

        Args:
          part: "rows" or "slots".
          cause: The error.
          jobs: More jobs that fail.
        """
        self._fail_lost(part, cause, jobs)
        self.arrays.renew(part)
        self.scheduler.clean(**{part: range(self.arrays.size(part))})

    def _fail_lost(self, part: str, cause: BaseException, jobs: Sequence[Job]) -> None:
        """Fail jobs, those in a part of the arrays, and those that calls in flight have changed."""
        lost = [call for call in self._in_flight if call.part == part]
        self._in_flight = collections.deque(call for call in self._in_flight if call.part != part)
        waiting = [job for call in lost for job in call.jobs]
        for job in (*self.scheduler.holding(part), *jobs, *waiting):
            error = ServingError(
                f"the cached tokens of request {job.number} were lost, because a step failed",
                fix="submit it again",
            )
            error.__cause__ = cause
            self.scheduler.end(job, Finish.FAILED, error)

    def _check_weights(self, cause: BaseException) -> None:
        """Fail every request if the weights are deleted."""
        if self.arrays.weights_are_deleted():
            self._end_all(cause)
            raise deleted_weights() from cause

    def _end_all(self, cause: BaseException) -> None:
        """Fail every request, because the weights are deleted, and empty the slots."""
        jobs = self.scheduler.jobs()
        for job in jobs:
            error = deleted_weights()
            error.__cause__ = cause
            self.scheduler.end(job, Finish.FAILED, error)
        if jobs:
            self.clean()


def _is_needed(call: Call) -> bool:
    """Tell whether a job waits for the results of a call."""
    return any(job.completion is None for job in call.jobs)


_ERRORS = {
    NO_NUMBER: (
        "a logit is NaN or infinity, or all logits are -infinity",
        "check the weights, and what the model computes for these tokens",
    ),
    REFUSED: (
        "a cache refused the tokens",
        "return done.cache of every layer, where done is the result of append_and_attend",
    ),
    MISCOUNTED: (
        "the caches did not grow by the number of tokens that were read",
        "pass valid= on to append_and_attend, and return done.cache",
    ),
}
