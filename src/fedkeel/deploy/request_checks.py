"""What a server asks of a site, held against the site's policy before anything is read or built.

A server cannot name a file, an address or code: of its configuration a site takes the options that its own part of a
run depends on, names are those of registered things, and their options are plain numbers and words.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedkeel import models, spec
from fedkeel.config import Config, from_dict, from_one
from fedkeel.core import state
from fedkeel.core.checking import check_broadcast
from fedkeel.core.composition import Composition
from fedkeel.core.messages import BadMessage, Broadcast
from fedkeel.data.federation import Federation
from fedkeel.data.site import CUTTING, OPTIONS
from fedkeel.data.transforms import TRANSFORMS
from fedkeel.deploy.policy import Policy, Refused
from fedkeel.engine.batches import probe
from fedkeel.engine.checks import check_training
from fedkeel.engine.executors.sites.channel import largest_reply
from fedkeel.engine.executors.sites.roster import LONGEST_NAME, MOST_CLASSES
from fedkeel.engine.local import Worker
from fedkeel.engine.metrics import asked
from fedkeel.errors import FedkeelError
from fedkeel.methods import METHODS
from fedkeel.methods import build as build_method
from fedkeel.models import MODELS, timm_models
from fedkeel.models.architecture import refuse_strange
from fedkeel.registry import Registry
from fedkeel.trust import privacy

# The options of a server that a site's part of a run depends on. All others (files, devices, what is recorded) stay as
# the site has them.
TAKEN = (
    *("method", "data", "partition", "unseen", "subsample", "model"),
    *("rounds", "participation", "weighting", "stateless"),
    *("dp", "dp_clip", "dp_noise", "dp_delta"),
    *("local_epochs", "batch_size", "drop_last", "loss", "optimizer", "learning_rate", "momentum", "weight_decay"),
    *("schedule", "clip_norm", "evaluate_with", "evaluation_batch", "seed", "precision", "checkpoint_every"),
    *("metrics", "select_by", "site_images", "site_prior", "site_always"),
)
# What no honest server asks for: a site's policy need not say it.
MOST = {"local_epochs": 100, "batch_size": 4096, "evaluation_batch": 4096, "checkpoint_every": 100}
LONGEST_TEXT = 4000  # of an option
MOST_PARTS = 16  # of a composition, or of transforms
MOST_STEPS = 10_000  # exchanges within a round
RUN = re.compile(r"[A-Za-z0-9]{1,64}")
PLACES = ("classes", "unseen", "train_transform", "test_transform")  # options of data whose text is not one word


@dataclass(frozen=True)
class Session:
    """What every request carries: the run, the options of it that a site takes, and the classes once they are known."""

    run: str
    config: Config
    classes: tuple[str, ...] | None

    @staticmethod
    def read(given: object, policy: Policy | None) -> Session:
        """`policy`: None where server and site are one, in a simulation."""
        if not isinstance(given, dict) or not isinstance(given.get("config"), dict):
            raise BadMessage("it has no session")
        run, classes = given.get("run"), given.get("classes")
        if not isinstance(run, str) or not RUN.fullmatch(run):
            raise BadMessage(f"the run is called {str(run)[:80]!r}")
        if classes is not None:
            if not isinstance(classes, list) or len(classes) > MOST_CLASSES:
                raise BadMessage(f"its classes are not a list of {MOST_CLASSES:,} at most")
            if not all(isinstance(c, str) and len(c) <= LONGEST_NAME for c in classes):
                raise BadMessage("its classes are not a list of names")
        try:
            config = from_dict(given["config"])
            config = Config(**{name: getattr(config, name) for name in TAKEN})
            if policy is not None:
                check(config, policy)
        except Refused:
            raise
        except FedkeelError as wrong:
            raise Refused(f"what it is asked for: {wrong}".rstrip(".")) from wrong
        return Session(run, config, None if classes is None else tuple(classes))

    @property
    def fingerprint(self) -> bytes:
        """Of the options; those of the machine may change when a server is started again."""
        return hashlib.blake2b(json.dumps(self.config.decisive(), sort_keys=True).encode(), digest_size=32).digest()


def check(config: Config, policy: Policy) -> None:
    """Refuse what the policy does not allow. Nothing is built here, nothing read."""
    for name in TAKEN:
        value = getattr(config, name)
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            raise FedkeelError(f"'{name}' is a text of {len(value):,} characters: give at most {LONGEST_TEXT:,}.")
        if name in MOST and value > MOST[name]:
            raise FedkeelError(f"'{name}' is {value:,}: give at most {MOST[name]:,}.")
    policy.at_most("rounds", config.rounds, "rounds")
    policy.strong_enough(config.dp)
    _check_training(config)
    _check_method(config.method, policy)
    _check_model(config.model, policy)
    _check_data(config.data, policy)
    for metric in map(spec.parse, asked(config)):
        refuse_strange(metric.name, metric.options)


def _check_method(text: str, policy: Policy) -> None:
    for part in _parts(text, METHODS):
        policy.one_of("methods", part.name, "method")
        for name, value in _numbers(part):
            if (name == "samples" or "batch" in name) and value > MOST["batch_size"]:  # passes of a method's own
                raise FedkeelError(f"The '{name}' of '{part.name}' is {value:,}: give at most {MOST['batch_size']:,}.")
            if name.endswith("_samples"):  # the images of such a pass
                policy.at_least("samples", value, f"images as the '{name}' of '{part.name}'")


def _check_training(config: Config) -> None:
    """What this site has registered, with options that are plain, or a row of numbers."""
    for text in (config.loss, config.optimizer, config.schedule):
        given = spec.parse(text)
        refuse_strange(given.name, {name: _row(value) for name, value in given.options.items()})
    check_training(config)


def _row(value: object) -> object:
    """The numbers of '1,2.5,5'; anything else as it is."""
    try:
        return [float(number) for number in value.split(",")] if isinstance(value, str) else value
    except ValueError:
        return value


def _check_model(text: str, policy: Policy) -> None:
    requested = spec.parse(text)
    name, options, prefix = requested.name, requested.options, timm_models.PREFIX
    own = name in MODELS
    full_name = name if own or name.startswith(prefix) else f"{prefix}{name}"
    policy.one_of("models", full_name, "model")
    if options.get("pretrained"):
        raise FedkeelError(
            f"'{text}' has weights fetched from elsewhere: give the server a file with '--weights', it sends them."
        )
    if own:
        MODELS.entry(name).check_options("model", options)
    refuse_strange(full_name, options)
    if not own:
        rest = {key: value for key, value in options.items() if key not in ("pretrained", "projector")}
        timm_models.find(name, rest)


def _check_data(text: str, policy: Policy) -> None:
    data = spec.parse(text)
    for name, value in data.options.items():
        if name not in (*OPTIONS, *CUTTING):
            raise FedkeelError(f"A site does not know the option '{name}' of '{data.name}': leave it out.")
        if name not in PLACES:
            refuse_strange(data.name, {name: value})
    _check_pixels(data, policy)
    for name in ("train_transform", "test_transform"):
        given = data.options.get(name, "")
        if not isinstance(given, str):
            raise FedkeelError(f"The option '{name}' of '{data.name}' is {given!r}: give transforms joined by '+'.")
        for part in _parts(given, TRANSFORMS) if given.strip() else ():
            _check_pixels(part, policy)


def _check_pixels(requested: spec.Spec, policy: Policy) -> None:
    for name, value in _numbers(requested):
        if name in ("size", "padding"):
            policy.at_most("image_size", value, f"pixels as the '{name}' of '{requested.name}'")


def _numbers(requested: spec.Spec) -> list[tuple[str, float]]:
    return [(name, value) for name, value in requested.options.items() if isinstance(value, int | float)]


def _parts(text: str, registry: Registry[Any]) -> Iterator[spec.Spec]:
    """The parts of a composition, each of them registered, with options that are plain."""
    parts = spec.parse_sum(text)
    if len(parts) > MOST_PARTS:
        raise FedkeelError(f"'{text[:80]}' has {len(parts)} parts: give at most {MOST_PARTS}.")
    for part in parts:
        registry.entry(part.name)
        refuse_strange(part.name, part.options)
        yield part


def check_network(config: Config, federation: Federation, policy: Policy) -> None:
    """Refuse a network, as the method will have it, that has too many numbers; none of them takes memory here."""
    shape = probe(federation).shape[1:]  # of real images: what a transform keeps must not be made on "meta"
    with torch.device("meta"):
        network = models.build_for(config.model, federation.num_classes, shape)
        Composition.of(build_method(config.method)).prepare(network)
    count = sum(tensor.numel() for tensor in (*network.parameters(), *network.buffers()))  # tables of positions too
    policy.at_most("parameters", count, "numbers in the network")


def check_privacy(config: Config, federation: Federation, policy: Policy) -> None:
    """Refuse a run of too few images, or one that by itself would spend more than this site gives in all."""
    (site,) = federation
    for part, chosen in (("train", site.train), ("validate", site.validation), ("test", site.test)):
        if len(chosen):
            policy.at_least("samples", len(chosen), f"images to {part} on")
    method = Composition.of(build_method(config.method))
    if method.is_pooled:
        raise Refused(f"'{config.method}', which pools the data of all sites")
    privacy.refuse_what_tells_more(config, method)
    if policy.epsilon:
        privacy.require_accountant()
        limit = config.replace(dp_delta=policy.delta)
        policy.at_most("epsilon", privacy.spent(limit, config.rounds, [site.samples]) or 0.0, "as the epsilon of a run")


def check_message(request: Mapping[str, Any], broadcast: Broadcast, worker: Worker) -> tuple[int, int]:
    """Refuse a broadcast that is not of this model and of a round of this run; returns the step that it is."""
    rounds, step, number = worker.config.rounds, request.get("step"), from_one(broadcast.round)
    if not isinstance(step, list) or len(step) != 2 or not all(type(n) is int for n in step):
        raise BadMessage("it does not say which step of the run it is")
    if broadcast.rounds != rounds or not 0 <= broadcast.round < rounds:
        raise BadMessage(f"it is of round {number} of {broadcast.rounds}, and the run has {rounds}")
    if step[0] != broadcast.round or not 0 <= step[1] < MOST_STEPS:
        raise BadMessage(f"it is step {step[1]} of round {from_one(step[0])}, and the message of round {number}")
    entries, layout = worker.entries, worker.layout
    most = largest_reply(state.nbytes(dict(entries)))
    if broadcast.nbytes > most:
        raise BadMessage(f"it has {broadcast.nbytes:,} bytes, and for this model at most {most:,} are expected")
    weights, statistics = ({name: entries[name] for name in kind} for kind in (layout.weights, layout.statistics))
    check_broadcast(broadcast, weights, statistics)
    return step[0], step[1]
