"""Everything that is checked before a run trains, in order, the cheap checks first: an error names what was given, what
was expected and what to do, before anything expensive is begun.

    check_objects, refuse_...    what Python code gives in place of names, or beside them
    check_options                names and options that do not go together, before any image is read
    check_clients                the data, as they are
    check_rounds                 the data, as the method sees them
    check_network                the network, as the method changed it, tried on two images
    warn                         what will work and may not be meant
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fedkeel.config import Config
from fedkeel.core.composition import Composition
from fedkeel.core.method import Method
from fedkeel.core.state import batch_norms
from fedkeel.core.types import Classifier, Output
from fedkeel.data.federation import Federation
from fedkeel.engine import losses, metrics, optimizers, schedules
from fedkeel.engine.batches import probe
from fedkeel.engine.local import Worker
from fedkeel.errors import DataError, FedkeelError, MethodError, first_line, shortage
from fedkeel.nn.calibration import normalised_layers
from fedkeel.observer import Observer
from fedkeel.options import described
from fedkeel.trust import privacy
from fedkeel.trust.robust import Defence
from fedkeel.trust.rules import clients_per_round

log = logging.getLogger("fedkeel")
KINDS: dict[str, tuple[type, str]] = {
    "federation": (Federation, "a fedkeel.data.Federation, or the name of a data set as data='...'"),
    "model": (nn.Module, "a network, or its name where a run is begun"),
    "method": (Method, "a fedkeel.Method, or its name where a run is begun"),
    "observer": (Observer, "an object of a class derived from fedkeel.Observer"),
}


# -- given in Python -------------------------------------------------------------------------------------------------
def check_objects(**objects: Any) -> None:
    """One sentence for what is of another kind than it should be; None is what was not given."""
    for what, given in objects.items():
        kind, wanted = KINDS[what]
        if given is not None and not isinstance(given, kind):
            raise FedkeelError(f"'{what}' is {described(given)}: give {wanted}.")


def refuse_unused(options: Mapping[str, Any], *, federation: Any = None, model: Any = None) -> None:
    """An option that an object stands in the place of would do nothing, and yet be told of."""
    default, cut = Config(), ("data", "partition", "unseen", "subsample")
    for what, given, names in (("federation", federation, cut), ("model", model, ("model",))):
        for name in names if given is not None else ():
            if options.get(name, getattr(default, name)) != getattr(default, name):
                both = f"'{what}' is given as an object together with {name}={options[name]!r}"
                raise FedkeelError(f"{both}: keep one, since an object is taken as it is.")


# -- options ---------------------------------------------------------------------------------------------------------
def check_options(config: Config, method: Composition, defence: Defence) -> None:
    metrics.asked(config)
    check_training(config)
    defence.check(method)
    privacy.refuse_contradictions(config, method)
    refuse_stateless(config, method)


def refuse_stateless(config: Config, method: Composition) -> None:
    if config.stateless and method.stateful_parts:
        raise MethodError(
            f"'{method.stateful_parts[0]}' needs clients that remember their last round, and this federation is "
            "stateless: choose another method or leave 'stateless' out."
        )


def refuse_nothing_sent(config: Config, method: Composition, network: Classifier) -> None:
    """Once the network is prepared: with 'standalone' all of it stays where it is."""
    asked = "robust" if config.robust else "dp" if config.dp != "none" else ""
    asked = asked or ("weighting" if config.weighting != "samples" else "")
    if asked and {*network.state_dict()} <= {*method.kept}:
        raise MethodError(f"'{asked}' is of what clients send, and with '{method.name}' nothing travels: leave it out.")


def check_training(config: Config) -> None:
    """The loss, the optimizer and the schedule are known here and take their options. Whether a loss fits the classes
    is seen when it is made for them."""
    losses.requested(config.loss)
    optimizers.check(config)
    schedules.check(config)


# -- data ------------------------------------------------------------------------------------------------------------
def check_clients(config: Config, federation: Federation) -> None:
    if not federation.clients:
        raise DataError(f"'{federation.name}' has no client to train on: give at least one.")
    training = list(federation.one_of_each(unseen=False))
    for client in training:
        if client.samples == 0:
            raise DataError(f"The client '{client.name}' has no training samples: leave it out or give it some.")
    outside = federation.labels[(federation.labels < 0) | (federation.labels >= federation.num_classes)]
    if len(outside):
        raise DataError(
            f"'{federation.name}' has the label {int(outside[0])}, but {federation.num_classes} classes: "
            f"give labels from 0 to {federation.num_classes - 1}."
        )
    for client in federation.unseen:
        if client.domain in {one.domain for one in training}:
            raise DataError(
                f"The unseen client '{client.name}' is of the domain '{client.domain}', which others train on: "
                "name its domain differently, so that the averages keep them apart."
            )
    if not any(len(client.test) for client in federation.one_of_each()):
        raise DataError(
            f"No client of '{federation.name}' has test samples: hold a domain out with 'unseen', or take a split that "
            f"has a test set."
        )
    for name, is_asked in (("result", config.result == "best-validation"), ("patience", config.patience)):
        if is_asked and not any(len(client.validation) for client in training):
            raise DataError(
                f"'{name}' is {getattr(config, name)!r}, but no client of '{federation.name}' has validation samples: "
                "leave it out, or give a validation split."
            )


def check_rounds(config: Config, federation: Federation, defence: Defence) -> None:
    sampled = clients_per_round(config, len(federation.clients))
    if config.min_clients > sampled:
        raise FedkeelError(
            f"'min_clients' is {config.min_clients}, but a round trains {sampled}: give at most as many."
        )
    defence.refuse_too_few(sampled)


# -- the network -----------------------------------------------------------------------------------------------------
def check_classifier(network: nn.Module) -> Classifier:
    if not isinstance(network, Classifier):
        raise FedkeelError(
            f"The model is a {type(network).__name__}, which gives no features: "
            "wrap it with fedkeel.models.wrap(model, head='name of its last layer')."
        )
    return network


def check_network(network: Classifier, federation: Federation) -> None:
    first = next(network.parameters(), None)
    if first is None:
        raise FedkeelError(f"{type(network).__name__} has no parameters: give a network that can be trained.")
    x = probe(federation, 2)
    try:
        with torch.no_grad():
            output = network.eval()(x.to(first.device))
    except Exception as error:
        if isinstance(error, FedkeelError) or shortage(error):
            raise
        reason = first_line(error)
        raise FedkeelError(f"The model does not take samples of shape {tuple(x.shape[1:])}: {reason}.") from error
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


def warn(worker: Worker) -> None:
    config, normalised = worker.config, bool(batch_norms(worker.model))
    privacy.warn_of_the_rest(config, worker.method, worker.layout)
    if config.batch_size == 1 and normalised:
        log.warning(
            "A batch of one has no statistics: batch norm will use the global ones; 'gn', 'ln' or 'fedwon' fit."
        )
    if config.schedule != "constant" and config.rounds > 1 and not schedules.moves(config):
        log.warning(f"The schedule '{config.schedule}' leaves the learning rate as it is in all rounds.")
    if config.evaluate_with != "global" and not normalised_layers(worker.model):
        log.warning(f"'evaluate_with' is '{config.evaluate_with}', but the model has no batch norm: nothing differs.")
