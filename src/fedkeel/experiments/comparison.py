"""Compare methods over several seeds: each (method, seed) is a run directory, the result is a table.

What is finished is not run again, and what was interrupted goes on: the same call continues a comparison. A run of
which the data or the code have changed since is not used: a directory that was given is refused, and without one the
next number is taken.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeel import analysis
from fedkeel import methods as registered
from fedkeel.config import MACHINE_OPTIONS, Config, option_names
from fedkeel.core import imports
from fedkeel.core.composition import Composition
from fedkeel.core.naming import slug
from fedkeel.core.readable import html_table
from fedkeel.data.federation import Federation
from fedkeel.engine.executors.executor import choose_executor
from fedkeel.engine.idle import settled
from fedkeel.engine.setup import choose_device, load_federation
from fedkeel.errors import FedkeelError
from fedkeel.experiments.beginning import Beginning
from fedkeel.experiments.jobs import Job, JobsObserver, Trial, beside_others, choose_jobs, run_all
from fedkeel.experiments.objects import read_objects
from fedkeel.experiments.progress import watched
from fedkeel.experiments.rows import SET_BY_COMPARISON, own_options, read_seeds
from fedkeel.experiments.tables import Results
from fedkeel.files import below, explained, write_atomically
from fedkeel.options import as_path
from fedkeel.runs.intact import refuse_to_hide
from fedkeel.runs.origin import Origin, outline_of
from fedkeel.runs.run import Run
from fedkeel.runs.store import has_finished, numbered
from fedkeel.runs.tables import as_frame, result_row
from fedkeel.runs.trackers import require
from fedkeel.simulation import build

if TYPE_CHECKING:
    import pandas

    from fedkeel.core.method import Method

FILE = "comparison.json"
SEARCH, CHOSEN = "tuning.json", "best"  # in the folder of a search: what it found, and the comparison of that


@dataclass(frozen=True)
class Comparison:
    """The runs of a comparison, in the order of the table; made by `compare`, which has an example."""

    directory: Path  # holds `<method>/seed<k>/`, each a run directory
    trials: Sequence[Trial]
    failures: dict[str, str] = field(default_factory=dict)  # why a run is missing, by the run's name

    @property
    def runs(self) -> list[Run]:
        return [run for _, run in self._finished()]

    @property
    def missing(self) -> list[str]:
        """The names of the runs that are not finished."""
        return [str(trial) for trial in self.trials if not has_finished(trial.directory)]

    @property
    def results(self) -> Results:
        return self.results_by("accuracy")

    def results_by(self, metric: str) -> Results:
        """The table of another measure of the runs' models, such as "balanced-accuracy"."""
        return Results.by(metric, [(trial.label, run) for trial, run in self._finished()])

    def rows(self) -> list[dict[str, Any]]:
        """A table for each method: `method`, `seeds`, and mean and std of `domains` and `average`, as fractions."""
        return [row.to_dict() for row in self.results.rows]

    def frame(self) -> pandas.DataFrame:
        """A pandas table with a row for each finished run: `method`, `seed`, `data`, `model`, `accuracy`,
        `domains.NAME` and, of the same round, the mean over clients of the `metrics` that were asked for."""
        rows = []
        for (trial, run), given in zip(self._finished(), options_of(self.runs), strict=True):
            known = {"method": trial.label, "seed": trial.seed, "data": given["data"], "model": given["model"]}
            rows.append(known | result_row(run))
        return as_frame(rows)

    def __repr__(self) -> str:
        return f"Comparison('{self.directory}')\n{self.table()}{self._unfinished()}"

    def _repr_html_(self) -> str:
        results = self.results
        return html_table(f"{results.legend()}{self._unfinished()}", results.lines())

    def _unfinished(self) -> str:
        return f"\nMissing, not finished: {', '.join(self.missing)}." if self.missing else ""

    def table(self, metric: str = "accuracy") -> str:
        return self.results_by(metric).text()

    def markdown(self, metric: str = "accuracy") -> str:
        return self.results_by(metric).markdown()

    def csv(self, metric: str = "accuracy") -> str:
        return self.results_by(metric).csv()

    def to_dict(self, metric: str = "accuracy") -> dict[str, Any]:
        return {
            "directory": str(self.directory),
            **self.results_by(metric).to_dict(),
            "runs": [
                {"method": trial.label, "seed": trial.seed, "directory": str(trial.directory), "summary": run.summary}
                for trial, run in self._finished()
            ],
            "missing": self.missing,
            "failures": self.failures,
        }

    def _finished(self) -> list[tuple[Trial, Run]]:
        return [(trial, Run(trial.directory)) for trial in self.trials if has_finished(trial.directory)]


def compare(
    methods: Sequence[str | Method],
    *,
    seeds: int | Sequence[int] = 3,
    directory: str | Path | None = None,
    jobs: int | None = None,
    observer: JobsObserver | None = None,
    track: str | None = None,
    verbose: bool | None = None,
    **options: Any,
) -> Comparison:
    """Run each method with each seed and gather the results.

    Args:
        methods: as typed, `"fedprox(mu=0.1)+gn"`; options of one of them alone after an `@`,
            `"fedwon@learning_rate=0.1,batch_size=8"`; or objects, which the table calls by their class and options.
        seeds: how many, from 0, or which.
        directory: of the run directories; by default `runs/compare-<data>`, with a number when that one holds
            other configurations.
        jobs: runs at the same time, each in a process with one core; by default one per core, and on a GPU one.
        observer: is told how it is going.
        track: a tracker, "tensorboard" or "mlflow", in which each method and seed is a run of its own.
        verbose: show progress; by default where a person looks, on a terminal or in a notebook.
        options: of all runs, as in `Config`; `model` may be a network, and `federation` in place of `data` an object.

    Raises `fedkeel.stopping.Stopped` when it was asked to stop; the same call then continues it.

    >>> comparison = fedkeel.compare(["fedavg", "fedbn"], seeds=1, rounds=1, subsample=30)
    >>> [(row["method"], row["seeds"]) for row in comparison.rows()]
    [('fedavg', [0]), ('fedbn', [0])]
    """
    imports.refuse_while_importing()
    configs, given = read_objects(methods, {**options})
    numbers = read_seeds(seeds)
    require(track)
    with watched(observer, verbose) as observer:
        processes = choose_jobs(jobs, configs.values())
        return compare_configs(configs, given, numbers, directory, processes, observer, track)


def compare_configs(
    configs: Mapping[str, Config],
    given: Mapping[str, Mapping[str, Any]],
    numbers: Sequence[int],
    directory: str | Path | None,
    processes: int,
    observer: JobsObserver,
    track: str | None = None,
) -> Comparison:
    """Rows that are read: the configuration of each by its label, and the objects in place of what it names."""
    if processes > 1:
        configs = {label: beside_others(config) for label, config in configs.items()}
    configs = settled(configs, own_options)
    now = check_all(configs, numbers[0], given)
    folder = free_folder(configs, numbers, now) if directory is None else as_path(directory)
    planned = [replace(job, track=track) for job in plan(configs, numbers, folder)]
    refuse_to_hide(folder, FILE, [job.directory for job in planned])
    for job in planned:  # a run of something else must not stand in a table as one of these, nor go on as one
        if what := other_run(job, now):
            raise FedkeelError(
                f"'{job.directory}' holds another run ({what}): choose another directory, or remove that one."
            )
    finished = [job for job in planned if has_finished(job.directory)]
    todo = [job for job in planned if job not in finished]
    processes = min(processes, max(1, len(todo)))
    write_index(folder, planned)
    observer.planned(planned, finished)
    failures = run_all(todo, processes, observer, given)
    return Comparison(folder, planned, {str(job): problem for job, problem in failures.items()})


def plan(configs: Mapping[str, Config], seeds: Sequence[int], folder: Path) -> list[Job]:
    return [
        Job(label, seed, folder / slug(label) / f"seed{seed}", config.replace(seed=seed))
        for label, config in configs.items()
        for seed in seeds
    ]


def free_folder(configs: Mapping[str, Config], seeds: Sequence[int], now: Mapping[str, Beginning]) -> Path:
    """The first of `runs/compare-<data>`, `-2`, ... that holds nothing else, nor runs of what the methods or the data
    were before."""
    data = next(iter(configs.values())).data.partition("(")[0] or next(iter(now.values())).outline.name
    for folder in numbered(f"compare-{slug(data)}"):
        if not any(other_run(job, now) for job in plan(configs, seeds, folder)):
            return folder
    raise FedkeelError(f"'runs/compare-{slug(data)}' and ten thousand after it are taken: give a directory.")


def other_run(job: Job, now: Mapping[str, Beginning]) -> str:
    """In what the run in the directory of a job is another one; or nothing."""
    if not (job.directory / "config.toml").exists():
        return ""
    theirs, ours = Run(job.directory).config.to_dict(), job.config.to_dict()
    differing = (name for name in ours if theirs[name] != ours[name] and name not in MACHINE_OPTIONS)
    options = (f"{name} is {theirs[name]!r} there and {ours[name]!r} here" for name in differing)
    return next(options, "") or now[job.label].differs(job)


def check_all(configs: Mapping[str, Config], seed: int, given: Mapping[str, Mapping[str, Any]]) -> dict[str, Beginning]:
    """Everything that can be refused before training, for every method, before the first one trains."""
    for label, config in configs.items():  # all names first, since reading images takes longer
        analysis.requested(config)
        Composition.of(given[label].get("method") or registered.build(config.method))
        choose_executor(config, choose_device(config))
    loaded: dict[tuple[Any, ...], Federation] = {}
    found: dict[str, Beginning] = {}
    for label, config in configs.items():
        config = config.replace(seed=seed)
        key = (config.data, config.partition, config.unseen, config.subsample)
        if key not in loaded:
            loaded[key] = given[label].get("federation") or load_federation(config)
        setup = build(config, **{**given[label], "federation": loaded[key]})
        found[label] = Beginning(Origin.of(setup, {"model": given[label].get("model")}), outline_of(setup), seed)
    return found


# -- finding runs -----------------------------------------------------------------------------------------------
def write_index(folder: Path, jobs: Sequence[Job]) -> None:
    """Which runs belong together and in which order, for `read_comparison`."""
    runs = [{"method": job.label, "seed": job.seed, "directory": f"{slug(job.label)}/seed{job.seed}"} for job in jobs]
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / FILE, json.dumps({"runs": runs}, indent=1).encode() + b"\n")


def read_comparison(directory: str | Path) -> Comparison:
    folder = Path(directory)
    try:
        index = json.loads((folder / FILE).read_text())
        trials = [Trial(str(run["method"]), int(run["seed"]), folder / run["directory"]) for run in index["runs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedkeelError(f"'{folder}' does not hold a comparison that can be read: {error}.") from error
    return Comparison(folder, trials)


def find_trials(directory: str | Path) -> list[Trial]:
    """The runs of a comparison; or, without a label, the run in a directory or all those below it."""
    directory = compared(directory)
    if (directory / FILE).exists():
        return list(read_comparison(directory).trials)
    runs = [path.parent for path in below(directory, "config.toml")] or [directory]
    return [Trial("", Run(run).config.seed, run) for run in runs]


def compared(directory: str | Path) -> Path:
    """The folder itself; of a search, the comparison of what it chose: its trials were tested on validation samples."""
    place = Path(directory)
    if not (place / SEARCH).exists():
        return place
    if not (place / CHOSEN / FILE).exists():
        raise FedkeelError(f"The search in '{place}' is not finished: go on with it, by the same command as before.")
    return place / CHOSEN


def read_search(folder: Path) -> dict[str, Any]:
    """What the search in a folder tried and chose; needs no Optuna."""
    try:
        document: dict[str, Any] = json.loads((folder / SEARCH).read_text())
        kinds = {"settings": dict, "trials": int, "methods": list, "select_by": str}
        if wrong := [name for name, kind in kinds.items() if not isinstance(document[name], kind)]:
            raise ValueError(f"its {wrong[0]} are not as a search writes them")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedkeelError(f"'{folder / SEARCH}' cannot be read as a search: {error}.") from error
    return document


def comparisons_in(directory: str | Path) -> list[Path]:
    """The comparisons that a folder holds, each in a folder of its own, as the demo's; of any other, itself."""
    place = compared(directory)
    inner = [] if (place / FILE).exists() else sorted(path.parent for path in place.glob(f"*/{FILE}"))
    runs = below(place, "config.toml") if inner else ()
    return inner if inner and all(any(folder in run.parents for folder in inner) for run in runs) else [place]


def collect_runs(directories: Sequence[str | Path]) -> Comparison:
    """Runs from wherever they are: run directories, comparisons, folders of run directories."""
    trials = [trial for directory in directories for trial in find_trials(directory)]
    several = len(directories) > 1  # what one comparison calls a method may be something else in the next
    loose = [trial for trial in trials if not trial.label or (several and (trial.directory / "config.toml").exists())]
    named = [replace(trial, label=label) for trial, label in zip(loose, labels(loose), strict=True)]
    common = Path(os.path.commonpath([os.path.abspath(directory) for directory in directories]))
    root = Path(directories[0]) if len(directories) == 1 else Path(os.path.relpath(common))
    return Comparison(root, [trial for trial in trials if trial not in loose] + named)


def labels(runs: Iterable[Run | Trial]) -> list[str]:
    """Each run's method, and the options in which these runs differ besides method and seed."""
    tables = options_of([Run(run.directory) for run in runs])
    others = [name for name in option_names() if name not in (*MACHINE_OPTIONS, *SET_BY_COMPARISON)]
    varying = [name for name in others if len({str(table[name]) for table in tables}) > 1]
    own = [",".join(f"{name}={table[name]}" for name in varying) for table in tables]
    return [f"{table['method']}@{options}".rstrip("@") for table, options in zip(tables, own, strict=True)]


def options_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The options of runs; what was given in Python by its class, and where that stands for several by which it is."""
    given = [run.given for run in runs]
    digests: dict[tuple[str, str], set[str]] = defaultdict(set)
    for option, thing in (entry for objects in given for entry in objects.items()):
        digests[option, thing["name"]].add(thing["digest"])
    tables = [run.config.to_dict() for run in runs]
    for table, objects in zip(tables, given, strict=True):
        for option, thing in objects.items():
            which = f"#{thing['digest'][:6]}" if len(digests[option, thing["name"]]) > 1 else ""
            table[option] = thing["name"] + which
    return tables
