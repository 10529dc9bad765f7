"""What is measured of a federation before one decides: sizes, labels, looks, and what a pilot of FedAvg gets.

A look is what the first batch norm would see of an image: of each channel its mean and its second moment about the
federation's mean, over the image's positions. Averaged over a client's images they are that client's moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedkeel import seeds
from fedkeel.analysis.snapshot import some_clients
from fedkeel.config import Config
from fedkeel.data.federation import Client, Federation
from fedkeel.engine.batches import middle
from fedkeel.experiments.advice.heterogeneity import (
    AboveChance,
    above_chance,
    label_distance,
    look_distance,
    shared_classes,
    within_classes,
)
from fedkeel.nn.calibration import normalised_layers
from fedkeel.runs.run import Run

MOST_IMAGES = 4000  # that are looked at, of all clients together
AT_ONCE = 256
CLEAR = 3.0  # deviations above chance, for a distance to count at all
SOME, MUCH = 0.1, 0.2  # distances above chance from which clients differ somewhat, and much
NOT_CLEAR, HARDLY, SOMEWHAT, GREATLY = "no more than chance", "hardly", "somewhat", "much"


@dataclass(frozen=True)
class Pilot:
    """What FedAvg gets in a few rounds, as fractions: on average over the domains that train, and in each; the same
    with the statistics of the test batch in batch norm; and what naming the most frequent class gets."""

    rounds: int
    accuracy: float
    domains: dict[str, float]
    with_batch_statistics: float | None
    guessing: float
    test_samples: int

    @property
    def has_learned(self) -> bool:
        error = math.sqrt(self.guessing * (1 - self.guessing) / self.test_samples)
        return self.accuracy > self.guessing + CLEAR * error

    @property
    def gain(self) -> float | None:
        """Of batch statistics over the federation's, in points."""
        return None if self.with_batch_statistics is None else 100 * (self.with_batch_statistics - self.accuracy)


@dataclass(frozen=True)
class Survey:
    """The numbers that advice rests on; made by `fedkeel.advise`, which has an example.

    Attributes:
        data: what the federation is called.
        clients: that train.
        classes: that it has.
        looked_at: the clients that were looked at: all, or of very many a sample.
        samples: the training samples of the smallest, of the median and of the largest of them.
        classes_of_client: the number of classes of the client with the fewest, and of that with the most.
        labels: how far a client's shares of the classes lie from those of all.
        look: how far the images of a class at a client look from those at all; None where no class is at two clients.
        comparable: the share of the images that are of a class which another client has too.
        layer: whose inputs, or outputs, were looked at.
        batch_norm: whether the model has any.
        batch_size: of a local step.
        keeps_state: whether clients remember something from round to round.
        participation: the share of the clients in a round.
        held_out: domains that are only tested.
        pilot: None where there was none.
    """

    data: str
    clients: int
    classes: int
    looked_at: int
    samples: tuple[int, int, int]
    classes_of_client: tuple[int, int]
    labels: AboveChance
    look: AboveChance | None
    comparable: float
    layer: str
    batch_norm: bool
    batch_size: int
    keeps_state: bool
    participation: float
    held_out: tuple[str, ...] = ()
    pilot: Pilot | None = None

    def to_dict(self) -> dict[str, Any]:
        """All of it, with what is made of a distance: what is above chance, and what that amounts to."""
        table = asdict(self)
        for name, found in (("labels", self.labels), ("look", self.look)):
            table[name] = found and {**found._asdict(), "above": apart(found), "verdict": verdict(found)}
        if self.pilot:
            table["pilot"] |= {"has_learned": self.pilot.has_learned, "gain": self.pilot.gain}
        return table


def verdict(found: AboveChance) -> str:
    """How much clients differ, in words."""
    if found.deviations < CLEAR:
        return NOT_CLEAR
    return HARDLY if found.above < SOME else SOMEWHAT if found.above < MUCH else GREATLY


def apart(found: AboveChance) -> float:
    """The distance above chance; none where it may be chance."""
    return found.above if found.deviations >= CLEAR else 0.0


def survey(federation: Federation, model: nn.Module, config: Config, run: Run | None) -> Survey:
    """`model` is the one to look with, that of the pilot `run` where there was one."""
    seed = config.seed
    clients = some_clients(federation, seed)
    labels = [federation.labels[client.train] for client in clients]
    owners, sizes = owners_of(labels), sorted(map(len, labels))
    together = torch.cat(labels)
    present = [len(torch.unique(mine)) for mine in labels]
    name, layer = early_layer(model)
    look, comparable = look_of(federation, clients, model.cpu().eval(), layer, seed)
    return Survey(
        data=federation.name,
        clients=len(federation.clients),
        classes=federation.num_classes,
        looked_at=len(clients),
        samples=(sizes[0], sizes[len(sizes) // 2], sizes[-1]),
        classes_of_client=(min(present), max(present)),
        labels=above_chance(
            lambda dealt: label_distance(together, dealt),
            owners,
            torch.zeros_like(owners),
            seeds.generator(seed, "deals of labels"),
        ),
        look=look,
        comparable=comparable,
        layer=name,
        batch_norm=bool(normalised_layers(model)),
        batch_size=config.batch_size,
        keeps_state=not config.stateless,
        participation=config.participation,
        held_out=tuple(dict.fromkeys(client.domain for client in federation.unseen)),
        pilot=None if run is None else pilot_of(run, federation),
    )


def owners_of(parts: Sequence[Tensor]) -> Tensor:
    """The number of the client of each sample: parts of each client -> (N,)."""
    return torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part) for part in parts]))


# -- looks -----------------------------------------------------------------------------------------------------------
def look_of(
    federation: Federation, clients: Sequence[Client], model: nn.Module, layer: nn.Module | None, seed: int
) -> tuple[AboveChance | None, float]:
    """The distance of the looks, and the share of the images that it could be taken of."""
    parts, each = list[Tensor](), max(1, MOST_IMAGES // len(clients))
    for client in clients:
        order = torch.randperm(client.samples, generator=seeds.generator(seed, "looks", client.name))
        parts.append(client.train[order[:each]])
    owners, images = owners_of(parts), torch.cat(parts)
    labels = federation.labels[images]
    shared = shared_classes(labels, owners)
    comparable = float(shared.double().mean())
    if not shared.any():
        return None, comparable
    owners, images, labels = owners[shared], images[shared], labels[shared]
    residuals = within_classes(moments(federation, images, model, layer), labels)
    found = above_chance(
        lambda dealt: look_distance(residuals, labels, dealt), owners, labels, seeds.generator(seed, "deals of looks")
    )
    return found, comparable


def early_layer(model: nn.Module) -> tuple[str, nn.Module | None]:
    """The first batch norm; without any, the first convolution or linear layer; without these, none."""
    weighted = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    found = normalised_layers(model) or {
        name: module for name, module in model.named_modules() if isinstance(module, weighted)
    }
    return next(iter(found.items()), ("", None))


class _Seen(Exception):
    """What the layer got or made: nothing behind it needs to be computed."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


@torch.no_grad()
def moments(federation: Federation, images: Tensor, model: nn.Module, layer: nn.Module | None) -> Tensor:
    """By image and channel the mean, and the second moment about the mean of all: (N,) -> (N, 2 channels)."""

    def inputs(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        raise _Seen(given[0])

    def outputs(layer: nn.Module, _: Any, made: Tensor) -> None:
        raise _Seen(made.movedim(-1, 1) if isinstance(layer, nn.Linear) else made)

    means, squares = list[Tensor](), list[Tensor]()
    with ExitStack() as hooks:
        if layer is not None:
            is_norm = layer in normalised_layers(model).values()
            watch = layer.register_forward_pre_hook(inputs) if is_norm else layer.register_forward_hook(outputs)
            hooks.enter_context(watch)
        for start in range(0, len(images), AT_ONCE):
            some = images[start : start + AT_ONCE]
            x = federation.test_transform(federation.images[some], middle(len(some), federation.test_transform))
            try:
                x = x if layer is None else model(x).logits
            except _Seen as seen:
                x = seen.values
            x = x.double().flatten(2) if x.ndim > 2 else x.double().unsqueeze(2)
            means.append(x.mean(2))
            squares.append(x.square().mean(2))
    mean, square = torch.cat(means), torch.cat(squares)
    common = mean.mean(0)
    return torch.cat([mean, square - 2 * mean * common + common.square()], dim=1)


# -- the pilot -------------------------------------------------------------------------------------------------------
def pilot_of(run: Run, federation: Federation) -> Pilot:
    last, under_batch = run.scores()[-1], run.scores(statistics="batch")
    held_out = {client.domain for client in federation.unseen}
    tests = {id(c.test): c for c in federation.one_of_each() if len(c.test)}
    counted = [c.test for c in tests.values() if c.domain not in held_out] or [c.test for c in tests.values()]
    labels = federation.labels[torch.cat(counted)]
    return Pilot(
        rounds=run.rounds_done,
        accuracy=last["average"],
        domains=last["domains"],
        with_batch_statistics=under_batch[-1]["average"] if under_batch else None,
        guessing=float(torch.bincount(labels).max() / len(labels)),
        test_samples=len(labels),
    )
