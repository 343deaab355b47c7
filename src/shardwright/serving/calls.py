"""Compare the calls of an engine between processes, so that all of them run the same steps."""

from __future__ import annotations

import threading
from typing import Final

from shardwright.manager.manager import PartitionManager
from shardwright.processes.compare import PATIENCE_S, Fact, ProcessGroup, compare, digest_of
from shardwright.processes.meeting import ROOT
from shardwright.serving.request import Request

_FIX: Final = (
    "create the same engines in every process, and make the same calls in the same order: submit, "
    "cancel, update_params, step"
)


class Calls:
    """The calls since the last step. With a single process, nothing is recorded or compared.

    If calls are compared, cancels and failed callbacks take effect only in the next step. If they
    took effect immediately, the processes could run different programs in the rest of this step,
    and wait for each other.

    Args:
      manager: The manager of the engine.
      sizes: Sizes of the engine as text, which must be equal in all processes.
    """

    def __init__(self, manager: PartitionManager | None, sizes: str) -> None:
        self._group: ProcessGroup | None = None if manager is None else manager.group()
        self._lock, self._texts = threading.Lock(), [sizes]
        if self._group is not None:
            # The n-th engine of a process is compared with the n-th engine of each other process.
            number = self._group.store.count(f"{ROOT}/engines/{self._group.rank}")
            self._topic = f"engine/{number}"

    @property
    def are_compared(self) -> bool:
        """Whether several processes run the engine."""
        return self._group is not None

    def submitted(self, number: int, request: Request) -> None:
        """Record that a request was submitted."""
        if self._group is not None:
            asked = (request.prompt, request.max_new_tokens, request.sampling)
            # Prompts may be long. A digest tells whether they are equal, and its first 8 digits fit
            # a message.
            digest = digest_of(f"{asked} {request.stop_sequences}")[:8]
            self._add(
                f"submit(request {number}: prompt of {len(request.prompt)}, "
                f"max_new_tokens={request.max_new_tokens}, digest {digest})"
            )

    def canceled(self, number: int) -> None:
        """Record that a request was canceled."""
        self._add(f"cancel(request {number})")

    def failed(self, number: int, error: Exception) -> None:
        """Record that the callback of a request has raised an error."""
        self._add(f"a failure of request {number}: on_token raised {type(error).__name__}")

    def updated(self, version: int | str) -> None:
        """Record that the weights were replaced."""
        self._add(f"update_params(version={version!r})")

    def compare(self) -> None:
        """Compare the calls since the last step with those of the other processes.

        Raises:
          AgreementError: The calls differ, or a process does not reach its next step.
        """
        if self._group is None:
            return
        with self._lock:
            texts, self._texts = self._texts, []
        facts = {f"call {at}": Fact(text) for at, text in enumerate(texts, 1)}
        compare(self._group, self._topic, facts, what="engine.step", fix=_FIX, patience=PATIENCE_S)

    def _add(self, text: str) -> None:
        if self._group is not None:
            with self._lock:
                self._texts.append(text)
