"""From a configuration to everything a run needs."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fedkeel import data, methods, models, seeds
from fedkeel.config import Config
from fedkeel.core.composition import Composition
from fedkeel.core.method import Method
from fedkeel.core.types import Classifier
from fedkeel.data.federation import Federation
from fedkeel.engine import checks
from fedkeel.engine.batches import probe
from fedkeel.engine.executors.executor import EXECUTORS, Executor, choose_executor, runs_elsewhere
from fedkeel.engine.local import Worker
from fedkeel.errors import FedkeelError
from fedkeel.models import timm_models
from fedkeel.models.wrapped import refuse_lazy
from fedkeel.spec import names, parse
from fedkeel.trust import privacy
from fedkeel.trust.rules import Rules

log = logging.getLogger("fedkeel")


@dataclass(frozen=True)
class Setup:
    """A run, ready to start.

    Attributes:
        worker: the prepared model, method and data on the device.
        given: the federation as it was before a method pooled it; pooled, all domains would be unseen.
        executor_name: which executor `auto` came to.
        rules: who takes part, how a step comes to its gradients, how updates become one model.
    """

    config: Config
    worker: Worker
    given: Federation
    executor_name: str
    rules: Rules

    @property
    def federation(self) -> Federation:
        return self.worker.federation

    @property
    def domains(self) -> list[str]:
        """All of the federation, whether or not they can be tested."""
        return self.given.domains

    @property
    def held_out(self) -> list[str]:
        """Domains that are evaluated and never trained on."""
        return list(dict.fromkeys(client.domain for client in self.given.unseen))

    def noise_from(self) -> str:
        """Whose randomness the noise of a private run rests on: one of `tables.SOURCES`."""
        return "system" if self.rules.secret else "seed"

    def account(self, rounds: int) -> dict[str, Any]:
        """What so many rounds of a private run have spent, for the records; of any other run nothing."""
        epsilon = privacy.spent(self.config, rounds, self._sizes)
        return {} if epsilon is None else {"epsilon": epsilon, "randomness": self.noise_from()}

    @cached_property
    def _sizes(self) -> set[int]:
        """Of the clients' data, where the account needs them: there may be a great many clients."""
        return {client.samples for client in self.federation.clients} if self.config.dp == "local" else set()

    def executor(self) -> Executor:
        return EXECUTORS.build(self.executor_name, self.worker)


def prepare(
    config: Config,
    *,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    method: Method | None = None,
) -> Setup:
    """Build what the configuration names, or take the objects given in its place, and check that they fit."""
    device = choose_device(config)
    executor_name = choose_executor(config, device)
    composed = Composition.of(method or methods.build(config.method))
    rules = privacy.choose_rules(config)
    checks.check_options(config, composed, rules.aggregator.defence)
    given = federation or load_federation(config)
    given = given.on_validation() if config.evaluate_on == "validation" else given
    checks.check_clients(config, given)
    federation = given.pooled() if composed.is_pooled else given
    checks.check_rounds(config, federation, rules.aggregator.defence)
    network = build_model(config, federation, composed, model)
    privacy.refuse_network(config, network)
    worker = Worker(config, federation, composed, network, device, gradient_rule=rules.gradients)
    checks.warn(worker)
    return Setup(config, worker, given, executor_name, rules)


def load_federation(config: Config) -> Federation:
    given = parse(config.data)
    options = {"partition": config.partition, "unseen": names(config.unseen), "subsample": config.subsample or None}
    return data.load(given.name, **{**options, "seed": config.seed, **given.options})


def build_model(config: Config, federation: Federation, method: Composition, given: nn.Module | None) -> Classifier:
    """The network, changed as the method wants it, tried on two images."""
    with seeds.default_generator(config.seed, "model"):
        if given is None:
            shape = probe(federation).shape[1:]
            named = timm_models.with_weights(config.model, config.weights)
            network: nn.Module = models.build_for(named, federation.num_classes, shape)
        else:
            refuse_lazy(given)
            network = copy.deepcopy(given)  # the caller's own stays as it is, for the next run
        classifier = checks.check_classifier(network)
        if timm_models.is_file(config.weights):
            log.warning("%s", models.load_weights(classifier, config.weights))
        method.prepare(classifier)
    checks.refuse_stateless(config, method)  # once more: only now it is seen what it keeps
    checks.refuse_nothing_sent(config, method, classifier)
    checks.check_network(classifier, federation)
    return classifier


def choose_device(config: Config) -> torch.device:
    """That of this process; clients that run elsewhere have others."""
    if runs_elsewhere(config):
        return torch.device("cpu")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "auto":
        return torch.device("cuda" if cards else "cpu")
    if config.device not in ("cpu", *(["cuda"] if cards else []), *(f"cuda:{number}" for number in range(cards))):
        has = f"{cards} GPUs, counted from 0" if cards else "no GPU that torch sees"
        raise FedkeelError(
            f"'device' is '{config.device}', and this machine has {has}: give auto, cpu, cuda or cuda:N."
        )
    return torch.device(config.device)
