"""What an executor is: the only thing that differs between a laptop and a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from fedkeel.engine.evaluation import Evaluation
from fedkeel.messages import Answer, Broadcast, Missing, Update
from fedkeel.registry import Registry
from fedkeel.state import Tensors


class ClientMemory:
    """What each client remembers between rounds. A federation of stateless clients remembers nothing."""

    def __init__(self, stateless: bool = False) -> None:
        self._tensors: dict[str, Tensors] = {}
        self._stateless = stateless

    def of(self, client: str) -> Tensors:
        return self._tensors.get(client, {})

    def keep(self, client: str, tensors: Tensors) -> None:
        if self._stateless:
            return
        self._tensors.pop(client, None)
        if tensors:
            self._tensors[client] = tensors

    def snapshot(self) -> dict[str, Tensors]:
        return dict(self._tensors)

    def restore(self, snapshot: dict[str, Tensors]) -> None:
        self._tensors = dict(snapshot)


class Executor(Protocol):
    """Runs clients somewhere. Results come in the order of `clients`, whatever order they finished in."""

    memory: ClientMemory

    def train(self, clients: Sequence[str], broadcast: Broadcast) -> Iterator[Update | Missing]: ...

    def evaluate(
        self, clients: Sequence[str], broadcast: Broadcast, splits: Sequence[str]
    ) -> Iterator[list[Evaluation]]: ...

    def ask(self, clients: Sequence[str], broadcast: Broadcast, question: str) -> Iterator[Answer | Missing]: ...

    def close(self) -> None: ...


EXECUTORS: Registry[Executor] = Registry("executor")
