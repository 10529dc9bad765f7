"""The server between two rounds, as a method's rules see it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fedkeel.config import Config
from fedkeel.core.messages import Answer, Broadcast, Update
from fedkeel.core.state import Layout, Tensors, prefixed, select
from fedkeel.core.types import Classifier
from fedkeel.errors import MethodError

Ask = Callable[["Server", Sequence[str], str, Tensors], dict[str, Answer]]


@dataclass
class Server:
    """The server between two rounds.

    Attributes:
        round: this one, from 0.
        rounds: their number.
        weights: of the global model. Rules return new ones; they never change these in place.
        statistics: likewise.
        participants: clients sampled for this round.
        num_clients: of the whole federation.
        layout: roles of the model's tensors.
        config: the run's options.
        network: the prepared network, to know its shape; its weights are whatever it was last used for.
        memory: the part's own tensors on the server, kept between rounds and in checkpoints.
        extras: the part's own tensors in the latest broadcast.
        shares: what clients count for in this round's mean, by their names, where not by the run's weighting; a method
            that sets them in `before_training` says so in `Traits.replaces`.

    No example: the engine makes it and hands it to a method's rules; see `Method` for one that uses it.
    """

    round: int
    rounds: int
    weights: Tensors
    statistics: Tensors
    participants: list[str]
    num_clients: int
    layout: Layout
    config: Config
    network: Classifier
    memory: Tensors = field(default_factory=dict)
    extras: Tensors = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    part: str = ""
    asker: Ask | None = None

    def ask(self, clients: Sequence[str], question: str, tensors: Tensors | None = None) -> dict[str, Answer]:
        """One more exchange inside a round: what `Method.answer` returns on each of these clients.

        They get the server's present weights and statistics along with the question. A client that does not
        answer, or answers garbage, is not in the result.
        """
        if self.asker is None:
            raise RuntimeError("This server has no executor to ask through.")
        return self.asker(self, clients, f"{self.part}/{question}" if self.part else question, tensors or {})

    def broadcast(self, weights: Tensors) -> Broadcast:
        """What clients are sent, with these weights."""
        return Broadcast(self.round, self.rounds, weights, self.statistics, self.extras)

    def share(self, update: Update | Answer) -> float:
        """The weight of a client in a mean: what `shares` says, else by the run's weighting."""
        if self.shares:
            return self.shares.get(update.client, 0.0)
        return float(update.samples) if self.config.weighting == "samples" else 1.0

    def noted(self, what: str) -> dict[str, float]:
        """A number that the part has noted of clients, by their names."""
        return {name: float(number) for name, number in select(self.memory, what).items()}

    def note(self, what: str, numbers: Mapping[str, float]) -> None:
        """Keep a number of each of these clients in the part's memory."""
        tensors = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
        self.memory = self.memory | prefixed(tensors, what)

    def need_global_statistics(self) -> None:
        """For methods that train with the server's statistics: another part may keep all of them on the clients."""
        if not any(name.endswith("running_mean") for name in self.layout.statistics):
            raise MethodError(
                f"'{self.part}' uses the global statistics of batch norm, and no layer has any that travel: choose a "
                "model whose batch norm keeps running statistics, and leave out what keeps them local."
            )

    def scoped(self, part: str) -> Server:
        """The same server with the memory and extras of one part of a composition."""
        view = copy.copy(self)
        view.memory = select(self.memory, part)
        view.extras = select(self.extras, part)
        view.part = part
        return view
