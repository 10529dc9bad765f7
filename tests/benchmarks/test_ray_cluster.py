"""What the figures of `ray_cluster.py` are made of, on made-up answers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from ray_cluster import Figure, began, moved, over


def test_the_overhead_is_what_the_cores_do_not_spend_on_training() -> None:
    assert over(round=0.5, trained=0.6, cores=2) == pytest.approx(0.2)
    assert over(round=0.3, trained=0.6, cores=2) == 0


def test_a_round_began_before_it_was_written_by_what_its_phases_took() -> None:
    line = {"round": 0, "train": 2.0, "aggregate": 0.5, "evaluate": 1.5, "clients": {"c0": 9.0}}
    assert began(100.0, line) == 96.0


def test_bytes_are_told_in_models_of_one_round() -> None:
    assert moved({"model": 1000, "loopback": 12_000}, rounds=3) == 4


def test_a_figure_without_an_aim_has_no_verdict() -> None:
    assert Figure("work", "1 s", "2 s", True).line() == "| work | 1 s | 2 s | yes |"
    assert Figure("work", "3 s", "2 s", False).line() == "| work | 3 s | 2 s | no |"
    assert Figure("work", "3 s", "", False).line() == "| work | 3 s |  |  |"
