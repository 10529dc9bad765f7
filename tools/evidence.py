"""Runs what the ledger lacks of a list of cells, beside other work, one process and one core each.

    python tools/evidence.py run results/small.toml --runs runs/evidence --jobs 2 --pause PAUSE
    python tools/evidence.py run results/small.toml --jobs 14 --device cuda   # on one GPU, as the lines then say
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

    [[block]]                            # with the rates that were chosen there, as soon as they are
    recipe = "greg/table3-small"
    rates_of = ["greg/table2-small", "PACS"]
    seeds = [20, 21, 22, 23, 24]

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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ledger import Ledger, append, line_of, version_of

from fedkeel import resume, simulate
from fedkeel.config import Config, read_table
from fedkeel.errors import FedkeelError
from fedkeel.experiments.recipes import Recipe, RecipeColumn, RecipeRow, load
from fedkeel.experiments.reproduce import directory_name, select
from fedkeel.runs.run import Run
from fedkeel.runs.store import has_finished

HERE = Path(__file__).parents[1]
WHERE = {"cpu": {"executor": "serial", "device": "cpu", "threads": 1}}
WHERE["cuda"] = {"executor": "cuda", "device": "cuda", "threads": 1, "precision": "float32"}  # as on a core
MOST_EXTENSIONS = 2  # of the rates, on each side
NOTHING = 3  # exit status of a run that ended in an error which would come again
Place = tuple[str, str, str]  # recipe, row, column


@dataclass(frozen=True)
class Cell:
    """One run that is wanted."""

    recipe: Recipe
    row: RecipeRow
    column: RecipeColumn
    seed: int
    rate: float | None = None  # in place of the recipe's
    tried: bool = False  # on validation data
    block: int = 0  # of the list: its methods try the same rates
    rate_of: Place | None = None  # whose choice it waits for

    @property
    def place(self) -> Place:
        return self.recipe.name, self.row.label, self.column.name

    def config(self, device: str = "cpu") -> Config:
        options = WHERE[device] | ({"evaluate_on": "validation"} if self.tried else {})
        return self.recipe.config(self.row, self.column).replace(seed=self.seed, **self.own, **options)

    @property
    def own(self) -> dict[str, Any]:
        return {} if self.rate is None else {"learning_rate": self.rate}

    @property
    def key(self) -> tuple[Any, ...]:
        """With the hash of what is run and read: of another setting it is another."""
        return *self.place, self.seed, self.tried, version_of(self.recipe, self.row, self.column, **self.own)

    def directory(self, runs: Path) -> Path:
        return runs / directory_name(self.config()) / f"seed{self.seed}"

    def __str__(self) -> str:
        rate = "" if self.rate is None else f", rate {self.rate:g}"
        return f"{self.recipe.name}: {self.row.label}, {self.column.name}, seed {self.seed}{rate}"


def cells(path: Path) -> Iterator[Cell]:
    for number, block in enumerate(read_table(path, "list of cells")[0]["block"]):
        recipe = load(block["recipe"])
        rows, columns = select(recipe, block.get("only", ()))
        wanted = [cell for cell in recipe.cells() if cell[0] in rows and cell[1] in columns]
        for seed in block["seeds"]:
            for row, column in wanted:
                own = Cell(recipe, row, column, seed, block=number)
                if "rates_of" in block:
                    name, where, which = (*block["rates_of"], row.label)[:3]
                    yield replace(own, rate_of=(name, which, where))
                elif "rates" in block:
                    yield from (replace(own, rate=rate, tried=True) for rate in block["rates"])
                else:
                    yield own


def unique(listed: Iterable[Cell]) -> list[Cell]:
    """Each as it is wanted first."""
    found: dict[Any, Cell] = {}
    for cell in listed:
        found.setdefault((*cell.key, cell.rate_of), cell)
    return [*found.values()]


class Results:
    """What is there: lines of the ledger, and validations."""

    def __init__(self, folder: Path, listed: list[Cell]) -> None:
        self.folder, self.ledger = folder, Ledger(folder)
        self.validations: dict[tuple[Any, ...], float] = {}
        for path in (folder / "tuning").glob("*.jsonl"):
            for line in map(json.loads, path.read_text().splitlines()):
                key = (line["recipe"], line["row"], line["column"], line["seed"], True, line["version"])
                self.validations[key] = line["validation"]
        lines = [line for line in self.ledger if line.rounds == line.of and not line.doubt]
        self.there = {(*line.key, False, line.version) for line in lines} | {*self.validations}
        self.tried: dict[Place, list[Cell]] = {}
        for cell in listed:
            if cell.tried:
                self.tried.setdefault(cell.place, []).append(cell)
        self.extended: dict[tuple[int, bool], int] = {}
        self.closed: set[int] = set()  # blocks whose rates are chosen

    def scores(self, place: Place) -> dict[float, list[float]]:
        """By rate, of those that were tried so far."""
        found: dict[float, list[float]] = {}
        for cell in sorted(self.tried[place], key=lambda cell: cell.rate or 0):
            if cell.key in self.validations:
                found.setdefault(cell.rate or 0, []).append(self.validations[cell.key])
        return found

    def best(self, place: Place) -> float:
        scores = self.scores(place)
        return max(scores, key=lambda rate: fmean(scores[rate]))  # of equals the first, the smallest

    def choice(self, place: Place) -> float | None:
        """When all of its block were tried, and no best one of these is at an edge that can be moved."""
        return self.best(place) if self.tried[place][0].block in self.closed else None

    def extend(self) -> list[Cell]:
        """Where a best rate is at an edge all of its block try the next one on that side, twice at most."""
        blocks: dict[int, list[Place]] = {}
        for place, cells in self.tried.items():
            blocks.setdefault(cells[0].block, []).append(place)
        more: list[Cell] = []
        for block, places in blocks.items():
            if block in self.closed or any(
                cell.key not in self.there for place in places for cell in self.tried[place]
            ):
                continue
            rates, best = sorted(self.scores(places[0])), {self.best(place) for place in places}
            edges = {rates[0]: rates[1] * rates[0] / rates[2], rates[-1]: rates[-2] * rates[-1] / rates[-3]}
            for edge, beyond in edges.items():
                if edge in best and self.extended.get((block, beyond < edge), 0) < MOST_EXTENSIONS:
                    self.extended[block, beyond < edge] = self.extended.get((block, beyond < edge), 0) + 1
                    next_ = float(f"{beyond:.6g}")
                    for place in places:
                        like = [cell for cell in self.tried[place] if cell.rate == edge]
                        more += [replace(cell, rate=next_) for cell in like]
            self.closed |= {block} if not any(cell.block == block for cell in more) else set()
        for cell in more:
            self.tried[cell.place].append(cell)
        return more

    def add(self, cell: Cell, directory: Path) -> None:
        """Of a finished run, or of one that nothing could be made of: then it is worth 0 among those tried."""
        commit = begun_at(directory).read_text()
        self.there.add(cell.key)
        if not cell.tried:  # a rate that was chosen is the recipe's own as soon as that is written into it
            self.ledger.add([line_of(cell.recipe, cell.row, cell.column, Run(directory), cell.key[-1], commit)])
            return
        summary: Mapping[str, Any] | None = Run(directory).summary if has_finished(directory) else None
        summary = summary or {"accuracy": 0.0, "seconds": 0.0}
        accuracy = self.validations[cell.key] = round(100 * summary["accuracy"], 4)
        entry = dict(zip(("recipe", "row", "column", "seed"), cell.key[:4], strict=True))
        entry |= {"learning_rate": cell.rate, "validation": accuracy, "seconds": round(summary["seconds"], 1)}
        path = self.folder / "tuning" / f"{cell.recipe.name.replace('/', '-')}.jsonl"
        append(path, {**entry, "version": cell.key[-1], "commit": commit})


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
        self.options = arguments
        self.listed = unique(cells(arguments.list))
        self.results = Results(arguments.results, self.listed)
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
        self.waiting = [cell for cell in self.listed if cell.rate_of or cell.key not in self.results.there]
        print(f"{len(self.waiting)} of {len(self.listed)} are missing.", flush=True)
        look = True  # whether there may be something to begin
        while self.at_work or not self.ending:
            self.pause()
            while look and len(self.at_work) < self.options.jobs and not (self.ending or self.paused):
                cell = self.next()
                look = cell is not None
                if cell is not None:
                    self.begin(cell)
            if not self.at_work and not self.paused:
                break
            for child in [child for child in self.at_work if child.poll() is not None]:
                self.finished(self.at_work.pop(child), child.returncode)
                look = True
            time.sleep(0.2)
        for cell in self.waiting:
            print(f"{cell} waits for the choice of a rate.")
        return 1 if self.failed else 0

    def next(self) -> Cell | None:
        """The first whose rate is known and whose run is not under way as that of another cell."""
        while more := self.results.extend():
            self.waiting = [cell for cell in more if cell.key not in self.results.there] + self.waiting
        busy = [cell.directory(self.options.runs) for cell in self.at_work.values()]
        for cell in [*self.waiting]:
            rate = self.results.choice(cell.rate_of) if cell.rate_of else cell.rate
            ready = replace(cell, rate=rate, rate_of=None)
            if cell.rate_of and rate is None:
                continue
            if ready.key in self.results.there:
                self.waiting.remove(cell)
            elif ready.directory(self.options.runs) not in busy:
                self.waiting.remove(cell)
                return ready
        return None

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
            config = json.dumps(cell.config(self.options.device).to_dict())
            command = [sys.executable, __file__, "one", config, str(directory), self.options.commit]
            self.at_work[subprocess.Popen(command, preexec_fn=os.setpgrp)] = cell

    def finished(self, cell: Cell, code: int) -> None:
        directory = cell.directory(self.options.runs)
        if code == 0 or (code == NOTHING and cell.tried):
            self.results.add(cell, directory)
        self.failed += code != 0
        summary = Run(directory).summary or {} if code == 0 else {}
        seconds, accuracy = summary.get("seconds", 0), 100 * summary.get("accuracy", 0)
        print(f"{time.strftime('%H:%M:%S')} {cell}: {accuracy:.1f}, {seconds:.0f} s, exit {code}", flush=True)


def head() -> str:
    command = ["git", "-C", str(HERE), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def rates(results: Results) -> int:
    """The choice of every rate, and whether the recipe has it."""
    wrong = 0
    while results.extend():
        pass
    for place, tried in results.tried.items():
        scores, best = results.scores(place), results.choice(place)
        set_ = tried[0].recipe.config(tried[0].row, tried[0].column).learning_rate
        other = best is not None and best != set_
        wrong += other
        told = ", ".join(f"{rate:g}: {fmean(found):.1f}" for rate, found in scores.items())
        said = "not chosen yet" if best is None else f"{best:g}" + (f", and the recipe has {set_:g}" if other else "")
        print(f"{': '.join(place)}: {said} ({told})")
    return 1 if wrong else 0


def main(words: list[str]) -> int:
    if words[:1] == ["one"]:
        try:
            one(Config(**json.loads(words[1])), Path(words[2]), words[3])
        except FedkeelError as error:
            print(error, flush=True)
            return NOTHING
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "rates"])
    parser.add_argument("list", type=Path)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--runs", type=Path, default=HERE / "runs" / "evidence")
    parser.add_argument("--pause", type=Path, default=HERE / "results" / "PAUSE")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", choices=[*WHERE], default="cpu", help="one core each, or one GPU for all")
    parser.add_argument("--commit", help="that the lines name; by default the one that is checked out")
    arguments = parser.parse_args(words)
    arguments.commit = arguments.commit or head()
    if arguments.what == "rates":
        return rates(Results(arguments.results, unique(cells(arguments.list))))
    return Work(arguments).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
