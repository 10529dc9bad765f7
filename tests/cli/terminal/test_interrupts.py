"""Ctrl-C: the first keeps the run, the second leaves at once; neither leaves a process or a traceback behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from fedkeel.cli import main
from fedkeel.runs.run import Run
from fedkeel.stopping import RENAMED
from tests.processes import HANG, children, ended, exit_code, forked, state, until, wait_here

ROOT = Path(__file__).parents[3]
TINY = ["--subsample", "10", "--model", "simple_cnn(width=2)", "--device", "cpu", "--rounds", "4"]
TINY += ["--checkpoint-every", "1"]  # by default a slow disk has fewer

HANGING = """
import os, signal, sys
from fedkeel import stopping
from fedkeel.cli import main

here = os.getpid()

def hook(point, _):
    if point == stopping.LOCAL_STEP and os.getpid() != here:
        os.kill(os.getpid(), signal.SIGSTOP)

stopping.hook = hook
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_keeps_the_run_and_it_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    place, said = tmp_path / "run", tmp_path / "said"

    def stopped_in(round: int, *words: str) -> str:
        ready = tmp_path / f"ready{round}"

        def act() -> int:
            wait_here(RENAMED, f"checkpoints/round-{round:06d}", ready)
            return main([*words])

        child = forked(act, said)
        until(ready.exists)
        os.kill(child, number)
        assert exit_code(child) == 130
        return said.read_text()

    for round, words in ((1, ["run", *TINY, "--executor", "serial", "--out", str(place)]), (2, ["resume", str(place)])):
        text = stopped_in(round, *words)
        assert f"stopped; continue with: fedkeel resume {place}" in text
        assert "Traceback" not in text
    assert not Run(place).finished
    assert main(["resume", str(place)]) == 0
    assert len(Run(place).records("round")) == 4


def hanging(*words: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A command whose processes all hang in their first local step, and these processes."""
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, *words],
        cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    others: list[int] = []

    def all_hang() -> bool:
        assert process.poll() is None, process.communicate()
        others[:] = children(process.pid)
        return len(others) == 2 and all(state(pid) == "T" for pid in others)

    until(all_hang)
    return process, others


def press(process: subprocess.Popen[str]) -> None:
    """As a terminal does: every process of the command gets it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_workers_that_hang_do_not_outlive_the_run(tmp_path: Path, times: int) -> None:
    place = tmp_path / "run"
    process, workers = hanging("run", *TINY, "--executor", "processes", "--workers", "2", "--out", str(place))
    for _ in range(times):
        press(process)
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert out == ""
    ended(workers)
    assert main(["resume", str(place)]) == 0


@pytest.mark.slow
def test_the_second_ends_a_comparison_whose_runs_hang(tmp_path: Path) -> None:
    words = ["compare", "fedavg", "gn", *TINY, "--seeds", "1", "--jobs", "2", "--out", str(tmp_path / "c")]
    process, runs = hanging(*words)
    press(process)
    assert process.stderr is not None
    while "press Ctrl-C again to leave at once" not in process.stderr.readline():
        assert process.poll() is None
    press(process)
    _, err = process.communicate(timeout=HANG)
    assert process.returncode == 130
    assert "Traceback" not in err
    ended(runs)
