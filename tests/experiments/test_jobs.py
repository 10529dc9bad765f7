"""Runs of a comparison: what is finished is never run again, what fails is named, and all of them stop."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fedkeel.config import Config
from fedkeel.errors import FedkeelError
from fedkeel.experiments import jobs
from fedkeel.experiments.comparison import compare
from fedkeel.experiments.jobs import Job
from fedkeel.stopping import Stopped, stop_requested
from tests.experiments.made_up import TINY, Watching, finish
from tests.processes import HANG, ended, forked, until


class TestRunning:
    @pytest.mark.slow
    def test_each_run_has_its_directory_and_finished_ones_are_not_run_again(self, tmp_path: Path) -> None:
        first = compare(["fedavg", "gn"], seeds=1, directory=tmp_path, jobs=2, **TINY)
        assert [str(run.directory) for run in first.runs] == [f"{tmp_path}/fedavg/seed0", f"{tmp_path}/gn/seed0"]
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.parent != tmp_path}
        watching = Watching()
        again = compare(["fedavg", "gn"], seeds=1, directory=tmp_path, jobs=2, observer=watching, **TINY)
        assert watching.started == []
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.parent != tmp_path} == before
        assert again.rows() == first.rows()

    @pytest.mark.slow
    def test_a_stopped_comparison_goes_on_where_it_was(self, tmp_path: Path) -> None:
        options = {**TINY, "rounds": 3, "executor": "serial"}

        class StopInRoundOne(Watching):
            def job_progress(self, job: Job, rounds_done: float, accuracy: float | None) -> None:
                if rounds_done == 1:
                    stop_requested.set()

        try:
            with pytest.raises(Stopped):
                compare(["fedavg"], seeds=1, directory=tmp_path, jobs=1, observer=StopInRoundOne(), **options)
        finally:
            stop_requested.clear()
        watching = Watching()
        result = compare(["fedavg"], seeds=1, directory=tmp_path, jobs=1, observer=watching, **options)
        assert watching.started == ["fedavg seed 0 from 1"]
        whole = compare(["fedavg"], seeds=1, directory=tmp_path / "whole", jobs=1, **options)
        assert result.rows() == whole.rows()

    @pytest.mark.parametrize("processes", [1, 2])
    def test_a_crashed_job_is_reported_and_the_others_go_on(
        self, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def execute(job: Job, *_: object) -> None:
            if job.seed == 1:
                raise RuntimeError("boom")
            if job.seed == 2:
                raise FedkeelError("One sentence.")
            if job.seed == 3 and processes == 2:
                os._exit(3)
            finish(job.directory, job.config, {"scan": 0.5})

        monkeypatch.setattr(jobs, "execute", execute)
        watching = Watching()
        result = compare(["fedavg"], seeds=5, directory=tmp_path, jobs=processes, observer=watching, **TINY)
        expected = {"fedavg seed 1": "RuntimeError: boom", "fedavg seed 2": "One sentence."}
        if processes == 2:
            expected["fedavg seed 3"] = "its process died (exit code 3)"
        assert result.failures == expected
        assert result.missing == list(expected)
        assert [row["seeds"] for row in result.rows()] == [
            [seed for seed in range(5) if f"fedavg seed {seed}" not in expected]
        ]

    def test_stopping_ends_every_process(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def execute(job: Job, observer: Any, _: object) -> None:
            observer.started(job.config, 0)
            assert stop_requested.wait(HANG), "was never asked to stop"
            raise Stopped

        class StopAtOnce(Watching):
            def job_started(self, job: Job, first_round: int) -> None:
                super().job_started(job, first_round)
                if len(self.started) == 2:
                    stop_requested.set()

        monkeypatch.setattr(jobs, "execute", execute)
        watching = StopAtOnce()
        try:
            with pytest.raises(Stopped):
                compare(["fedavg"], seeds=6, directory=tmp_path, jobs=2, observer=watching, **TINY)
        finally:
            stop_requested.clear()
        assert len(watching.started) == 2
        assert watching.problems == {}

    def test_a_job_that_the_system_ends_for_its_memory_says_what_to_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(jobs, "execute", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        job = Job("fedavg", 0, tmp_path / "r", Config())
        (said,) = jobs.run_all([job], 2, Watching()).values()
        assert said == "its process died (signal SIGKILL), as when memory runs out: give fewer --jobs"

    def test_jobs_end_with_the_process_that_started_them(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def execute(job: Job, *_: object) -> None:
            (tmp_path / f"{job.seed}").write_text(str(os.getpid()))
            signal.pause()

        monkeypatch.setattr(jobs, "execute", execute)
        todo = [Job("fedavg", seed, tmp_path / f"r{seed}", Config()) for seed in range(2)]
        parent = forked(lambda: jobs.run_all(todo, 2, Watching()) and None)
        until(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "01"))
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        ended([int((tmp_path / name).read_text()) for name in "01"])


@pytest.mark.slow
def test_runs_that_share_a_gpu_have_processes_that_are_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA does not survive a fork. The runs themselves are on the CPU here."""
    compare(["fedavg", "gn"], seeds=1, directory=tmp_path / "alone", jobs=1, **TINY)
    monkeypatch.setattr(jobs, "uses_gpu", lambda _: True)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    together = compare(["fedavg", "gn"], seeds=1, directory=tmp_path / "together", jobs=2, **TINY)
    assert not together.failures
    for method in ("fedavg", "gn"):
        one, other = (tmp_path / place / method / "seed0" / "model.safetensors" for place in ("alone", "together"))
        assert one.read_bytes() == other.read_bytes()
