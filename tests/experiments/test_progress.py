"""What is seen while runs go on: plain lines in a pipe, honest arithmetic of time."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from fedkeel.config import Config
from fedkeel.core.evaluation import Scores
from fedkeel.experiments.comparison import compare
from fedkeel.experiments.jobs import Job
from fedkeel.experiments.progress import ComparisonProgress
from fedkeel.runs.progress import RunProgress
from tests import tiny
from tests.experiments.made_up import finish as finish_run
from tests.runs.test_run import interrupted


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def scores(average: float) -> Scores:
    return Scores(domains={}, average=average, samples=average, unseen=None, loss=1.0)


def test_a_pipe_gets_a_plain_line_every_tenth_of_the_way() -> None:
    stream = io.StringIO()
    with RunProgress(stream) as progress:
        progress.started(Config(rounds=40), 0)
        for round in range(40):
            progress.client_done(round, 1, 1)
            progress.round_done(round, 40, scores(round / 40), 0.5)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert "\x1b" not in stream.getvalue()
    assert lines[-1].startswith("round 40/40  accuracy 97.5 %  loss 0.500")


def test_quiet_still_tells_notes() -> None:
    stream = io.StringIO()
    with RunProgress(stream, quiet=True) as progress:
        progress.started(Config(rounds=1), 0)
        progress.note("The update of [scan] is dropped.")
        progress.round_done(0, 1, scores(0.5), 0.5)
    assert stream.getvalue() == "fedkeel: The update of [scan] is dropped.\n"


class Kernel:
    """IPython as it is in a notebook's kernel, as far as progress asks it."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.display = self

    def get_ipython(self) -> Any:
        return type("Shell", (), {"kernel": True})()

    def __call__(self, content: dict[str, str], **_: Any) -> Any:
        self.shown.append(content["text/plain"])
        return self

    update = __call__


@pytest.mark.parametrize(("verbose", "drawn"), [(None, True), (True, True), (False, False)])
def test_a_notebook_shows_progress_in_one_place_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verbose: bool | None, drawn: bool
) -> None:
    kernel = Kernel()
    kernel.display = type("Module", (), {"display": kernel})  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "IPython", kernel)  # type: ignore[arg-type]
    tiny.run(tmp_path / "r", rounds=2, verbose=verbose)
    assert bool(kernel.shown) == drawn
    if drawn:
        assert kernel.shown[-1].startswith("fedavg")
        assert "round 2/2" in kernel.shown[-1]
    compare(["fedavg"], directory=tmp_path / "c", federation=tiny.federation(), model=tiny.model(), seeds=1, jobs=1,
            rounds=1, verbose=verbose, device="cpu", executor="serial")  # fmt: skip
    assert not drawn or "runs 1/1" in kernel.shown[-1]


@pytest.mark.parametrize(("tty", "verbose", "seen"), [(True, None, True), (True, False, False), (False, None, False),
                                                      (False, True, True)])  # fmt: skip
@pytest.mark.slow
def test_progress_is_where_a_person_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tty: bool, verbose: bool | None, seen: bool
) -> None:
    stream = Terminal() if tty else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    run = tiny.run(tmp_path / "r", rounds=1, verbose=verbose)
    assert ("round 1/1" in stream.getvalue()) == seen
    assert run.finished
    tiny.resume(interrupted(tmp_path / "stopped").directory, verbose=verbose)
    assert ("round 4/4" in stream.getvalue()) == seen


def test_an_observer_of_one_s_own_is_told_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    rounds: list[int] = []
    tiny.run(tmp_path / "r", rounds=2, verbose=True, observer=tiny.Notes(rounds.append))
    assert rounds == [0, 1]
    assert "round 2/2" in stream.getvalue()


def finish(job: Job, accuracy: float) -> None:
    finish_run(job.directory, job.config, {"scan": accuracy})


def planned(directory: Path, *labels: str, seeds: int = 1, **options: Any) -> list[Job]:
    config = Config(rounds=2, **options)
    return [Job(label, seed, directory / label / f"{seed}", config) for label in labels for seed in range(seeds)]


def test_a_comparison_tells_what_is_done_and_what_failed(tmp_path: Path) -> None:
    stream = io.StringIO()
    jobs = planned(tmp_path, "fedavg", "gn", seeds=2)
    finish(jobs[0], 0.25)
    with ComparisonProgress(stream) as progress:
        progress.planned(jobs, jobs[:1])
        for job, accuracy in zip(jobs[1:], (0.25, 0.5, 0.75), strict=True):
            progress.job_started(job, 0)
            progress.job_progress(job, 1.0, accuracy)
            if job is not jobs[1]:
                finish(job, accuracy)
            progress.job_finished(job, "boom" if job is jobs[1] else "")
    text = stream.getvalue()
    assert "1 of 4 runs were finished before." in text
    assert "fedkeel: fedavg seed 1 failed: boom" in text
    assert "runs 4/4  left 0:00" in text


def test_a_quiet_comparison_still_tells_notes_and_failures(tmp_path: Path) -> None:
    stream = io.StringIO()
    jobs = planned(tmp_path, "fedavg", "gn")
    with ComparisonProgress(stream, quiet=True) as progress:
        progress.planned(jobs, [])
        for job in jobs:
            progress.job_started(job, 0)
            progress.note(f"{job}: The update of [scan] is dropped.")
            progress.job_finished(job, "" if job is jobs[0] else "boom")
    assert stream.getvalue().splitlines() == [
        "fedkeel: fedavg seed 0: The update of [scan] is dropped.",
        "fedkeel: gn seed 0: The update of [scan] is dropped.",
        "fedkeel: gn seed 0 failed: boom",
    ]


def test_a_live_comparison_draws_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    job = Job("fedavg", 0, Path("."), Config(rounds=2))
    with ComparisonProgress(stream) as progress:
        progress.planned([job], [])
        progress.job_started(job, 0)
        progress.job_progress(job, 1.0, 0.5)
    assert "fedavg seed 0" in stream.getvalue()
    assert "round 2/2  50.0 %" in stream.getvalue()


def test_progress_on_a_terminal_shows_a_name_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    name = "fedavg@data=x([/b], \x07)"
    with ComparisonProgress(stream) as progress:
        job = Job(name, 0, Path("."), Config(rounds=2))
        progress.planned([job], [])
        progress.job_started(job, 0)
        progress.job_progress(job, 1.0, 0.5)
        progress.job_finished(job, "[/b]")
    with RunProgress(stream) as run:
        run.started(Config(rounds=1, data="x([/b])"), 0)
        run.note("[/b] \x07")
    assert "[/b]" in stream.getvalue()
    assert "\x07" not in stream.getvalue()
