"""What a checkpoint holds, and what the round loop needs of a run directory: `runs.store.Store`."""

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
    directory: Path
    memory: ClientMemory

    @property
    def extended(self) -> Collection[int]: ...
    def append(self, record: dict[str, Any]) -> None: ...
    def append_timing(self, record: dict[str, Any]) -> None: ...
    def checkpoint(self, checkpoint: Checkpoint) -> None: ...
    def latest(self, note: Callable[[str], None]) -> Checkpoint | None: ...
    def truncate(self, size: int = 0) -> None: ...
