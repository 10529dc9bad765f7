"""Advice before one decides: how far a federation's clients differ, and which methods to try on it.

Nothing is trained but a pilot of FedAvg over a few rounds.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fedkeel import config as configuration
from fedkeel.config import Config
from fedkeel.core.naming import visible
from fedkeel.core.readable import percent
from fedkeel.data.federation import Federation
from fedkeel.engine.checks import check_objects, refuse_unused
from fedkeel.engine.idle import refuse_idle, without_idle
from fedkeel.engine.setup import Setup, load_federation, prepare
from fedkeel.errors import FedkeelError, shortages_explained
from fedkeel.experiments.heterogeneity import AboveChance, distances
from fedkeel.experiments.rows import SET_BY_ADVICE
from fedkeel.nn.calibration import normalised_layers
from fedkeel.observer import Observer
from fedkeel.runs.run import Run
from fedkeel.simulation import simulate

MOST = 3  # methods beside FedAvg
FEW = 8  # samples of a batch below which its statistics are noise
CLEAR = 3.0  # deviations above chance, for a distance to count at all
SOME, MUCH = 0.1, 0.2  # distances above chance from which clients differ somewhat, and much


class Situation(NamedTuple):
    """The methods that their papers or pages recommend when this is the shift, and why these."""

    shift: str
    when: str
    methods: tuple[str, ...]
    why: str


LABEL, FEATURE, UNSEEN = "Labels differ", "Images look different", "A domain that never trained"
BOTH = "Labels and looks differ"
SMALL_BATCHES = Situation(FEATURE, "one model for all, small batches", ("fedwon", "gn"), "nothing depends on the batch")
DRIFT = "local training leads away from the others"
SITUATIONS = (
    Situation(LABEL, "the model has batch norm", ("hbn", "fixbn"), "batch statistics of few classes mislead"),
    Situation(LABEL, "no batch norm, or clients keep nothing", ("univarfl", "fedprox"), DRIFT),
    Situation(FEATURE, "one model for all, batch norm", ("greg",), "predictions must hold under the statistics of all"),
    SMALL_BATCHES,
    Situation(FEATURE, "a model for each site", ("fedbn", "silobn"), "each site keeps what fits its images"),
    Situation(FEATURE, "no batch norm", ("fedrdn", "fedfa"), "each site must see the looks of the others"),
    Situation(
        BOTH,
        "one model for all",
        ("fedprox+greg", "fedprox+fedwon", "fedprox+fedrdn"),
        "drift and statistics are different moments of a round",
    ),
    Situation(UNSEEN, "batch norm", ("fedcoda", "greg"), "no site's statistics may be needed at the test"),
    Situation(UNSEEN, "few domains, some much larger", ("ga", "fedgma"), "the mean must not follow the largest"),
)


@dataclass(frozen=True)
class Advice:
    """What to try on a federation; it prints as text. Made by `advise`, which has an example.

    Attributes:
        data: what the federation is called.
        labels: how far a client's shares of the classes lie from those of all.
        looks: how far the images of a class at a client look from those at all; None where no class is at two clients.
        accuracy: the pilot's, as a fraction; None without a pilot.
        sentences: what was measured.
        methods: to try, each with the reason, FedAvg first.
        calibrate: whether sites should put their own statistics into batch norm after training, and why.
        left_out: methods that would have been suggested, and why they are not.
    """

    data: str
    labels: AboveChance
    looks: AboveChance | None
    accuracy: float | None
    sentences: list[str]
    methods: dict[str, str]
    calibrate: str
    left_out: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, as `fedkeel advise --json` prints it."""
        return asdict(self)

    def __repr__(self) -> str:
        return "\n".join(map(visible, self.lines()))

    def lines(self) -> Iterator[str]:
        """The text, line by line."""
        yield from (*self.sentences, "", "Try:")
        yield from (f"  {method}: {reason}." for method, reason in self.methods.items())
        yield from (f"  not {method}: {why}" for method, why in self.left_out.items())
        yield f"Calibrate: {self.calibrate}."


@shortages_explained()
def advise(
    federation: Federation | None = None,
    rounds: int = 5,
    *,
    pilot: bool = True,
    model: nn.Module | str | None = None,
    observer: Observer | None = None,
    verbose: bool | None = None,
    **options: Any,
) -> Advice:
    """Look at a federation, train FedAvg on it for a few rounds, and say which methods to try.

    Args:
        federation: an object, in place of `data`.
        rounds: of the pilot; nothing else is trained, and nothing of it is kept.
        pilot: FedAvg without `dp`; without it, looks are taken of the model as it begins.
        model: a network, or its name.
        observer, verbose: as in `simulate`.
        options: of the federation and the training, as in `Config`.

    >>> advice = fedkeel.advise(data="digits-shift", pilot=False)
    >>> list(advice.methods), advice.calibrate
    (['fedavg', 'greg', 'fedwon', 'fedbn'], 'yes, looks differ much')
    """
    configuration.refuse_unknown(options)
    if refused := next((name for name in options if name in SET_BY_ADVICE), ""):
        raise FedkeelError(f"'{refused}' is given, but advice is about methods and sets it itself: leave it out.")
    network = None if isinstance(model, str) else model
    check_objects(federation=federation, model=network, observer=observer)
    refuse_unused(options, federation=federation)
    named = {"model": model} if isinstance(model, str) else {}
    config = configuration.from_dict({**options, **named, "rounds": rounds, "evaluate_every": rounds})
    refuse_idle(config)
    given = federation or load_federation(config)
    if len(given.clients) < 2:
        raise FedkeelError(f"'{given.name}' has one client: cut the data into clients with 'partition'.")
    plain, prepared = without_idle(config.replace(dp="none")), partial(prepare, federation=given, model=network)
    if pilot:
        with tempfile.TemporaryDirectory(prefix="fedkeel-advise-") as folder:
            run = simulate(
                plain,
                directory=Path(folder) / "pilot",
                observer=observer,
                verbose=verbose,
                federation=given,
                model=network,
            )
            looked_with, accuracy, told = run.model(), run.accuracy, [pilot_sentence(run, given)]
    else:
        looked_with, accuracy, told = prepared(plain).worker.model, None, []
    labels, looks = distances(given, looked_with.cpu().eval(), config.seed)
    sentences = [size(given), label_sentence(labels), look_sentence(looks), *told]
    methods, left_out = suggest(shifts_of(labels, looks, given), config, prepared)
    calibrate = calibration(labels, looks, bool(normalised_layers(looked_with)))
    return Advice(given.name, labels, looks, accuracy, sentences, methods, calibrate, left_out)


# -- in words --------------------------------------------------------------------------------------------------------
def verdict(found: AboveChance | None) -> str:
    """How much clients differ, in words."""
    if found is None:
        return "cannot be compared"
    if found.deviations < CLEAR:
        return "differ no more than by chance"
    return f"differ {'hardly' if found.above < SOME else 'somewhat' if found.above < MUCH else 'much'}"


def size(federation: Federation) -> str:
    sizes = sorted(client.samples for client in federation.clients)
    samples = f"{sizes[0]:,}" if sizes[0] == sizes[-1] else f"{sizes[0]:,} to {sizes[-1]:,}"
    classes = federation.num_classes
    return f"{federation.name}: {len(sizes):,} clients with {samples} training samples of {classes} classes."


def label_sentence(found: AboveChance) -> str:
    if found.deviations < CLEAR:
        return f"Labels {verdict(found)}."
    share = percent(found.above)
    return (
        f"Labels {verdict(found)}: an average client would have to exchange {share} % of its samples for other classes."
    )


def look_sentence(found: AboveChance | None) -> str:
    if found is None:
        return "Looks cannot be told from labels: no class is at two clients."
    if found.deviations < CLEAR:
        return f"Looks {verdict(found)}."
    share = percent(found.above**2)
    return f"Looks {verdict(found)}: {share} % of what tells two samples of a class apart is whose they are."


def pilot_sentence(run: Run, federation: Federation) -> str:
    tests = torch.cat([federation.labels[client.test] for client in federation.one_of_each()])
    guessing = percent(float(torch.bincount(tests).max() / len(tests)))
    low, high = (sorted(run.domains.items(), key=lambda item: item[1])[end] for end in (0, -1))
    between = f" ({low[0]} {percent(low[1])} to {high[0]} {percent(high[1])})" if len(run.domains) > 1 else ""
    gets = f"FedAvg gets {percent(run.accuracy)} %{between} after {run.rounds_done} rounds"
    return f"Pilot: {gets}; guessing gets {guessing} %."


# -- what to try -----------------------------------------------------------------------------------------------------
def shifts_of(labels: AboveChance, looks: AboveChance | None, federation: Federation) -> dict[str, str]:
    """The shifts that matter, each with the words for it: those that are large, or else any that is there."""
    told = {LABEL: f"labels {verdict(labels)}", FEATURE: f"looks {verdict(looks)}"}
    large, some = ({s: text for s, text in told.items() if text.endswith(size)} for size in ("much", "somewhat"))
    both = {BOTH: "labels and looks differ much"} if len(large) == 2 else {}
    held_out = dict.fromkeys(client.domain for client in federation.unseen)
    unseen = {UNSEEN: f"the model goes to {', '.join(held_out)}"} if held_out else {}
    return {**both, **unseen, **(large or some)}


def suggest(
    shifts: Mapping[str, str], config: Config, prepared: Callable[[Config], Setup]
) -> tuple[dict[str, str], dict[str, str]]:
    """FedAvg and up to three others, from each line of the table the first method that is not refused; and those that
    were left out."""
    alike = "the reference" if shifts else "clients hardly differ, so the plain mean should do"
    left_out = {"fedavg": why} if (why := refusal("fedavg", config, prepared)) else {}
    methods = {} if left_out else {"fedavg": alike}
    by_shift = [[line for line in SITUATIONS if line.shift == shift] for shift in shifts]
    lines = [line for row in zip_longest(*by_shift) for line in row if line]
    if left_out or config.batch_size == 1 or (config.batch_size < FEW and SMALL_BATCHES in lines):
        lines.insert(0, SMALL_BATCHES)
    for line in lines:
        parts = {part for method in methods for part in (method, *method.split("+"))}
        if len(methods) > MOST or parts & {*line.methods}:
            continue
        for method in line.methods:
            left_out |= {method: why} if (why := refusal(method, config, prepared)) else {}
            if method not in left_out:
                methods[method] = f"{shifts.get(line.shift, 'small batches, or batch norm is refused')}, and {line.why}"
                break
    if not methods:
        raise FedkeelError(next(iter(left_out.values())))
    return methods, left_out


def refusal(method: str, config: Config, prepared: Callable[[Config], Setup]) -> str:
    """Why the method cannot be run here, in a sentence; nothing where it can."""
    log = logging.getLogger("fedkeel")
    before, log.disabled = log.disabled, True  # whoever runs it is warned then
    try:
        worker = prepared(config.replace(method=method)).worker
    except FedkeelError as error:
        return str(error)
    finally:
        log.disabled = before
    acts = any(part.traits.needs_batch_norm for part in worker.method.parts) and normalised_layers(worker.model)
    return "a batch of one sample has no statistics." if config.batch_size == 1 and acts else ""


def calibration(labels: AboveChance, looks: AboveChance | None, has_norm: bool) -> str:
    """Of a model with batch norm, where looks differ; a site's own moments hold its labels as well."""
    if not has_norm:
        return "no, the model has no batch norm, whose statistics a site could replace"
    told = f"looks {verdict(looks)}"
    if not told.endswith(("much", "somewhat")):
        return f"no, {told}"
    if verdict(labels).endswith("much"):
        return f"try, {told}, but labels differ too, and a site's own moments hold both"
    return f"yes, {told}" if told.endswith("much") else f"try, {told}"
