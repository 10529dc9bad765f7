"""The three places where trust decides what a round does, as objects that the loop and the local step are given.

Who takes part, which samples a local step takes and how they become a gradient, and how updates become one model. Here
are the ordinary ones; `fedkeel.trust.privacy` has those of differential privacy and chooses among them. `secret` says
to those that the numbers which others must not know come from the system, and not from the run's seed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedkeel import seeds
from fedkeel.config import Config
from fedkeel.core.client import Batch, TaskLoss
from fedkeel.core.messages import Broadcast, Update
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors
from fedkeel.trust.robust import Defence

Mean = tuple[Tensors, Tensors, Sequence[Update]]  # weights, statistics, and the updates as a method's rules see them


def clients_per_round(config: Config, clients: int) -> int:
    """How many take part, at least one. Python's `round` would make two of half of five: half goes up."""
    if config.clients_per_round:
        return min(config.clients_per_round, clients)
    return max(1, int(config.participation * clients + 0.5))


@dataclass
class UniformSampler:
    """A fixed number of clients in each round, every one as likely as the others."""

    config: Config
    secret: bool = False

    def sample(self, clients: int, round: int) -> list[int]:
        """The places of those that take part among all clients, in order."""
        count = clients_per_round(self.config, clients)
        if count >= clients:
            return list(range(clients))
        return sorted(seeds.sample(clients, count, seeds.generator(self.config.seed, "participation", round)))


@dataclass
class PlainGradients:
    """Passes over shuffled samples; the gradient of a batch's loss. A worker's own: one client after another."""

    config: Config
    secret: bool = False
    tells_loss = True  # the loss, and whether it is finite, go along with the update

    def begin(self, client: str, round: int) -> None:
        """A client begins."""

    def batches(self, client: str, round: int, samples: int, draws: int) -> tuple[Tensor, list[int], Tensor]:
        """The samples of all local steps one after another, as places among the client's own; how many each step takes;
        and uniform numbers for their augmentation, (n, draws). An epoch's last incomplete batch is kept by default.
        """
        config, size = self.config, self.config.batch_size
        generator = seeds.generator(config.seed, "order", round, client)
        used = samples - samples % size if config.drop_last and samples >= size else samples
        epoch = [size] * (used // size) + [used % size] * (used % size > 0)
        steps = config.local_steps or config.local_epochs * len(epoch)
        passes = math.ceil(steps / len(epoch)) if epoch else 1
        sizes = (epoch * passes)[:steps]
        order = torch.cat([torch.randperm(samples, generator=generator)[:used] for _ in range(passes)])[: sum(sizes)]
        augmentation = seeds.generator(config.seed, "augmentation", round, client)
        return order, sizes, torch.rand(len(order), draws, generator=augmentation)

    def backward(self, plain: Callable[[], Tensor], model: nn.Module, batch: Batch, task_loss: TaskLoss) -> Tensor:
        """Put a step's gradients where the optimizer looks for them; `plain` does so with those of the batch's loss,
        the method's terms included, `task_loss` is that without them. Returns the loss."""
        return plain()


@dataclass
class MeanAggregator:
    """The weighted mean of the updates, or what the robust rules of the run have in its place."""

    config: Config
    secret: bool = False

    def __post_init__(self) -> None:
        self.defence = Defence.of(self.config.robust)
        self.fewest = self.config.min_clients  # updates without which a round does not count

    def select(self, broadcast: Broadcast, updates: Sequence[Update]) -> list[Update]:
        """The updates that count, perhaps changed."""
        return self.defence.select(broadcast, updates)

    def mean(self, server: Server, broadcast: Broadcast, updates: Sequence[Update]) -> Mean:
        """What the method's rules start from."""
        shares = [server.share(update) for update in updates]
        shares = shares if sum(shares) > 0 else [1.0] * len(updates)
        weights, statistics = ([update.groups[group] for update in updates] for group in ("weights", "statistics"))
        return self.defence.mean(weights, shares), self.defence.mean(statistics, shares), updates


@dataclass(frozen=True)
class Rules:
    """A run's choice of the three."""

    sampler: UniformSampler
    gradients: PlainGradients
    aggregator: MeanAggregator

    @property
    def secret(self) -> bool:
        return self.sampler.secret
