"""Runs what the ledger lacks of a list of cells, beside other work, one process and one core each.

    python tools/evidence.py run results/small.toml --runs runs/evidence --jobs 2 --pause PAUSE
    python tools/evidence.py rates results/small.toml          # the choice of every learning rate, from its history

The list's blocks come the most wanted first, and of a block seed after seed:

    [[block]]
    recipe = "greg/table2-small"
    only = ["FedAvg*"]                   # rows and columns, as in `fedkeel reproduce`; by default all
    seeds = [20, 21, 22, 23, 24]

    [[block]]                            # on validation data, with each of these in place of the recipe's rate
    recipe = "greg/table2-small"
    seeds = [100]
    rates = [0.003, 0.01, 0.03, 0.1]

A result goes to `results/<recipe>.jsonl` as a line of the ledger that names the commit it was run at, and a validation
to `results/tuning/<recipe>.jsonl`. A run that was ended goes on at its checkpoint, one of another commit begins anew.
While the file PAUSE exists nothing runs. Told to end, it waits for the runs under way; told again, it ends them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedkeel import resume, simulate
from fedkeel.config import Config, read_table
from fedkeel.errors import FedkeelError
from fedkeel.experiments.ledger import Ledger, line_of, version_of
from fedkeel.experiments.recipes import Recipe, RecipeColumn, RecipeRow, load
from fedkeel.experiments.reproduce import directory_name
from fedkeel.experiments.request import select
from fedkeel.runs.run import Run
from fedkeel.runs.store import has_finished

HERE = Path(__file__).parents[1]
ONE_CORE = {"executor": "serial", "device": "cpu", "threads": 1}


@dataclass(frozen=True)
class Cell:
    """One run that is wanted; `rate` where it is to be chosen."""

    recipe: Recipe
    row: RecipeRow
    column: RecipeColumn
    seed: int
    rate: float | None

    @property
    def config(self) -> Config:
        config = self.recipe.config(self.row, self.column).replace(seed=self.seed, **ONE_CORE)
        tried = {} if self.rate is None else {"learning_rate": self.rate, "evaluate_on": "validation"}
        return config.replace(**tried)

    @property
    def key(self) -> tuple[Any, ...]:
        """With the hash of the cell: of another setting it is another."""
        changes = {} if self.rate is None else {"learning_rate": self.rate}
        version = version_of(self.recipe, self.row, self.column, changes)
        return self.row.label, self.column.name, self.seed, self.rate, version

    def directory(self, runs: Path) -> Path:
        return runs / directory_name(self.config) / f"seed{self.seed}"

    def __str__(self) -> str:
        rate = "" if self.rate is None else f", rate {self.rate:g}"
        return f"{self.recipe.name}: {self.row.label}, {self.column.name}, seed {self.seed}{rate}"


def cells(path: Path) -> Iterator[Cell]:
    for block in read_table(path, "list of cells")[0]["block"]:
        recipe = load(block["recipe"])
        rows, columns = select(recipe, block.get("only", ()))
        wanted = [cell for cell in recipe.cells() if cell[0] in rows and cell[1] in columns]
        for seed in block["seeds"]:
            for row, column in wanted:
                for rate in block.get("rates", [None]):
                    yield Cell(recipe, row, column, seed, rate)


class Results:
    """What is there: lines of the ledger, and validations."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ledger = folder, Ledger(folder)

    def tried(self, recipe: Recipe) -> list[dict[str, Any]]:
        path = self.folder / "tuning" / f"{recipe.name.replace('/', '-')}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def keys(self, recipe: Recipe) -> set[tuple[Any, ...]]:
        known = [line for line in self.ledger.of(recipe)[0] if line.is_whole and not line.changes]
        named = ("row", "column", "seed", "learning_rate", "version")
        return {(line.row, line.column, line.seed, None, line.version) for line in known} | {
            tuple(line[name] for name in named) for line in self.tried(recipe)
        }

    def add(self, cell: Cell, directory: Path) -> None:
        run, commit = Run(directory), begun_at(directory).read_text()
        if cell.rate is None:
            self.ledger.add([replace(line_of(cell.recipe, cell.row, cell.column, run, None), commit=commit)])
            return
        row, column, seed, rate, version = cell.key
        summary: Mapping[str, Any] = run.summary or {}
        line = {"row": row, "column": column, "seed": seed, "learning_rate": rate, "version": version}
        line |= {"validation": round(100 * summary["accuracy"], 4), "seconds": round(summary["seconds"], 1)}
        path = self.folder / "tuning" / f"{cell.recipe.name.replace('/', '-')}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps({**line, "commit": commit}) + "\n")


def begun_at(directory: Path) -> Path:
    """The file that says at which commit a run began."""
    return directory.with_name(f"{directory.name}.commit")


def one(config: Config, directory: Path, commit: str) -> None:
    """A run, in this process."""
    if directory.exists() and begun_at(directory).read_text() == commit:
        try:
            resume(directory, verbose=False)
            return
        except FedkeelError as error:
            print(f"{directory} begins anew: {error}", flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    begun_at(directory).write_text(commit)
    simulate(config, directory=directory, verbose=False)


class Work:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.options, self.results = arguments, Results(arguments.results)
        self.at_work: dict[subprocess.Popen[bytes], Cell] = {}
        self.ending, self.paused, self.failed = False, False, 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.told)

    def told(self, *_: Any) -> None:
        for child in self.at_work if self.ending else ():
            child.kill()
        self.ending = True

    def run(self) -> int:
        os.nice(19)
        listed = list({(cell.recipe.name, cell.key): cell for cell in cells(self.options.list)}.values())
        known: dict[str, set[tuple[Any, ...]]] = {}
        for cell in listed:
            known.setdefault(cell.recipe.name, self.results.keys(cell.recipe))
        waiting = [cell for cell in listed if cell.key not in known[cell.recipe.name]]
        print(f"{len(waiting)} of {len(listed)} are missing.", flush=True)
        while self.at_work or (waiting and not self.ending):
            self.pause()
            while len(self.at_work) < self.options.jobs and not (self.ending or self.paused):
                busy = [cell.directory(self.options.runs) for cell in self.at_work.values()]  # of several cells one run
                cell = next((cell for cell in waiting if cell.directory(self.options.runs) not in busy), None)
                if cell is None:
                    break
                waiting.remove(cell)
                self.begin(cell)
            for child in [child for child in self.at_work if child.poll() is not None]:
                self.finished(self.at_work.pop(child), child.returncode)
            time.sleep(0.2)
        return 1 if self.failed else 0

    def pause(self) -> None:
        wanted = self.options.pause.exists()
        for child in self.at_work if wanted != self.paused else ():
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGSTOP if wanted else signal.SIGCONT)
        self.paused = wanted

    def begin(self, cell: Cell) -> None:
        directory = cell.directory(self.options.runs)
        if has_finished(directory):  # another cell's run too
            self.finished(cell, 0)
        else:
            config = json.dumps(cell.config.to_dict())
            command = [sys.executable, __file__, "one", config, str(directory), self.options.commit]
            self.at_work[subprocess.Popen(command, preexec_fn=os.setpgrp)] = cell

    def finished(self, cell: Cell, code: int) -> None:
        directory = cell.directory(self.options.runs)
        if code == 0:
            self.results.add(cell, directory)
        self.failed += code != 0
        summary = Run(directory).summary or {} if code == 0 else {}
        seconds, accuracy = summary.get("seconds", 0), 100 * summary.get("accuracy", 0)
        print(f"{time.strftime('%H:%M:%S')} {cell}: {accuracy:.1f}, {seconds:.0f} s, exit {code}", flush=True)


def head() -> str:
    command = ["git", "-C", str(HERE), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def rates(path: Path, results: Results) -> int:
    """The rate that was best on the validation data, of each row and column where several were tried."""
    wrong = 0
    tried = {(c.recipe.name, c.row.label, c.column.name): c for c in cells(path) if c.rate is not None}
    for (name, row_label, column_name), cell in tried.items():
        recipe, row, column = cell.recipe, cell.row, cell.column
        scores: dict[float, list[float]] = {}
        for line in results.tried(recipe):
            of_today = version_of(recipe, row, column, {"learning_rate": line["learning_rate"]}) == line["version"]
            if (line["row"], line["column"]) == (row_label, column_name) and of_today:
                scores.setdefault(line["learning_rate"], []).append(line["validation"])
        best = max(sorted(scores), key=lambda rate: fmean(scores[rate]), default=None)
        told = ", ".join(f"{rate:g}: {fmean(scores[rate]):.1f}" for rate in sorted(scores))
        edge = " (at the edge)" if best in (min(scores, default=None), max(scores, default=None)) else ""
        set_ = recipe.config(row, column).learning_rate
        other = "" if best in (None, set_) else f"; the recipe has {set_:g}"
        wrong += bool(other)
        print(f"{name}: {row_label}, {column_name}: {best}{edge}{other} ({told})")
    return 1 if wrong else 0


def main(words: list[str]) -> int:
    if words[:1] == ["one"]:
        one(Config(**json.loads(words[1])), Path(words[2]), words[3])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "rates"])
    parser.add_argument("list", type=Path)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--runs", type=Path, default=HERE / "runs" / "evidence")
    parser.add_argument("--pause", type=Path, default=HERE / "results" / "PAUSE")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--commit", help="that the lines name; by default the one that is checked out")
    arguments = parser.parse_args(words)
    arguments.commit = arguments.commit or head()
    if arguments.what == "rates":
        return rates(arguments.list, Results(arguments.results))
    return Work(arguments).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
