"""Checkpoints are written every round where that is quick, and else at a share of the time."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedkeel.engine.checkpointing import SHARE, CheckpointSchedule
from fedkeel.runs.store import Store
from tests import tiny


class Clock:
    """A run whose rounds and checkpoints take as long as is said."""

    def __init__(self, every: int, round_s: float, checkpoint_s: float) -> None:
        self.now, self.round_s, self.checkpoint_s = 100.0, round_s, checkpoint_s
        self.schedule = CheckpointSchedule(every, lambda: self.now)

    def rounds_written(self, rounds: int) -> list[int]:
        written = []
        for number in range(rounds):
            self.now += self.round_s
            if self.schedule.is_due(number):
                self.schedule.write(self._write)
                written.append(number)
        return written

    def _write(self) -> None:
        self.now += self.checkpoint_s


def test_a_quick_checkpoint_is_written_every_round() -> None:
    assert Clock(0, round_s=0.01, checkpoint_s=0.2).rounds_written(5) == [0, 1, 2, 3, 4]


def test_a_slow_one_takes_its_share_of_the_time_and_no_more() -> None:
    clock = Clock(0, round_s=1.0, checkpoint_s=2.0)
    written = clock.rounds_written(1000)
    assert written[0] == 0  # there is something to resume from as early as possible
    share = len(written) * 2.0 / (clock.now - 100.0)
    assert 0.8 * SHARE < share <= SHARE


def test_long_rounds_are_always_worth_one() -> None:
    assert Clock(0, round_s=60.0, checkpoint_s=2.0).rounds_written(4) == [0, 1, 2, 3]


def test_a_given_number_of_rounds_is_kept_to() -> None:
    assert Clock(3, round_s=0.1, checkpoint_s=50.0).rounds_written(7) == [2, 5]


def test_a_run_with_slow_checkpoints_writes_the_first_and_the_last_round_and_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny.run(tmp_path / "whole", rounds=4)
    monkeypatch.setattr("fedkeel.engine.checkpointing.QUICK", 0.0)
    monkeypatch.setattr("fedkeel.engine.checkpointing.SHARE", 1e-9)
    written: list[int] = []
    plain = Store.checkpoint

    def remembered(self: Store, checkpoint: object) -> None:
        written.append(checkpoint.round)  # type: ignore[attr-defined]
        plain(self, checkpoint)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "checkpoint", remembered)
    paced = tiny.run(tmp_path / "paced", rounds=4, checkpoint_every=0)
    assert written == [0, 3]
    for file in ("metrics.jsonl", "model.safetensors"):
        assert (paced.directory / file).read_bytes() == (whole.directory / file).read_bytes()
