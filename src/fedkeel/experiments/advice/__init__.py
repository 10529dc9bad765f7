"""Advice before one decides: what a federation is like, which methods to try on it, and what is not known.

Nothing is trained but a pilot of FedAvg over a few rounds.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from fedkeel import config as configuration
from fedkeel import methods
from fedkeel.config import Config
from fedkeel.core.composition import Composition
from fedkeel.core.naming import visible
from fedkeel.core.readable import percent, shell
from fedkeel.core.state import batch_norms
from fedkeel.data.federation import Federation
from fedkeel.engine.checks import check_objects, refuse_unused
from fedkeel.engine.idle import refuse_idle, without_idle
from fedkeel.engine.setup import Setup
from fedkeel.errors import FedkeelError, shortages_explained
from fedkeel.experiments.advice.heterogeneity import AboveChance
from fedkeel.experiments.advice.suggestions import Calibration, Candidates, Suggestion, calibration, suggest
from fedkeel.experiments.advice.survey import HARDLY, MUCH, NOT_CLEAR, SOME, SOMEWHAT, Survey, apart, survey, verdict
from fedkeel.experiments.rows import SET_BY_ADVICE
from fedkeel.experiments.situations import read_evidence
from fedkeel.observer import Observer
from fedkeel.options import as_path
from fedkeel.runs.intact import refuse_to_hide
from fedkeel.runs.origin import records
from fedkeel.runs.progress import watched
from fedkeel.runs.run import PYTHON_OBJECT, Run, given_in_python
from fedkeel.runs.store import Store
from fedkeel.simulation import build, finish
from fedkeel.stopping import Stopped
from fedkeel.trust import privacy

FEW_CLIENTS = 4  # fewer are no sample of sites
LITTLE = 0.2  # of the images, below which looks are compared on too few


@dataclass(frozen=True)
class Advice:
    """What to try on a federation; it prints as text. Made by `advise`, which has an example.

    Attributes:
        measures: the numbers it rests on.
        suggestions: the methods to try, FedAvg first.
        calibrate: whether sites should put their own statistics into batch norm after training.
        unknown: what it does not know, a sentence each.
        left_out: methods that would have been suggested, and why they are not.
        next: what to type, or to call, to find out.
    """

    measures: Survey
    suggestions: list[Suggestion]
    calibrate: Calibration
    unknown: list[str]
    left_out: dict[str, str] = field(default_factory=dict)
    next: list[str] = field(default_factory=list)

    @property
    def methods(self) -> list[str]:
        """The names of the suggestions."""
        return [suggestion.method for suggestion in self.suggestions]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, as `fedkeel advise --json` prints it."""
        return {**asdict(self), "measures": self.measures.to_dict()}

    def __repr__(self) -> str:
        return "\n".join(map(visible, self.lines()))

    def lines(self) -> Iterator[str]:
        """The text, line by line."""
        yield from measured(self.measures)
        yield ""
        yield "Try:"
        for suggestion in self.suggestions:
            yield f"  {suggestion.method}: {suggestion.reason}."
            yield from (f"    ledger: {sentence}." for sentence in suggestion.evidence)
        yield from (f"  not {', '.join(those)}: {why}." for why, those in refused(self.left_out).items())
        yield f"Calibrate: {self.calibrate.verdict}, {self.calibrate.reason}."
        yield "Not known:"
        yield from (f"  {sentence}" for sentence in self.unknown)
        yield "Next:"
        yield from (f"  {line}" for line in self.next)


@shortages_explained()
def advise(
    federation: Federation | None = None,
    rounds: int = 5,
    *,
    pilot: bool = True,
    directory: str | Path | None = None,
    model: nn.Module | str | None = None,
    observer: Observer | None = None,
    verbose: bool | None = None,
    **options: Any,
) -> Advice:
    """Look at a federation, train FedAvg on it for a few rounds, and say which methods to try.

    Args:
        federation: an object, in place of `data`.
        rounds: of the pilot; nothing else is trained.
        pilot: FedAvg without `dp`; without it, looks are taken of the model as it begins, and accuracies are not known.
        directory: where the pilot's run is kept; by default it is removed.
        model: a network, or its name.
        observer, verbose: as in `simulate`.
        options: of the federation and the training, as in `Config`.

    >>> advice = fedkeel.advise(data="digits-shift", pilot=False)
    >>> advice.methods, advice.calibrate.verdict
    (['fedavg', 'greg', 'fedwon', 'fedbn'], 'yes')
    """
    asked = _config(rounds, model, options)
    network = None if isinstance(model, str) else model
    check_objects(federation=federation, model=network, observer=observer)
    if directory is not None:
        refuse_to_hide(as_path(directory))
    refuse_unused(options, federation=federation)
    given = {"data": federation, "model": network}
    asked = asked.replace(**{name: PYTHON_OBJECT for name, thing in given.items() if thing is not None})
    privacy.refuse_contradictions(asked, Composition.of(methods.build(asked.method)))
    refuse_idle(asked)
    setup = build(without_idle(asked.replace(dp="none")), federation=federation, model=network)
    if len(setup.given.clients) < 2:
        raise FedkeelError(
            f"'{setup.given.name}' has one client, and with one there is nothing federated to advise on: cut the data "
            "into clients with 'partition', or train with 'central'."
        )
    with ExitStack() as stack:
        run = None
        if pilot:
            place = as_path(directory) if directory is not None else _own_folder(stack)
            run = _pilot(setup, place, given, stack.enter_context(watched(observer, verbose)))
        found = survey(setup.given, run.model() if run else setup.worker.model, asked, run)
    return advice_on(found, Candidates(asked, setup, network))


def _config(rounds: int, model: nn.Module | str | None, options: dict[str, Any]) -> Config:
    configuration.refuse_unknown(options)
    for name in options:
        if name in SET_BY_ADVICE:
            why = "methods are what advice is about" if name == "method" else "the pilot sets it itself"
            raise FedkeelError(f"'{name}' is given, but {why}: leave it out.")
    named = {"model": model} if isinstance(model, str) else {}
    return configuration.from_dict({**options, **named, "rounds": rounds, "evaluate_every": rounds})


def _own_folder(stack: ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedkeel-advise-"))) / "pilot"


def _pilot(setup: Setup, place: Path, given: dict[str, Any], observer: Observer) -> Run:
    """The one run: as `simulate` does it, of what is loaded already."""
    if batch_norms(setup.worker.model):
        setup.worker.config = setup.config.replace(evaluate_with="both")
        setup = replace(setup, config=setup.worker.config)
    is_new = not place.exists()
    store = Store.create(place, setup.config, records(setup, given))
    try:
        return finish(store, setup, observer).remember(model=given["model"])
    except (Stopped, KeyboardInterrupt):
        if is_new:  # so that the same command can be given again: half a pilot is worth nothing
            shutil.rmtree(place, ignore_errors=True)
        raise


def advice_on(found: Survey, candidates: Candidates) -> Advice:
    """From what was measured; nothing is trained."""
    suggestions, left_out = suggest(found, candidates, read_evidence())
    calibrate, config = calibration(found, left_out), candidates.config
    commands = following([suggestion.method for suggestion in suggestions], config, calibrate)
    return Advice(found, suggestions, calibrate, list(unknown(found, config)), left_out, commands)


# -- in words --------------------------------------------------------------------------------------------------------
def measured(found: Survey) -> Iterator[str]:
    low, _, high = found.samples
    least, most = found.classes_of_client
    sizes = (
        f"{low:,} training samples" if low == high else f"{low:,} to {high:,} training samples ({high / low:.1f} times)"
    )
    own = f"{least}" if least == most else f"{least} to {most}"
    yield f"{found.data}: {found.clients:,} clients with {sizes}, and with {own} of {found.classes} classes."
    state = "keep state" if found.keeps_state else "keep nothing"
    norm = "has batch norm" if found.batch_norm else "has no batch norm"
    come = "all" if found.participation == 1 else f"a share of {found.participation:g}"
    yield f"They {state} between rounds, {come} take part in each, batches have {found.batch_size}; the model {norm}."
    yield f"Labels: {in_words(found.labels)}"
    where = f" at {found.layer}" if found.layer else ""
    if found.look is None:
        yield f"Looks{where}: no class is at two clients, so that they cannot be told from labels."
    else:
        yield f"Looks{where}, within a class: {in_words(found.look)}"
    if found.pilot:
        pilot, low_high = found.pilot, sorted(found.pilot.domains.items(), key=lambda item: item[1])
        (worst, bad), (best, good) = low_high[0], low_high[-1]
        by_domain = f" ({worst} {percent(bad)} to {best} {percent(good)})" if len(low_high) > 1 else ""
        batch = pilot.with_batch_statistics
        other = "" if batch is None else f", {percent(batch)} % with the statistics of the test batch"
        rounds = f"{pilot.rounds} round{'s' * (pilot.rounds > 1)}"
        yield (
            f"Pilot: FedAvg gets {percent(pilot.accuracy)} %{by_domain} after {rounds}{other}; guessing gets "
            f"{percent(pilot.guessing)} %."
        )


def refused(left_out: Mapping[str, str]) -> dict[str, list[str]]:
    """Methods by why they are left out, without the remedy."""
    found: dict[str, list[str]] = {}
    for method, why in left_out.items():
        why = why.partition(": ")[0].rstrip(".")
        for part in (method, *method.split("+")):
            why = why.replace(f"'{part}'", "it")
        found.setdefault(why, []).append(method)
    return found


def in_words(found: AboveChance) -> str:
    size = verdict(found)
    if size == NOT_CLEAR:
        return f"no farther apart than chance gives ({found.distance:.2f}, by chance {found.chance:.2f})."
    told = {HARDLY: f"hardly, below {SOME}", SOMEWHAT: f"somewhat, below {MUCH}"}.get(size, f"much, from {MUCH} on")
    return f"{apart(found):.2f} apart, without the {found.chance:.2f} that chance gives: {told}."


def unknown(found: Survey, config: Config) -> Iterator[str]:
    """What this advice does not rest on, each with what would tell."""
    pilot = found.pilot
    if found.looked_at < found.clients:
        yield f"Clients that were not looked at: {found.looked_at} of {found.clients:,} were, drawn by the seed."
    elif found.clients < FEW_CLIENTS:
        yield f"Whether other sites would be as these are: {found.clients} clients are no sample."
    if found.look is None:
        yield "How far looks differ: no class is at two clients, so that a look cannot be told from a label."
    elif found.comparable < LITTLE:
        share = percent(found.comparable)
        yield f"How far looks differ for most images: {share} % are of a class that another client has."
    if pilot is None:
        yield "What FedAvg gets: there was no pilot, and looks were taken of the model as it begins."
    elif not pilot.has_learned:
        yield (
            f"What a trained model would see: the pilot is no better than guessing, {percent(pilot.accuracy)} % and "
            f"{percent(pilot.guessing)} %: give more --rounds, or another learning rate."
        )
    if pilot is not None:
        width = 196 * (2 * pilot.accuracy * (1 - pilot.accuracy) / pilot.test_samples) ** 0.5
        count = f"{pilot.test_samples:,} test samples"
        yield f"What differs by less than {width:.1f} points: so much changes with other {count}."
        if pilot.has_learned and pilot.gain is not None and pilot.gain > width:
            yield (
                f"Whether the {pilot.gain:+.1f} points of the test batch's statistics last: in the first rounds those "
                "of the federation lag behind, whatever the shift."
            )
    if config.dp != "none":
        yield f"What the noise of 'dp={config.dp}' costs: the pilot has none."
    if found.participation < 1:
        share = f"a share of {found.participation:g} of the clients comes in a round"
        yield f"What it does to a method that remembers, and to the pilot, that {share}."
    if not found.held_out:
        yield "Whether the model will go to sites that did not train: if so, name a domain with --unseen."
    yield "Whether the learning rate suits each method, and what was measured on other data holds on yours: compare."


def following(suggested: list[str], config: Config, calibrate: Calibration) -> list[str]:
    """What to do next: compare, tune each, calibrate; as commands, or as a call where something was given in Python."""
    tried = ["central", "fedavg"] if suggested == ["fedavg"] and config.dp == "none" else suggested
    own = {
        name: value
        for name, value in config.to_dict().items()
        if value != getattr(Config, name) and name not in (*SET_BY_ADVICE, "seed")
    }
    if objects := given_in_python(config):
        names = ["federation" if name == "data" else name for name in objects]
        words = [f"{name}={name}" for name in names]
        words += [f"{name}={value!r}" for name, value in own.items() if name not in objects]
        return [f"fedkeel.compare({tried!r}, {', '.join(words)}, seeds=3)"]
    flags = [word for name, value in own.items() for word in flag(name, value)]
    commands = [["compare", *tried, *flags, "--seeds", "3"], ["tune", *suggested, *flags]]
    if calibrate.verdict in ("yes", "try"):
        commands.append(["calibrate", "RUN", "--images", "DIR"])
    return [shell(["fedkeel", *words]) for words in commands]


def flag(name: str, value: Any) -> list[str]:
    dashed = name.replace("_", "-")
    return [f"--{dashed}" if value else f"--no-{dashed}"] if isinstance(value, bool) else [f"--{dashed}", str(value)]
