"""A federation of three clients and a network so small that whole runs take a blink."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedkeel import methods
from fedkeel.config import Config
from fedkeel.core.client import LocalClient
from fedkeel.core.composition import Composition
from fedkeel.core.messages import Broadcast
from fedkeel.core.method import Method
from fedkeel.core.types import Classifier
from fedkeel.data.federation import Client, Federation
from fedkeel.data.transforms import parse_transforms
from fedkeel.engine.rounds import Federated
from fedkeel.engine.setup import prepare
from fedkeel.engine.tasks import Result, Task
from fedkeel.observer import Observer
from fedkeel.runs.store import Store

CLASSES = 4


def small_federation(
    labels: Sequence[Sequence[int]] = ([0, 1, 2, 3] * 6, [0, 1, 2, 3] * 4, [0, 1, 2, 3] * 8),
) -> Federation:
    """One client for each list of labels. Client k's images are brighter by 40 k, and brighter with their class."""
    generator = torch.Generator().manual_seed(7)
    images, clients, start = [], [], 0
    for k, own in enumerate(labels):
        offset = 20 * torch.tensor(own)[:, None, None, None] + 40 * k
        images.append(torch.randint(0, 80, (len(own), 3, 8, 8), generator=generator) + offset)
        indices = torch.arange(start, start + len(own))
        clients.append(Client(f"client{k}", f"domain{k}", train=indices, validation=indices[:0], test=indices[:4]))
        start += len(own)
    return Federation(
        name="small",
        images=torch.cat(images).clamp(max=255).to(torch.uint8),
        labels=torch.tensor([label for own in labels for label in own]),
        classes=tuple("abcd"),
        clients=clients,
        train_transform=parse_transforms(""),
        test_transform=parse_transforms(""),
    )


def small_model(norm: Callable[[int], nn.Module] = nn.BatchNorm2d, dropout: float = 0.0) -> Classifier:
    torch.manual_seed(3)  # the same weights every time
    encoder = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        norm(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(dropout),
        nn.Conv2d(6, 8, 3, padding=1),
        norm(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return Classifier(encoder, nn.Linear(8, CLASSES), feature_dim=8, num_classes=CLASSES)


def started(
    method: str | Method | Sequence[Method],
    directory: Path,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    **options: Any,
) -> Federated:
    """A run that is ready for its first round; the model is the same for every method."""
    if isinstance(method, str):
        method = methods.build(method)
    elif not isinstance(method, Method):
        method = Composition(method)
    torch.set_num_threads(1)  # tensors of a few numbers: threads would only wait for each other
    settings = {"rounds": 4, "batch_size": 8, "learning_rate": 0.1, "executor": "serial", "device": "cpu"} | options
    config = Config(**settings)
    setup = prepare(config, federation=federation or small_federation(), model=model or small_model(), method=method)
    store = Store.create(directory / "run", config)
    return Federated(setup, setup.executor(), store, Observer())


@contextmanager
def changed(run: Federated, change: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, what comes back from clients, if they train or answer, is what `change` makes of it."""
    plain = run.executor.map

    def tampered(tasks: Sequence[Task], message: Broadcast) -> Iterator[Any]:
        results = plain(tasks, message)
        return iter(results) if tasks and tasks[0].do == "evaluate" else map(change, results)

    run.executor.map = tampered  # type: ignore[method-assign]
    try:
        yield
    finally:
        run.executor.map = plain  # type: ignore[method-assign]


def trained(run: Federated, clients: Iterable[str], message: Broadcast) -> Iterator[Any]:
    """What these clients send after training from the message; what they remember is kept."""
    for client in clients:
        (result,) = run.executor.map([Task("train", client, run.memory.look(client))], message)
        if isinstance(result, Result):
            run.memory.keep(client, result.memory)
        yield result.outcome if isinstance(result, Result) else result


def names(run: Federated) -> list[str]:
    """Of the clients that train."""
    return [client.name for client in run.setup.federation.clients]


def broadcast(run: Federated, round: int = 0) -> Broadcast:
    server = run.server
    return Broadcast(round, server.rounds, server.weights, server.statistics, server.extras)


def pixels(federation: Federation, name: str) -> Tensor:
    """A client's training images as the model sees them."""
    return federation.images[federation[name].train].float() / 255


class Probe(Method):
    """Calls the functions it was given at the named hooks: what a part written after another sees."""

    name = "probe"

    def __init__(self, **at: Callable[[LocalClient], None]) -> None:
        self.at = at

    def start(self, client: LocalClient) -> None:
        self.at.get("start", lambda _: None)(client)

    def gradients(self, client: LocalClient, recompute: Callable[[], Tensor]) -> None:
        self.at.get("gradients", lambda _: None)(client)
