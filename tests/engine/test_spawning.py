"""A script that compares on a GPU without a guard gets one sentence; one that has no file works."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fedkeel
from fedkeel.config import Config
from fedkeel.engine.spawning import NAME, SENTENCE, UNGUARDED, leave_if_imported_again, main_that_can_be_imported
from fedkeel.errors import FedkeelError
from fedkeel.experiments import jobs
from fedkeel.experiments.jobs import Job, JobsObserver

SCRIPT = """
import fedkeel
from fedkeel.experiments import jobs

jobs.uses_gpu = lambda _: True  # so that processes are not forked; the runs themselves are on the CPU
tiny = {"data": "digits-shift", "subsample": 20, "model": "simple_cnn(width=2)", "rounds": 1}
table = fedkeel.compare(["fedavg", "gn"], seeds=1, jobs=2, executor="serial", device="cpu", **tiny).table()
print(table)
"""


@pytest.mark.parametrize("call", ["compare", "simulate", "resume"])
def test_a_job_that_imports_the_script_leaves_at_the_first_call(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process = multiprocessing.current_process()
    monkeypatch.setattr(process, "_inheriting", True, raising=False)
    leave_if_imported_again()  # somebody else's process
    monkeypatch.setattr(process, "name", f"{NAME}: fedavg seed 0")
    with pytest.raises(SystemExit) as left:
        {"compare": fedkeel.compare, "simulate": fedkeel.simulate, "resume": fedkeel.resume}[call](["fedavg"])  # type: ignore[operator]
    assert left.value.code == UNGUARDED
    monkeypatch.delattr(process, "_inheriting")
    leave_if_imported_again()  # a job that works


def unguarded(*_: object) -> None:
    sys.exit(UNGUARDED)


def test_whoever_started_it_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_work", unguarded)
    todo = [Job("fedavg", seed, tmp_path / str(seed), Config()) for seed in range(3)]
    with pytest.raises(FedkeelError) as error:
        jobs.run_all(todo, 2, JobsObserver())
    assert str(error.value) == SENTENCE
    assert "if __name__ ==" in SENTENCE


def test_a_main_program_without_a_file_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.__spec__, main.__file__ = None, "/somewhere/<stdin>"
    monkeypatch.setitem(sys.modules, "__main__", main)
    with main_that_can_be_imported():
        assert not hasattr(main, "__file__")
    assert main.__file__ == "/somewhere/<stdin>"
    main.__file__ = __file__
    with main_that_can_be_imported():
        assert main.__file__ == __file__


@pytest.mark.slow
@pytest.mark.parametrize("piped", [False, True])
def test_a_script(tmp_path: Path, piped: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-" if piped else str(script)],
        input=SCRIPT if piped else None,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if piped:
        assert done.returncode == 0, done.stderr
        assert "fedavg" in done.stdout
    else:
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == f"fedkeel.errors.FedkeelError: {SENTENCE}"
        assert done.stderr.count("Traceback") == 1  # the caller's own, of no child
        assert not list(tmp_path.rglob("config.toml"))
