"""One job after another: when the next one begins, and who has no part in it any more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="nvflare is not installed")

from fedkeel.config import Config
from fedkeel.deploy import jobs
from fedkeel.deploy.jobs import Federation
from fedkeel.deploy.processes import Tail

SITES = ("north", "south", "west")
WORDS = "FederatedServer - INFO - Failing job 5d3 due to reported failure from west: infrastructure error\n"


class Console:
    """NVFlare's answers: when each site was heard of, who runs no job, and after how many questions the job is over."""

    def __init__(self, heard: dict[str, float] | None = None, idle: Sequence[str] = (), ends: int = 1) -> None:
        self.heard, self.nothing_to_do, self.ends = heard or dict.fromkeys(SITES, 1.0), idle, ends
        self.asked = 0

    def last_heard(self) -> dict[str, float]:
        return self.heard

    def idle(self, names: Sequence[str]) -> list[str]:
        return [name for name in self.nothing_to_do if name in names]

    def submit(self, _: Path) -> str:
        return "a job"

    def has_ended(self, _: str) -> bool:
        self.asked += 1
        return self.asked % self.ends == 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody waits: a pause is added to the time."""
    now = [0.0]
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(jobs, "pause", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    (tmp_path / "kits/server/local").mkdir(parents=True)
    return Federation(Config(), tmp_path / "run", tmp_path / "kits", SITES, 0.0, lambda _: None)


@pytest.mark.parametrize(
    ("console", "in_round", "settled", "said"),
    [
        (Console(), False, True, ""),
        (Console(idle=["south"]), False, True, "south came"),  # it lost its part
        (Console(idle=["south"]), False, False, ""),  # it is still starting
        (Console(idle=["west"]), False, True, ""),  # it is new: the round ends first
        (Console(idle=["west"]), True, True, "west came"),
        (Console(idle=["north", "south"]), True, True, ""),  # the job is ending, nobody came
        (Console({"north": 1.0, "south": 99.0}), False, True, "Nothing was heard of south for 60 s"),
        (Console({"north": 99.0, "south": 99.0}), False, True, ""),  # it is the server that was cut off
    ],
)
def test_the_next_job_begins_when_a_site_has_gone_or_is_back(
    federation: Federation, console: Any, in_round: bool, settled: bool, said: str
) -> None:
    assert federation._outdated(console, ["north", "south"], in_round, settled) == said


@pytest.mark.usefixtures("clock")
def test_a_site_that_ended_three_jobs_in_a_row_is_left_out_until_a_round_is_done(
    federation: Federation, tmp_path: Path
) -> None:
    console: Any = Console()
    log = Tail(tmp_path / "log.txt")
    for number in range(1, 4):
        assert federation._here(console) == [*SITES]
        console.submit = lambda _: (tmp_path / "log.txt").open("a").write(WORDS)
        federation._one_job(console, tmp_path / "kits/server", Tail(tmp_path / "none"), log)
        assert federation._failed["west"] == number
    assert federation._here(console) == ["north", "south"]
    (tmp_path / "run").mkdir()
    console.submit = lambda _: (tmp_path / "run/metrics.jsonl").write_text("a round\n")
    federation._one_job(console, tmp_path / "kits/server", Tail(tmp_path / "none"), log)
    assert federation._here(console) == [*SITES]


def test_nvflare_is_asked_seldom_since_it_keeps_something_of_every_question(
    federation: Federation, tmp_path: Path, clock: list[float]
) -> None:
    console: Any = Console(ends=6)
    federation._one_job(console, tmp_path / "kits/server", Tail(tmp_path / "none"), Tail(tmp_path / "none"))
    assert clock[0] > 6 * jobs.AROUND
