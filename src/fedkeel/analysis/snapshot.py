"""A run at one moment: the global model, what the clients made of it, and a network of our own to look at them with.

It is made of a round while training, or of what a run left behind; a diagnostic need not know which.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedkeel import seeds
from fedkeel.core import imports, naming, state
from fedkeel.core.client import Batch
from fedkeel.core.messages import Broadcast, Update
from fedkeel.core.method import Method
from fedkeel.core.state import Tensors, select
from fedkeel.data.federation import Client, Federation
from fedkeel.engine.local import LOCAL, Worker
from fedkeel.engine.memory import ClientMemory, Damaged
from fedkeel.engine.setup import prepare
from fedkeel.engine.tasks import Remembered, fetched
from fedkeel.errors import FedkeelError
from fedkeel.nn.calibration import channel_sums, moments_of, normalised_layers
from fedkeel.nn.surgery import batch_statistics
from fedkeel.observer import Aggregated
from fedkeel.runs.extension import extensions
from fedkeel.runs.origin import data_from_afar
from fedkeel.runs.run import Run, given_in_python
from fedkeel.runs.store import MODEL, checkpoints, read_checkpoint

MOST_CLIENTS = 100  # that are looked at one by one after a run
RUNNING = {"mean": "running_mean", "variance": "running_var"}
Lookup = Callable[[str], Tensors]  # of a client, by its name


class Outputs(NamedTuple):
    """Features (N, d), logits (N, C), both in double precision, and labels (N,) of some samples, on the CPU; see
    `Snapshot`, which makes it.
    """

    features: Tensor
    logits: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Objects:
    """What a run got as objects in Python, and its configuration cannot name; see `Diagnostic.of_run`."""

    federation: Federation | None = None
    model: nn.Module | None = None
    method: Method | None = None

    def refuse_missing(self, run: Run, *options: str) -> None:
        given = given_in_python(run.config)
        for option in (option for option in given if not options or option in options):
            name = "federation" if option == "data" else option
            if getattr(self, name) is None:
                raise FedkeelError(
                    f"The {option} of '{run.directory}' was given in Python, not by name: "
                    f"use fedkeel.analysis.run(..., {name}=...)."
                )


@dataclass(frozen=True)
class Snapshot:
    """A run at the end of a round, or at its own end.

    Attributes:
        round: from 0.
        worker: a network that is only looked with; nothing of the run depends on it.
        model: the global model, as it is tested.
        sent: what the clients began with.
        updates: of the clients that took part; none after the run, when they are gone.
        kept: looks up the tensors of the model that a client keeps to itself, none if it has not trained.
        held_out: domains that are only tested.

    No example: `Diagnostic.measure` is given one.
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

    def testers(self) -> dict[str, list[Client]]:
        """Of each domain the clients whose test sets make up its own, each set once."""
        personal, seen = self.worker.method.is_personal, set()
        clients = {c.name: c for c in (*self.federation.one_of_each(), *(self.clients if personal else ()))}
        domains: dict[str, list[Client]] = {}
        for client in clients.values():
            key = client.name if personal else (client.domain, id(client.test))
            if len(client.test) and key not in seen:
                seen.add(key)
                domains.setdefault(client.domain, []).append(client)
        return domains

    def with_average(self, domains: Mapping[str, float]) -> dict[str, float]:
        """Values by domain, and their mean over the domains that train, each counting the same."""
        trained = [value for domain, value in domains.items() if domain not in self.held_out] or [*domains.values()]
        return {**domains, "average": sum(trained) / len(trained)}

    # -- models ----------------------------------------------------------------------------------------------
    def put_global(self, client: Client) -> None:
        """The global model, with the layers that this client keeps where the method gives it its own."""
        kept = self.kept(client.name) if self.worker.method.is_personal else {}
        self._put(self.model.weights, self.model.statistics, kept)

    def put_local(self, client: Client, *, statistics: str = "local") -> None:
        """What the client has trained, with its own statistics or with those it was sent ("sent").

        After the run nothing of it is left but the layers it keeps: then it is the global model.
        """
        mine = self.updates.get(client.name, self.model)
        of_statistics = self.sent if statistics == "sent" else mine
        self._put(mine.weights, of_statistics.statistics, self.kept(client.name))

    def _put(self, *groups: Tensors) -> None:
        worker = self.worker
        state.load(worker.entries, worker.initial_local, *(state.to_device(group, worker.device) for group in groups))

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
        """Features and logits of the present network in evaluation mode, with batch norm under its own statistics or
        under those of the batch."""
        model = self.worker.model.eval()
        found = []
        for batch in self.batches(client, indices, batch_size):
            with batch_statistics(model) if statistics == "batch" and len(batch.y) > 1 else nullcontext():
                output = model(batch.x)
            found.append(Outputs(output.features.double().cpu(), output.logits.double().cpu(), batch.y.cpu()))
        return joined(found)

    def training_outputs(self, client: Client) -> tuple[Outputs, Outputs]:
        """Of the client's model on its training images: under the statistics it was sent, and under the batch's."""
        self.put_local(client, statistics="sent")
        size = self.worker.config.batch_size
        under_global = self.outputs(client, client.train, batch_size=size)
        return under_global, self.outputs(client, client.train, batch_size=size, statistics="batch")

    def test_outputs(self, client: Client, statistics: str = "global") -> Outputs:
        """Of the global model on this client's test set, as it is evaluated: a client without layers of its own follows
        the method's rule for such clients."""
        self.put_global(client)
        if self.worker.method.is_stranger(self.kept(client.name)):
            statistics = "batch"
        return self.outputs(client, client.test, statistics=statistics)

    def test_features(self) -> dict[str, Outputs]:
        """Of every domain's test set under the global model."""
        found = {domain: [self.test_outputs(client) for client in group] for domain, group in self.testers().items()}
        return {domain: joined(parts) for domain, parts in found.items()}

    # -- batch-norm statistics -------------------------------------------------------------------------------
    def layer_statistics(self) -> dict[str, dict[str, Tensors]]:
        """By client and layer, "mean" and "variance" of the layer's inputs by channel, (C,) each, in double precision.

        While training, the running statistics that the client ended the round with; after the run, when those are gone,
        the moments over the client's training data under the final model.
        """
        if not self.updates:
            return {client.name: self.input_moments([client]) for client in self.clients}
        found = {}
        for client in self.clients:
            tensors = {**self.updates[client.name].statistics, **self.kept(client.name)}
            prefixes = {layer: f"{layer}." if layer else "" for layer in normalised_layers(self.worker.model)}
            found[client.name] = {
                layer: {kind: tensors[prefix + name].double().cpu() for kind, name in RUNNING.items()}
                for layer, prefix in prefixes.items()
            }
        return found

    def input_moments(self, clients: Sequence[Client]) -> dict[str, Tensors]:
        """Of each layer over all values that it gets of these clients' training data under the global model: clients,
        samples and positions together."""
        sums: dict[str, Tensor] = {}

        def add(layer: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            sums[layer] = sums.get(layer, 0) + channel_sums(inputs[0])

        layers = normalised_layers(self.worker.model)
        with ExitStack() as hooks:
            for name, layer in layers.items():
                hooks.enter_context(layer.register_forward_pre_hook(partial(add, name)))
            for client in clients:
                self._put(self.model.weights, self.model.statistics, self.kept(client.name))
                self.outputs(client, client.train)
        moments = {layer: moments_of(total) for layer, total in sums.items()}
        return {layer: {"mean": mean.cpu(), "variance": var.cpu()} for layer, (mean, var) in moments.items()}


def joined(parts: Sequence[Outputs]) -> Outputs:
    return Outputs(*map(torch.cat, zip(*parts, strict=True)))


def some_clients(federation: Federation, seed: int) -> list[Client]:
    """All that train, or of more than `MOST_CLIENTS` that many, drawn once for the run, in the federation's order."""
    count = len(federation.clients)
    if count <= MOST_CLIENTS:
        return list(federation.clients)
    drawn = seeds.sample(count, MOST_CLIENTS, seeds.generator(seed, "diagnosed clients"))
    return [federation.clients[i] for i in sorted(drawn)]


# -- of a round ------------------------------------------------------------------------------------------------------
def own_worker(worker: Worker) -> Worker:
    """A network of the same kind over the same images that shares nothing with the one that trains."""
    config = worker.config
    return Worker(config, worker.federation, worker.method, copy.deepcopy(worker.model), worker.device, worker.store)


def of_round(seen: Aggregated, worker: Worker, held_out: Sequence[str]) -> Snapshot:
    updates = {update.client: update for update in seen.updates}
    local = _local_tensors(seen.memory.look)
    return Snapshot(seen.sent.round, worker, seen.model, seen.sent, updates, local, held_out)


def _local_tensors(memory: Callable[[str], Remembered]) -> Lookup:
    """Of what a client remembers, its tensors of the model."""
    return lambda client: select(fetched(memory(client)), LOCAL)


# -- of a run directory ----------------------------------------------------------------------------------------------
def of_run(run: Run, objects: Objects) -> list[Snapshot]:
    """Of every model that a run has kept: those of its checkpoints, the oldest first, and last the one it ended with,
    which need not be of the last round."""
    objects.refuse_missing(run)
    models = {round: (tensors, local) for round, tensors, local in _checkpoints(run)}
    # Of a run that is being extended, the model is an earlier one.
    if (run.directory / MODEL).exists() and (run.finished or not extensions(run.directory)):
        # Personal models are of the round that the result is of, which need not be that of the last checkpoint.
        is_remembered = models and not (run.directory / "personal").exists()
        local = models[max(models)][1] if is_remembered else _personal(run)
        summary = run.summary
        round = int(summary["round"]) if summary else run.config.rounds - 1
        models.pop(round, None)
        models[round] = run.tensors(MODEL), local
    if not models:
        raise FedkeelError(f"'{run.directory}' has neither a model nor a checkpoint: let it train for a round first.")
    imports.refuse_unknown_names(run.directory)
    config = run.config.replace(executor="serial", device="auto")
    federation = objects.federation or data_from_afar(run.directory, config)
    setup = prepare(config, federation=federation, model=objects.model, method=objects.method)
    layout, snapshots = setup.worker.layout, []
    for round, (tensors, local) in models.items():
        missing = [name for name in (*layout.weights, *layout.statistics) if name not in tensors]
        if missing:
            raise FedkeelError(f"The model of '{run.directory}' lacks '{missing[0]}': it is not of its configuration.")
        weights, statistics = ({name: tensors[name] for name in names} for names in (layout.weights, layout.statistics))
        model = Broadcast(round, config.rounds, weights, statistics)
        snapshots.append(Snapshot(round, setup.worker, model, model, {}, local, setup.held_out))
    return snapshots


def _checkpoints(run: Run) -> Iterator[tuple[int, Tensors, Lookup]]:
    """Those that are whole: round, model and what clients keep. The run may go on meanwhile, so nothing is locked and
    nothing is changed."""
    memory = ClientMemory(run.directory / "memory")
    for folder in checkpoints(run.directory):
        try:
            header, checkpoint = read_checkpoint(folder)
            memory.check(header["memory"], checkpoint.round)
        except Damaged:
            continue
        # A group without tensors is not stored, such as the statistics of a model without batch norm.
        tensors = {**checkpoint.groups["weights"], **checkpoint.groups.get("statistics", {})}
        yield checkpoint.round, tensors, _local_tensors(memory.as_of(checkpoint.round))


def _personal(run: Run) -> Lookup:
    def look(client: str) -> Tensors:
        file = f"personal/{naming.file_name(client)}.safetensors"
        return run.tensors(file) if (run.directory / file).is_file() else {}

    return look
