"""Worker processes give what `serial` gives; what dies takes only its client with it, and nobody is left behind."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fedkeel.core.client import LocalClient
from fedkeel.core.evaluation import Evaluation
from fedkeel.core.messages import Missing, Update
from fedkeel.core.method import Method
from fedkeel.engine.executors.executor import Executor
from fedkeel.engine.executors.processes import ProcessesExecutor, has_shared_memory
from fedkeel.engine.local import Worker
from fedkeel.engine.tasks import Result, fetched
from fedkeel.errors import ShortageError, TrainingError
from fedkeel.runs.run import Run
from fedkeel.stopping import Stopped, stop_requested
from tests import tiny
from tests.engine.executors.test_serial import METHODS
from tests.processes import HANG, children, ended, forked, until

pytestmark = pytest.mark.skipif(not has_shared_memory(), reason="this machine has no /dev/shm")


def tensors(run: Run) -> dict[str, torch.Tensor]:
    paths = [run.directory / "model.safetensors", *sorted(run.directory.glob("personal/*"))]
    return {f"{p.stem}/{name}": t for p in paths for name, t in safetensors.torch.load_file(p).items()}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_agrees_with_serial_whatever_the_number_of_workers(tmp_path: Path, method: str) -> None:
    on = tiny.federation(unseen=4)
    runs = {
        name: tiny.run(tmp_path / name, method, on=on, rounds=2, executor=executor, workers=workers)
        for name, executor, workers in (("serial", "serial", 0), ("one", "processes", 1), ("three", "processes", 3))
    }
    assert tiny.result(runs["one"]) == tiny.result(runs["three"])
    reference, parallel = tensors(runs["serial"]), tensors(runs["three"])
    assert reference.keys() == parallel.keys()
    for name, tensor in reference.items():
        torch.testing.assert_close(parallel[name], tensor, rtol=1e-4, atol=1e-6)
    for key in ("round", "client", "domain", "samples", "bytes_up", "bytes_down"):
        assert [r.get(key) for r in runs["serial"].records()] == [r.get(key) for r in runs["three"].records()]


@pytest.mark.slow
@pytest.mark.parametrize("evaluate_with", ["global", "batch"])
def test_a_test_set_of_many_batches_is_shared_out_and_counted_once(tmp_path: Path, evaluate_with: str) -> None:
    on = tiny.federation({"ward": 8, "clinic": 5}, test=61, validation=9)  # 61 samples: 31 batches, the last of one
    options: dict[str, Any] = {"on": on, "rounds": 2, "evaluation_batch": 2, "evaluate_with": evaluate_with}
    serial = tiny.run(tmp_path / "serial", **options).records("evaluation")
    parallel = [
        tiny.run(tmp_path / f"{workers}", executor="processes", workers=workers, **options).records("evaluation")
        for workers in (1, 3)
    ]
    assert parallel[0] == parallel[1]
    assert [r["samples"] for r in serial] == [r["samples"] for r in parallel[0]]
    for one, other in zip(serial, parallel[0], strict=True):
        assert {k: v for k, v in one.items() if k != "loss"} == {k: v for k, v in other.items() if k != "loss"}
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)


class Raises(Method):
    name = "raises"

    def start(self, client: LocalClient) -> None:
        if client.name == "clinic":
            raise ZeroDivisionError("a bug in a method")


def test_a_bug_in_a_method_stops_the_run_under_every_executor_and_is_shown(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        tiny.run(tmp_path / "serial", Raises())
    with pytest.raises(RuntimeError, match=r"Client 'clinic' failed in its worker process:\n(.|\n)*a bug in a method"):
        tiny.run(tmp_path / "processes", Raises(), executor="processes", workers=2)


@pytest.fixture
def executor() -> Iterator[ProcessesExecutor]:
    made = tiny.setup("fedbn", executor="processes", workers=2).executor()
    assert isinstance(made, ProcessesExecutor)
    yield made
    made.close()


def trained(executor: Executor, *clients: str, round: int = 0) -> dict[str, Result[Update]]:
    message = tiny.broadcast(executor.worker, round)  # type: ignore[attr-defined]
    results = list(executor.map(tiny.training(*clients), message))
    assert not [result for result in results if isinstance(result, Missing)]
    return {result.client: result for result in results}  # type: ignore[misc]


def test_an_update_has_the_same_bits_as_one_that_never_left_the_process(executor: ProcessesExecutor) -> None:
    result = trained(executor, "hospital")["hospital"]
    update = result.outcome
    expected, memory = executor.worker.train("hospital", tiny.broadcast(executor.worker), {})  # one thread here too
    assert (update.client, update.samples, update.round) == ("hospital", 21, 0)
    assert update.metrics == expected.metrics
    assert result.seconds is not None
    assert result.seconds > 0
    for got, wanted in (
        (update.weights, expected.weights),
        (update.statistics, expected.statistics),
        (fetched(result.memory), memory),
    ):
        assert list(got) == list(wanted)
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert expected.weights
    assert memory


def test_workers_leave_with_the_executor_and_threads_are_as_before(executor: ProcessesExecutor) -> None:
    assert torch.get_num_threads() == 1
    trained(executor, "clinic", "ward")
    workers = {worker.pid for worker in executor._workers if worker.pid}
    assert len(workers) == 2
    assert workers <= set(children(os.getpid()))
    executor.close()
    ended(workers)
    assert torch.get_num_threads() == executor._threads


def test_a_round_that_was_given_up_does_not_reach_into_the_next(executor: ProcessesExecutor) -> None:
    given_up = executor.map(tiny.training("hospital", "ward", "clinic"), tiny.broadcast(executor.worker))
    next(given_up)
    given_up.close()  # type: ignore[attr-defined]
    results = trained(executor, "ward", "clinic", round=1)
    assert {name: result.outcome.round for name, result in results.items()} == {"ward": 1, "clinic": 1}


def test_workers_are_quiet(executor: ProcessesExecutor, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trained(executor, "ward")
    assert not caplog.records


class Scribbles(Method):
    """Writes into what the server sent, which no method should."""

    name = "scribbles"

    def finish(self, client: LocalClient) -> dict[str, torch.Tensor]:
        for tensor in client.broadcast.weights.values():
            tensor.fill_(7.0)
        return {}


def test_what_a_client_does_to_its_broadcast_stays_with_it() -> None:
    made = tiny.setup(Scribbles(), executor="processes", workers=2).executor()
    assert isinstance(made, ProcessesExecutor)
    message = tiny.broadcast(made.worker)
    before = {name: tensor.clone() for name, tensor in message.weights.items()}
    list(made.map(tiny.training("ward", "clinic"), message))
    assert all(torch.equal(message.weights[name], tensor) for name, tensor in before.items())
    made.close()


# -- a worker that dies --------------------------------------------------------------------------------------
class Dies(Method):
    """Kills the process that runs one of these clients in one round: the first time, or always."""

    name = "dies"

    def __init__(self, clients: tuple[str, ...], round: int, flag: Path | None = None) -> None:
        self.clients, self.round, self.flag = clients, round, flag
        self.parent = os.getpid()

    def start(self, client: LocalClient) -> None:
        if client.name not in self.clients or client.round != self.round or (self.flag and self.flag.exists()):
            return
        assert os.getpid() != self.parent
        if self.flag:
            self.flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("dying", [("clinic",), ("ward", "hospital")])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_worker_takes_only_its_client_with_it(tmp_path: Path, workers: int, dying: tuple[str, ...]) -> None:
    notes = tiny.Notes()
    options: dict[str, Any] = {"executor": "processes", "workers": workers, "rounds": 3}
    run = tiny.run(tmp_path / "r", Dies(dying, 1), observer=notes, **options)
    assert [(r["round"], r["client"]) for r in run.records("dropped")] == [(1, name) for name in dying]
    assert all("its worker process died" in record["reason"] for record in run.records("dropped"))
    assert len(notes.notes) == len(dying)
    whole = tiny.run(tmp_path / "whole", Dies((), 1), **options)
    # Up to then, and for the others in that round, nothing is different.
    before = [r for r in run.records() if r["round"] == 0]
    assert before == [r for r in whole.records() if r["round"] == 0]
    of_round = [r for r in run.records("client") if r["round"] == 1]
    assert of_round == [r for r in whole.records("client") if r["round"] == 1 and r["client"] not in dying]
    assert [r["client"] for r in run.records("client") if r["round"] == 2] == ["ward", "clinic", "hospital"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["scaffold", "hbn"])
def test_one_that_dies_once_takes_nothing_with_it(tmp_path: Path, method: str) -> None:
    """Its client and those that were under way are done again, with what they remembered before."""
    from fedkeel import methods
    from fedkeel.core.composition import Composition

    options: dict[str, Any] = {"executor": "processes", "workers": 2, "rounds": 3}
    flag = tmp_path / "died"
    runs = []
    for name, dying in (("whole", ()), ("r", ("clinic",))):
        composed = Composition([Dies(dying, 1, flag), *Composition.of(methods.build(method)).parts])
        runs.append(tiny.run(tmp_path / name, composed, **options))
    assert flag.exists()
    assert tiny.result(runs[0]) == tiny.result(runs[1])


def test_the_run_ends_when_no_client_is_left(tmp_path: Path) -> None:
    on = tiny.federation({"ward": 4})
    with pytest.raises(TrainingError, match="'ward', its worker process died"):
        tiny.run(tmp_path / "r", Dies(("ward",), 0), on=on, executor="processes", workers=1)


def test_idle_workers_that_died_are_replaced(executor: ProcessesExecutor) -> None:
    before = set(children(os.getpid()))
    trained(executor, "ward")
    workers = set(children(os.getpid())) - before
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    ended(workers)
    trained(executor, "ward", "clinic")


@pytest.mark.parametrize("often", [False, True])
def test_a_worker_that_dies_in_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: bool) -> None:
    """Once, and the evaluation is done again; always, and the run ends: a number that is missing is no result."""
    plain, flag, parent = Worker.evaluate, tmp_path / "died", os.getpid()

    def dies(self: Worker, name: str, *rest: Any, **named: Any) -> list[Evaluation]:
        if name == "clinic" and (often or not flag.exists()) and os.getpid() != parent:
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, name, *rest, **named)

    options: dict[str, Any] = {"executor": "processes", "workers": 2, "rounds": 2}
    whole = tiny.run(tmp_path / "whole", **options)
    monkeypatch.setattr(Worker, "evaluate", dies)
    if often:
        with pytest.raises(TrainingError, match="The evaluation of 'clinic' failed, because its worker process died"):
            tiny.run(tmp_path / "r", **options)
    else:
        assert tiny.result(tiny.run(tmp_path / "r", **options)) == tiny.result(whole)
    assert flag.exists()


# -- a run that stops ----------------------------------------------------------------------------------------
class Stays(Method):
    """In the midst of a client, for ever."""

    name = "stays"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, client: LocalClient) -> None:
        (self.folder / str(os.getpid())).touch()
        time.sleep(HANG)


def waiting(folder: Path, count: int) -> list[int]:
    until(lambda: len(list(folder.iterdir())) == count)
    return [int(path.name) for path in folder.iterdir()]


def test_a_request_to_stop_ends_workers_in_the_midst_of_a_client(tmp_path: Path) -> None:
    (folder := tmp_path / "pids").mkdir()

    def request() -> None:
        waiting(folder, 2)
        stop_requested.set()

    thread = threading.Thread(target=request)
    thread.start()
    try:
        with pytest.raises(Stopped):
            tiny.run(tmp_path / "run", Stays(folder), executor="processes", workers=2)
    finally:
        thread.join()
        stop_requested.clear()
    ended(waiting(folder, 2))


def test_stopped_before_its_workers_were_there(tmp_path: Path) -> None:
    """They are forked with the request, and what they answer is no failure of a client."""
    stop_requested.set()
    try:
        with pytest.raises(Stopped):
            tiny.run(tmp_path / "run", rounds=1, executor="processes", workers=2)
    finally:
        stop_requested.clear()


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """Also in the midst of a client. A worker holds copies of its siblings' pipes."""
    (folder := tmp_path / "pids").mkdir()

    def parent() -> None:
        tiny.run(tmp_path / "run", Stays(folder), executor="processes", workers=3)

    pid = forked(parent)
    workers = waiting(folder, 3)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    ended(workers)


# -- a machine that is too small -----------------------------------------------------------------------------
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


def test_a_worker_that_cannot_be_started_is_a_sentence_and_the_others_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, count = os.fork, 0

    def fork() -> int:
        nonlocal count
        count += 1
        if count == 3:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return plain()

    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(ShortageError, match=r"The memory of this machine does not suffice.*fewer --workers"):
        tiny.run(tmp_path / "r", executor="processes", workers=3)
    until(lambda: not multiprocessing.active_children())
