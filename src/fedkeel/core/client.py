"""A client during one round, as a method's hooks see it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel import seeds
from fedkeel.config import Config
from fedkeel.core.messages import Broadcast
from fedkeel.core.state import Tensors, select


class Batch(NamedTuple):
    """Images as the model sees them, (N, C, H, W), and their labels, (N,).

    >>> Batch(torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)).y.shape
    torch.Size([4])
    """

    x: Tensor
    y: Tensor


class TaskLoss(Protocol):
    """The loss that the run trains on, the cross-entropy by default; see `fedkeel.engine.losses`."""

    def __call__(self, logits: Tensor, labels: Tensor, *, total: bool = False) -> Tensor:
        """The mean over a batch, or the sum."""
        ...


def cross_entropy(logits: Tensor, labels: Tensor, *, total: bool = False) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum" if total else "mean")


class LocalData(Protocol):
    """The client's own training and validation data, for passes beside the training itself."""

    def passes(
        self,
        batch_size: int | None = None,
        *,
        augment: bool = False,
        samples: int | None = None,
        shuffle: bool = False,
        by_class: bool = False,
        least: int = 1,
    ) -> Iterator[Batch]:
        """One pass over the training samples, or over `samples` of them drawn at random; `by_class`: those of the
        lowest class first. A rest of fewer than `least` joins the batch before it."""
        ...

    def first_batch(self) -> Batch:
        """The batch that this round's training begins with, as training sees it."""
        ...

    def validation(self, batch_size: int | None = None) -> Iterator[Batch]:
        """One pass over the validation samples; over nothing where the client has none."""
        ...


@dataclass
class LocalClient:
    """A client during one round.

    Attributes:
        name: of the client.
        samples: how many it has to train on.
        round: this one, from 0.
        rounds: their number.
        model: the network that trains; the global weights are loaded into it before `Method.start`.
        broadcast: what the server sent, on the model's device.
        data: passes over the local data.
        config: the run's options (batch size, learning rate, ...).
        num_classes: of the task.
        learning_rate: of this round.
        memory: the part's own tensors on this client; what is put here is there again in its next round.
        extras: the part's own tensors in the broadcast.
        scratch: anything the part wants to keep until the end of this round.
        task_loss: `task_loss(logits, labels)` is what the run trains on, before any method's terms.
        views: of a composition, this client as each of its parts sees it, by the part's name.

    No example: the engine makes it and hands it to a method's hooks; see `Method` for one that uses it.
    """

    name: str
    samples: int
    round: int
    rounds: int
    model: nn.Module
    broadcast: Broadcast
    data: LocalData
    config: Config
    num_classes: int
    learning_rate: float
    memory: Tensors = field(default_factory=dict)
    extras: Tensors = field(default_factory=dict)
    scratch: dict[str, Any] = field(default_factory=dict)
    task_loss: TaskLoss = cross_entropy
    views: dict[str, LocalClient] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def generator(self, purpose: str) -> torch.Generator:
        """A CPU generator for this purpose, this client and this round."""
        return seeds.generator(self.config.seed, purpose, self.round, self.name)

    def scoped(self, part: str) -> LocalClient:
        """The same client with the memory, extras and scratch of one part of a composition."""
        view = copy.copy(self)
        view.memory = select(self.memory, part)
        view.extras = select(self.broadcast.extras, part)
        view.scratch = {}
        return view
