"""A run at one moment: the global model, what the clients made of it, and a network of our own to look at them with.

It is made of a round while training, or of what a run left behind; a diagnostic need not know which.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedkeel import seeds
from fedkeel.core import imports, naming, state
from fedkeel.core.client import Batch
from fedkeel.core.messages import Broadcast, Update
from fedkeel.core.state import Tensors, prefixed, select
from fedkeel.data.federation import Client, Federation
from fedkeel.engine.local import LOCAL, Worker
from fedkeel.engine.memory import ClientMemory
from fedkeel.engine.setup import prepare
from fedkeel.engine.tasks import Remembered, fetched
from fedkeel.errors import FedkeelError
from fedkeel.nn.calibration import channel_sums, moments_of, normalised_layers
from fedkeel.nn.surgery import batch_statistics
from fedkeel.observer import Aggregated
from fedkeel.runs.origin import data_from_afar
from fedkeel.runs.run import Run, given_in_python
from fedkeel.runs.store import MODEL

MOST_CLIENTS = 100  # that are looked at one by one after a run
RUNNING = {"mean": "running_mean", "variance": "running_var"}
Lookup = Callable[[str], Tensors]  # of a client, by its name


class Outputs(NamedTuple):
    """Features (N, d), logits (N, C), both in double precision, and labels (N,) of some samples, on the CPU; see
    `Snapshot`, which makes it."""

    features: Tensor
    logits: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Snapshot:
    """A run at the end of a round, or at its own end. No example: a diagnostic is given one.

    Attributes:
        round: from 0.
        worker: a network that is only looked with; nothing of the run depends on it.
        model: the global model, as it is tested.
        sent: what the clients began with.
        updates: of the clients that took part; none after the run, when they are gone.
        kept: looks up the tensors of the model that a client keeps to itself, none if it has not trained.
        held_out: domains that are only tested.
    """

    round: int
    worker: Worker
    model: Broadcast
    sent: Broadcast
    updates: Mapping[str, Update]
    kept: Lookup
    held_out: Sequence[str]

    @property
    def federation(self) -> Federation:
        return self.worker.federation

    @cached_property
    def clients(self) -> list[Client]:
        """Those of the round, in the federation's order; after the run all that train, of very many a sample."""
        if self.updates:
            return [self.federation[name] for name in self.updates]
        return some_clients(self.federation, self.worker.config.seed)

    # -- models ----------------------------------------------------------------------------------------------
    def put_global(self, client: Client) -> bool:
        """The global model as this client is tested with it; whether the client is a stranger to its layers."""
        return self.worker.load_tested(self.model, prefixed(self.kept(client.name), LOCAL))

    def put_local(self, client: Client, *, sent: bool = False) -> None:
        """What the client has trained, with its own statistics or with those that it was sent. After the run nothing of
        it is left but the layers it keeps: then it is the global model."""
        mine = self.updates.get(client.name, self.model)
        self._put(mine.weights, self.sent.statistics if sent else mine.statistics, self.kept(client.name))

    def _put(self, *groups: Tensors) -> None:
        state.load(self.worker.entries, self.worker.initial_local, *groups)

    # -- what they say ---------------------------------------------------------------------------------------
    def batches(self, client: Client, indices: Tensor, batch_size: int = 0) -> Iterator[Batch]:
        """These images without augmentation, in an order that is random but always the same: images often lie class by
        class, and a batch of one class has other statistics than any batch in training."""
        config = self.worker.config
        order = torch.randperm(len(indices), generator=seeds.generator(config.seed, "diagnostic", client.name))
        size = batch_size or config.evaluation_batch
        return self.worker.store.in_order(indices[order], size, self.federation.test_transform, least=2)

    @torch.no_grad()
    def outputs(self, client: Client, indices: Tensor, *, batch_size: int = 0, statistics: str = "global") -> Outputs:
        """What the present network says in evaluation mode, under its own statistics or under those of the "batch"."""
        model, found = self.worker.model.eval(), []
        for batch in self.batches(client, indices, batch_size):
            with batch_statistics(model) if statistics == "batch" and len(batch.y) > 1 else nullcontext():
                output = model(batch.x)
            found.append(Outputs(output.features.double().cpu(), output.logits.double().cpu(), batch.y.cpu()))
        return joined(found)

    def trained(self, client: Client) -> tuple[Outputs, Outputs]:
        """Of the client's model on its training images: under the statistics it was sent, and under the batch's."""
        self.put_local(client, sent=True)
        look = partial(self.outputs, client, client.train, batch_size=self.worker.config.batch_size)
        return look(statistics="global"), look(statistics="batch")

    def tested(self, statistics: str = "global") -> dict[str, list[Outputs]]:
        """Of the global model on every domain's test sets, each once, as it is evaluated: a client without layers of
        its own follows the method's rule for such clients."""
        personal, sets = self.worker.method.is_personal, dict[Hashable, Client]()
        for client in (*self.federation.one_of_each(), *(self.clients if personal else ())):
            if len(client.test):
                sets.setdefault(client.name if personal else (client.domain, id(client.test)), client)
        domains: dict[str, list[Outputs]] = {}
        for client in sets.values():
            kind = "batch" if self.put_global(client) else statistics
            domains.setdefault(client.domain, []).append(self.outputs(client, client.test, statistics=kind))
        return domains

    # -- batch-norm statistics -------------------------------------------------------------------------------
    def layer_statistics(self) -> dict[str, dict[str, Tensors]]:
        """By client and layer, "mean" and "variance" of the layer's inputs by channel, (C,) each, in double precision.

        While training, the running statistics that the client ended the round with; after the run, when those are gone,
        the moments over the client's training data under the final model.
        """
        if not self.updates:
            return {client.name: self.input_moments([client]) for client in self.clients}
        tensors = {c.name: {**self.updates[c.name].statistics, **self.kept(c.name)} for c in self.clients}
        layers = normalised_layers(self.worker.model)
        return {
            client: {
                layer: {kind: own[f"{layer}.{name}".lstrip(".")].double().cpu() for kind, name in RUNNING.items()}
                for layer in layers
            }
            for client, own in tensors.items()
        }

    def input_moments(self, clients: Sequence[Client]) -> dict[str, Tensors]:
        """Of each layer over all values that it gets of these clients' training data under the global model: clients,
        samples and positions together."""
        sums: dict[str, Tensor] = {}

        def add(layer: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            sums[layer] = sums.get(layer, 0) + channel_sums(inputs[0])

        with ExitStack() as hooks:
            for name, layer in normalised_layers(self.worker.model).items():
                hooks.enter_context(layer.register_forward_pre_hook(partial(add, name)))
            for client in clients:
                self._put(self.model.weights, self.model.statistics, self.kept(client.name))
                self.outputs(client, client.train)
        moments = {layer: moments_of(total.cpu()) for layer, total in sums.items()}
        return {layer: dict(zip(RUNNING, both, strict=True)) for layer, both in moments.items()}


def joined(parts: Sequence[Outputs]) -> Outputs:
    return Outputs(*map(torch.cat, zip(*parts, strict=True)))


def some_clients(federation: Federation, seed: int) -> list[Client]:
    """All that train, or of more than `MOST_CLIENTS` that many, drawn once for the run, in the federation's order."""
    count = len(federation.clients)
    if count <= MOST_CLIENTS:
        return list(federation.clients)
    drawn = seeds.sample(count, MOST_CLIENTS, seeds.generator(seed, "diagnosed clients"))
    return [federation.clients[i] for i in sorted(drawn)]


def of_round(seen: Aggregated, worker: Worker, held_out: Sequence[str]) -> Snapshot:
    updates = {update.client: update for update in seen.updates}
    return Snapshot(seen.sent.round, worker, seen.model, seen.sent, updates, _local(seen.memory.look), held_out)


def of_run(run: Run, **objects: Any) -> Snapshot:
    """Of the model that a finished run ended with; `objects`: what it was given in Python."""
    for option in given_in_python(run.config):
        name = "federation" if option == "data" else option
        if objects[name] is None:
            raise FedkeelError(f"The {option} of '{run.directory}' was given in Python: give it again, with {name}=...")
    round, tensors = int(run.result()["round"]), run.tensors(MODEL)
    imports.refuse_unknown_names(run.directory)
    config = run.config.replace(executor="serial", device="auto")
    setup = prepare(config, **{**objects, "federation": objects["federation"] or data_from_afar(run.directory, config)})
    layout = setup.worker.layout
    groups = ({name: tensors[name] for name in names} for names in (layout.weights, layout.statistics))
    model = Broadcast(round, config.rounds, *groups)
    return Snapshot(round, setup.worker, model, model, {}, _kept(run), setup.held_out)


def _local(memory: Callable[[str], Remembered]) -> Lookup:
    """Of what a client remembers, its tensors of the model."""
    return lambda client: select(fetched(memory(client)), LOCAL)


def _kept(run: Run) -> Lookup:
    """What clients keep to themselves: personal models are of the round that the result is of."""
    if not (run.directory / "personal").exists():
        return _local(ClientMemory(run.directory / "memory").as_of(run.config.rounds))

    def look(client: str) -> Tensors:
        file = f"personal/{naming.file_name(client)}.safetensors"
        return run.tensors(file) if (run.directory / file).is_file() else {}

    return look
