"""Runs side by side on one cluster."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedkeel.config import Config
from fedkeel.engine.executors.ray.cluster import ADDRESS, SHARE
from fedkeel.experiments import jobs
from fedkeel.experiments.comparison import choose_jobs, compare
from fedkeel.experiments.jobs import Job, beside_others
from tests.engine.executors.ray.pretend import pretend
from tests.experiments.made_up import TINY, Watching, finish
from tests.processes import children, needs_ray, until

ON_RAY: dict[str, Any] = {**TINY, "executor": "ray"}


def test_there_are_as_many_jobs_as_the_cluster_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ["alpha", "beta", "gamma"])
    configs = [Config(**TINY, executor="serial"), Config(**ON_RAY, ray_address="auto")]
    assert choose_jobs(None, configs) == 3
    assert choose_jobs(2, configs) == 2


def test_beside_others_it_stays_on_ray() -> None:
    assert beside_others(Config(**ON_RAY)).executor == "ray"
    assert beside_others(Config(**TINY, executor="processes")).executor == "serial"


def test_one_after_another_they_share_one_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster is not started for each of them."""
    world = pretend(monkeypatch)
    told: list[tuple[str | None, str | None]] = []

    def execute(job: Job, _: object) -> None:
        told.append((os.environ.get(ADDRESS), os.environ.get(SHARE)))
        finish(job.directory, job.config, {"scan": 0.5})

    context = world.get_runtime_context()
    context.gcs_address = "10.0.0.5:6379"
    monkeypatch.setattr(world, "get_runtime_context", lambda: context)
    monkeypatch.setattr(jobs, "execute", execute)
    compare(["fedavg", "gn"], seeds=1, directory=tmp_path, jobs=1, observer=Watching(), **ON_RAY)
    assert told == [("10.0.0.5:6379", None)] * 2
    assert ADDRESS not in os.environ


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
    found = compare(["fedavg", "gn"], **given, ray_cores=1, directory=tmp_path / "ray", observer=watching, **ON_RAY)
    assert watching.problems == {"fedavg seed 0": "", "gn seed 0": ""}
    until(lambda: of_ray() <= before)
    expected = compare(["fedavg", "gn"], **given, directory=tmp_path / "serial", executor="serial", **TINY)
    for row, other in zip(found.rows(), expected.rows(), strict=True):
        assert row["method"] == other["method"]
        assert row["traffic_per_round"] == other["traffic_per_round"]
        for domain, score in other["domains"].items():
            assert row["domains"][domain]["mean"] == pytest.approx(score["mean"], abs=0.03)  # a sample or two of 90
