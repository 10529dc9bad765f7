"""From a configuration to everything a run needs, with every check that can be made before training."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fedkeel import data, methods, models, seeds
from fedkeel.config import Config
from fedkeel.core.composition import Composition
from fedkeel.core.method import Method
from fedkeel.core.state import batch_norms
from fedkeel.core.types import Classifier, Output
from fedkeel.data.federation import Federation
from fedkeel.engine import footprint
from fedkeel.engine.executors.executor import EXECUTORS, ClientMemory, Executor
from fedkeel.engine.local import Worker
from fedkeel.engine.memory_files import Shelf
from fedkeel.engine.profile import READING, SET_UP, Profile, Unprofiled
from fedkeel.engine.profiled import ProfiledWorker
from fedkeel.engine.threads import available_cores, choose_threads
from fedkeel.errors import DataError, FedkeelError, MethodError, nearest, shortage
from fedkeel.nn.hybrid_batch_norm import hybrid_norms
from fedkeel.spec import parse
from fedkeel.trust import privacy
from fedkeel.trust.robust import Defence

log = logging.getLogger("fedkeel")


@dataclass
class Setup:
    """A run, ready to start.

    Attributes:
        worker: the prepared model, method and data on the device.
        held_out: domains that are evaluated and never trained on.
        domains: all of the federation, whether or not they can be tested.
        executor_name: which executor `auto` came to.
        profile: the clock of a run with `profile`.
        defence: the robust rules of the server.
        given: the federation as it was before a method pooled it.
    """

    config: Config
    worker: Worker
    held_out: list[str]
    executor_name: str
    profile: Unprofiled = field(default_factory=Unprofiled)
    defence: Defence = field(default_factory=Defence)
    domains: list[str] = field(default_factory=list)
    given: Federation | None = None

    @property
    def federation(self) -> Federation:
        return self.worker.federation

    def grown(self) -> Federation | None:
        """The federation with clients that came since the last round, where clients can come: over a network."""
        return None

    def noise_from(self) -> str:
        """Whose randomness the noise of a private run rests on: one of `tables.SOURCES`."""
        return self.worker.randomness.source

    def with_threads(self, note: Callable[[str], None]) -> Setup:
        """The same with the number of threads settled: it decides the last bits, so a resumed run needs to know it."""
        config = self.config
        if self.executor_name != "processes" or config.threads:
            return self
        count = clients_per_round(config, len(self.federation.clients))
        config = config.replace(threads=1 if config.workers else choose_threads(self.worker, count, note))
        self.worker.config = config
        name = choose_executor(config, self.worker.device)
        if name == "serial":
            self.profile.settled(name, workers=1)
        return replace(self, config=config, executor_name=name)

    def executor(self, shelf: Shelf | None = None) -> Executor:
        """`shelf` is where clients' memories go that do not fit; by default a temporary folder."""
        limit = self.config.memory_limit * 2**20
        memory = ClientMemory(self.config.stateless, limit=limit, shelf=shelf, device=self.worker.device)
        with self.profile(SET_UP, calls=0):
            return EXECUTORS.build(self.executor_name, self.worker, memory, workers=self.config.workers)


def prepare(
    config: Config,
    *,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    method: Method | None = None,
) -> Setup:
    """Build what the configuration names, or take the objects given in its place, and check that they fit."""
    # The cheap checks first: names and options are refused before any image is read.
    device = choose_device(config)
    executor_name = choose_executor(config, device)
    composed = Composition.of(method or methods.build(config.method))
    defence = Defence.of(config.robust)
    defence.refuse_what_it_cannot_protect(composed)
    defence.warn_of_the_rest(composed)
    privacy.refuse_contradictions(config, composed, executor_name)
    if config.stateless and composed.stateful_parts:
        raise MethodError(
            f"'{composed.stateful_parts[0]}' needs clients that remember their last round, and this federation is "
            "stateless: choose another method or leave 'stateless' out."
        )
    profile = start_profile(config, executor_name, device)
    with profile(READING):
        federation = federation or load_federation(config)
    held_out = list(dict.fromkeys(client.domain for client in federation.unseen))
    domains = federation.domains  # pooled, they would all be unseen
    check_clients(federation, config)
    given = federation
    if composed.is_pooled:
        federation = federation.pooled()
    check_rounds(federation, config)
    defence.refuse_too_few(clients_per_round(config, len(federation.clients)))
    with profile(SET_UP):
        if model is None:
            footprint.refuse_too_large(config, federation, device)
        network = build_model(config, federation, composed, model)
        privacy.refuse_network(config, network)
        if config.profile:
            worker: Worker = ProfiledWorker(config, federation, composed, network, device, clock=profile.clients)
        else:
            worker = Worker(config, federation, composed, network, device)
    privacy.warn_of_the_rest(config, composed, worker.layout)
    if config.batch_size == 1 and batch_norms(network):
        log.warning(
            "The batch size is 1, and a single sample has no batch statistics: batch norm will use the global ones. "
            "'gn', 'ln' or 'fedwon' suit such batches."
        )
    if config.evaluate_with != "global" and not batch_norms(network) and not hybrid_norms(network):
        log.warning(
            f"'evaluate_with' is '{config.evaluate_with}', but the model has no batch norm: its accuracy is "
            "the same with all statistics."
        )
    return Setup(config, worker, held_out, executor_name, profile, defence, domains, given)


def start_profile(config: Config, executor_name: str, device: torch.device) -> Unprofiled:
    if not config.profile:
        return Unprofiled()
    settle = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else None
    workers = config.workers or available_cores()
    return Profile(
        executor=executor_name,
        device=str(device),
        workers=workers if executor_name == "processes" else 1,
        settle=settle,
    )


def load_federation(config: Config) -> Federation:
    spec = parse(config.data)
    options = dict(spec.options)
    if config.unseen:
        options["unseen"] = [name.strip() for name in config.unseen.split(",") if name.strip()]
    if config.subsample:
        options["subsample"] = config.subsample
    options.setdefault("partition", config.partition)
    options.setdefault("seed", config.seed)
    return data.load(spec.name, **options)


def check_clients(federation: Federation, config: Config) -> None:
    if not federation.clients:
        raise DataError(f"'{federation.name}' has no client to train on: give at least one.")
    for client in federation.one_of_each(unseen=False):
        if client.samples == 0:
            raise DataError(f"The client '{client.name}' has no training samples: leave it out or give it some.")
    outside = federation.labels[(federation.labels < 0) | (federation.labels >= federation.num_classes)]
    if len(outside):
        raise DataError(
            f"'{federation.name}' has the label {int(outside[0])}, but {federation.num_classes} classes: "
            f"give labels from 0 to {federation.num_classes - 1}."
        )
    training = {client.domain for client in federation.one_of_each(unseen=False)}
    for client in federation.unseen:
        if client.domain in training:
            raise DataError(
                f"The unseen client '{client.name}' is of the domain '{client.domain}', which others train on: "
                "name its domain differently, so that the averages keep them apart."
            )
    if not any(len(client.test) for client in federation.one_of_each()):
        raise DataError(
            f"No client of '{federation.name}' has test samples: hold a domain out with 'unseen', or take a split that "
            f"has a test set."
        )
    validated = any(len(client.validation) for client in federation.one_of_each(unseen=False))
    if config.result == "best-validation" and not validated:
        raise DataError(
            f"'result' is 'best-validation', but no client of '{federation.name}' has validation samples: "
            "choose 'last' or give a validation split."
        )


def check_rounds(federation: Federation, config: Config) -> None:
    sampled = clients_per_round(config, len(federation.clients))
    if config.min_clients > sampled:
        of_how_many = f"of {len(federation.clients)} clients, a round trains {sampled}"
        raise FedkeelError(f"'min_clients' is {config.min_clients}, but {of_how_many}: give at most {sampled}.")


def clients_per_round(config: Config, clients: int) -> int:
    """The fraction that takes part, at least one. Python's `round` would make two of half of five: half goes up."""
    return max(1, int(config.participation * clients + 0.5))


def build_model(config: Config, federation: Federation, method: Composition, given: nn.Module | None) -> Classifier:
    """The network, changed as the method wants it, tried on two images."""
    probe = federation.images[:2]
    uniforms = torch.full((len(probe), federation.test_transform.draws), 0.5)
    x = federation.test_transform(probe, uniforms)
    with seeds.default_generator(config.seed, "model"):
        if given is None:
            network: nn.Module = models.build_spec(
                config.model,
                num_classes=federation.num_classes,
                in_channels=x.shape[1],
                image_size=(x.shape[2], x.shape[3]),
            )
        else:
            models.refuse_lazy(given)
            network = copy.deepcopy(given)  # the caller's own stays as it is, for the next run
        if not isinstance(network, Classifier):
            raise FedkeelError(
                f"The model is a {type(network).__name__}, which gives no features: "
                "wrap it with fedkeel.models.wrap(model, head='name of its last layer')."
            )
        if config.weights:
            log.warning("%s", models.load_weights(network, config.weights))
        method.prepare(network)
    network.eval()
    if next(network.parameters(), None) is None:
        raise FedkeelError(f"{type(network).__name__} has no parameters: give a network that can be trained.")
    try:
        with torch.no_grad():
            output = network(x.to(next(network.parameters()).device))
    except FedkeelError:
        raise
    except Exception as error:
        if shortage(error):
            raise
        reason = str(error).partition("\n")[0].rstrip(".")
        raise FedkeelError(f"The model does not take images of shape {tuple(x.shape[1:])}: {reason}.") from error
    if not isinstance(output, Output):
        raise FedkeelError(
            f"The forward of {type(network).__name__} returns a {type(output).__name__}: "
            "return fedkeel.models.Output(features, logits)."
        )
    if output.logits.shape[-1] != federation.num_classes:
        raise FedkeelError(
            f"The model has {output.logits.shape[-1]} outputs, but '{federation.name}' has {federation.num_classes} "
            "classes: give the model as many."
        )
    return network


def choose_device(config: Config) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError:
        wanted = "cuda" if config.device == "gpu" else config.device
        raise FedkeelError(f"'device' is '{config.device}': {nearest(wanted, ['auto', 'cpu', 'cuda'])}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise FedkeelError(f"'device' is '{config.device}', but this machine shows no GPU to torch: choose 'cpu'.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise FedkeelError(
            f"'device' is '{config.device}', but this machine has {torch.cuda.device_count()} GPUs, counted from 0: "
            "choose one of them."
        )
    if device.type not in ("cpu", "cuda"):
        raise FedkeelError(f"'device' is '{config.device}', which is not supported: choose 'cpu' or 'cuda'.")
    return device


def choose_executor(config: Config, device: torch.device) -> str:
    if config.executor == "auto":
        if device.type == "cuda":
            return "cuda"
        several_cores = config.workers != 1 and available_cores() > 1
        side_by_side = several_cores and hasattr(os, "fork") and config.threads <= 1
        return "processes" if side_by_side else "serial"
    named: Any = EXECUTORS.entry(config.executor).build
    if hasattr(named, "cannot_run"):
        raise FedkeelError(f"The executor '{config.executor}' {named.cannot_run(device)}")
    if config.executor == "cuda" and device.type != "cuda":
        raise FedkeelError("The executor 'cuda' needs a GPU: choose 'processes' or 'serial'.")
    if config.executor == "processes" and device.type != "cpu":
        raise FedkeelError("The executor 'processes' uses CPU cores: give '--device cpu', or the executor 'serial'.")
    if config.executor == "processes" and not hasattr(os, "fork"):
        raise FedkeelError("The executor 'processes' needs a system that can fork: choose 'serial'.")
    if config.executor == "processes" and config.threads > 1:
        return "serial"  # what the trial of threads against processes came to
    return config.executor
