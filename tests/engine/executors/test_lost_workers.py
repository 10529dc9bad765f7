"""Workers that die, hang or run out of memory: what they take with them, and what is said of it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeel.core.client import LocalClient
from fedkeel.core.evaluation import Evaluation
from fedkeel.core.messages import Missing
from fedkeel.core.method import Method
from fedkeel.engine import children
from fedkeel.engine.children import Heart
from fedkeel.engine.executors.processes import ProcessesExecutor
from fedkeel.engine.local import Worker
from fedkeel.errors import ShortageError, TrainingError
from tests import tiny
from tests.processes import WhileStopped, running, state, until

pytestmark = pytest.mark.slow


# -- a worker that dies --------------------------------------------------------------------------------------
class Dies(Method):
    """Kills the process that runs one client in one round."""

    name = "dies"

    def __init__(self, client: str, round: int, number: int = signal.SIGKILL) -> None:
        self.client, self.round, self.number = client, round, number
        self.parent = os.getpid()

    def start(self, client: LocalClient) -> None:
        if (client.name, client.round) == (self.client, self.round):
            assert os.getpid() != self.parent
            os.kill(os.getpid(), self.number)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_worker_takes_only_its_client_with_it(tmp_path: Path, workers: int) -> None:
    notes = tiny.Notes()
    options: dict[str, Any] = {"executor": "processes", "workers": workers, "rounds": 3}
    run = tiny.run(tmp_path / "r", Dies("clinic", 1), observer=notes, **options)
    assert [(r["round"], r["client"]) for r in run.records("dropped")] == [(1, "clinic")]
    assert "its worker process died (signal SIGKILL)" in run.records("dropped")[0]["reason"]
    assert len(notes.notes) == 1
    whole = tiny.run(tmp_path / "whole", Dies("nobody", 1), **options)
    # Up to then, and for the others in that round, nothing is different.
    before = [r for r in run.records() if r["round"] == 0]
    assert before == [r for r in whole.records() if r["round"] == 0]
    trained = [r for r in run.records("client") if r["round"] == 1]
    assert trained == [r for r in whole.records("client") if r["round"] == 1 and r["client"] != "clinic"]
    assert [r["client"] for r in run.records("client") if r["round"] == 2] == ["ward", "clinic", "hospital"]


def test_the_run_stops_when_every_worker_dies(tmp_path: Path) -> None:
    on = tiny.federation({"ward": 4})
    with pytest.raises(TrainingError, match="'ward', its worker process died"):
        tiny.run(tmp_path / "r", Dies("ward", 0), on=on, executor="processes", workers=1)


def test_a_worker_that_dies_in_an_evaluation_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, flag, parent = Worker.evaluate, tmp_path / "died", os.getpid()

    def dies_once(self: Worker, name: str, *rest: Any, **named: Any) -> list[Evaluation]:
        if name == "clinic" and not flag.exists() and os.getpid() != parent:
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, name, *rest, **named)

    options: dict[str, Any] = {"executor": "processes", "workers": 2, "rounds": 2}
    whole = tiny.run(tmp_path / "whole", **options)
    monkeypatch.setattr(Worker, "evaluate", dies_once)
    run = tiny.run(tmp_path / "r", **options)
    assert flag.exists()
    assert tiny.result(run) == tiny.result(whole)


# -- a worker that hangs -------------------------------------------------------------------------------------
@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "Heart", lambda: Heart(3.0, WhileStopped()))


class Hangs(Method):
    """Stops the process that runs one client in one round, or answers for it, as a debugger or a sick system does."""

    name = "hangs"

    def __init__(self, client: str, round: int, flag: Path) -> None:
        self.client, self.round, self.flag = client, round, flag

    def start(self, client: LocalClient) -> None:
        if (client.name, client.round) == (self.client, self.round):
            hang(self.flag)

    def answer(self, client: LocalClient, question: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if client.name == self.client:
            hang(self.flag)
        return {"one": torch.ones(1)}


def hang(flag: Path) -> None:
    if not flag.exists():
        flag.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.usefixtures("impatient")
def test_a_worker_that_hangs_takes_only_its_client_with_it(tmp_path: Path) -> None:
    notes, flag = tiny.Notes(), tmp_path / "pid"
    options: dict[str, Any] = {"executor": "processes", "workers": 1, "rounds": 3}
    run = tiny.run(tmp_path / "r", Hangs("clinic", 1, flag), observer=notes, **options)
    (dropped,) = run.records("dropped")
    assert (dropped["round"], dropped["client"]) == (1, "clinic")
    assert dropped["reason"] == "its worker process hung and was ended"
    assert len(notes.notes) == 1
    assert [r["client"] for r in run.records("client") if r["round"] == 2] == ["ward", "clinic", "hospital"]
    assert not running(int(flag.read_text()))


@pytest.mark.usefixtures("impatient")
def test_a_worker_that_hangs_in_an_evaluation_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, flag = Worker.evaluate, tmp_path / "pid"
    options: dict[str, Any] = {"executor": "processes", "workers": 1, "rounds": 2}
    whole = tiny.run(tmp_path / "whole", **options)

    def hangs_once(self: Worker, name: str, *rest: Any, **named: Any) -> list[Evaluation]:
        if name == "clinic":
            hang(flag)
        return plain(self, name, *rest, **named)

    monkeypatch.setattr(Worker, "evaluate", hangs_once)
    assert tiny.result(tiny.run(tmp_path / "r", **options)) == tiny.result(whole)
    assert not running(int(flag.read_text()))


@pytest.mark.usefixtures("impatient")
def test_a_worker_that_hangs_over_a_question_leaves_its_client_without_an_answer(tmp_path: Path) -> None:
    made = tiny.setup(Hangs("clinic", -1, tmp_path / "pid"), executor="processes", workers=1).executor()
    assert isinstance(made, ProcessesExecutor)
    answers = list(made.ask(["ward", "clinic", "hospital"], tiny.broadcast(made.worker), "hangs/one"))
    assert [type(answer).__name__ for answer in answers] == ["Answer", "Missing", "Answer"]
    assert answers[1] == Missing("clinic", "its worker process hung and was ended")
    made.close()


def test_stopped_workers_do_not_keep_an_executor_from_closing() -> None:
    executor = tiny.setup(executor="processes", workers=2).executor()
    assert isinstance(executor, ProcessesExecutor)
    pids = [seat.child.process.pid for seat in executor._seats]
    for pid in pids:
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        until(lambda pid=pid: state(pid) == "T")
    executor.close()
    assert not any(running(pid) for pid in pids if pid is not None)


# -- too little memory ---------------------------------------------------------------------------------------
class TakesTooMuch(Method):
    name = "takestoomuch"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def start(self, client: LocalClient) -> None:
        raise self.error


LACKS = [
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                 "to allocate 25769803776 bytes. Error code 12 (Cannot allocate memory)"),
]  # fmt: skip


@pytest.mark.parametrize("error", LACKS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("executor_name", ["serial", "processes"])
def test_a_client_for_which_memory_does_not_suffice_ends_the_run_with_a_sentence(
    tmp_path: Path, error: Exception, executor_name: str
) -> None:
    with pytest.raises(ShortageError, match=r"The memory of this machine does not suffice.*fewer --workers") as caught:
        tiny.run(tmp_path / "r", TakesTooMuch(error), **tiny.by(executor_name))
    assert "\n" not in str(caught.value)


def test_no_room_for_an_update_is_that_sentence_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, plain = os.getpid(), os.posix_fallocate

    def full(file: int, offset: int, size: int) -> None:
        if os.getpid() != parent:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ShortageError, match="The memory of this machine does not suffice for another"):
        tiny.run(tmp_path / "r", executor="processes", workers=2)


def test_a_worker_that_cannot_be_started_is_a_sentence_and_the_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, count = os.fork, 0

    def fork() -> int:
        nonlocal count
        count += 1
        if count == 3:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return plain()

    setup = tiny.setup(executor="processes", workers=3)
    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(ShortageError, match=r"A worker process cannot be started .* give fewer --workers"):
        setup.executor()
    assert not multiprocessing.active_children()
