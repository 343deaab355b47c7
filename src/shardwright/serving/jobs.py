"""The state of requests in an engine, and the limits that all requests share. Needs no arrays."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from shardwright.errors import ServingError
from shardwright.serving.request import Completion, Finish, Request


class Phase(enum.StrEnum):
    """The phase of a request."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    DONE = "done"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits that all requests of an engine share.

    Attributes:
      slots: Number of sequences that are decoded together.
      capacity: Rows of a slot. None for a ring, which holds the end of a text of any length.
      prefill_rows: Number of prompts that are read together.
      chunk: Number of tokens of a prompt that are read in one step.
      quantum: Number of chunks of a prompt that are read before the prompt leaves its row to a
        waiting prompt. None means all chunks.
      queue: Largest number of requests that may wait. Further requests are refused.
      pages: Pages of the pool. None unless the cache is paged.
      page_size: Rows of a page.
    """

    slots: int
    capacity: int | None
    prefill_rows: int
    chunk: int
    queue: int
    quantum: int | None = None
    pages: int | None = None
    page_size: int = 1

    def pages_of(self, request: Request) -> int:
        """Return how many pages a request may need."""
        return 0 if self.pages is None else -(-request.rows // self.page_size)

    def check(self, request: Request) -> None:
        """Raise ServingError if a request would not fit even if it were the only request."""
        need = (
            f"{len(request.prompt)} prompt tokens and {request.max_new_tokens} new tokens need "
            f"{request.rows} rows"
        )
        if self.capacity is not None and request.rows > self.capacity:
            raise ServingError(
                f"{need}, but a slot has {self.capacity}",
                path="request",
                size=request.rows,
                fix="shorten the prompt, lower max_new_tokens, create the engine with more "
                'capacity, or use cache="sliding", which keeps a window',
            )
        if self.pages is not None and self.pages_of(request) > self.pages:
            raise ServingError(
                f"{need}, {self.pages_of(request)} pages of {self.page_size}, but the pool has "
                f"{self.pages} pages",
                path="request",
                size=request.rows,
                fix="shorten the prompt, lower max_new_tokens, or create the engine with more "
                "pages",
            )


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """The state of a request.

    Attributes:
      number: Number of the request, in order of arrival.
      request: The request.
      phase: Its phase.
      slot: Its slot, which is reserved from admission on.
      row: Its row of the prefill batch, while its prompt is read there.
      read: Number of tokens of the prompt that were read.
      chunks_in_row: Number of chunks that were read since the job got its row.
      in_flight: Number of tokens that calls in flight will add to the job. These calls have begun,
        but the host has not fetched their results.
      written: All sampled tokens that the host has fetched, including those of stop sequences.
      logprobs: The logarithms of the probabilities of the tokens in `written`.
      text: The tokens that may be handed out.
      versions: Versions of the weights that computed its tokens, in order.
      completion: Its result, or None before its end.
    """

    number: int
    request: Request
    phase: Phase = Phase.QUEUED
    slot: int | None = None
    row: int | None = None
    read: int = 0
    chunks_in_row: int = 0
    in_flight: int = 0
    written: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    text: list[int] = dataclasses.field(default_factory=list)
    versions: list[int | str] = dataclasses.field(default_factory=list)
    completion: Completion | None = None

    @property
    def reading(self) -> Sequence[int]:
        """The tokens that the cache must hold before the next token is sampled.

        These are the prompt and the written tokens, except the last written token. A request that
        has written nothing has only its prompt.
        """
        if len(self.written) < 2:
            return self.request.prompt
        return (*self.request.prompt, *self.written[:-1])

    def used(self, version: int | str) -> None:
        """Record that a step with this version of the weights has computed tokens of the job."""
        if not self.versions or self.versions[-1] != version:
            self.versions.append(version)

    def complete(self, finish: Finish, error: Exception | None) -> None:
        """Set the result of the request."""
        self.completion = Completion(
            tokens=tuple(self.text),
            finish=finish,
            error=error,
            versions=tuple(self.versions),
            logprobs=tuple(self.logprobs[: len(self.text)]),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The next part of a prompt, with its job and its row of the prefill batch."""

    job: Job
    row: int
    tokens: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowMove:
    """A job that moves from its row of the prefill batch to its slot, or back."""

    job: Job
    row: int
    slot: int

    @classmethod
    def of(cls, job: Job, row: int) -> RowMove:
        """Return the move of a job between a row and its slot."""
        assert job.slot is not None
        return cls(job=job, row=row, slot=job.slot)
