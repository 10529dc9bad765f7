"""What happens on one client: local training, evaluation, answering a question.

A `Worker` is one resident model on one device. Every executor runs workers; they differ only in where.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedkeel import seeds
from fedkeel.config import Config
from fedkeel.core import state
from fedkeel.core.checking import check_finite
from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.composition import Composition
from fedkeel.core.evaluation import Evaluation
from fedkeel.core.messages import Answer, BadMessage, Broadcast, Missing, Update
from fedkeel.core.state import Layout, Tensors, prefixed, select
from fedkeel.core.types import Classifier
from fedkeel.data.federation import Federation
from fedkeel.engine import optimizers, schedules
from fedkeel.engine.batches import BatchPlan, ImageStore, TrainingPasses, try_channels_last
from fedkeel.engine.evaluation import Evaluator
from fedkeel.engine.losses import TrainingLoss
from fedkeel.engine.optimizers import LocalOptimizer
from fedkeel.engine.tasks import Result, Task, fetched
from fedkeel.nn.draws import Dropout, own_dropout
from fedkeel.nn.surgery import frozen_statistics
from fedkeel.stopping import LOCAL_STEP, Stopped, reached, stop_requested
from fedkeel.trust.privacy import choose_rules
from fedkeel.trust.rules import PlainGradients

LOCAL = "local"  # where a client's memory holds the entries of the model that never travel
WATCHED = "watched/"  # before the names of an update's metrics that are for observers and not for `metrics.jsonl`
QUESTION = "question"  # where a broadcast's extras hold the tensors of a method's question


class ClientFailure(Exception):
    """This client has no update to offer; the text says why."""


def refuse_not_finite(loss: float, *groups: Tensors) -> None:
    """Of a client that has trained."""
    try:
        if not math.isfinite(loss):
            raise BadMessage(f"its loss became {loss}")
        check_finite({name: tensor for group in groups for name, tensor in group.items()})
    except BadMessage as bad:
        raise ClientFailure(f"{bad}: a lower learning rate may help") from None


class StepWatch(Protocol):
    """Looks at the gradients of every local step of one model and changes nothing.

    On a GPU the steps may be captured and replayed: what it notes lies in tensors that stay where they are.
    """

    def begin(self) -> None:
        """A client begins."""

    def computed(self) -> None:
        """The gradients are computed, and the method has not touched them yet."""

    def used(self) -> None:
        """The gradients are as the optimizer takes them."""

    def metrics(self, round: int) -> dict[str, float]:
        """What it saw of the client that ends now."""
        ...


@dataclass
class Worker:
    """A model that takes the place of one client after another."""

    config: Config
    federation: Federation
    method: Composition
    model: Classifier
    device: torch.device
    shared_store: ImageStore | None = None
    watching: Callable[[nn.Module], StepWatch] | None = None
    gradient_rule: PlainGradients | None = None

    def __post_init__(self) -> None:
        config, device = self.config, self.device
        self.gradients = self.gradient_rule or choose_rules(config).gradients
        self._dropout = [module for module in self.model.modules() if isinstance(module, Dropout)]
        self.model.to(device)
        self._half = device.type == "cuda" and config.precision == "bf16"
        if device.type == "cuda":
            tf32 = config.precision != "float32"
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
            torch.backends.cudnn.deterministic = True  # some convolutions would add in another order every time
        self.channels_last = try_channels_last(self.model, self.federation, device, self._half)
        self.layout = Layout(state.roles(self.model, self.method))
        self.store = self.shared_store or ImageStore(
            self.federation, device, channels_last=self.channels_last and device.type == "cpu"
        )
        # The tensors themselves: walking the module tree anew for every client takes longer than a small step.
        self.entries = dict(self.model.state_dict(keep_vars=True))
        self.initial_local = state.copies(self.entries, self.layout.local)
        self._modules, self._parameters = list(self.model.modules()), list(self.model.parameters())
        # Buffers outside of `state_dict()` do not travel, and must not go from one client to the next either.
        buffers = [buffer for name, buffer in self.model.named_buffers() if name not in self.entries]
        self._transient = [(buffer, buffer.clone()) for buffer in buffers]
        self.evaluator = Evaluator(self.model, self.store, config)
        self.task_loss = TrainingLoss(config.loss, self.federation.num_classes, device)
        self.watch = self.watching(self.model) if self.watching else None
        # The last broadcast as it came and on this device, and the last round's learning rate: clients share them.
        self._sent: tuple[Broadcast | None, Broadcast] = (None, Broadcast(0, 0, {}, {}))
        self._rate = (-1, 0.0)

    def twin(self) -> Worker:
        """Another model of the same kind over the same images, which may train beside this one."""
        model = copy.deepcopy(self.model)
        if self.gradients.tells_loss:  # else each sample has masks of its own, from torch's generator
            own_dropout(model)
        return replace(self, model=model, shared_store=self.store)

    def watch_steps(self, watching: Callable[[nn.Module], StepWatch]) -> None:
        """Have every step seen by a watch of this kind; its metrics go along with the updates."""
        self.watching, self.watch = watching, watching(self.model)

    def do(self, task: Task, broadcast: Broadcast) -> Result[Any] | Missing:
        """What came of a task on this model; the memory of the client lies here by then, or is fetched."""
        began, client, memory = time.perf_counter(), task.client, fetched(task.memory)
        try:
            if task.do == "evaluate":
                found = self.evaluate(client, broadcast, memory, task.splits, task.part, detailed=task.detailed)
                return Result(client, found, memory)
            if task.do == "answer":
                return Result(client, *self.answer(client, broadcast, memory, task.question))
            return Result(client, *self.train(client, broadcast, memory), time.perf_counter() - began)
        except ClientFailure as failure:
            return Missing(client, str(failure))

    # -- local training --------------------------------------------------------------------------------------
    def train(self, name: str, broadcast: Broadcast, memory: Tensors) -> tuple[Update, Tensors]:
        """One client's part of a round. Returns its update and what it remembers."""
        self.gradients.begin(name, broadcast.round)
        with seeds.default_generator(self.config.seed, "layers", broadcast.round, name, device=self.device):
            client = self.begin(name, broadcast, memory)
            total_loss = torch.zeros((), device=self.device)
            plan = self.plan(name, broadcast.round)
            for batch in self.store.batches(plan, self.federation.train_transform):
                if stop_requested.is_set():
                    raise Stopped
                total_loss.add_(self.step(client, batch), alpha=len(batch.y))
            return self.end(client, float(total_loss) / max(len(plan.order), 1))

    def plan(self, name: str, round: int) -> BatchPlan:
        """Which samples this client trains on in this round, in which order."""
        site, draws = self.federation[name], self.federation.train_transform.draws
        return BatchPlan.of(site, *self.gradients.batches(name, round, site.samples, draws))

    def begin(
        self, name: str, broadcast: Broadcast, memory: Tensors, optimizer: LocalOptimizer | None = None
    ) -> LocalClient:
        """Load the global model and let the method start; the client is then ready for its first step."""
        client = self.arrive(name, broadcast, memory)
        self._train_mode()
        self.method.start(client)
        self._train_mode()  # a method may have run a pass of its own
        self._optimizer = optimizer or self.optimizer(client.learning_rate)
        if self.watch:
            self.watch.begin()
        return client

    def _train_mode(self) -> None:
        if not all(module.training for module in self._modules):  # `train()` is slow: it sets attributes of modules
            self.model.train()

    def step(self, client: LocalClient, batch: Batch) -> Tensor:
        """Forward, loss, backward, gradients, step. Returns the loss before the step, detached."""
        x = self.method.inputs(client, batch.x)
        batch = Batch(x.contiguous(memory_format=torch.channels_last) if self.channels_last else x, batch.y)

        def backward() -> Tensor:
            for parameter in self._parameters:
                parameter.grad = None
            # A single sample has no batch statistics: batch norm then uses the global ones and leaves them alone.
            with frozen_statistics(self.model) if len(batch.y) == 1 else nullcontext(), self._precision():
                output = self.method.forward(client, batch.x)
                loss, term = self.task_loss(output.logits, batch.y), self.method.loss(client, batch, output)
                loss = loss if isinstance(term, float) and not term else loss + term
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        loss = self.gradients.backward(backward, self.model, batch, self.task_loss)
        if self.watch:
            self.watch.computed()
        self.method.gradients(client, backward)
        if self.config.clip_norm:
            torch.nn.utils.clip_grad_norm_(self._parameters, self.config.clip_norm, foreach=True)
        if self.watch:
            self.watch.used()
        reached(LOCAL_STEP)
        self._optimizer.step()
        return loss

    def _precision(self) -> torch.autocast | nullcontext[None]:
        return torch.autocast("cuda", dtype=torch.bfloat16) if self._half else nullcontext()

    def end(self, client: LocalClient, loss: float) -> tuple[Update, Tensors]:
        """The update of the trained client and what it remembers, if they are of any use."""
        if self.gradients.tells_loss:
            refuse_not_finite(loss)
        update, memory = self.leave(client, loss)
        refuse_not_finite(0.0, update.weights, update.statistics, memory)
        return update, memory

    def leave(self, client: LocalClient, loss: float) -> tuple[Update, Tensors]:
        """Let the method finish; its update and memory as they are, without a look at the numbers."""
        seen = self.watch.metrics(client.round) if self.watch else {}
        metrics = {"loss": loss} | {f"{WATCHED}{name}": value for name, value in seen.items()}
        extras = self.method.finish(client)
        layout, entries = self.layout, state.clone(self.entries)
        update = Update(
            client=client.name,
            samples=client.samples,
            round=client.round,
            extras=extras,
            weights={name: entries[name] for name in layout.weights},
            statistics={name: entries[name] for name in layout.statistics},
            metrics=metrics if self.gradients.tells_loss else {},
        )
        return update, state.clone(client.memory) | prefixed({name: entries[name] for name in layout.local}, LOCAL)

    # -- beside training -------------------------------------------------------------------------------------
    def answer(self, name: str, broadcast: Broadcast, memory: Tensors, question: str) -> tuple[Answer, Tensors]:
        """A client's answer to a method's question, whose own tensors are the extras named `question/...`."""
        client = self.arrive(name, broadcast, memory, question)
        with seeds.default_generator(self.config.seed, question, broadcast.round, name, device=self.device):
            tensors = self.method.answer(client, question, select(client.broadcast.extras, QUESTION))
        # Nothing was trained: the entries of the model that never travel stay as they were.
        return Answer(name, client.samples, tensors), state.clone(
            client.memory | prefixed(select(memory, LOCAL), LOCAL)
        )

    def evaluate(
        self,
        name: str,
        broadcast: Broadcast,
        memory: Tensors,
        splits: Sequence[str],
        part: slice | None = None,
        *,
        detailed: bool = False,
    ) -> list[Evaluation]:
        """Accuracy and loss on one client's test and validation data, or on a part; in detail, of every image."""
        stranger = self.load_tested(broadcast, memory)
        statistics, site = self.config.statistics, self.federation[name]
        return self.evaluator.test(site, splits, statistics, part, stranger=stranger, detailed=detailed)

    def load_tested(self, broadcast: Broadcast, memory: Tensors) -> bool:
        """Load the model that a client with this memory is tested with; whether the client is a stranger to it."""
        local = self.method.tested(memory)
        self._load(broadcast, local)
        return self.method.is_stranger(local)

    def learning_rate_at(self, round: int) -> float:
        if self._rate[0] != round:
            self._rate = round, schedules.learning_rate_at(self.config, round)
        return self._rate[1]

    def _load(self, broadcast: Broadcast, local: Tensors) -> None:
        state.load(self.entries, self.initial_local, broadcast.weights, broadcast.statistics, local)
        for buffer, initial in self._transient:
            buffer.copy_(initial)

    def arrive(self, name: str, broadcast: Broadcast, memory: Tensors, question: str = "") -> LocalClient:
        """Load what a client begins with; no method has acted yet."""
        config, site, round = self.config, self.federation[name], broadcast.round
        if self._sent[0] is not broadcast:
            self._sent = broadcast, broadcast.to(self.device)
        broadcast = self._sent[1]
        memory = state.to_device(memory, self.device)
        self._load(broadcast, select(memory, LOCAL))
        self.task_loss.begin(lambda: self.federation.labels[site.train])
        for place, layer in enumerate(self._dropout):
            layer.begin(seeds.generator(config.seed, "dropout", round, name, question, place))
        plan = partial(self.plan, name, round)
        return LocalClient(
            name=name,
            samples=site.samples,
            round=round,
            rounds=broadcast.rounds,
            model=self.model,
            broadcast=broadcast,
            data=TrainingPasses(self.store, site, plan, config.seed, round, config.batch_size),
            config=config,
            num_classes=self.federation.num_classes,
            learning_rate=self.learning_rate_at(round),
            task_loss=self.task_loss,
            memory={key: tensor for key, tensor in memory.items() if not key.startswith(f"{LOCAL}/")},
        )

    def optimizer(self, learning_rate: float | Tensor) -> LocalOptimizer:
        resident = self.device.type == "cuda" and not optimizers.uncapturable(self.config)
        if resident and not isinstance(learning_rate, Tensor):
            learning_rate = torch.tensor(learning_rate, device=self.device)
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        return optimizers.local_optimizer(trained, self.config, learning_rate)
