"""The trials of a search: each process asks Optuna for one, runs it, and tells what came of it."""

from __future__ import annotations

import itertools
import math
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from fedkeel import seeds
from fedkeel.config import Config
from fedkeel.core.evaluation import Scores
from fedkeel.core.naming import slug
from fedkeel.engine.idle import without_idle
from fedkeel.engine.metrics import chosen, selection
from fedkeel.errors import FedkeelError
from fedkeel.experiments.jobs import Job
from fedkeel.experiments.tune_space import Space, configured, default_params, short, shown
from fedkeel.files import explained
from fedkeel.observer import Observer
from fedkeel.simulation import simulate

JOURNAL, TRIALS = "tuning.journal", "trials"
AT_RANDOM = 5  # trials, before the results of others decide what is drawn
FEWEST = 3  # finished trials that one must be behind the median of to be pruned
NUMBER, PROBLEM = "number", "problem"
STATES = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


@dataclass(frozen=True)
class Search:
    """The trials of one method."""

    label: str
    config: Config  # tested on validation samples, with the seed of the search
    space: Space
    trials: int
    prune: bool
    folder: Path

    @property
    def lower(self) -> bool:
        """Whether less is better of what is measured."""
        return self.config.select_by == "loss" or any(metric.lower for metric in chosen(self.config).values())

    @property
    def grid(self) -> list[dict[str, Any]]:
        """Every point, where all there is are lists, and few enough; else nothing."""
        lists = [found.choices for found in self.space.values() if isinstance(found, CategoricalDistribution)]
        whole = len(lists) == len(self.space) and math.prod(map(len, lists)) <= self.trials
        return [dict(zip(self.space, point, strict=True)) for point in itertools.product(*lists)] if whole else []

    def study(self, number: int = 0) -> optuna.Study:
        """As one process sees it that is to ask for this trial."""
        seed = seeds.derive(self.config.seed, "tune", self.label, number) % 2**32
        with explained(self.folder, ""):
            self.folder.mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # it tells of every study and trial on stderr
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=AT_RANDOM, constant_liar=True)
            storage = JournalStorage(JournalFileBackend(str(self.folder / JOURNAL)))
        median = optuna.pruners.MedianPruner(FEWEST, self.config.rounds // 2, n_min_trials=FEWEST)
        return optuna.create_study(
            storage=storage,
            sampler=sampler,
            pruner=median if self.prune else optuna.pruners.NopPruner(),
            study_name=self.label,
            direction="minimize" if self.lower else "maximize",
            load_if_exists=True,
        )

    def over(self, study: optuna.Study) -> list[FrozenTrial]:
        """The trials of which it is known what came of them, in the order in which they were planned."""
        told = [trial for trial in study.trials if trial.state in STATES and NUMBER in trial.user_attrs]
        return sorted(told, key=lambda trial: trial.user_attrs[NUMBER])

    def begin(self) -> list[Attempt]:
        """All trials, those that were under way when an earlier search ended once more."""
        study = self.study()
        usual = default_params(self.config, self.space)
        for params in sorted(self.grid, key=lambda point: point != usual) or [usual]:
            study.enqueue_trial(params, skip_if_exists=True)
        for trial in study.get_trials(states=[TrialState.RUNNING]):
            study.tell(trial.number, state=TrialState.FAIL)
            study.enqueue_trial(trial.params)
        over = {trial.user_attrs[NUMBER] for trial in self.over(study)}
        return [self.attempt(number, is_over=number in over) for number in range(len(self.grid) or self.trials)]

    def attempt(self, number: int, *, is_over: bool = False) -> Attempt:
        directory = self.folder / TRIALS / slug(self.label) / f"{number:03d}"
        return Attempt(
            self.label, self.config.seed, directory, self.config, search=self, number=number, is_over=is_over
        )

    def params(self, trial: FrozenTrial | optuna.Trial) -> dict[str, Any]:
        return {name: short(trial.params[name]) for name in self.space}

    def document(self) -> dict[str, Any]:
        """All of it, for who reads it without Optuna."""
        over = self.over(self.study())
        done = [trial for trial in over if trial.state == TrialState.COMPLETE]
        best = (min if self.lower else max)(done, key=lambda trial: trial.value or 0.0, default=None)
        return {
            "method": self.label,
            "space": {name: shown(found) for name, found in self.space.items()},
            "best": best.user_attrs[NUMBER] if best else None,
            "trials": [
                {
                    "number": trial.user_attrs[NUMBER],
                    "state": STATES[trial.state],
                    "params": self.params(trial),
                    "score": trial.value if trial.state == TrialState.COMPLETE else None,
                    "curve": sorted(trial.intermediate_values.items()),
                    "directory": str(self.attempt(trial.user_attrs[NUMBER]).directory.relative_to(self.folder)),
                    **({PROBLEM: trial.user_attrs[PROBLEM]} if PROBLEM in trial.user_attrs else {}),
                }
                for trial in over
            ],
        }


@dataclass(frozen=True)
class Attempt(Job):
    """One trial: whichever process it runs in asks Optuna for its settings."""

    search: Search = field(kw_only=True, compare=False)
    number: int = 0
    is_over: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.label} trial {self.number}"

    def run(self, observer: Observer, objects: Mapping[str, Any]) -> None:
        search, study = self.search, self.search.study(self.number)
        trial = study.ask(search.space)
        config = without_idle(configured(self.config, search.params(trial)))
        watching = _Reports(trial, search, observer)
        shutil.rmtree(self.directory, ignore_errors=True)
        try:
            simulate(config, directory=self.directory, observer=watching, verbose=False, **objects)
            value = outcome(watching.values, config, lower=search.lower)
        except optuna.TrialPruned:
            trial.set_user_attr(NUMBER, self.number)
            study.tell(trial, state=TrialState.PRUNED)
        except FedkeelError as error:  # as it diverges, or memory runs out: so would the next with these settings
            trial.set_user_attr(PROBLEM, str(error))
            trial.set_user_attr(NUMBER, self.number)
            study.tell(trial, state=TrialState.FAIL)
            raise
        else:
            trial.set_user_attr(NUMBER, self.number)
            study.tell(trial, value)


class _Reports(Observer):
    """Tells Optuna of each evaluated round, and ends a trial that is behind."""

    def __init__(self, trial: optuna.Trial, search: Search, then: Observer) -> None:
        self.trial, self.then, self.values = trial, then, list[float]()
        self.good, self.sign = selection(search.config), -1 if search.lower else 1

    def started(self, config: Config, first_round: int) -> None:
        self.then.started(config, first_round)

    def round_done(self, round: int, rounds: int, scores: Scores | None, loss: float) -> None:
        self.then.round_done(round, rounds, scores, loss)
        value = math.nan if scores is None else self.sign * self.good(scores.record())
        if math.isfinite(value):
            self.values.append(value)
            self.trial.report(value, round)
            if round + 1 < rounds and self.trial.should_prune():
                raise optuna.TrialPruned

    def note(self, text: str) -> None:
        """The run keeps it: trials with poor settings say what everybody expects of these."""


def outcome(values: list[float], config: Config, *, lower: bool) -> float:
    """What counts of the rounds, by the rule that the result of a run goes by."""
    if not values:
        raise FedkeelError(f"Its validation gives no '{config.select_by}'.")
    if config.result == "best-validation":
        return min(values) if lower else max(values)
    return fmean(values[-10:]) if config.result == "mean-last-10" else values[-1]
