"""Run one step of an engine: read prompts, fill slots, decode, hand out tokens. Handle failures.

The scheduler records which request owns which slot and row. The arrays are on devices. Each part of
a step changes both the scheduler and the arrays, or neither. If a part fails after the arrays have
changed, the requests in them fail, and the arrays are replaced.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from shardwright.caches.refusals import Refusal
from shardwright.errors import ServingError
from shardwright.serving.arguments import deleted_weights
from shardwright.serving.arrays import Held, is_deleted, read_held
from shardwright.serving.calls import Calls
from shardwright.serving.metrics import Meter, Report
from shardwright.serving.request import Finish
from shardwright.serving.sampling import Read
from shardwright.serving.scheduler import Chunk, Job, Move, Scheduler
from shardwright.serving.steps import MISCOUNTED, NO_NUMBER, REFUSED


class Loop:
    """The parts of a step.

    Attributes:
      scheduler: Records which request owns which slot and row.
      arrays: The caches and the compiled functions.
      meter: Counts requests, tokens and steps.
      stepping: Whether a step is running. Callbacks of requests run inside a step.
      canceled: Jobs to cancel. Any thread may add to it.
      calls: The calls of an engine, which several processes compare before each step.
    """

    def __init__(self, scheduler: Scheduler, arrays: Any, meter: Meter, calls: Calls) -> None:
        self.scheduler, self.arrays, self.meter, self.calls = scheduler, arrays, meter, calls
        self.stepping = False
        self.canceled: collections.deque[Job] = collections.deque()
        self._outbox: collections.deque[tuple[Job, int]] = collections.deque()
        self._failed: collections.deque[tuple[Job, Exception]] = collections.deque()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        waiting = self._outbox or self.canceled or self._failed
        return self.scheduler.idle and not waiting

    def step(self) -> None:
        """Read a chunk of every prompt, and give every slot its next token."""
        self.stepping, start = True, self.meter.now()
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
            self._hand_out()
            self._decode()
            self._hand_out()
            self._end_unless_shared()
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

    def _read(self) -> None:
        """Read the next chunk of every prompt in the prefill batch."""
        self._rotate()
        chunks = self.scheduler.chunks()
        if not chunks:
            return
        with self._changing("rows"):
            sampling = {chunk.row: chunk.job.request.sampling for chunk in chunks}
            drawn = self.arrays.prefill(
                {chunk.row: chunk.tokens for chunk in chunks}, sampling
            ).fetch()
            for chunk in chunks:
                chunk.job.used(self.arrays.version)
            self.scheduler.advance(chunks)
            self._count_chunks(chunks)
            complete = {move.row for move in self.scheduler.ready()}
            for chunk in chunks:
                token, logprob = drawn.tokens[chunk.row], drawn.logprobs[chunk.row]
                self._take(chunk.job, token, logprob, complete=chunk.row in complete)

    def _fill(self) -> None:
        """Move the prompts that are completely read into their slots."""
        moves = self.scheduler.ready()
        if not moves:
            return
        with self._changing("slots"):
            first = {move.row: move.job.written[-1] for move in moves}
            sampling = {move.row: move.job.request.sampling for move in moves}
            limits = {move.row: move.job.request.max_new_tokens for move in moves}
            into = {move.row: move.slot for move in moves}
            codes = self.arrays.insert(into, first, sampling, limits)
            self.scheduler.move(self._accepted(moves, codes))

    def _rotate(self) -> None:
        """Give rows of the prefill batch to the prompts whose turn it is."""
        moves = self.scheduler.over()
        if moves:
            with self._changing("slots"):
                codes = self.arrays.park({move.row: move.slot for move in moves})
                self.scheduler.park(self._accepted(moves, codes))
            self.clean()
        moves = self.scheduler.turns()
        begun = [move for move in moves if move.job.read]
        if begun:
            with self._changing("rows"):
                codes = self.arrays.resume({move.row: move.slot for move in begun})
                self._accepted(begun, codes)
                self.scheduler.take([move for move in moves if move.job.completion is None])
        else:
            self.scheduler.take(moves)

    def _accepted(self, moves: Sequence[Move], codes: Any) -> list[Job]:
        """Fail the jobs whose tokens a cache refused. Return the other jobs.

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
        return [move.job for move in moves if not codes[move.row]]

    def _decode(self) -> None:
        """Give every slot its next token."""
        jobs = self.scheduler.decoding()
        if not jobs:
            return
        with self._changing("slots"):
            left = {
                slot: self.scheduler.left(job, self.arrays.decode_steps)
                for slot, job in jobs.items()
            }
            drawn = self.arrays.decode().fetch()
            for slot, job in jobs.items():
                self._take_all(job, drawn, slot, left[slot])
            self._count_decoded(left.values())

    def _take_all(self, job: Job, drawn: Read, slot: int, count: int) -> None:
        """Add the tokens of one call to a job, until a stop sequence ends it."""
        job.used(self.arrays.version)
        for at in range(count):
            if job.completion is None:
                self._take(job, drawn.tokens[at][slot], drawn.logprobs[at][slot], complete=True)

    def _count_chunks(self, chunks: Sequence[Chunk]) -> None:
        self.meter.prefill_steps += 1
        self.meter.prompt_tokens += sum(len(chunk.tokens) for chunk in chunks)

    def _count_decoded(self, counts: Collection[int]) -> None:
        self.meter.decode_steps += max(counts)
        self.meter.slot_steps += sum(counts)

    def _take(self, job: Job, token: int, logprob: float, *, complete: bool) -> None:
        """Add a token to a job, or fail the job if the token is the code of an error.

        Args:
          job: The job.
          token: Its next token, or a code such as NO_NUMBER.
          logprob: The log-probability of the token.
          complete: Whether the prompt is completely read. If not, the token is not used.
        """
        if token < 0:
            what, fix = _ERRORS[token]
            error = ServingError(
                f"request {job.number}, after {len(job.written)} tokens: {what}", fix=fix
            )
            self.scheduler.end(job, Finish.FAILED, error)
        elif complete:
            self.meter.wrote(job.number)
            job.logprobs.append(logprob)
            self._outbox.extend((job, text) for text in self.scheduler.write(job, token))

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

        If that fails after the arrays have changed, fail the requests in them.
        """
        before = getattr(self.arrays, part)
        try:
            yield
        except BaseException as error:
            if getattr(self.arrays, part) is not before or is_deleted(before):
                self._give_up(part, error)
            if self.arrays.weights_are_deleted():
                self._end_all(error)
                raise deleted_weights() from error
            raise

    def _give_up(self, part: str, cause: BaseException) -> None:
        """Fail the requests in "rows" or "slots", and replace the arrays."""
        self._fail_holding(part, cause)
        self.arrays.renew(part)
        self.scheduler.clean(**{part: range(self.arrays.size(part))})

    def _fail_holding(self, part: str, cause: BaseException) -> None:
        for job in self.scheduler.holding(part):
            error = ServingError(
                f"the cached tokens of request {job.number} were lost, because a step failed",
                fix="submit it again",
            )
            error.__cause__ = cause
            self.scheduler.end(job, Finish.FAILED, error)

    def _end_all(self, cause: BaseException) -> None:
        """Fail every request, because the weights are deleted, and empty the slots."""
        jobs = self.scheduler.jobs()
        for job in jobs:
            error = deleted_weights()
            error.__cause__ = cause
            self.scheduler.end(job, Finish.FAILED, error)
        if jobs:
            self.clean()


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
