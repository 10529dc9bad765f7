"""What happens on one client: local training, evaluation, answering a question.

A `Worker` is one resident model on one device. Every executor runs workers; they differ only in where.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeel import seeds, state
from fedkeel.config import Config
from fedkeel.data.federation import Federation
from fedkeel.engine.batches import ImageStore, TrainingPasses, training_plan
from fedkeel.engine.evaluation import Evaluation, evaluate
from fedkeel.messages import Answer, Broadcast, Update
from fedkeel.method import Composition
from fedkeel.models.output import Classifier
from fedkeel.nn.surgery import frozen_statistics
from fedkeel.parties import Batch, LocalClient, prefixed, select
from fedkeel.state import Layout, Tensors

LOCAL = "local"  # where a client's memory holds the entries of the model that never travel
QUESTION = "question"  # where a broadcast's extras hold the tensors of a method's question
stop_requested = threading.Event()  # set by Ctrl-C; looked at between two local steps


class Stopped(Exception):
    """The run was asked to stop; what is checkpointed stays."""


class ClientFailure(Exception):
    """This client has no update to offer; the text says why."""


@dataclass
class Worker:
    """A model that takes the place of one client after another."""

    config: Config
    federation: Federation
    method: Composition
    model: Classifier
    device: torch.device

    def __post_init__(self) -> None:
        self.model.to(self.device)
        self.layout = Layout(state.roles(self.model, self.method))
        self.store = ImageStore(self.federation, self.device)
        self.initial_local = self.layout.extract(self.model, self.layout.local)

    def train(self, name: str, broadcast: Broadcast, memory: Tensors) -> tuple[Update, Tensors]:
        """One client's part of a round. Returns its update and what it remembers."""
        client = self._arrive(name, broadcast, memory)
        config, model = self.config, self.model
        plan = training_plan(
            self.federation[name],
            self.federation.train_transform,
            seed=config.seed,
            round=broadcast.round,
            epochs=config.local_epochs,
            batch_size=config.batch_size,
            drop_last=config.drop_last,
        )
        with seeds.default_generator(config.seed, "layers", broadcast.round, name, device=self.device):
            model.train()
            self.method.start(client)
            model.train()  # a method may have run a pass of its own
            client.optimizer = self._optimizer(client.learning_rate)
            for view in client.scratch["views"].values():
                view.optimizer = client.optimizer
            total_loss = torch.zeros((), device=self.device)
            seen = 0
            for batch in self.store.batches(plan, self.federation.train_transform):
                if stop_requested.is_set():
                    raise Stopped
                total_loss += self._step(client, batch) * len(batch.y)
                seen += len(batch.y)
            extras = self.method.finish(client)
        loss = float(total_loss) / seen
        if loss != loss or loss in (float("inf"), float("-inf")):
            raise ClientFailure(f"its loss became {loss}: a lower learning rate may help")
        update = Update(
            client=name,
            samples=client.samples,
            round=broadcast.round,
            weights=self.layout.extract(model, self.layout.weights),
            statistics=self.layout.extract(model, self.layout.statistics),
            extras=extras,
            metrics={"loss": loss},
        )
        return update, self._remember(client, self.layout.extract(model, self.layout.local))

    def answer(self, name: str, broadcast: Broadcast, memory: Tensors, question: str) -> tuple[Answer, Tensors]:
        """A client's answer to a method's question, whose own tensors are the extras named `question/...`."""
        client = self._arrive(name, broadcast, memory)
        with seeds.default_generator(self.config.seed, question, broadcast.round, name, device=self.device):
            tensors = self.method.answer(client, question, select(client.broadcast.extras, QUESTION))
        # Nothing was trained: the entries of the model that never travel stay as they were.
        return Answer(name, client.samples, tensors), self._remember(client, select(memory, LOCAL))

    def evaluate(self, name: str, broadcast: Broadcast, memory: Tensors, splits: list[str]) -> list[Evaluation]:
        """Accuracy and loss on one client's test and validation data."""
        local = select(memory, LOCAL) if self.method.is_personal else {}
        state.load(self.model, self.initial_local, broadcast.weights, broadcast.statistics, local)
        statistics = {"both": ["global", "batch"]}.get(self.config.evaluate_with, [self.config.evaluate_with])
        if self.method.is_personal and not local and self.method.unseen_statistics == "batch":
            statistics = ["batch"]
        return evaluate(self.model, self.store, self.federation[name], splits, statistics, self.config)

    # -- the parts of a round --------------------------------------------------------------------------------
    def _arrive(self, name: str, broadcast: Broadcast, memory: Tensors) -> LocalClient:
        config, site = self.config, self.federation[name]
        broadcast = broadcast.to(self.device)
        memory = state.to_device(memory, self.device)
        local = select(memory, LOCAL)
        state.load(self.model, self.initial_local, broadcast.weights, broadcast.statistics, local)
        return LocalClient(
            name=name,
            samples=site.samples,
            round=broadcast.round,
            rounds=broadcast.rounds,
            model=self.model,
            broadcast=broadcast,
            data=TrainingPasses(
                self.store, site, seed=config.seed, round=broadcast.round, batch_size=config.batch_size
            ),
            config=config,
            num_classes=self.federation.num_classes,
            learning_rate=config.learning_rate_at(broadcast.round),
            memory={key: tensor for key, tensor in memory.items() if not key.startswith(f"{LOCAL}/")},
        )

    @staticmethod
    def _remember(client: LocalClient, local: Tensors) -> Tensors:
        """What the client keeps: its parts' memory and the entries of the model that never travel."""
        memory = client.memory | prefixed(local, LOCAL)
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in memory.items()}

    def _step(self, client: LocalClient, batch: Batch) -> Tensor:
        """Forward, loss, backward, gradients, step. Returns the loss before the step, detached."""
        x = self.method.inputs(client, batch.x)
        batch = Batch(x, batch.y)

        def backward() -> Tensor:
            self.model.zero_grad(set_to_none=True)
            # A single sample has no batch statistics: batch norm then uses the global ones and leaves them alone.
            with frozen_statistics(self.model) if len(batch.y) == 1 else nullcontext(), self._precision():
                output = self.method.forward(client, batch.x)
                loss = F.cross_entropy(output.logits, batch.y) + self.method.loss(client, batch, output)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        loss = backward()
        self.method.gradients(client, backward)
        if self.config.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm, foreach=True)
        assert client.optimizer is not None
        client.optimizer.step()
        return loss

    def _precision(self) -> torch.autocast | nullcontext[None]:
        if self.device.type == "cuda" and self.config.precision == "bf16":
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return nullcontext()

    def _optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        config = self.config
        if config.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=config.weight_decay, foreach=True)
        return torch.optim.SGD(
            parameters,
            lr=learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            foreach=True,
        )
