"""Compare methods over several seeds: each (method, seed) is a run directory, the result is a table.

    compare(["fedavg", "fedbn", "fedprox(mu=0.1)@learning_rate=0.1"], seeds=3, data="digits-shift", rounds=30)

What is finished is not run again, and what was interrupted goes on: the same call continues a comparison. A run of
which the data or the code have changed since is not used: a directory that was given and holds one is refused, and
without one the next number is taken.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedkeel import analysis
from fedkeel import methods as registered
from fedkeel.config import MACHINE_OPTIONS, Config
from fedkeel.core.composition import Composition
from fedkeel.core.naming import slug
from fedkeel.data.federation import Federation
from fedkeel.data.outline import Outline, changed
from fedkeel.engine.setup import choose_device, choose_executor, load_federation, prepare
from fedkeel.engine.spawning import leave_if_imported_again
from fedkeel.engine.threads import available_cores
from fedkeel.errors import FedkeelError
from fedkeel.experiments.jobs import Job, JobsObserver, beside_others, run_all, uses_gpu
from fedkeel.experiments.rows import read_entries, read_seeds
from fedkeel.experiments.tables import Results
from fedkeel.files import explained, write_atomically
from fedkeel.options import as_path, described
from fedkeel.runs.origin import Origin, outline_of, read_outline
from fedkeel.runs.run import Run
from fedkeel.runs.store import fingerprint
from fedkeel.runs.trackers import prepare as prepare_tracker
from fedkeel.runs.trackers import require

FILE = "comparison.json"


class Place(NamedTuple):
    """Where one run of a comparison is, or will be."""

    label: str
    seed: int
    directory: Path

    def __str__(self) -> str:
        return f"{self.label} seed {self.seed}"


@dataclass(frozen=True)
class Comparison:
    """The runs of a comparison.

    Attributes:
        directory: holds `<method>/seed<k>/`, each a run directory.
        places: every run that belongs to it, in the order of the table.
        failures: why a run is missing, by the run's name.
    """

    directory: Path
    places: list[Place]
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> list[Run]:
        """The finished runs."""
        return [run for _, run in self._finished()]

    @property
    def missing(self) -> list[str]:
        """The names of the runs that are not finished."""
        finished = {place for place, _ in self._finished()}
        return [str(place) for place in self.places if place not in finished]

    @property
    def results(self) -> Results:
        return Results.of(
            (place.label, place.seed, run.sound_summary(whole=False) or {}) for place, run in self._finished()
        )

    def rows(self) -> list[dict[str, Any]]:
        """A table for each method: `method`, `seeds`, and mean and std of `domains` and `average`, as fractions."""
        return [row.to_dict() for row in self.results.rows]

    def table(self) -> str:
        return self.results.text()

    def markdown(self) -> str:
        return self.results.markdown()

    def csv(self) -> str:
        return self.results.csv()

    def to_dict(self) -> dict[str, Any]:
        return {
            "directory": str(self.directory),
            **self.results.to_dict(),
            "runs": [
                {"method": place.label, "seed": place.seed, "directory": str(place.directory), "summary": run.summary}
                for place, run in self._finished()
            ],
            "missing": self.missing,
            "failures": self.failures,
        }

    def _finished(self) -> list[tuple[Place, Run]]:
        return [(place, Run(place.directory)) for place in self.places if has_finished(place.directory)]


def compare(
    methods: Sequence[str],
    *,
    seeds: int | Sequence[int] = 3,
    directory: str | Path | None = None,
    jobs: int | None = None,
    observer: JobsObserver | None = None,
    track: str | None = None,
    **options: Any,
) -> Comparison:
    """Run each method with each seed and gather the results.

    Args:
        methods: as typed, `"fedprox(mu=0.1)+gn"`; options of one of them alone after an `@`,
            `"fedwon@learning_rate=0.1,batch_size=8"`.
        seeds: how many, from 0, or which.
        directory: of the run directories; by default `runs/compare-<data>`, with a number when that one holds
            other configurations.
        jobs: runs at the same time, each in a process with one core; by default one per core, and on a GPU one.
        observer: is told how it is going.
        track: a tracker, "tensorboard" or "mlflow", in which each method and seed is a run of its own.
        options: of all runs, as in `Config`.

    Raises `fedkeel.stopping.Stopped` when it was asked to stop; the same call then continues it.
    """
    leave_if_imported_again()
    entries = read_entries(methods, options)
    chosen = read_seeds(seeds)
    require(track)
    if observer is not None and not isinstance(observer, JobsObserver):
        raise FedkeelError(
            f"'observer' is {described(observer)}: give an object of a fedkeel.experiments.jobs.JobsObserver."
        )
    processes = choose_jobs(jobs, entries)
    if processes > 1:
        entries = {label: beside_others(config) for label, config in entries.items()}
    observer = observer or JobsObserver()
    if directory is not None:
        directory = as_path(directory)
        refuse_other_configurations(plan(entries, chosen, directory))
    now = check_all(entries, chosen[0])
    place = choose_directory(directory, entries, chosen, now, observer.note)
    planned = plan(entries, chosen, place, track)
    refuse_outdated(planned, now, observer.note)
    finished = [job for job in planned if has_finished(job.directory)]
    if min(processes, len(planned) - len(finished)) > 1:
        prepare_tracker(track)
    write_index(place, planned)
    observer.planned(planned, finished)
    todo = [job for job in planned if job not in finished]
    failures = run_all(todo, min(processes, max(1, len(todo))), observer)
    places = [Place(job.label, job.seed, job.directory) for job in planned]
    return Comparison(place, places, {str(job): problem for job, problem in failures.items()})


def choose_jobs(jobs: int | None, entries: Mapping[str, Config]) -> int:
    if jobs is not None and (not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1):
        raise FedkeelError(f"'jobs' is {described(jobs)}: give a whole number, at least 1.")
    can_fork = hasattr(os, "fork")
    return jobs or (1 if uses_gpu(entries.values()) or not can_fork else available_cores())


def choose_directory(
    directory: str | Path | None,
    entries: Mapping[str, Config],
    seeds: Sequence[int],
    now: Mapping[str, Beginning],
    note: Callable[[str], None],
) -> Path:
    """The one given, or the first of `runs/compare-<data>`, `-2`, ... that holds nothing else, nor runs of what the
    methods or the data were before."""
    if directory is not None:
        return as_path(directory)
    data = next(iter(entries.values())).data
    base = f"compare-{slug(data.partition('(')[0])}"
    for number in range(1, 10_000):
        place = Path("runs") / (base if number == 1 else f"{base}-{number}")
        planned = plan(entries, seeds, place)
        if any(holds_another(job) for job in planned):
            continue
        old = next((job for job in planned if now[job.label].differs(job)), None)
        if old is None:
            return place
        note(f"'{old.directory}' is not used again, since {now[old.label].differs(old)}.")
    raise FedkeelError(f"'runs/{base}' and ten thousand after it are taken: give a directory.")


def plan(entries: Mapping[str, Config], seeds: Sequence[int], place: Path, track: str | None = None) -> list[Job]:
    return [
        Job(label, seed, config.replace(seed=seed), place / slug(label) / f"seed{seed}", track)
        for label, config in entries.items()
        for seed in seeds
    ]


def has_finished(directory: Path) -> bool:
    return (directory / "summary.json").exists()


def holds_another(job: Job) -> bool:
    if not (job.directory / "config.toml").exists():
        return False
    return fingerprint(Run(job.directory).config) != fingerprint(job.config)


def refuse_other_configurations(jobs: Sequence[Job]) -> None:
    for job in jobs:
        if holds_another(job):
            theirs, ours = Run(job.directory).config.to_dict(), job.config.to_dict()
            name = next(name for name in ours if theirs[name] != ours[name] and name not in MACHINE_OPTIONS)
            raise FedkeelError(
                f"'{job.directory}' holds a run of another configuration ({name} is {theirs[name]!r} there and "
                f"{ours[name]!r} here): choose another directory, or remove that one."
            )


@dataclass(frozen=True)
class Beginning:
    """What a method would begin with now: its code, and the data, divided by that seed."""

    origin: Origin
    outline: Outline
    seed: int

    def differs(self, job: Job) -> str:
        """What of it is not as when the run of this job began, as the end of a sentence, or nothing."""
        origin, outline = Origin.load(job.directory), read_outline(job.directory)
        if outline is not None and (what := changed(outline, self.outline, divided=job.seed == self.seed)):
            return f"its data have changed: {what}"
        what = self.origin.other_code(origin) if origin is not None else ""
        return f"the code of {what} has changed since then" if what else ""


def refuse_outdated(jobs: Sequence[Job], now: Mapping[str, Beginning], note: Callable[[str], None]) -> None:
    """A run of other code or other data must not stand in a table as one of these, nor go on as one."""
    versions: set[str] = set()
    for job in jobs:
        if what := now[job.label].differs(job):
            raise FedkeelError(
                f"'{job.directory}' cannot be used again, since {what}: choose another directory to train anew, or "
                "remove that one."
            )
        origin = Origin.load(job.directory)
        versions |= {origin.fedkeel} if origin and origin.fedkeel != now[job.label].origin.fedkeel else set()
    if versions:
        note(f"Runs that are used again were made by fedkeel {', '.join(sorted(versions))}: their results may differ.")


def check_all(entries: Mapping[str, Config], seed: int) -> dict[str, Beginning]:
    """Everything that can be refused before training, for every method, before the first one trains."""
    for config in entries.values():  # all names first, since reading images takes longer
        analysis.requested(config)
        Composition.of(registered.build(config.method))
        choose_executor(config, choose_device(config))
    loaded: dict[tuple[Any, ...], Federation] = {}
    found: dict[str, Beginning] = {}
    for label, config in entries.items():
        config = config.replace(seed=seed)
        key = (config.data, config.partition, config.unseen, config.subsample)
        if key not in loaded:
            loaded[key] = load_federation(config)
        setup = prepare(config, federation=loaded[key])
        for diagnostic in analysis.requested(config):
            diagnostic.check(setup.worker)
        found[label] = Beginning(Origin.of(setup), outline_of(setup), seed)
    return found


def write_index(place: Path, jobs: Sequence[Job]) -> None:
    """Which runs belong together and in which order, for `read_comparison`."""
    runs = [{"method": job.label, "seed": job.seed, "directory": f"{slug(job.label)}/seed{job.seed}"} for job in jobs]
    with explained(place):
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(place / FILE, json.dumps({"runs": runs}, indent=1).encode() + b"\n")


def read_comparison(directory: str | Path) -> Comparison:
    """A comparison from its directory."""
    place = Path(directory)
    try:
        index = json.loads((place / FILE).read_text())
        places = [Place(str(run["method"]), int(run["seed"]), place / run["directory"]) for run in index["runs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedkeelError(f"'{place}' does not hold a comparison that can be read: {error}.") from error
    return Comparison(place, places)


def find_trials(directory: str | Path) -> list[Place]:
    """The runs of a comparison; or, without a label, the run in a directory or all those below it."""
    directory = Path(directory)
    if (directory / FILE).exists():
        return read_comparison(directory).places
    below = sorted(path.parent for path in directory.rglob("config.toml")) or [directory]
    return [Place("", Run(path).config.seed, path) for path in below]


def gather(directories: Sequence[str | Path]) -> Comparison:
    """Runs from wherever they are: run directories, comparisons, folders of run directories."""
    found = [place for directory in directories for place in find_trials(directory)]
    loose = [Run(place.directory) for place in found if not place.label]
    places = [place for place in found if place.label]
    places += [Place(label, run.config.seed, run.directory) for label, run in zip(labels(loose), loose, strict=True)]
    common = Path(os.path.commonpath([os.path.abspath(directory) for directory in directories]))
    root = Path(directories[0]) if len(directories) == 1 else Path(os.path.relpath(common))
    return Comparison(root, places)


def labels(runs: Sequence[Run]) -> list[str]:
    """Each run's method, and the options in which these runs differ besides method and seed."""
    options = told_apart(runs)
    same = {*MACHINE_OPTIONS, "method", "seed"}
    varying = [name for name in (options[0] if options else ()) if name not in same and _differ(options, name)]
    return [
        "@".join([table["method"], ",".join(f"{name}={table[name]}" for name in varying)]).rstrip("@")
        for table in options
    ]


def told_apart(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The options of runs; what was given in Python by its class, and where that stands for several by which it is."""
    tables = [run.config.to_dict() for run in runs]
    given = [run.given for run in runs]
    for option in ("method", "data", "model"):
        kinds: dict[str, set[str]] = {}
        for objects in given:
            if option in objects:
                kinds.setdefault(objects[option]["name"], set()).add(objects[option]["digest"])
        for table, objects in zip(tables, given, strict=True):
            if option in objects:
                name, which = objects[option]["name"], objects[option]["digest"]
                table[option] = f"{name}#{which[:6]}" if len(kinds[name]) > 1 else name
    return tables


def _differ(tables: Sequence[dict[str, Any]], name: str) -> bool:
    return len({str(table[name]) for table in tables}) > 1
