"""What a checkpoint holds, what the loop needs of a run directory, and when a checkpoint is written."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedkeel.core.state import Tensors
from fedkeel.engine.memory import ClientMemory

SHARE = 0.05  # of the time that may go into checkpoints
TRAINED = "trained-"  # before the names of a last checkpoint's groups as they were before the evaluation
QUICK = 0.25  # seconds: what takes less is written every round


@dataclass(frozen=True)
class Checkpoint:
    """Everything that the rounds after `round` depend on, but for what clients remember, which has files of its own."""

    round: int
    groups: dict[str, Tensors]  # of the server
    best: dict[str, float] = field(default_factory=dict)  # and what there is to say of `Patience`

    @property
    def keeps_trained(self) -> bool:
        """The last one of a method that changes the model for the test: the result is that which was tested, and more
        rounds go on from that which was trained."""
        return any(name.startswith(TRAINED) for name in self.groups)


class Storage(Protocol):
    """Where a run is written; `runs.store.Store` is the one on disk."""

    directory: Path
    memory: ClientMemory

    @property
    def extended(self) -> Collection[int]:
        """After how many rounds it was finished before, and then extended."""
        ...

    def append(self, record: dict[str, Any]) -> None:
        """A line of the metrics."""

    def append_timing(self, record: dict[str, Any]) -> None:
        """The seconds of a round and of its clients."""

    def checkpoint(self, checkpoint: Checkpoint) -> None: ...

    def latest(self, note: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that is whole."""
        ...

    def truncate(self, size: int = 0) -> None:
        """Forget the records of rounds that were not completed."""


class CheckpointSchedule:
    """`every` rounds; with 0, every round as long as that is quick, else as often as SHARE of the time allows.

    Where a checkpoint is written changes no result: it only decides how many rounds are done again after a crash.
    """

    def __init__(self, every: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.every, self._clock = every, clock
        self._took, self._written = 0.0, -float("inf")

    def is_due(self, round: int) -> bool:
        if self.every:
            return (round + 1) % self.every == 0
        return self._took < QUICK or self._clock() - self._written >= self._took / SHARE

    def write(self, checkpoint: Callable[[], None]) -> None:
        began = self._clock()
        checkpoint()
        self._written = self._clock()
        self._took = self._written - began
