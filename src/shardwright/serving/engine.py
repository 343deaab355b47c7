"""Continuous batching: prompts are read chunk by chunk, in between all slots write a token, and who is done makes room at once."""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from shardwright.caches.paged.cache import PagedCache
from shardwright.caches.refusals import Refusal
from shardwright.caches.spec import Overflow
from shardwright.errors import ServingError
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.serving.arguments import check_kinds, deleted_weights, read_counts
from shardwright.serving.arrays import Board, Held, Plan, is_gone, read_held
from shardwright.serving.metrics import Meter, Report
from shardwright.serving.request import Completion, Finish, Request
from shardwright.serving.scheduler import Job, Limits, Phase, Scheduler
from shardwright.serving.steps import MISCOUNTED, NO_NUMBER, REFUSED, CacheShape, Model


class Handle:
    """A request that an engine has taken on.

    Iterate over it for its tokens, as they come; that drives the engine. Where the request fails, so does the iteration, with a
    ServingError after the tokens that were written.
    """

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self._job = engine, job

    @property
    def request(self) -> Request:
        """What was asked for."""
        return self._job.request

    @property
    def phase(self) -> Phase:
        """Where the request is."""
        return self._job.phase

    @property
    def tokens(self) -> tuple[int, ...]:
        """What has been written so far, without what may yet become a stop sequence."""
        return tuple(self._job.text)

    @property
    def completion(self) -> Completion | None:
        """What became of the request, or None before it has ended."""
        return self._job.completion

    def __iter__(self) -> Iterator[int]:
        for at in itertools.count():
            while at >= len(self._job.text) and self._job.completion is None:
                self._engine.step()
            if at >= len(self._job.text):
                break
            yield self._job.text[at]
        error = None if self._job.completion is None else self._job.completion.error
        if error is not None:
            # A text that stops short must not look like one that has ended.
            what = f"request {self._job.number} failed after {len(self._job.text)} tokens: {type(error).__name__}: {error}"
            raise ServingError(
                what,
                path="request",
                fix="result() returns what was written, and the error, without raising",
            ) from error

    def result(self) -> Completion:
        """Drive the engine until the request has ended, and return what became of it."""
        while self._job.completion is None:
            self._engine.step()
        return self._job.completion

    def cancel(self) -> bool:
        """End the request wherever it is; return False if it had ended already."""
        return self._engine.cancel(self)


class Engine:
    """Serves a model. One thread at a time may use it; a second one that comes while the first is in a call gets a ServingError.

    What a request writes depends on its prompt, its sampling and the weights, never on the requests beside it. Every `step` reads
    one chunk of each prompt in the prefill batch, moves those that are read into slots, and gives every slot its next token.

    Attributes:
      vocabulary: number of tokens that the model tells apart.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        *,
        shape: CacheShape,
        slots: int,
        capacity: int | None = None,
        cache: str = "dense",
        cache_options: Mapping[str, Any] = MappingProxyType({}),
        manager: PartitionManager | None = None,
        prefill_manager: PartitionManager | None = None,
        prefill_params: Any = None,
        prefill_rows: int = 1,
        prefill_chunk: int = 64,
        queue: int = 1024,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make the caches; the rest is compiled by the first request, or by `compile`.

        Args:
          model: what is served; see `Model`. Under a manager it is called in prefill mode and in decode mode.
          params: its weights, placed as the manager says.
          shape: what it keeps of a token.
          slots: sequences that are decoded together.
          capacity: tokens of a slot, prompt included; absent: of a sliding cache, the window.
          cache: "dense", "sliding", "quantized" or "paged".
          cache_options: of that kind, such as `page_size` and `pages`; see `caches.init`.
          manager: whose strategy says where things lie; absent: the ambient one, if any.
          prefill_manager: for prefill, which may have a mesh of its own; absent: `manager`.
          prefill_params: the weights as it places them; absent: `params`.
          prefill_rows: prompts that are read together.
          prefill_chunk: tokens of a prompt that are read between two decode steps.
          queue: requests that may wait for a slot.
          clock: what tells the time for the report, in seconds.

        Raises:
          ServingError: arguments that make no sense, or a model that does not do what `Model` says.
          CacheError: sizes or options that the cache does not take.
          ShardingError: what the rules say does not fit the sizes.
        """
        check_kinds(
            model=model,
            shape=shape,
            cache_options=cache_options,
            clock=clock,
            manager=manager,
            prefill_manager=prefill_manager,
        )
        counts = {
            "slots": slots,
            "prefill_rows": prefill_rows,
            "prefill_chunk": prefill_chunk,
            "queue": queue,
            "layers": shape.layers,
        }
        counts = read_counts(counts, manager=manager, prefill_manager=prefill_manager)
        manager = context.current() if manager is None else manager
        plan = Plan(
            model=model,
            params=params,
            manager=manager,
            prefill_manager=manager if prefill_manager is None else prefill_manager,
            prefill_params=params if prefill_params is None else prefill_params,
            shape=shape,
            kind=cache,
            options=cache_options,
            slots=counts["slots"],
            capacity=capacity,
            prefill_rows=counts["prefill_rows"],
            chunk=counts["prefill_chunk"],
        )
        if is_gone((plan.params, plan.prefill_params)):
            raise deleted_weights()
        self._board = Board(plan)
        self._scheduler = Scheduler(_limits(plan, self._board, counts["queue"]))
        self.vocabulary = self._board.vocabulary()
        self._meter = Meter(clock)
        self._numbers = itertools.count()
        self._outbox: collections.deque[tuple[Job, int]] = collections.deque()
        self._stepping = False
        self._turn = threading.RLock()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self._scheduler.idle and not self._outbox

    @property
    def waiting(self) -> int:
        """The requests that wait for a slot."""
        return len(self._scheduler.queue)

    def submit(self, request: Request) -> Handle:
        """Take a request on.

        Raises:
          ServingError: it could never be served, or another thread is in a call.
          QueueFullError: as many wait as may; try again after a `step`.
        """
        with self._alone("submit"):
            job = Job(number=next(self._numbers), request=request)
            try:
                self._check(request)
                self._scheduler.submit(job)
            except ServingError:
                self._meter.refused += 1
                raise
            self._meter.submitted(job.number)
            return Handle(self, job)

    def cancel(self, handle: Handle) -> bool:
        """End a request wherever it is; return False if it had ended already.

        Raises:
          ServingError: it is no handle of this engine, or another thread is in a call.
        """
        if not isinstance(handle, Handle) or handle._engine is not self:
            what = (
                "it is of another engine"
                if isinstance(handle, Handle)
                else f"it is {type(handle).__name__}, not a handle"
            )
            raise ServingError(
                what, path="handle", fix="call cancel() of the handle, which knows its engine"
            )
        with self._alone("cancel"):
            job = handle._job
            if job.completion is not None:
                return False
            self._scheduler.end(job, Finish.CANCELLED)
            if not self._stepping:
                self._clean()
            return True

    def run(self, requests: Iterable[Request]) -> list[Completion]:
        """Serve requests to their ends; return what became of each.

        Raises:
          ServingError: one of them could never be served; before any is taken on.
        """
        if not isinstance(requests, Iterable) or isinstance(requests, (str, bytes)):
            raise ServingError(
                f"requests is {type(requests).__name__}",
                path="requests",
                fix="pass a list of serving.Request(...)",
            )
        given = list(requests)
        for request in given:
            self._check(request)
        handles = []
        for request in given:
            while self.waiting >= self._scheduler.limits.queue:
                self.step()
            handles.append(self.submit(request))
        return [handle.result() for handle in handles]

    def step(self) -> bool:
        """Read a chunk of every prompt, write a token in every slot; return whether there is more to do.

        If it raises, as where the model does, requests whose state the failure took with it have failed, and all others go on with
        the next call.

        Raises:
          ServingError: it was called from a callback of a request.
        """
        with self._alone("step"):
            if self._stepping:
                fix = "submit and cancel from a callback, do not step"
                raise ServingError("step() was called from within a step", path="on_token", fix=fix)
            self._stepping, begun = True, self._meter.now()
            try:
                self._hand_out()
                self._clean()
                self._scheduler.admit()
                self._read()
                self._fill()
                self._hand_out()
                self._write()
                self._hand_out()
                self._clean()
            finally:
                self._stepping = False
                self._meter.busy += self._meter.now() - begun
            return not self.idle

    def compile(self) -> None:
        """Compile everything now, so that the first request does not wait for it, as it otherwise does.

        Raises:
          ServingError: requests have slots already, or another thread is in a call.
        """
        with self._alone("compile"):
            if self._stepping or self._scheduler.slots or self._scheduler.dirty_slots:
                # What is run to be compiled would give active slots a token, which no request would get.
                what = f"compile() was called while {len(self._scheduler.slots)} requests are on their way"
                raise ServingError(
                    what,
                    path="compile",
                    fix="compile before the first step, or when the engine is idle",
                )
            with self._changing("rows"), self._changing("slots"):
                self._board.compile()

    def report(self) -> Report:
        """Return what was done so far."""
        return self._meter.report(self._scheduler.limits.slots)

    def held(self) -> Held:
        """Return what the caches hold now, read from the devices."""
        with self._alone("held"):
            return read_held(self._board)

    @contextlib.contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        """Refuse a second thread: books and arrays change together, and half a step is no state to be seen."""
        if not self._turn.acquire(blocking=False):
            fix = "let one thread own the engine and hand it requests through a queue.Queue, or guard every call with one lock"
            raise ServingError(
                f"{call}() was called while another thread is in a call of this engine",
                path="engine",
                fix=fix,
            )
        try:
            yield
        finally:
            self._turn.release()

    def _check(self, request: Request) -> None:
        if not isinstance(request, Request):
            what = f"it is {type(request).__name__}, not a request"
            raise ServingError(
                what, path="request", fix="pass serving.Request(prompt=..., max_new_tokens=...)"
            )
        for name, tokens in (
            ("prompt", request.prompt),
            ("stop", [token for one in request.stop for token in _sequence(one)]),
        ):
            wrong = next((token for token in tokens if token >= self.vocabulary), None)
            if wrong is not None:
                fix = "encode the text with the tokenizer of the model"
                raise ServingError(
                    f"token {wrong}, and the model has {self.vocabulary} tokens",
                    path=name,
                    size=wrong,
                    fix=fix,
                )
        self._scheduler.limits.check(request)

    # The parts of a step: each changes arrays and books together.

    def _read(self) -> None:
        chunks = self._scheduler.chunks()
        if not chunks:
            return
        with self._changing("rows"):
            sampling = {chunk.row: chunk.job.request.sampling for chunk in chunks}
            found = np.asarray(
                self._board.prefill({chunk.row: chunk.tokens for chunk in chunks}, sampling)
            )
            self._scheduler.advance(chunks)
            self._meter.prefill_steps += 1
            self._meter.prompt_tokens += sum(len(chunk.tokens) for chunk in chunks)
            read = {move.row for move in self._scheduler.ready()}
            for chunk in chunks:
                self._take(chunk.job, int(found[chunk.row]), last=chunk.row in read)

    def _fill(self) -> None:
        moves = self._scheduler.ready()
        if not moves:
            return
        with self._changing("slots"):
            first = {move.row: move.job.written[-1] for move in moves}
            sampling = {move.row: move.job.request.sampling for move in moves}
            codes = np.asarray(
                self._board.insert({move.row: move.slot for move in moves}, first, sampling)
            )
            for move in moves:
                if codes[move.row]:
                    what = (
                        f"slot {move.slot} took no prompt: {Refusal(int(codes[move.row])).meaning}"
                    )
                    fix = "let the model pass valid= on: what is no token must not fill a slot"
                    self._scheduler.end(move.job, Finish.FAILED, ServingError(what, fix=fix))
            self._scheduler.move([move.job for move in moves if not codes[move.row]])

    def _write(self) -> None:
        jobs = self._scheduler.decoding()
        if not jobs:
            return
        with self._changing("slots"):
            found = np.asarray(self._board.decode())
            self._meter.decode_steps += 1
            self._meter.slot_steps += len(jobs)
            for slot, job in jobs.items():
                self._take(job, int(found[slot]), last=True)

    def _take(self, job: Job, token: int, *, last: bool) -> None:
        """Give a job what was found for it: a token, if it is that after all it has read, or what went wrong."""
        if token < 0:
            what, fix = _WRONG[token]
            said = ServingError(
                f"request {job.number}, after {len(job.written)} tokens: {what}", fix=fix
            )
            self._scheduler.end(job, Finish.FAILED, said)
        elif last:
            self._meter.wrote(job.number)
            self._outbox.extend((job, one) for one in self._scheduler.write(job, token))

    def _hand_out(self) -> None:
        while self._outbox:
            job, token = self._outbox.popleft()
            wanted = job.completion is None or job.completion.finish in (Finish.LENGTH, Finish.STOP)
            if job.request.on_token is None or not wanted:
                continue
            try:
                job.request.on_token(token)
            except (
                Exception
            ) as error:  # it is the caller's: whatever it raises concerns that request alone
                self._scheduler.fail(job, error)
        for job, finish in self._scheduler.take_ended():
            self._meter.ended(job.number, finish)

    def _clean(self) -> None:
        rows, slots = sorted(self._scheduler.dirty_rows), sorted(self._scheduler.dirty_slots)
        if rows:
            with self._changing("rows"):
                self._board.clear_rows(rows)
                self._scheduler.clean(rows=rows)
        if slots:
            with self._changing("slots"):
                self._board.clear_slots(slots)
                self._scheduler.clean(slots=slots)
        for job, finish in self._scheduler.take_ended():
            self._meter.ended(job.number, finish)

    @contextlib.contextmanager
    def _changing(self, part: str) -> Iterator[None]:
        """Change arrays and books together: where only one of them could be, what the arrays held is given up."""
        before = getattr(self._board, part)
        try:
            yield
        except BaseException as error:
            if getattr(self._board, part) is not before or is_gone(before):
                self._give_up(part, error)
            if self._board.weights_are_gone():
                self._end_all(error)
                raise deleted_weights() from error
            raise

    def _end_all(self, cause: BaseException) -> None:
        """End every request, since no later step can serve one without weights, and empty what they held."""
        jobs = self._scheduler.jobs()
        for job in jobs:
            lost = deleted_weights()
            lost.__cause__ = cause
            self._scheduler.end(job, Finish.FAILED, lost)
        if jobs:
            self._clean()

    def _give_up(self, part: str, cause: BaseException) -> None:
        for job in self._scheduler.holding(part):
            lost = ServingError(
                f"request {job.number} lost what it had in the {part}, since a step failed",
                fix="submit it again",
            )
            lost.__cause__ = cause
            self._scheduler.end(job, Finish.FAILED, lost)
        self._board.renew(part)
        self._scheduler.clean(**{part: range(self._board.size(part))})


_WRONG = {
    NO_NUMBER: (
        "the logits are not numbers",
        "look at the weights, and at what the model does for these tokens",
    ),
    REFUSED: (
        "a cache refused its tokens",
        "return done.cache, where done is what append_and_attend gives, of every layer",
    ),
    MISCOUNTED: (
        "the caches grew by other than the tokens read",
        "pass valid= on to append_and_attend, and return done.cache",
    ),
}


def _limits(plan: Plan, board: Board, queue: int) -> Limits:
    first = board.slots.caches[0]
    if first.spec.overflow is Overflow.ERROR:
        raise ServingError(
            'overflow="error" raises inside a compiled step',
            path="cache_options",
            fix="leave overflow out",
        )
    pages = first.references.shape[0] if isinstance(first, PagedCache) else None
    return Limits(
        slots=plan.slots,
        capacity=None if first.spec.is_ring else first.spec.capacity,
        prefill_rows=plan.prefill_rows,
        chunk=plan.chunk,
        queue=queue,
        pages=pages,
        page_size=first.page_size if isinstance(first, PagedCache) else 1,
    )


def _sequence(one: int | Sequence[int]) -> Sequence[int]:
    return one if isinstance(one, Sequence) else (one,)
