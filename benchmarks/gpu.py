"""The rows of docs/benchmarks.md on one GPU, and the two sides that take turns in each: the usual loop and Fedkeel's
executors train the same clients with the same network, made-up images, batches, augmentation and optimiser, and say
how many client-steps a second that was."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from fedkeel.config import Config
from fedkeel.core.messages import Broadcast, Missing
from fedkeel.data.federation import Client, Federation, no_indices
from fedkeel.data.transforms import parse_transforms
from fedkeel.engine.setup import prepare
from fedkeel.engine.tasks import Task
from fedkeel.errors import TrainingError

AUGMENTATION = "crop(padding=4)+flip+normalise(like=cifar10)"


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    model: str
    pixels: int
    batch: int
    clients: int
    steps: int  # per client and round
    rounds: int  # that are timed, after those that warm up
    precision: str = "tf32"
    method: str = "fedavg"
    device: str = "cuda"

    @property
    def work(self) -> str:
        clients = "one client" if self.clients == 1 else f"{self.clients} clients"
        return f"{self.model}, {self.pixels} px, batch {self.batch}, {clients}, {self.precision}"


EPOCH = Row("resnet18", 224, 16, 1, 36, 5)  # the setting of GReg's Table 10
ROWS = {
    "small10": Row("simple_cnn", 32, 4, 10, 125, 4),
    "small100": Row("simple_cnn", 32, 4, 100, 125, 2),
    "resnet32": Row("resnet18", 32, 64, 10, 16, 5),
    "resnet32-bf16": Row("resnet18", 32, 64, 10, 16, 5, precision="bf16"),
    "resnet32small": Row("resnet18(stem=small)", 32, 64, 10, 16, 3, precision="bf16"),
    "resnet224": Row("resnet18", 224, 16, 4, 36, 5, precision="bf16"),
    "epoch": EPOCH,
    "epoch-bf16": replace(EPOCH, precision="bf16"),
}
CLIENTS_OF_USUAL_LOOP = 10  # of more, one takes as long as another


def made_up(row: Row) -> Federation:
    """Random images: speed does not depend on what is in them."""
    per_client = row.batch * row.steps
    generator = torch.Generator().manual_seed(0)
    total = per_client * row.clients
    shape = (min(total, 20_000), 3, row.pixels, row.pixels)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (len(images),), generator=generator)
    places, test = torch.arange(total) % len(images), torch.arange(min(64, len(images)))
    clients = tuple(
        Client(f"c{i:04d}", "made-up", places[i * per_client : (i + 1) * per_client], no_indices(), test)
        for i in range(row.clients)
    )
    augmentation = AUGMENTATION if row.pixels == 32 else "flip+normalise(like=imagenet)"
    transforms = parse_transforms(augmentation), parse_transforms("normalise(like=cifar10)")
    return Federation("made-up", images, labels, tuple("0123456789"), clients, *transforms)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def configured(row: Row, executor: str, **options: Any) -> Config:
    """The options of a run that does the row's work."""
    work = Config(model=row.model, method=row.method, batch_size=row.batch, momentum=0.9)
    # Random labels: nothing can be learned, and nothing shall explode.
    work = work.replace(learning_rate=1e-4, rounds=1000, executor=executor, device=row.device)
    return work.replace(**{"precision": row.precision, **options})


class UsualLoop:
    """What everybody writes: one client after another, eager PyTorch, the data already on the device."""

    name = "usual loop"

    def __init__(self, row: Row, federation: Federation) -> None:
        self.row, self.federation, self.device = row, federation, torch.device(row.device)
        config = configured(row, "serial", method="fedavg", precision="tf32")
        self.model = prepare(config, federation=federation).worker.model
        self.images, self.labels = federation.images.to(self.device), federation.labels.to(self.device)
        self.start = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.train()
        self._client(federation.clients[0])
        synchronise(self.device)

    def speed(self) -> float:
        """Client-steps per second of one more round."""
        clients = self.federation.clients[:CLIENTS_OF_USUAL_LOOP]
        # Fedkeel asks for convolutions that repeat their sums bit by bit; nobody's loop does.
        asked, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, False
        try:
            synchronise(self.device)
            began = time.perf_counter()
            for client in clients:
                self._client(client)
            synchronise(self.device)
            return self.row.steps * len(clients) / (time.perf_counter() - began)
        finally:
            torch.backends.cudnn.deterministic = asked

    def _client(self, client: Client) -> None:
        transform, device, size = self.federation.train_transform, self.device, self.row.batch
        self.model.load_state_dict(self.start)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        order = client.train[torch.randperm(len(client.train))].to(device)
        for i in range(0, len(order), size):
            batch = order[i : i + size]
            x = transform(self.images[batch], torch.rand(len(batch), transform.draws, device=device))
            loss = F.cross_entropy(self.model(x).logits, self.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def close(self) -> None: ...


class Executed:
    """The same clients by one of Fedkeel's executors, when it has tried out what is fastest."""

    def __init__(self, row: Row, federation: Federation, executor: str, **options: Any) -> None:
        self.row, self.name, self.device = row, executor, torch.device(row.device)
        self.setup = prepare(configured(row, executor, **options), federation=federation)
        self._executor = self.setup.executor()
        self._broadcast = self.present(0)
        self._names = [client.name for client in federation.clients]
        began = time.perf_counter()
        self.round()
        self.round()
        self.first_two_rounds = time.perf_counter() - began

    def present(self, round: int) -> Broadcast:
        """What the server would send of the model as it is."""
        layout, model = self.setup.worker.layout, self.setup.worker.model
        weights, statistics = layout.extract(model, layout.weights), layout.extract(model, layout.statistics)
        return Broadcast(round, self.setup.config.rounds, weights, statistics)

    def round(self) -> float:
        """Train one more round; returns its seconds."""
        synchronise(self.device)
        began = time.perf_counter()
        results = list(self._executor.map([Task("train", name) for name in self._names], self._broadcast))
        synchronise(self.device)
        seconds = time.perf_counter() - began
        for result in results:
            if isinstance(result, Missing):
                raise TrainingError(f"'{result.client}' has no update: {result.reason}.")
        self._broadcast = replace(self._broadcast, round=self._broadcast.round + 1)
        return seconds

    def speed(self) -> float:
        """Client-steps per second of the rounds that the row has."""
        seconds = sum(self.round() for _ in range(self.row.rounds)) / self.row.rounds
        return self.row.clients * self.row.steps / seconds

    def close(self) -> None:
        self._executor.close()
        del self._executor, self.setup, self._broadcast
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
