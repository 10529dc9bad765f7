"""What a checkpoint holds, and what the round loop needs of a run directory."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedkeel.core.state import Tensors
from fedkeel.engine.memory import ClientMemory


@dataclass(frozen=True)
class Checkpoint:
    """Everything that the rounds after `round` depend on, but for what clients remember, which has files of its own."""

    round: int
    groups: dict[str, Tensors]
    best: dict[str, float] = field(default_factory=dict)  # the numbers of `Best`


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
        """The newest checkpoint that is whole; the records and the memory are as they were then."""
        ...

    def truncate(self, size: int = 0) -> None:
        """Forget the records of rounds that were not completed."""
