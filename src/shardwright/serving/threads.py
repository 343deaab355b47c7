"""Decide which thread runs the next step. Threads and tasks that wait for tokens share steps."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from shardwright.errors import AgreementError, ServingError
from shardwright.serving.calls import Calls
from shardwright.serving.loop import Loop


class StepLock:
    """The lock of an engine. Whoever holds it may run a step.

    Attributes:
      order: Lock of the queue, held while a request is submitted.
      calls: The calls since the last step, which processes compare.
    """

    def __init__(self, loop: Loop, calls: Calls) -> None:
        self.order = threading.RLock()
        self._loop, self.calls = loop, calls
        # The lock is reentrant, because a callback of a request may call the engine within a step.
        self._lock = threading.RLock()
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._running: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def if_free(self) -> Iterator[bool]:
        """Hold the lock, unless another thread has it. Yield whether this thread holds it."""
        held = self._lock.acquire(blocking=False)
        try:
            yield held
        finally:
            if held:
                self._lock.release()

    def step(self) -> None:
        """Run one step. The caller holds the lock.

        Raises:
          ServingError: The call comes from a callback of the step that is running.
          AgreementError: Another process has made other calls.
        """
        if self._loop.stepping:
            raise ServingError(
                "step() was called from within a step",
                path="on_token",
                fix="from a callback, call submit and cancel, but not step",
            )
        try:
            self.calls.compare()
        except AgreementError:
            # The processes have not agreed on which requests to cancel, so none may be canceled
            # here.
            self._loop.drop_requested()
            raise
        self._loop.step()

    def until(self, done: Callable[[], bool], *, whole: bool = False) -> None:
        """Run steps until `done()`, while other threads may also run steps.

        Args:
          done: Whether to return.
          whole: Whether to also wait for the end of a step that another thread runs. Such a step
            may still call callbacks, and an error of a callback changes the result of its request.
        """
        while whole or not done():
            with self._lock:
                # Another thread may have run the step while this thread waited for the lock.
                if done():
                    return
                self.step()

    async def until_async(self, done: Callable[[], bool], *, whole: bool = False) -> None:
        """Run steps in a thread until `done()`. Tasks that wait at the same time share a step."""
        while not done():
            # Another task may wait for the same step, so a canceled task must not cancel it.
            await asyncio.shield(asyncio.wrap_future(self._next_step()))
        if whole and (running := self._running) is not None and not running.done():
            await asyncio.shield(asyncio.wrap_future(running))

    def _next_step(self) -> concurrent.futures.Future[None]:
        with self.order:
            if self._pool is None:
                # Use one thread, so that the tasks of an event loop share a step instead of running
                # one step each.
                self._pool = concurrent.futures.ThreadPoolExecutor(1, "shardwright-engine")
            if self._running is None or self._running.done():
                self._running = self._pool.submit(self._step_alone)
            return self._running

    def _step_alone(self) -> None:
        with self._lock:
            # Another thread may have run the last step since the task asked for one.
            if not self._loop.idle:
                self.step()
