from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fedkeel.core.client import LocalClient
from fedkeel.core.messages import Update
from fedkeel.core.method import Method
from fedkeel.core.server import Server
from fedkeel.engine.executors.processes import ProcessesExecutor
from fedkeel.runs.run import Run
from fedkeel.stopping import Stopped, stop_requested
from tests import tiny
from tests.engine.executors.test_serial import METHODS
from tests.processes import ended


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


def test_images_are_shared_and_workers_leave(executor: ProcessesExecutor) -> None:
    processes = [seat.child.process for seat in executor._seats]
    assert len({p.pid for p in processes}) == 2
    assert [u.client for u in executor.train(["clinic", "ward"], tiny.broadcast(executor.worker))] == ["clinic", "ward"]
    assert set(executor.memory) == {"clinic", "ward"}
    executor.close()
    assert not any(p.is_alive() for p in processes)


def test_an_idle_worker_that_died_is_noticed_and_replaced(executor: ProcessesExecutor) -> None:
    for seat in executor._seats:
        assert seat.child.process.pid is not None
        os.kill(seat.child.process.pid, signal.SIGKILL)
        seat.child.process.join()
    updates = list(executor.train(["ward", "clinic"], tiny.broadcast(executor.worker)))
    assert [type(u).__name__ for u in updates] == ["Update", "Update"]


def test_a_round_that_was_given_up_does_not_reach_into_the_next(executor: ProcessesExecutor) -> None:
    first, second = tiny.broadcast(executor.worker), tiny.broadcast(executor.worker, round=1)
    started = executor.train(["hospital", "ward", "clinic"], first)
    next(started)
    started.close()  # type: ignore[attr-defined]
    updates = list(executor.train(["ward", "clinic"], second))
    assert [(u.client, u.round) for u in updates if isinstance(u, Update)] == [("ward", 1), ("clinic", 1)]


def test_an_update_has_the_same_bits_as_one_that_never_left_the_process(executor: ProcessesExecutor) -> None:
    message = tiny.broadcast(executor.worker)
    update = next(executor.train(["hospital"], message))
    assert isinstance(update, Update)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected, memory = executor.worker.train("hospital", message, {})
    torch.set_num_threads(threads)
    assert (update.samples, update.round, update.metrics) == (21, 0, expected.metrics)
    kept = executor.memory.of("hospital")
    for got, wanted in (
        (update.weights, expected.weights),
        (update.statistics, expected.statistics),
        (kept, memory),
    ):
        assert list(got) == list(wanted)
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert memory


class Scribbles(Method):
    """Writes into what the server sent, which no method should."""

    name = "scribbles"

    def start(self, client: LocalClient) -> None:
        for tensor in client.broadcast.weights.values():
            tensor.fill_(7.0)


def test_what_a_client_does_to_its_broadcast_stays_with_it() -> None:
    made = tiny.setup(Scribbles(), executor="processes", workers=2).executor()
    assert isinstance(made, ProcessesExecutor)
    message = tiny.broadcast(made.worker)
    before = {name: tensor.clone() for name, tensor in message.weights.items()}
    list(made.train(["ward", "clinic"], message))
    assert all(torch.equal(message.weights[name], tensor) for name, tensor in before.items())
    made.close()


class Grows(Method):
    """Sends extras that are larger in every round, past whatever was reserved at first."""

    name = "grows"

    def finish(self, client: LocalClient) -> dict[str, torch.Tensor]:
        return {"sum": torch.full((1000 * 4**client.round,), float(sum(t.sum() for t in client.extras.values())))}

    def extras(self, server: Server, updates: Sequence[Update]) -> dict[str, torch.Tensor]:
        return {"all": torch.cat([update.extras["sum"] + 1 for update in updates])}


@pytest.mark.slow
def test_messages_may_grow_from_round_to_round(tmp_path: Path) -> None:
    serial = tiny.run(tmp_path / "s", Grows(), rounds=4)
    parallel = tiny.run(tmp_path / "p", Grows(), rounds=4, executor="processes", workers=2)
    up = [[record["bytes_up"] for record in run.records("round")] for run in (serial, parallel)]
    assert up[0] == up[1]
    assert up[0][3] - up[0][2] == 3 * 4 * 1000 * (64 - 16)


def segments() -> set[str]:
    """Shared memory that has a name, which somebody would have to clean up; a container may have no place for it."""
    return {path.name for path in Path("/dev/shm").glob("*")}


def test_no_shared_memory_is_left_behind_even_after_a_kill() -> None:
    before = segments()
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        made = tiny.setup(executor="processes", workers=2).executor()
        list(made.train(["ward", "clinic"], tiny.broadcast(made.worker)))  # type: ignore[attr-defined]
        os.write(writing, b"done")
        signal.pause()
    assert os.read(reading, 4) == b"done"
    during = segments()
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert not {name for name in during | segments() if name not in before and "fedkeel" in name}


def test_workers_are_quiet(executor: ProcessesExecutor, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        list(executor.train(["ward"], tiny.broadcast(executor.worker)))
    assert not caplog.records


def test_workers_end_when_their_parent_is_killed() -> None:
    """The parent is forked, starts three workers, and is killed: a worker holds copies of its siblings' pipes."""
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        made = tiny.setup(executor="processes", workers=3).executor()
        assert isinstance(made, ProcessesExecutor)
        os.write(writing, " ".join(str(seat.child.process.pid) for seat in made._seats).encode())
        signal.pause()
    workers = [int(pid) for pid in os.read(reading, 100).split()]
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    ended(workers)


def test_stopped_before_its_workers_were_there(tmp_path: Path) -> None:
    """They are forked with the request, and what they answer is no failure of a client."""
    stop_requested.set()
    try:
        with pytest.raises(Stopped):
            tiny.run(tmp_path / "run", rounds=1, executor="processes", workers=2)
    finally:
        stop_requested.clear()
