"""What is seen while runs go on: plain lines in a pipe, whole tables, honest arithmetic of time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from fedkeel.cli.console import (
    ComparisonProgress,
    Milestones,
    RunProgress,
    console,
    duration,
    plain_table,
    results_table,
)
from fedkeel.config import Config
from fedkeel.core.evaluation import Scores
from fedkeel.core.naming import visible
from fedkeel.experiments.jobs import Job
from fedkeel.experiments.tables import DASH, Cell, Results, sparkline
from tests.experiments.test_comparison import finish as finish_run


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


def test_a_loss_that_nobody_told_is_a_dash() -> None:
    stream = io.StringIO()
    with RunProgress(stream) as progress:
        progress.started(Config(rounds=1, dp="local"), 0)
        progress.round_done(0, 1, scores(0.5), float("nan"))
    assert "accuracy 50.0 %  loss –  left" in stream.getvalue()


def test_quiet_still_tells_notes() -> None:
    stream = io.StringIO()
    with RunProgress(stream, quiet=True) as progress:
        progress.started(Config(rounds=1), 0)
        progress.note("The update of [scan] is dropped.")
        progress.round_done(0, 1, scores(0.5), 0.5)
    assert stream.getvalue() == "fedkeel: The update of [scan] is dropped.\n"


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
            progress.tick()
            if job is not jobs[1]:
                finish(job, accuracy)
            progress.job_finished(job, "boom" if job is jobs[1] else "")
        progress.tick()
    text = stream.getvalue()
    assert "1 of 4 runs were finished before." in text
    assert "fedkeel: fedavg seed 1 failed: boom" in text
    assert "gn           62.5 %" in text
    assert "methods 2/2  runs 4/4  best so far gn 62.5 %  left 0:00" in text


def test_a_comparison_tells_the_result_by_the_rule_and_each_row_with_its_options(tmp_path: Path) -> None:
    """The last round's accuracy may be another, and three rows of one method would read the same."""
    stream = io.StringIO()
    rows = {"gn": 0.61, "gn@learning_rate=0.1": 0.62, "gn@learning_rate=0.2,batch_size=8": 0.63}
    jobs = planned(tmp_path, *rows, result="best-validation")
    with ComparisonProgress(stream) as progress:
        progress.planned(jobs, [])
        for job in jobs:
            progress.job_started(job, 0)
            progress.job_progress(job, 2.0, 0.99)  # of the last round
            finish(job, rows[job.label])
            progress.job_finished(job, "")
        progress.tick()
    lines = [line.split() for line in stream.getvalue().splitlines()]
    for label, accuracy in rows.items():
        assert [label, f"{100 * accuracy:.1f}", "%"] in lines
    assert "99.0" not in stream.getvalue()
    assert "best so far gn@learning_rate=0.2,batch_size=8 63.0 %" in stream.getvalue()


def test_a_quiet_comparison_still_tells_notes_and_failures(tmp_path: Path) -> None:
    stream = io.StringIO()
    jobs = planned(tmp_path, "fedavg", "gn")
    with ComparisonProgress(stream, quiet=True) as progress:
        progress.planned(jobs, [])
        for job in jobs:
            progress.job_started(job, 0)
            progress.note(f"{job}: The update of [scan] is dropped.")
            progress.tick()
            progress.job_finished(job, "" if job is jobs[0] else "boom")
        progress.tick()
    assert stream.getvalue().splitlines() == [
        "fedkeel: fedavg seed 0: The update of [scan] is dropped.",
        "fedkeel: gn seed 0: The update of [scan] is dropped.",
        "fedkeel: gn seed 0 failed: boom",
    ]


def test_a_live_comparison_draws_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    job = Job("fedavg", 0, Path("."), Config(rounds=2))
    with ComparisonProgress(stream) as progress:
        progress.planned([job], [])
        progress.job_started(job, 0)
        progress.job_progress(job, 1.0, 0.5)
        progress.tick()
    assert "fedavg seed 0" in stream.getvalue()
    assert "round 2/2  50.0 %" in stream.getvalue()


def test_a_table_in_a_pipe_is_never_cut() -> None:
    domains = {f"a-domain-with-a-long-name-{number}": 0.5 for number in range(20)}
    summary = {"result": "last", "domains": domains, "accuracy": 0.5, "unseen_domains": []}
    stream = io.StringIO()
    console(stream).print(results_table(Results.of([("fedavg", 0, summary), ("gn", 0, summary)])))
    assert all(name in stream.getvalue() for name in domains)
    assert "…" not in stream.getvalue()


def test_spread_is_blank_with_a_single_seed() -> None:
    assert str(Cell.of([0.5])) == "50.0"
    assert str(Cell.of([0.5, 0.5])) == "50.0 ±0.0"


def test_every_tenth_is_reached_once() -> None:
    milestones = Milestones()
    assert [milestones.reached(share) for share in (0.0, 0.05, 0.1, 0.19, 0.35, 1.0)] == [
        False, False, True, False, True, True,
    ]  # fmt: skip


def test_duration() -> None:
    assert [duration(seconds) for seconds in (0, 59.6, 3661)] == ["0:00", "1:00", "1:01:01"]


def test_a_sparkline_spans_from_lowest_to_highest_and_keeps_the_ends() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert sparkline([]) == ""
    long = sparkline([number / 500 for number in range(501)], width=60)
    assert len(long) == 60
    assert (long[0], long[-1]) == ("▁", "█")


HOSTILE = ("[/b]", "[bold]x[/bold]", "[link=x]y", ":bomb:", "\x1b[31mred", "a\rb", "a\nb", "\x9b2J", "\udcff")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_name_is_shown_and_not_obeyed(name: str) -> None:
    seen = visible(name)
    summaries = {"domains": {name: 0.5, "b": 0.4}, "unseen_domains": [name], "accuracy": 0.5, "result": "last"}
    stream = io.StringIO()
    out = console(stream)
    out.print(results_table(Results.of([(name, 0, summaries), (f"{name}@x=1", 0, summaries)])))
    out.print(plain_table([name], [[name]], caption=f"of {name}"))
    out.print(f"- {name}")
    text = stream.getvalue()
    assert text.count(seen) >= (4 if "\n" in name else 6)
    assert not set(text) & set("\x1b\r\x9b\udcff")


def test_progress_on_a_terminal_shows_a_name_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    name = "fedavg@data=x([/b], \x07)"
    with ComparisonProgress(stream) as progress:
        job = Job(name, 0, Path("."), Config(rounds=2))
        progress.planned([job], [])
        progress.job_started(job, 0)
        progress.job_progress(job, 1.0, 0.5)
        progress.tick()
        progress.job_finished(job, "[/b]")
    with RunProgress(stream) as run:
        run.started(Config(rounds=1, data="x([/b])"), 0)
        run.note("[/b] \x07")
    assert "[/b]" in stream.getvalue()
    assert "\x07" not in stream.getvalue()


def test_a_dash_among_numbers_leaves_them_to_the_right() -> None:
    columns = plain_table(["domain", "accuracy %"], [["a", "22.2"], ["b", DASH]]).columns
    assert [column.justify for column in columns] == ["left", "right"]
