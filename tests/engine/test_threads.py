from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedkeel.config import Config
from fedkeel.engine import threads
from fedkeel.engine.serial import SerialExecutor
from fedkeel.engine.setup import Setup
from fedkeel.engine.threads import busiest, typical_steps
from tests import tiny

MANY = {f"c{i}": 4 * (i + 1) for i in range(10)}  # 1, 2, ..., 10 steps of batch 4


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "available_cores", lambda: 2)
    monkeypatch.setattr("fedkeel.engine.setup.available_cores", lambda: 2)
    monkeypatch.setattr(threads, "WORTH_TRYING", 1)
    monkeypatch.setattr(threads, "SECONDS", 0.0)
    yield
    torch.set_num_threads(before)


def timed(monkeypatch: pytest.MonkeyPatch, side_by_side: float, alone: float) -> None:
    """Seconds of a step each way, in place of a trial."""
    monkeypatch.setattr(threads, "_side_by_side", lambda *_: side_by_side)
    monkeypatch.setattr(threads, "_alone", lambda *_: alone)


def made(notes: list[str] | None = None, **options: object) -> Setup:
    setup = tiny.setup(on=tiny.federation(MANY), **{"executor": "auto", "rounds": 50, **options})
    return setup.with_threads((notes if notes is not None else []).append)


def test_the_faster_way_is_taken_and_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    # 55 steps a round, of which the busier of two processes has 28.
    notes: list[str] = []
    timed(monkeypatch, side_by_side=0.010, alone=0.004)  # 0.28 s against 0.22 s
    assert (made(notes).config.threads, made().executor_name) == (2, "serial")
    assert notes == ["A round takes about 0.28 s in 2 processes and 0.22 s with 2 threads: one client after another."]
    timed(monkeypatch, side_by_side=0.010, alone=0.006)  # 0.28 s against 0.33 s
    assert (made().config.threads, made().executor_name) == (1, "processes")


def test_threads_that_are_hardly_faster_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, side_by_side=0.0100, alone=0.0050)  # 0.280 s against 0.275 s
    assert made().config.threads == 1


def test_nothing_is_tried_where_the_answer_is_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> float:
        raise AssertionError("tried")

    monkeypatch.setattr(threads, "_side_by_side", refused)
    notes: list[str] = []
    assert made(notes, workers=2).config.threads == 1  # the user has said it
    assert made(notes, threads=2).config.threads == 2
    assert made(notes, participation=0.1).config.threads == 2  # one client a round has nobody beside it
    monkeypatch.setattr(threads, "WORTH_TRYING", 10**9)
    assert made(notes).config.threads == 1  # over before a trial pays
    monkeypatch.setattr(threads, "WORTH_TRYING", 1)
    torch.set_num_threads(1)
    assert made(notes).config.threads == 1
    assert notes == []


def test_a_trial_changes_neither_the_model_nor_any_random_state() -> None:
    setup = tiny.setup(on=tiny.federation(MANY), executor="processes", rounds=50)
    before = {name: tensor.clone() for name, tensor in setup.worker.model.state_dict().items()}
    generator = torch.get_rng_state()
    notes: list[str] = []
    setup.with_threads(notes.append)
    assert notes[0].startswith("A round takes about")
    assert torch.equal(torch.get_rng_state(), generator)
    after = setup.worker.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert torch.get_num_threads() == 2


def test_a_step_that_cannot_be_tried_is_left_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> float:
        raise RuntimeError("no memory")

    monkeypatch.setattr(threads, "_side_by_side", broken)
    notes: list[str] = []
    assert made(notes).config.threads == 1
    assert notes == ["Threads were not tried against processes: no memory."]


@pytest.mark.parametrize("alone", [0.001, 1.0])
def test_the_choice_is_stored_and_a_resumed_run_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: float
) -> None:
    timed(monkeypatch, side_by_side=0.1, alone=alone)
    chosen = 2 if alone < 0.1 else 1
    on = tiny.federation(MANY)
    whole = tiny.run(tmp_path / "whole", on=on, rounds=4, executor="processes")
    assert whole.config.threads == chosen

    def stop(round: int) -> None:
        if round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.run(tmp_path / "r", on=on, rounds=4, executor="processes", observer=tiny.Notes(stop))
    timed(monkeypatch, side_by_side=0.1, alone=0.101 - alone)  # by now the other way is the faster one
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
