"""Run one step of an engine: read prompts, fill slots, decode, hand out tokens. Handle failures.

The scheduler records which request owns which slot and row. The arrays are on devices. Each stage
of a step changes both the scheduler and the arrays, or neither. If a stage fails after the arrays
have changed, the requests in these arrays fail, and the arrays are replaced. The cached tokens are
in slots or in pages: the arrays and the scheduler's `space` know which, and the steps are the same
for both.

A stage begins a call, which is then in flight: the devices compute it, and the host has not fetched
its results. With `ahead`, a step fetches the results of the step before it, so the devices do not
wait for the host between two steps. Otherwise each stage fetches its own results.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from shardwright import _jax
from shardwright.caches.refusals import Refusal
from shardwright.errors import ServingError
from shardwright.serving.arguments import deleted_weights
from shardwright.serving.arrays import (
    ON_DEVICE,
    Arrays,
    CacheUsage,
    RefusalCodes,
    SequenceState,
)
from shardwright.serving.calls import Calls
from shardwright.serving.jobs import Chunk, Job, RowMove
from shardwright.serving.metrics import Meter, Report
from shardwright.serving.request import Finish
from shardwright.serving.sampling import Sampled, Tokens
from shardwright.serving.scheduler import Scheduler
from shardwright.serving.steps import MISCOUNTED, NO_NUMBER, REFUSED


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PendingCall:
    """A call in flight.

    Attributes:
      part: Name of the part of the arrays that the call changed, such as "rows".
      step: Number of the step that began the call.
      jobs: Jobs that the results belong to. If all of these jobs have ended, the results are not
        fetched.
      fetch: Function that waits for the results and returns them.
      take: Function of the results. It applies them to the jobs.
    """

    part: str
    step: int
    jobs: Sequence[Job]
    fetch: Callable[[], Any]
    take: Callable[[Any], None]


class Loop:
    """Runs the steps of an engine.

    Attributes:
      scheduler: Records which request owns which slot and row.
      arrays: The caches and the compiled functions.
      meter: Counts the requests, tokens and steps.
      stepping: Whether a step is running. Callbacks of requests run inside a step.
      canceled: Jobs to cancel. Any thread may add jobs.
      calls: The calls of the engine. If several processes run the engine, they compare these calls
        before each step.
      ahead: Whether a step begins before the results of the previous step are fetched.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        arrays: Arrays,
        meter: Meter,
        calls: Calls,
        *,
        ahead: bool,
    ) -> None:
        self.scheduler, self.arrays, self.meter, self.calls = scheduler, arrays, meter, calls
        self.ahead, self.stepping = ahead, False
        # The scheduler settles the calls in flight before it preempts a job. The job must later
        # read its own tokens again, so the host must know these tokens.
        scheduler.settle = self._settle
        self.canceled: collections.deque[Job] = collections.deque()
        self._step, self._in_flight = 0, collections.deque[PendingCall]()
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
            # If several processes run the engine, end here the jobs on whose end they have agreed.
            # Jobs whose callbacks fail in this step end in the next step, after the processes have
            # agreed on them. So `_end_unless_shared` below does not end them.
            if self.calls.are_compared:
                self._end_requested()
            self._hand_out()
            self._end_unless_shared()
            self.clean()
            self.scheduler.admit()
            # With this order, a prompt whose last chunk is read now also decodes in this step.
            self._read()
            self._fill()
            self._decode()
            # With `ahead`, the calls of this step stay in flight. The results of the previous step
            # are fetched now, while the devices compute.
            self._settle(before=self._step)
            self._end_unless_shared()
            self._drop_settled()
            self.clean()
        finally:
            self.stepping = False
            self.meter.busy += self.meter.now() - start

    def compile(self) -> None:
        """Run every compiled function once, on no requests."""
        with self._changing(self.arrays.read_part), self._changing(self.arrays.slot_part):
            self.arrays.compile()

    def end_canceled(self) -> None:
        """End the jobs in `canceled`, and empty their slots, unless a step will do that."""
        self._end_unless_shared()
        if not self.stepping and not self.calls.are_compared:
            self.clean()

    def drop_requested(self) -> None:
        """Forget the requested cancels and failures: the processes do not agree on them."""
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
        """Stop sharing pages that the old weights computed."""
        self.scheduler.space.forget()

    def report(self) -> Report:
        """Return counts and times since the engine was created."""
        scheduler = self.scheduler
        return self.meter.report(
            scheduler.limits.slots,
            shared_pages=scheduler.space.shared_pages,
            preempted=scheduler.preempted,
        )

    def usage(self) -> CacheUsage:
        """Return the number of tokens and pages that the caches hold; see `Arrays.usage`."""
        self._settle()
        scheduler, slots = self.scheduler, self.scheduler.slots
        if not self.stepping:
            self.clean()
            self._clean_rows()
        lengths = [
            scheduler.cached(slots[slot]) if slot in slots else 0
            for slot in range(scheduler.limits.slots)
        ]
        return self.arrays.usage(lengths, scheduler.space.free_pages)

    def _clean_rows(self) -> None:
        """Empty the rows of the prefill batch whose tokens no job needs.

        Without this call, the next prefill empties these rows.
        """
        new = [row for row, job in self.scheduler.rows.items() if not job.read]
        if rows := sorted({*self.scheduler.dirty_rows, *new}):
            with self._changing(self.arrays.read_part):
                self.arrays.clear_rows(rows)
                self.scheduler.clean(rows=rows)

    def clean(self) -> None:
        """Empty the slots that requests have left."""
        if slots := sorted(self.scheduler.dirty_slots):
            with self._changing(self.arrays.slot_part):
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
        """Record a call in flight; see `PendingCall`."""
        call = PendingCall(part=part, step=self._step, jobs=jobs, fetch=fetch, take=take)
        self._in_flight.append(call)

    def _settle(self, *, before: int | None = None) -> None:
        """Fetch the results of calls in flight, in order, and record them.

        Within a step, hand out the tokens of a call before the results of the next call are
        fetched, because a callback may end its request.

        Args:
          before: Settle only the calls of steps with a smaller number. None means all calls.
        """
        while self._in_flight and (before is None or self._in_flight[0].step < before):
            call = self._in_flight.popleft()
            if not _is_needed(call):
                continue
            try:
                call.take(call.fetch())
            except BaseException as error:
                # The arrays of `call.part` come from the failed call, so they are lost too.
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
        # `kept` are the rows that continue a prompt. Prefill empties the other rows first.
        kept = [row for row, job in self.scheduler.rows.items() if job.read]
        # A job that was preempted after its first token reads its text again, without its last
        # token. This token is the next one, so prefill draws none.
        first = {
            chunk.row
            for chunk in chunks
            if not chunk.job.written
            and chunk.job.read + len(chunk.tokens) == len(chunk.job.reading)
        }
        part = self.arrays.read_part
        with self._changing(part):
            sampled = self.arrays.prefill(
                {chunk.row: chunk.tokens for chunk in chunks},
                {chunk.row: self._sequence(chunk.job) for chunk in chunks},
                first=first,
                kept=kept,
            )
            self.scheduler.advance(chunks)
            for chunk in chunks:
                chunk.job.used(self.arrays.version)
                if chunk.row in first:
                    self.scheduler.expect(chunk.job, 1)
            self.meter.prefill_steps += 1
            self.meter.prompt_tokens += sum(len(chunk.tokens) for chunk in chunks)
            take = functools.partial(self._take_read, chunks, first)
            self._begin(part, [chunk.job for chunk in chunks], sampled.fetch, take)

    def _sequence(self, job: Job) -> SequenceState:
        """Return the values that a call needs of a job that has a slot."""
        assert job.slot is not None
        return SequenceState(
            slot=job.slot,
            pages=self.scheduler.space.pages(job),
            length=self.scheduler.cached(job),
            last=job.written[-1] if job.written and not job.in_flight else ON_DEVICE,
            index=len(job.written) + job.in_flight,
            limit=job.request.max_new_tokens,
            sampling=job.request.sampling,
        )

    def _take_read(self, chunks: Sequence[Chunk], first: Collection[int], sampled: Tokens) -> None:
        """Add the sampled tokens of the rows in `first`: each is the first token of its text."""
        now = self.meter.now()
        for chunk in chunks:
            job, row, is_first = chunk.job, chunk.row, chunk.row in first
            job.in_flight -= is_first
            # The code of an error fails the job after any chunk, but a token counts only after the
            # last chunk.
            if job.completion is None and (is_first or sampled.tokens[row] < 0):
                self._take(job, sampled.tokens[row], sampled.logprobs[row], now)

    def _fill(self) -> None:
        """Move each completely read prompt into its slot."""
        moves = self.scheduler.ready()
        if not moves:
            return
        # If the only token of a request is in flight, the request needs no slot any more.
        filled = [move for move in moves if self.scheduler.left(move.job, 1)]
        with self._changing(self.arrays.slot_part):
            if filled:
                codes = self.arrays.insert({move.row: self._sequence(move.job) for move in filled})
                self._begin_move(self.arrays.slot_part, filled, codes)
            self.scheduler.move([move.job for move in moves])

    def _rotate(self) -> None:
        """Give rows of the prefill batch to the prompts that wait for a row, round-robin."""
        moves = self.scheduler.expired()
        if moves:
            with self._changing(self.arrays.slot_part):
                codes = self.arrays.park({move.row: move.slot for move in moves})
                self.scheduler.park([move.job for move in moves])
                self._begin_move(self.arrays.slot_part, moves, codes)
        moves = self.scheduler.next_rows()
        if moves:
            begun = [move for move in moves if move.job.read]
            with self._changing(self.arrays.read_part):
                if begun:
                    codes = self.arrays.resume({move.row: move.slot for move in begun})
                    self._begin_move(self.arrays.read_part, begun, codes)
                self.scheduler.take(moves)

    def _begin_move(self, part: str, moves: Sequence[RowMove], codes: RefusalCodes | None) -> None:
        if codes is None:
            return
        jobs = [move.job for move in moves]
        self._begin(part, jobs, codes.fetch, functools.partial(self._fail_refused, moves))

    def _fail_refused(self, moves: Sequence[RowMove], codes: Any) -> None:
        """Fail the jobs whose tokens were refused by a cache.

        Args:
          moves: Moves of jobs between rows and slots.
          codes: Codes of `Refusal` by row of the prefill batch.
        """
        for move in moves:
            if codes[move.row]:
                meaning = Refusal(int(codes[move.row])).meaning
                error = ServingError(
                    f"slot {move.slot} refused the prompt: {meaning}",
                    fix="in the model, pass the argument valid to append_and_attend, so that no "
                    "padding is written to a slot",
                )
                self.scheduler.end(move.job, Finish.FAILED, error)

    def _decode(self) -> None:
        """Give every slot its next tokens."""
        jobs = self.scheduler.grow(self.arrays.decode_steps)
        if not jobs:
            return

        # Only `PageArrays` calls this function: `SlotArrays` keeps the state of sequences on the
        # devices.
        def sequences() -> Mapping[int, SequenceState]:
            return {slot: self._sequence(job) for slot, (job, _) in jobs.items()}

        part = self.arrays.slot_part
        with self._changing(part):
            sampled: Sampled = self.arrays.decode(sequences)
            for job, count in jobs.values():
                self.scheduler.expect(job, count)
            take = functools.partial(self._take_decoded, jobs, self.arrays.version)
            self._begin(part, [job for job, _ in jobs.values()], sampled.fetch, take)

    def _take_decoded(
        self, jobs: dict[int, tuple[Job, int]], version: int | str, sampled: Tokens
    ) -> None:
        """Add the tokens of a decode call to its jobs, except to the jobs that have ended."""
        now, counts = self.meter.now(), []
        for slot, (job, count) in jobs.items():
            job.in_flight -= count
            if job.completion is not None:
                continue
            job.used(version)
            counts.append(count)
            for at in range(count):
                # A stop sequence or an error may have ended the job at an earlier token.
                if job.completion is None:
                    self._take(job, sampled.tokens[at][slot], sampled.logprobs[at][slot], now)
            # New full pages of the job may be shared now, because their tokens are known.
            self.scheduler.wrote(job)
        # `counts` is not empty: `_settle` calls this only if one of the jobs has not ended.
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
            # If a request ended by itself, hand out its last tokens. If it was canceled or has
            # failed, hand out no more of its tokens.
            wanted = job.completion is None or job.completion.finish in (Finish.LENGTH, Finish.STOP)
            # A job whose callback has failed gets no more tokens, even if the job ends only in the
            # next step.
            failed = any(job is each for each, _ in self._failed)
            if job.request.on_token is None or not wanted or failed:
                continue
            try:
                job.request.on_token(token)
            except Exception as error:
                # The callback is code of the caller. If it raises an exception, only this request
                # fails.
                self._fail(job, error)
        self._count_ended()

    def _fail(self, job: Job, error: Exception) -> None:
        """Fail a job whose callback has raised an error.

        If several processes compare their calls, the job fails in the next step, so that all
        processes fail it together.
        """
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
        """Change the scheduler and a part of the arrays together.

        If the body of the context fails, settle the calls in flight: they began before the failure,
        so it does not affect them. If the arrays have changed by then, also fail the requests in
        them.
        """
        # If the body fails before it changes the part, the part is the same object, and its arrays
        # exist. If the body fails after that, the part was replaced, or its arrays were donated.
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
        """Replace a part of the arrays, and fail the requests that lose tokens.

        These are the jobs that the part holds, and the jobs of calls in flight that changed the
        part.

        Args:
          part: Name of the part.
          cause: The error.
          jobs: More jobs that fail.
        """
        # These calls computed with arrays that are lost, so their results are not fetched.
        failed = [call for call in self._in_flight if call.part == part]
        self._in_flight = collections.deque(call for call in self._in_flight if call.part != part)
        waiting = [job for call in failed for job in call.jobs]
        for job in (*self.scheduler.holding(part), *jobs, *waiting):
            error = ServingError(
                f"the cached tokens of request {job.number} were lost, because a step failed",
                fix="submit it again",
            )
            error.__cause__ = cause
            self.scheduler.end(job, Finish.FAILED, error)
        self.arrays.renew(part)
        numbers = range(self.arrays.size(part))
        if part == "rows":
            self.scheduler.clean(rows=numbers)
        else:
            self.scheduler.clean(slots=numbers)
            # The tree of prefixes describes the old pages, and the new pages are empty.
            self.scheduler.space.forget()

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


def _is_needed(call: PendingCall) -> bool:
    """Tell whether a job of a call has not ended, and so waits for the results."""
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
        "in the model, pass the argument valid to append_and_attend, and return done.cache",
    ),
}
