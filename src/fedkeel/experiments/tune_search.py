"""The search: trials of each method, drawn by Optuna and run side by side, those that fall behind ended early.

Trials are drawn five at a time, a generation. What is drawn, and who falls behind, depends on the generations before
it and on nothing else, so that the number of jobs, the order in which trials end and interruptions decide nothing: the
same seed finds the same settings, as far as the runs themselves are the same.

A trial is an ordinary run that is tested on validation samples (`evaluate_on`): no test image is looked at.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from filelock import FileLock, Timeout

from fedkeel import seeds
from fedkeel.config import Config
from fedkeel.core.naming import slug
from fedkeel.engine.idle import without_idle
from fedkeel.errors import FedkeelError
from fedkeel.experiments.jobs import Attempt, Enough, Job, JobsObserver
from fedkeel.experiments.tune_scores import curve, measured, outcome
from fedkeel.experiments.tune_space import Choices, Params, Space, configured, default_params
from fedkeel.files import explained
from fedkeel.runs.store import has_finished

JOURNAL, TRIALS = "tuning.journal", "trials"
GENERATION = 5  # trials that are drawn together; the first are drawn at random
HALF = 2  # of the rounds pass before a trial can be behind: what learns slowly may yet be good
FEWEST = 3  # trials to be behind of
ENOUGH_TO_WEIGH = 8  # finished trials, for the importance of options
PROBLEM = "problem"


def require_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise FedkeelError("Tuning needs Optuna, which is not installed: pip install 'fedkeel[tune]'.") from None


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """It tells of every study on stderr, and version 4 of what it calls experimental, unless it is asked not to."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def storage_in(folder: Path) -> Any:
    """The studies in a file of the folder, where nobody else is at work."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    with explained(folder), open(folder / JOURNAL, "ab+") as journal:
        journal.seek(0)
        whole = journal.read().rpartition(b"\n")
        if whole[2]:  # a power cut: what the last line was to say is found out again
            journal.truncate(len(whole[0]) + len(whole[1]))
        # Of one that was killed. Optuna would wait for it: in a relative folder, where the link leads nowhere, forever.
        (folder / f"{JOURNAL}.lock").unlink(missing_ok=True)
    try:
        return JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    except (ValueError, KeyError, TypeError) as error:
        raise FedkeelError(f"'{folder / JOURNAL}' is damaged ({error}): choose another directory.") from error


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One search at a time in a folder."""
    with explained(folder, ""):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "tuning.lock", timeout=0):
            yield
    except Timeout:
        raise FedkeelError(f"Another search is at work in '{folder}': wait until it is over.") from None


# -- one method -------------------------------------------------------------------------------------------------------
@dataclass
class MethodSearch:
    """The trials of one method."""

    label: str
    config: Config  # tested on validation samples, with the seed of the search
    space: Space
    trials: int
    folder: Path
    storage: Any = field(repr=False)
    prune: bool = True
    given: Mapping[str, Any] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)  # by trial, the round after which it was behind

    @cached_property
    def study(self) -> Any:
        import optuna

        return optuna.create_study(
            storage=self.storage, study_name=self.label, direction="maximize", load_if_exists=True
        )

    @cached_property
    def grid(self) -> list[dict[str, Any]] | None:
        """Every point, the default settings first, where all there is are lists, and few enough."""
        values = [d.values for d in self.space.values() if isinstance(d, Choices)]
        if len(values) < len(self.space) or math.prod(map(len, values)) > self.trials:
            return None
        points = [dict(zip(self.space, point, strict=True)) for point in itertools.product(*values)]
        usual = default_params(self.config, self.space)
        return sorted(points, key=lambda point: point != usual)

    @property
    def planned(self) -> int:
        return self.trials if self.grid is None else len(self.grid)

    def drawn(self) -> list[Any]:
        """Optuna's trials, in their order."""
        waiting = type(self)._states().WAITING
        return [trial for trial in self.study.get_trials(deepcopy=False) if trial.state != waiting]

    @staticmethod
    def _states() -> Any:
        from optuna.trial import TrialState

        return TrialState

    def draw(self) -> list[Attempt]:
        """Those that can be run now: of an interrupted generation the ones that are left, else the next generation."""
        running, there = self._states().RUNNING, self.drawn()
        first = next((trial.number for trial in there if trial.state == running), len(there))
        for number in range(first, min(first - first % GENERATION + GENERATION, self.planned)):
            if number >= len(there) or (there[number].state == running and len(there[number].params) < len(self.space)):
                self._ask(number, there[number]._trial_id if number < len(there) else None)
        left = [trial for trial in self.drawn() if trial.state == running]
        return [self.attempt(trial.number, self.params(trial)) for trial in left]

    def _ask(self, number: int, begun: int | None) -> None:
        """Draw a trial, or what a trial lacks that was cut off while it was drawn."""
        import optuna

        # A sampler of its own for each draw: whoever goes on with an interrupted search draws what it would have.
        def sampler(*what: object) -> Any:
            seed = seeds.derive(self.config.seed, "tune", self.label, number, *what) % 2**32
            return optuna.samplers.TPESampler(seed=seed, n_startup_trials=GENERATION, constant_liar=True)

        fixed = self.grid[number] if self.grid is not None else {}
        if begun is None and (fixed or number == 0):
            self.study.enqueue_trial(fixed or default_params(self.config, self.space), skip_if_exists=True)
        self.study.sampler = sampler()
        trial = self.study.ask() if begun is None else optuna.trial.Trial(self.study, begun)
        for name, dimension in self.space.items():
            self.study.sampler = sampler(name)
            dimension.suggest(trial, name)

    def params(self, trial: Any) -> dict[str, Any]:
        return {name: self.space[name].tried(trial.params[name]) for name in self.space if name in trial.params}

    def attempt(self, number: int, params: Params) -> Attempt:
        directory = self.folder / TRIALS / slug(self.label) / f"{number:03d}"
        config = without_idle(configured(self.config, params))
        return Attempt(self.label, config.seed, directory, config, given=self.given, number=number)

    # -- falling behind ----------------------------------------------------------------------------------------------
    def is_behind(self, job: Attempt) -> bool:
        """Whether the best of its rounds is below the median of what finished trials of earlier generations had there
        (the median rule of Google Vizier, 2017)."""
        if not self.prune:
            return False
        rivals = self._rivals(job.number)
        own, best = curve(job.directory, job.config), -math.inf
        for round, value in sorted(own.items()) if len(rivals) >= FEWEST else ():
            best = max(best, value)
            there = [rival[round] for rival in rivals if round in rival]
            early = (round + 1) * HALF < job.config.rounds or round + 1 >= job.config.rounds
            if not early and len(there) >= FEWEST and best < median(there):
                self.ended[job.number] = round
                return True
        return False

    def _rivals(self, number: int) -> list[Mapping[int, float]]:
        return [trial.intermediate_values for trial in self.finished(number - number % GENERATION)]

    def finish(self, job: Attempt, problem: str) -> None:
        """Tell Optuna. One that failed counts as worse than any: drawn again it would fail again."""
        own, last = curve(job.directory, job.config), self.ended.get(job.number, math.inf)
        own = {round: value for round, value in sorted(own.items()) if round <= last}
        study = self.storage.get_study_id_from_name(self.label)
        trial = self.storage.get_trial_id_from_study_id_trial_number(study, job.number)
        for round, value in own.items():
            self.storage.set_trial_intermediate_value(trial, round, value)
        if job.number in self.ended:
            self.study.tell(job.number, state=self._states().PRUNED)
            return
        value = outcome(list(own.values()), job.config.result) if own and not problem else -math.inf
        if not math.isfinite(value):
            reason = problem or f"its validation gives no '{job.config.select_by}'"
            self.storage.set_trial_user_attr(trial, PROBLEM, reason)
        self.study.tell(job.number, value)

    # -- what came of it -----------------------------------------------------------------------------------------------
    def finished(self, before: int | None = None) -> list[Any]:
        """Those that went all the way; or, of them, those before this number."""
        done = self._states().COMPLETE
        return [t for t in self.drawn()[:before] if t.state == done and PROBLEM not in t.user_attrs]

    def best(self) -> Any:
        """The trial with the highest value, the first of equals; None where there is none yet."""
        return max(self.finished(), key=lambda trial: (trial.value, -trial.number), default=None)

    def chosen(self) -> dict[str, Any]:
        """The values of the best trial; an error where all failed."""
        if best := self.best():
            return self.params(best)
        problems = [t.user_attrs[PROBLEM] for t in self.drawn() if PROBLEM in t.user_attrs] or ["none has begun"]
        raise FedkeelError(
            f"All trials of '{self.label}' failed, the last: {problems[-1].rstrip('.')}; choose another space, and "
            "another directory."
        )

    def edges(self, params: Params) -> dict[str, str]:
        """The options whose value is at an end of its range, and at which."""
        found = {name: dimension.edge(params[name]) for name, dimension in self.space.items()}
        return {name: end for name, end in found.items() if end}

    @cached_property
    def importance(self) -> dict[str, float]:
        """How much of what differs between finished trials each option explains (fANOVA, Hutter et al., 2014)."""
        import optuna

        done = self.finished()
        varied = [name for name in self.space if len({str(t.params[name]) for t in done}) > 1]
        if len(done) < ENOUGH_TO_WEIGH or len(varied) < 2 or len({t.value for t in done}) < 2:
            return {}
        weigh = optuna.importance.FanovaImportanceEvaluator(seed=0)
        found = optuna.importance.get_param_importances(self.study, evaluator=weigh, params=varied)
        return {name: round(float(share), 4) for name, share in found.items()}

    def document(self) -> dict[str, Any]:
        """All of it, for who reads it without Optuna."""
        states = self._states()
        names = {states.COMPLETE: "finished", states.PRUNED: "pruned", states.RUNNING: "running"}
        trials = []
        for trial in self.drawn():
            failed = PROBLEM in trial.user_attrs
            curve = [[r, measured(v, self.config)] for r, v in sorted(trial.intermediate_values.items())]
            params = self.params(trial)
            known = {"number": trial.number, "state": "failed" if failed else names[trial.state], "params": params}
            known |= {"score": measured(trial.value, self.config), "curve": curve}
            known |= {"directory": str(self.attempt(trial.number, params).directory.relative_to(self.folder))}
            trials.append(known | ({"problem": trial.user_attrs[PROBLEM]} if failed else {}))
        best, over = self.best(), all(trial["state"] != "running" for trial in trials) and len(trials) == self.planned
        return {
            "method": self.label,
            "space": {name: str(dimension) for name, dimension in self.space.items()},
            "grid": self.grid is not None,
            "planned": self.planned,
            "best": best.number if best else None,
            "edges": self.edges(self.params(best)) if best else {},
            "importance": self.importance if over else {},
            "trials": trials,
        }


# -- all of them ------------------------------------------------------------------------------------------------------
class Search(JobsObserver):
    """The trials that can be run now, of all methods, and what becomes of them."""

    def __init__(self, methods: Sequence[MethodSearch], observer: JobsObserver, write: Callable[[], None]) -> None:
        self.methods = {method.label: method for method in methods}
        self.observer, self.write = observer, write
        self.waiting: list[Attempt] = []
        self.at_work: dict[str, int] = dict.fromkeys(self.methods, 0)

    def begin(self) -> list[Attempt]:
        """Plan, and take up what was interrupted; returns jobs like those to come."""
        like = [m.attempt(number, {}) for m in self.methods.values() for number in range(m.planned)]
        running = MethodSearch._states().RUNNING
        over = {(m.label, t.number) for m in self.methods.values() for t in m.drawn() if t.state != running}
        self.observer.planned(like, [job for job in like if (job.label, job.number) in over])
        for label in self.methods:
            self._draw(label)
        return like

    def _draw(self, label: str) -> None:
        """What can be run of a method now; a run that ended just when the search was cut off is told at once."""
        method = self.methods[label]
        drawn = method.draw()
        ready = [job for job in drawn if method.is_behind(job) or has_finished(job.directory)]
        for job in ready:
            method.finish(job, "")
            self.observer.job_finished(job, "")
        self.waiting += [job for job in drawn if job not in ready]
        self.at_work[label] = len(drawn) - len(ready)
        if drawn:
            self.write()
        if drawn and not self.at_work[label]:
            self._draw(label)

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def next(self) -> Job:
        return self.waiting.pop(0)

    def job_started(self, job: Job, first_round: int) -> None:
        self.observer.job_started(job, first_round)

    def job_progress(self, job: Job, rounds_done: float, accuracy: float | None) -> None:
        self.observer.job_progress(job, rounds_done, accuracy)
        if accuracy is not None and isinstance(job, Attempt) and self.methods[job.label].is_behind(job):
            raise Enough

    def job_finished(self, job: Job, problem: str) -> None:
        if isinstance(job, Attempt):
            self.methods[job.label].finish(job, problem)
            self.write()
            self.observer.job_finished(job, problem)
            self.at_work[job.label] -= 1
            if not self.at_work[job.label]:
                self._draw(job.label)

    def tick(self) -> None:
        self.observer.tick()

    def note(self, text: str) -> None:
        """Of a run, which keeps it: trials with poor settings say what everybody expects of these."""
