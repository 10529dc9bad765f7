"""Tuning: settings for each method, chosen on validation samples with the same number of trials, and one comparison of
what was chosen, with seeds that the search has not seen. Test samples are looked at once, in that comparison.

    DIR/tuning.journal    Optuna's: `optuna-dashboard DIR/tuning.journal` shows it
    DIR/tuning.json       what was tried and chosen, for who reads it without Optuna
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
from fedkeel.core.readable import percent, text_table
from fedkeel.engine.idle import settled, without_idle
from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import (
    CHOSEN,
    SEARCH,
    Comparison,
    check_all,
    compare_configs,
    read_comparison,
    read_search,
)
from fedkeel.experiments.jobs import Given, JobsObserver, beside_others, choose_jobs, run_all
from fedkeel.experiments.objects import read_objects
from fedkeel.experiments.progress import watched
from fedkeel.experiments.rows import own_options, read_seeds
from fedkeel.files import explained, write_atomically
from fedkeel.options import as_path, described
from fedkeel.runs.store import numbered
from fedkeel.runs.summary import SHARES
from fedkeel.runs.tables import as_frame

try:
    from fedkeel.experiments.tune_search import Search
    from fedkeel.experiments.tune_space import Space, configured, ends, read_space, row_label, shown, spaces_of
except ImportError as error:
    raise FedkeelError("Tuning needs Optuna: pip install 'fedkeel[tune]'.") from error

if TYPE_CHECKING:
    import pandas

    from fedkeel.core.method import Method


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

    def to_dict(self, metric: str = "accuracy") -> dict[str, Any]:
        about = {"directory": str(self.directory), "select_by": self.select_by, "best": self.best}
        return {**about, "methods": self.methods, "comparison": self.comparison.to_dict(metric)}


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
    **options: Any,
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

    The same call goes on with a search that was stopped.

    No example here, since it needs `fedkeel[tune]`: `fedkeel.tune(["fedavg", "greg"], trials=10).best`.
    """
    imports.refuse_while_importing()
    given: dict[str, Any] = {**options}
    prune, seed, verbose = given.pop("prune", True), given.pop("search_seed", 0), given.pop("verbose", None)
    refuse_unless_whole("trials", trials, 1)
    refuse_unless_whole("search_seed", seed, 0)
    configs, objects = read_objects(methods, given)
    if any(config.evaluate_on != Config.evaluate_on for config in configs.values()):
        raise FedkeelError("'evaluate_on' is set, but a search is on validation samples, always: leave it out.")
    spaces = spaces_of(read_space(space, given.get("learning_rate", Config.learning_rate)), configs)
    numbers, processes = fresh_seeds(seeds, seed), choose_jobs(jobs, configs.values())
    configs = {label: beside_others(config) if processes > 1 else config for label, config in configs.items()}
    check(configs, objects, spaces, seed)
    settings = settings_of(configs, spaces, {"search_seed": seed, "prune": prune})
    data = configs[next(iter(configs))].data.partition("(")[0] or next(iter(objects.values()))["federation"].name
    folder = as_path(directory or free_folder(settings, data))
    refuse_other_search(folder, settings, trials)
    searches = [Search(m, searched(c, seed), spaces[m], trials, prune, folder) for m, c in configs.items()]
    with watched(observer, verbose) as observer:
        attempts = [attempt for search in searches for attempt in search.begin()]
        todo = sorted((a for a in attempts if not a.is_over), key=lambda attempt: attempt.number)
        observer.planned(attempts, [attempt for attempt in attempts if attempt.is_over])
        write(folder, settings, trials, searches)
        run_all(todo, min(processes, max(1, len(todo))), observer, objects)
        rows, given_to = chosen_rows(write(folder, settings, trials, searches), configs, objects)
        comparison = compare_configs(rows, given_to, numbers, folder / CHOSEN, processes, observer)
    return read_tuning(folder, comparison)


def chosen_rows(
    document: Mapping[str, Any], configs: Mapping[str, Config], objects: Given
) -> tuple[dict[str, Config], dict[str, Mapping[str, Any]]]:
    """The rows of the comparison, and the objects that each is given."""
    rows, given = {}, {}
    for method in document["methods"]:
        label, params = method["method"], chosen(method)["params"]
        row = row_label(label, configs[label], params)
        rows[row], given[row] = without_idle(configured(configs[label], params)), objects[label]
    return rows, given


def searched(config: Config, seed: int) -> Config:
    return config.replace(evaluate_on="validation", seed=seed)


def refuse_unless_whole(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise FedkeelError(f"'{name}' is {described(value)}: give a whole number, at least {least}.")


def check(configs: Mapping[str, Config], objects: Given, spaces: Mapping[str, Space], seed: int) -> None:
    """All that can be refused before anything trains: every method as it is, and with each value of each list."""
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
    check_all({row: searched(config, seed) for row, config in rows.items()}, seed, given)


def settings_of(configs: Mapping[str, Config], spaces: Mapping[str, Space], about: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for a search to be gone on with."""
    usual, found = Config().to_dict(), dict(about)
    for label, config in configs.items():
        options = {name: value for name, value in config.decisive().items() if value != usual[name]}
        found[label] = {"space": {name: shown(one) for name, one in spaces[label].items()}, **options}
    return found


def refuse_other_search(folder: Path, settings: Mapping[str, Any], trials: int) -> None:
    if (folder / SEARCH).exists():
        there = read_search(folder)
        if what := next(
            (name for name in {**there["settings"], **settings} if there["settings"].get(name) != settings.get(name)),
            "trials" if trials < there["trials"] else "",
        ):
            raise FedkeelError(f"'{folder}' holds a search with other settings ('{what}'): choose another directory.")
    elif folder.is_dir() and not all(entry.name.startswith("tuning.") for entry in folder.iterdir()):
        raise FedkeelError(f"'{folder}' is not empty and holds no search: choose another directory.")


def free_folder(settings: Mapping[str, Any], data: str) -> Path:
    """The first of `runs/tune-<data>`, `-2`, ... that is free, or holds this search."""
    for folder in numbered(f"tune-{slug(data)}"):
        if not folder.exists() or ((folder / SEARCH).exists() and read_search(folder)["settings"] == settings):
            return folder
    raise FedkeelError(f"'runs/tune-{slug(data)}' and ten thousand after it are taken: give a directory.")


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


def read_tuning(directory: str | Path, comparison: Comparison | None = None) -> Tuning:
    """The search in a folder, once it is over."""
    folder = as_path(directory)
    document = read_search(folder)
    return Tuning(folder, document["methods"], document["select_by"], comparison or read_comparison(folder / CHOSEN))
