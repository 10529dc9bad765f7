"""Runs side by side on one cluster."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedkeel.config import Config
from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import compare
from fedkeel.experiments.jobs import beside_others, choose_jobs
from tests.experiments.made_up import TINY, Watching
from tests.processes import children, needs_ray, until

ON_RAY: dict[str, Any] = {**TINY, "executor": "ray"}


def test_each_run_takes_the_whole_cluster_unless_told_how_much() -> None:
    configs = [Config(**TINY, executor="serial"), Config(**ON_RAY, ray_address="auto")]
    assert choose_jobs(None, configs) == 1
    with pytest.raises(FedkeelError, match="'jobs' is 2, and each run takes the whole Ray cluster: give --ray-actors"):
        choose_jobs(2, configs)
    assert choose_jobs(2, [config.replace(ray_actors=1) for config in configs]) == 2


def test_beside_others_it_stays_on_ray() -> None:
    assert beside_others(Config(**ON_RAY)).executor == "ray"
    assert beside_others(Config(**TINY, executor="processes")).executor == "serial"


def of_ray() -> set[int]:
    """Raylets and the like that this process has started and that are still there."""
    found = set()
    for pid in children(os.getpid()):
        with suppress(FileNotFoundError, ProcessLookupError):
            name = Path(f"/proc/{pid}/cmdline").read_text()
            found |= {pid} if "raylet" in name or "gcs_server" in name else set()
    return found


@pytest.mark.slow
def test_two_at_once_give_the_table_of_serial(tmp_path: Path) -> None:
    needs_ray()
    before = of_ray()
    watching = Watching()
    given: dict[str, Any] = {"seeds": 1, "jobs": 2, "threads": 1}
    found = compare(["fedavg", "gn"], **given, ray_actors=1, directory=tmp_path / "ray", observer=watching, **ON_RAY)
    assert watching.problems == {"fedavg seed 0": "", "gn seed 0": ""}
    until(lambda: of_ray() <= before)
    expected = compare(["fedavg", "gn"], **given, directory=tmp_path / "serial", executor="serial", **TINY)
    for row, other in zip(found.rows(), expected.rows(), strict=True):
        assert row["method"] == other["method"]
        assert row["traffic_per_round"] == other["traffic_per_round"]
        for domain, score in other["domains"].items():
            assert row["domains"][domain]["mean"] == pytest.approx(score["mean"], abs=0.03)  # a sample or two of 90
