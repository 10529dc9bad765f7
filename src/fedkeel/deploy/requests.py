"""What a server asks of a site, held against the site's policy before anything is read or built.

A server cannot name a file, an address or code: of its configuration a site takes the options that its own part of a
run depends on, names are those of registered things, and their options are plain numbers and words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedkeel import models, spec
from fedkeel.config import Config, from_dict, from_one
from fedkeel.core.checking import check_broadcast
from fedkeel.core.composition import Composition
from fedkeel.core.messages import BadMessage, Broadcast, is_whole, reading
from fedkeel.data.federation import Federation
from fedkeel.data.site import check_reading
from fedkeel.data.site import reading as reading_options
from fedkeel.deploy.policy import DELTA, STRENGTH, Policy
from fedkeel.deploy.site_models import RUN
from fedkeel.engine.batches import probe
from fedkeel.engine.checks import check_training
from fedkeel.engine.executors.sites.channel import STEPS
from fedkeel.engine.executors.sites.roster import MOST_CLASSES
from fedkeel.engine.local import Worker
from fedkeel.engine.metrics import asked
from fedkeel.errors import FedkeelError
from fedkeel.methods import METHODS
from fedkeel.methods import build as build_method
from fedkeel.models import MODELS, timm_models
from fedkeel.models.architecture import refuse_strange
from fedkeel.spec import names
from fedkeel.trust import privacy

# The options of a server that a site's part of a run depends on. All others (files, devices, what is recorded) stay as
# the site has them.
TAKEN = names(
    "method, data, partition, unseen, subsample, model, rounds, participation, clients_per_round, weighting, "
    "stateless, dp, dp_clip, dp_noise, dp_delta, local_epochs, local_steps, batch_size, drop_last, loss, optimizer, "
    "learning_rate, momentum, weight_decay, schedule, clip_norm, evaluate_with, evaluation_batch, seed, "
    "precision, checkpoint_every, metrics, select_by, site_images, site_prior, site_always"
)
# What no honest server asks for: numbers of a run, options in brackets, numbers in a network.
MOST = {"local_epochs": 100, "batch_size": 4096, "evaluation_batch": 4096, "checkpoint_every": 100}
MOST |= {"local_steps": 100_000, "size": 1024, "padding": 1024, "samples": 4096, "stats_batch": 4096}
LARGEST_NETWORK, LONGEST_TEXT, MOST_PARTS = 200_000_000, 4000, 16


@dataclass(frozen=True)
class Session:
    """What every request carries: the run, the options of it that a site takes, and the classes once they are known."""

    run: str
    config: Config
    classes: tuple[str, ...] | None

    @staticmethod
    def read(given: Any, policy: Policy) -> Session:
        with reading("it has no session"):
            run, options, classes = given["run"], {**given["config"]}, given["classes"]
            if not RUN.fullmatch(run):
                raise BadMessage(f"the run is called {run[:80]!r}")
            if classes is not None and not (isinstance(classes, list) and len(classes) <= MOST_CLASSES):
                raise BadMessage(f"its classes are not a list of {MOST_CLASSES:,} at most")
        config = from_dict(options)
        config = Config(**{name: getattr(config, name) for name in TAKEN})
        check(config, policy)
        return Session(run, config, None if classes is None else tuple(map(str, classes)))


def check(config: Config, policy: Policy) -> None:
    """Refuse what the policy does not allow. Nothing is built here, nothing read."""
    refuse_large("the run", {name: getattr(config, name) for name in TAKEN})
    policy.require("rounds", config.rounds <= policy.rounds, f"{config.rounds:,} rounds")
    policy.require("dp", STRENGTH.index(config.dp) >= STRENGTH.index(policy.dp), f"'dp = \"{config.dp}\"'")
    allowed = names(policy.methods)
    for part in parts(config.method):
        METHODS.entry(part.name)
        policy.require("methods", not allowed or part.name in allowed, f"'{part.name}'")
        for name, value in part.options.items():  # the images of a pass of a method's own
            if name.endswith("_samples") and isinstance(value, int):
                policy.require("samples", value >= policy.samples, f"{value:,} images as '{name}' of '{part.name}'")
    (model,) = parts(config.model)
    if model.options.get("pretrained"):
        raise FedkeelError(f"'{model.name}' has weights fetched from elsewhere: the server sends them, by '--weights'.")
    if model.name not in MODELS:
        timm_models.find(model.name, {k: v for k, v in model.options.items() if k not in ("pretrained", "projector")})
    data = check_reading(config)
    refuse_large("the data", reading_options(config))
    for name in ("train_transform", "test_transform"):
        if data.get(name):
            parts(data[name])
    check_training(config)
    asked(config)


def parts(text: str) -> list[spec.Spec]:
    """Of a composition, each with options that are plain and no larger than anybody needs."""
    found = spec.parse_sum(text)
    if len(found) > MOST_PARTS:
        raise FedkeelError(f"'{text[:80]}' has {len(found)} parts: give at most {MOST_PARTS}.")
    for part in found:
        refuse_strange(part.name, part.options)
        refuse_large(f"'{part.name}'", part.options)
    return found


def refuse_large(owner: str, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        size, most = (len(value), LONGEST_TEXT) if isinstance(value, str) else (value, MOST.get(name))
        if most is not None and isinstance(size, int | float) and size > most:
            raise FedkeelError(f"'{name}' of {owner} has the size {size:,}: give at most {most:,}.")


def check_network(config: Config, federation: Federation) -> None:
    """Refuse a network, as the method will have it, that has too many numbers; none of them takes memory here."""
    shape = probe(federation).shape[1:]  # of real images: what a transform keeps must not be made on "meta"
    with torch.device("meta"):
        network = models.build_for(config.model, federation.num_classes, shape)
        Composition.of(build_method(config.method)).prepare(network)
    count = sum(tensor.numel() for tensor in (*network.parameters(), *network.buffers()))  # tables of positions too
    if count > LARGEST_NETWORK:
        raise FedkeelError(f"The network has {count:,} numbers: sites take at most {LARGEST_NETWORK:,}.")


def check_privacy(config: Config, federation: Federation, policy: Policy) -> None:
    """Refuse a run of too few images, or one that would tell or spend more than this site wants."""
    (site,) = federation
    for part, chosen in (("train", site.train), ("validate", site.validation), ("test", site.test)):
        few = 0 < len(chosen) < policy.samples
        policy.require("samples", not few, f"{len(chosen):,} images to {part} on")
    method = Composition.of(build_method(config.method))
    if method.is_pooled:
        raise FedkeelError(f"'{config.method}' pools the data of all sites")
    privacy.refuse_what_tells_more(config, method)
    if policy.epsilon:
        privacy.require_accountant()
        spent = privacy.spent(config.replace(dp_delta=DELTA), config.rounds, [site.samples]) or 0.0
        policy.require("epsilon", spent <= policy.epsilon, f"{spent:.3g} as the epsilon of a run")


def check_message(request: Mapping[str, Any], broadcast: Broadcast, worker: Worker) -> None:
    """Refuse a broadcast that is not of this model and of a round of this run."""
    rounds, step, after = worker.config.rounds, request["step"], request["after"]
    if not is_whole(step) or not is_whole(after) or step // STEPS != broadcast.round:
        raise BadMessage("it does not say which step of the run it is")
    if broadcast.rounds != rounds or not 0 <= broadcast.round < rounds:
        raise BadMessage(f"it is of round {from_one(broadcast.round)} of {broadcast.rounds}, and the run has {rounds}")
    entries, layout = worker.entries, worker.layout
    weights, statistics = ({name: entries[name] for name in kind} for kind in (layout.weights, layout.statistics))
    check_broadcast(broadcast, weights, statistics)
