"""A moment of a run: the global model, what the clients made of it, and a network of our own to look at them with.

It is made of a round while training, or of what a run left behind; a diagnostic need not know which.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedkeel import seeds
from fedkeel.core import naming, state
from fedkeel.core.client import Batch
from fedkeel.core.messages import Broadcast, Update
from fedkeel.core.method import Method
from fedkeel.core.state import Tensors, select
from fedkeel.data.federation import Client, Federation
from fedkeel.engine.checkpointing import Checkpoint
from fedkeel.engine.local import LOCAL, Worker
from fedkeel.engine.memory_files import Damaged, MemoryFiles
from fedkeel.engine.setup import prepare
from fedkeel.errors import FedkeelError
from fedkeel.nn.surgery import batch_statistics
from fedkeel.observer import Aggregated
from fedkeel.runs.run import PYTHON_OBJECT, Run
from fedkeel.runs.store import MODEL, DamagedCheckpoint, read_checkpoint

Array = NDArray[np.float64]
MOST_CLIENTS = 100  # that are looked at one by one after a run


class Outputs(NamedTuple):
    """Features (N, d), logits (N, C) and labels (N,) of some samples."""

    features: Array
    logits: Array
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Objects:
    """What a run got as objects in Python, and its configuration cannot name."""

    federation: Federation | None = None
    model: nn.Module | None = None
    method: Method | None = None

    def refuse_missing(self, run: Run) -> None:
        for option, name in (("data", "federation"), ("model", "model"), ("method", "method")):
            if getattr(run.config, option) == PYTHON_OBJECT and getattr(self, name) is None:
                raise FedkeelError(
                    f"The {option} of '{run.directory}' was given in Python, not by name: "
                    f"use fedkeel.analysis.run(..., {name}=...)."
                )


@dataclass(frozen=True)
class Moment:
    """One round of a run, or its end.

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
    updates: Mapping[str, Update] = field(default_factory=dict)
    kept: Callable[[str], Tensors] = lambda _: {}
    held_out: Sequence[str] = ()

    @property
    def federation(self) -> Federation:
        return self.worker.federation

    @cached_property
    def clients(self) -> list[Client]:
        """Those of the round, in the federation's order; after the run all that train, of very many a sample."""
        if self.updates:
            return [self.federation[name] for name in self.updates]
        return some_clients(self.federation, self.worker.config.seed)

    def tested(self) -> dict[str, list[Client]]:
        """Of each domain the clients whose test sets make up its own, each set once."""
        personal, seen = self.worker.method.is_personal, set()
        sites = {site.name: site for site in (*self.federation.one_of_each(), *(self.clients if personal else ()))}
        domains: dict[str, list[Client]] = {}
        for site in sites.values():
            key = site.name if personal else (site.domain, id(site.test))
            if len(site.test) and key not in seen:
                seen.add(key)
                domains.setdefault(site.domain, []).append(site)
        return domains

    def average(self, domains: Mapping[str, float]) -> float:
        """The mean over the domains that train, each counting the same."""
        seen = [value for domain, value in domains.items() if domain not in self.held_out]
        return float(np.mean(seen or list(domains.values())))

    # -- models ----------------------------------------------------------------------------------------------
    def put_global(self, site: Client) -> None:
        """The global model, with the layers that this client keeps where the method gives it its own."""
        kept = self.kept(site.name) if self.worker.method.is_personal else {}
        self._put(self.model.weights, self.model.statistics, kept)

    def put_local(self, client: Client, *, statistics: str = "local") -> None:
        """What the client has trained, with its own statistics or with those it was sent ("sent").

        After the run nothing of it is left but the layers it keeps: then it is the global model.
        """
        update, kept = self.updates.get(client.name), self.kept(client.name)
        if update is None:
            self._put(self.model.weights, self.model.statistics, kept)
        else:
            self._put(update.weights, update.statistics if statistics == "local" else self.sent.statistics, kept)

    def _put(self, *groups: Tensors) -> None:
        worker = self.worker
        state.load(worker.entries, worker.initial_local, *(state.to_device(group, worker.device) for group in groups))

    # -- what they say ---------------------------------------------------------------------------------------
    def batches(self, site: Client, indices: Tensor, batch_size: int) -> Iterator[Batch]:
        """These images without augmentation, in an order that is random but always the same: images often lie class by
        class, and a batch of one class has other statistics than any batch in training."""
        generator = seeds.generator(self.worker.config.seed, "diagnostic", site.name)
        shuffled = indices[torch.randperm(len(indices), generator=generator)]
        return self.worker.store.in_order(shuffled, batch_size, self.federation.test_transform, least=2)

    @torch.no_grad()
    def outputs(self, site: Client, indices: Tensor, *, batch_size: int = 0, statistics: str = "global") -> Outputs:
        """Features and logits of the present network in evaluation mode, with batch norm under its own statistics or
        under those of the batch."""
        model, config = self.worker.model.eval(), self.worker.config
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for batch in self.batches(site, indices, batch_size or config.evaluation_batch):
            with batch_statistics(model) if statistics == "batch" and len(batch.y) > 1 else nullcontext():
                output = model(batch.x)
            found.append((output.features.double().cpu(), output.logits.double().cpu(), batch.y.cpu()))
        features, logits, labels = (torch.cat(parts).numpy() for parts in zip(*found, strict=True))
        return Outputs(features, logits, labels)

    def test_outputs(self, site: Client, statistics: str = "global") -> Outputs:
        """Of the global model on this client's test set, as it is evaluated: a client without layers of its own follows
        the method's rule for such clients."""
        method = self.worker.method
        self.put_global(site)
        if method.is_personal and not self.kept(site.name) and method.unseen_statistics == "batch":
            statistics = "batch"
        return self.outputs(site, site.test, statistics=statistics)

    def test_features(self) -> dict[str, Outputs]:
        """Of every domain's test set under the global model."""
        found = {domain: [self.test_outputs(site) for site in sites] for domain, sites in self.tested().items()}
        return {domain: Outputs(*map(np.concatenate, zip(*parts, strict=True))) for domain, parts in found.items()}


def own_worker(worker: Worker) -> Worker:
    """A network of the same kind over the same images that shares nothing with the one that trains."""
    config = worker.config.replace(compile=False)
    model = copy.deepcopy(worker.model)
    return Worker(config, worker.federation, worker.method, model, worker.device, worker.store)


def of_round(state: Aggregated, worker: Worker, held_out: Sequence[str]) -> Moment:
    return Moment(
        round=state.sent.round,
        worker=worker,
        model=state.model,
        sent=state.sent,
        updates={update.client: update for update in state.updates},
        kept=lambda name: select(state.memory.look(name), LOCAL),
        held_out=held_out,
    )


def of_run(run: Run, objects: Objects) -> Moment:
    """The end of a run, or the last checkpoint of one that is not finished."""
    return _left_behind(run, objects, earlier=False)[-1]


def all_of_run(run: Run, objects: Objects) -> list[Moment]:
    """The rounds of which a run has kept the model, in order: those of its checkpoints, and its end."""
    return _left_behind(run, objects, earlier=True)


def _left_behind(run: Run, objects: Objects, *, earlier: bool) -> list[Moment]:
    objects.refuse_missing(run)
    path, summary = run.directory / MODEL, run.summary
    found = [(checkpoint.round, header, checkpoint) for header, checkpoint in whole_checkpoints(run, every=earlier)]
    if not path.exists() and not found:
        raise FedkeelError(f"'{run.directory}' has neither a model nor a checkpoint: let it train for a round first.")
    config = run.config.replace(executor="serial", device="auto", profile=False, compile=False)
    setup = prepare(config, federation=objects.federation, model=objects.model, method=objects.method)
    layout = setup.worker.layout

    def moment(round: int, tensors: Tensors, kept: Callable[[str], Tensors]) -> Moment:
        missing = [name for name in (*layout.weights, *layout.statistics) if name not in tensors]
        if missing:
            raise FedkeelError(f"The model of '{run.directory}' lacks '{missing[0]}': it is not of its configuration.")
        weights, statistics = ({name: tensors[name] for name in names} for names in (layout.weights, layout.statistics))
        model = Broadcast(round, config.rounds, weights, statistics)
        return Moment(round, setup.worker, model, model, kept=kept, held_out=setup.held_out)

    moments: dict[int, Moment] = {}
    if earlier or not path.exists():
        for round, header, checkpoint in found:
            # A group without tensors is not stored, such as the statistics of a model without batch norm.
            tensors = {**checkpoint.groups["weights"], **checkpoint.groups.get("statistics", {})}
            moments[round] = moment(round, tensors, _remembered(run, header))
    if path.exists():
        # Personal models are of the round that the result is of, which need not be that of the last checkpoint.
        kept = _remembered(run, found[0][1]) if found and not (path.parent / "personal").exists() else _personal(run)
        round = int(summary["round"]) if summary else config.rounds - 1
        moments[round] = moment(round, run.tensors(MODEL), kept)
    return [moments[round] for round in sorted(moments)] if earlier else list(moments.values())


def _remembered(run: Run, header: Mapping[str, Any]) -> Callable[[str], Tensors]:
    memory = MemoryFiles(run.directory / "memory").as_of(header["memory"])
    return lambda name: select(memory(name), LOCAL)


def _personal(run: Run) -> Callable[[str], Tensors]:
    def look(name: str) -> Tensors:
        file = naming.find(run.directory / "personal", name, ".safetensors")
        return run.tensors(f"personal/{file.name}") if file else {}

    return look


def whole_checkpoints(run: Run, *, every: bool) -> list[tuple[dict[str, Any], Checkpoint]]:
    """The newest one that is whole, or every one, newest first. The run may go on meanwhile, so nothing is locked and
    nothing is changed."""
    found: list[tuple[dict[str, Any], Checkpoint]] = []
    for folder in sorted((run.directory / "checkpoints").glob("round-*"), reverse=True):
        try:
            header, checkpoint = read_checkpoint(folder)
            MemoryFiles(run.directory / "memory").check(header["memory"])
        except (DamagedCheckpoint, Damaged):
            continue
        found.append((header, checkpoint))
        if not every:
            break
    return found


def some_clients(federation: Federation, seed: int) -> list[Client]:
    """All that train, or of more than `MOST_CLIENTS` that many, drawn once for the run, in the federation's order."""
    count = len(federation.clients)
    if count <= MOST_CLIENTS:
        return list(federation.clients)
    chosen = seeds.sample(count, MOST_CLIENTS, seeds.generator(seed, "diagnosed clients"))
    return [federation.clients[i] for i in sorted(chosen)]
