"""A worker that tells how long the parts of a client's work take."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.evaluation import Evaluation
from fedkeel.core.messages import Answer, Broadcast, Update
from fedkeel.core.state import Tensors
from fedkeel.engine import profile
from fedkeel.engine.batches import Plan
from fedkeel.engine.local import Worker
from fedkeel.engine.profile import Unwatched


@dataclass
class ProfiledWorker(Worker):
    """Does exactly what a worker does, under a clock. What is in no part of training is counted as making batches:
    between two steps nothing else happens."""

    clock: Unwatched = field(default_factory=Unwatched)

    def train(self, name: str, broadcast: Broadcast, memory: Tensors) -> tuple[Update, Tensors]:
        with self.clock(profile.BATCHES, calls=0):
            return super().train(name, broadcast, memory)

    def plan(self, name: str, round: int) -> Plan:
        with self.clock(profile.BATCHES):
            return super().plan(name, round)

    def begin(
        self, name: str, broadcast: Broadcast, memory: Tensors, optimizer: torch.optim.Optimizer | None = None
    ) -> LocalClient:
        with self.clock(profile.START):
            client = super().begin(name, broadcast, memory, optimizer)
        if client.optimizer is not None:
            time_steps(client.optimizer, self.clock)
        return client

    def _arrive(self, name: str, broadcast: Broadcast, memory: Tensors, question: str = "") -> LocalClient:
        with self.clock(profile.LOADING):
            return super()._arrive(name, broadcast, memory, question)

    def optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        with self.clock(profile.LOADING, calls=0):
            return super().optimizer(learning_rate)

    def step(self, client: LocalClient, batch: Batch) -> Tensor:
        with self.clock(profile.STEP):
            return super().step(client, batch)

    def end(self, client: LocalClient, loss: float) -> tuple[Update, Tensors]:
        with self.clock(profile.FINISH, calls=0):
            return super().end(client, loss)

    def leave(self, client: LocalClient, loss: float) -> tuple[Update, Tensors]:
        with self.clock(profile.FINISH):
            return super().leave(client, loss)

    def answer(self, name: str, broadcast: Broadcast, memory: Tensors, question: str) -> tuple[Answer, Tensors]:
        with self.clock(profile.ANSWERING):
            return super().answer(name, broadcast, memory, question)

    def evaluate(
        self, name: str, broadcast: Broadcast, memory: Tensors, splits: list[str], part: slice | None = None
    ) -> list[Evaluation]:
        with self.clock(profile.EVALUATING):
            return super().evaluate(name, broadcast, memory, splits, part)

    def waiting(self) -> AbstractContextManager[None]:
        return self.clock(profile.WAITING)


def time_steps(optimizer: torch.optim.Optimizer, clock: Unwatched) -> None:
    """Let the clock see each step of this optimiser; once, since a resident one serves many clients."""
    if "step" in vars(optimizer):
        return
    plain = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        with clock(profile.OPTIMISER):
            return plain(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]
