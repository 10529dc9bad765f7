"""Tuning: settings for each method, chosen on validation samples with the same number of trials, and one comparison of
what was chosen, with seeds that the search has not seen. Test samples are looked at once, in that comparison.

    DIR/tuning.json       what was tried and chosen; `tuning.journal` is Optuna's, to go on with
    DIR/trials/METHOD/    a run directory for each trial
    DIR/best/             the comparison
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeel.config import Config
from fedkeel.core import imports
from fedkeel.core.naming import slug
from fedkeel.core.readable import html_table, percent, text_table
from fedkeel.engine.idle import settled, without_idle
from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import (
    CHOSEN,
    SEARCH,
    Comparison,
    check_all,
    choose_jobs,
    compare_configs,
    read_comparison,
)
from fedkeel.experiments.jobs import JobsObserver, beside_others, run_waiting
from fedkeel.experiments.objects import read_objects
from fedkeel.experiments.progress import watched
from fedkeel.experiments.rows import own_options, read_seeds
from fedkeel.experiments.tune_search import MethodSearch, Search, alone, quiet_optuna, require_optuna, storage_in
from fedkeel.experiments.tune_space import Choices, Space, configured, read_space, row_label, spaces_of, usual_space
from fedkeel.files import explained, write_atomically
from fedkeel.options import as_path, described
from fedkeel.runs.store import numbered
from fedkeel.runs.summary import SHARES
from fedkeel.runs.tables import as_frame

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

    from fedkeel.core.method import Method
    from fedkeel.runs.keywords import CompareOptions

    class TuneOptions(CompareOptions, total=False):
        prune: bool
        search_seed: int
        verbose: bool | None


@dataclass(frozen=True)
class Tuning:
    """A search: what was tried, what was chosen, and the comparison of that; see `tune`, which makes it."""

    directory: Path
    methods: Sequence[Mapping[str, Any]]  # as in tuning.json
    select_by: str
    comparison: Comparison = field(repr=False)

    @property
    def best(self) -> dict[str, dict[str, Any]]:
        """The chosen values of each method."""
        return {method["method"]: dict(chosen(method)["params"]) for method in self.methods}

    @property
    def trials(self) -> list[dict[str, Any]]:
        """Each trial: `method`, `number`, `state` (finished, pruned or failed), `score`, `rounds`, and its values."""
        return [
            {"method": method["method"], "number": t["number"], "state": t["state"], "score": t["score"]}
            | {"rounds": 1 + max((round for round, _ in t["curve"]), default=-1), **t["params"]}
            for method in self.methods
            for t in method["trials"]
        ]

    def frame(self) -> pandas.DataFrame:
        """The trials as a pandas table, a row each."""
        return as_frame(self.trials)

    @property
    def notes(self) -> list[str]:
        """What is remarkable about the choices."""
        return [
            f"{option} of {method['method']}, {chosen(method)['params'][option]}, is at the {end} end of what was "
            f"tried, {method['space'][option]}: widen it, in another directory."
            for method in self.methods
            for option, end in method["edges"].items()
        ]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The headings and rows of what was chosen."""
        unit = " %" if self.select_by in SHARES else ""
        rows = []
        for method in self.methods:
            states = [trial["state"] for trial in method["trials"]]
            values = ", ".join(f"{name}={value}" for name, value in chosen(method)["params"].items())
            score = chosen(method)["score"]
            counts = [str(len(states)), str(states.count("pruned")), str(states.count("failed"))]
            number = percent(score) if unit else f"{score:.4g}"
            rows.append([method["method"], values or "as it is", number, *counts])
        return ["method", "chosen", f"validation {self.select_by}{unit}", "trials", "pruned", "failed"], rows

    def __repr__(self) -> str:
        headings, rows = self.table()
        return f"{text_table(f'Tuning({str(self.directory)!r})', [headings, *rows])}\n{self.comparison!r}"

    def _repr_html_(self) -> str:
        headings, rows = self.table()
        return html_table(f"Chosen in {self.directory}", [headings, *rows]) + self.comparison._repr_html_()

    def to_dict(self, metric: str = "accuracy") -> dict[str, Any]:
        about = {"directory": str(self.directory), "select_by": self.select_by, "best": self.best}
        return {**about, "notes": self.notes, "methods": self.methods, "comparison": self.comparison.to_dict(metric)}


def chosen(method: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = method["trials"][method["best"]]
    return found


def tune(
    methods: Sequence[str | Method],
    *,
    space: str | Sequence[str] | Mapping[str, Any] | None = None,
    trials: int = 20,
    seeds: int | Sequence[int] = 3,
    directory: str | Path | None = None,
    jobs: int | None = None,
    observer: JobsObserver | None = None,
    **options: Unpack[TuneOptions],
) -> Tuning:
    """Choose each method's settings on validation samples, then compare the methods with what was chosen.

    Args:
        methods: as in `compare`.
        space: what to try, `"learning_rate=log(0.001, 0.3), greg.alpha=[0.3, 1, 3]"`, or a table of that; by default
            the learning rate, a factor of ten up and down.
        trials: of each method.
        seeds: of the comparison: how many, none of them the search's, or which.
        directory: by default `runs/tune-<data>`, with a number when that one holds another search. What is there
            already is not run again.
        jobs: runs at the same time, as in `compare`.
        observer: is told how it is going.
        options: of all runs, as in `compare`. And `prune`: whether trials that fall behind end early (they do);
            `search_seed`: of the search and its runs (0); `verbose`: as in `compare`.

    Raises `fedkeel.stopping.Stopped` when it was asked to stop; the same call then continues it.

    No example here, since it needs `fedkeel[tune]`: `fedkeel.tune(["fedavg", "greg"], trials=10).best`.
    """
    imports.refuse_while_importing()
    require_optuna()
    given: dict[str, Any] = {**options}
    prune, seed, verbose = given.pop("prune", True), given.pop("search_seed", 0), given.pop("verbose", None)
    for name, value, least in (("trials", trials, 1), ("search_seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise FedkeelError(f"'{name}' is {described(value)}: give a whole number, at least {least}.")
    if not isinstance(prune, bool):
        raise FedkeelError(f"'prune' is {described(prune)}: give True or False.")
    wanted, fixed = read_space(space), "evaluate_on" in given
    configs, objects = read_objects(methods, given)
    if fixed or any(config.evaluate_on != Config.evaluate_on for config in configs.values()):
        raise FedkeelError("'evaluate_on' is set, but a search is on validation samples, always: leave it out.")
    rate = given.get("learning_rate", Config.learning_rate)
    spaces = spaces_of(wanted or usual_space(rate), configs)
    numbers = fresh_seeds(seeds, seed)
    processes = choose_jobs(jobs, configs.values())
    configs = {label: beside_others(config) if processes > 1 else config for label, config in configs.items()}
    plan = Plan(configs, objects, spaces, trials, seed, prune)
    with watched(observer, verbose) as observer, quiet_optuna():
        folder = plan.free_folder() if directory is None else as_path(directory)
        plan.refuse_other_search(folder)
        plan.check()
        with alone(folder):
            searches = plan.search(folder, processes, observer)
            best = {row_label(m.label, configs[m.label], m.chosen()): m for m in searches}
            chosen = {label: without_idle(configured(configs[m.label], m.chosen())) for label, m in best.items()}
            given_to = {label: objects[m.label] for label, m in best.items()}
            comparison = compare_configs(chosen, given_to, numbers, folder / CHOSEN, processes, observer)
    return read_tuning(folder, comparison)


def fresh_seeds(seeds: int | str | Sequence[int], searched: int) -> list[int]:
    """Those of the comparison: as many as are wanted, none of them the search's."""
    numbers = read_seeds(seeds)
    if isinstance(seeds, int) or (isinstance(seeds, str) and "," not in seeds):
        return [number for number in range(len(numbers) + 1) if number != searched][: len(numbers)]
    if searched in numbers:
        raise FedkeelError(
            f"The seed {searched} is the search's, and what was chosen with it is compared with others: leave it out "
            "of 'seeds', or give another 'search_seed'."
        )
    return numbers


@dataclass(frozen=True)
class Plan:
    """What is searched for."""

    configs: Mapping[str, Config]
    objects: Mapping[str, Mapping[str, Any]]
    spaces: Mapping[str, Space]
    trials: int
    seed: int
    prune: bool

    def searched(self, label: str) -> Config:
        return self.configs[label].replace(evaluate_on="validation", seed=self.seed)

    def methods(self, folder: Path, storage: Any = None) -> list[MethodSearch]:
        return [
            MethodSearch(
                label,
                self.searched(label),
                space,
                self.trials,
                folder,
                storage,
                prune=self.prune,
                given=self.objects[label],
            )
            for label, space in self.spaces.items()
        ]

    def settings(self) -> dict[str, Any]:
        """What must be the same for a search to be gone on with."""
        known: dict[str, Any] = {"search_seed": self.seed, "prune": self.prune}
        for method in self.methods(Path()):
            usual, decisive = Config().to_dict(), self.configs[method.label].decisive()
            options = {name: value for name, value in decisive.items() if value != usual[name]}
            space = {name: str(dimension) for name, dimension in method.space.items()}
            known[method.label] = {"space": space, "grid": method.grid is not None, **options}
        return known

    def refuse_other_search(self, folder: Path) -> None:
        if (folder / SEARCH).exists():
            if what := self.differs(folder):
                raise FedkeelError(
                    f"'{folder}' holds another search ({what}): choose another directory, or remove that one."
                )
        elif folder.is_dir() and not all(entry.name.startswith("tuning.") for entry in folder.iterdir()):
            raise FedkeelError(f"'{folder}' is not empty and holds no search: choose another directory.")

    def differs(self, folder: Path) -> str:
        """In what the search that a folder holds is another one, or nothing."""
        found, ours = read_document(folder), self.settings()
        theirs: dict[str, Any] = found["settings"]
        if list(theirs) != list(ours):
            return f"of {', '.join(list(theirs)[2:])}"
        for name, mine in ours.items():
            other, usual = theirs[name], Config().to_dict()
            if not isinstance(mine, dict):
                mine, other, usual, name = {name: mine}, {name: other}, {}, "all"
            for option in {**other, **mine}:
                one, two = (table.get(option, usual.get(option)) for table in (other, mine))
                if one != two:
                    return f"{option} of {name} is {one!r} there and {two!r} here"
        most = found["trials"]
        return f"it has {most} trials, and {self.trials} are fewer" if self.trials < most else ""

    def free_folder(self) -> Path:
        """The first of `runs/tune-<data>`, `-2`, ... that is free, or holds this search."""
        label, config = next(iter(self.configs.items()))
        base = f"tune-{slug(config.data.partition('(')[0] or self.objects[label]['federation'].name)}"
        for folder in numbered(base):
            if not folder.exists() or ((folder / SEARCH).exists() and not self.differs(folder)):
                return folder
        raise FedkeelError(f"'runs/{base}' and ten thousand after it are taken: give a directory.")

    def check(self) -> None:
        """All that can be refused before anything trains: every method as it is, and with each end of each range."""
        tried = {(label,): config for label, config in self.configs.items()} | {
            (label, name, value): configured(self.configs[label], {name: value})
            for label, space in self.spaces.items()
            for name, dimension in space.items()
            for value in dimension.extremes
        }
        settled(tried, lambda row: own_options(row[0]))
        rows, given = dict(self.configs), dict(self.objects)
        for label, space in self.spaces.items():
            lists = {name: dimension.values for name, dimension in space.items() if isinstance(dimension, Choices)}
            for params in [{}, *({name: value} for name, values in lists.items() for value in values)]:
                called = f"{label} with {params}"
                rows[called], given[called] = configured(self.searched(label), params), self.objects[label]
        check_all(rows, self.seed, given)

    def search(self, folder: Path, processes: int, observer: JobsObserver) -> list[MethodSearch]:
        methods = self.methods(folder, storage_in(folder))
        settings = self.settings()
        self.refuse_other_code(methods)

        def write() -> None:
            config = methods[0].config
            about = {"select_by": config.select_by, "result": config.result, "rounds": config.rounds}
            rows = [method.document() for method in methods]
            document = {"settings": settings, "trials": self.trials, **about, "methods": rows}
            with explained(folder):
                write_atomically(folder / SEARCH, json.dumps(document, indent=1).encode() + b"\n")

        search = Search(methods, observer, write)
        for method in (m for m in methods if m.grid is not None and m.space):
            observer.note(f"{method.label}: each of the {method.planned} settings is tried once, as they are few.")
        like = search.begin()
        run_waiting(search, like, processes, search)
        write()
        return methods

    def refuse_other_code(self, methods: Sequence[MethodSearch]) -> None:
        """What is gone on with began with the same data, and the same code of its methods."""
        first = {m.label: m.attempt(0, m.params(m.drawn()[0])) for m in methods if m.drawn()}
        begun = {label: job for label, job in first.items() if (job.directory / "config.toml").exists()}
        now = check_all({label: job.config for label, job in begun.items()}, self.seed, self.objects)
        for label, job in begun.items():
            if what := now[label].differs(job):
                raise FedkeelError(f"'{job.directory}' cannot be gone on with, since {what}: choose another directory.")


# -- reading ----------------------------------------------------------------------------------------------------------
def read_document(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / SEARCH).read_text())
        kinds = {"settings": dict, "trials": int, "methods": list, "select_by": str}
        if wrong := [name for name, kind in kinds.items() if not isinstance(found[name], kind)]:
            raise ValueError(f"its {wrong[0]} are not as a search writes them")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedkeelError(f"'{folder / SEARCH}' cannot be read as a search: {error}.") from error
    document: dict[str, Any] = found
    return document


def read_tuning(directory: str | Path, comparison: Comparison | None = None) -> Tuning:
    """The search in a folder, once it is over; needs no Optuna."""
    folder = as_path(directory)
    document = read_document(folder)
    return Tuning(folder, document["methods"], document["select_by"], comparison or read_comparison(folder / CHOSEN))
