"""Who is tested when a round is evaluated.

Under one global model every test set is tested once, however many clients share it. A method with layers of its own
on each client is tested on every one, or, of very many, on a sample that stays the same for the whole run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fedkeel import seeds
from fedkeel.config import Config
from fedkeel.core.composition import Composition
from fedkeel.core.evaluation import Evaluation
from fedkeel.core.messages import Broadcast
from fedkeel.data.federation import Client, Federation
from fedkeel.engine.evaluation import split_indices
from fedkeel.engine.executors.executor import Executor

SPLITS = ("test", "validation")


@dataclass
class Tested:
    """The clients whose test and validation sets say how good the model is."""

    config: Config
    federation: Federation
    method: Composition
    executor: Executor
    note: Callable[[str], None]

    def evaluate(self, broadcast: Broadcast) -> list[Evaluation]:
        """Test and validation accuracy: of every client that has layers of its own; under one global model, of every
        set of a domain once, however many of its clients share it."""
        if self.method.is_personal:
            return self._personal(broadcast)
        evaluations: list[Evaluation] = []
        for split in SPLITS:
            first_with: dict[tuple[str, int], str] = {}
            for site in self.federation.one_of_each():
                indices = split_indices(site, split)
                if len(indices):
                    first_with.setdefault((site.domain, id(indices)), site.name)
            for group in self.executor.evaluate(list(first_with.values()), broadcast, (split,)):
                evaluations += group
        return evaluations

    def _personal(self, broadcast: Broadcast) -> list[Evaluation]:
        if self._is_sampled:
            # Of clients that never trained, all that share their sets get the same numbers: the first one's serve.
            first_like: dict[Hashable, str] = {}
            like = {name: first_like.setdefault(self._alike(name), name) for name in self._names}
        else:
            like = {name: name for name in self._names}
        asked = list(dict.fromkeys(like.values()))
        results = dict(zip(asked, self.executor.evaluate(asked, broadcast, SPLITS), strict=True))
        return [replace(result, client=name) for name in self._names for result in results[like[name]]]

    def _alike(self, name: str) -> Hashable:
        if name in self.executor.memory:
            return name
        site = self.federation[name]
        return site.domain, id(site.test), id(site.validation)

    @property
    def _is_sampled(self) -> bool:
        return 0 < self.config.evaluate_clients < len(self.federation.clients)

    @cached_property
    def _names(self) -> list[str]:
        """Of the clients that a personal method is tested on: all, or of very many a sample that stays."""
        clients: Sequence[Client] = self.federation.clients
        if self._is_sampled:
            count, most = len(clients), self.config.evaluate_clients
            chosen = seeds.sample(count, most, seeds.generator(self.config.seed, "tested clients"))
            clients = [self.federation.clients[i] for i in sorted(chosen)]
            # A domain of few clients among very many must not be without a number.
            first_of = {site.domain: site for site in reversed(list(self.federation.one_of_each(unseen=False)))}
            clients += [first_of[domain] for domain in sorted(first_of.keys() - {site.domain for site in clients})]
            self.note(
                f"'{self.method.name}' is tested on {len(clients):,} of the {count:,} clients, drawn once for the "
                "whole run (evaluate_clients)."
            )
        sites = itertools.chain(clients, self.federation.unseen)
        return [site.name for site in sites if any(len(split_indices(site, split)) for split in SPLITS)]
