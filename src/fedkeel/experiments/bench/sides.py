"""What is timed. The two sides of a row, the usual loop and Fedkeel's executors, train the same clients with the same
network, batches, augmentation and optimizer, and say how many client-steps a second that was. A whole experiment is
HBN's CIFAR-10 cell: 100 clients, 10 a round, batch 4, evaluation every 10 rounds."""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fedkeel import data
from fedkeel.config import Config
from fedkeel.core.messages import Broadcast, Missing
from fedkeel.data.federation import Client, Federation
from fedkeel.engine.setup import prepare
from fedkeel.engine.tasks import Task
from fedkeel.errors import TrainingError
from fedkeel.experiments.bench.rows import AUGMENTATION, Benchmark
from fedkeel.observer import Observer
from fedkeel.runs.timing import read_timing
from fedkeel.simulation import simulate
from fedkeel.stopping import Stopped, stop_requested

PARTITION = "dirichlet(alpha=0.6, clients=100, minimum=1)"
CELL = Config(model="simple_cnn", participation=0.1, batch_size=4, momentum=0.9, clip_norm=10.0, evaluate_every=10)
CELL = CELL.replace(schedule="exponential", evaluation_batch=2000, checkpoint_every=50)
CLIENTS_OF_USUAL_LOOP = 10  # of more, one takes as long as another


def device_of(row: Benchmark) -> torch.device:
    return torch.device("cpu" if row.group == "cpu" else "cuda")


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def configured(row: Benchmark, executor: str, **options: Any) -> Config:
    """The options of a run that does the row's work."""
    work = Config(model=row.model, method=row.method, batch_size=row.batch, momentum=0.9)
    # Random labels: nothing can be learned, and nothing shall explode.
    work = work.replace(learning_rate=1e-4, rounds=1000, executor=executor, device=device_of(row).type)
    return work.replace(**{"precision": row.precision, **options})


class UsualLoop:
    """What everybody writes: one client after another, eager PyTorch, the data already on the device."""

    name = "usual loop"

    def __init__(self, row: Benchmark, federation: Federation) -> None:
        self.row, self.federation, self.device = row, federation, device_of(row)
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
            if stop_requested.is_set():
                raise Stopped
            batch = order[i : i + size]
            x = transform(self.images[batch], torch.rand(len(batch), transform.draws, device=device))
            loss = F.cross_entropy(self.model(x).logits, self.labels[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def close(self) -> None: ...


class Executed:
    """The same clients by one of Fedkeel's executors, when it has tried out what is fastest."""

    def __init__(self, row: Benchmark, federation: Federation, executor: str, **options: Any) -> None:
        self.row, self.name, self.device = row, executor, device_of(row)
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


# -- a whole experiment ----------------------------------------------------------------------------------------------
def random_cifar(folder: Path, images: int) -> Federation:
    """Random images of CIFAR-10's shapes and numbers, cut as the cell cuts it: time does not depend on the images."""
    generator = np.random.default_rng(0)
    arrays = {}
    for ending, count in (("", images), ("_test", images // 5)):
        arrays[f"x_cifar10{ending}"] = generator.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_cifar10{ending}"] = np.repeat(np.arange(10), count // 10)
    np.savez(folder / "random.npz", **arrays)  # type: ignore[arg-type]
    options: dict[str, Any] = {"train_transform": AUGMENTATION, "test_transform": "normalise(like=cifar10)"}
    return data.load("npz", root=str(folder / "random.npz"), partition=PARTITION, validation=0, **options)


def run_cell(
    *,
    method: str = "fedavg",
    rounds: int = 500,
    data_set: str = "random",
    images: int = 50_000,
    observer: Observer | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train the cell; its seconds, those of its phases, and its accuracy. Reading the images is not counted."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        is_random = data_set == "random"
        federation = random_cifar(folder, images) if is_random else data.load(data_set, partition=PARTITION)
        # A validation set is no part of the cell.
        clients = tuple(replace(client, validation=client.validation[:0]) for client in federation.clients)
        federation = replace(federation, clients=clients)
        began = time.perf_counter()
        run = simulate(
            CELL.replace(**options),
            verbose=False,
            federation=federation,
            directory=folder / "run",
            observer=observer,
            method=method,
            rounds=rounds,
        )
        seconds = time.perf_counter() - began
        timing = read_timing(run.directory)
        phases = {phase: round(sum(t[phase] for t in timing), 2) for phase in ("train", "aggregate", "evaluate")}
        return {"method": method, "seconds": round(seconds, 1), **phases, "accuracy": run.accuracy}
