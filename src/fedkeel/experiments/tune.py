"""Tuning: settings for each method, chosen on validation samples with the same number of trials, and one comparison of
what was chosen, with seeds that the search has not seen. Test samples are looked at once, in that comparison.

    DIR/tuning.journal    Optuna's: `optuna-dashboard DIR/tuning.journal` shows it
    DIR/tuning.json       what was tried and chosen, for who reads it without Optuna
    DIR/trials/METHOD/    a run directory for each trial
    DIR/best/             the comparison
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

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
from fedkeel.experiments.jobs import Given, JobsObserver, beside_others, run_all
from fedkeel.experiments.objects import read_objects
from fedkeel.experiments.progress import watched
from fedkeel.experiments.rows import own_options, read_seeds
from fedkeel.files import explained, write_atomically
from fedkeel.options import as_path, described
from fedkeel.runs.store import numbered
from fedkeel.runs.summary import SHARES
from fedkeel.runs.tables import as_frame

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

    from fedkeel.core.method import Method
    from fedkeel.experiments.tune_search import Search
    from fedkeel.experiments.tune_space import Space
    from fedkeel.runs.keywords import CompareOptions

    class TuneOptions(CompareOptions, total=False):
        prune: bool
        search_seed: int
        verbose: bool | None


LOCK = "tuning.lock"


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
    """The best trial; an error where all failed."""
    for trial in method["trials"]:
        if trial["number"] == method["best"]:
            return dict(trial)
    problem = method["trials"][-1].get("problem", "") if method["trials"] else "none has begun"
    raise FedkeelError(
        f"All trials of '{method['method']}' failed, the last: {problem.rstrip('.')}; choose another space."
    )


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
    try:
        from fedkeel.experiments.tune_search import Search, quiet
        from fedkeel.experiments.tune_space import configured, read_space, row_label, spaces_of
    except ImportError as error:
        raise FedkeelError("Tuning needs Optuna: pip install 'fedkeel[tune]'.") from error
    given: dict[str, Any] = {**options}
    prune, seed, verbose = given.pop("prune", True), given.pop("search_seed", 0), given.pop("verbose", None)
    for name, value, least in (("trials", trials, 1), ("search_seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise FedkeelError(f"'{name}' is {described(value)}: give a whole number, at least {least}.")
    fixed = "evaluate_on" in given
    configs, objects = read_objects(methods, given)
    if fixed or any(config.evaluate_on != Config.evaluate_on for config in configs.values()):
        raise FedkeelError("'evaluate_on' is set, but a search is on validation samples, always: leave it out.")
    spaces = spaces_of(read_space(space, given.get("learning_rate", Config.learning_rate)), configs)
    numbers, processes = fresh_seeds(seeds, seed), choose_jobs(jobs, configs.values())
    if processes > 1:
        configs = {label: beside_others(config) for label, config in configs.items()}
    check(configs, objects, spaces, seed)
    settings = settings_of(configs, spaces, {"search_seed": seed, "prune": prune})
    folder = free_folder(settings, configs, objects) if directory is None else as_path(directory)
    refuse_other_search(folder, settings, trials)
    searches = [
        Search(label, c.replace(evaluate_on="validation", seed=seed), spaces[label], trials, prune, folder)
        for label, c in configs.items()
    ]
    with watched(observer, verbose) as observer, quiet(), alone(folder):
        attempts = [attempt for search in searches for attempt in search.begin()]
        observer.planned(attempts, [attempt for attempt in attempts if attempt.is_over])
        write(folder, settings, trials, searches)
        todo = sorted((a for a in attempts if not a.is_over), key=lambda attempt: attempt.number)
        run_all(todo, min(processes, max(1, len(todo))), observer, objects)
        document = write(folder, settings, trials, searches)
        params = {method["method"]: chosen(method)["params"] for method in document["methods"]}
        best = {row_label(label, config, params[label]): label for label, config in configs.items()}
        rows = {row: without_idle(configured(configs[label], params[label])) for row, label in best.items()}
        given_to = {row: objects[label] for row, label in best.items()}
        comparison = compare_configs(rows, given_to, numbers, folder / CHOSEN, processes, observer)
    return read_tuning(folder, comparison)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One search at a time in a folder."""
    with explained(folder, ""):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / LOCK, timeout=0):
            yield
    except Timeout:
        raise FedkeelError(f"Another search is at work in '{folder}': wait until it is over.") from None


def check(configs: Mapping[str, Config], objects: Given, spaces: Mapping[str, Space], seed: int) -> None:
    """All that can be refused before anything trains: every method as it is, and with each value of each list."""
    from fedkeel.experiments.tune_space import configured, ends

    tried = {
        (label, name, value): configured(configs[label], {name: value})
        for label, space in spaces.items()
        for name, found in space.items()
        for value in ends(found)
    }
    settled({**{(label,): config for label, config in configs.items()}, **tried}, lambda row: own_options(row[0]))
    rows, given = dict(configs), dict(objects)
    for (label, name, value), config in tried.items():
        if isinstance(value, str) or name == "batch_size":
            called = f"{label} with {name}={value}"
            rows[called], given[called] = config, objects[label]
    check_all({row: config.replace(evaluate_on="validation") for row, config in rows.items()}, seed, given)


def settings_of(configs: Mapping[str, Config], spaces: Mapping[str, Space], about: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for a search to be gone on with."""
    from fedkeel.experiments.tune_space import shown

    usual, found = Config().to_dict(), dict(about)
    for label, config in configs.items():
        options = {name: value for name, value in config.decisive().items() if value != usual[name]}
        found[label] = {"space": {name: shown(one) for name, one in spaces[label].items()}, **options}
    return found


def refuse_other_search(folder: Path, settings: Mapping[str, Any], trials: int) -> None:
    if (folder / SEARCH).exists():
        there = read_document(folder)
        if what := next(
            (name for name in {**there["settings"], **settings} if there["settings"].get(name) != settings.get(name)),
            "trials" if trials < there["trials"] else "",
        ):
            raise FedkeelError(f"'{folder}' holds a search with other settings ('{what}'): choose another directory.")
    elif folder.is_dir() and not all(entry.name.startswith("tuning.") for entry in folder.iterdir()):
        raise FedkeelError(f"'{folder}' is not empty and holds no search: choose another directory.")


def free_folder(settings: Mapping[str, Any], configs: Mapping[str, Config], objects: Given) -> Path:
    """The first of `runs/tune-<data>`, `-2`, ... that is free, or holds this search."""
    label, config = next(iter(configs.items()))
    base = f"tune-{slug(config.data.partition('(')[0] or objects[label]['federation'].name)}"
    free = (
        f
        for f in numbered(base)
        if not f.exists() or ((f / SEARCH).exists() and read_document(f)["settings"] == settings)
    )
    return next(free)


def write(folder: Path, settings: Mapping[str, Any], trials: int, searches: Sequence[Search]) -> dict[str, Any]:
    rows, config = [search.document() for search in searches], searches[0].config
    about = {"select_by": config.select_by, "result": config.result, "rounds": config.rounds}
    document = {"settings": settings, "trials": trials, **about, "methods": rows}
    with explained(folder):
        write_atomically(folder / SEARCH, json.dumps(document, indent=1).encode() + b"\n")
    return document


def fresh_seeds(seeds: int | str | Sequence[int], searched: int) -> list[int]:
    """Those of the comparison: as many as are wanted, none of them the search's."""
    numbers = read_seeds(seeds)
    if isinstance(seeds, int) or (isinstance(seeds, str) and "," not in seeds):
        return [number for number in range(len(numbers) + 1) if number != searched][: len(numbers)]
    if searched in numbers:
        raise FedkeelError(f"The seed {searched} is the search's: leave it out of 'seeds', or change 'search_seed'.")
    return numbers


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
