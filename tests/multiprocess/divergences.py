"""Print what each process says about each injected divergence, and after how many seconds.

    python -m tests.multiprocess.divergences

Agreement tells of the cases of `divergent.py`, and the watchdog of those of `failing.py`. The last
line sums up. The exit code is 1 if a surviving process says nothing, or too late.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.multiprocess import pairs
from tests.multiprocess.divergent import PARTS

# What the last process does, and in how many processes. "sleep" leaves the others in a collective.
FAILURES = [
    *((how, 2) for how in ("kill", "raise", "sleep", "part", "end", "coordinator")),
    *((how, 4) for how in ("kill", "raise", "sleep", "part", "end")),
]
WATCHDOG_S, LIMIT_S = 8, 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What a process printed about a divergence.

    Attributes:
      case: The divergence.
      count: Number of processes.
      rank: The process.
      seconds: From the divergent call, or from the failure, until the message; until the process
        had ended, if it ends.
      text: The message without its rules and fixes; empty if there was none.
    """

    case: str
    count: int
    rank: int
    seconds: float
    text: str

    @property
    def is_good(self) -> bool:
        """Whether there is a message, and in time."""
        return bool(self.text) and self.seconds < LIMIT_S

    def row(self) -> str:
        """Return a line of the table."""
        text = self.text if len(self.text) <= 150 else f"{self.text[:147]}..."
        place = f"{self.rank} of {self.count}"
        return f"{self.case:28} {place} {self.seconds:5.2f} s  {text or '-'}"


def agreement(folder: Path) -> Iterator[Message]:
    """Run the cases in which two processes differ."""
    for part, cases in PARTS.items():
        ended = pairs.run("tests.multiprocess.divergent", [part], folder)
        for case in (case.__name__ for case in cases):
            for rank, process in enumerate(ended):
                for seconds, text in _told(process.text, case):
                    yield Message(case=case, count=2, rank=rank, seconds=seconds, text=text)
        if any(process.code for process in ended):
            yield Message(case=part, count=2, rank=0, seconds=0.0, text="")


def _told(output: str, case: str) -> list[tuple[float, str]]:
    """Return the messages of a case: what stands between its own last line and the one before."""
    before, _, _ = output.partition(f"told {case} ")
    own = before.rpartition("\ntold ")[2]
    found = re.findall(r"^\[([\d.]+) s\] (.+(?:\n +\d+\. .+\n)?)", own, flags=re.MULTILINE)
    return [(float(seconds), " ".join(text.split())) for seconds, text in found]


def watchdog(folder: Path, how: str, count: int) -> Iterator[Message]:
    """Run one failure, and yield what every survivor says."""
    ended = pairs.run(
        "tests.multiprocess.failing",
        [count, how, WATCHDOG_S],
        folder,
        count=count,
        together=False,
    )
    culprit = 0 if how == "coordinator" else count - 1
    failed_at = float(re.findall(r"fails at ([\d.]+)", ended[culprit].text)[0])
    says = r"watchdog in process \d+: (.+)"
    if how == "coordinator":  # JAX aborts the others
        says = r"(?:watchdog in process \d+: |JAX distributed service detected )(.+)"
    for rank, process in enumerate(ended):
        if rank != culprit:
            text = re.search(says, process.text)
            yield Message(
                case=f"watchdog: {how}",
                count=count,
                rank=rank,
                seconds=process.at - failed_at,
                text="" if text is None or process.code == 0 else text[1],
            )


def main() -> int:
    """Print the table. Return 0 if each divergence ends in a message of every survivor in time."""
    messages: list[Message] = []
    with tempfile.TemporaryDirectory() as folder:
        for message in _all(Path(folder)):
            print(message.row(), flush=True)
            messages.append(message)
    cases = {(message.case, message.count) for message in messages}
    bad = [message for message in messages if not message.is_good]
    slowest = max(message.seconds for message in messages)
    print(
        f"{len(cases)} divergences, {len(messages)} messages, {len(bad)} missing or late, "
        f"slowest {slowest:.2f} s"
    )
    return bool(bad)


def _all(folder: Path) -> Iterator[Message]:
    yield from agreement(folder)
    for how, count in FAILURES:
        yield from watchdog(folder, how, count)


if __name__ == "__main__":
    sys.exit(main())
