"""The two sides of a row: the usual loop, and Fedkeel's executors. Both train the same clients with the same network,
batches, augmentation and optimizer, and say how many client-steps a second that was."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from fedkeel.config import Config
from fedkeel.core.messages import Broadcast, Update
from fedkeel.data.federation import Client, Federation
from fedkeel.engine.setup import prepare
from fedkeel.errors import TrainingError
from fedkeel.experiments.bench.rows import Benchmark
from fedkeel.stopping import Stopped, stop_requested

CLIENTS_OF_USUAL_LOOP = 10  # of more, one takes as long as another


def device_of(row: Benchmark) -> torch.device:
    return torch.device("cpu" if row.group == "cpu" else "cuda")


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def configured(row: Benchmark, executor: str, **options: Any) -> Config:
    """The options of a run that does the row's work."""
    given: dict[str, Any] = {
        "model": row.model,
        "method": row.method,
        "batch_size": row.batch,
        "momentum": 0.9,
        "learning_rate": 1e-4,  # random labels: nothing can be learned, and nothing shall explode
        "executor": executor,
        "device": device_of(row).type,
        "precision": row.precision,
        "rounds": 1000,
    }
    return Config(**{**given, **options})


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

    def close(self) -> None:
        pass


class Executed:
    """The same clients by one of Fedkeel's executors; its first two rounds are not timed."""

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
        updates = list(self._executor.train(self._names, self._broadcast))
        synchronise(self.device)
        seconds = time.perf_counter() - began
        for update in updates:
            if not isinstance(update, Update):
                raise TrainingError(f"'{update.client}' has no update: {update.reason}.")
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
