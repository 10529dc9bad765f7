"""How good a model is: on one client's data, and over the federation, with what a person should know of these tests.

Under one global model every test set is tested once, however many clients share it. A method with layers of its own
on each client is tested on every one, or, of very many, on a sample that stays the same for the whole run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeel import seeds
from fedkeel.config import Config, from_one
from fedkeel.core.evaluation import Evaluation, Outputs, diverged_domains
from fedkeel.core.messages import Broadcast, Missing
from fedkeel.core.types import Classifier
from fedkeel.data.federation import Client
from fedkeel.engine.batches import ImageStore
from fedkeel.engine.measuring import completed
from fedkeel.engine.metrics import asked
from fedkeel.engine.tasks import Remembered, Task
from fedkeel.errors import TrainingError, quoted
from fedkeel.nn.calibration import Calibration, Calibrator
from fedkeel.nn.surgery import batch_statistics
from fedkeel.stopping import EVALUATION, reached

if TYPE_CHECKING:
    from fedkeel.engine.executors.executor import Executor
    from fedkeel.engine.memory import ClientMemory
    from fedkeel.engine.setup import Setup

SPLITS = ("test", "validation")
AT_ONCE = 256  # clients that are tested in one go
Look = Callable[[str], Remembered]


def split_indices(client: Client, split: str) -> Tensor:
    return client.test if split == "test" else client.validation


# -- one client ------------------------------------------------------------------------------------------------------
class Evaluator:
    """Accuracy, loss and what else is asked for of one model, under global or batch statistics."""

    def __init__(self, model: Classifier, store: ImageStore, config: Config) -> None:
        self.model, self.store, self.config, self._metrics = model, store, config, asked(config)
        self._calibrator = Calibrator(model, lambda x: model(x).logits)

    def test(
        self,
        client: Client,
        splits: Sequence[str],
        statistics: Sequence[str],
        part: slice | None = None,
        *,
        stranger: bool = False,
        detailed: bool = False,
    ) -> list[Evaluation]:
        """Under each of these statistics; "site", the last, changes the model's.

        `stranger`: the model has none that were trained for this client, so it is tested by batch, and calibrated to
        the client's alone.
        """
        results, config = [], self.config
        for kind in statistics:
            tested, used = client, "batch" if stranger else kind
            if kind == "site":
                prior, always = (0.0, True) if stranger else (config.site_prior, config.site_always)
                tested, _ = self.calibrate(client, config.site_images, prior, always=always)
                used = "global"
            found = self.evaluate(tested, splits, used, part, detailed=detailed)
            results += [replace(result, statistics=kind) for result in found]
        return results

    def calibrate(self, client: Client, images: int, prior: float, *, always: bool) -> tuple[Client, Calibration]:
        """Calibrate the model, as it is loaded, to a client; the client with what is left of it to be tested on.

        The images are drawn from its training data, or, where it has none, from its test data, of which at least half
        are left; 0 is all of them. They are the same in every round.
        """
        trains = len(client.train) > 0
        own = client.train if trains else client.test
        most = len(own) if trains else len(own) // 2
        order = torch.randperm(len(own), generator=seeds.generator(self.config.seed, "site images", client.name))
        count = min(images or most, most)
        drawn, left = order[:count], order[count:]
        transform, size = self.store.federation.test_transform, self.config.evaluation_batch
        self.model.eval()
        record = self._calibrator.calibrate(
            lambda: self.store.in_order(own[drawn], size, transform), prior, always=always
        )
        return client if trains else replace(client, test=own[left.sort().values]), record

    @torch.no_grad()
    def evaluate(
        self,
        client: Client,
        splits: Sequence[str],
        statistics: str = "global",
        part: slice | None = None,
        *,
        detailed: bool = False,
    ) -> list[Evaluation]:
        """`statistics`: "global", those that the model has, or "batch". `part`: of each split's samples those that
        count, if not all. `detailed`: with the outputs, which are there without being asked for where a metric needs
        them."""
        self.model.eval()
        of_samples = {name: metric for name, metric in self._metrics.items() if metric.per_sample}
        collect = detailed or len(of_samples) < len(self._metrics)
        federation, results = self.store.federation, []
        for split in splits:
            indices = self._order(client, split, statistics)[part or slice(None)]
            if not len(indices):
                continue
            reached(EVALUATION)
            # Samples that are classified rightly, their loss, and the metrics.
            sums = torch.zeros(2 + len(of_samples), dtype=torch.float64, device=self.store.device)
            outputs = []
            for batch in self.store.in_order(indices, self.config.evaluation_batch, federation.test_transform):
                # As in training, a single sample has no batch statistics and is normalised with the global ones.
                by_batch = statistics == "batch" and len(batch.y) > 1
                with batch_statistics(self.model) if by_batch else nullcontext():
                    logits = self.model(batch.x).logits.float()
                numbers = [logits.argmax(1) == batch.y, F.cross_entropy(logits, batch.y, reduction="sum")]
                numbers += [metric(logits, batch.y).double() for metric in of_samples.values()]
                sums += torch.stack([number.sum().double() for number in numbers])
                outputs += [logits] if collect else []
            correct, loss, *values = sums.tolist()
            metrics = dict(zip(of_samples, values, strict=True))
            found = Evaluation(client.name, client.domain, split, statistics, int(correct), len(indices), loss, metrics)
            if collect:
                images = indices.cpu()
                said = Outputs(torch.cat(outputs).cpu(), federation.labels[images].cpu(), images)
                found = replace(found, outputs=said)
            results.append(found)
        return results

    def _order(self, client: Client, split: str, statistics: str) -> Tensor:
        """Under batch statistics the samples come in an order that is random but always the same: images often lie
        class by class, and a batch of one class has other statistics than any batch in training."""
        indices = split_indices(client, split)
        if statistics == "global":
            return indices
        generator = seeds.generator(self.config.seed, "evaluation", client.domain, split)
        return indices[torch.randperm(len(indices), generator=generator)]


# -- the federation --------------------------------------------------------------------------------------------------
@dataclass
class FederatedEvaluation:
    """Evaluates a model on the clients whose test and validation sets say how good it is."""

    setup: Setup
    executor: Executor
    memory: ClientMemory
    note: Callable[[str], None]
    _diverged: set[str] = field(default_factory=set)  # domains of which that was told, once

    def evaluate(self, broadcast: Broadcast) -> list[Evaluation]:
        evaluations = list(self._evaluate(broadcast, SPLITS, self.memory.look))
        if new := [name for name in diverged_domains(evaluations) if name not in self._diverged]:
            self._diverged |= {*new}
            self.note(
                f"Round {from_one(broadcast.round)}: the evaluated loss on {quoted(new)} is not finite, the model has "
                "diverged there: a lower learning rate may help."
            )
        return evaluations

    def examine(self, broadcast: Broadcast, look: Look) -> list[Evaluation]:
        """The test sets in detail; `look`: what each client remembered then."""
        return list(self._evaluate(broadcast, ("test",), look, detailed=True))

    def _evaluate(
        self, broadcast: Broadcast, splits: Sequence[str], look: Look, *, detailed: bool = False
    ) -> Iterator[Evaluation]:
        test = partial(self._test, broadcast=broadcast, look=look, detailed=detailed)
        if not self._by_client:
            return itertools.chain.from_iterable(test(self._common(splits)).values())
        # Of a sample's clients that never trained, all that share their sets get the same numbers: the first one's.
        first_like: dict[Hashable, str] = {}
        like = {name: first_like.setdefault(self._alike(name), name) for name in self._names}
        found = test(dict.fromkeys(like.values(), splits))
        return (replace(one, client=name) for name in self._names for one in found[like[name]])

    def _test(
        self, wanted: Mapping[str, Sequence[str]], broadcast: Broadcast, look: Look, *, detailed: bool
    ) -> dict[str, list[Evaluation]]:
        """On each of these clients these splits; some at once, since each comes with what the client remembers."""
        metrics, number = asked(self.setup.config), from_one(broadcast.round)
        found: dict[str, list[Evaluation]] = {name: [] for name in wanted}
        names = list(wanted)
        for some in (names[i : i + AT_ONCE] for i in range(0, len(names), AT_ONCE)):
            tasks = [Task("evaluate", name, look(name), splits=wanted[name], detailed=detailed) for name in some]
            for result in self.executor.map(tasks, broadcast):
                if isinstance(result, Missing):
                    self.note(f"Round {number}: '{result.client}' did not evaluate, {result.reason}.")
                    continue
                found[result.client] = [completed(one, metrics, detailed=detailed) for one in result.outcome]
        if wanted and not any(found.values()):
            raise TrainingError(f"No client evaluated the model of round {number}: see to them and resume.")
        return found

    def _common(self, splits: Sequence[str]) -> dict[str, list[str]]:
        """Under one global model, every set of a domain is tested once: on which client which splits are."""
        wanted: dict[str, list[str]] = {}
        seen: set[tuple[str, str, int]] = set()
        for site in self.setup.federation.one_of_each():
            for split in splits:
                key = (split, site.domain, id(indices := split_indices(site, split)))
                if len(indices) and key not in seen:
                    seen.add(key)
                    wanted.setdefault(site.name, []).append(split)
        return wanted

    @property
    def _by_client(self) -> bool:
        """Whether clients that share a test set are tested on it one by one, as their models are not the same."""
        return self.setup.worker.method.is_personal or "site" in self.setup.config.statistics

    def _alike(self, name: str) -> Hashable:
        if not self._is_sampled or name in self.memory or "site" in self.setup.config.statistics:
            return name
        site = self.setup.federation[name]
        return site.domain, id(site.test), id(site.validation)

    @property
    def _is_sampled(self) -> bool:
        return 0 < self.setup.config.evaluate_clients < len(self.setup.federation.clients)

    @cached_property
    def _names(self) -> list[str]:
        """Of the clients that a personal method is tested on: all, or of very many a sample that stays."""
        federation, config = self.setup.federation, self.setup.config
        clients: Sequence[Client] = federation.clients
        if self._is_sampled:
            count, generator = len(clients), seeds.generator(config.seed, "tested clients")
            clients = [clients[i] for i in sorted(seeds.sample(count, config.evaluate_clients, generator))]
            # A domain of few clients among very many must not be without a number.
            first_of = {site.domain: site for site in reversed(list(federation.one_of_each(unseen=False)))}
            clients += [first_of[domain] for domain in sorted(first_of.keys() - {site.domain for site in clients})]
            self.note(
                f"'{self.setup.worker.method.name}' is tested on {len(clients):,} of the {count:,} clients, drawn once "
                "for the whole run (evaluate_clients)."
            )
        sites = itertools.chain(clients, federation.unseen)
        return [site.name for site in sites if any(len(split_indices(site, split)) for split in SPLITS)]
