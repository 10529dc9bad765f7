"""The benchmark of what methods cost: what it counts, and that no method is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fedkeel.methods import METHODS

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import methods as benchmark


def test_every_method_was_measured() -> None:
    assert sorted(json.loads(benchmark.OUT.read_text())["methods"]) == sorted(METHODS.names())


@pytest.mark.slow
def test_what_travels_is_counted_against_fedavg(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"rounds": 3, "evaluate_every": 3, "subsample": 10, "model": "simple_cnn(width=4)"}
    monkeypatch.setattr(benchmark, "SETTING", {**benchmark.SETTING, **small})
    found = {name: benchmark.measure(name, turns=1) for name in ("standalone", "hbn")}
    assert found["standalone"]["traffic"] == 0
    assert found["hbn"]["traffic"] > 1
    assert [cost["exchanges"] for cost in found.values()] == [1, 1.33]  # one of three rounds was evaluated
    assert all(0 < cost["lowest"] <= cost["time"] <= cost["highest"] for cost in found.values())


@pytest.mark.parametrize(("words", "told"), [(["fedavgg"], "fedavg"), (["fedavg", "--turns", "0"], "1 or more, not 0")])
def test_what_cannot_be_measured_is_told(words: list[str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["methods.py", *words])
    with pytest.raises(SystemExit, match=told):
        benchmark.main()
