"""The best round by the validation; and a run whose validation does not get better stops, is finished, and says so."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import fedkeel
from fedkeel.cli import main
from fedkeel.engine.best import Best
from fedkeel.errors import FedkeelError
from fedkeel.stopping import Stopped
from tests import tiny


def stops_after(values: list[float], patience: int, min_delta: float = 0.0) -> int | None:
    """The number of evaluations after which it is over."""
    best = Best(fedkeel.Config(patience=patience, min_delta=min_delta))
    for round, value in enumerate(values):
        best.see(round, value)
        best.count()
        if best.is_over:
            return round + 1
    return None


def test_it_is_over_after_so_many_without_a_better_one() -> None:
    assert stops_after([0.1, 0.3, 0.2, 0.3, 0.4, 0.4, 0.1, 0.3], 3) == 8
    assert stops_after([0.1, 0.3, 0.2, 0.3, 0.4, 0.4, 0.1, 0.3], 2) == 4
    assert stops_after([0.0, 0.0, 0.0], 2) == 3
    assert stops_after([0.5] * 100, 0) is None
    assert stops_after([r / 10 for r in range(9)], 1) is None
    assert stops_after([-0.5, -0.2, -0.3, -0.4], 2) == 4  # losses, turned round


def test_what_is_hardly_better_does_not_count_but_adds_up() -> None:
    assert stops_after([0.1, 0.11, 0.12, 0.13], 3, min_delta=0.05) == 4
    assert stops_after([0.1, 0.12, 0.14, 0.16, 0.18, 0.2], 3, min_delta=0.05) is None
    assert stops_after([0.1, 0.15, 0.15], 2, min_delta=0.05) == 3  # by as much is not by more


def test_where_nobody_has_validated_yet_nothing_is_over() -> None:
    best = Best(fedkeel.Config(patience=1))
    for _ in range(3):
        assert not best.see(0, -math.inf)
        best.count()
    assert not best.is_over
    assert best.numbers() == {}


def test_it_comes_back_from_a_checkpoint_as_it_was() -> None:
    best = Best(fedkeel.Config(result="best-validation", patience=3))
    best.see(4, 0.5)
    best.count()
    best.model, best.local = {"w": torch.ones(2)}, {"a/b": {"head.bias": torch.zeros(1)}}
    again = Best(best.config)
    again.restore(best.numbers(), best.groups())
    assert again == best
    assert again.is_result


# No accuracy is better than another by more than 1.
NEVER: dict[str, Any] = {"rounds": 9, "patience": 3, "min_delta": 1.0}


def test_a_run_stops_is_finished_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = tiny.Notes()
    run = tiny.run(tmp_path / "run", observer=seen, **NEVER)
    assert run.finished
    assert seen.rounds == [0, 1, 2, 3]
    assert run.summary is not None
    assert (run.summary["rounds"], run.summary["planned_rounds"], run.summary["round"]) == (4, 9, 3)
    sentence = "Stopped after round 4 of 9: the validation was not better in 3 evaluations."
    assert seen.notes[-1] == sentence
    assert main(["show", str(run.directory)]) == 0
    assert sentence in capsys.readouterr().out
    again = tiny.Notes()
    assert tiny.resume(run.directory, observer=again).finished
    assert again.rounds == []
    assert "is finished" in again.notes[-1]


def test_its_model_and_metrics_are_those_of_a_run_of_so_many_rounds(tmp_path: Path) -> None:
    stopped, short = (
        tiny.run(tmp_path / "stopped", **NEVER),
        tiny.run(tmp_path / "short", rounds=4),
    )
    assert tiny.result(stopped) == tiny.result(short)


@pytest.mark.parametrize("rule", ["last", "mean-last-10", "best-validation"])
def test_every_rule_has_a_result(rule: str, tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", result=rule, **{**NEVER, "rounds": 30})
    scores = [entry["average"] for entry in run.scores()]
    assert len(scores) == 4
    validation = [entry["average"] for entry in run.scores("validation")]
    best = scores[validation.index(max(validation))]
    wanted = {"last": scores[-1], "mean-last-10": sum(scores) / 4, "best-validation": best}
    assert run.accuracy == pytest.approx(wanted[rule])


def test_only_evaluations_count(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", evaluate_every=2, **{**NEVER, "rounds": 30})
    assert run.rounds_done == 8


@pytest.mark.parametrize(
    ("method", "killed"),
    [("fedavg", 1), ("fedavg", 3), *(pytest.param("hbn", k, marks=pytest.mark.slow) for k in (2, 3))],
)
def test_killed_and_resumed_it_stops_at_the_same_round(method: str, killed: int, tmp_path: Path) -> None:
    def stop(round: int) -> None:
        if round == killed:
            raise Stopped

    whole = tiny.run(tmp_path / "whole", method, **NEVER)
    with pytest.raises(Stopped):
        tiny.run(tmp_path / "killed", method, observer=tiny.Notes(stop), **NEVER)
    resumed = tiny.resume(tmp_path / "killed")
    assert tiny.result(resumed) == tiny.result(whole)
    assert resumed.rounds_done == 4


def test_without_validation_samples_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        FedkeelError, match=r"'patience' is 3, but no client of .* has validation samples: leave it out"
    ):
        tiny.run(tmp_path / "run", on=tiny.federation(validation=0), patience=3)


@pytest.mark.parametrize("options", [{"patience": -1}, {"patience": 1.5}, {"min_delta": -0.1}, {"min_delta": math.nan}])
def test_a_bad_number_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(FedkeelError):
        fedkeel.Config(**options)
