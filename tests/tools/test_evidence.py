"""The tool that runs what the ledger lacks: what it writes, that it goes on where it was ended, and that it waits."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from fedkeel.experiments.recipes import parse
from tests.processes import until
from tests.tools.lines import RECIPE

import evidence  # isort: skip
from ledger import Ledger, version_of  # isort: skip

TOOL = Path(__file__).parents[2] / "tools" / "evidence.py"
ONE_ROW = 'rows = [{ label = "FedAvg", method = "fedavg" }]\n'
LONG = RECIPE.partition("rows =")[0] + ONE_ROW + "[base]" + RECIPE.partition("[base]")[2].partition("[published]")[0]


def start(
    folder: Path, block: str, recipe: str = RECIPE, what: str = "run", commit: str = "abc"
) -> subprocess.Popen[str]:
    (folder / "small.toml").write_text(recipe)
    (folder / "list.toml").write_text(f"[[block]]\nrecipe = '{folder / 'small.toml'}'\n{block}\n")
    (folder / "results").mkdir(exist_ok=True)
    places = ["--results", "results", "--runs", "runs", "--pause", "PAUSE", "--jobs", "2", "--commit", commit]
    command = [sys.executable, str(TOOL), what, "list.toml", *places]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=300)
    return said


def test_what_is_missing_becomes_lines_that_name_their_commit(tmp_path: Path) -> None:
    block = 'only = ["scan", "FedAvg"]\nseeds = [20, 21]'
    assert "2 of 2 are missing." in output(start(tmp_path, block))
    lines = list(Ledger(tmp_path / "results"))
    assert {(line.row, line.column, line.seed, line.commit) for line in lines} == {
        ("FedAvg", "digits scan", 20, "abc"),
        ("FedAvg", "digits scan", 21, "abc"),
    }
    # Another domain of the same run is read of it.
    again = start(tmp_path, 'only = ["FedAvg"]\nseeds = [20, 21]')
    assert "2 of 4 are missing." in output(again)
    assert len(list(Ledger(tmp_path / "results"))) == 4
    assert len(list((tmp_path / "runs").glob("*/seed*"))) == 4  # two runs, each with the file of its commit


def test_a_rate_is_chosen_on_validation_data_and_can_be_chosen_again(tmp_path: Path) -> None:
    """Of rates at which nothing is learnt the smallest is as good as any: at the edge, which is moved twice."""
    tried = 'only = ["scan", "FedAvg"]\nseeds = [100]\nrates = [1e-9, 1e-8, 1e-7]\n'
    block = tried + f"[[block]]\nrecipe = '{tmp_path / 'small.toml'}'\n"
    block += 'only = ["scan"]\nrates_of = ["small", "digits scan", "FedAvg"]\nseeds = [20]'
    output(start(tmp_path, block))
    lines = [json.loads(text) for text in (tmp_path / "results" / "tuning" / "small.jsonl").read_text().splitlines()]
    assert sorted(line["learning_rate"] for line in lines) == [1e-11, 1e-10, 1e-9, 1e-8, 1e-7]
    assert {(line["row"], line["seed"], line["commit"]) for line in lines} == {("FedAvg", 100, "abc")}
    assert len({line["validation"] for line in lines}) == 1
    chosen = RECIPE.replace("rounds = 2", "rounds = 2\nlearning_rate = 1e-11")
    recipe = parse("small", chosen)
    versions = {row.label: version_of(recipe, row, recipe.columns[0]) for row in recipe.rows}
    assert {(line.row, line.seed, line.version) for line in Ledger(tmp_path / "results")} == {
        (label, 20, version) for label, version in versions.items()
    }
    assert " 0 s" not in output(start(tmp_path, block))  # nothing is run again
    for text, code in ((RECIPE, 1), (chosen, 0)):
        told = start(tmp_path, block, text, "rates")
        assert "small: FedAvg: digits scan: 1e-11" in output(told)
        assert told.returncode == code


def test_a_run_that_was_ended_goes_on_and_one_of_another_commit_begins_anew(tmp_path: Path) -> None:
    recipe = LONG.replace("rounds = 2", "rounds = 400")
    block = 'only = ["scan"]\nseeds = [20]'
    runs = tmp_path / "runs"

    def rounds() -> int:
        return sum(len(path.read_text().splitlines()) for path in runs.glob("*/seed20/timing.jsonl"))

    first = start(tmp_path, block, recipe)
    until(lambda: rounds() > 5)
    while first.poll() is None:  # asked, it waits for the run; asked again, it ends it
        first.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    output(first)
    assert list(Ledger(tmp_path / "results")) == []
    (begun,) = runs.glob("*/seed20/config.toml")
    which = begun.stat().st_ino, begun.stat().st_mtime_ns
    done = rounds()
    second = start(tmp_path, block, recipe)
    until(lambda: rounds() > done)
    assert (begun.stat().st_ino, begun.stat().st_mtime_ns) == which
    for _ in range(2):
        second.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    output(second)
    third = start(tmp_path, block, recipe, commit="def")
    until(lambda: begun.exists() and (begun.stat().st_ino, begun.stat().st_mtime_ns) != which)
    third.send_signal(signal.SIGTERM)
    output(third)
    assert [(line.rounds, line.commit) for line in Ledger(tmp_path / "results")] == [(400, "def")]


def test_nothing_runs_while_there_is_the_file(tmp_path: Path) -> None:
    (tmp_path / "PAUSE").touch()
    waiting = start(tmp_path, 'only = ["scan", "FedAvg"]\nseeds = [20]')
    time.sleep(1)
    work = evidence.Work(
        argparse.Namespace(results=tmp_path / "results", pause=tmp_path / "PAUSE", list=tmp_path / "list.toml")
    )
    child = subprocess.Popen(["sleep", "60"], process_group=0) if sys.version_info >= (3, 11) else None
    assert list(tmp_path.glob("runs/*")) == []
    if child is not None:  # what is under way stands still, and goes on

        def state() -> str:
            return subprocess.run(["ps", "-o", "stat=", "-p", str(child.pid)], capture_output=True, text=True).stdout

        work.at_work = {child: None}
        work.pause()
        until(lambda: state().startswith("T"))
        (tmp_path / "PAUSE").unlink()
        work.pause()
        until(lambda: not state().startswith("T"))
        child.kill()
        child.wait()
    (tmp_path / "PAUSE").unlink(missing_ok=True)
    output(waiting)
    assert len(list(Ledger(tmp_path / "results"))) == 1
