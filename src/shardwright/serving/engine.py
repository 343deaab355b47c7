"""Continuous batching: requests share slots, and finished requests free theirs immediately."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from shardwright.caches.paged.cache import PagedCache
from shardwright.caches.spec import Overflow
from shardwright.errors import ServingError
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.serving.arguments import check_kinds, deleted_weights, read_counts
from shardwright.serving.arrays import Arrays, Held, Setup, is_deleted, read_held
from shardwright.serving.loop import Loop
from shardwright.serving.metrics import Meter, Report
from shardwright.serving.request import Completion, Finish, Request
from shardwright.serving.scheduler import Job, Limits, Phase, Scheduler
from shardwright.serving.steps import CacheShape, Model
from shardwright.serving.weights import Update


class Handle:
    """A request that an engine has accepted.

    Iterate over it to get its tokens as they come; the iteration drives the engine. If the request
    fails, the iteration raises a ServingError after the tokens that were written.
    """

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self._job = engine, job

    @property
    def request(self) -> Request:
        """The request."""
        return self._job.request

    @property
    def phase(self) -> Phase:
        """Where the request is."""
        return self._job.phase

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens written so far, without those that may still become a stop sequence."""
        return tuple(self._job.text)

    @property
    def completion(self) -> Completion | None:
        """How the request ended, or None if it has not."""
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
            # The tokens of a failed request must not look like a complete text.
            raise ServingError(
                f"request {self._job.number} failed after {len(self._job.text)} tokens: "
                f"{type(error).__name__}: {error}",
                path="request",
                fix="result() returns the tokens that were written, and the error, without raising",
            ) from error

    def result(self) -> Completion:
        """Drive the engine until the request has ended, and return how it ended."""
        while self._job.completion is None:
            self._engine.step()
        return self._job.completion

    def cancel(self) -> bool:
        """End the request in any phase; return False if it had ended already."""
        return self._engine.cancel(self)


class Engine:
    """Serves a model.

    The text of a request depends on its prompt, its sampling and the weights, never on other
    requests. Every `step` reads one chunk of each prompt in the prefill batch, moves prompts that
    are completely read into slots, and gives every slot its next token.

    One thread at a time may use an engine. A second thread that calls it meanwhile gets a
    ServingError.

    Attributes:
      vocabulary: Number of tokens that the model has logits for.
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
        """Create the caches. The steps are compiled by `compile`, or by the first request.

        Args:
          model: See `Model`. Under a manager it is called in prefill mode and in decode mode.
          params: The weights, sharded by the manager.
          shape: What the model stores in a cache.
          slots: Sequences that are decoded together.
          capacity: Tokens of a slot, including the prompt. Defaults to the window of a sliding
            cache.
          cache: "dense", "sliding", "quantized" or "paged".
          cache_options: Options of that kind of cache, such as `page_size` and `pages`; see
            `caches.init`.
          manager: Shards the caches of decode. Defaults to the ambient one, if any.
          prefill_manager: Shards the caches of prefill, possibly on another mesh. Defaults to
            `manager`.
          prefill_params: The weights, sharded by `prefill_manager`. Defaults to `params`.
          prefill_rows: Prompts that are read together.
          prefill_chunk: Tokens of a prompt that are read between two decode steps.
          queue: Requests that may wait for a slot.
          clock: Returns the time in seconds, for the report.

        Raises:
          ServingError: Invalid arguments, or a model that does not follow `Model`.
          CacheError: Sizes or options that the cache does not support.
          ShardingError: The rules do not fit the sizes.
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
        setup = Setup(
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
        if is_deleted((setup.params, setup.prefill_params)):
            raise deleted_weights()
        self._arrays = Arrays(setup)
        self._scheduler = Scheduler(_limits(setup, self._arrays, counts["queue"]))
        self.vocabulary = self._arrays.vocabulary()
        self._meter = Meter(clock)
        self._loop = Loop(self._scheduler, self._arrays, self._meter)
        self._numbers = itertools.count()
        self._turn = threading.RLock()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self._loop.idle

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a slot."""
        return len(self._scheduler.queue)

    def submit(self, request: Request) -> Handle:
        """Accept a request.

        Raises:
          ServingError: The request could never be served, or another thread is in a call.
          QueueFullError: The queue is full; try again after a `step`.
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
        """End a request in any phase; return False if it had ended already.

        Raises:
          ServingError: `handle` is not a handle of this engine, or another thread is in a call.
        """
        if not isinstance(handle, Handle):
            _raise_wrong_handle(f"it is {type(handle).__name__}, not a handle")
        if handle._engine is not self:
            _raise_wrong_handle("it belongs to another engine")
        with self._alone("cancel"):
            job = handle._job
            if job.completion is not None:
                return False
            self._scheduler.end(job, Finish.CANCELED)
            if not self._loop.stepping:
                self._loop.clean()
            return True

    def run(self, requests: Iterable[Request]) -> list[Completion]:
        """Serve requests until all have ended; return how each ended.

        Raises:
          ServingError: A request could never be served. Then no request is accepted.
        """
        if not isinstance(requests, Iterable) or isinstance(requests, (str, bytes)):
            raise ServingError(
                f"requests is {type(requests).__name__}",
                path="requests",
                fix="pass a list of serving.Request(...)",
            )
        batch = list(requests)
        for request in batch:
            self._check(request)
        handles = []
        for request in batch:
            while self.waiting >= self._scheduler.limits.queue:
                self.step()
            handles.append(self.submit(request))
        return [handle.result() for handle in handles]

    def step(self) -> bool:
        """Read a chunk of every prompt, and give every slot its next token.

        A step may raise an error, for instance one of the model. Then the requests whose caches
        were lost have failed, and the others continue with the next step.

        Returns:
          Whether there is more to do.

        Raises:
          ServingError: It was called from a callback of a request.
        """
        with self._alone("step"):
            if self._loop.stepping:
                raise ServingError(
                    "step() was called from within a step",
                    path="on_token",
                    fix="submit and cancel from a callback, do not step",
                )
            self._loop.step()
            return not self.idle

    @property
    def version(self) -> int | str:
        """Version of the weights; 0 until the first update."""
        return self._arrays.version

    def update_params(
        self,
        params: Any,
        *,
        version: int | str | None = None,
        prefill_params: Any = None,
        donate: bool = False,
        piece: int | str = "64MiB",
    ) -> Update:
        """Replace the weights between two steps. Requests continue, and nothing is compiled.

        The new weights move to the shardings and the dtype of the old ones, as `pm.reshard` moves
        them. The engine serves the old weights until all new ones have arrived, and keeps the old
        ones if the move fails. The caches keep what the old weights wrote. `Completion.versions`
        lists the versions that a request was computed with.

        Args:
          params: A tree like the params of the engine, on any mesh, or in the memory of the host.
          version: An integer or a text other than the current one. Defaults to the next integer.
          prefill_params: A tree like the `prefill_params` of the engine, if it has some. Defaults
            to `params`.
          donate: Delete the arrays of `params` and `prefill_params` as they move. The engine keeps
            the arrays that are already in place, so do not use them afterwards. Without `donate`,
            the engine copies those, so that a training step may donate `params` later.
          piece: Bytes that move at a time; see `pm.reshard`.

        Returns:
          The version, and the plans with the bytes sent.

        Raises:
          ServingError: The trees differ, the version is not new, or the call comes from a callback
            or from a second thread.
          MoveError: The move failed; the engine serves the old weights.
        """
        with self._alone("update_params"):
            if self._loop.stepping:
                raise ServingError(
                    "update_params() was called from within a step",
                    path="on_token",
                    fix="update the weights between two steps, not from a callback",
                )
            return self._arrays.update_weights(
                params, prefill_params, version, piece=piece, donate=donate
            )

    def compile(self) -> None:
        """Compile everything now. Otherwise the first request waits while the engine compiles.

        Raises:
          ServingError: Requests have slots already, or another thread is in a call.
        """
        with self._alone("compile"):
            if self._loop.stepping or self._scheduler.slots or self._scheduler.dirty_slots:
                # Compiling runs every function once, which would give active slots a token.
                raise ServingError(
                    "compile() was called while the engine is in use (requests in slots: "
                    f"{len(self._scheduler.slots)})",
                    path="compile",
                    fix="compile before the first step, or when the engine is idle",
                )
            self._loop.compile()

    def report(self) -> Report:
        """Return counts and times since the engine was created."""
        return self._meter.report(self._scheduler.limits.slots)

    def held(self) -> Held:
        """Return how many tokens the caches hold now, read from the devices."""
        with self._alone("held"):
            return read_held(self._arrays)

    @contextlib.contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        """Refuse a second thread: it must not see a half-finished step."""
        if not self._turn.acquire(blocking=False):
            raise ServingError(
                f"{call}() was called while another thread is in a call of this engine",
                path="engine",
                fix="let one thread own the engine and pass it requests through a queue.Queue, or "
                "guard every call with one lock",
            )
        try:
            yield
        finally:
            self._turn.release()

    def _check(self, request: Request) -> None:
        if not isinstance(request, Request):
            raise ServingError(
                f"it is {type(request).__name__}, not a request",
                path="request",
                fix="pass serving.Request(prompt=..., max_new_tokens=...)",
            )
        stop = [token for sequence in request.stop_sequences for token in sequence]
        for name, tokens in (("prompt", request.prompt), ("stop", stop)):
            unknown = next((token for token in tokens if token >= self.vocabulary), None)
            if unknown is not None:
                raise ServingError(
                    f"token {unknown} is out of range: the model has {self.vocabulary} tokens",
                    path=name,
                    size=unknown,
                    fix="encode the text with the tokenizer of the model",
                )
        self._scheduler.limits.check(request)


def _raise_wrong_handle(what: str) -> NoReturn:
    raise ServingError(
        what, path="handle", fix="call handle.cancel(), which calls the engine of the handle"
    )


def _limits(setup: Setup, arrays: Arrays, queue: int) -> Limits:
    """Return what requests share, read from the caches."""
    first = arrays.slots.caches[0]
    if first.spec.overflow is Overflow.ERROR:
        raise ServingError(
            'overflow="error" is not supported: a compiled step cannot raise',
            path="cache_options",
            fix="leave overflow out",
        )
    limits = Limits(
        slots=setup.slots,
        capacity=None if first.spec.is_ring else first.spec.capacity,
        prefill_rows=setup.prefill_rows,
        chunk=setup.chunk,
        queue=queue,
    )
    if isinstance(first, PagedCache):
        pages = first.references.shape[0]
        limits = dataclasses.replace(limits, pages=pages, page_size=first.page_size)
    return limits
