from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedkeel.config import Config
from fedkeel.engine import threads
from fedkeel.engine.executors.serial import SerialExecutor
from fedkeel.engine.setup import Setup
from fedkeel.engine.threads import busiest, typical_steps
from tests import tiny

MANY = {f"c{i}": 4 * (i + 1) for i in range(10)}  # 1, 2, ..., 10 steps of batch 4
EQUAL = {f"c{i}": 20 for i in range(10)}


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "available_cores", lambda: 2)
    monkeypatch.setattr("fedkeel.engine.executors.processes.available_cores", lambda: 2)
    yield
    torch.set_num_threads(before)


def made(notes: list[str] | None = None, **options: object) -> Setup:
    setup = tiny.setup(on=tiny.federation(EQUAL), **{"executor": "auto", "rounds": 50, **options})
    return setup.with_threads((notes if notes is not None else []).append)


def of(monkeypatch: pytest.MonkeyPatch, operations: float) -> None:
    """A step of so many operations, whatever the network."""
    monkeypatch.setattr(threads, "step_operations", lambda _: operations)


def test_a_small_step_does_not_fill_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    of(monkeypatch, 1e6)
    notes: list[str] = []
    assert (made(notes).config.threads, made().executor_name) == (1, "processes")
    assert notes == []


def test_a_large_step_fills_them_and_one_of_three_clients_would_be_alone_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of(monkeypatch, 5e10)
    notes: list[str] = []
    chosen = made(notes, participation=0.3)
    assert (chosen.config.threads, chosen.executor_name) == (2, "serial")
    assert notes == ["A step of 50.0 GFLOP fills 2 cores: one client after another, with all threads."]
    assert made(participation=0.2).config.threads == 1  # two clients, two cores


@pytest.mark.slow
def test_equal_runs_choose_alike() -> None:
    assert len({made(participation=0.3).config.threads for _ in range(5)}) == 1


def test_the_answer_may_be_clear_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    of(monkeypatch, 5e10)
    assert made(workers=2, participation=0.3).config.threads == 1  # the user has said it
    assert made(threads=2).config.threads == 2
    of(monkeypatch, 1.0)
    assert made(participation=0.1).config.threads == 2  # one client a round has nobody beside it
    torch.set_num_threads(1)
    assert made().config.threads == 1


def test_operations_are_those_that_pytorch_counts_in_a_batch() -> None:
    worker = tiny.setup(on=tiny.federation(MANY), batch_size=4).worker
    before = {name: tensor.clone() for name, tensor in worker.model.state_dict().items()}
    with FlopCounterMode(display=False) as counter:
        copy.deepcopy(worker.model)(torch.zeros(4, *worker.federation.image_shape))
    assert threads.step_operations(worker) == 3 * counter.get_total_flops() > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in worker.model.state_dict().items())


def test_a_network_that_cannot_be_counted_trains_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "step_operations", lambda _: None)
    assert made(participation=0.3).config.threads == 1


@pytest.mark.slow
@pytest.mark.parametrize("operations", [1.0, 5e10])
def test_the_choice_is_stored_and_a_resumed_run_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operations: float
) -> None:
    of(monkeypatch, operations)
    chosen = 2 if operations > 1 else 1
    on, options = tiny.federation(EQUAL), {"rounds": 4, "participation": 0.3, "executor": "processes"}
    whole = tiny.run(tmp_path / "whole", on=on, **options)
    assert whole.config.threads == chosen

    def stop(round: int) -> None:
        if round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.run(tmp_path / "r", on=on, **options, observer=tiny.Notes(stop))
    of(monkeypatch, 5e10 if operations == 1 else 1.0)  # by now the other way would be chosen
    run = tiny.resume(tmp_path / "r", on=on)
    assert run.config.threads == chosen
    assert run.summary is not None
    assert run.summary["executor"] == ("serial" if chosen == 2 else "processes")
    assert tiny.result(run) == tiny.result(whole)


def test_the_threads_of_a_run_are_its_own() -> None:
    executor = tiny.setup(threads=1).executor()
    assert isinstance(executor, SerialExecutor)
    assert torch.get_num_threads() == 1
    executor.close()
    assert torch.get_num_threads() == 2


def test_the_busiest_worker_has_at_least_its_share_and_the_longest_client() -> None:
    assert busiest([5, 4, 3, 3, 3], 2) == 10  # 5 + 3 + ... against 4 + 3 + 3, whoever is free takes the next
    assert busiest([100, 1, 1], 2) == 100
    assert busiest([1, 1, 1], 2) == 2


def test_typical_clients_are_all_of_them_or_spread_over_their_sizes() -> None:
    worker = tiny.setup(on=tiny.federation(MANY)).worker
    assert typical_steps(worker, 10) == list(range(1, 11))
    assert typical_steps(worker, 5) == [2, 4, 6, 8, 10]
    assert typical_steps(worker, 1) == [6]
    worker.config = Config(batch_size=4, local_epochs=3)
    assert typical_steps(worker, 10) == list(range(3, 31, 3))
