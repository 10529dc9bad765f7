"""Processes that work for another: a heart that beats, an end that is told, and scripts that are imported again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import pytest

import fedkeel
from fedkeel.config import Config
from fedkeel.engine import children
from fedkeel.engine.children import (
    LOOK,
    NAME,
    SENTENCE,
    UNGUARDED,
    Child,
    Heart,
    _main_that_can_be_imported,
    end,
    heard,
    leave_if_imported_again,
)
from fedkeel.errors import FedkeelError, ShortageError
from fedkeel.experiments import jobs
from fedkeel.experiments.jobs import Job, JobsObserver
from tests.processes import WhileStopped, ended, forked, running


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def heart(clock: Clock) -> Heart:
    return Heart(60.0, clock)


def looks(
    heart: Heart, clock: Clock, count: int, every: float, between: Callable[[], None] = lambda: None
) -> list[bool]:
    answers = []
    for _ in range(count):
        clock.now += every
        between()
        answers.append(heart.is_silent())
    return answers


def test_a_minute_without_a_beat_is_too_long(heart: Heart, clock: Clock) -> None:
    assert looks(heart, clock, 300, 0.25).index(True) == 240


def test_one_that_beats_may_take_as_long_as_it_likes(heart: Heart, clock: Clock) -> None:
    assert not any(looks(heart, clock, 100_000, 0.5, heart.beat))


def test_a_beat_makes_up_for_all_the_silence_before(heart: Heart, clock: Clock) -> None:
    for _ in range(5):
        assert not any(looks(heart, clock, 59, 1.0))
        heart.beat()
        assert not any(looks(heart, clock, 1, 1.0))


@pytest.mark.parametrize("away", [61, 3600, 1e6])
def test_while_the_watching_process_is_suspended_or_starved_no_time_counts(
    heart: Heart, clock: Clock, away: float
) -> None:
    assert not any(looks(heart, clock, 50, away))  # each look counts a second, however late it comes
    assert LOOK == 1.0


def test_it_beats_while_the_process_is_busy_and_stops_with_it() -> None:
    clock = Clock()
    heart = Heart(60.0, clock)

    def work() -> None:
        heart.start()
        while True:  # in Python, and without a pause
            pass

    child = forked(work)
    try:
        for _ in range(2):
            before = heart._beats[0]
            while heart._beats[0] == before:  # as long as it takes
                os.sched_yield()
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        assert looks(heart, clock, 70, 1.0)[-1]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_process_that_is_watched_ends_with_the_one_that_watches_it() -> None:
    reading, writing = os.pipe()

    def watch() -> None:
        heart = Heart()

        def work() -> None:
            heart.start()
            os.write(writing, str(os.getpid()).encode())
            while True:
                signal.pause()

        forked(work)
        signal.pause()

    watcher = forked(watch)
    child = int(os.read(reading, 20))
    os.kill(watcher, signal.SIGKILL)
    os.waitpid(watcher, 0)
    ended([child])


# -- what a parent hears -----------------------------------------------------------------------------------------------
def last_words(work: Callable[..., None], *arguments: object) -> tuple[list[bytes], Child]:
    """All that a child says until its end."""
    child, words = Child(work, *arguments, fewer="--workers"), list[bytes]()
    while True:
        for _, said in heard([child]):
            if said is None:
                return words, child
            words.append(said)


def test_what_a_child_says_is_heard_and_then_how_it_ended() -> None:
    def work(pipe: Connection, number: int) -> None:
        pipe.send_bytes(b"one")
        pipe.send_bytes(b"two")
        os.kill(os.getpid(), number)

    words, child = last_words(work, signal.SIGKILL)
    assert words == [b"one", b"two"]
    assert child.became == "died (signal SIGKILL), as when memory runs out: give fewer --workers"


@pytest.mark.slow
def test_a_child_that_is_stopped_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "Heart", lambda: Heart(3.0, WhileStopped()))
    words, child = last_words(lambda _: os.kill(os.getpid(), signal.SIGSTOP))
    assert (words, child.became) == ([], "hung and was ended")
    assert child.process.pid is not None
    assert not running(child.process.pid)


def test_a_child_that_cannot_have_a_thread_lacks_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: Heart) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Heart, "start", start)
    with pytest.raises(ShortageError, match="The memory of this machine does not suffice"):
        last_words(lambda _: None)


def test_ctrl_c_is_not_for_a_child() -> None:
    def work(pipe: Connection) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        pipe.send_bytes(b"still here")
        signal.pause()

    child = Child(work, fewer="")
    while not (said := list(heard([child]))):
        pass
    assert said == [(child, b"still here")]
    end([child])
    assert child.process.exitcode == -signal.SIGKILL


# -- scripts that are imported again -----------------------------------------------------------------------------------
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
    with _main_that_can_be_imported():
        assert not hasattr(main, "__file__")
    assert main.__file__ == "/somewhere/<stdin>"
    main.__file__ = __file__
    with _main_that_can_be_imported():
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
