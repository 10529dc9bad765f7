"""A federation of a few dozen 8x8 images and a network of a few hundred weights: a run takes milliseconds.

Its clients differ in look (each domain has a contrast and a tint of its own), in size, and in the classes they have.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedkeel
from fedkeel.config import Config
from fedkeel.core.messages import Broadcast
from fedkeel.core.method import Method
from fedkeel.data.federation import Client, Federation
from fedkeel.data.transforms import parse_transforms
from fedkeel.engine.executors.processes import has_shared_memory
from fedkeel.engine.local import Worker
from fedkeel.engine.setup import Setup, prepare
from fedkeel.engine.tasks import Task
from fedkeel.models import Classifier
from fedkeel.runs.run import Run

CLASSES = ("dot", "bar", "cross", "frame")
SIZES = {"ward": 14, "clinic": 9, "hospital": 21}
DOMAINS = {"ward": "bright", "clinic": "dark", "hospital": "tinted"}


def federation(
    sizes: dict[str, int] | None = None,
    *,
    domains: dict[str, str] | None = None,
    unseen: int = 0,
    validation: int = 4,
    test: int = 8,
    side: int = 8,
    channels: int = 3,
    seed: int = 0,
    augment: str = "flip",
) -> Federation:
    """Clients by name with their number of training samples; 'clinic' never sees the last class. `unseen` samples
    more are the test set of a client 'stranger' that does not train."""
    sizes = SIZES if sizes is None else sizes
    domains = {name: DOMAINS.get(name, name) for name in sizes} | (domains or {})
    generator = torch.Generator().manual_seed(seed)
    images: list[Tensor] = []
    labels: list[Tensor] = []
    position = 0

    def draw(count: int, domain: int, classes: int = len(CLASSES)) -> Tensor:
        nonlocal position
        y = torch.arange(count) % classes
        patterns = torch.rand(len(CLASSES), channels, side, side, generator=torch.Generator().manual_seed(99))
        x = patterns[y] + 0.3 * torch.rand(count, channels, side, side, generator=generator)
        x = x * (0.3 + 0.35 * (domain % 3)) + 0.12 * domain
        images.append((x.clamp(0, 1) * 255).to(torch.uint8))
        labels.append(y)
        position += count
        return torch.arange(position - count, position)

    clients = [
        Client(
            name,
            domains[name],
            train=draw(size, number, 3 if name == "clinic" else 4),
            validation=draw(validation, number),
            test=draw(test, number),
        )
        for number, (name, size) in enumerate(sizes.items())
    ]
    empty = torch.empty(0, dtype=torch.int64)
    strangers = [Client("stranger", "foreign", empty, empty, draw(unseen, len(clients)))] if unseen else []
    return Federation(
        name="tiny",
        images=torch.cat(images),
        labels=torch.cat(labels),
        classes=CLASSES,
        clients=clients,
        unseen=strangers,
        train_transform=parse_transforms(augment),
        test_transform=parse_transforms(""),
    )


def model(seed: int = 0, *, norm: bool = True, channels: int = 3, classes: int = 4, width: int = 4) -> Classifier:
    """Convolution, batch norm (unless `norm` is false), ReLU, pooling, and a linear head."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        encoder = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.BatchNorm2d(width) if norm else nn.Identity(),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        return Classifier(encoder, nn.Linear(4 * width, classes), 4 * width, classes)


OPTIONS: dict[str, Any] = {
    "rounds": 3,
    "batch_size": 4,
    "learning_rate": 0.05,
    "executor": "serial",
    "device": "cpu",
}


def by(executor: str) -> dict[str, Any]:
    """An executor, with two workers where it has any."""
    if executor == "processes" and not has_shared_memory():
        pytest.skip("this machine has no /dev/shm")
    return {"executor": executor, "workers": 2 if executor == "processes" else 0}


def setup(
    method: str | Method = "fedavg", *, network: nn.Module | None = None, on: Federation | None = None, **options: Any
) -> Setup:
    """A prepared run: its worker and executors can be tried one by one."""
    name = {"method": method} if isinstance(method, str) else {}
    return prepare(
        Config(**{**OPTIONS, **name, **options}),
        federation=on or federation(),
        model=network or model(),
        method=None if isinstance(method, str) else method,
    )


def run(
    directory: Path | str,
    method: str | Method = "fedavg",
    *,
    network: nn.Module | None = None,
    on: Federation | None = None,
    **options: Any,
) -> Run:
    own: Any = {name: options.pop(name, None) for name in ("observer", "verbose")}
    return fedkeel.simulate(
        {**OPTIONS, **options},
        directory=directory,
        federation=on or federation(),
        model=network or model(),
        method=method,
        **own,
    )


def resume(
    directory: Path | str, *, network: nn.Module | None = None, on: Federation | None = None, **objects: Any
) -> Run:
    return fedkeel.resume(directory, federation=on or federation(), model=network or model(), **objects)


def result(run: Run) -> dict[str, bytes]:
    """All that must be equal, byte for byte, in two equal runs."""
    files = ["metrics.jsonl", "model.safetensors"]
    personal = sorted(run.directory.glob("personal/*"))
    return {name: (run.directory / name).read_bytes() for name in files} | {p.name: p.read_bytes() for p in personal}


REMARKS = ("The model is at chance level", "Never predicted", "Too few test samples")


class Notes(fedkeel.Observer):
    """Remembers what it is told, and can do something at the end of a round. What is remarked at the end of a run of
    so few images and rounds is kept apart."""

    def __init__(self, after_round: Callable[[int], None] = lambda _: None) -> None:
        self.notes: list[str] = []
        self.remarks: list[str] = []
        self.rounds: list[int] = []
        self.first: int | None = None
        self._after = after_round

    def started(self, config: Config, first_round: int) -> None:
        self.first = first_round

    def round_done(self, round: int, rounds: int, scores: Any, loss: float) -> None:
        self.rounds.append(round)
        self._after(round)

    def note(self, text: str) -> None:
        (self.remarks if text.startswith(REMARKS) else self.notes).append(text)


def broadcast(worker: Worker, round: int = 0, rounds: int = 3, extras: dict[str, Tensor] | None = None) -> Broadcast:
    """What the server would send of the worker's present model."""
    layout = worker.layout
    weights, statistics = (layout.extract(worker.model, names) for names in (layout.weights, layout.statistics))
    return Broadcast(round, rounds, weights, statistics, extras or {})


def training(*clients: str) -> list[Task]:
    """Of clients that remember nothing."""
    return [Task("train", client) for client in clients]
