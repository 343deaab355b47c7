"""Continuous batching: requests share slots, and a finished request frees its slot immediately."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from shardwright.errors import ServingError
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.serving.arguments import read_arguments
from shardwright.serving.arrays import CacheUsage
from shardwright.serving.create import make_loop
from shardwright.serving.jobs import Job, Phase
from shardwright.serving.metrics import Meter, Report
from shardwright.serving.request import Completion, Request
from shardwright.serving.setup import Setup, placed
from shardwright.serving.steps import CacheShape, Model
from shardwright.serving.threads import StepLock
from shardwright.serving.weights import Update


class Handle:
    """A request that an engine has accepted.

    An iteration over a handle yields the tokens of the request as they come, and runs the steps of
    the engine. With `async for`, a thread of the engine runs the steps. If the request fails, the
    iteration raises a ServingError after the tokens that were written. A task that leaves the
    iteration early does not end the request. To end it, call `cancel`.
    """

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self._job = engine, job

    @property
    def request(self) -> Request:
        """The request."""
        return self._job.request

    @property
    def phase(self) -> Phase:
        """The phase of the request."""
        return self._job.phase

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens written so far, without the last ones if these may become a stop sequence."""
        return tuple(self._job.text)

    @property
    def completion(self) -> Completion | None:
        """The result of the request, or None if it has not ended."""
        return self._job.completion

    def __iter__(self) -> Iterator[int]:
        for at in itertools.count():
            self._engine._lock.until(functools.partial(self._has, at))
            if at >= len(self._job.text):
                break
            yield self._job.text[at]
        self._raise_failure()

    async def __aiter__(self) -> AsyncIterator[int]:
        for at in itertools.count():
            await self._engine._lock.until_async(functools.partial(self._has, at))
            if at >= len(self._job.text):
                break
            yield self._job.text[at]
        self._raise_failure()

    def result(self) -> Completion:
        """Run steps until the request has ended, and return its result."""
        self._engine._lock.until(self._has_ended, whole=True)
        assert self._job.completion is not None
        return self._job.completion

    async def wait(self) -> Completion:
        """Return the result of the request, as `result` does, without blocking the event loop."""
        await self._engine._lock.until_async(self._has_ended, whole=True)
        assert self._job.completion is not None
        return self._job.completion

    def _has_ended(self) -> bool:
        return self._job.completion is not None

    def _has(self, at: int) -> bool:
        """Return True if token number `at` of the text is written, or will never be written."""
        return self._has_ended() or at < len(self._job.text)

    def _raise_failure(self) -> None:
        """Raise the error of a failed request: its tokens must not look like a complete text."""
        error = None if self._job.completion is None else self._job.completion.error
        if error is not None:
            raise ServingError(
                f"request {self._job.number} failed after {len(self._job.text)} tokens: "
                f"{type(error).__name__}: {error}",
                path="request",
                fix="result() returns the tokens that were written, and the error, without raising",
            ) from error

    def cancel(self) -> bool:
        """End the request in any phase. Return False if it had already ended."""
        return self._engine.cancel(self)


class Engine:
    """Serves a model.

    The text of a request depends only on its prompt, its sampling and the weights, not on other
    requests. Every `step` reads one chunk of each prompt in the prefill batch, moves each
    completely read prompt into its slot, and gives every slot its next token.

    Any thread may call an engine. `submit` and `cancel` do not wait for a running step. The other
    calls wait until no step is running. If the mesh spans processes, make the same calls in every
    process, in the same order. Each step compares the calls of the processes.

    Attributes:
      vocabulary: Number of tokens for which the model has logits.
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
        decode_steps: int = 1,
        ahead: bool = True,
        queue: int = 1024,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create the caches. The steps are compiled by `compile`, or by the first request.

        Args:
          model: See `Model`. It is called under the manager, in prefill mode and in decode mode.
          params: The weights, sharded by the manager.
          shape: Sizes of the keys and values that the model stores in a cache.
          slots: Number of sequences that are decoded together.
          capacity: Largest number of tokens in a slot, with the prompt. Defaults to the window of a
            sliding cache.
          cache: "dense", "sliding", "quantized" or "paged".
          cache_options: Options of that kind of cache, such as `page_size` and `pages`; see
            `caches.init`. With `pages="90%"`, the pool has as many pages as fit while at most 90 %
            of the memory of each device is in use. `memory="16GiB"` states the memory of a device
            that does not report it.
          manager: Shards the caches of decode. Defaults to the ambient one, if any.
          prefill_manager: Shards the caches of prefill, possibly on another mesh. Defaults to
            `manager`.
          prefill_params: The weights, sharded by `prefill_manager`. Defaults to `params`.
          prefill_rows: Number of prompts that are read together.
          prefill_chunk: Number of tokens of a prompt that are read between two decode steps.
          decode_steps: Largest number of tokens that a slot gets in one step. New requests and
            cancels wait for these tokens.
          ahead: Whether a step begins before the tokens of the previous step are fetched, so that
            the devices need not wait for the host. With `ahead`, a token is known one step later.
          queue: Largest number of requests that may wait for a slot.
          clock: Returns the time in seconds, for the report.

        Raises:
          ServingError: An argument is invalid, or the model is not as `Model` describes.
          CacheError: The cache does not support the sizes or options.
          ShardingError: The rules do not fit the sizes.
        """
        read = read_arguments(
            model=model,
            shape=shape,
            cache_options=cache_options,
            clock=clock,
            ahead=ahead,
            manager=manager,
            prefill_manager=prefill_manager,
            slots=slots,
            prefill_rows=prefill_rows,
            prefill_chunk=prefill_chunk,
            decode_steps=decode_steps,
            queue=queue,
        )
        manager = context.current() if manager is None else manager
        params, prefill_params, device = placed(params, prefill_params, manager)
        setup = Setup(
            model=model,
            params=params,
            manager=manager,
            prefill_manager=manager if prefill_manager is None else prefill_manager,
            prefill_params=params if prefill_params is None else prefill_params,
            shape=shape,
            kind=cache,
            options=cache_options,
            slots=read["slots"],
            capacity=capacity,
            prefill_rows=read["prefill_rows"],
            chunk=read["prefill_chunk"],
            decode_steps=read["decode_steps"],
            device=device,
        )
        self._meter = Meter(clock)
        self._loop = make_loop(setup, self._meter, queue=read["queue"], ahead=ahead)
        self._arrays, self._scheduler = self._loop.arrays, self._loop.scheduler
        # This traces the model, so a wrong model is refused here and not in the first step.
        self.vocabulary: int = self._arrays.vocabulary()
        self._numbers = itertools.count()
        self._lock = StepLock(self._loop, self._loop.calls)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self._loop.idle

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a slot."""
        return self._scheduler.waiting

    def submit(self, request: Request) -> Handle:
        """Accept a request.

        Raises:
          ServingError: The request could never be served.
          QueueFullError: The queue is full. Try again after a `step`.
        """
        # One lock covers numbering and queueing, so a request with a lower number is also earlier
        # in the queue.
        with self._lock.order:
            try:
                self._check(request)
                self._scheduler.check_queue()
            except ServingError:
                self._meter.refused += 1
                raise
            job = Job(number=next(self._numbers), request=request)
            # Count the request first: another thread may serve it as soon as it is in the queue.
            self._meter.submitted(job.number)
            self._scheduler.submit(job)
            self._lock.calls.submitted(job.number, request)
            return Handle(self, job)

    def cancel(self, handle: Handle) -> bool:
        """End a request in any phase. Return False if it had already ended.

        While another thread runs a step, the request ends with that step. If that step writes the
        last token of the request, the `finish` of the request is not `canceled`. If several
        processes run the engine, the request ends in the next step, after the processes have
        compared their calls.

        Raises:
          ServingError: `handle` is not a handle of this engine.
        """
        if not isinstance(handle, Handle):
            _raise_wrong_handle(f"it is {type(handle).__name__}, not a handle")
        if handle._engine is not self:
            _raise_wrong_handle("it belongs to another engine")
        job = handle._job
        if job.completion is not None:
            return False
        self._loop.canceled.append(job)
        self._lock.calls.canceled(job.number)
        with self._lock.if_free() as is_free:
            if is_free:
                self._loop.end_canceled()
        return True

    def run(self, requests: Iterable[Request]) -> list[Completion]:
        """Serve requests until all have ended. Return the result of each.

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
            handle: Handle | None = None
            while handle is None:
                self._lock.until(self._has_room)
                # Another thread may have filled the queue again.
                with self._lock.order:
                    handle = self.submit(request) if self._has_room() else None
            handles.append(handle)
        return [handle.result() for handle in handles]

    def _has_room(self) -> bool:
        return self.waiting < self._scheduler.limits.queue

    def step(self) -> bool:
        """Read a chunk of every prompt, and give every slot its next token.

        A step may raise an error, for instance an error of the model. Then the requests whose
        caches were lost have failed, and the others continue with the next step.

        Returns:
          Whether there is more to do.

        Raises:
          ServingError: The call comes from a callback of a request.
        """
        with self._lock:
            self._lock.step()
            return not self.idle

    @property
    def version(self) -> int | str:
        """Version of the weights; 0 until the first update."""
        version: int | str = self._arrays.version
        return version

    def update_params(
        self,
        params: Any,
        *,
        version: int | str | None = None,
        prefill_params: Any = None,
        donate: bool = False,
        piece: int | str = "64MiB",
    ) -> Update:
        """Replace the weights between two steps.

        Requests that are running continue, and nothing is compiled. As `pm.reshard` does, the
        engine moves the new weights to the shardings and the dtype of the old ones. It serves the
        old weights until all new weights have arrived, and keeps the old weights if the move fails.
        The caches keep the keys and values of the old weights. `Completion.versions` lists the
        versions that a request was computed with.

        Args:
          params: A tree like the params of the engine, on any mesh, or in the memory of the host.
          version: An integer or a text other than the current one. Defaults to the next integer.
          prefill_params: A tree like the `prefill_params` of the engine, if it has some. Defaults
            to `params`.
          donate: Delete the arrays of `params` and `prefill_params` as they move. The engine keeps
            the arrays that are already in place, so do not use them afterwards. Without `donate`,
            the engine copies these arrays, so that a training step may donate `params` later.
          piece: Bytes that move at a time; see `pm.reshard`.

        Returns:
          The version, and the plans with the bytes sent.

        Raises:
          ServingError: The trees differ, the version is not new, or the call comes from a callback.
          MoveError: The move failed. The engine serves the old weights. Pass `error.tree` to resume
            the move. If `prefill_params` was given, this tree is a dict of both arguments.
        """
        with self._lock:
            if self._loop.stepping:
                raise ServingError(
                    "update_params() was called from within a step",
                    path="on_token",
                    fix="update the weights between two steps, not from a callback",
                )
            update: Update = self._arrays.update_weights(
                params, prefill_params, version, piece=piece, donate=donate
            )
            self._loop.forget()
            self._lock.calls.updated(update.version)
            return update

    def compile(self) -> None:
        """Compile all steps now. Otherwise the first request waits while the engine compiles.

        Raises:
          ServingError: Some requests already have slots.
        """
        with self._lock:
            if self._loop.stepping or self._scheduler.slots:
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
        with self._lock:
            return self._loop.report()

    def cache_usage(self) -> CacheUsage:
        """Return the number of tokens and pages that the caches hold now."""
        with self._lock:
            return self._loop.usage()

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
