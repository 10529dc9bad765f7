"""Who trains at a moment, and how long each client of a round took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fedkeel
from fedkeel.engine.executors.executor import Attendance
from fedkeel.runs.timing import read_timing, seconds_of
from tests import tiny
from tests.deploy.loop import over_network

NAMES = {"ward", "clinic", "hospital"}


class Seeing(tiny.Notes):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[str]] = []

    def training(self, clients: Sequence[str]) -> None:
        self.seen.append([*clients])


def check(run: fedkeel.Run, seen: Seeing) -> None:
    """All of them trained, and in the end of each round nobody does."""
    times = read_timing(run.directory)
    assert [line["clients"].keys() for line in times] == [NAMES] * len(times)
    for line in times:
        assert all(seconds > 0 for seconds in line["clients"].values())
        assert seconds_of(line) == pytest.approx(line["train"] + line["aggregate"] + line["evaluate"])
    assert {name for names in seen.seen for name in names} == NAMES
    assert seen.seen[-1] == []


@pytest.mark.parametrize("options", [{"executor": "serial"}, {"executor": "processes", "workers": 2}])
def test_of_each_client_that_trained_there_are_seconds(tmp_path: Path, options: dict[str, Any]) -> None:
    seen = Seeing()
    check(tiny.run(tmp_path / "run", rounds=2, observer=seen, **options), seen)


def test_over_a_network_too(tmp_path: Path) -> None:
    seen = Seeing()
    check(over_network(tmp_path, rounds=2, observer=seen), seen)


def test_one_that_does_something_else_has_no_seconds() -> None:
    attendance, told = Attendance(), list[Sequence[str]]()
    attendance.tell = told.append
    attendance.begin("a", "b")
    attendance.end("c")
    attendance.end("b")
    assert told == [["a", "b"], ["a"]]
    assert attendance.take().keys() == {"b"}
    assert attendance.take() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_side_by_side_on_a_gpu_all_train_and_none_has_seconds_of_its_own(tmp_path: Path) -> None:
    seen = Seeing()
    run = tiny.run(tmp_path / "run", rounds=2, observer=seen, executor="cuda", device="cuda")
    assert [line["clients"] for line in read_timing(run.directory)] == [{}, {}]
    assert [set(names) for names in seen.seen] == [NAMES, set()] * 2
