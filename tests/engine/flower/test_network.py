"""Sites that hang, are cut off, or lie, as real processes: the others go on, and the log says who and why."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedkeel.run import Run
from tests.engine.flower.real import Loopback, Networks, draw_images, has_namespaces

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed"),
]
SITES = ("north", "south", "west")


@pytest.fixture
def loopback(tmp_path: Path) -> Iterator[Loopback]:
    draw_images(tmp_path / "images")
    with Loopback(tmp_path) as processes:
        processes.certificates(*SITES)
        yield processes


def trained(run: Run, site: str) -> list[int]:
    return [record["round"] for record in run.records("client") if record["client"] == site]


def missed(run: Run, site: str) -> dict[int, str]:
    return {record["round"]: record["reason"] for record in run.records("dropped") if record["client"] == site}


def assert_went_through_it(loopback: Loopback, site: str, rounds: int) -> None:
    """It took part, missed some rounds for a reason that the log tells, and took part again; the others in all."""
    assert loopback.finish() == 0, loopback.log("server")
    run = Run(loopback.place / "run")
    reasons = missed(run, site)
    assert reasons
    assert set(reasons.values()) <= {"it did not reply within 15 s", "it is not connected"}
    for round, reason in reasons.items():
        assert f"Round {round}: the update of '{site}' is dropped, {reason}." in loopback.log("server")
    assert trained(run, site)[0] == 0
    assert trained(run, site)[-1] == rounds - 1
    for other in SITES:
        if other != site:
            assert trained(run, other) == list(range(rounds))


def go_on(loopback: Loopback, rounds: int) -> None:
    """Enough rounds, and a start."""
    for site in SITES:
        loopback.site(site)
    loopback.server("run", method="scaffold", rounds=rounds, round_timeout=15.0)
    loopback.until(loopback.checkpointed("run", 0))


def test_a_site_that_hangs_is_missed_and_takes_part_again_when_it_wakes(loopback: Loopback) -> None:
    go_on(loopback, rounds=8)
    loopback.freeze("south")
    loopback.until(lambda: bool(missed(Run(loopback.place / "run"), "south")))
    loopback.thaw("south")
    assert_went_through_it(loopback, "south", rounds=8)


@pytest.mark.skipif(not has_namespaces(), reason="there are no network namespaces here, or they are not ours to make")
def test_a_site_whose_cable_is_pulled_is_missed_and_takes_part_again_when_it_is_back(tmp_path: Path) -> None:
    draw_images(tmp_path / "images")
    with Networks(*SITES) as networks, Loopback(tmp_path, networks) as loopback:
        loopback.certificates(*SITES)
        go_on(loopback, rounds=12)
        networks.cut("south")
        loopback.until(lambda: bool(missed(Run(loopback.place / "run"), "south")))
        networks.mend("south")
        assert_went_through_it(loopback, "south", rounds=12)


def test_whatever_a_site_sends_the_others_go_on(loopback: Loopback) -> None:
    for site in SITES:
        loopback.site(site, module="tests.engine.flower.liar" if site == "south" else "fedkeel")
    loopback.server("run", method="fedavg", rounds=8)
    assert loopback.finish() == 0, loopback.log("server")
    run = Run(loopback.place / "run")
    reasons = missed(run, "south")
    assert list(reasons) == [1, 2, 3, 4, 5, 6], loopback.log("south")
    assert "bytes" in reasons[1]
    assert "it cannot be read" in reasons[2]
    assert "it cannot be read" in reasons[3]
    assert "its reply cannot be read" in reasons[4]
    assert reasons[5] == "it is of round 0, not of round 5"
    assert "not finite" in reasons[6]
    assert trained(run, "south") == [0, 7]
    assert trained(run, "north") == trained(run, "west") == list(range(8))
