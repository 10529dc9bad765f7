"""Which methods to try, and whether to calibrate, from what was measured of a federation and what its clients can do.

The table of `fedkeel.experiments.situations` says what is recommended for which shift. Of each of its lines that
applies, the first method is taken that a run would not refuse, which the engine's own checks say.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from fedkeel import methods
from fedkeel.config import Config
from fedkeel.core.composition import Composition
from fedkeel.engine import checks
from fedkeel.engine.setup import Setup, build_model
from fedkeel.errors import FedkeelError
from fedkeel.experiments.advice.survey import GREATLY, SOMEWHAT, Survey, apart, verdict
from fedkeel.experiments.situations import (
    BOTH,
    FEATURE,
    LABEL,
    LEAST_BATCH,
    SITUATIONS,
    SMALL_BATCHES,
    UNSEEN,
    Evidence,
    Situation,
)
from fedkeel.nn.calibration import normalised_layers
from fedkeel.runs.run import without_weights
from fedkeel.trust import privacy

MOST = 3  # methods beside FedAvg
FEW = 8  # a batch below which its statistics are noise
REFERENCE = "the reference; what is not ahead of it is not worth its price"
NOTHING = "nothing measured here yet"
UNUSABLE = "batch norm cannot be used here"  # where FedAvg is refused: it changes nothing, so it is the network


@dataclass(frozen=True)
class Suggestion:
    """A method to try; made by `fedkeel.advise`, which has an example.

    Attributes:
        method: as it is typed.
        reason: why, with the number it rests on.
        evidence: what the ledger has of it under this shift, a sentence each.
    """

    method: str
    reason: str
    evidence: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Calibration:
    """Whether sites should calibrate the model: "yes", "no", "try" or "not known", and why; see `fedkeel.advise`."""

    verdict: str
    reason: str


# -- what there is ---------------------------------------------------------------------------------------------------
def shifts(found: Survey) -> dict[str, str]:
    """The shifts that matter, with the number that says so: those that are large, or else any that is there."""
    told = {LABEL: labels_in_words(found), FEATURE: look_in_words(found)}
    sizes = {LABEL: verdict(found.labels), FEATURE: verdict(found.look) if found.look else ""}
    large = {shift: told[shift] for shift, size in sizes.items() if size == GREATLY}
    present = large or {shift: told[shift] for shift, size in sizes.items() if size == SOMEWHAT}
    both = {BOTH: " and ".join(present.values())} if len(large) == 2 else {}
    unseen = {UNSEEN: f"the model goes to {', '.join(found.held_out)}"} if found.held_out else {}
    return {**both, **unseen, **present}


def labels_in_words(found: Survey) -> str:
    return f"labels lie {apart(found.labels):.2f} apart"


def look_in_words(found: Survey) -> str:
    return f"looks lie {apart(found.look):.2f} apart" if found.look else "looks cannot be compared"


# -- what can be run -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Candidates:
    """Says why a method would be refused for this federation, its model and options."""

    config: Config  # as it was asked for: the pilot has another one
    setup: Setup
    model: nn.Module | None  # given in Python

    def refusal(self, method: str) -> str:
        """In a sentence; nothing where it can be run."""
        config = self.config.replace(method=method)
        try:
            composed = Composition.of(methods.build(method))
            with unheard():
                network = self._network(config, composed)
        except FedkeelError as error:
            return str(error)
        size = config.batch_size
        acts_on_it = any(part.traits.needs_batch_norm for part in composed.parts) and normalised_layers(network)
        if size == 1 and acts_on_it:  # "gn" needs batch norm too, and leaves none
            return f"'{method}' acts on batch statistics, and a batch of one sample has none."
        least = max((LEAST_BATCH.get(part.name, 1) for part in composed.parts), default=1)
        return f"'{method}' goes by batches of {least} samples or more, and these have {size}." if size < least else ""

    def _network(self, config: Config, method: Composition) -> nn.Module:
        rules = privacy.choose_rules(config)
        checks.check_options(config, method, rules.aggregator.defence)
        network = build_model(without_weights(config), self.setup.given, method, self.model)
        privacy.refuse_network(config, network)
        return network


@contextmanager
def unheard() -> Iterator[None]:
    """Whoever runs a method is warned then, and not about those that are only thought of."""
    log = logging.getLogger("fedkeel")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


# -- what to try -----------------------------------------------------------------------------------------------------
def suggest(
    found: Survey, candidates: Candidates, known: Sequence[Evidence]
) -> tuple[list[Suggestion], dict[str, str]]:
    """FedAvg and up to three others; and why others that were thought of before them were left out."""
    present, batch_size = shifts(found), min(found.batch_size, found.samples[1])
    alike = f"clients hardly differ ({labels_in_words(found)}, {look_in_words(found)}), so the plain mean should do"
    first, refusal = Suggestion("fedavg", REFERENCE if present else alike), candidates.refusal("fedavg")
    suggestions, left_out = ([], {"fedavg": refusal}) if refusal else ([first], dict[str, str]())
    unusable = UNUSABLE if refusal else ""
    if found.batch_norm and batch_size == 1:
        unusable = "a batch of 1 sample has no statistics"
    for line, number in applicable(present, batch_size, unusable):
        taken = {part for suggestion in suggestions for part in (suggestion.method, *suggestion.method.split("+"))}
        if sum(suggestion.method != "fedavg" for suggestion in suggestions) == MOST or taken & {*line.methods}:
            continue
        for method in ranked(line, known):
            refusal = left_out.get(method) or candidates.refusal(method)
            if not refusal:
                shift = line.shift if line.shift in present else next(iter(present), line.shift)
                evidence = evidence_of(method, shift, known)
                suggestions.append(Suggestion(method, f"{number}, and {line.why}", evidence))
                break
            left_out[method] = refusal
    return suggestions, left_out


def applicable(present: dict[str, str], batch_size: int, unusable: str) -> Iterator[tuple[Situation, str]]:
    """The lines of the table for these shifts, with the number that each rests on: one of each shift in turn. The line
    for small batches comes first where they are small, and its methods one by one where batch norm is `unusable`."""
    few = next(line for line in SITUATIONS if line.when == SMALL_BATCHES)
    yield from ((few._replace(methods=(method,)), unusable) for method in few.methods if unusable)
    lines = {shift: [line for line in SITUATIONS if line.shift == shift] for shift in present}
    if batch_size < FEW:
        lines = {shift: sorted(those, key=lambda line: line != few) for shift, those in lines.items()}
    for depth in range(max(map(len, lines.values()), default=0)):
        yield from ((those[depth], present[shift]) for shift, those in lines.items() if depth < len(those))


def ranked(situation: Situation, known: Sequence[Evidence]) -> list[str]:
    """Its methods as the table has them, those last that were behind FedAvg here."""

    def was_behind(method: str) -> bool:
        verdicts = {one.verdict for one in known if one.shift == situation.shift and one.is_of([method])}
        return "behind" in verdicts and "ahead" not in verdicts

    return sorted(situation.methods, key=was_behind)


def evidence_of(method: str, shift: str, known: Sequence[Evidence]) -> list[str]:
    """Of the method under this shift; of a composition that was not run, of its parts under either of its shifts."""
    either = (LABEL, FEATURE) if shift == BOTH else (shift,)
    told = [one for one in known if one.shift in either and one.is_of([method])]
    told = told or [one for one in known if one.shift in either and "+" in method and one.is_of(method.split("+"))]
    return [one.sentence for one in told] or [NOTHING]


# -- whether to calibrate --------------------------------------------------------------------------------------------
def calibration(found: Survey, left_out: Mapping[str, str]) -> Calibration:
    """Of a model with batch norm, where looks differ; a site's own moments hold its labels as well.

    What batch statistics gain in the pilot is no reason: in its few rounds the federation's lag behind, whatever the
    shift.
    """
    if not found.batch_norm:
        return Calibration("no", "the model has no batch norm, whose statistics a site could replace")
    if "fedavg" in left_out:
        return Calibration("no", UNUSABLE)
    if found.look is None:
        return Calibration("not known", "no class is at two clients, so that looks cannot be told from labels")
    labels, look = verdict(found.labels) == GREATLY, verdict(found.look)
    if look in (GREATLY, SOMEWHAT) and labels:
        told = f"{look_in_words(found)}, but {labels_in_words(found)}, and a site's own moments hold both"
        return Calibration("try", told)
    if look == GREATLY:
        return Calibration("yes", f"{look_in_words(found)}, and {labels_in_words(found)}")
    if look == SOMEWHAT:
        return Calibration("try", f"{look_in_words(found)}, which is little")
    return Calibration("no", f"{look_in_words(found)}, so a site's own moments would bring noise, and its labels")
