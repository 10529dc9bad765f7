"""What an executor is: the only thing that differs between a laptop and a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from fedkeel.core.evaluation import Evaluation
from fedkeel.core.messages import Answer, Broadcast, Missing, Update
from fedkeel.engine.memory import ClientMemory
from fedkeel.registry import Registry


class Executor(Protocol):
    """Runs clients somewhere. Results come in the order of `clients`, whatever order they finished in."""

    memory: ClientMemory

    def train(self, clients: Sequence[str], broadcast: Broadcast) -> Iterator[Update | Missing]: ...

    def evaluate(
        self, clients: Sequence[str], broadcast: Broadcast, splits: Sequence[str]
    ) -> Iterator[list[Evaluation]]: ...

    def ask(self, clients: Sequence[str], broadcast: Broadcast, question: str) -> Iterator[Answer | Missing]: ...

    def close(self) -> None: ...


__all__ = ["EXECUTORS", "ClientMemory", "Executor"]

EXECUTORS: Registry[Executor] = Registry("executor")
